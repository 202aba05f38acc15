"""The command `loadtest compare`, simulated or live: its flags, and which of them go together.

It plays nothing, and imports what it runs when it runs it.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from loadtest.exit_codes import BAD_VALUE

# Options of the one kind of comparison that the other has no use for.
ONLY_SIMULATED: Final = (*("curves", "arm", "shape", "low", "judged_after", "gpus", "turns"),)
ONLY_LIVE: Final = (
    *("url", "admin_url", "loads", "rate", "prompts", "input_tokens", "output_tokens", "model"),
)


class GpusOption(StrEnum):
    """Where the two servers run."""

    ONE = "one"
    TWO = "two"


class Shape(StrEnum):
    """How the load changes."""

    STEADY = "steady"
    STEPS = "steps"
    DAY = "day"


Curves = Annotated[
    str | None,
    typer.Option(
        help="Curve or sweep files: base=FILE,spec=FILE, and adaptive=FILE if there is one.",
        metavar="base=FILE,spec=FILE",
    ),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        help="A calibration with the curves of both servers; live: one to wait for, until the"
        " router decides by it."
    ),
]
ArmName = Annotated[
    str | None, typer.Option(help="A shipped pair: topk1-2.8, topk1-2.0, topk1-1.6, topk4-2.8.")
]
TraceFile = Annotated[
    Path | None,
    typer.Option(help="Arrivals, as the Azure trace has them (default: its first ten minutes)."),
]
Scale = Annotated[
    float | None, typer.Option(help="Times as many arrivals (default 4; live 1).", min=0.01)
]
ShapeOption = Annotated[
    Shape | None, typer.Option(help="Steady (default), or between --low and --scale.")
]
Low = Annotated[
    float | None, typer.Option(help="The low end of steps and day (default 1.5).", min=0.01)
]
Seconds = Annotated[
    float | None,
    typer.Option(help="How long it is played (default 600; live 60, each cell).", min=0.05),
]
JudgedAfter = Annotated[
    float | None, typer.Option(help="Judge requests from here on (default 60 if steady, else 0).")
]
Gpus = Annotated[
    GpusOption | None, typer.Option(help="One GPU for both servers (default), or two.")
]
Turns = Annotated[
    float | None,
    typer.Option(
        help="Make conversations of the arrivals, of so many turns in the mean; each server has a"
        " prefix cache, and requests pay for their own prompts (--arm, --curves).",
        min=1.0,
        max=100.0,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(help="Draw a picture over load into this PNG (live: default OUT/compare.png)."),
]
Live = Annotated[bool, typer.Option("--live", help="Through a running router; see COMPARE.md.")]
Url = Annotated[str | None, typer.Option(help="Live: the router's base URL.")]
AdminUrl = Annotated[str | None, typer.Option(help="Live: the router's admin listener.")]
Policies = Annotated[str, typer.Option(help="Live: which policies, in turn.")]
Loads = Annotated[str | None, typer.Option(help="Live: requests kept in flight (default 8,32,64).")]
Rate = Annotated[
    str | None, typer.Option(help="Live: in place of --loads, requests a second, Poisson.")
]
Passes = Annotated[
    int, typer.Option(help="Live: how often each policy meets each load.", min=1, max=100)
]
Out = Annotated[Path, typer.Option(help="Live: directory; a comparison in it is gone on with.")]
Prompts = Annotated[Path | None, typer.Option(help="Live: prompts, one a line, as text or JSON.")]
InputTokens = Annotated[
    int | None, typer.Option(help="Live: shipped texts, cut to about this many tokens.", min=1)
]
OutputTokens = Annotated[
    int | None, typer.Option(help="Live: tokens of each answer (default 128).", min=1)
]
WarmUp = Annotated[float, typer.Option(help="Live: least warm-up of a cell, seconds.", min=0)]
Settle = Annotated[
    float, typer.Option(help="Live: seconds for both servers to become idle in between.", min=0)
]
Model = Annotated[str | None, typer.Option(help="Live: model to name (default: the one served).")]
Seed = Annotated[int, typer.Option(help="Live: of prompts, lengths and arrivals.")]
Timeout = Annotated[float, typer.Option(help="Live: seconds for a whole request.", min=0.1)]


def compare(
    live: Live = False,
    curves: Curves = None,
    calibration: CalibrationFile = None,
    arm: ArmName = None,
    trace: TraceFile = None,
    scale: Scale = None,
    shape: ShapeOption = None,
    low: Low = None,
    seconds: Seconds = None,
    judged_after: JudgedAfter = None,
    gpus: Gpus = None,
    turns: Turns = None,
    plot: Plot = None,
    url: Url = None,
    admin_url: AdminUrl = None,
    policies: Policies = "baseline,speculative,frontier,least-in-flight,round-robin",
    loads: Loads = None,
    rate: Rate = None,
    passes: Passes = 1,
    out: Out = Path("compare-live"),
    prompts: Prompts = None,
    input_tokens: InputTokens = None,
    output_tokens: OutputTokens = None,
    warm_up: WarmUp = 5.0,
    settle: Settle = 30.0,
    model: Model = None,
    seed: Seed = 0,
    timeout: Timeout = 600.0,
) -> None:
    """Compare servers, rules and controls under one load: in virtual time, or with --live for real.

    Without --live no server is needed. With it the router's admin key is taken from
    LOADTEST_ADMIN_KEY, a key for clients from LOADTEST_API_KEY, and the router's policy is put
    back at the end. Exit code 0: done; 1: a server or the router failed, and what is measured is
    kept; 2: a file or a value is wrong; 129, 130, 143: ended by SIGHUP, Ctrl-C, SIGTERM. One line
    says what to mend.
    """
    given = locals()  # what was asked for, by name
    wrong = [name for name in (ONLY_SIMULATED if live else ONLY_LIVE) if given[name] is not None]
    if wrong:
        flag = "--" + wrong[0].replace("_", "-")
        raise typer.BadParameter(
            f"{flag} is not for a comparison {'with' if live else 'without'} --live"
        )
    if live:
        from loadtest import live_cli

        raise typer.Exit(live_cli.live(given))
    _simulated(given)


def _simulated(asked: dict[str, Any]) -> None:
    from loadtest.compare_run import Given, InputError, run_compare

    shape: Shape = asked["shape"] or Shape.STEADY
    given = Given(
        curves=asked["curves"],
        calibration=asked["calibration"],
        arm=asked["arm"],
        trace=asked["trace"],
        scale=asked["scale"] or 4.0,
        low=asked["low"] or 1.5,
        shape=shape.value,
        seconds=asked["seconds"] or 600.0,
        judged_after=asked["judged_after"],
        gpus=2 if asked["gpus"] is GpusOption.TWO else 1,
        plot=asked["plot"],
        turns=asked["turns"],
    )
    try:
        run_compare(given)
    except InputError as error:
        typer.echo(f"loadtest: {error}", err=True)
        raise typer.Exit(BAD_VALUE) from None
