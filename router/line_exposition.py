"""The line in force as points, so that a dashboard can draw it in the plane of both concurrencies.

A gauge with two closed labels: `point`, a number along the line, and `axis`, which of the two
coordinates it is. Values move with the line, labels never do. Nothing is counted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.frontier import Frontier
from router.view import RelayView

NAME: Final = "crossover_frontier_point"
# Enough for a table to look like itself; 34 series.
POINTS: Final = 17


def line_points(frontier: Frontier, cap: int | None) -> list[tuple[int, float, float]]:
    """Number, n and m of points (F(m), m), from m = 0 to where the line has nothing more to say.

    That is where it reaches the axis, or the end of its table, or K for one that never changes.
    Never above the speculative server's own cap; where the line is infinite there is no point.
    """
    reach = _reach(frontier)
    found = []
    for point in range(POINTS):
        m = reach * point / (POINTS - 1)
        n = frontier.at(m)
        if cap is not None and cap < n:
            n = float(cap)
        if n != math.inf:
            found.append((point, n, m))
    return found


def _reach(frontier: Frontier) -> float:
    """The largest m that is drawn, at least 1."""
    if frontier.scope != "table":
        return max(1.0, frontier.threshold) if frontier.threshold != math.inf else 1.0
    values = frontier.table
    if values[0] > 0 and 0.0 in values:
        return float(values.index(0.0))
    return max(1.0, len(values) - 1.0)


class LineCollector(Collector):
    """One gauge, read at the moment of a scrape; no series under a policy without a line."""

    def __init__(self, relay: RelayView) -> None:
        self._relay = relay

    def describe(self) -> Iterable[Metric]:
        """Nothing: the name is told apart by its own prefix."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The points of the line that the policy decides with now."""
        family = GaugeMetricFamily(
            NAME,
            "A point of the line in force: n and m, in requests, where speculating ends.",
            labels=["point", "axis"],
        )
        line = getattr(self._relay.policy, "frontier", None)
        if isinstance(line, Frontier):
            snapshot = self._relay.tracker.snapshot(self._relay.clock())
            for point, n, m in line_points(line, snapshot.speculative.cap):
                family.add_metric([f"{point:02d}", "n"], n)
                family.add_metric([f"{point:02d}", "m"], m)
        yield family
