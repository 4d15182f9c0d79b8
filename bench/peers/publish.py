"""Publishes registrations to the peer's queue; runs in the peers' environment and does as it is told on stdin.

A line `[first, stop, size]` publishes these registrations in messages of `size`, waits for the confirms, and answers
`done`.
"""

import asyncio
import json
import sys

import aio_pika

from bench.invented import registration


async def main(url: str, queue: str) -> None:
    """Declare the queue, then serve stdin to its end."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.declare_queue(queue, durable=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            first, stop, size = json.loads(line)
            for at in range(first, stop, size):
                body = json.dumps([registration(n) for n in range(at, min(at + size, stop))]).encode()
                message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                message.content_type = "application/json"
                await channel.default_exchange.publish(message, queue)
            print("done", flush=True)


asyncio.run(main(*sys.argv[1:]))
