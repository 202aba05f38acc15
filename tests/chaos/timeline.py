"""What is done to the servers, one harm after another, and what each cost.

A step harms one server or both, holds, makes good, and waits until the server is used again.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final

import msgspec

from router.load import Role
from tests.chaos.stage import Backend, Stage

SPECULATIVE, BASELINE = Role.SPECULATIVE, Role.BASELINE
HOLD_S: Final = 4.0  # long enough to be noticed: three probes of a second
USED_S: Final = 15.0  # a server that is well again is used within
DRAIN_S: Final = 20.0  # a server that got SIGTERM ends within, since it gets nothing new
LOOK_S: Final = 0.1  # between two looks at the router's decisions
PAUSE_S: Final = 1.0  # between two steps

# In this order, from the beginning again when time is left.
STEPS: Final[tuple[tuple[str, tuple[Role, ...]], ...]] = (
    ("kill", (SPECULATIVE,)),
    ("fail", (BASELINE,)),
    ("stop", (BASELINE,)),
    ("drain", (SPECULATIVE,)),
    ("refuse", (SPECULATIVE,)),
    ("lie", (SPECULATIVE,)),
    ("kill", (BASELINE,)),
    ("fail", (SPECULATIVE,)),
    ("drain", (BASELINE,)),
    ("kill", (SPECULATIVE, BASELINE)),
    ("refuse", (SPECULATIVE, BASELINE)),
    ("stop", (SPECULATIVE,)),
    ("lie", (SPECULATIVE, BASELINE)),
)


class Happened(msgspec.Struct):
    """One server in one step. Seconds; `at` since the beginning, None where it does not apply."""

    step: str
    role: str
    at: float
    held: float
    to_last: float | None = None  # from the harm to the last request that was sent there
    to_use: float | None = None  # from being well again to the first request it read
    begin: float = 0.0  # monotonic, as in the journals
    end: float = 0.0


class Timeline:
    """Goes through the steps until the time is over."""

    def __init__(self, stage: Stage, say: Callable[[str], None]) -> None:
        self.happened: list[Happened] = []
        self._stage = stage
        self._say = say
        self._began = time.monotonic()
        self._steps: dict[str, Callable[[Backend], Awaitable[None]]] = {
            "kill": self._kill,
            "stop": self._stop,
            "drain": self._drain,
            "fail": self._order("fail", "failing"),
            "refuse": self._order("refuse", "refusing"),
            "lie": self._order("lie", "lying"),
        }

    async def run(self, seconds: float) -> None:
        """All steps that begin within so many seconds; at least one. Raises ChildError."""
        self._began = time.monotonic()
        for step, roles in _for_ever(STEPS):
            self._say(f"{step} {' and '.join(roles)}")
            backends = [self._stage.backends[role] for role in roles]
            await asyncio.gather(*(self._steps[step](backend) for backend in backends))
            await asyncio.sleep(PAUSE_S)
            if time.monotonic() - self._began > seconds:
                return

    # ------------------------------------------------------------------ the harms

    async def _kill(self, backend: Backend) -> None:
        """SIGKILL, and after a while a new life."""
        at = backend.send(signal.SIGKILL)
        await backend.ended(USED_S)
        last = await self._watch(backend, asyncio.sleep(HOLD_S))
        well = await backend.start()
        await self._note("kill", backend, at, well, last)

    async def _stop(self, backend: Backend) -> None:
        """SIGSTOP: it takes connections and says nothing; then SIGCONT."""
        at = backend.send(signal.SIGSTOP)
        last = await self._watch(backend, asyncio.sleep(HOLD_S))
        well = backend.send(signal.SIGCONT)
        await self._note("stop", backend, at, well, last)

    async def _drain(self, backend: Backend) -> None:
        """SIGTERM, as SGLang takes it: not healthy, still accepting, gone when it is idle."""
        at = backend.send(signal.SIGTERM)
        last = await self._watch(backend, backend.ended(DRAIN_S))
        if backend.child.process.poll() is None:
            raise backend.child.error(f"had work for {DRAIN_S:g} s after its SIGTERM")
        well = await backend.start()
        await self._note("drain", backend, at, well, last)

    async def _watch(self, backend: Backend, hold: Coroutine[Any, Any, object]) -> float | None:
        """When the last request was sent there while the harm held.

        The router remembers only so many decisions, so it is asked again and again.
        """
        held = asyncio.ensure_future(hold)
        last = None
        while not held.done():
            last = await self._stage.last_decision(backend.role) or last
            await asyncio.wait({held}, timeout=LOOK_S)
        return last

    def _order(self, step: str, words: str) -> Callable[[Backend], Awaitable[None]]:
        async def misbehave(backend: Backend) -> None:
            """On order, and no more."""
            at = backend.order(words)
            await asyncio.sleep(HOLD_S)
            well = backend.order("")
            await self._note(step, backend, at, well, None)

        return misbehave

    async def _note(
        self, step: str, backend: Backend, at: float, well: float, last: float | None
    ) -> None:
        used = await backend.used_after(well, USED_S)
        self.happened.append(
            Happened(
                step=step,
                role=backend.role,
                at=at - self._began,
                held=well - at,
                to_last=None if last is None else max(0.0, last - at),
                to_use=used,
                begin=at,
                end=well,
            )
        )


def _for_ever(
    steps: tuple[tuple[str, tuple[Role, ...]], ...],
) -> Iterator[tuple[str, tuple[Role, ...]]]:
    while True:
        yield from steps
