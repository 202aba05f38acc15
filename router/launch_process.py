"""One process that is kept running: started, watched until it is ready, started again, stopped.

What it prints goes line by line to the view; the last lines are remembered for the message about
its end. Whether it is ready is asked by `ready`: what the process is, is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from router.launch_backoff import Backoff
from router.launch_hints import hint_in
from router.launch_kept import Command, Keepers, Running

TAIL_LINES: Final = 200
CANNOT_START: Final = 126  # as a shell has it
LOOK_SECONDS: Final = 0.2  # between two looks whether it is ready

Say = Callable[[str, str], None]  # who, what
Ready = Callable[[], Awaitable[bool]]
Clock = Callable[[], float]


class Name(NamedTuple):
    """What a process is called: before its lines, and in sentences."""

    prefix: str
    title: str


class State(enum.StrEnum):
    """Where a process is."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"


class Watched:
    """A process that is to run until it is told to stop."""

    def __init__(
        self,
        name: Name,
        command: Callable[[], Command],
        ready: Ready,
        say: Say,
        *,
        keepers: Keepers,
        backoff: Backoff,
        start_seconds: float,
        gate: asyncio.Lock | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`command` is asked at each start. `gate` is held while it starts: one at a time.

        Times in seconds; `start_seconds` is how long it may take to be ready.
        """
        self.name = name
        self.state = State.WAITING
        self.since = clock()
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.first: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._command = command
        self._ready = ready
        self._say = say
        self._keepers = keepers
        self._backoff = backoff
        self._start_seconds = start_seconds
        self._gate = gate or asyncio.Lock()
        self._clock = clock
        self._running: Running | None = None
        self._stopping = asyncio.Event()
        self.starts = 0

    @property
    def alive(self) -> bool:
        """Whether it runs now, ready or not."""
        return self._running is not None and self._running.alive

    async def run(self) -> None:
        """Keep it running. `first` says how the first start went: None ready, else a code.

        A process that ends before it was ever ready is not started again: its start is at fault.
        """
        while not self._stopping.is_set():
            code, ready_for = await self._once()
            if self._stopping.is_set():
                break
            self._to(State.DOWN)
            if not self.first.done():
                self.first.set_result(code)
                return
            wait = self._backoff.after(ready_for)
            count = f", attempt {self._backoff.ends}" if self._backoff.ends > 1 else ""
            self._say(
                "crossover",
                f"the {self.name.title} ended ({meaning(code)}): starting it again in {wait:g} s{count}",
            )
            if hint := hint_in(self.tail):
                self._say("crossover", f"  {hint.line}")
                self._say("crossover", f"to mend it: {hint.mend}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait)
        if not self.first.done():
            self.first.set_result(0)

    async def _once(self) -> tuple[int, float]:
        """One run to its end: its code, and how long it was ready, in seconds."""
        async with self._gate:
            if self._stopping.is_set():
                return 0, 0.0
            self.starts += 1
            self.tail.clear()
            self._to(State.STARTING)
            try:
                running = await self._keepers.start(self._command(), self._line)
            except OSError as error:  # no process, no memory, no file left
                self._line(f"cannot run it: {error.strerror or error}")
                return CANNOT_START, 0.0
            self._running = running
            if self._stopping.is_set():  # while it was being started
                running.kill()
            ended = asyncio.get_running_loop().create_task(self._keepers.end_of(running))
            became = await self._until_ready(ended)
        if not became:
            if not ended.done():
                self._say("crossover", f"the {self.name.title} is not ready in time: ending it")
                running.kill()
            return await ended, 0.0
        took, again = self._clock() - self.since, self.starts > 1
        self._to(State.READY)
        self._say(
            "crossover", f"the {self.name.title} is ready {'again ' * again}after {took:.0f} s"
        )
        if not self.first.done():
            self.first.set_result(None)
        code = await ended
        return code, self._clock() - self.since

    async def _until_ready(self, ended: asyncio.Task[int]) -> bool:
        limit = self._clock() + self._start_seconds
        while self._clock() < limit:
            look = asyncio.get_running_loop().create_task(self._look())
            await asyncio.wait({look, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                look.cancel()
                await asyncio.gather(look, return_exceptions=True)
                return False
            if look.result():
                return True
        return False

    async def _look(self) -> bool:
        if await self._ready():
            return True
        await asyncio.sleep(LOOK_SECONDS)
        return False

    def _line(self, text: str) -> None:
        self.tail.append(text)
        self._say(self.name.prefix, text)

    def _to(self, state: State) -> None:
        self.state, self.since = state, self._clock()

    async def stop(self, seconds: float) -> None:
        """End it for good: asked first, killed after so many seconds."""
        self._stopping.set()
        if self._running is not None and self._running.alive:
            await self._running.stop(seconds)

    def kill(self) -> None:
        """End it for good, now."""
        self._stopping.set()
        if self._running is not None:
            self._running.kill()


def meaning(code: int) -> str:
    """Return an exit code in words."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"
