"""Records of one level become a point, and the points of several passes become one level.

Pure: records, the window's bounds and what was seen of the server in; figures out.

Which requests count for what:

    output tok/s           tokens that came within the window, by its length. A request's tokens
                           are those of the server's usage, never the chunks (a speculative server
                           puts several into one), and come evenly from first chunk to end
    times, percentiles     of complete answers that ended within the window

Which intervals the figures have, and why: see `intervals`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from loadtest import sweep_seen
from loadtest.intervals import mean_figure, percentile
from loadtest.record import RequestRecord
from loadtest.sweep_schema import Figure, LevelSummary, Point, Spread
from loadtest.sweep_seen import Seen
from router.load import Role

MOST_BATCHES: Final = 10
FEWEST_BATCHES: Final = 3
PASSES_FOR_T: Final = 3
Value = Callable[[RequestRecord], float | None]


class Window(msgspec.Struct, frozen=True):
    """The steady stretch of a run, in seconds since the run began."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.end - self.start


class Measured(msgspec.Struct, frozen=True):
    """One pass of a level as it is put together with others."""

    point: Point
    records: Sequence[RequestRecord]

    @property
    def window(self) -> Window:
        """Its window."""
        start = self.point.window_start_s
        return Window(start, start + self.point.window_s)


def ended_within(records: Iterable[RequestRecord], window: Window) -> list[RequestRecord]:
    """Complete answers that ended within the window."""
    return [r for r in records if r.ok and window.start <= r.ended < window.end]


def first_token_s(record: RequestRecord) -> float | None:
    """From the start to the first byte of the answer's body."""
    return None if record.first_chunk is None else record.first_chunk - record.started


def per_token_s(record: RequestRecord) -> float | None:
    """For each output token after the first; None for an answer of one token."""
    if record.first_chunk is None or not record.output_tokens or record.output_tokens < 2:
        return None
    return (record.ended - record.first_chunk) / (record.output_tokens - 1)


def spread(records: Iterable[RequestRecord], value: Value) -> Spread:
    """How a time is distributed over requests that have it."""
    ordered = sorted(found for record in records if (found := value(record)) is not None)
    if not ordered:
        return Spread()
    return Spread(
        math.fsum(ordered) / len(ordered),
        percentile(ordered, 0.5),
        percentile(ordered, 0.9),
        percentile(ordered, 0.99),
    )


