"""`make chaos`: servers are killed, stopped, drained and made to lie under steady load.

    python -m tests.chaos.run --seconds 180 --clients 200 --json chaos.json

Exit code 0 when no request was lost silently, sent twice against the rules or not counted once, no
count is left, nothing unhandled is in the log and the router ended with 0 on a SIGTERM under load;
1 when one of these does not hold; 2 when it could not be run.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest.children import ChildError, Children
from router.load import Role
from tests.chaos.load import Result
from tests.chaos.stage import Stage
from tests.chaos.timeline import Timeline
from tests.chaos.verdict import Evidence, Report, judge

WARM_S: Final = 2.0  # of load before the first harm
END_LOAD_S: Final = 2.0  # of load before the SIGTERM
EXIT_S: Final = 20.0  # for the router to end
FAULT: Final = 1
CANNOT: Final = 2


async def play(directory: Path, seconds: float, clients: int, console: Console) -> Report:
    """The whole play; what came of it. Raises ChildError."""
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {text}", highlight=False)

    with Children(directory) as children:
        stage = Stage(children, directory, clients=clients)
        try:
            await stage.start()
            say(f"two servers, the router, {clients} clients")
            load = stage.start_load("a")
            await asyncio.sleep(WARM_S)
            timeline = Timeline(stage, say)
            await timeline.run(seconds)
            say("the load ends; counts come to rest")
            await stage.end_load(load)
            counts = await stage.counts_at_rest()
            say("load again, and SIGTERM to the router")
            load = stage.start_load("b")
            await asyncio.sleep(END_LOAD_S)
            stage.router.process.send_signal(signal.SIGTERM)
            exit_code = await _ended(stage)
            await stage.end_load(load)
            say("read what all have written")
            evidence = Evidence(
                results=[*_results(stage, "a"), *_results(stage, "b")],
                journal=[entry for role in Role for entry in stage.backends[role].journal()],
                log=stage.router.printed().splitlines(),
                counts=counts,
                exit_code=exit_code,
                happened=timeline.happened,
                seconds=time.monotonic() - began,
            )
        finally:
            await stage.close()
    return judge(evidence)


async def _ended(stage: Stage) -> int | None:
    limit = time.monotonic() + EXIT_S
    while stage.router.process.poll() is None and time.monotonic() < limit:
        await asyncio.sleep(0.05)
    return stage.router.process.returncode


def _results(stage: Stage, prefix: str) -> list[Result]:
    lines = stage.results(prefix).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Result) for line in lines]


def show(report: Report, console: Console) -> None:
    """Both tables."""
    total = Table("what became of the requests", "", title_justify="left")
    rows: list[tuple[str, object]] = [
        ("sent", report.sent),
        ("answered whole, word for word", report.whole),
        *((f"error {name}", count) for name, count in report.errors.items()),
        ("broken explicitly", report.broken),
        ("left by the client", report.left),
        ("not sent: no connection", report.unsent),
        ("seen twice by the rules of replay", report.replayed),
        ("lost silently (must be 0)", report.lost),
        ("wrongly sent twice (must be 0)", report.duplicated),
        ("not counted once (must be 0)", report.uncounted),
        ("counts left at rest (must be none)", report.leaked or "none"),
        ("unhandled in the log (must be 0)", report.unhandled),
        ("exit code of the router (must be 0)", report.exit_code),
        ("500s through, each spell of failing fast", report.failed_fast or "-"),
    ]
    for name, value in rows:
        total.add_row(name, str(value))
    console.print(total)
    steps = Table("step", "server", "at", "held", "to last request there", "to use again")
    for each in report.happened:
        last = "-" if each.to_last is None else f"{each.to_last:.3f} s"
        use = "never" if each.to_use is None else f"{each.to_use:.2f} s"
        steps.add_row(each.step, each.role, f"{each.at:.0f} s", f"{each.held:.1f} s", last, use)
    console.print(steps)
    for line in report.examples:
        console.print(line, markup=False, highlight=False)
    for line in report.broken_promises:
        console.print(f"[bold red]broken:[/] {line}")
    if not report.broken_promises:
        console.print("[bold green]every promise was kept[/]")


def main(
    seconds: Annotated[float, typer.Option(help="How long new harm is done.", min=1)] = 150.0,
    clients: Annotated[int, typer.Option(help="Requests open at any time.", min=1)] = 200,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Leave logs and journals in this directory.")
    ] = None,
) -> None:
    """Harm both servers under load, and see that the router keeps its promises."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        directory = keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                report = runner.run(play(directory, seconds, clients, console))
        except ChildError as error:
            console.print(f"chaos: {error}", markup=False, highlight=False)
            raise typer.Exit(CANNOT) from error
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    show(report, console)
    raise typer.Exit(FAULT if report.broken_promises else 0)


if __name__ == "__main__":
    typer.run(main)
