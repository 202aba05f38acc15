"""`loadtest scale`: how much one process of the router carries, and what must not grow with it.

    clients (this process) -> router -> two light servers (one process)
    core 0                    core 1    core 2, or core 0 where there are two

The router is started anew for each part, as users run it and with everything on, so that no part
inherits another's memory. What is compared (alone and beside, with and without scrapes, through the router
and past it) is measured in the same run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from loadtest.bench_measure import Show
from loadtest.bench_process import (
    check_file,
    check_platform,
    print_table,
    run_measuring,
    with_children,
)
from loadtest.bench_stage import enough_files, own_cores, pin
from loadtest.children import Children
from loadtest.exit_codes import FAILED, OK
from loadtest.scale_parts import (
    Plan,
    measure_admin,
    measure_bodies,
    measure_crowds,
    measure_decision,
    measure_slow,
)
from loadtest.scale_stage import Stage
from loadtest.scale_table import Scale, notes, table
from router import __version__

SPARE_STREAMS: Final = 200  # beside them ordinary streams, and what the router keeps free
QUICK: Final = Plan(
    levels=((20, 50), (40, 50)),
    seconds=0.7,
    settle_seconds=0.1,
    readers=4,
    reader_kb=512,
    bodies=3,
    body_mb=2,
    beside_seconds=0.4,
    admin_streams=100,
    admin_interval_ms=100,
    admin_turns=1,
    gets=3,
    decisions=200,
)


async def measure(plan: Plan, children: Children, show: Show) -> Scale:
    """Measure everything, and leave this process as it was. Raises ChildError, NoAnswerError."""
    cores = own_cores()
    stage = Stage(children, cores)
    scale = Scale(machine=stage.machine, version=__version__, start_ms=[], ready_ms=[])
    stage.note = scale
    parts = (measure_crowds, measure_slow, measure_bodies, measure_admin)
    with enough_files(plan.most + SPARE_STREAMS):
        try:
            stage.start_servers()
            for step, part in enumerate(parts):
                words = (part.__doc__ or "").splitlines()[0]
                show(step, len(parts) + 1, words)
                async with stage.router() as router:
                    await part(plan, stage, router, scale)
            show(len(parts), len(parts) + 1, "A decision.")
            scale.decided = measure_decision(plan)
        finally:
            pin(0, cores)
    scale.errors = {why: number for why, number in scale.errors.items() if number}
    return scale


async def run(plan: Plan, show: Show) -> Scale:
    """Measure, and end all that was started. Raises as `measure` does."""
    return await with_children("scale", lambda children, _: measure(plan, children, show))


def scale(
    quick: Annotated[
        bool, typer.Option("--quick", help="In some seconds, with few streams: whether it runs.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file as JSON.")
    ] = None,
) -> None:
    """Measure how much one process carries: streams, slow readers, large bodies, scrapes.

    Linux only; about two minutes. Exit code 0: no stream broke and every answer was complete,
    whatever the figures. Otherwise 1, with what failed.
    """
    check_platform(sys.platform)
    check_file("--json", json)
    found = run_measuring("scale", lambda show: run(QUICK if quick else Plan(), show))
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    print_table(table(found), notes(found))
    raise typer.Exit(FAILED if found.errors else OK)
