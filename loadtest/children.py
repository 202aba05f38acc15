"""Processes that end when we do, however we do.

orderly    `with Children(...)` ends: SIGTERM to each, then SIGKILL to what is left
Ctrl-C     the same; the children are in sessions of their own, so the terminal's signal does
           not reach them and the order is ours
SIGKILL    nobody is left to end them but a guard: a shell that was told their ids and waits for
           the end of its input, which comes when we are gone

What they are and what they are for is the caller's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from router.launch_gpus import interpreter_environment

GUARD: Final = 'while read pid; do pids="$pids $pid"; done; [ -z "$pids" ] || kill -9 $pids'
POLL_S: Final = 0.02
STOP_S: Final = 5.0
TAIL_LINES: Final = 15
# Where `router` and `loadtest` are imported from, also when they are not installed.
SOURCE: Final = Path(__file__).resolve().parent.parent


class ChildError(RuntimeError):
    """A process did not do what it was started for; the message holds the end of its log."""


class Child:
    """One running module of Python, with all that it prints in one file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def wait_for(self, pattern: str, seconds: float) -> re.Match[str]:
        """Wait until the log matches. Raises ChildError if it ends or takes too long."""
        limit = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            found = re.search(pattern, self.printed())
            if found:
                return found
            if ended:
                raise self.error(f"ended with exit code {self.process.returncode}")
            if time.monotonic() > limit:
                raise self.error(f"was not ready within {seconds:g} s")
            time.sleep(POLL_S)

    def error(self, what: str) -> ChildError:
        """An error that says what this child did and shows the end of its log."""
        tail = "\n".join(f"  {line}" for line in self.printed().splitlines()[-TAIL_LINES:])
        return ChildError(f"the {self.name} {what}\n{tail or '  (it printed nothing)'}")

    def printed(self) -> str:
        """All that it has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")


class Children:
    """Starts processes and ends them all."""

    def __init__(self, directory: Path) -> None:
        """Logs go into `directory`."""
        self._directory = directory
        self._children: list[Child] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._guard = subprocess.Popen(  # noqa: S603 (a constant)
            ["/bin/sh", "-c", GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop()

    def start(
        self, name: str, module: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> Child:
        """Run a module as a process; `env` is added to ours."""
        log = self._directory / f"{name.replace(' ', '-')}.log"
        paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
        with log.open("wb") as output:
            # -P: a module in the working directory must not take the place of one of ours.
            process = subprocess.Popen(  # noqa: S603 (modules of ours)
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **interpreter_environment(),
                    "PYTHONPATH": os.pathsep.join(paths),
                    **(env or {}),
                },
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(f"{process.pid}\n".encode())
            self._guard.stdin.flush()
        return child

    def check(self) -> None:
        """Raise ChildError if one has ended."""
        for child in self._children:
            if child.process.poll() is not None:
                raise child.error(f"ended with exit code {child.process.returncode}")

    def stop(self) -> None:
        """End all, the last one first; the guard when nothing is left to guard."""
        for child in reversed(self._children):
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + STOP_S
        for child in reversed(self._children):
            try:
                child.process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._children.clear()
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            if self._guard.stdin is not None:
                self._guard.stdin.close()
            self._guard = None
