"""`loadtest bench`: what the router costs on this machine, beside a proxy that does nothing.

    load (this process) -> proxy -> two light servers (one process)
    core 0                 core 1   core 0

The same load goes in turn through each proxy: a bare relay of bytes in this Python, the router, and
the peers that are there (bench_peers); and to the servers directly. Figures move with the machine
and with what else it does; what holds is the router's figure over another's, from one run.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from loadtest.bench_cost import BARE, DIRECT, ROUTER, Result
from loadtest.bench_measure import QUICK, Bench, Plan, Show
from loadtest.bench_peers import NAMES
from loadtest.bench_process import (
    check_file,
    check_platform,
    print_table,
    run_measuring,
    with_children,
)
from loadtest.bench_stage import Control, Stage, enough_files, own_cores, pin
from loadtest.bench_table import notes, table
from loadtest.children import Children
from loadtest.exit_codes import FAILED, OK


async def measure(
    plan: Plan, children: Children, directory: Path, show: Show, without: Collection[str] = ()
) -> Result:
    """Start all, measure, and leave this process as it was. Raises ChildError, NoAnswerError."""
    cores = own_cores()
    with enough_files(plan.crowd):
        stage = Stage(children, directory)
        try:
            targets = await stage.start(without)
            control = Control(targets[0].ports[0])
            try:
                rounds = await Bench(plan, targets, control, show).rounds()
                return Result(rounds=rounds, left_out=stage.left_out)
            finally:
                control.close()
        finally:
            pin(0, cores)


async def run(plan: Plan, show: Show, without: Collection[str] = ()) -> Result:
    """Measure, and end all that was started. Raises as `measure` does."""
    return await with_children(
        "bench", lambda children, where: measure(plan, children, where, show, without)
    )


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="In little more than a minute, less exact.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, help="Measure so often; the table has medians and ranges.")
    ] = 1,
    without: Annotated[
        list[str] | None, typer.Option(help=f"Leave out a peer: {', '.join(NAMES)}. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Append a line of JSON for each column to this file.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write every round, and what was left out, to this file.")
    ] = None,
) -> None:
    """Measure what the router costs on this machine, beside other proxies. Linux only.

    A bare relay of bytes, and what is on PATH or named by NGINX=, HAPROXY=, SMG=, VLLM_ROUTER=. Read
    the ratios: they hold between machines, the figures do not. Exit code 0: every answer, direct and
    through the bare relay and the router, was complete. Otherwise 1, with what failed.
    """
    check_platform(sys.platform)
    check_peers(without or ())
    check_file("--out", out)
    check_file("--json", json)
    plan = msgspec.structs.replace(QUICK if quick else Plan(), rounds=rounds)
    result = run_measuring("bench", lambda show: run(plan, show, without or ()))
    save(result, out, json)
    print_table(table(result.rounds), [*notes(result.rounds), *result.left_out])
    raise typer.Exit(FAILED if failed(result) else OK)


def check_peers(names: Collection[str]) -> None:
    """Raise BadParameter for a name that is no peer's."""
    for name in names:
        if name not in NAMES:
            raise typer.BadParameter(f"--without {name}: the peers are {', '.join(NAMES)}")


def save(result: Result, out: Path | None, json: Path | None) -> None:
    """Append the rows of all rounds to one file, and write the whole result to the other."""
    if out is not None:
        with out.open("ab") as file:
            for rows in result.rounds:
                file.write(msgspec.json.Encoder().encode_lines(rows))
    if json is not None:
        json.write_bytes(msgspec.json.encode(result) + b"\n")


def failed(result: Result) -> bool:
    """Whether what is ours had an error; a peer's are shown and are no fault of this run."""
    ours = {DIRECT, BARE, ROUTER}
    return any(row.errors and row.name in ours for rows in result.rounds for row in rows)
