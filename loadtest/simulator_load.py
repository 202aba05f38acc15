"""What a simulated run is asked to serve: requests with their arrival times and sizes.

The law of this file: everything is seeded, so the same arguments give the same load. A load is
either open (arrivals at given times, `Call`s) or closed (`loadtest.arrivals`), whose sizes come from
`sizes`. A conversation's next turn is asked when the answer before it has ended and its user has
thought, so it is carried by the turn before (`then`).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec


class Size(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


class Call(NamedTuple):
    """One request of an open load."""

    at: float  # seconds since the load began
    prompt: int
    output: int
    conversation: int = 0  # 0: of none
    then: tuple[Turn, ...] = ()  # the rest of the conversation


class Turn(NamedTuple):
    """A later turn: what is added to the conversation, and how long after the answer before it."""

    think_s: float
    words: int  # tokens of the new message
    output: int


class Row(NamedTuple):
    """One line of a trace."""

    at: float  # seconds since the first
    prompt: int
    output: int


class Acceptance(msgspec.Struct, frozen=True):
    """Tokens that each decode step of a speculative server brings.

    `spread` is the standard deviation between requests, as a share of the mean: some texts are
    easier to draft than others. `drift` moves the mean over the run: (seconds, factor), straight in
    between. A request keeps the acceptance that it started with.
    """

    mean: float
    spread: float = 0.0
    drift: tuple[tuple[float, float], ...] = ()
    most: float = 16.0  # tokens that a step can bring: draft tokens and one

    def __post_init__(self) -> None:
        """Refuse what no server can accept."""
        if not 1.0 <= self.mean <= self.most or self.spread < 0.0:
            raise ValueError(f"acceptance is from 1 to {self.most:g}, spread from 0 up: {self}")
        if list(self.drift) != sorted(self.drift) or any(f <= 0 for _, f in self.drift):
            raise ValueError(f"drift is (seconds, factor above 0) in order of time: {self.drift}")

    def at(self, now: float) -> float:
        """The mean at this moment."""
        if not self.drift:
            return self.mean
        before, after = self.drift[0], self.drift[-1]
        if now <= before[0]:
            return self._bound(self.mean * before[1])
        if now >= after[0]:
            return self._bound(self.mean * after[1])
        for (start, low), (end, high) in itertools.pairwise(self.drift):
            if start <= now < end:
                return self._bound(self.mean * (low + (high - low) * (now - start) / (end - start)))
        return self._bound(self.mean * after[1])

    def of_request(self, now: float, chance: random.Random) -> float:
        """The acceptance of one request that starts now (lognormal, its mean kept)."""
        mean = self.at(now)
        if not self.spread:
            return mean
        sigma = math.sqrt(math.log1p(self.spread**2))
        return self._bound(mean * chance.lognormvariate(-sigma * sigma / 2, sigma))

    def _bound(self, value: float) -> float:
        return min(self.most, max(1.0, value))


def trace_calls(
    rows: Sequence[Row], scale: float | Callable[[float], float], seconds: float
) -> Iterator[Call]:
    """The trace, played faster: `scale` times as many arrivals a second, for so many seconds.

    `scale` may change with the seconds played. A trace that ends too early starts over.
    """
    if len(rows) < 2 or rows[-1].at <= 0.0:
        raise ValueError("a trace needs two arrivals at different times")
    gap = rows[-1].at / (len(rows) - 1)  # between the last arrival and the first one over again
    now, last = 0.0, 0.0
    for lap in itertools.count():
        for row in rows:
            played = lap * (rows[-1].at + gap) + row.at
            factor = scale(now) if callable(scale) else scale
            now += (played - last) / factor
            last = played
            if now >= seconds:
                return
            yield Call(now, row.prompt, row.output)


def conversation_calls(
    calls: Iterator[Call], chance: random.Random, *, turns: float, think_s: float, share: float
) -> Iterator[Call]:
    """Make conversations of a load: each arrival opens one, of `turns` turns in the mean.

    The number of turns is geometric. A turn adds `share` of the opening prompt and an answer of the
    opening's length; the user thinks for `think_s` seconds in the mean. To keep the rate of requests
    the caller divides the rate of arrivals by `turns`.
    """
    for key, call in enumerate(calls, start=1):
        later: list[Turn] = []
        while chance.random() >= 1.0 / turns:
            words = max(1, round(call.prompt * share))
            later.append(Turn(chance.expovariate(1.0 / think_s), words, call.output))
        yield call._replace(conversation=key, then=tuple(later))


def steps(levels: Sequence[float], seconds_each: float) -> Callable[[float], float]:
    """A scale that holds each level for so long, and starts over."""

    def scale(now: float) -> float:
        return levels[int(now / seconds_each) % len(levels)]

    return scale


def day(low: float, high: float, seconds: float) -> Callable[[float], float]:
    """A scale that rises from `low` to `high` and falls again, as a raised cosine."""

    def scale(now: float) -> float:
        return low + (high - low) * (1.0 - math.cos(math.tau * now / seconds)) / 2.0

    return scale
