"""A calibration in words: what a fit prints, and what would settle what it is not sure of.

Pure: values in, lines out. The last line is always the verdict word alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from loadtest.crossing import Crossing, Pair
from loadtest.robust import Fitted
from router.calibration import Calibration
from router.curves import Crossover, Curve, Number
from router.load import Role

# Closer than this at every level, nobody will notice which of the two served him.
NO_MATTER: Final = 0.03
OBJECTIVES: Final = {
    "throughput": "output tokens per second",
    "time_per_token": "time per token after the first",
    "ttft": "time to the first token",
    "slo": "margin to the limits (SLO)",
}


def settle(found: Crossing, speculative: Fitted, baseline: Fitted, cap: int | None) -> str:
    """What would make this unsure answer sure, most useful first."""
    pair = Pair(speculative, baseline)
    lead = pair.lead(speculative.values, baseline.values)
    largest = math.expm1(max(map(abs, lead)))
    if largest < NO_MATTER:
        return (
            f"the servers differ by at most {largest:.1%} at every level: either will do, and only"
            " many more passes could tell them apart"
        )
    advice: list[str] = []
    last = math.exp(pair.grid[-1])
    if math.isinf(found.high):
        if cap is not None and last >= cap * 0.99:
            advice.append(
                f"a higher --max-running-requests of the speculative server (now {cap}) and levels"
                " above it"
            )
        else:
            advice.append(f"levels above {last:.0f}")
    low = max(found.low, math.exp(pair.grid[0]))
    high = min(found.high, last)
    times = max(1, math.ceil(min(9, _more_passes(found))))
    advice.append(f"{times} more pass{'es' * (times > 1)} from {low:.0f} to {high:.0f}")
    return " and ".join(advice)


def _more_passes(found: Crossing) -> float:
    """Passes to add so that the interval narrows to a third of the cut; noise falls with the root."""
    if not 0 < found.cut < math.inf or found.low <= 0 or math.isinf(found.high):
        return 3
    return ((found.high - found.low) / (0.35 * found.cut)) ** 2 - 1


def describe(calibration: Calibration) -> Iterator[str]:
    """The lines that a fit prints."""
    for name, crossover in calibration.objectives.items():
        yield f"{OBJECTIVES.get(name, name)}: {sentence(crossover, top_level(calibration))}"
    yield f"line: {line_words(calibration)}"
    for note in describe_notes(calibration):
        yield f"note: {note}"
    if calibration.verdict is not None:
        yield calibration.verdict


def describe_notes(calibration: Calibration) -> Iterator[str]:
    """What a reader must know besides the answer."""
    if calibration.curves is not None:
        for role in Role:
            yield from _curve(role, getattr(calibration.curves, role.value))
    for key, text in calibration.conditions.items():
        if key.endswith("not_used"):
            yield f"not used: {text}"
    for crossover in calibration.objectives.values():
        if crossover.holds_up_to is not None:
            held = " and ".join(f"{role} up to {n:g}" for role, n in crossover.holds_up_to.items())
            yield f"the limits are met by {held} requests"
    if calibration.contention is not None:
        kept = calibration.contention
        shares = " and ".join(
            f"the {role} server keeps {share:.0%}"
            for role, share in (("speculative", kept.speculative), ("baseline", kept.baseline))
            if share is not None
        )
        yield f"with both under load ({len(kept.overlaps)} runs) {shares} of its own speed"
    yield from calibration.notes


def _curve(role: Role, curve: Curve) -> Iterator[str]:
    levels = {point.concurrency for point in curve.points}
    for level, speed in curve.left_out:
        once = "" if level in levels else "; it was measured once, so measure it again"
        yield (
            f"outlier, left out: {role} at {level:g} requests: {speed:.0f} tok/s"
            f" where the curve has {curve.tokens_per_second(level):.0f}{once}"
        )
    if curve.deviation is not None:
        yield (
            f"single levels of the {role} curve deviate from a smooth one by about"
            f" {curve.deviation:.0%}, more than noise explains: the curve follows them"
        )


def top_level(calibration: Calibration) -> float | None:
    """The last level that both sweeps have."""
    if calibration.curves is None:
        return None
    pair = (calibration.curves.speculative, calibration.curves.baseline)
    return min(max(point.concurrency for point in curve.points) for curve in pair)


def sentence(crossover: Crossover, top: float | None = None) -> str:
    """One objective in words."""
    again = ""
    if crossover.again is not None:
        again = f", but the speculative server is ahead from {crossover.again:.0f} on"
    if crossover.verdict == "never":
        return f"never: the baseline is ahead from the first level on{again}"
    if crossover.verdict == "always":
        until = "" if top is None else f" up to {top:g}, the last level measured"
        return f"always: the speculative server is ahead{until}"
    interval = ""
    if crossover.interval is not None:
        interval = f" [{', '.join(_edge(end) for end in crossover.interval)}]"
    if crossover.verdict == "at":
        return f"at {whole(crossover.crossover)}{interval}{again}"
    return (
        f"unsure, best guess {whole(crossover.crossover)}{interval}{again};"
        f" to settle it: {crossover.settle}"
    )


def whole(number: Number) -> str:
    """A crossover as the K that it gives."""
    if isinstance(number, str):
        return {"infinity": "always"}.get(number, number)
    return "never" if number < 1 else f"{math.floor(number + 1e-9)}"


def _edge(number: Number) -> str:
    return "no end" if isinstance(number, str) else f"{number:.0f}"


def line_words(calibration: Calibration) -> str:
    """The frontier in words."""
    line = calibration.frontier
    if line.scope == "table":
        return "a table"
    counted = "n + m" if line.scope == "total" else "n"
    threshold = line.threshold if line.threshold is not None else "never"
    if isinstance(threshold, str) or threshold == 0:
        return f"speculate {whole(threshold)} (scope {line.scope})"
    return f"speculate while {counted} < {threshold:g} (scope {line.scope})"
