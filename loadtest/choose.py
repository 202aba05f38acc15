"""Which rule a calibration should name: the best on its own curves, and by how much.

Pure: simulates every candidate on the measured curves under loads that fill the better server to the
same shares whatever its size, and under steps between a low and a high one. A candidate's score at a
load is its milliseconds per token by the best candidate's there; the mean of the scores decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from loadtest.arms import Level, curve_from_levels, shipped_trace
from loadtest.compare import Gpus, Load, Pair, play, rules, singles
from loadtest.simulator_contention import Contention
from loadtest.simulator_load import Row, steps

# Offered load by what the better server can do at most.
SHARES: Final = (0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9)
LOW: Final = 0.2
HIGH: Final = 0.8
STEADY_S: Final = 180.0
STEP_S: Final = 60.0
# Of a mean answer of a sweep that does not say.
OUTPUT_TOKENS: Final = 128.0
WIDE: Final = {"band": 0.5, "dwell": 20.0}
# Scores that differ by less are equal.
TIE: Final = 0.001
# What a line calls doing without a rule.
FIXED: Final = {"speculative only": "always", "baseline only": "never"}


class BestRule(msgspec.Struct, frozen=True):
    """The best rule, as a calibration holds it, and how it was found."""

    name: str  # `always` and `never`: one server is best, and the line says so
    parameters: dict[str, float]  # of `threshold` they are band and dwell, for the file's `switch`
    runner_up: str
    lead: float  # by how much the runner-up is slower, as a share
    scores: dict[str, float]  # by candidate: 1 is the best at every load
    label: str = ""  # the candidate in full, where its parameters are part of what it is

    @property
    def sentence(self) -> str:
        """What was found, in a sentence."""
        if self.lead < TIE:
            return f"{self.label} is as good as {self.runner_up} and simpler"
        return f"{self.label} is best; {self.runner_up}, the next, is {self.lead:.1%} slower"


def best_rule(
    speculative: Iterable[Level],
    baseline: Iterable[Level],
    contention: Contention,
    gpus: Gpus,
    *,
    rows: Sequence[Row] | None = None,
    output_tokens: float = OUTPUT_TOKENS,
    shares: Sequence[float] = SHARES,
) -> BestRule:
    """Simulate the candidates on these curves. Takes seconds. Raises CurveError.

    `rows`: the trace to play; the shipped one if there is none of one's own. `shares`: of what the
    better server can do at most, the steady loads; steps between a low and a high one are added.
    `output_tokens`: of a mean answer of the sweep, above 1.
    """
    pair = Pair(
        speculative=curve_from_levels(speculative, "speculative", output_tokens=output_tokens),
        baseline=curve_from_levels(baseline, "baseline", output_tokens=output_tokens),
        contention=contention,
        gpus=gpus,
        prompt_tokens=0,
        output_tokens=round(output_tokens),
    )
    rows = shipped_trace() if rows is None else rows
    candidates = [*singles(pair), *rules(pair)]
    found: dict[str, list[float]] = {each.name: [] for each in candidates}
    for load in loads(pair, rows, shares):
        waits = {each.name: play(each, load, rows).ms_per_token for each in candidates}
        best = min(waits.values())
        for name, wait in waits.items():
            found[name].append(wait / best)
    scores = {name: statistics.fmean(values) for name, values in found.items()}
    # As good as the best, but for noise: the first of them, since the candidates begin with the plainest.
    least = min(scores.values())
    first = next(name for name, score in scores.items() if score <= least * (1.0 + TIE))
    second = min((name for name in scores if name != first), key=scores.__getitem__)
    return BestRule(
        FIXED.get(first, first.partition(",")[0]),
        _parameters(first, pair),
        FIXED.get(second, second),
        scores[second] / scores[first] - 1.0,
        {FIXED.get(name, name): score for name, score in scores.items()},
        FIXED.get(first, first),
    )


def loads(pair: Pair, rows: Sequence[Row], shares: Sequence[float]) -> list[Load]:
    """What the candidates are tried under."""
    most = max(value for levels in pair.levels for _, value in levels)
    if pair.gpus == 2:
        most = sum(max(value for _, value in levels) for levels in pair.levels)
    unit = sum(row.output for row in rows) / rows[-1].at  # tokens/s at scale 1
    scale = most / unit
    found = [Load(f"{share:.0%}", share * scale, STEADY_S, 30.0) for share in shares]
    changing = steps((LOW * scale, HIGH * scale), STEP_S)
    return [*found, Load("steps", changing, 6 * STEP_S, 0.0)]


def _parameters(name: str, pair: Pair) -> dict[str, float]:
    if name == "forecast":
        return {key: round(value, 3) for key, value in pair.parameters.items()}
    return WIDE if name == "threshold, wide" else {}
