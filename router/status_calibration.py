"""What `/status` says of the calibration in force, with its curves for drawing.

Pure: what is known of it (`calibration_state`) in, one typed body out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from router.admin_models import CalibrationItem, CurvesItem, Requests
from router.calibration import Calibration
from router.calibration_state import CalibrationState
from router.curves import Curve, Number
from router.load import ROLES
from router.policy import FrontierPolicy
from router.view import RelayView

POINTS: Final = 48  # of a curve, at most: a sweep has a dozen levels


def as_requests(value: float) -> Requests:
    """JSON has no infinity: a line that is never reached is written as the word."""
    return "infinity" if value == math.inf else value


def calibration_item(relay: RelayView, state: CalibrationState) -> CalibrationItem:
    """The calibration in force, and what speaks against it."""
    terms, live, drift = state.terms, state.live, state.drift
    line, followed = terms.frontier, relay.configured
    moved = followed.frontier if isinstance(followed, FrontierPolicy) else None
    ratios = {role: drift.ratio(role) for role in ROLES} if drift is not None else {}
    return CalibrationItem(
        path=state.path,
        created=terms.calibration.created,
        age=None if state.age is None else round(state.age, 3),
        loaded=round(state.loaded_at, 3),
        verdict=terms.calibration.verdict,
        scope=line.scope,
        threshold=None if line.scope == "table" else as_requests(line.threshold),
        table=[as_requests(value) for value in line.table],
        live_threshold=None
        if moved is None or moved.scope == "table"
        else as_requests(moved.threshold),
        rule="threshold" if terms.rule is None else terms.rule.name,
        problem=state.problem,
        matches=state.judgement.matches,
        mismatches=[str(each) for each in state.judgement.mismatches],
        alarm=state.judgement.refusal,
        accept_length=None if live is None else live.live,
        accept_length_calibrated=None if live is None else live.calibrated,
        accept_length_ratio=None if live is None or live.ratio is None else round(live.ratio, 4),
        drift={role: round(ratio, 4) for role, ratio in ratios.items() if ratio is not None},
        advice=state.advice,
        curves=_curves(terms.calibration, state.ratio),
    )


def _curves(calibration: Calibration, ratio: float) -> CurvesItem | None:
    curves, interval = calibration.curves, calibration.interval
    if curves is None:
        return None
    return CurvesItem(
        speculative=downsampled(curves.speculative),
        baseline=downsampled(curves.baseline),
        ratio=round(ratio, 4),
        interval=None if interval is None else (_number(interval[0]), _number(interval[1])),
    )


def downsampled(curve: Curve, most: int = POINTS) -> list[tuple[float, float]]:
    """At most so many of a curve's points, both ends among them, in rising order.

    A point that no logarithm can be taken of is left out: it cannot be drawn.
    """
    points: Sequence[tuple[float, float]] = sorted(
        (point.concurrency, point.tokens_per_second)
        for point in curve.points
        if point.concurrency > 0 and point.tokens_per_second > 0
    )
    if len(points) > most:
        last = len(points) - 1
        points = [points[round(i * last / (most - 1))] for i in range(most)]
    return list(points)


def _number(value: Number) -> Requests:
    if value == "never":
        return 0.0
    return "infinity" if isinstance(value, str) else as_requests(value)
