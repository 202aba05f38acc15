"""The curve of one server as a calibration file holds it.

Pure. Speed is smoothed, with a band; the rest is the median over the passes of a level.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable
from typing import Final

from loadtest.points import Measured, Usable
from loadtest.robust import TYPICAL_NOISE, Fitted
from router.curves import Curve, Curves, Point

_REPLICATES: Final = 200
_SEED: Final = 7
# Of a band: the share of curves, measured again, that would lie in it at any one level.
BAND: Final = 0.95
# Accept lengths of this relative spread over a sweep are one number.
STEADY: Final = 0.15


def curve_of(found: Usable, fitted: Fitted) -> Curve:
    """The points of a fit of throughput."""
    left_out = {round(sample.y, 9) for sample in fitted.outliers}
    kept: dict[float, list[Measured]] = {}
    for _, point in found.points:
        x = math.log(point.concurrency)
        level = min(fitted.levels, key=lambda level: abs(level - x))
        if round(math.log(point.tokens_per_second), 9) not in left_out:
            kept.setdefault(level, []).append(point)
    low, high = _band(fitted)
    return Curve(
        points=tuple(
            _point(x, kept[x], math.exp(y), math.exp(down), math.exp(up))
            for x, y, down, up in zip(fitted.levels, fitted.values, low, high, strict=True)
        ),
        noise=round(fitted.noise, 4),
        deviation=round(fitted.deviation, 4) if fitted.deviation else None,
        cap=found.cap,
        left_out=tuple(
            (round(math.exp(sample.x), 6), round(math.exp(sample.y), 2))
            for sample in fitted.outliers
        ),
    )


def _point(x: float, level: list[Measured], speed: float, low: float, high: float) -> Point:
    accept = _median(point.acceptance for point in level)
    return Point(
        concurrency=round(math.exp(x), 6),
        tokens_per_second=round(speed, 2),
        low=round(low, 2),
        high=round(high, 2),
        accept_length=None if accept is None else round(accept, 4),
        steps_per_second=None if accept is None else round(speed / accept, 3),
        time_per_token=_rounded(_median(point.time_per_token for point in level)),
        ttft=_rounded(_median(point.ttft for point in level)),
        measured=tuple(sorted(round(point.tokens_per_second, 2) for point in level)),
    )


def _band(fitted: Fitted) -> tuple[list[float], list[float]]:
    rng = random.Random(_SEED)
    columns = zip(*(fitted.replicate(rng) for _ in range(_REPLICATES)), strict=True)
    low, high = [], []
    out = round((1.0 - BAND) / 2 * _REPLICATES)
    for column, value in zip(columns, fitted.values, strict=True):
        ordered = sorted(column)
        low.append(min(ordered[out], value))
        high.append(max(ordered[-1 - out], value))
    return low, high


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def notes_on(curves: Curves) -> tuple[str, ...]:
    """What the curves themselves give to think about."""
    notes: list[str] = []
    once = [
        role
        for role, curve in (("speculative", curves.speculative), ("baseline", curves.baseline))
        if all(len(point.measured) < 2 for point in curve.points)
    ]
    if once:
        notes.append(
            f"no level of the {' or the '.join(once)} server was measured twice: that one"
            f" measurement is good to about {TYPICAL_NOISE:.0%} is taken for granted"
        )
    base = [p.accept_length for p in curves.baseline.points if p.accept_length is not None]
    if base and max(base) > 1.0 + STEADY:
        notes.append(f"the baseline accepts {max(base):.2f} tokens a step: it speculates")
    spec = [p.accept_length for p in curves.speculative.points if p.accept_length is not None]
    if spec and max(spec) > min(spec) * (1.0 + STEADY):
        notes.append(
            f"the accept length falls from {max(spec):.2f} to {min(spec):.2f} over the levels:"
            " the server changes its speculation with the load"
        )
    return tuple(notes)
