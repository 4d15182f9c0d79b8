"""What one POST costs, by HTTP client: the figures behind the choice for the outbox's sender.

    python -m bench.http_clients [POSTS] [IN_FLIGHT] [ROUNDS]

A server in a process of its own answers 201 at once. Each way posts the same 500 bytes over kept connections on
uvloop; the ways take turns, and the medians of their rounds are printed. Needs httpx, httpx-aiohttp and aiohttp.
"""

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

import aiohttp
import httpx
import uvloop
from httpx_aiohttp import AiohttpTransport

from bench.places import HOST, free_port

BODY = b'{"registration": 1, "data": "' + b"x" * 470 + b'"}'
HEADERS = {"Authorization": "Bearer invented", "Content-Type": "application/json"}
REPLY = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"

Post = Callable[[int], Awaitable[int]]
Way = Callable[[str, int], AbstractAsyncContextManager[Post]]


class Answering(asyncio.Protocol):
    """Answers each POST whose head and body have arrived."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._got = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        self._got += data
        while self._got.endswith(b'"}'):
            self._got = b""
            self._transport.write(REPLY)


async def serve(port: int) -> None:
    """Serve until the process is ended."""
    server = await asyncio.get_running_loop().create_server(Answering, HOST, port, backlog=1000)
    await server.serve_forever()


def headers(number: int) -> dict[str, str]:
    """As the sender has them: constant ones and the event's id."""
    return {**HEADERS, "Idempotency-Key": str(number)}


def _limits(flight: int) -> httpx.Limits:
    return httpx.Limits(max_connections=flight, max_keepalive_connections=flight)


async def _by_client(client: httpx.AsyncClient, url: str, number: int) -> int:
    return int((await client.post(url, content=BODY, headers=headers(number))).status_code)


async def _by_transport(transport: httpx.AsyncBaseTransport, url: httpx.URL, number: int) -> int:
    request = httpx.Request("POST", url, headers=headers(number), content=BODY)
    response = await transport.handle_async_request(request)
    try:
        await response.aread()
    finally:
        await response.aclose()
    return int(response.status_code)


@asynccontextmanager
async def httpx_client(url: str, flight: int) -> AsyncIterator[Post]:
    """httpx as people use it."""
    async with httpx.AsyncClient(limits=_limits(flight), timeout=10) as client:
        yield lambda number: _by_client(client, url, number)


@asynccontextmanager
async def httpx_transport(url: str, flight: int) -> AsyncIterator[Post]:
    """httpx's own transport, asked without its client."""
    async with httpx.AsyncHTTPTransport(limits=_limits(flight)) as transport:
        yield lambda number: _by_transport(transport, httpx.URL(url), number)


@asynccontextmanager
async def httpx_aiohttp_client(url: str, flight: int) -> AsyncIterator[Post]:
    """httpx's client on the transport of httpx-aiohttp."""
    async with httpx.AsyncClient(transport=AiohttpTransport(limits=_limits(flight)), timeout=10) as client:
        yield lambda number: _by_client(client, url, number)


@asynccontextmanager
async def httpx_aiohttp_transport(url: str, flight: int) -> AsyncIterator[Post]:
    """The transport of httpx-aiohttp, asked without httpx's client."""
    parsed = httpx.URL(url)
    async with AiohttpTransport(limits=_limits(flight)) as transport:
        yield lambda number: _by_transport(transport, parsed, number)


@asynccontextmanager
async def aiohttp_session(url: str, flight: int) -> AsyncIterator[Post]:
    """aiohttp alone."""
    timeout = aiohttp.ClientTimeout(total=10)
    connector = aiohttp.TCPConnector(limit=flight)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def post(number: int) -> int:
            async with session.post(url, data=BODY, headers=headers(number), allow_redirects=False) as answer:
                await answer.read()
                return answer.status

        yield post


WAYS: dict[str, Way] = {
    "httpx client": httpx_client,
    "httpx transport": httpx_transport,
    "httpx-aiohttp client": httpx_aiohttp_client,
    "httpx-aiohttp transport": httpx_aiohttp_transport,
    "aiohttp": aiohttp_session,
}


async def measure(way: Way, url: str, posts: int, flight: int) -> tuple[float, float]:
    """POSTs per second, and milliseconds of this process's CPU per POST."""
    async with way(url, flight) as post:
        await _all(post, flight * 4, flight)
        begun, cpu = time.perf_counter(), _cpu()
        await _all(post, posts, flight)
        return posts / (time.perf_counter() - begun), (_cpu() - cpu) / posts * 1000


async def _all(post: Post, posts: int, flight: int) -> None:
    numbers = iter(range(posts))

    async def slot() -> None:
        for number in numbers:
            status = await post(number)
            assert status == 201, status

    await asyncio.gather(*(slot() for _ in range(flight)))


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(posts: int = 3000, flight: int = 32, rounds: int = 3) -> None:
    """Let the ways take turns, print a table and one line of JSON."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "bench.http_clients", "--serve", str(port)])
    try:
        time.sleep(1)
        url = f"http://{HOST}:{port}/v1/sync/repayments"
        runs = {
            name: [
                uvloop.run(measure(way, url, posts if "httpx " not in name else posts // 3, flight)) for _ in range(1)
            ]
            for name, way in WAYS.items()
        }
        for _ in range(rounds - 1):
            for name, way in WAYS.items():
                runs[name].append(uvloop.run(measure(way, url, posts if "httpx " not in name else posts // 3, flight)))
    finally:
        server.kill()
        server.wait()
    found = {
        name: [statistics.median(column) for column in zip(*figures, strict=True)] for name, figures in runs.items()
    }
    for name, (rate, cpu) in found.items():
        print(f"{name:24} {rate:8,.0f} POSTs/s {cpu:6.3f} ms of CPU each")
    print(
        json.dumps({name: {"posts_per_s": round(rate), "cpu_ms": round(cpu, 3)} for name, (rate, cpu) in found.items()})
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        uvloop.run(serve(int(sys.argv[2])))
    else:
        main(*map(int, sys.argv[1:]))
