"""The command `loadtest compare`. It imports what it runs when it runs it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

BAD_INPUT = 2


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
    Path | None, typer.Option(help="A calibration with the curves of both servers.")
]
ArmName = Annotated[
    str | None, typer.Option(help="A shipped pair: topk1-2.8, topk1-2.0, topk1-1.6, topk4-2.8.")
]
TraceFile = Annotated[
    Path | None,
    typer.Option(help="Arrivals, as the Azure trace has them (default: its first ten minutes)."),
]
Scale = Annotated[float, typer.Option(help="Times as many arrivals.", min=0.01)]
ShapeOption = Annotated[Shape, typer.Option(help="Steady, or between --low and --scale.")]
Low = Annotated[float, typer.Option(help="The low end of steps and day.", min=0.01)]
Seconds = Annotated[float, typer.Option(help="How long it is played.", min=1)]
JudgedAfter = Annotated[
    float | None, typer.Option(help="Judge requests from here on (default 60 if steady, else 0).")
]
Gpus = Annotated[GpusOption, typer.Option(help="One GPU for both servers, or two.")]
Plot = Annotated[
    Path | None, typer.Option(help="Draw a picture over load, up to --scale, into this PNG.")
]


def compare(
    curves: Curves = None,
    calibration: CalibrationFile = None,
    arm: ArmName = None,
    trace: TraceFile = None,
    scale: Scale = 4.0,
    shape: ShapeOption = Shape.STEADY,
    low: Low = 1.5,
    seconds: Seconds = 600.0,
    judged_after: JudgedAfter = None,
    gpus: Gpus = GpusOption.ONE,
    plot: Plot = None,
) -> None:
    """Compare servers, rules and controls under one load, in virtual time.

    No server is needed. Exit code 2: a file or a value is wrong; one line says which.
    """
    from loadtest.compare_run import Given, InputError, run_compare

    given = Given(
        curves=curves,
        calibration=calibration,
        arm=arm,
        trace=trace,
        scale=scale,
        low=low,
        shape=shape.value,
        seconds=seconds,
        judged_after=judged_after,
        gpus=1 if gpus is GpusOption.ONE else 2,
        plot=plot,
    )
    try:
        run_compare(given)
    except InputError as error:
        typer.echo(f"loadtest: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None
