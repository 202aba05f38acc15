"""`loadtest compare --live`: checks what was typed, runs it, and turns its end into an exit code.

The router's policy is put back before the process ends, also after SIGINT (Ctrl-C), SIGTERM and
SIGHUP; a second signal does not hurry it, since a router that is left behind decides wrongly for
everybody.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import typer
import uvloop
from rich.console import Console

from loadtest.exit_codes import BAD_VALUE, FAILED, OK
from loadtest.live_load import Wanted
from loadtest.live_router import ADMIN_KEY_ENV
from loadtest.live_run import Options, run_live
from loadtest.live_schema import (
    KINDS,
    LiveError,
    LiveFailedError,
    Offered,
)
from loadtest.live_view import WIDTH, Lines, report, shown
from loadtest.prompts import PromptError
from loadtest.sweep_cli import OUTPUT_TOKENS, POLL_S, command_given
from loadtest.sweep_probe import KEY_ENV
from loadtest.sweep_schema import Pace, ServerFailedError, SweepError

LOADS: Final = "8,32,64"
SECONDS: Final = 60.0
MOST_TIMES: Final = 3  # --seconds, if answers are few
MOST_WARM_UP_S: Final = 120.0
Given = TypeVar("Given")
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """What a signal does: the first one cancels the comparison, later ones change nothing."""

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


def live(given: Mapping[str, Any]) -> int:
    """Run it; the exit code. `given` is the command line by the names of `compare`'s parameters.

    Raises typer.BadParameter.
    """
    options = read(given)
    ending: Ending | None = None
    try:
        with (
            shown(Console(stderr=True)) as show,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            ending = Ending(show)
            found = runner.run(until_told(run_live(options, show), ending))
    except (LiveFailedError, ServerFailedError) as error:
        return _say(error, FAILED)
    except (LiveError, SweepError, PromptError) as error:
        return _say(error, BAD_VALUE)
    except asyncio.CancelledError:
        if ending is None or ending.number is None:
            raise
        words = "Stopped; the router decides as before. The same command goes on from here."
        print(words, file=sys.stderr)
        return 128 + ending.number
    Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False).print(report(found))
    print(f"Written to {options.out}")
    return OK


def read(given: Mapping[str, Any]) -> Options:
    """What was asked for, with what is usual where nothing is said. Raises typer.BadParameter."""
    seconds = given["seconds"] or SECONDS
    trace: Path | None = given["trace"]
    output = given["output_tokens"] or (OUTPUT_TOKENS if trace is None else None)
    if given["url"] is None or given["admin_url"] is None:
        raise typer.BadParameter("--live needs the router: --url and --admin-url")
    warm_up = given["warm_up"]
    return Options(
        url=given["url"],
        admin_url=given["admin_url"],
        admin_key=os.environ.get(ADMIN_KEY_ENV) or None,
        key=os.environ.get(KEY_ENV) or None,
        policies=_policies(given["policies"]),
        wanted=Wanted(
            loads=_loads(given["loads"], given["rate"], trace, given["scale"]),
            prompts=given["prompts"],
            input_tokens=given["input_tokens"],
            output_tokens=output,
            trace=trace,
            seed=given["seed"],
        ),
        out=given["out"],
        passes=given["passes"],
        pace=Pace(
            warm_up_s=warm_up,
            most_warm_up_s=max(warm_up, MOST_WARM_UP_S),
            window_s=seconds,
            most_window_s=MOST_TIMES * seconds,
            per_slot=1.0,
            poll_s=min(POLL_S, seconds / 4),
        ),
        settle_s=given["settle"],
        model=given["model"],
        timeout=given["timeout"],
        plot=given["plot"],
        calibration=given["calibration"],
        command=command_given(),
    )


async def until_told(work: Coroutine[Any, Any, Given], ending: Ending) -> Given:
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


def _say(error: Exception, code: int) -> int:
    print(f"loadtest compare: {error}", file=sys.stderr)
    return code


def _policies(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if wrong := [name for name in found if name not in KINDS]:
        raise typer.BadParameter(
            f"--policies are of {', '.join(KINDS)}, as in baseline,frontier; got"
            f" {', '.join(map(repr, wrong))}"
        )
    return found


def _loads(
    loads: str | None, rate: str | None, trace: Path | None, scale: float | None
) -> tuple[Offered, ...]:
    """One of the three kinds."""
    if sum(given is not None for given in (loads, rate, trace)) > 1:
        raise typer.BadParameter("give one of --loads, --rate and --trace")
    if scale is not None and trace is None:
        raise typer.BadParameter("--scale is for --trace")
    if trace is not None:
        return (Offered(scale=scale or 1.0),)
    if rate is not None:
        return tuple(Offered(rate=value) for value in _numbers("--rate", rate))
    found = _numbers("--loads", loads or LOADS)
    if not all(value.is_integer() for value in found):
        raise typer.BadParameter(f"--loads are whole numbers of requests in flight, got {loads!r}")
    return tuple(Offered(in_flight=int(value)) for value in found)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < value < 1e6 and math.isfinite(value) for value in found):
        raise typer.BadParameter(f"{name} are numbers above 0, as in 8,32; got {text!r}")
    return found
