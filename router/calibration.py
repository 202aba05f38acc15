"""The calibration file: the line, the curves it came from, and the conditions it holds for.

A versioned JSON document. Written by a calibrator, or by hand:

    {"schema": "crossover.calibration/1", "verdict": "at",
     "frontier": {"scope": "total", "threshold": 32}}

`threshold` is a number of requests, or "always", or "never"; a table of F(0), F(1), ... takes its
place where `scope` is "table" ("infinity" in it is allowed). Everything but `schema` and `frontier`
may be missing. Unknown keys are refused, so that a misspelt one is not silently without effect.
Reading and writing the file is for the shell to do.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from router.curves import Crossover, Curve, Curves, Number, Point, Verdict
from router.frontier import Frontier

__all__ = [
    "SCHEMA", "Calibration", "CalibrationError", "Contention", "Curve", "Curves", "Line", "Overlap",
    "Point", "Switch", "SwitchRule", "format_calibration", "parse_calibration",
]  # fmt: skip

SCHEMA: Final = "crossover.calibration/1"


class CalibrationError(ValueError):
    """The document is not a calibration; the text says where and why."""


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The frontier as written."""

    scope: Literal["total", "speculative", "table"] = "total"
    threshold: Number | None = None
    table: tuple[Number, ...] = ()


class Switch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to come back below the line: a share of it, and seconds. None: as configured."""

    band: float | None = None
    dwell: float | None = None


class SwitchRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When to change the server, by name, for a policy that knows the name. Opaque here."""

    name: str
    parameters: dict[str, float] = {}


class Overlap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Both servers under load at once: the share of its own speed that each kept."""

    n: float  # requests on the speculative server
    m: float  # requests on the baseline server
    speculative: float | None = None  # None: its speed alone is not known
    baseline: float | None = None


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the two servers do to each other."""

    gpus: Literal["shared", "split"]
    overlaps: tuple[Overlap, ...] = ()
    speculative: float | None = None  # mean share kept
    baseline: float | None = None


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The whole document."""

    schema: str
    frontier: Line
    verdict: Verdict | None = None
    objective: str | None = None  # what the line was chosen for: a key of `objectives`
    interval: tuple[Number, Number] | None = None  # of the crossover, requests
    objectives: dict[str, Crossover] = {}
    switch: Switch = Switch()
    switch_rule: SwitchRule | None = None
    contention: Contention | None = None
    # What must be the same where the file is used: model, draft, engine, flags, GPU, prompts.
    fingerprint: dict[str, str | int | float | bool | None] = {}
    conditions: dict[str, str] = {}  # how it was measured: files, levels, passes, what was left out
    notes: tuple[str, ...] = ()  # what whoever uses the file should know
    created: str | None = None
    command: str | None = None
    note: str | None = None
    curves: Curves | None = None

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


def format_calibration(calibration: Calibration) -> bytes:
    """The document to write: what `parse_calibration` reads back as it was."""
    return msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n"
