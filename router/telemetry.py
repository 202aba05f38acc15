"""What a backend says about its load, read without trusting it: bytes to `Telemetry`.

The law of this file: an answer is understood or it is unknown. A count that is missing, renamed,
negative, not a number, given twice or of the wrong type makes the whole answer `Unreadable`; an
extra figure (cache use, cap, throughput) that is broken is None. Nothing broken ever becomes a
zero, which would read as "idle", nor a full server. No function here raises on any bytes.

Shapes are those of SGLang 0.5.9 to 0.5.23. When the backend took its snapshot is told by

    taken_at = sent_at - lag,    lag = max(0, answered - snapshot)

where both stamps are the backend's own wall clock, so that no skew between two machines enters.
The request was sent before it was answered: `sent_at - lag` is never later than the truth, and too
early is the harmless side (it widens the window in which `LoadTracker` looks for our own peak).
"""

from __future__ import annotations

import datetime as dt
import enum
import math
from collections.abc import Callable
from typing import Final

import msgspec

from router import readings
from router.load import Telemetry
from router.readings import UnreadableError


class Source(enum.StrEnum):
    """Where load can be read, best first."""

    LOADS = "v1_loads"  # from 0.5.9; costs the backend a memory read from 0.5.13
    GET_LOAD = "get_load"  # to 0.5.20 or 0.5.21; logs a deprecation line for each call
    METRICS = "metrics"  # only with --enable-metrics; 80 KB and 15 ms of the backend's time

    @property
    def path(self) -> str:
        """Path and query, relative to the backend's base URL."""
        return _PATHS[self]


_PATHS: Final = {
    Source.LOADS: "v1/loads?include=core,spec",
    Source.GET_LOAD: "get_load",
    Source.METRICS: "metrics",
}

# Bytes of an answer that is looked at: decoding goes on in the relay's own loop, up to 15 ms for a
# megabyte. An entry of /v1/loads has 1 KB, and there is one for each data-parallel rank.
LIMITS: Final = {
    Source.LOADS: 256 * 1024,
    Source.GET_LOAD: 256 * 1024,
    Source.METRICS: 1024 * 1024,
}
# More tokens per verify step than any draft proposes (SGLang's own benchmark ends at 32).
MAX_ACCEPT: Final = 64.0
# A scheduler publishes on each prefill, each 15 decode steps and each 50 ms when its queue stalls.
# A snapshot that claims work and is this old (seconds) is from a scheduler that hangs.
HUNG_AFTER: Final = 10.0
# Gauges on /metrics move once per 40 decode steps, which take 5 to 50 ms: up to this old (seconds).
METRICS_LAG: Final = 2.0


class Unreadable(msgspec.Struct, frozen=True, gc=False):
    """An answer that says nothing. `reason` is for the log: short, without the answer's text."""

    reason: str


def parse(source: Source, body: bytes, sent_at: float, read_at: float) -> Telemetry | Unreadable:
    """Understand one answer of status 200. Times are our monotonic seconds; never raises."""
    if len(body) > LIMITS[source]:
        return Unreadable(f"longer than {LIMITS[source]} bytes")
    try:
        return _PARSERS[source](body, sent_at, read_at)
    except UnreadableError as error:
        return Unreadable(str(error))


def _parse_loads(body: bytes, sent_at: float, read_at: float) -> Telemetry:
    top = readings.json(body)
    if not isinstance(top, dict):
        raise UnreadableError("not an object")
    ranks = _ranks(top.get("loads"))
    running, queued, lag = 0, 0, 0.0
    for rank in ranks:
        runs = readings.count(rank, "num_running_reqs")
        waits = readings.count(rank, "num_waiting_reqs")
        running, queued = running + runs, queued + waits
        age = _age(top.get("timestamp"), rank.get("timestamp"))
        # An idle rank may sleep and publish nothing new: its old snapshot is still true.
        if runs + waits > 0:
            lag = max(lag, age)
    if lag > HUNG_AFTER:
        raise UnreadableError(f"its snapshot is {lag:.0f} s old")
    usage = [readings.number(rank.get("token_usage"), 0.0, 1.0) for rank in ranks]
    speed = [readings.number(rank.get("gen_throughput"), 0.0, math.inf) for rank in ranks]
    return Telemetry(
        running=running,
        queued=queued,
        taken_at=sent_at - lag,
        read_at=read_at,
        source=Source.LOADS,
        # The fullest rank is the one that holds requests up.
        token_usage=max(_known(usage), default=None),
        max_running=_cap(ranks),
        lifetime_accept_length=_lifetime_accept(ranks),
        gen_throughput=_throughput(sum(_known(speed)) if _known(speed) else None, running),
    )


