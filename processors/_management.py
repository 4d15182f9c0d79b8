"""RabbitMQ's management interface: what AMQP cannot say of a queue (its policy, its arguments), and setting a policy.

It knows no names of queues. Proxies of the environment are not used: the interface lives beside the broker.
"""

import asyncio
import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from streams.errors import BadSettings, LogError, LogRefused

TIMEOUT_SECONDS = 5.0

_WITHOUT_STATISTICS = "?disable_stats=true&enable_queue_totals=true"
"""They are costly, and what they add is seconds old. Without the second one a queue's policy is left out, too."""


class ManagementAway(LogError):
    """The management interface does not answer, or not in its own words."""


class ManagementRefused(LogRefused):
    """The management interface refuses: wrong password, or a user without the right."""


class Management:
    """The interface at `http[s]://user:password@host:port`, for one vhost. Raises BadSettings."""

    def __init__(self, url: str, vhost: str) -> None:
        try:
            parts = urlsplit(url)
            port = f":{parts.port}" if parts.port else ""
        except ValueError:  # its text may hold a piece of the password
            parts, port = urlsplit(""), ""
        if not (parts.hostname and parts.username and parts.password):
            raise BadSettings("MANAGEMENT_URL must look like http[s]://user:password@host:15672, %-encoded")
        login = f"{unquote(parts.username)}:{unquote(parts.password)}".encode()
        self._login = f"Basic {base64.b64encode(login).decode()}"
        self._base = f"{parts.scheme}://{parts.hostname}{port}{parts.path.rstrip('/')}/api"
        self._vhost = vhost
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def exchange(self, name: str) -> dict[str, Any] | None:
        """What it says of an exchange, None if there is none."""
        return await self._ask("GET", "exchanges", self._vhost, name)  # type: ignore[no-any-return]

    async def queue(self, name: str) -> dict[str, Any] | None:
        """What it says of a queue or stream, None if there is none; `policy_definition` is what its policy says."""
        info: dict[str, Any] | None = await self._ask("GET", "queues", self._vhost, name)
        if info is not None:
            policy = await self.policy(info["policy"]) if info.get("policy") else None
            info["policy_definition"] = policy["definition"] if policy else {}
        return info

    async def bindings(self, exchange: str, queue: str) -> set[str]:
        """The routing keys under which the exchange passes on to the queue."""
        found = await self._ask("GET", "bindings", self._vhost, "e", exchange, "q", queue) or []
        return {binding["routing_key"] for binding in found}

    async def policy(self, name: str) -> dict[str, Any] | None:
        """A policy, None if there is none."""
        return await self._ask("GET", "policies", self._vhost, name)  # type: ignore[no-any-return]

    async def put_policy(self, name: str, policy: dict[str, Any]) -> None:
        """Make or replace a policy: pattern, definition, priority, apply-to."""
        await self._ask("PUT", "policies", self._vhost, name, body=policy)

    async def _ask(self, method: str, *path: str, body: object = None) -> Any:
        return await asyncio.to_thread(self._call, method, path, body)

    def _call(self, method: str, path: Iterable[str], body: object) -> Any:
        url = "/".join([self._base, *(quote(part, safe="") for part in path)]) + _WITHOUT_STATISTICS
        headers = {"Authorization": self._login, "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 - settings allow http(s) only
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return _refusal(error)
        except (OSError, HTTPException, ValueError) as error:
            raise ManagementAway(f"RabbitMQ's management does not answer: {error}") from error


def _refusal(error: urllib.error.HTTPError) -> None:
    """None for what does not exist."""
    if error.code == 404:
        return
    if error.code in {400, 401, 403}:
        said = error.read(500).decode(errors="replace")
        raise ManagementRefused(f"RabbitMQ's management refuses: {error.code} {said}") from None
    raise ManagementAway(f"RabbitMQ's management answers {error.code}") from error
