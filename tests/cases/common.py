"""A router in front of two scripted backends, and the conditions that hold after every case."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from router.config import Settings, load_settings
from router.load import Role
from router.metrics import Outcome, Retry
from router.policy import FixedPolicy
from tests.raw_client import CHAT, COMPLETIONS, Reply, ask, post
from tests.scripted_backend import (
    STREAM_HEAD,
    Answer,
    Call,
    ScriptedBackend,
    answer_ok,
    chunk,
    response,
    scripted_backend,
)
from tests.stack import Stack, running_router, until

JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'


def every() -> Iterator[tuple[Role, str, bool]]:
    """Both backends, both routes, streaming and not."""
    yield from itertools.product(Role, (CHAT, COMPLETIONS), (True, False))


def body(*, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """A request that fits both routes."""
    return {"model": "m", "messages": [], "prompt": "x", "stream": stream, **fields}


def says(data: bytes, *, close: bool = False) -> Answer:
    """A backend that answers with these bytes, then perhaps closes."""

    async def answer(call: Call) -> None:
        await call.send(data)
        if close:
            call.close()

    return answer


def streams(*events: bytes) -> Answer:
    """A backend that answers with a whole stream of these events, one chunk each."""
    return says(STREAM_HEAD + b"".join(chunk(event) for event in events) + END)


async def silent(call: Call) -> None:
    """A backend that takes the request and says nothing."""
    await call.peer_closed.wait()


def fails(status: str, extra: bytes = b"", text: bytes = b'{"error":{"message":"x"}}') -> Answer:
    """A backend that answers with an error."""
    return says(response(text, status, extra))


class Pair:
    """The stack and its two backends."""

    def __init__(self, stack: Stack, spec: ScriptedBackend, base: ScriptedBackend) -> None:
        self.stack = stack
        self.relay = stack.relay
        self.port = stack.router.port
        self.spec = spec
        self.base = base

    def of(self, role: Role) -> ScriptedBackend:
        """The backend of this role."""
        return self.spec if role is Role.SPECULATIVE else self.base

    def on(
        self, role: Role, answer: Answer, other: Answer = answer_ok
    ) -> tuple[ScriptedBackend, ScriptedBackend]:
        """From now on this backend is chosen and answers so; it and the other, with no calls."""
        self.relay.policy = FixedPolicy(role)
        chosen, spare = self.of(role), self.of(role.other)
        chosen.answer, spare.answer = answer, other
        chosen.calls.clear()
        spare.calls.clear()
        return chosen, spare

    async def ask(self, fields: dict[str, Any] | bytes, path: str = CHAT, *lines: str) -> Reply:
        """One request on a connection of its own."""
        return await ask(self.port, post(fields, path, lines))

    def count(self, outcome: Outcome) -> int:
        """Requests that ended so."""
        return sum(n for key, n in self.relay.metrics.requests.items() if key[2] is outcome)

    def retries(self, kind: Retry) -> int:
        """Requests that were sent twice for this reason."""
        return self.relay.metrics.retries[kind]

    async def quiet(self) -> None:
        """Nothing is counted any more, neither here nor in the backends."""
        await until(lambda: self.stack.in_flight() == (0, 0))
        await until(lambda: self.spec.in_flight == 0 == self.base.in_flight)
        await until(lambda: (self.relay.waiting, self.relay.buffered) == (0, 0))

    async def over(self) -> None:
        """Nothing is left. The listeners go at once: uvicorn's own way takes 0.3 s for each test."""
        await self.quiet()
        router = self.stack.router
        for connection in (*self.relay.connections, *self.relay.admin_connections):
            connection.transport.abort()
        for listener, task in (
            (router._public, router._public_task),
            (router._admin, router._admin_task),
        ):
            for server in listener.servers:
                server.close()
            await listener.lifespan.shutdown()
            if task is not None:
                task.cancel()
                await asyncio.wait({task})


@contextlib.asynccontextmanager
async def pair(answer: Answer = answer_ok, **settings: Any) -> AsyncIterator[Pair]:
    """A router on two backends that answer alike; after the block nothing may be left counted.

    The breakers stay closed unless `breaker_failures` is given: one stack serves many variants.
    """
    settings.setdefault("breaker_failures", 1_000_000)
    async with (
        scripted_backend(answer) as spec,
        scripted_backend(answer) as base,
        running_router(**{"speculative": spec.url, "baseline": base.url} | settings) as stack,
    ):
        found = Pair(stack, spec, base)
        yield found
        await found.over()


def defaults() -> Settings:
    """The settings of somebody who sets nothing but the pair and the line."""
    flags = {"speculative": "http://127.0.0.1:1", "baseline": "http://127.0.0.1:2", "threshold": 8}
    return load_settings(flags, environ={})


def open_files() -> int:
    """File descriptors that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def settles(number: Callable[[], int], most: int, seconds: float = 5.0) -> None:
    """Wait until a number has fallen to this. AssertionError when it does not."""
    try:
        await until(lambda: number() <= most, seconds)
    except AssertionError:
        msg = f"{number()} is more than {most}"
        raise AssertionError(msg) from None
