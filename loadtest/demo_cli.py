"""The command `loadtest demo`: its flags. It imports what it runs when it runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave it running afterwards, until Ctrl-C.")
    ] = False,
    seconds_per_level: Annotated[
        float, typer.Option(help="How long each of the 13 levels of load lasts.", min=0.05, max=600)
    ] = 1.6,
    no_live: Annotated[
        bool, typer.Option("--no-live", help="A line a second in place of the live panel.")
    ] = False,
    records: Annotated[
        Path | None,
        typer.Option(help="Write every request's record to this file, as JSON lines."),
    ] = None,
) -> None:
    """Show the router at work between two simulated servers, and whether it was worth it.

    Exit code 0: no error, no leaked count, both servers used, every decision's reason agrees with
    its numbers, and the pair is as fast as the better server alone. Otherwise 1, with what failed. A
    machine that is too slow to tell is told by its single servers: speed is then not judged, it says
    why, and the other checks decide.
    """
    from loadtest.demo import Options, run_demo

    raise typer.Exit(
        run_demo(
            Options(
                keep=keep,
                seconds_per_level=seconds_per_level,
                live=not no_live,
                records=records,
            )
        )
    )
