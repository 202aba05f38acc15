"""What a calibration holds for: facts that must be equal where it is used, and how it was made.

Pure. Facts of one server are prefixed with its role; those that both must share are not.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from loadtest.points import Fact, Sweep, Usable
from router.load import Role

# These must be the same for both servers, and for every pass.
SHARED: Final = ("model", "engine", "gpu", "dataset", "prompt_tokens", "output_tokens", "stream")
# Without these being equal the curves are of different work, and comparing them means nothing.
SAME_LOAD: Final = ("prompt_tokens", "output_tokens")
# Means of real prompts differ a little from level to level.
ABOUT: Final = 0.15


class FitError(ValueError):
    """Sweeps that give no calibration; the text is one line that says why."""


def facts_of(
    sweeps: Mapping[Role, Sequence[Sweep]],
) -> tuple[dict[str, str | int | float | bool | None], tuple[str, ...]]:
    """The fingerprint, and notes on it. Raises FitError for sweeps of different loads."""
    found: dict[str, str | int | float | bool | None] = {}
    notes: list[str] = []
    everything = [sweep for group in sweeps.values() for sweep in group]
    for key in SHARED:
        values = _distinct(everything, key)
        if len(values) > 1:
            said = " and ".join(str(value) for value in values)
            if key in SAME_LOAD:
                raise FitError(
                    f"the sweeps are of different loads: {key} {said}; fit one load at a time"
                )
            notes.append(f"the sweeps do not agree on {key}: {said}")
            found[key] = said
        elif values:
            found[key] = values[0]
    for role, group in sweeps.items():
        for key in sorted({key for sweep in group for key in sweep.facts} - set(SHARED)):
            values = _distinct(group, key)
            found[f"{role}.{key}"] = (
                values[0] if len(values) == 1 else " and ".join(map(str, values))
            )
            if len(values) > 1:
                notes.append(f"the {role} sweeps do not agree on {key}: {found[f'{role}.{key}']}")
        notes += [
            f"{sweep.name} looks like a {sweep.role} server, and was given as {role}"
            for sweep in group
            if sweep.role not in {None, role}
        ]
    return found, tuple(notes)


def _distinct(sweeps: Sequence[Sweep], key: str) -> list[Fact]:
    """The different values of a fact, the first of each; numbers that are about equal are one."""
    values: list[Fact] = []
    for sweep in sweeps:
        value = sweep.facts.get(key)
        if value is not None and not any(_same(value, other) for other in values):
            values.append(value)
    return sorted(values, key=str)


def _same(one: Fact, other: Fact) -> bool:
    if isinstance(one, bool | str) or isinstance(other, bool | str):
        return one == other
    return abs(one - other) <= ABOUT * max(abs(one), abs(other))


def conditions_of(
    sweeps: Mapping[Role, Sequence[Sweep]], usables: Mapping[Role, Usable]
) -> dict[str, str]:
    """How it was measured, in words, for a reader."""
    found: dict[str, str] = {}
    for role, group in sweeps.items():
        points = [point for _, point in usables[role].points]
        levels = sorted({point.concurrency for point in points})
        found[f"{role}.files"] = ", ".join(sorted(f"{s.name} ({s.kind})" for s in group))
        found[f"{role}.levels"] = ", ".join(f"{level:g}" for level in levels)
        found[f"{role}.measurements"] = str(len(points))
        seconds = [point.seconds for point in points if point.seconds is not None]
        if seconds:
            found[f"{role}.seconds"] = f"{statistics.median(seconds):g} a level"
        if usables[role].left_out:
            found[f"{role}.not_used"] = "; ".join(usables[role].left_out)
        remarks = sorted({f"{s.name}: {remark}" for s in group for remark in s.remarks})
        if remarks:
            found[f"{role}.remarks"] = "; ".join(remarks)
    return found
