"""One request as it was measured: the seam between measuring and reporting.

Whoever measures writes `RequestRecord`s, one JSON object a line; whoever reports reads them. Nothing
is summed up on the way, so any statistic can be computed again later from the file.

Times are seconds since the start of the run. A run's clock starts with its load, so records of
several runs of the same load lie on top of each other. What is not known is None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from router.load import Role

Threshold = float | Literal["infinity"]


class RecordError(ValueError):
    """A file that holds no records; the message names file and line."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request, from the moment before it was sent to the moment its answer had ended."""

    id: str  # the router's x-request-id if there is a router, else the client's own
    run: str = ""  # which run of a measurement
    level: int | None = None  # requests that the load wanted in flight when this one started

    # What the router said of its decision; None without a router.
    backend: Role | None = None
    reason: str | None = None
    n: int | None = None  # concurrency of the speculative backend, without this request
    m: int | None = None  # the same of the baseline backend
    threshold: Threshold | None = None

    started: float
    first_chunk: float | None = None  # the first byte of the answer's body
    ended: float

    status: int | None = None  # None: there was no answer
    prompt_tokens: int | None = None  # from usage
    output_tokens: int | None = None  # from usage
    asked_tokens: int | None = None  # output tokens that were asked for, if the load says so
    error: str | None = None  # what went wrong, in a few words; None for a complete answer

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return self.error is None

    @property
    def seconds(self) -> float:
        """From the start to the end of the answer."""
        return self.ended - self.started

    @property
    def seconds_per_token(self) -> float | None:
        """The request's whole time for each output token: what its user waits, first token included."""
        return self.seconds / self.output_tokens if self.output_tokens else None

    def tokens_between(self, start: float, end: float) -> float:
        """Output tokens that came in this window, taken to come evenly from first chunk to end."""
        if not self.output_tokens or self.first_chunk is None:
            return 0.0
        span = self.ended - self.first_chunk
        if span <= 0:
            return float(self.output_tokens) if start <= self.ended < end else 0.0
        inside = min(self.ended, end) - max(self.first_chunk, start)
        return self.output_tokens * max(0.0, inside) / span


def as_threshold(value: float) -> Threshold:
    """JSON has no infinity: a line that is never reached is written as the word."""
    return "infinity" if value == math.inf else value


def as_number(threshold: Threshold | None) -> float | None:
    """The other way round."""
    return math.inf if threshold == "infinity" else threshold


def encode_records(records: Iterable[RequestRecord]) -> bytes:
    """One JSON object a line."""
    return msgspec.json.Encoder().encode_lines(list(records))


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """Write them in place of what the file held."""
    path.write_bytes(encode_records(records))


def read_records(path: Path) -> Iterator[RequestRecord]:
    """The records of a file, in its order. Raises RecordError at the first line that is none."""
    decoder = msgspec.json.Decoder(RequestRecord)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise RecordError(f"{path}, line {number}: no request record: {error}") from error
