"""What affinity brings on parts of a trace that nothing was chosen on, with a GPU for each server.

    python -m loadtest.affinity_held_out TRACE MINUTE ...

Each MINUTE is the start of ten minutes of the trace, its rate brought to the same tokens/s at scale 1, its
arrivals made into conversations (`own_prompts.Talks`, seeded by the minute), as recorded and with prompts
four times as long at half the rate. A ratio is a policy's number with affinity by the one without.

A study for RULES.md: it prints and keeps nothing, and no command uses it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import track

from loadtest.arms import ARMS, shipped_trace
from loadtest.compare import Outcome, play, rules, staying
from loadtest.held_out import command, tokens_per_second, window
from loadtest.own_prompts import Talks, own_prompts_pair
from loadtest.simulator_load import Row

SCALES: Final = (2.0, 3.0, 4.0, 6.0)
SECONDS: Final = 200.0
JUDGED_AFTER_S: Final = 40.0
LONGER: Final = 4  # times the prompt, at half the rate


class Ratio(NamedTuple):
    """One policy under one load, with affinity by without."""

    prompts: str
    policy: str
    scale: float
    mean: float
    p95: float
    ttft: float


def measure(
    trace: Sequence[Row], minutes: Sequence[float], scales: Sequence[float], arms: Sequence[str]
) -> Iterator[Ratio]:
    """Every policy that keeps conversations, under every load of every arm and window."""
    usual = tokens_per_second(shipped_trace())
    cells = [(minute, arm) for minute in minutes for arm in arms]
    for minute, arm in track(cells, "Cells", console=Console(stderr=True)):
        part = window(trace, minute)
        by = usual / tokens_per_second(part)
        longer = [row._replace(prompt=row.prompt * LONGER) for row in part]
        for prompts, rows, rate in (("as recorded", part, by), ("longer", longer, by / 2)):
            pair = own_prompts_pair(arm, rows, talks=True, gpus=2)
            without = {each.name: each for each in rules(pair)}
            for scale in scales:
                load = Talks(f"{scale:g}", scale * rate, SECONDS, JUDGED_AFTER_S, seed=int(minute))
                for each in staying(pair):
                    name = each.name.partition(",")[0]
                    found = play(each, load, rows), play(without[name], load, rows)
                    yield Ratio(prompts, name, scale, *ratios(*found))


def ratios(found: Outcome, other: Outcome) -> tuple[float, float, float]:
    """Mean, 95th percentile and time to the first token of one by the other's."""
    return (
        found.ms_per_token / other.ms_per_token,
        found.p95_ms_per_token / other.p95_ms_per_token,
        (found.ttft_ms or 0.0) / (other.ttft_ms or 1.0),
    )


def summary(found: Sequence[Ratio]) -> str:
    """One line for each policy and kind of prompt: mean over all loads and the worst, in Markdown."""
    lines = [
        "| prompts | policy | mean ms per token | p95 | time to first token |",
        "|---|---|---|---|---|",
    ]
    for prompts, policy in dict.fromkeys((each.prompts, each.policy) for each in found):
        of = [each for each in found if (each.prompts, each.policy) == (prompts, policy)]
        columns = ([getattr(each, name) for each in of] for name in ("mean", "p95", "ttft"))
        said = (f"{statistics.fmean(each):.2f}, worst {max(each):.2f}" for each in columns)
        lines.append(f"| {prompts} | {policy} | {' | '.join(said)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Exit code 2 for a trace or a minute that cannot be used."""

    def table(rows: list[Row], minutes: list[float]) -> str:
        return summary(list(measure(rows, minutes, SCALES, list(ARMS))))

    return command("loadtest.affinity_held_out", table, arguments)


if __name__ == "__main__":
    sys.exit(main())
