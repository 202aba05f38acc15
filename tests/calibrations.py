"""Calibration files for tests: curves with a known crossover, and accept lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from router.calibration import Calibration, format_calibration, parse_calibration
from router.curves import Curve, Curves, Point

LEVELS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
ACCEPT = 2.8
# Requests and tokens per second of a pair that crosses between 8 and 32.
FAST = [(1.0, 200.0), (8.0, 1000.0), (32.0, 1600.0)]
WIDE = [(1.0, 100.0), (8.0, 700.0), (32.0, 2000.0)]


def planted(crossover: float = 16.0, *, accept: float | None = ACCEPT) -> Curves:
    """Power laws that cross there: each doubling of the speculative lead moves it by a factor 4."""
    return Curves(
        speculative=Curve(
            tuple(Point(c, 100.0 * c**0.5 * crossover**0.5, accept_length=accept) for c in LEVELS)
        ),
        baseline=Curve(tuple(Point(c, 100.0 * c) for c in LEVELS)),
    )


def document(
    threshold: Any = 16, *, curves: Curves | None = None, scope: str = "total", **fields: Any
) -> bytes:
    """A calibration file with this line; `fields` are the document's own."""
    written: dict[str, Any] = {
        "schema": "crossover.calibration/1",
        "frontier": {"scope": scope, "threshold": threshold},
        **fields,
    }
    found = parse_calibration(json.dumps(written).encode())
    if curves is not None:
        known = {name: getattr(found, name) for name in found.__struct_fields__}
        found = Calibration(**(known | {"curves": curves}))
    return format_calibration(found)


def written(folder: Path, **fields: Any) -> str:
    """The path of a calibration of FAST and WIDE with a line at 12; `fields` are the document's."""
    curves = {
        name: {"points": [{"concurrency": c, "tokens_per_second": r} for c, r in levels]}
        for name, levels in (("speculative", FAST), ("baseline", WIDE))
    }
    body = {"schema": "crossover.calibration/1", "frontier": {"threshold": 12}, "curves": curves}
    path = folder / "calibration.json"
    path.write_text(json.dumps(body | fields))
    return str(path)
