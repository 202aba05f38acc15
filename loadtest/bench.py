"""`loadtest bench`: what the router costs on this machine, beside a proxy that does nothing.

    load (this process) -> proxy -> two light servers (one process)
    core 0                 core 1   core 0

The same load goes in turn through each proxy: a bare relay of bytes in this Python, the router, and
the peers that are there (bench_peers); and to the servers directly. Figures move with the machine
and with what else it does; what holds is the router's figure over another's, from one run.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from loadtest.bench_cost import BARE, DIRECT, ROUTER, Result
from loadtest.bench_load import NoAnswerError
from loadtest.bench_measure import QUICK, Bench, Plan, Show
from loadtest.bench_peers import NAMES
from loadtest.bench_stage import Control, Stage, enough_files, own_cores, pin
from loadtest.bench_table import notes, table
from loadtest.children import ChildError, Children
from loadtest.exit_codes import FAILED, INTERRUPTED, OK, TERMINATED

if TYPE_CHECKING:
    from rich.console import Console

WIDTH: Final = 400  # the most that the table takes when it goes into a file: no cell is cut


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


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Show]:
    """A bar in a terminal, otherwise lines; drawn between measurements and never during one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    if not console.is_terminal:
        yield lambda step, steps, text: console.print(f"{step + 1} of {steps}: {text}")
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting")

        def show(step: int, steps: int, text: str) -> None:
            progress.update(task, total=steps, completed=step, description=text, refresh=True)

        yield show


async def run(plan: Plan, show: Show, without: Collection[str] = ()) -> Result:
    """Measure, and end all that was started, also on SIGTERM. Raises as `measure` does."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: task and task.cancel())
    try:
        with (
            tempfile.TemporaryDirectory(prefix="crossover-bench-") as directory,
            Children(Path(directory)) as children,
        ):
            return await measure(plan, children, Path(directory), show, without)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def check_platform(name: str) -> None:
    """Raise BadParameter where there is no /proc."""
    if name != "linux":
        raise typer.BadParameter("it reads /proc and pins cores, so it runs on Linux only")


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
    import uvloop
    from rich.console import Console

    check_platform(sys.platform)
    check_peers(without or ())
    check_file("--out", out)
    check_file("--json", json)
    console = Console(stderr=True)
    plan = msgspec.structs.replace(QUICK if quick else Plan(), rounds=rounds)
    try:
        with (
            shown(console) as show,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            result = runner.run(run(plan, show, without or ()))
    except (ChildError, NoAnswerError) as error:
        print(f"loadtest bench: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except asyncio.CancelledError:
        raise typer.Exit(TERMINATED) from None
    save(result, out, json)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table(result.rounds))
    for note in [*notes(result.rounds), *result.left_out]:
        print(note)
    raise typer.Exit(FAILED if failed(result) else OK)


def check_peers(names: Collection[str]) -> None:
    """Raise BadParameter for a name that is no peer's."""
    for name in names:
        if name not in NAMES:
            raise typer.BadParameter(f"--without {name}: the peers are {', '.join(NAMES)}")


def check_file(option: str, file: Path | None) -> None:
    """Raise BadParameter, before anything is measured, for a file that cannot be written."""
    if file is not None:
        try:
            file.open("ab").close()
        except OSError as error:
            raise typer.BadParameter(f"cannot write {option} {file}: {error.strerror}") from None


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
