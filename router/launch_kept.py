"""Processes that do not outlive us: each runs under a keeper (`launch_keeper`), in its own session.

So the terminal's Ctrl-C is the launcher's alone, and nothing that a server has started is left when
the launcher ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from router import launch_keeper

KEEPER: Final = Path(launch_keeper.__file__)
LONGEST_LINE: Final = 64 * 1024  # bytes; the rest of a longer one is the next line
KILL_SECONDS: Final = 8.0  # for a keeper to end all that it keeps
LAST_LINES_SECONDS: Final = 1.0  # for what an ended process printed to be read
ORPHAN_LOOKS: Final = 100


class Command(NamedTuple):
    """What to run. `remove` is a file that its keeper takes away, with its folder, at its end."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    remove: str | None = None


class Running:
    """One run of a command under its keeper."""

    def __init__(self, process: asyncio.subprocess.Process, pump: asyncio.Task[None]) -> None:
        self._process = process
        self._pump = pump

    @property
    def pid(self) -> int:
        """The process id of its keeper."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its keeper has not ended."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Return its exit code once all that it printed is read; negative: its keeper was killed."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._pump), LAST_LINES_SECONDS)
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        self.kill()  # nobody is there any more: it only closes our end
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it has started, at once."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def stop(self, seconds: float) -> None:
        """Ask it to end, and end it when it has not after so many seconds."""
        self.terminate()
        for limit, more in ((seconds, self.kill), (KILL_SECONDS, self._process.kill)):
            try:
                async with asyncio.timeout(limit):
                    await self._process.wait()
                    return
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    more()


async def _pump(pipe: int, lines: Callable[[str], None]) -> None:
    """Read a pipe to its end. One of asyncio's own would keep `wait` from seeing the exit."""
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0)
    )
    try:
        while True:
            try:
                data = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                data = error.partial
            except asyncio.LimitOverrunError as error:
                data = await reader.readexactly(error.consumed)
            if not data:
                return
            lines(data.decode("utf-8", "replace").rstrip("\r\n"))
    finally:
        transport.close()


class Keepers:
    """All keepers of this process: whatever else is a child of ours was left by one that is gone."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        # A keeper that is just being made is a child of ours and not yet known.
        self._lock = asyncio.Lock()

    async def start(self, command: Command, lines: Callable[[str], None]) -> Running:
        """Run a command under a keeper; each line that it prints is handed to `lines`."""
        async with self._lock:
            remove = () if command.remove is None else (launch_keeper.REMOVE, command.remove)
            ours, theirs = os.pipe()
            pump = asyncio.get_running_loop().create_task(_pump(ours, lines))
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(KEEPER), *remove, *command.argv),
                    env=dict(command.env),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=theirs,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            finally:
                os.close(theirs)
            self._running.add(process.pid)
        return Running(process, pump)

    async def end_of(self, running: Running) -> int:
        """Wait for its end: the exit code, 128 + n after signal n."""
        code = await running.wait()
        self._running.discard(running.pid)
        if code >= 0:
            return code
        if launch_keeper.is_subreaper():
            await self._end_orphans()
        return 128 - code

    async def _end_orphans(self) -> None:
        """End what a keeper that was killed has left behind: orphans of ours, as a subreaper."""
        async with self._lock:
            for _ in range(ORPHAN_LOOKS):
                orphans = launch_keeper.descendants_of(os.getpid(), past=self._running)
                for pid in orphans:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                launch_keeper.reap_these(orphans)
                if not orphans:
                    return
                await asyncio.sleep(0.02)
