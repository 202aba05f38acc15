"""The offered load: what the clients ask for, whatever server is in use.

    offered load = arrivals per second x output tokens per request
    output tokens per request = tokens that the curves say were served / requests that ended

Pure: `LoadEstimate` is a value, and `estimated` makes the next from the last and what has happened
since. Tokens count when they are served, also those of requests that still run: for sizes without memory that
is the maximum-likelihood estimate, and it neither lags nor leaps when the load does.
Averages are exponential sums, each with the share of its window that has been seen, so that a
young average is not taken for an old one.

Arrivals are averaged over `slow` seconds. When those of the last `fast` seconds differ from that by
more than `jump` standard deviations, the slow average starts anew from where the fast one points: a
load which has changed is seen within two seconds, one which has not is averaged over twenty. A change
that is only just significant is believed by half and a large one wholly (the James-Stein factor
1 - c / z^2, c chosen so that it is a half at `jump`): what crossed a mark by chance lies too high.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import msgspec

# Seconds over which the mean length of requests is averaged, and how many requests of the length
# that the parameters give are counted in before the first ones have ended.
LENGTH_S: Final = 60.0
PRIOR: Final = 20.0
# The load is never taken to be more uncertain than by half.
MOST_SPREAD: Final = 0.5
# Less than this share of a window seen tells nothing, whatever has come.
LEAST_SEEN: Final = 0.2


class LoadEstimate(msgspec.Struct, frozen=True, gc=False):
    """What a rule has seen of the load up to its last judgement, and what it judged."""

    at: float  # monotonic seconds
    n: int  # concurrency of the speculative backend
    m: int  # concurrency of the baseline backend
    own: int  # in-flight of both
    passed: float = 0.0  # seconds since the judgement before
    fast: float = 0.0  # arrivals per second
    fast_seen: float = 0.0  # of its window, 0 to 1
    slow: float = 0.0
    slow_seen: float = 0.0
    work: float = 0.0  # output tokens
    ended: float = 0.0  # requests
    offered: float | None = None  # tokens/s; None until something came
    spread: float = 0.0  # standard deviation of it, as a share
    due: float = 0.0  # evidence for leaving this side, in seconds
    gain: float | None = None  # requests in flight that it would save; None: not judged


class Windows(Protocol):
    """How the load is averaged; `rules.ForecastParameters` says it."""

    @property
    def fast(self) -> float:
        """Seconds."""
        ...

    @property
    def slow(self) -> float:
        """Seconds."""
        ...

    @property
    def jump(self) -> float:
        """Standard deviations."""
        ...

    @property
    def spread(self) -> float:
        """Share of the load that it is taken to vary by, beyond the chance of arrivals."""
        ...


def first_estimate(now: float, n: int, m: int, own: int, output_tokens: float) -> LoadEstimate:
    """Before anything has come. `output_tokens`: of a mean request, until some have ended."""
    return LoadEstimate(now, n, m, own, work=PRIOR * output_tokens, ended=PRIOR)


def estimated(
    last: LoadEstimate,
    now: float,
    counts: tuple[int, int, int],
    arrived: int,
    served: float,
    windows: Windows,
) -> LoadEstimate:
    """The estimate at `now`.

    `counts`: n, m and our own in-flight. `arrived`: requests sent since the last one; what is no
    longer in flight of them and of those before has ended. `served`: tokens/s since then.
    """
    passed = now - last.at
    ended = max(0, last.own + arrived - counts[2])
    kept = math.exp(-passed / LENGTH_S)
    work = last.work * kept + served * passed
    all_ended = last.ended * kept + ended
    kept = math.exp(-passed / windows.fast)
    fast = last.fast * kept + arrived / windows.fast
    fast_seen = last.fast_seen * kept + (1.0 - kept)
    kept = math.exp(-passed / windows.slow)
    slow = last.slow * kept + arrived / windows.slow
    slow_seen = last.slow_seen * kept + (1.0 - kept)
    window = windows.fast / windows.slow
    rate = slow / max(slow_seen, LEAST_SEEN * window)
    lately = fast / max(fast_seen, LEAST_SEEN)
    # An exponential average over t seconds has the variance of a plain one over 2 t.
    mark = windows.jump * math.sqrt(max(rate, lately) / (2.0 * windows.fast))
    change = lately - rate
    if abs(change) > mark and fast_seen > 0.5:
        rate += change * (1.0 - 0.5 * (mark / change) ** 2)
        slow, slow_seen = rate * window, window
    arrivals = rate * 2.0 * windows.slow * slow_seen  # that the average rests on
    spread = math.sqrt(1.0 / max(arrivals, 1e-9) + windows.spread**2)
    return LoadEstimate(
        now, *counts, passed, fast, fast_seen, slow, slow_seen, work, all_ended,
        rate * work / all_ended, min(MOST_SPREAD, spread), last.due,
    )  # fmt: skip