def _parse_get_load(body: bytes, sent_at: float, read_at: float) -> Telemetry:
    """The old list. Its `ts_tic` is a clock without a reference, so the snapshot has no age.

    `num_reqs` is running *plus* waiting: SGLang's scheduler adds the two up
    (`num_reqs=len(self.running_batch.reqs) + num_waiting_reqs`).
    """
    ranks = _ranks(readings.json(body))
    total = sum(readings.count(rank, "num_reqs") for rank in ranks)
    queued = sum(readings.count(rank, "num_waiting_reqs") for rank in ranks)
    if total < queued:
        raise UnreadableError("num_reqs is below num_waiting_reqs")
    return Telemetry(total - queued, queued, sent_at, read_at, Source.GET_LOAD)


def _parse_metrics(body: bytes, sent_at: float, read_at: float) -> Telemetry:
    rows = readings.series(body)
    names = ("num_running_reqs", "num_queue_reqs")
    counts = {name: readings.gauge(rows, name, sum) for name in names}
    running = readings.count(counts, "num_running_reqs")
    speed = readings.number(readings.gauge(rows, "gen_throughput", sum), 0.0, math.inf)
    return Telemetry(
        running=running,
        queued=readings.count(counts, "num_queue_reqs"),
        taken_at=sent_at - METRICS_LAG,
        read_at=read_at,
        source=Source.METRICS,
        token_usage=readings.number(readings.gauge(rows, "token_usage", max), 0.0, 1.0),
        gen_throughput=_throughput(speed, running),
    )


_PARSERS: Final[dict[Source, Callable[[bytes, float, float], Telemetry]]] = {
    Source.LOADS: _parse_loads,
    Source.GET_LOAD: _parse_get_load,
    Source.METRICS: _parse_metrics,
}


def _ranks(value: object) -> list[dict[str, object]]:
    """The entries, one for each data-parallel rank."""
    if not isinstance(value, list) or not 0 < len(value) <= readings.MAX_ROWS:
        raise UnreadableError("no list of loads")
    ranks = [entry for entry in value if isinstance(entry, dict)]
    if len(ranks) != len(value):
        raise UnreadableError("an entry is not an object")
    if len({repr(rank.get("dp_rank")) for rank in ranks}) != len(ranks):
        raise UnreadableError("a dp_rank is given twice")
    return ranks


def _age(answered: object, taken: object) -> float:
    """Seconds between a rank's snapshot and the answer; 0 when the stamps do not say."""
    snapshot = readings.number(taken, 0.0, math.inf)
    if snapshot == 0.0:  # the default of a record that was never written
        raise UnreadableError("it has taken no snapshot yet")
    if snapshot is None or not isinstance(answered, str):
        return 0.0
    try:
        stamp = dt.datetime.fromisoformat(answered)
    except ValueError:
        return 0.0
    if stamp.tzinfo is None:  # of which zone? A guess could be hours off
        return 0.0
    return max(0.0, stamp.timestamp() - snapshot)


def _cap(ranks: list[dict[str, object]]) -> int | None:
    """Requests that run at once before the backend queues, over all ranks."""
    caps = [readings.whole(rank.get("max_running_requests")) for rank in ranks]
    known = [cap for cap in caps if cap]  # no server runs none: a 0 is broken
    return sum(known) if len(known) == len(caps) else None


def _lifetime_accept(ranks: list[dict[str, object]]) -> float | None:
    """The mean of the ranks' lifetime means; None when no rank has one (yet)."""
    sections = [rank.get("speculative") for rank in ranks]
    known = _known(
        [
            readings.number(section.get("accept_length"), 1.0, MAX_ACCEPT)
            for section in sections
            if isinstance(section, dict)
        ]
    )
    return sum(known) / len(known) if known else None


def _known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _throughput(speed: float | None, running: int) -> float | None:
    """Without --enable-metrics SGLang leaves the figure at 0: with work running, 0 says nothing."""
    return speed if speed or not running else None
