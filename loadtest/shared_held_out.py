"""The forecast on a shared GPU where it is given less than it needs, on minutes nothing was chosen on.

    python -m loadtest.shared_held_out TRACE MINUTE ...

Conversations, whose prefixes a switch loses, and a speculative server with the cap that SGLang gives
it, alone and together. Each MINUTE is the start of ten minutes of the trace, brought to the shipped
ten's tokens/s at scale 1 (`held_out`). A ratio is a rule's milliseconds per token by those of the
better single server.

A study for RULES.md: it prints and keeps nothing, and no command uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import track

from loadtest.arms import ARMS, shipped_trace
from loadtest.compare import Load, Pair, Playable, play, rules, singles
from loadtest.held_out import Ratio, command, scaled, summary, tokens_per_second, window
from loadtest.own_prompts import Talks, own_prompts_pair
from loadtest.policy_table import STEADY_S, capped, changing, measured_pair, steady
from loadtest.policy_table_text import ratios
from loadtest.simulator_load import Row, day, steps

SCALES: Final = (2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
TALK_SCALES: Final = (2.0, 3.0, 4.0, 5.0)
KINDS: Final = ("conversations", "conversations, cap 48", "cap 48")


class Group(NamedTuple):
    """One pair and its loads."""

    kind: str
    pair: Pair
    loads: Sequence[Playable]
    rows: Sequence[Row]


def groups(
    trace: Sequence[Row],
    minutes: Sequence[float],
    arms: Sequence[str],
    scales: Sequence[float],
    talk_scales: Sequence[float],
) -> Iterator[Group]:
    """Every arm and window of every kind, with steady and changing loads."""
    usual = tokens_per_second(shipped_trace())
    for minute in minutes:
        rows = window(trace, minute)
        by = usual / tokens_per_second(rows)
        slow = [scaled(load, by) for load in [*steady(talk_scales), *changing_slowly()]]
        talks = [Talks(*load, int(minute)) for load in slow]
        fast = [scaled(load, by) for load in [*steady(scales), *changing()]]
        for arm in arms:
            talking = own_prompts_pair(arm, rows, talks=True)
            yield Group(KINDS[0], talking, talks, rows)
            yield Group(KINDS[1], capped(talking), talks, rows)
            yield Group(KINDS[2], capped(measured_pair(arm)), fast, rows)


def changing_slowly() -> list[Load]:
    """What changes around the crossover of servers that pay for prompts, judged from the start."""
    return [
        Load("steps", steps((1.0, 4.0), 120.0), 720.0, 0.0),
        Load("day", day(1.0, 4.5, 2 * STEADY_S), 2 * STEADY_S, 0.0),
    ]


def measure(every: Sequence[Group]) -> dict[str, list[Ratio]]:
    """The forecast's ratios, by kind."""
    found: dict[str, list[Ratio]] = {}
    for kind, pair, loads, rows in track(every, "Pairs", console=Console(stderr=True)):
        forecast = next(each for each in rules(pair) if each.name == "forecast")
        for load in loads:
            alone = [play(each, load, rows) for each in singles(pair)]
            single = min(alone, key=lambda outcome: outcome.ms_per_token)
            ratio = Ratio(load.name, *ratios(play(forecast, load, rows), single))
            found.setdefault(f"forecast, {kind}", []).append(ratio)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables. Exit code 2 for a trace or a minute that cannot be used."""

    def table(rows: list[Row], minutes: list[float]) -> str:
        wanted = list(groups(rows, minutes, list(ARMS), SCALES, TALK_SCALES))
        return summary(measure(wanted))

    return command("loadtest.shared_held_out", table, arguments)


if __name__ == "__main__":
    sys.exit(main())
