"""The publisher in Python: a plain script on pika as its manual shows it.

`publisher.py URL EXCHANGE KEY QUEUE < lists` declares exchange and queue (without arguments) and publishes each line of
stdin, persistent, without confirms. It knows nothing of this project.
"""

import sys

import pika


def main(url: str, exchange: str, routing_key: str, queue: str) -> None:
    """Declare, publish, close."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.exchange_declare(exchange, "direct", durable=True)
    channel.queue_declare(queue, durable=True)
    channel.queue_bind(queue, exchange, routing_key)
    for line in sys.stdin.buffer:
        channel.basic_publish(exchange, routing_key, line.rstrip(b"\n"), pika.BasicProperties(delivery_mode=2))
    connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
