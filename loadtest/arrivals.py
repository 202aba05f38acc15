"""When requests are sent: pure functions of the time since the load began.

A load is one of two kinds, and the difference is who sets the pace:

    closed   so many requests are kept in flight; a new one starts when another ends. `ClosedLoop`
             and `Ramp` are of this kind: `level_at(elapsed)` says how many at each moment. When the
             level falls, requests in flight finish and are not replaced.
    open     requests start at given times, however many are in flight then (Poisson, a trace).
             Such a load is a plain iterable of start times and needs none of what is here.

A sweep and a ramp measure servers, so they are closed; users are open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Level(NamedTuple):
    """A stretch of time with one concurrency."""

    concurrency: int
    start: float  # seconds since the load began
    end: float


class Closed(Protocol):
    """A load that keeps requests in flight."""

    @property
    def levels(self) -> tuple[Level, ...]:
        """The stretches that it is made of, in order and without gaps, the first from 0 on."""
        ...

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        ...

    def level_at(self, elapsed: float) -> Level | None:
        """The stretch at this moment; None when the load is over."""
        ...


class Ramp:
    """One level after the other, each for equally long."""

    def __init__(self, levels: Sequence[int], seconds_each: float) -> None:
        """`levels`: requests in flight. Raises ValueError for a load that is none."""
        if not levels or min(levels) < 1:
            raise ValueError(f"a load needs levels of at least 1 request, got {list(levels)}")
        if not 0 < seconds_each < math.inf:
            raise ValueError(f"a level lasts more than 0 seconds, got {seconds_each}")
        self.seconds_each = seconds_each
        self.levels = tuple(
            Level(concurrency, at * seconds_each, (at + 1) * seconds_each)
            for at, concurrency in enumerate(levels)
        )

    @property
    def seconds(self) -> float:
        """How long all levels last."""
        return self.levels[-1].end

    @property
    def peak(self) -> int:
        """The highest level."""
        return max(level.concurrency for level in self.levels)

    def level_at(self, elapsed: float) -> Level | None:
        """The level at this moment; None when the load is over. A level begins at its start."""
        if elapsed >= self.seconds:
            return None
        at = max(0, min(int(elapsed / self.seconds_each), len(self.levels) - 1))
        # The division may round across a border that the levels' own bounds decide.
        if elapsed >= self.levels[at].end:
            at += 1
        elif at and elapsed < self.levels[at].start:
            at -= 1
        return self.levels[at]


class ClosedLoop(Ramp):
    """One level for some time: what a sweep measures."""

    def __init__(self, concurrency: int, seconds: float) -> None:
        super().__init__((concurrency,), seconds)


def up_and_down(levels: Sequence[int]) -> tuple[int, ...]:
    """The levels, and the same back: (1, 2, 4) becomes (1, 2, 4, 2, 1)."""
    return (*levels, *levels[-2::-1])
