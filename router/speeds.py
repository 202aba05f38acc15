"""What a pair's curves say of a load before it is sent anywhere: speeds, queues, and a forecast.

The law of this file: values and arithmetic. Everything is settled when a table is made (a tenth of a
second); reading one is a lookup.

Three tables, each made from the one before:

1. `speeds`: output tokens/s of one server by the number of requests that it runs, from the levels of
   a sweep. Between two levels the time per token is straight; beyond the last the speed stays.
2. `in_flight`: the mean number of requests on that server under an offered load of x tokens/s. With
   arrivals without memory and requests that share a server evenly, whatever their sizes, the chance
   of n requests is proportional to the product of x / R(k) for k = 1 .. n (a queue with processor
   sharing is insensitive to sizes; Kelly, Reversibility and Stochastic Networks, 1979, ch. 3).
   Little's law makes it the time per token: mean in flight / x.
3. `Forecast`: what switching brings. Both futures are followed as a fluid over the horizon, with the
   flow out of a server with q in flight taken as the load that holds it at q on average (table 2 read
   backwards: the point-wise stationary approximation; Wang, Tipper and Banerjee, INFOCOM 1996). To
   stay: the load goes on arriving here. To switch: it arrives there, what runs here is finished here,
   and as long as both have work each keeps only its share of speed. The gain is the mean number of
   requests in flight that switching saves; by Little's law that is waiting.

Time in a forecast is counted in seconds per output token of a mean request, so that one table serves
every mean length: the same load in requests that are twice as long moves half as fast.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable
from typing import Final

# Requests on one server beyond which nothing is told apart.
MOST: Final = 512
# An offered load is read from a table with this many rows, up to a little beyond both servers.
ROWS: Final = 96
BEYOND: Final = 1.15
# Of a forecast: rows of offered load, and its columns, 0 and the powers of two up to MOST.
FORECAST_ROWS: Final = 28
COLUMNS: Final[tuple[int, ...]] = (0, *(1 << power for power in range(10)))
# Less than this many requests on a server count as none: what is left there is a fraction.
LEFT: Final = 0.3
STEP: Final = 0.001  # of a forecast, in seconds per token

Levels = Iterable[tuple[float, float]]  # (requests in flight, output tokens/s)
Table = tuple[float, ...]


def speeds(levels: Levels, cap: float | None = None) -> Table:
    """Output tokens/s with 0, 1, 2, ... requests. Raises ValueError for levels that are none.

    `cap`: the most requests that the server runs at once; beyond it the rest waits. A level at which
    a request would be faster than at a lower one (noise) is taken to be as fast as that.
    """
    measured = sorted(levels)
    if not measured or any(not (c >= 1 and 0 < r < math.inf) or c == math.inf for c, r in measured):
        raise ValueError("a curve needs levels of at least 1 request and more than 0 tokens/s")
    at = [c for c, _ in measured]
    waits: list[float] = []  # seconds per token of one request
    for c, r in measured:
        waits.append(max(c / r, waits[-1] if waits else 0.0))
    most = min(cap if cap is not None else math.inf, at[-1])
    found = [0.0]
    for n in range(1, MOST):
        held = min(n, most)
        i = min(max(1, bisect.bisect_left(at, held)), len(at) - 1)
        if held <= at[0] or len(at) == 1:
            wait = waits[0]
        else:
            share = (held - at[i - 1]) / (at[i] - at[i - 1])
            wait = waits[i - 1] + (waits[i] - waits[i - 1]) * share
        found.append(held / wait)
    return tuple(found)


def in_flight(speed: Table, offered: float) -> float:
    """The mean number of requests on a server with this speed under an offered load in tokens/s."""
    if offered <= 0.0:
        return 0.0
    chance = total = 1.0
    mean = 0.0
    for n in range(1, MOST):
        chance *= offered / speed[n]
        total += chance
        mean += n * chance
        if total > 1e100:  # only the ratios count
            chance, total, mean = chance / 1e100, total / 1e100, mean / 1e100
    return mean / total


class Operation:
    """One server's table 2, in both directions."""

    __slots__ = ("_mean", "_outflow", "_row", "speed")

    def __init__(self, speed: Table, top: float) -> None:
        """`top`: the largest offered load that is told apart, in tokens/s."""
        self.speed = speed
        self._row = top / ROWS
        self._mean: list[float] = [in_flight(speed, i * self._row) for i in range(ROWS + 1)]
        outflow, i = [0.0], 0
        for n in range(1, MOST):
            while i < ROWS and self._mean[i + 1] < n:
                i += 1
            if i == ROWS:
                outflow.append(outflow[-1])
            else:
                low, high = self._mean[i], self._mean[i + 1]
                outflow.append((i + (n - low) / (high - low)) * self._row)
        self._outflow = outflow

    def mean(self, offered: float) -> float:
        """Mean requests in flight under this offered load."""
        at = offered / self._row
        i = int(at)
        if i >= ROWS:
            return self._mean[ROWS]
        return self._mean[i] + (self._mean[i + 1] - self._mean[i]) * (at - i)

    def outflow(self, requests: float) -> float:
        """The load in tokens/s that holds so many requests in flight on average."""
        i = int(requests)
        if i >= MOST - 1:
            return self._outflow[MOST - 1]
        low = self._outflow[i]
        return low + (self._outflow[i + 1] - low) * (requests - i)


