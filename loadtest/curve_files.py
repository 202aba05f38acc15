"""Reading curves: from a file, or one of the pairs shipped in `data/`.

A file is a curve, a sweep in this project's first format (`C`, `out_tok_s`), or what
`loadtest sweep` and `loadtest calibrate` leave, a `sweep.json`, which may hold both servers.

It only reads; what makes a curve is in `service`.
"""

from __future__ import annotations

import statistics
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec

from loadtest import sweep_schema
from loadtest.service import (
    CurveError,
    Percentiles,
    ServiceCurve,
    Sweep,
    SweepPoint,
    decode_curve,
    from_sweep,
)
from router.load import Role

# `planted-12` is made up to cross at concurrency 12 and to be cheap to run; `h200-topk4` was
# measured (its files say how).
PAIRS: Final = ("planted-12", "h200-topk4")


class _Named(msgspec.Struct, frozen=True):
    """What tells a `sweep.json` from other files."""

    schema: str = ""


def read_curve(path: Path, role: Role | None = None) -> ServiceCurve:
    """The curve in a curve or sweep file. Raises CurveError, also if it cannot be read.

    `role` says which server of a `sweep.json` that holds both; one that holds one server is taken
    as it is, whatever its role.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CurveError(f"{path} cannot be read: {error.strerror}") from error
    try:
        named = msgspec.json.decode(data, type=_Named).schema
    except msgspec.MsgspecError:
        named = ""
    if named != sweep_schema.SCHEMA:
        return decode_curve(data, str(path))
    try:
        found = sweep_schema.decode_sweep(data, str(path))
    except sweep_schema.SweepError as error:
        raise CurveError(str(error)) from error
    return from_sweep(_as_sweep(found, str(path), role))


def _as_sweep(found: sweep_schema.Sweep, name: str, role: Role | None) -> Sweep:
    """One server of a `sweep.json`, in the form that a curve is computed from."""
    roles = sorted({point.role for point in found.points})
    if len(roles) > 1 and role is None:
        raise CurveError(f"{name} holds the sweeps of {' and '.join(roles)}: say which is meant")
    wanted = role if role in roles else next(iter(roles), None)
    usable = [
        (point, point.level, point.ttft_s.p50, point.input_tokens, point.output_tokens)
        for point in found.points
        if point.role is wanted and not point.gave_up and point.output_tok_s.value > 0
    ]
    points: list[SweepPoint] = []
    prompts: list[float] = []
    answers: list[float] = []
    for point, level, first, prompt, answer in usable:
        if level is None or first is None or prompt is None or answer is None:
            continue  # of an open loop, or a server that counts no tokens
        speed = point.output_tok_s.value
        per_step = max(1.0, point.accept_length or 1.0)
        points.append(SweepPoint(level, speed, per_step, Percentiles(1e3 * first.value)))
        prompts.append(prompt)
        answers.append(answer)
    if not points:
        raise CurveError(f"{name} holds no level that was measured with token counts")
    mean = round(statistics.fmean(answers))
    label = f"{wanted}, {Path(name).name}"
    source = {"source": f"{name}, a sweep of {found.created}"}
    return Sweep(label, round(statistics.fmean(prompts)), (mean, mean), tuple(points), source)


def shipped_curve(pair: str, role: Role) -> ServiceCurve:
    """One server of a shipped pair."""
    if pair not in PAIRS:
        raise CurveError(f"no shipped pair is called {pair!r}; there are {', '.join(PAIRS)}")
    name = f"data/{pair}/{role.value}.json"
    return decode_curve(resources.files("loadtest").joinpath(name).read_bytes(), name)
