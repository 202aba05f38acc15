"""Acceptance as it is now: tokens per verify step of late, from pages of `/metrics`.

`/v1/loads` and `/server_info` give the mean since the start of the server, which hardly moves after
an hour and must not pass for live. Two things on `/metrics` are live:

1. the growth of two counters between two pages, tokens / verify steps. The first token of a
   request comes from its prefill and the surplus of its last step is cut off; the two nearly
   cancel (captures: 2.79 to 2.81 where 2.80 was simulated);
2. the gauge, over the last 40 decode steps: noisier (2.73 to 2.90 there), and it keeps its last
   value when idle, so that it counts only while requests run.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from router import readings
from router.telemetry import MAX_ACCEPT, Unreadable

# Verify steps that a mean is worth taking over: as many as SGLang's own gauge covers.
MIN_VERIFY: Final = 40.0


class AcceptSample(msgspec.Struct, frozen=True, gc=False):
    """What one page says about acceptance. Absent or broken is None."""

    gauge: float | None  # tokens per verify step over the last 40 decode steps
    running: int | None
    tokens: float | None  # output tokens of finished requests since the start
    verify_calls: float | None  # verify steps of finished requests since the start


def parse_accept(body: bytes) -> AcceptSample | Unreadable:
    """Read one page of `/metrics`; never raises."""
    try:
        rows = readings.series(body)
    except readings.UnreadableError as error:
        return Unreadable(str(error))
    return AcceptSample(
        gauge=readings.number(readings.gauge(rows, "spec_accept_length", max), 1.0, MAX_ACCEPT),
        running=readings.whole(readings.gauge(rows, "num_running_reqs", sum)),
        tokens=readings.number(readings.counter(rows, "generation_tokens_total"), 0.0, math.inf),
        verify_calls=readings.number(
            readings.counter(rows, "spec_verify_calls_total"), 0.0, math.inf
        ),
    )


class AcceptMeter:
    """From one sample after another to acceptance since the last: growth first, gauge second."""

    def __init__(self) -> None:
        self._last: AcceptSample | None = None

    def update(self, sample: AcceptSample) -> float | None:
        """Tokens per verify step since the last sample; None when nothing tells."""
        last, self._last = self._last, sample
        grown = _growth(last, sample) if last is not None else None
        if grown is not None:
            return grown
        return sample.gauge if sample.running else None


def _growth(last: AcceptSample, now: AcceptSample) -> float | None:
    if last.tokens is None or last.verify_calls is None:
        return None
    if now.tokens is None or now.verify_calls is None:
        return None
    calls = now.verify_calls - last.verify_calls
    if calls < MIN_VERIFY:  # too few, none, or negative: the backend was restarted
        return None
    return readings.number((now.tokens - last.tokens) / calls, 1.0, MAX_ACCEPT)
