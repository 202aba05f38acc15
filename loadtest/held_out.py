"""The rules on parts of a trace that nothing was chosen on.

    python -m loadtest.held_out TRACE MINUTE ...

Each MINUTE is the start of ten minutes of the trace, played as the policy table plays the shipped ten,
with its rate brought to the same tokens/s at scale 1, so that a scale means the same load. The shipped
ten minutes, and those from 10 and 30 on, were looked at while the forecast's parameters were chosen.

A study for RULES.md: it prints and keeps nothing, and no command uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import track

from loadtest.arms import ARMS, read_trace_file, shipped_trace
from loadtest.compare import Load, Outcome, play
from loadtest.policy_table import SCALES, changing, measured_pair, steady, tried
from loadtest.policy_table_text import BASELINE, SPECULATIVE, ratios
from loadtest.service import CurveError
from loadtest.simulator_load import Row

WINDOW_S: Final = 600.0
CHANGING: Final = frozenset({"steps", "day"})


class Ratio(NamedTuple):
    """One rule under one load, by the single server with the lower mean."""

    load: str
    mean: float
    p95: float


def window(rows: Sequence[Row], minute: float) -> list[Row]:
    """Ten minutes from here on. Raises CurveError where nothing arrives."""
    start = minute * 60.0
    found = [row._replace(at=row.at - start) for row in rows if start <= row.at < start + WINDOW_S]
    if len(found) < 2:
        raise CurveError(f"no ten minutes of arrivals from minute {minute:g} on")
    return found


def tokens_per_second(rows: Sequence[Row]) -> float:
    """Output tokens asked for at scale 1."""
    return sum(row.output for row in rows) / WINDOW_S


def scaled(load: Load, by: float) -> Load:
    """The same load of a trace that asks for `1 / by` as many tokens/s."""
    scale = load.scale
    if callable(scale):
        return load._replace(scale=lambda now: scale(now) * by)
    return load._replace(scale=scale * by)


def measure(
    rows: Sequence[Row], minutes: Sequence[float], loads: Sequence[Load], arms: Sequence[str]
) -> dict[str, list[Ratio]]:
    """Every rule under every load of every arm and window."""
    usual = tokens_per_second(shipped_trace())
    found: dict[str, list[Ratio]] = {}
    cells = [(minute, arm, load) for minute in minutes for arm in arms for load in loads]
    for minute, arm, load in track(cells, "Cells", console=Console(stderr=True)):
        part = window(rows, minute)
        like = scaled(load, usual / tokens_per_second(part))
        outcomes = {each.name: play(each, like, part) for each in tried(measured_pair(arm))}
        alone = [outcomes.pop(name) for name in (SPECULATIVE, BASELINE)]
        single = min(alone, key=_mean)
        for name, outcome in outcomes.items():
            found.setdefault(name, []).append(Ratio(load.name, *ratios(outcome, single)))
    return found


def summary(found: dict[str, list[Ratio]]) -> str:
    """One line for each rule, in Markdown."""
    lines = [
        "| rule | steady: within 5 % | worst mean | worst p95 | mean | changing: worst | over 2 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, every in found.items():
        still = [each for each in every if each.load not in CHANGING]
        moving = [each.mean for each in every if each.load in CHANGING]
        inside = sum(max(each.mean, each.p95) <= 1.05 for each in still)
        over = sum(mean > 1.02 for mean in moving)
        lines.append(
            f"| {name} | {inside} of {len(still)} | {max(each.mean for each in still):.2f} |"
            f" {max(each.p95 for each in still):.2f} |"
            f" {sum(each.mean for each in still) / len(still):.3f} |"
            f" {max(moving):.3f} | {over} of {len(moving)} |"
        )
    return "\n".join(lines)


def command(
    name: str,
    table: Callable[[list[Row], list[float]], str],
    arguments: Sequence[str] | None,
) -> int:
    """Print the table of a trace and the minutes of its windows; `name` is that of the module.

    Exit code 2 for a trace or a minute that cannot be used.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if len(given) < 2:
            raise CurveError("name a trace and the minutes at which its windows start")
        minutes = [float(minute) for minute in given[1:]]
        printed = table(read_trace_file(Path(given[0])), minutes)
    except ValueError as error:  # CurveError is one
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    print(printed)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Exit code 2 for a trace or a minute that cannot be used."""

    def table(rows: list[Row], minutes: list[float]) -> str:
        return summary(measure(rows, minutes, [*steady(SCALES), *changing()], list(ARMS)))

    return command("loadtest.held_out", table, arguments)


def _mean(outcome: Outcome) -> float:
    return outcome.ms_per_token


if __name__ == "__main__":
    sys.exit(main())
