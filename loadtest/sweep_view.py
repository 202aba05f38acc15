"""A sweep for people: a point in a line, and all figures and notices as tables.

It shows what is in the document and works nothing out.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadtest.sweep_schema import Figure, LevelSummary, Point, Spread, Sweep
from loadtest.sweep_turns import Step

WIDTH: Final = 132  # of what goes into a file
LEGEND: Final = (
    "Output tokens are the server's own count (usage), not chunks. ± and (a-b): 95 % confidence."
    " Times are p50 (its interval) p90 p99."
)


def outcome(point: Point) -> str:
    """A point in one line."""
    text = (
        f"{plus_minus(point.output_tok_s)} tok/s, first token {_ms(point.ttft_s.p50)} ms,"
        f" {_ms(point.tpot_s.p50)} ms per token, {point.requests} answers in {point.window_s:.1f} s"
    )
    if point.accept_length is not None:
        text += f", accept length {point.accept_length:.2f}"
    return text + (f" [{', '.join(point.notices)}]" if point.notices else "")


def report(sweep: Sweep) -> RenderableType:
    """Everything: conditions, a table for each server, notices."""
    return Group(
        *_conditions(sweep), *(_table(sweep, role) for role in _roles(sweep)), *_said(sweep)
    )


def summary_text(sweep: Sweep) -> str:
    """The same as plain text."""
    return plain_text(report(sweep))


def plain_text(shown: RenderableType) -> str:
    """What would be printed, for a file."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def plus_minus(figure: Figure, digits: int = 0) -> str:
    """A figure with half its interval, if there is one."""
    if figure.high is None:
        return f"{figure.value:.{digits}f}"
    return f"{figure.value:.{digits}f} ±{figure.high - figure.value:.{digits}f}"


def _roles(sweep: Sweep) -> list[str]:
    return sorted({level.role.value for level in sweep.levels}, reverse=True)


def _conditions(sweep: Sweep) -> Iterator[Text]:
    work, plan = sweep.workload, sweep.plan
    yield Text(f"Sweep of {sweep.created}: {plan.passes} passes; prompts: {_prompts(sweep)}")
    for server in sweep.servers:
        parts = [f"{server.role.value}: {server.model} at {server.url}"]
        parts += [f"engine {server.engine_version}"] if server.engine_version else []
        parts += [f"{server.gpus or 1} x {server.gpu}"] if server.gpu else []
        parts += [f"draft {server.draft}"] if server.draft else []
        parts += [f"at most {server.cap} at once"] if server.cap else []
        yield Text("  " + ", ".join(parts))
    answers = f"{work.output_tokens} tokens" if work.output_tokens else f"as in {work.trace}"
    ending = "" if work.ignore_eos else " at most"
    yield Text(f"  answers: {answers}{ending}. {LEGEND}")


def _prompts(sweep: Sweep) -> str:
    work = sweep.workload
    length = f", {work.input_tokens} tokens" if work.input_tokens else ""
    return f"{work.prompts}{length}, {'each unique' if work.unique else 'repeated as they come'}"


def _table(sweep: Sweep, role: str) -> Table:
    table = Table(title=role, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("level", "tok/s", "first token, ms", "per token, ms", "whole, s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("accept", "run / wait", "answers"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("notices")
    for level in sweep.levels:
        if level.role.value == role:
            table.add_row(*_row(level))
    return table


def _row(level: LevelSummary) -> Iterator[str]:
    yield str(level.level) if level.rate is None else f"{level.rate:g}/s"
    yield plus_minus(level.output_tok_s)
    yield _times(level.ttft_s, 1e3, 0)
    yield _times(level.tpot_s, 1e3, 1)
    yield _times(level.latency_s, 1.0, 2)
    yield "" if level.accept_length is None else f"{level.accept_length:.2f}"
    running = "?" if level.running is None else f"{level.running:.0f}"
    yield f"{running} / {'?' if level.queued is None else f'{level.queued:.0f}'}"
    yield f"{level.requests}" + (f" + {level.errors} failed" if level.errors else "")
    yield " ".join(level.notices)


def _said(sweep: Sweep) -> Iterator[Text]:
    if sweep.notices:
        yield Text("Notices")
    for notice in sweep.notices:
        where = [notice.role.value] if notice.role else []
        if notice.level is not None or notice.rate is not None:
            where.append(Step(notice.level, notice.rate).title)
        if notice.passes:
            where.append(f"pass {', '.join(map(str, notice.passes))}")
        place = f" ({', '.join(where)})" if where else ""
        yield Text(f"  {notice.code}{place}: {notice.text}")


def _times(spread: Spread, scale: float, digits: int) -> str:
    """p50 with its interval, p90 and p99."""
    if spread.p50 is None or spread.p90 is None or spread.p99 is None:
        return "?"
    low, high = (
        "?" if bound is None else f"{bound * scale:.{digits}f}"
        for bound in (spread.p50.low, spread.p50.high)
    )
    mid, p90, p99 = (
        f"{figure.value * scale:.{digits}f}" for figure in (spread.p50, spread.p90, spread.p99)
    )
    return f"{mid} ({low}-{high}) {p90} {p99}"


def _ms(figure: Figure | None) -> str:
    return "?" if figure is None else f"{figure.value * 1e3:.1f}"
