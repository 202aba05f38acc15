"""What sweeps say, in one form: levels measured on one server, and what is known of that server.

Pure. Importers make these values from files of other tools, `from_records` from our own records;
the fit reads nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from loadtest.record import RequestRecord
from router.load import Role

Fact = str | int | float | bool

# More of the level waiting inside the server than this: the level measured a queue, not a batch.
QUEUED: Final = 0.1
# More errors than this: what was measured is not what was asked for.
FAILED: Final = 0.05
# The server's own accept length is a mean since its start; further from what the client saw than
# this, it is of another load.
LIFETIME: Final = 0.1


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One level of one pass. Times in seconds; what was not measured is None."""

    concurrency: float
    tokens_per_second: float  # output tokens of all requests together
    ttft: float | None = None  # to the first token, median over requests
    ttft_tail: float | None = None  # its 99th percentile
    time_per_token: float | None = None  # after the first token, median over requests
    time_per_token_tail: float | None = None
    accept_length: float | None = None  # as the server says
    tokens_per_chunk: float | None = None  # as the client saw
    waiting: int | None = None  # requests queued inside the server, from its telemetry
    requests: int | None = None
    errors: int = 0
    seconds: float | None = None  # how long was measured

    @property
    def acceptance(self) -> float | None:
        """Tokens per verify step, from the better of the two sources."""
        told, seen = self.accept_length, self.tokens_per_chunk
        if told is None or seen is None:
            return told if told is not None else seen
        return told if abs(told / seen - 1.0) <= LIFETIME else seen


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """One file: the levels of one or more passes over one server."""

    name: str  # of the file
    kind: str  # the format it came in
    points: tuple[Measured, ...]
    facts: Mapping[str, Fact] = {}  # what must be equal where the calibration is used
    remarks: tuple[str, ...] = ()
    cap: int | None = None  # effective max_running_requests
    role: Role | None = None  # where the file tells


class Usable(msgspec.Struct, frozen=True):
    """The levels of one role that may be used, and in words what was left out and why."""

    points: tuple[tuple[str, Measured], ...]  # file, level
    left_out: tuple[str, ...]
    cap: int | None


def of_role(sweeps: Sequence[Sweep], role: Role) -> list[Sweep]:
    """Of a file that holds both servers' sweeps, those of this one; of any other, all."""
    if len({sweep.role for sweep in sweeps}) < 2:
        return list(sweeps)
    return [sweep for sweep in sweeps if sweep.role is role]


def usable(sweeps: Sequence[Sweep]) -> Usable:
    """Drop levels that did not measure the server at that concurrency. Raises nothing."""
    caps = [sweep.cap for sweep in sweeps if sweep.cap is not None]
    cap = min(caps, default=None)
    kept: list[tuple[str, Measured]] = []
    out: list[str] = []
    for sweep in sweeps:
        for point in sorted(sweep.points, key=lambda point: point.concurrency):
            reason = _reason(point, cap)
            if reason is None:
                kept.append((sweep.name, point))
            else:
                out.append(f"{sweep.name}, {point.concurrency:g} requests: {reason}")
    return Usable(tuple(kept), tuple(out), cap)


def _reason(point: Measured, cap: int | None) -> str | None:
    if cap is not None and point.concurrency > cap:
        return f"above the server's max_running_requests of {cap}, so the rest queued"
    if (point.waiting or 0) > QUEUED * point.concurrency:
        return f"{point.waiting} of them were waiting inside the server"
    if point.requests is not None and point.errors > FAILED * (point.requests + point.errors):
        return f"{point.errors} of {point.requests + point.errors} failed"
    if not (point.tokens_per_second > 0 and point.concurrency >= 1):
        return "no output"
    return None


def from_records(name: str, records: Iterable[RequestRecord]) -> list[Sweep]:
    """Sweeps from our own records: one for each role, each run a pass, each `level` a level.

    Records without a level belong to no sweep and are passed over. A level is measured from the
    moment its last slot was filled to the last start in it, in which the load was held.
    """
    groups: dict[Role | None, dict[tuple[str, int], list[RequestRecord]]] = {}
    for record in records:
        if record.level:
            at = groups.setdefault(record.backend, {}).setdefault((record.run, record.level), [])
            at.append(record)
    return [
        Sweep(
            name=name,
            kind="request records",
            points=tuple(_level(level, group) for (_, level), group in sorted(levels.items())),
            role=role,
        )
        for role, levels in groups.items()
    ]


def _level(level: int, records: Sequence[RequestRecord]) -> Measured:
    starts = sorted(record.started for record in records)
    start, end = starts[min(level, len(starts)) - 1], starts[-1]
    if end <= start:  # one wave
        start, end = starts[0], max(record.ended for record in records)
    good = [record for record in records if record.ok]
    tokens = math.fsum(record.tokens_between(start, end) for record in good)
    first = [r.first_chunk - r.started for r in good if r.first_chunk is not None]
    each = [
        (r.ended - r.first_chunk) / (r.output_tokens - 1)
        for r in good
        if r.first_chunk is not None and (r.output_tokens or 0) > 1 and r.output_tokens
    ]
    return Measured(
        concurrency=level,
        tokens_per_second=tokens / (end - start) if end > start else 0.0,
        ttft=_share(first, 0.5),
        ttft_tail=_share(first, 0.99),
        time_per_token=_share(each, 0.5),
        time_per_token_tail=_share(each, 0.99),
        requests=len(good),
        errors=len(records) - len(good),
        seconds=end - start,
    )


def _share(values: Sequence[float], share: float) -> float | None:
    """The value that this share of the values does not exceed; None without values."""
    if not values:
        return None
    if share == 0.5:
        return statistics.median(values)
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
