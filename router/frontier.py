"""The line that splits the plane of two concurrencies.

n is the concurrency of the speculative backend, m that of the baseline backend, both without the
request being decided. The rule is one lookup:

    speculative  iff  n < F(m)

F is not increasing or not decreasing in m, zero means never and infinity always. Three shapes come
from numbers: `total(K)` is F(m) = max(0, K - m), which compares n + m with K and suits servers that
share GPUs; `speculative_only(K)` is F(m) = K, which fills the speculative server and lets the rest
overflow; `table` is any other line, given at whole m and held constant beyond its last point.

The band: K is its upper edge. The line is left at once when it is reached; the way back is the line
drawn (1 - band) nearer to the origin: the point (n, m) is inside it iff (n, m) / (1 - band) is
below the line. For both numeric shapes that is the textbook K x (1 - band).

A crossover at c, a level of a sweep, gives K = floor(c): at level C a sweep keeps C requests
running, so each arrival finds C - 1, and n + m < C lets exactly C run. So the values of a line are
whole, and a fraction is rounded down when a line is built: "n < 2.5" would let three run.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal

import msgspec

Scope = Literal["total", "speculative"]
INFINITE = math.inf


def below_band(load: float, threshold: float, band: float) -> bool:
    """Whether `load` is below `threshold` x (1 - band).

    Rounded, so that a load of 9 is not below the edge of 10 with a band of 0.1, whatever floats say.
    """
    return load < round(threshold * (1.0 - band), 9)


def _whole(value: float) -> float:
    return value if value == INFINITE else float(math.floor(value))


class Frontier(msgspec.Struct, frozen=True):
    """A line F(m). Build it with the class methods; an invalid one cannot exist."""

    scope: Literal["total", "speculative", "table"]
    threshold: float = 0.0  # K, for the two numeric shapes; requests
    table: tuple[float, ...] = ()  # F(0), F(1), ...; the last one holds for every larger m

    def __post_init__(self) -> None:
        """Raise ValueError for a line that is not one."""
        values = self.table if self.scope == "table" else (self.threshold,)
        if not values:
            msg = "a frontier table needs at least one value"
            raise ValueError(msg)
        if any(math.isnan(v) or v < 0 for v in values):
            msg = f"a frontier has no negative or undefined values: {values}"
            raise ValueError(msg)
        steps = [b - a for a, b in itertools.pairwise(values) if a != b]
        if any(s > 0 for s in steps) and any(s < 0 for s in steps):
            msg = "a frontier either never rises or never falls"
            raise ValueError(msg)
        msgspec.structs.force_setattr(self, "threshold", _whole(self.threshold))
        msgspec.structs.force_setattr(self, "table", tuple(_whole(v) for v in self.table))

    @classmethod
    def total(cls, threshold: float) -> Frontier:
        """Compare n + m with one number of requests."""
        return cls("total", threshold)

    @classmethod
    def speculative_only(cls, threshold: float) -> Frontier:
        """Compare n alone with one number of requests."""
        return cls("speculative", threshold)

    @classmethod
    def from_table(cls, values: tuple[float, ...]) -> Frontier:
        """A line given at m = 0, 1, 2, ..."""
        return cls("table", 0.0, values)

    @property
    def never(self) -> bool:
        """Whether no request may speculate."""
        return self.threshold == 0 if self.scope != "table" else max(self.table) == 0

    @property
    def always(self) -> bool:
        """Whether load never forbids speculating."""
        if self.scope != "table":
            return self.threshold == INFINITE
        return min(self.table) == INFINITE

    def at(self, m: float) -> float:
        """F(m), in requests."""
        if self.scope == "total":
            return self.threshold - m if m < self.threshold else 0.0
        if self.scope == "speculative":
            return self.threshold
        return self._interpolate(m)

    def inside_band(self, n: float, m: float, band: float) -> bool:
        """Whether (n, m) is below the lower edge of the band, 0 <= band < 1."""
        if self.scope == "total":
            return below_band(n + m, self.threshold, band)
        if self.scope == "speculative":
            return below_band(n, self.threshold, band)
        keep = 1.0 - band
        return round(n / keep, 9) < round(self._interpolate(round(m / keep, 9)), 9)

    def _interpolate(self, m: float) -> float:
        """Straight between whole numbers, constant beyond the last; infinite beside infinity."""
        last = len(self.table) - 1
        if m >= last:
            return self.table[last]
        low = int(m)
        a, b = self.table[low], self.table[low + 1]
        if m == low or a in {b, INFINITE}:
            return a
        return a + (b - a) * (m - low)
