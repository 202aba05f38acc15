"""Values out of untrusted answers: numbers within bounds, JSON, series of a `/metrics` page.

Two kinds of value. A *count* that the answer stands or falls with: `count` raises `UnreadableError`
when it is not a whole number of requests. An *extra*: `number` gives None for anything but a finite
number within its bounds. Neither ever makes a zero of something broken. Only the parsers of
`telemetry` and `acceptance` call this; they turn the exception into a value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

# More requests than any server runs (SGLang's own default cap is 4096): a broken figure.
MAX_COUNT: Final = 1_000_000
# More series of the names below, or data-parallel ranks, than a deployment has.
MAX_ROWS: Final = 1024

NAMES: Final = (
    "num_running_reqs",
    "num_queue_reqs",
    "token_usage",
    "gen_throughput",
    "spec_accept_length",
    "generation_tokens_total",
    "spec_verify_calls_total",
)
# Label text is bounded, and a label is found from a comma on: linear time on any bytes.
_ROW: Final = re.compile(
    rf"^sglang:({'|'.join(NAMES)})(?:\{{([^\n]{{0,2000}})\}})?[ \t]+(\S{{1,40}})".encode(),
    re.MULTILINE,
)
_LABEL: Final = re.compile(rb'(?:^|,)\s*(dp_rank|priority)="([^"\n]*)"')

Rows = dict[str, dict[bytes, float]]
"""By name, by label text: the value. A repeated series is NaN, which nothing accepts."""


class UnreadableError(Exception):
    """The answer says nothing. Its text is for the log: short, without the answer's own text."""


def number(value: object, low: float, high: float) -> float | None:
    """The value if it is a finite number from `low` to `high`; None otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        told = float(value)
    except OverflowError:  # an int may be too long for a float
        return None
    return told if low <= told <= high and told != math.inf else None  # NaN fails both


def whole(value: object) -> int | None:
    """The value if it is a whole number of requests; None otherwise."""
    told = number(value, 0.0, MAX_COUNT)
    return int(told) if told is not None and told.is_integer() else None


def count(fields: Mapping[str, object], name: str) -> int:
    """A number of requests that must be there. Raises UnreadableError when it is not."""
    value = fields.get(name)
    told = whole(value)
    if told is None:
        what = "missing" if value is None else f"{str(value)[:20]!r}"
        raise UnreadableError(f"{name} is {what}")
    return told


def json(body: bytes) -> object:
    """Decode JSON. Raises UnreadableError; Python's own NaN and Infinity are not JSON either."""
    try:
        value: object = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise UnreadableError("not JSON") from error
    return value


def series(body: bytes) -> Rows:
    """Every row of the wanted names. Raises UnreadableError when there are too many."""
    rows: Rows = {}
    for seen, match in enumerate(_ROW.finditer(body)):
        if seen >= MAX_ROWS:
            raise UnreadableError(f"more than {MAX_ROWS} series")
        name, labels, text = match[1].decode("ascii"), match[2] or b"", match[3]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        by_labels = rows.setdefault(name, {})
        by_labels[labels] = math.nan if labels in by_labels else value
    return rows


def gauge(rows: Rows, name: str, over_ranks: Callable[[list[float]], float]) -> float | None:
    """One figure for the backend: the largest within a dp rank, then `over_ranks` of these.

    Tensor and pipeline ranks of one dp rank report the same requests. With priority scheduling
    there is a row for each priority beside the total, whose priority is empty.
    """
    by_rank: dict[bytes, float] = {}
    for labels, value in rows.get(name, {}).items():
        told = dict(_LABEL.findall(labels))
        if told.get(b"priority"):
            continue
        if math.isnan(value):  # max() would drop it or keep it, by order
            return math.nan
        rank = told.get(b"dp_rank", b"")
        by_rank[rank] = max(value, by_rank.get(rank, value))
    return over_ranks(list(by_rank.values())) if by_rank else None


def counter(rows: Rows, name: str) -> float | None:
    """The sum over all series of a counter: they are disjoint (streaming or not, by priority)."""
    by_labels = rows.get(name)
    return sum(by_labels.values()) if by_labels else None
