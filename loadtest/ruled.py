"""Adds to a calibration the rule to decide by: the best of the simulated ones on its own curves.

Pure, and takes seconds: see `choose`. The rule is left out where there is nothing to choose: one
server is best at every load of servers that share GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadtest.arms import Level
from loadtest.choose import OUTPUT_TOKENS, best_rule
from loadtest.simulator_contention import H200, SEPARATE, Contention, Overlap
from loadtest.simulator_load import Row
from router.calibrated import known_of
from router.calibration import Calibration, Switch, SwitchRule
from router.curves import Curve

# What a rule's name means for the file.
BY_LINE = ("threshold", "always", "never")


def with_rule(calibration: Calibration, *, rows: Sequence[Row] | None = None) -> Calibration:
    """The calibration with its switch rule, band and dwell, and a note that says why.

    `rows` is the traffic to try rules on; the shipped trace if there is none of one's own. Raises
    CurveError for curves that cannot be simulated.
    """
    curves, line = calibration.curves, calibration.line
    shared = calibration.contention is None or calibration.contention.gpus == "shared"
    if curves is None or (shared and (line.never or line.always)):
        return calibration
    known = known_of(calibration)
    found = best_rule(
        levels_of(curves.speculative),
        levels_of(curves.baseline),
        overlaps_of(calibration) if shared else SEPARATE,
        1 if shared else 2,
        rows=rows,
        # A curve in the simulator has decode steps only: two tokens are the shortest answer with one.
        output_tokens=max(2.0, known.get("output_tokens", OUTPUT_TOKENS)),
    )
    notes = (*calibration.notes, f"simulated on these curves: {found.sentence}")
    if found.name in BY_LINE:
        return msgspec.structs.replace(
            calibration, switch=Switch(**found.parameters), switch_rule=None, notes=notes
        )
    parameters = found.parameters
    if found.name == "forecast":
        parameters = parameters | {name: round(value, 3) for name, value in known.items()}
    return msgspec.structs.replace(
        calibration, switch_rule=SwitchRule(found.name, parameters), notes=notes
    )


def overlaps_of(calibration: Calibration) -> Contention:
    """The overlaps in a calibration; the ones measured on an H200 where it has none."""
    measured = calibration.contention
    points = [
        Overlap(round(o.n), round(o.m), min(1.0, o.speculative), min(1.0, o.baseline))
        for o in (measured.overlaps if measured is not None else ())
        if o.speculative is not None and o.baseline is not None
    ]
    return Contention(tuple(points)) if points else H200


def levels_of(curve: Curve) -> list[Level]:
    """The points of a calibration's curve in the simulator's form."""
    return [
        Level(point.concurrency, point.tokens_per_second, None, point.accept_length)
        for point in curve.points
    ]
