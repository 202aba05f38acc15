"""A running pair from outside: the router's two listeners, both servers, and their processes.

Used by the trials beside it. It asks and ends processes; what is right is decided in `trials`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx

from loadtest.client import ChatClient, chat_body
from loadtest.record import RequestRecord
from router.load import Role

POLL_S: Final = 0.01  # between two looks at a server's own count
PROMPT: Final = "Tell me how two servers share one graphics card, step by step."


class Pair:
    """Base URLs of the router and of both servers, and how to ask them."""

    def __init__(
        self,
        url: str,
        admin_url: str,
        backends: dict[Role, str],
        *,
        admin_key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.admin_url = admin_url.rstrip("/")
        self.backends = {role: each.rstrip("/") for role, each in backends.items()}
        headers = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
        self.http = httpx.AsyncClient(timeout=30, trust_env=False)
        self._admin = httpx.AsyncClient(timeout=10, trust_env=False, headers=headers)
        self.model = ""

    async def __aenter__(self) -> Self:
        answer = await self.http.get(f"{self.url}/v1/models")
        answer.raise_for_status()
        self.model = str(answer.json()["data"][0]["id"])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self._admin.aclose()

    async def status(self) -> Any:
        """The router's /status."""
        answer = await self._admin.get(f"{self.admin_url}/status")
        answer.raise_for_status()
        return answer.json()

    async def backend(self, role: Role) -> Any:
        """What the router knows of one server."""
        return next(b for b in (await self.status())["backends"] if b["role"] == role)

    async def decide(self, **change: object) -> None:
        """Change what decides, as an operator does."""
        answer = await self._admin.post(f"{self.admin_url}/policy", json=change)
        answer.raise_for_status()

    @contextlib.asynccontextmanager
    async def only(self, role: Role) -> AsyncIterator[None]:
        """Send everything to one server, and decide by the line again afterwards."""
        await self.decide(policy=role.value)
        try:
            yield
        finally:
            await self.decide(policy="frontier")

    async def counts(self, role: Role) -> tuple[int, int]:
        """What a server itself says of its running and its queued requests."""
        answer = await self.http.get(f"{self.backends[role]}/v1/loads", params={"include": "core"})
        answer.raise_for_status()
        loads = answer.json()["loads"]
        return (
            sum(int(each["num_running_reqs"]) for each in loads),
            sum(int(each["num_waiting_reqs"]) for each in loads),
        )

    async def until(self, role: Role, enough: Callable[[int], bool], within: float) -> float | None:
        """Seconds until a server's running count is as wanted; None when it was not in time."""
        began = time.monotonic()
        while time.monotonic() - began < within:
            if enough((await self.counts(role))[0]):
                return time.monotonic() - began
            await asyncio.sleep(POLL_S)
        return None

    async def until_usable(self, role: Role, within: float, *, usable: bool) -> float | None:
        """Seconds until the router does (not) use a server; None when it was not in time."""
        began = time.monotonic()
        while time.monotonic() - began < within:
            if (await self.backend(role))["usable"] is usable:
                return time.monotonic() - began
            await asyncio.sleep(0.1)
        return None

    def body(self, tokens: int, *, stream: bool = True) -> dict[str, object]:
        """A chat request for exactly so many tokens."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }

    async def load(
        self, concurrency: int, tokens: int, stop: asyncio.Event, began: float
    ) -> list[RequestRecord]:
        """Streams, so many at once, until `stop`; what is open then runs to its end."""
        done: list[RequestRecord] = []
        async with ChatClient(self.url, timeout=300) as client:

            async def slot() -> None:
                while not stop.is_set():
                    body = chat_body(self.model, PROMPT, tokens)
                    done.append(await client.chat(body, began=began))

            await asyncio.gather(*(slot() for _ in range(concurrency)))
        return done

    async def burst(self, requests: int, tokens: int) -> list[RequestRecord]:
        """So many streams at the same moment."""
        body = chat_body(self.model, PROMPT, tokens)
        async with ChatClient(self.url, timeout=300) as client:
            return list(await asyncio.gather(*(client.chat(body) for _ in range(requests))))


def processes_of(port: int) -> list[int]:
    """Pids whose command line has `--port PORT`, the oldest first: a server and what it started.

    The launcher keeps each server by a process that has the server's command in its own: left out.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"launch_keeper.py") for word in words):
                continue
            if b"--port" in words and words[words.index(b"--port") + 1] == b"%d" % port:
                found.append(int(entry.name))
    return sorted(found, key=_started)


def _started(pid: int) -> int:
    """When a process was started, in clock ticks since boot (proc(5), field 22); 0 when gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def port_of(url: str) -> int:
    """The port that a server's URL names."""
    port = urlsplit(url).port
    assert port is not None, url
    return port
