"""`loadtest scale`: how much one process of the router carries, and what must not grow with it.

    clients (this process) -> router -> two light servers (one process)
    core 0                    core 1    core 2, or core 0 where there are two

The router is started anew for each part, as users run it and with everything on, so that no part
inherits another's memory. What is compared (alone and beside, with and without scrapes, through the router
and past it) is measured in the same run.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from loadtest.bench import WIDTH, check_file, check_platform, shown
from loadtest.bench_load import NoAnswerError
from loadtest.bench_measure import Show
from loadtest.bench_stage import enough_files, own_cores, pin
from loadtest.children import ChildError, Children
from loadtest.exit_codes import FAILED, INTERRUPTED, OK, TERMINATED
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
    """Measure, and end all that was started, also on SIGTERM. Raises as `measure` does."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: task and task.cancel())
    try:
        with (
            tempfile.TemporaryDirectory(prefix="crossover-scale-") as directory,
            Children(Path(directory)) as children,
        ):
            return await measure(plan, children, show)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


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
    import uvloop
    from rich.console import Console

    check_platform(sys.platform)
    check_file("--json", json)
    try:
        with (
            shown(Console(stderr=True)) as show,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            found = runner.run(run(QUICK if quick else Plan(), show))
    except (ChildError, NoAnswerError) as error:
        print(f"loadtest scale: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except asyncio.CancelledError:
        raise typer.Exit(TERMINATED) from None
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table(found))
    for note in notes(found):
        print(note)
    raise typer.Exit(FAILED if found.errors else OK)
