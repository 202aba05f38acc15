"""The calibration file: the line, the curves it came from, and the conditions it holds for.

A versioned JSON document. Written by a calibrator, or by hand:

    {"schema": "crossover.calibration/1", "verdict": "at",
     "frontier": {"scope": "total", "threshold": 32}}

`threshold` is a number of requests, or "always", or "never"; a table of F(0), F(1), ... takes its
place where `scope` is "table" ("infinity" in it is allowed). Unknown keys are refused, so that a
misspelt one is not silently without effect. Reading the file is for the shell to do.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from router.frontier import Frontier

SCHEMA: Final = "crossover.calibration/1"

Number = float | Literal["always", "never", "infinity"]
Verdict = Literal["at", "always", "never", "unsure"]


class CalibrationError(ValueError):
    """The document is not a calibration; the text says where and why."""


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frontier as written."""

    scope: Literal["total", "speculative", "table"] = "total"
    threshold: Number | None = None
    table: tuple[Number, ...] = ()


class Switch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to come back below the line: a share of it, and seconds. None: as configured."""

    band: float | None = None
    dwell: float | None = None


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured level of one server."""

    concurrency: float
    tokens_per_second: float
    low: float | None = None  # confidence interval of tokens_per_second
    high: float | None = None
    accept_length: float | None = None


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one server did over the levels of a sweep."""

    points: tuple[Point, ...]


class Curves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both servers."""

    speculative: Curve
    baseline: Curve


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole document."""

    schema: str
    frontier: Line
    verdict: Verdict | None = None
    switch: Switch = Switch()
    curves: Curves | None = None
    interval: tuple[float, float] | None = None  # of the crossover, requests
    fingerprint: dict[str, str | int | float | bool | None] = {}
    created: str | None = None
    command: str | None = None
    note: str | None = None

    @property
    def line(self) -> Frontier:
        """The frontier to decide with. Raises CalibrationError when it is not one."""
        written = self.frontier
        table = written.scope == "table"
        if (written.threshold is None) is not table or bool(written.table) is not table:
            msg = f"frontier: scope {written.scope} and its threshold or table do not go together"
            raise CalibrationError(msg)
        try:
            if written.threshold is None:
                return Frontier.from_table(tuple(_number(v) for v in written.table))
            return Frontier(written.scope, _number(written.threshold))
        except ValueError as error:
            msg = f"frontier: {error}"
            raise CalibrationError(msg) from error


def _number(value: Number) -> float:
    if value == "never":
        return 0.0
    return math.inf if isinstance(value, str) else value


def parse_calibration(document: bytes) -> Calibration:
    """Read a calibration. Raises CalibrationError that names the place."""
    try:
        found = msgspec.json.decode(document, type=Calibration)
    except msgspec.DecodeError as error:
        hint = ""
        if "frontier.threshold" in str(error):
            hint = ' (a number of requests, "always" or "never")'
        raise CalibrationError(f"{error}{hint}") from error
    if found.schema != SCHEMA:
        msg = f"schema: {found.schema!r} is not {SCHEMA!r}"
        raise CalibrationError(msg)
    switch = found.switch
    if switch.band is not None and not 0.0 <= switch.band < 1.0:
        msg = f"switch.band: {switch.band} is not from 0 up to but not 1"
        raise CalibrationError(msg)
    if switch.dwell is not None and not 0.0 <= switch.dwell < math.inf:
        msg = f"switch.dwell: {switch.dwell} is not a number of seconds from 0 up"
        raise CalibrationError(msg)
    line = found.line
    said = found.verdict
    fits = {"never": line.never, "always": line.always, "at": not (line.never or line.always)}
    if said is not None and not fits.get(said, True):
        msg = f"verdict {said!r} and the frontier contradict each other"
        raise CalibrationError(msg)
    return found
