"""From measured sweeps of both servers to a calibration.

Pure: sweeps in, calibration out; the date, the command and the files come from the shell. The same
sweeps give the same calibration, whatever their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from loadtest.conditions import FitError, conditions_of, facts_of
from loadtest.contention import Both, contention
from loadtest.crossing import CONFIDENCE, REPLICATES, Crossing, cross
from loadtest.curve import curve_of, notes_on
from loadtest.fit_words import settle
from loadtest.objectives import OBJECTIVES, Objective, Slo, fit_objective, holds_up_to
from loadtest.points import Sweep, Usable, usable
from loadtest.robust import Fitted
from router.calibration import SCHEMA, Calibration, Line
from router.curves import Crossover, Curves, Number
from router.load import Role

Gpus = Literal["shared", "split"]
Fits = Mapping[Role, Fitted | None]


def fit(
    baseline: Sequence[Sweep],
    speculative: Sequence[Sweep],
    *,
    both: Sequence[Both] = (),
    gpus: Gpus | None = None,
    objective: Objective = "throughput",
    slo: Slo | None = None,
    created: str | None = None,
    command: str | None = None,
    replicates: int = REPLICATES,
) -> Calibration:
    """The calibration of this pair. Raises FitError."""
    sweeps = {Role.SPECULATIVE: tuple(speculative), Role.BASELINE: tuple(baseline)}
    facts, notes = facts_of(sweeps)
    usables = {role: _some(role, usable(found)) for role, found in sweeps.items()}
    fits: dict[Objective, Fits] = {
        name: {
            role: fit_objective([point for _, point in found.points], name, slo or Slo())
            for role, found in usables.items()
        }
        for name in OBJECTIVES
    }
    crossings = _crossings(fits, replicates)
    if objective not in crossings:
        raise FitError(_why_not(objective, fits[objective]))
    crossovers: dict[str, Crossover] = {
        name: _crossover(name, found, fits[name], usables[Role.SPECULATIVE].cap)
        for name, found in crossings.items()
    }
    curves = _curves(usables, fits["throughput"])
    servers = {role: facts.get(f"{role}.server") for role in Role}
    kept, said = contention(both, curves, servers)
    if gpus and kept and gpus != kept.gpus:
        said = (*said, f"--gpus {gpus}, but both at once looks like {kept.gpus} GPUs")
    sharing = gpus or (kept.gpus if kept else "shared")
    main = crossings[objective]
    return Calibration(
        schema=SCHEMA,
        frontier=Line(
            scope="total" if sharing == "shared" else "speculative", threshold=_whole(main.cut)
        ),
        verdict=main.verdict,
        objective=objective,
        interval=crossovers[objective].interval,
        objectives=crossovers,
        contention=kept,
        fingerprint=facts,
        conditions=conditions_of(sweeps, usables),
        notes=(*notes, *said, *notes_on(curves), *_unmeasured(main, fits[objective])),
        created=created,
        command=command,
        curves=curves,
    )


def _some(role: Role, found: Usable) -> Usable:
    if not found.points:
        reasons = "; ".join(found.left_out[:2]) or "there is none"
        raise FitError(f"no level of the {role} sweeps can be used: {reasons}")
    return found


def _crossings(fits: Mapping[Objective, Fits], replicates: int) -> dict[Objective, Crossing]:
    """What can be compared: measured on both servers, with a range of levels in common."""
    found: dict[Objective, Crossing] = {}
    for name, curves in fits.items():
        spec, base = curves[Role.SPECULATIVE], curves[Role.BASELINE]
        if spec is not None and base is not None and _overlap(spec, base):
            found[name] = cross(spec, base, replicates)
    return found


def _overlap(one: Fitted, other: Fitted) -> bool:
    return max(one.levels[0], other.levels[0]) <= min(one.levels[-1], other.levels[-1])


def _why_not(objective: Objective, curves: Fits) -> str:
    for role, curve in curves.items():
        if curve is None:
            return f"{objective} was not measured in the {role} sweeps"
    return "the two sweeps have no range of concurrency in common"


def _curves(usables: Mapping[Role, Usable], fits: Fits) -> Curves:
    made = {role: curve_of(usables[role], curve) for role, curve in fits.items() if curve}
    return Curves(made[Role.SPECULATIVE], made[Role.BASELINE])


def _crossover(name: Objective, found: Crossing, fits: Fits, cap: int | None) -> Crossover:
    spec, base = fits[Role.SPECULATIVE], fits[Role.BASELINE]
    if spec is None or base is None:
        raise FitError(_why_not(name, fits))
    interval: tuple[Number, Number] | None = None
    if found.verdict in {"at", "unsure"}:
        interval = _number(found.low), _number(found.high)
    held = {"speculative": holds_up_to(spec), "baseline": holds_up_to(base)}
    return Crossover(
        verdict=found.verdict,
        crossover=_number(found.cut),
        interval=interval,
        confidence=CONFIDENCE if interval is not None else None,
        again=None if found.again is None else round(found.again, 2),
        settle=settle(found, spec, base, cap) if found.verdict == "unsure" else None,
        holds_up_to=held if name == "slo" else None,
    )


def _number(value: float) -> Number:
    return "infinity" if math.isinf(value) else round(value, 2)


def _whole(cut: float) -> Number:
    """K = floor(c): at level c a sweep keeps c requests running, and n + m < K lets K run."""
    if math.isinf(cut):
        return "always"
    # 47.9999999 is a level of 48 after a logarithm and back.
    return float(math.floor(cut + 1e-9)) if cut >= 1 else "never"


def _unmeasured(found: Crossing, curves: Fits) -> tuple[str, ...]:
    """What the levels leave unsaid: nothing is known below the first, or in a wide gap."""
    notes: list[str] = []
    first = max(math.exp(curve.levels[0]) for curve in curves.values() if curve is not None)
    if first > 1.5:
        notes.append(f"nothing was measured below {first:.0f} requests")
    if found.gap is not None and found.gap[1] > 2.5 * found.gap[0]:
        notes.append(
            f"nothing was measured between {found.gap[0]:.0f} and {found.gap[1]:.0f} requests, where"
            " the curves cross: the interval is what their shape allows there"
        )
    return tuple(notes)