def edges(records: Sequence[RequestRecord], window: Window) -> list[float]:
    """The bounds of equal parts of the window, each as long as a median request or longer.

    Fewer than three such parts are none: what they would say is chance.
    """
    times = sorted(record.seconds for record in ended_within(records, window))
    if not times or window.seconds <= 0:
        return []
    longest = max(times[(len(times) - 1) // 2], window.seconds / MOST_BATCHES)
    count = min(MOST_BATCHES, math.floor(window.seconds / longest + 1e-9))
    if count < FEWEST_BATCHES:
        return []
    return [window.start + window.seconds * at / count for at in range(count + 1)]


def batches(records: Sequence[RequestRecord], window: Window) -> list[float]:
    """Output tok/s in the parts that `edges` bound."""
    return [
        tokens_within(records, start, end) / (end - start)
        for start, end in itertools.pairwise(edges(records, window))
    ]


def in_flight(records: Iterable[RequestRecord], window: Window) -> float:
    """Mean requests in flight over the window."""
    inside = (min(r.ended, window.end) - max(r.started, window.start) for r in records)
    return math.fsum(max(0.0, seconds) for seconds in inside) / window.seconds


def make_point(records: Sequence[RequestRecord], window: Window, seen: Seen, **where: Any) -> Point:
    """One pass of one level. `where` are the fields of `Point` that say which."""
    ended = ended_within(records, window)
    failed = sorted((r for r in records if not r.ok), key=lambda record: record.ended)
    total = tokens_within(records, window.start, window.end) / window.seconds
    parts = batches(records, window)
    bounds = mean_figure(parts) if parts else Figure(total)
    lags = sorted(seen.lags)
    cpu = seen.client_cpu_s
    return Point(
        **where,
        records=len(records),
        concurrency=in_flight(records, window),
        window_start_s=window.start,
        window_s=window.seconds,
        requests=len(ended),
        errors=len(failed),
        error=failed[0].error if failed else None,
        output_tok_s=Figure(total, bounds.low, bounds.high),
        requests_s=len(ended) / window.seconds,
        input_tokens=_mean(record.prompt_tokens for record in ended),
        output_tokens=_mean(record.output_tokens for record in ended),
        asked_tokens=_mean(record.asked_tokens for record in ended),
        uncounted=sum(record.output_tokens is None for record in ended),
        ttft_s=spread(ended, first_token_s),
        tpot_s=spread(ended, per_token_s),
        latency_s=spread(ended, lambda record: record.seconds),
        accept_length=sweep_seen.accept_length(seen),
        verify_steps=sweep_seen.verify_steps(seen),
        page_s=sweep_seen.page_seconds(seen),
        cap=sweep_seen.caps(seen.loads),
        running=_mean(load.running for load in seen.loads),
        queued=_mean(load.queued for load in seen.loads),
        most_running=max((load.running for load in seen.loads), default=None),
        most_queued=max((load.queued for load in seen.loads), default=None),
        polls=len(seen.loads),
        cached_share=sweep_seen.cached_share(seen),
        client_cpu=None if cpu is None else cpu / window.seconds,
        client_lag_s=lags[math.ceil(0.95 * len(lags)) - 1] if lags else None,
        repeated=seen.repeated,
        gave_up=seen.gave_up,
    )


def combine(passes: Sequence[Measured]) -> LevelSummary:
    """All passes of one role and level as one; at least one."""
    passes = sorted(passes, key=lambda one: one.point.number)
    points = [one.point for one in passes]
    ended = [record for one in passes for record in ended_within(one.records, one.window)]
    speeds = [point.output_tok_s.value for point in points]
    tok_s, interval = Figure(statistics.fmean(speeds)), "none"
    if len(points) >= PASSES_FOR_T:
        tok_s, interval = mean_figure(speeds), "passes"
    elif parts := [part for one in passes for part in batches(one.records, one.window)]:
        found = mean_figure(parts)
        half = (found.high or found.value) - found.value
        tok_s, interval = Figure(tok_s.value, tok_s.value - half, tok_s.value + half), "batches"
    told = [p for p in points if p.accept_length is not None]
    steps = [p.verify_steps or 0.0 for p in told]
    return LevelSummary(
        role=Role(points[0].role),
        level=points[0].level,
        rate=points[0].rate,
        passes=len(points),
        concurrency=statistics.fmean(point.concurrency for point in points),
        requests=sum(point.requests for point in points),
        errors=sum(point.errors for point in points),
        window_s=math.fsum(point.window_s for point in points),
        output_tok_s=tok_s,
        interval=interval,
        ttft_s=spread(ended, first_token_s),
        tpot_s=spread(ended, per_token_s),
        latency_s=spread(ended, lambda record: record.seconds),
        accept_length=_weighted([p.accept_length or 0.0 for p in told], steps),
        verify_steps=math.fsum(steps) if any(steps) else None,
        cap=next((point.cap for point in reversed(points) if point.cap is not None), None),
        running=_mean(point.running for point in points),
        queued=_mean(point.queued for point in points),
        notices=tuple(sorted({code for point in points for code in point.notices})),
    )


def tokens_within(records: Iterable[RequestRecord], start: float, end: float) -> float:
    """Output tokens of complete answers that came in this stretch."""
    return math.fsum(record.tokens_between(start, end) for record in records if record.ok)


def _mean(values: Iterable[float | None]) -> float | None:
    return sweep_seen.mean([value for value in values if value is not None])


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float | None:
    """Tokens over steps, from tokens per step and steps."""
    if not values:
        return None
    if not any(weights):
        return statistics.fmean(values)
    return math.fsum(map(float.__mul__, values, weights)) / math.fsum(weights)
