"""`loadtest compare --live`: checks what was typed, has it run, and prints what came out.

How it ends, and with which exit code, is `live_process`'s.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console

from loadtest.exit_codes import OK
from loadtest.live_load import Wanted
from loadtest.live_process import run_borrowing
from loadtest.live_router import ADMIN_KEY_ENV
from loadtest.live_run import Options, run_live
from loadtest.live_schema import (
    KINDS,
    Offered,
)
from loadtest.live_view import report
from loadtest.sweep_cli import OUTPUT_TOKENS, POLL_S, command_given
from loadtest.sweep_probe import KEY_ENV
from loadtest.sweep_schema import Pace
from loadtest.sweep_view import WIDTH

LOADS: Final = "8,32,64"
SECONDS: Final = 60.0
MOST_TIMES: Final = 3  # --seconds, if answers are few
MOST_WARM_UP_S: Final = 120.0


def live(given: Mapping[str, Any]) -> int:
    """Run it; the exit code. `given` is the command line by the names of `compare`'s parameters.

    Raises typer.BadParameter, and typer.Exit for another end than the usual one.
    """
    options = read(given)
    found = run_borrowing("compare", lambda show: run_live(options, show))
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
