"""The rows of `loadtest bench` as a table, and what its reader must know besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from loadtest.bench_cost import BARE, ROUTER, Cost, Row

if TYPE_CHECKING:
    from rich.table import Table

NONE: Final = "–"  # noqa: RUF001 (a dash, for what was not measured)
BUSY: Final = 0.05  # of the time without a core; above that other programs are measured too


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """The table: a measure a line, a row's figure a column, and router over bare relay last."""
    measures = _measures(rows[0]) if rows else []
    by_name = {row.name: row for row in rows}
    found = []
    for label, pick in measures:
        values = [pick(row) for row in rows]
        pair = [pick(by_name[name]) if name in by_name else None for name in (ROUTER, BARE)]
        found.append([label, *map(_show, values), _ratio(*map(_number, pair))])
    errors = [str(sum(row.errors.values())) for row in rows]
    return [*found, ["errors", *errors, ""]]


def table(rows: Sequence[Row]) -> Table:
    """The same for a terminal."""
    from rich.table import Table

    shown = Table(
        title=f"What a proxy costs (+: through it minus direct)\n{rows[0].machine}",
        title_justify="left",
    )
    shown.add_column("")
    for row in rows:
        shown.add_column(f"{row.name}\n{row.version}", justify="right")
    shown.add_column(f"{ROUTER} /\n{BARE}", justify="right")
    for line in lines(rows):
        shown.add_row(*line)
    return shown


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know besides."""
    found = [
        f"{row.name}, {level.streams} streams: only {level.chunks_s:,.0f} chunks a second came, so "
        "this machine was too slow or too busy for the load."
        for row in rows
        for level in row.levels
        if level.behind
    ]
    found += [
        f"{row.name}, {level.streams} streams: it waited {level.waited:.0%} of the time for a core "
        "that another program had, so its times say little."
        for row in rows
        for level in row.levels
        if level.waited > BUSY
    ]
    return found + [
        f"{row.name}: {number} x {why}" for row in rows for why, number in row.errors.items()
    ]


Value = Cost | float | None
Pick = Callable[[Row], Value]


def _measures(sample: Row) -> list[tuple[str, Pick]]:
    """What is shown of a row; all rows have the levels of this one."""
    measures: list[tuple[str, Pick]] = [
        (f"CPU per request, {sample.connections} at once, µs", lambda row: row.request)
    ]
    at = range(len(sample.levels))
    measures += [_measure(sample, i, "CPU per chunk, {}, µs", "chunk") for i in reversed(at)]
    for i in at:
        measures.append(_measure(sample, i, "first chunk +p50, {}, µs", "added_p50_us"))
        measures.append(_measure(sample, i, "first chunk +p99, {}, µs", "added_p99_us"))
    return [
        *measures,
        ("CPU when idle, ms a second", lambda row: row.idle_ms_s),
        ("memory when idle, MB", lambda row: row.idle_mb),
        (f"memory with {sample.crowd} streams, MB", lambda row: row.crowd_mb),
        ("hang-up seen behind it, p50, ms", lambda row: row.hang_up_ms),
        ("hang-up seen behind it, max, ms", lambda row: row.hang_up_max_ms),
    ]


def _measure(sample: Row, at: int, label: str, field: str) -> tuple[str, Pick]:
    level = sample.levels[at]

    def pick(row: Row) -> Value:
        value: Value = getattr(row.levels[at], field)
        return value

    return label.format(f"{level.streams} x {level.interval_ms} ms"), pick


def _number(value: Value) -> float | None:
    return value.total_us if isinstance(value, Cost) else value


def _show(value: Value) -> str:
    match value:
        case None:
            return NONE
        case Cost():
            return f"{value.total_us:.1f} ({value.user_us:.1f} user)"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f}" if one and other and one > 0 and other > 0 else NONE
