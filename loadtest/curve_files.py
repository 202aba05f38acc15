"""Reading curves: from a file, or one of the pairs shipped in `data/`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from loadtest.service import CurveError, ServiceCurve, decode_curve
from router.load import Role

# `planted-12` is made up to cross at concurrency 12 and to be cheap to run; `h200-topk4` was
# measured (its files say how).
PAIRS: Final = ("planted-12", "h200-topk4")


def read_curve(path: Path) -> ServiceCurve:
    """The curve in a curve or sweep file. Raises CurveError, also if it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CurveError(f"{path} cannot be read: {error.strerror}") from error
    return decode_curve(data, str(path))


def shipped_curve(pair: str, role: Role) -> ServiceCurve:
    """One server of a shipped pair."""
    if pair not in PAIRS:
        raise CurveError(f"no shipped pair is called {pair!r}; there are {', '.join(PAIRS)}")
    name = f"data/{pair}/{role.value}.json"
    return decode_curve(resources.files("loadtest").joinpath(name).read_bytes(), name)