class Forecast:
    """What leaving one server for the other brings: table 3, for one direction."""

    __slots__ = ("_gains", "_row")

    def __init__(
        self,
        here: Operation,
        there: Operation,
        shares: tuple[float, float],
        horizon: float,
        top: float,
    ) -> None:
        """`shares`: of their speed, here and there, while both have work. `horizon`: how far ahead."""
        self._row = top / FORECAST_ROWS
        self._gains: list[list[float]] = []
        for offered in (i * self._row for i in range(FORECAST_ROWS + 1)):
            waits = [
                (
                    _stay(here, n, offered, horizon),
                    _switch(here, there, n, offered, horizon, shares),
                )
                for n in COLUMNS
            ]
            self._gains.append([(stay - switch) / horizon for stay, switch in waits])

    def gain(self, requests: int, offered: float) -> float:
        """Requests in flight that switching now saves, in the mean over the horizon."""
        at = max(0.0, offered) / self._row
        i = int(at)
        if i >= FORECAST_ROWS:
            i, down = FORECAST_ROWS - 1, 1.0
        else:
            down = at - i
        j = min(requests.bit_length(), len(COLUMNS) - 2)
        low = COLUMNS[j]
        right = min(1.0, (requests - low) / (COLUMNS[j + 1] - low))
        upper, lower = self._gains[i], self._gains[i + 1]
        first = upper[j] + (upper[j + 1] - upper[j]) * right
        second = lower[j] + (lower[j + 1] - lower[j]) * right
        return first + (second - first) * down


def _stay(here: Operation, requests: float, offered: float, horizon: float) -> float:
    """Requests in flight, summed over the horizon, if the load goes on arriving here."""
    total, q = 0.0, float(requests)
    for _ in range(round(horizon / STEP)):
        total += q
        q = max(0.0, q + (offered - here.outflow(q)) * STEP)
    return total * STEP


def _switch(
    here: Operation,
    there: Operation,
    requests: float,
    offered: float,
    horizon: float,
    shares: tuple[float, float],
) -> float:
    """The same if it arrives there from now on, and what is here is finished here."""
    total, old, new = 0.0, float(requests), 0.0
    for _ in range(round(horizon / STEP)):
        total += old + new
        one, other = shares if old > LEFT and new > LEFT else (1.0, 1.0)
        finished = one * here.outflow(old) * STEP
        new = max(0.0, new + (offered - other * there.outflow(new)) * STEP)
        old = max(0.0, old - finished) if old > LEFT else 0.0
    return total * STEP


def joined_speed(speed: Table) -> Table:
    """Tokens/s that one more request adds to a server with 0, 1, 2, ... of them."""
    return tuple(later - now for now, later in itertools.pairwise(speed))


def joined_delay(speed: Table) -> Table:
    """What one more request costs, its own time and what it takes from the others; negated.

    n requests at R(n) wait n x n / R(n) seconds together for each to get a token; this is by how much
    the sum grows, so the larger (nearer to zero) value is the better server to join.
    """
    waits = [0.0, *(n * n / speed[n] for n in range(1, len(speed)))]
    return tuple(now - later for now, later in itertools.pairwise(waits))
