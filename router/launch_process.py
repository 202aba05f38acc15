"""One process that is kept running: started, watched until it is ready, started again, stopped.

Each runs under a keeper (`launch_keeper`) in a session of its own, so that the terminal's Ctrl-C is
ours alone and nothing of it outlives us. What it prints goes line by line to the view; the last
lines are remembered for the message about its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from router import launch_keeper
from router.launch_backoff import Backoff

KEEPER: Final = Path(__file__).with_name("launch_keeper.py")
TAIL_LINES: Final = 200
LONGEST_LINE: Final = 64 * 1024  # bytes; the rest of a longer one is the next line
LOOK_SECONDS: Final = 0.5  # between two looks whether it is ready
KILL_SECONDS: Final = 8.0  # for a keeper to end all that it keeps

ORPHAN_LOOKS: Final = 100
# The keepers that run: whatever else is a child of ours was left behind by one that does not.
_KEEPERS: Final[set[int]] = set()

Say = Callable[[str, str], None]  # who, what
Ready = Callable[[], Awaitable[bool]]
Clock = Callable[[], float]


class Command(NamedTuple):
    """What to run."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


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


class Running:
    """One run of a command under its keeper."""

    def __init__(self, process: asyncio.subprocess.Process, lines: Callable[[str], None]) -> None:
        self._process = process
        self._pump = asyncio.get_running_loop().create_task(_pump(process, lines))

    @classmethod
    async def start(cls, command: Command, lines: Callable[[str], None]) -> Running:
        """Run it; each line that it prints is handed to `lines`."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(KEEPER), *command.argv),
            env=dict(command.env),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=LONGEST_LINE,
        )
        _KEEPERS.add(process.pid)
        return cls(process, lines)

    @property
    def alive(self) -> bool:
        """Whether its keeper has not ended."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Return its exit code, 128 + n after signal n, once all that it printed is read."""
        code = await self._process.wait()
        _KEEPERS.discard(self._process.pid)
        if code < 0:
            await end_orphans()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._pump), 1.0)
        self._pump.cancel()
        return 128 - code if code < 0 else code

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it has started, at once."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def stop(self, seconds: float) -> int:
        """Ask it to end, and end it when it has not after so many seconds."""
        self.terminate()
        try:
            async with asyncio.timeout(seconds):
                return await self.wait()
        except TimeoutError:
            self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                return await self.wait()
        self._process.kill()
        return await self.wait()


def adopt_orphans() -> None:
    """Become the parent of what a lost keeper leaves behind (Linux)."""
    launch_keeper.become_subreaper()


async def end_orphans() -> None:
    """End what keepers that were killed have left behind, and that is now ours."""
    for _ in range(ORPHAN_LOOKS):
        orphans = launch_keeper.descendants_of(os.getpid(), past=_KEEPERS)
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        launch_keeper.reap_these(orphans)
        if not orphans:
            return
        await asyncio.sleep(0.02)


async def _pump(process: asyncio.subprocess.Process, lines: Callable[[str], None]) -> None:
    if process.stdout is None:
        return
    while True:
        try:
            data = await process.stdout.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            data = error.partial
        except asyncio.LimitOverrunError as error:
            data = await process.stdout.readexactly(error.consumed)
        if not data:
            return
        lines(data.decode("utf-8", "replace").rstrip("\r\n"))


class Watched:
    """A process that is to run until it is told to stop."""

    def __init__(
        self,
        name: Name,
        command: Callable[[], Command],
        ready: Ready,
        say: Say,
        *,
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
            self._to(State.STARTING)
            running = self._running = await Running.start(self._command(), self._line)
            if self._stopping.is_set():  # while it was being started
                running.kill()
            ended = asyncio.get_running_loop().create_task(running.wait())
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
