<?php

// The publisher in its own language and library (php-amqplib of Debian): declares exchange and queue (without
// arguments), and publishes so many lists of so many registrations, persistent, without confirms.
// publisher.php HOST PORT USER PASSWORD EXCHANGE KEY QUEUE LISTS REGISTRATIONS

require_once '/usr/share/php/PhpAmqpLib/autoload.php';

use PhpAmqpLib\Connection\AMQPStreamConnection;
use PhpAmqpLib\Message\AMQPMessage;

[, $host, $port, $user, $password, $exchange, $key, $queue, $lists, $registrations] = $argv;

$connection = new AMQPStreamConnection($host, (int) $port, $user, $password);
$channel = $connection->channel();
$channel->exchange_declare($exchange, 'direct', false, true, false);
$channel->queue_declare($queue, false, true, false, false);
$channel->queue_bind($queue, $exchange, $key);

for ($list = 1; $list <= $lists; $list++) {
    $items = [];
    for ($n = 1; $n <= $registrations; $n++) {
        $items[] = [
            'registration' => 1000 * $list + $n,
            'opp_id' => '7301',
            'opp_name' => 'Edital de Criação / Circulação',
            'number' => "on-$n",
            'agent_name' => 'João Exemplo',
            'agent_email' => "p$list.$n@example.com",
        ];
    }
    $message = new AMQPMessage(json_encode($items), ['delivery_mode' => AMQPMessage::DELIVERY_MODE_PERSISTENT]);
    $channel->basic_publish($message, $exchange, $key);
}

$channel->close();
$connection->close();
