"""The development broker as an operator uses it: its management interface, and streams that are gone after the test."""

import asyncio
import json
import urllib.error
import urllib.request
from base64 import b64encode
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from tests.conftest import Services


class Management:
    """The HTTP interface; every method blocks the calling task only."""

    def __init__(self, services: Services) -> None:
        self._base = f"http://{services.host}:{services.management_port}/api"
        self._login = b64encode(f"{services.user}:{services.password}".encode()).decode()

    async def call(self, method: str, *path: str, body: object = None) -> Any:
        """The decoded answer; None if there is nothing, or nothing of that name."""
        return await asyncio.to_thread(self._call, method, path, body)

    def _call(self, method: str, path: tuple[str, ...], body: object) -> Any:
        url = "/".join([self._base, *(quote(part, safe="") for part in path)])
        request = urllib.request.Request(url, method=method, data=None if body is None else json.dumps(body).encode())
        request.add_header("Authorization", f"Basic {self._login}")
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None

    async def close_connections(self, label: str) -> int:
        """Close by force every stream connection whose name holds `label`. Returns how many."""
        found = [
            connection["name"]
            for connection in await self.call("GET", "connections")
            if label in connection.get("client_properties", {}).get("connection_name", "")
        ]
        for name in found:
            await self.call("DELETE", "connections", name)
        return len(found)

    async def delete(self, stream: str) -> None:
        """Delete a stream or super stream with up to three partitions, whether it is there or not."""
        for name in (stream, *(f"{stream}-{index}" for index in range(3))):
            await self.call("DELETE", "queues", "/", name)
        await self.call("DELETE", "exchanges", "/", stream)

    async def put_user(self, name: str, password: str, configure: str = "", write: str = "", read: str = "") -> None:
        """A user with these permissions (regular expressions) on vhost "/"."""
        await self.call("PUT", "users", name, body={"password": password, "tags": ""})
        permissions = {"configure": configure, "write": write, "read": read}
        await self.call("PUT", "permissions", "/", name, body=permissions)


def new_name() -> str:
    """A name that no other test or run has."""
    return f"fault-{uuid4().hex[:12]}"
