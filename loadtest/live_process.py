"""Runs what borrows a router as a process: shows it, hears signals, turns its end into words and a code.

The router's policy is put back before the process ends, also after SIGINT (Ctrl-C), SIGTERM and
SIGHUP; a second signal does not hurry it, since a router that is left behind decides wrongly for
everybody. What is run, and what it gives, is the caller's.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import typer
import uvloop
from rich.console import Console

from loadtest.exit_codes import BAD_VALUE, FAILED
from loadtest.live_schema import LiveError, LiveFailedError
from loadtest.progress import Lines, shown
from loadtest.prompts import PromptError
from loadtest.sweep_schema import ServerFailedError, SweepError

Given = TypeVar("Given")
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """What a signal does: the first one cancels the work, later ones change nothing."""

    def __init__(self, show: Lines) -> None:
        self.number: signal.Signals | None = None
        self._show = show

    def __call__(self, number: signal.Signals, task: asyncio.Task[Any] | None) -> None:
        """Handle a signal."""
        if self.number is not None or task is None:
            return
        self.number = number
        self._show.say("Stopping; the router's policy is put back first.")
        task.cancel()


def run_borrowing(command: str, work: Callable[[Lines], Coroutine[Any, Any, Given]]) -> Given:
    """What the work of this command gives. Raises typer.Exit, with its code, for any other end."""
    ending: Ending | None = None
    problem: Exception
    try:
        with (
            shown(Console(stderr=True)) as show,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            ending = Ending(show)
            return runner.run(_until_told(work(show), ending))
    except (LiveFailedError, ServerFailedError) as error:
        problem, code = error, FAILED
    except (LiveError, SweepError, PromptError) as error:
        problem, code = error, BAD_VALUE
    except asyncio.CancelledError:
        if ending is None or ending.number is None:
            raise
        words = "Stopped; the router decides as before. The same command goes on from here."
        print(words, file=sys.stderr)
        raise typer.Exit(128 + ending.number) from None
    print(f"loadtest {command}: {problem}", file=sys.stderr)
    raise typer.Exit(code)


async def _until_told(work: Coroutine[Any, Any, Given], ending: Ending) -> Given:
    """What this work gives; a signal ends it in order."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    # What whoever started us wants ignored (nohup does) stays so.
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heard:
        loop.add_signal_handler(number, ending, number, task)
    try:
        return await work
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
