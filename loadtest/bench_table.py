"""The rows of `loadtest bench` as a table, and what its reader must know besides."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from loadtest.bench_cost import BARE, ROUTER, Cost, Row

if TYPE_CHECKING:
    from rich.table import Table

COMPARED: Final = (BARE, "nginx", "smg")
NONE: Final = "–"  # noqa: RUF001 (a dash, for what was not measured)
BUSY: Final = 0.05  # of the time without a core; above that other programs are measured too


Value = Cost | float | None
Pick = Callable[[Row], Value]


def lines(rounds: Sequence[Sequence[Row]]) -> list[list[str]]:
    """The table: a measure a line, a proxy's figure a column, and the router's ratios last.

    Of several rounds a figure is the median, with the least and the most. A ratio is the median of
    the rounds' ratios, since two figures of one round had the same machine.
    """
    first = rounds[0] if rounds else []
    others = references(first)
    found = []
    for label, pick in _measures(first[0]) if first else []:
        cells = [_cell([pick(rows[at]) for rows in rounds]) for at in range(len(first))]
        ratios = [ratio(rounds, pick, other) for other in others]
        found.append([label, *cells, *(NONE if each is None else f"{each:.2f}" for each in ratios)])
    errors = [sum(sum(rows[at].errors.values()) for rows in rounds) for at in range(len(first))]
    return [*found, ["errors", *map(str, errors), *([""] * len(others))]]


def references(rows: Sequence[Row]) -> list[str]:
    """Whom the router is compared with: those of them that were measured."""
    names = {row.name for row in rows}
    return [name for name in COMPARED if name in names]


def ratio(rounds: Sequence[Sequence[Row]], pick: Pick, other: str) -> float | None:
    """The median of the rounds' ratios; None where no round has both figures above zero."""
    found = []
    for rows in rounds:
        by_name = {row.name: _number(pick(row)) for row in rows}
        one, two = by_name.get(ROUTER), by_name.get(other)
        if one and two and one > 0 and two > 0:
            found.append(one / two)
    return statistics.median(found) if found else None


def table(rounds: Sequence[Sequence[Row]]) -> Table:
    """The same for a terminal."""
    from rich.table import Table

    rows = rounds[0]
    of = "" if len(rounds) == 1 else f", medians of {len(rounds)} rounds (least to most)"
    shown = Table(
        title=f"What a proxy costs (+: through it minus direct){of}\n{rows[0].machine}",
        title_justify="left",
    )
    shown.add_column("")
    for row in rows:
        shown.add_column(f"{row.name}\n{row.version}", justify="right")
    for other in references(rows):
        shown.add_column(f"{ROUTER} /\n{other}", justify="right")
    for line in lines(rounds):
        shown.add_row(*line)
    return shown


def notes(rounds: Sequence[Sequence[Row]]) -> list[str]:
    """What a reader of the table must know besides."""
    all_rows = [row for rows in rounds for row in rows]
    found = [
        f"{row.name}, {level.streams} streams: only {level.chunks_s:,.0f} chunks a second came, so "
        "this machine was too slow or too busy for the load."
        for row in all_rows
        for level in row.levels
        if level.behind
    ]
    found += [
        f"{row.name}, {level.streams} streams: it waited {level.waited:.0%} of the time for a core "
        "that another program had, so its times say little."
        for row in all_rows
        for level in row.levels
        if level.waited > BUSY
    ]
    return found + [
        f"{row.name}: {number} x {why}" for row in all_rows for why, number in row.errors.items()
    ]


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
        measures.append(_measure(sample, i, "later chunk +p50, {}, µs", "later_added_p50_us"))
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


def _cell(values: Sequence[Value]) -> str:
    """A figure of one round as it is, of several the median and the range."""
    numbers = [number for value in values if (number := _number(value)) is not None]
    if len(values) == 1 or not numbers:
        return _show(values[0] if len(values) == 1 else None)
    low, high = _show(min(numbers)), _show(max(numbers))
    return f"{_show(statistics.median(numbers))} ({low} to {high})"
