"""Taking numbers out of documents that other programs wrote: what is not there is None.

Pure. No reader here raises: a key that is missing, null, of another type, infinite or not a number
is simply not known.
"""

from __future__ import annotations

import math
from typing import Any


class ResultsError(ValueError):
    """Results that hold no sweep, or lack a partner; one line that names the file and what was expected.

    What may be read from any program is refused with this; `sweep_schema.SweepError` is what our own
    sweep refuses to do, and our own file that cannot be read.
    """


def at(document: Any, *path: str) -> Any:
    """What is at this path of keys, or None."""
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def number(document: Any, *path: str) -> float | None:
    """A finite number, or None."""
    value = at(document, *path)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def positive(document: Any, *path: str) -> float | None:
    """A finite number above 0, or None: these formats write 0 and -1 for "not measured"."""
    value = number(document, *path)
    return value if value is not None and value > 0 else None


def count(document: Any, *path: str) -> int | None:
    """A whole number from 0 up, or None."""
    value = number(document, *path)
    return int(value) if value is not None and value >= 0 else None


def text(document: Any, *path: str) -> str | None:
    """A text that is not empty, or None."""
    value = at(document, *path)
    return value if isinstance(value, str) and value else None


def seconds(milliseconds: float | None) -> float | None:
    """Seconds of so many milliseconds."""
    return None if milliseconds is None else milliseconds / 1e3
