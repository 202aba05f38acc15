"""What was seen of a server while a level ran: pages of `/metrics` and looks at its load.

Pure. Counters on `/metrics` grow when requests end, so that the growth between the window's first
and last moment says what the requests that ended in it were like:

    accept length    output tokens / verify steps (`router.acceptance`, which says how exact)
    cached share     prompt tokens that came from the prefix cache / prompt tokens
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from router.acceptance import AcceptMeter, AcceptSample, parse_accept
from router.load import Telemetry
from router.telemetry import Unreadable

_COUNTER: Final = re.compile(
    rb"^sglang:(cached_tokens_total|prompt_tokens_total)(?:\{[^\n]{0,2000}\})?[ \t]+(\S{1,40})",
    re.MULTILINE,
)


class Page(msgspec.Struct, frozen=True):
    """What one page of `/metrics` says. `at` is when it was read, in seconds."""

    at: float
    accept: AcceptSample
    prompt_tokens: float | None  # of finished requests since the start of the server
    cached_tokens: float | None  # the counter is not there before the first hit


class Seen(msgspec.Struct, frozen=True):
    """All that was seen during one window."""

    loads: tuple[Telemetry, ...] = ()
    first: Page | None = None
    last: Page | None = None
    client_cpu_s: float | None = None  # processor time of this process
    lags: tuple[float, ...] = ()  # seconds by which the event loop was late
    repeated: int = 0  # prompts of the run that had been sent before
    gave_up: bool = False


def parse_page(body: bytes, at: float) -> Page | None:
    """Read a page of `/metrics`; None when it says nothing. Never raises."""
    accept = parse_accept(body)
    if isinstance(accept, Unreadable):
        return None
    sums: dict[bytes, float] = {}
    for name, text in _COUNTER.findall(body):
        try:
            sums[name] = sums.get(name, 0.0) + float(text)
        except ValueError:
            return None
    return Page(at, accept, sums.get(b"prompt_tokens_total"), sums.get(b"cached_tokens_total"))


def accept_length(seen: Seen) -> float | None:
    """Tokens per verify step between the two pages; None where nothing tells."""
    if seen.first is None or seen.last is None:
        return None
    meter = AcceptMeter()
    meter.update(seen.first.accept)
    return meter.update(seen.last.accept)


def verify_steps(seen: Seen) -> float | None:
    """Verify steps of the requests that ended between the two pages; None on a baseline."""
    if seen.first is None or seen.last is None:
        return None
    return _growth(seen.first.accept.verify_calls, seen.last.accept.verify_calls)


def cached_share(seen: Seen) -> float | None:
    """How much of the prompts came from the prefix cache; None where nothing tells."""
    if seen.first is None or seen.last is None or seen.last.cached_tokens is None:
        return None
    prompts = _growth(seen.first.prompt_tokens or 0.0, seen.last.prompt_tokens)
    cached = _growth(seen.first.cached_tokens or 0.0, seen.last.cached_tokens)
    return min(1.0, cached / prompts) if prompts and cached is not None else None


def page_seconds(seen: Seen) -> float | None:
    """Between the two pages."""
    return None if seen.first is None or seen.last is None else seen.last.at - seen.first.at


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return statistics.fmean(values) if values else None


def caps(loads: Sequence[Telemetry]) -> int | None:
    """The cap as the server said it last."""
    return next((load.max_running for load in reversed(loads) if load.max_running), None)


def _growth(before: float | None, after: float | None) -> float | None:
    """What a counter grew by; None when it is unknown or fell (the server was restarted)."""
    if before is None or after is None or after < before:
        return None
    return after - before
