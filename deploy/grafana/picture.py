"""A picture of the dashboard where there is no Grafana: its queries' real results, drawn.

    python -m deploy.grafana.picture                     write deploy/grafana/dashboard.png
    python -m deploy.grafana.picture --keep results.json  and keep what Prometheus answered
    python -m deploy.grafana.picture --from results.json  draw that again

Two simulated servers, the router and a real Prometheus run on loopback under a load that ramps up
past the line and back; then every query of every panel is run as a browser would run it. Underway
the calibration is written anew and one server crashes. Needs Debian's prometheus, and takes about
three minutes.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
import uvloop
from PIL import Image

from deploy.grafana import charts
from deploy.grafana.dashboard import JSON_FILE
from deploy.grafana.drawing import Results, draw
from deploy.grafana.looks import to_series
from deploy.grafana.processes import Processes
from deploy.grafana.prometheus_server import Prometheus, PrometheusError, running_prometheus
from deploy.grafana.queries import Board, fill, panels, queries
from deploy.grafana.trial import load
from loadtest.arrivals import up_and_down
from loadtest.children import ChildError, Children
from router.load import Role

PICTURE: Final = Path(__file__).resolve().parent / "dashboard.png"
LABEL: Final = "query results of the dashboard's panels, drawn without Grafana; simulated servers"
RAMP: Final = up_and_down((1, 2, 4, 8, 12, 16, 24))
SCRAPE_S: Final = 1.0
RATE_S: Final = 4 * SCRAPE_S  # Grafana's $__rate_interval at this scrape interval and a small step
COLOURS: Final = 160
DPI: Final = 110
# Of the ramp: when the calibration is written anew, and when the baseline server crashes.
CALIBRATED: Final = 0.2
CRASHED: Final = 0.62
DOWN_S: Final = 5.0


class Answers(msgspec.Struct):
    """What was asked and answered, to draw it again."""

    start: float
    end: float  # both in unix seconds
    rows: dict[str, list[dict[str, Any]]]  # by panel's number and query's name, as "3/A"


async def collect(board: Board, seconds_each: float) -> Answers:
    """Run the stack under the ramp and ask every panel's queries at its end."""
    with (
        tempfile.TemporaryDirectory(prefix="crossover-picture-") as name,
        Children(Path(name)) as children,
    ):
        directory = Path(name)
        stack = await Processes.start(children, directory)
        async with running_prometheus(
            directory, stack.admin, stack.servers, scrape="1s"
        ) as prometheus:
            start = time.time()
            events = asyncio.create_task(_events(stack, len(RAMP) * seconds_each))
            await load(stack.url, RAMP, seconds_each)
            await events
            end = time.time() - SCRAPE_S
            return Answers(start, end, await ask(board, prometheus, start, end))


async def _events(stack: Processes, seconds: float) -> None:
    """So that there is something to see beside load: a calibration, and a server that crashes."""
    await asyncio.sleep(CALIBRATED * seconds)
    await stack.calibrate()
    await asyncio.sleep((CRASHED - CALIBRATED) * seconds)
    await stack.crash(Role.BASELINE, DOWN_S)


async def ask(
    board: Board, prometheus: Prometheus, start: float, end: float
) -> dict[str, list[dict[str, Any]]]:
    """Every panel's queries: the instant ones at the end, the others over the whole time."""
    rows = {}
    for panel in panels(board):
        for query in queries(panel):
            expr = fill(query.expr, rate_interval=f"{RATE_S:g}s")
            rows[f"{panel['id']}/{query.ref}"] = (
                await prometheus.at(expr, end)
                if query.instant
                else await prometheus.between(expr, start, end, SCRAPE_S)
            )
    for event in board["annotations"]["list"]:
        expr = fill(event["expr"], rate_interval=f"{RATE_S:g}s").replace("[2m]", "[3s]")
        rows[event["name"]] = await prometheus.between(expr, start, end, SCRAPE_S)
    return rows


def results(board: Board, answers: Answers) -> Results:
    """The answers as series, by panel."""
    return {
        panel["id"]: [
            series
            for query in queries(panel)
            for series in to_series(
                query.ref, query.legend, answers.rows.get(f"{panel['id']}/{query.ref}", [])
            )
        ]
        for panel in panels(board)
    }


def begins(rows: list[dict[str, Any]]) -> list[float]:
    """When the events of an annotation's answer began, in unix seconds."""
    found = []
    for row in rows:
        moments = [float(moment) for moment, _ in row["values"]]
        before = -math.inf
        for moment in moments:
            if moment - before > 1.5 * SCRAPE_S:
                found.append(moment)
            before = moment
    return found


def paint(board: Board, answers: Answers, path: Path) -> None:
    """Draw it and write a small PNG."""
    span = charts.Span(answers.start, answers.end, SCRAPE_S)
    marks = [
        charts.Mark(event["name"], event["iconColor"], at - answers.start)
        for event in board["annotations"]["list"]
        for at in begins(answers.rows.get(event["name"], []))
    ]
    figure = draw(board, results(board, answers), label=LABEL, span=span, marks=marks)
    raw = io.BytesIO()
    figure.savefig(raw, format="png", dpi=DPI, facecolor=figure.get_facecolor())
    with Image.open(raw) as full:
        few = full.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def main(
    output: Annotated[Path, typer.Option(help="The picture to write.")] = PICTURE,
    seconds_per_level: Annotated[float, typer.Option(help="Of the ramp's 13 levels.")] = 12.0,
    keep: Annotated[Path | None, typer.Option(help="Also write the answers here.")] = None,
    again: Annotated[
        Path | None, typer.Option("--from", help="Draw answers that were kept; run nothing.")
    ] = None,
) -> None:
    """Draw the dashboard's query results."""
    board = json.loads(JSON_FILE.read_text(encoding="utf-8"))
    if again is not None:
        answers = msgspec.json.decode(again.read_bytes(), type=Answers)
    else:
        typer.echo(f"running a ramp for {len(RAMP) * seconds_per_level:.0f} s ...")
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                answers = runner.run(collect(board, seconds_per_level))
        except (ChildError, PrometheusError) as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error
    if keep is not None:
        keep.write_bytes(msgspec.json.encode(answers))
    paint(board, answers, output)
    typer.echo(f"{output}: {output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    typer.run(main)
