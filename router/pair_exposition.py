"""What Prometheus sees of the pair itself: the last look's verdicts, absent when not known.

It asks no backend: what was seen stands in `PairState`, which only the watch writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.exposition import PREFIX
from router.pair_watch import PairState


class PairCollector(Collector):
    """Two gauges, read at the moment of a scrape."""

    def __init__(self, state: PairState) -> None:
        self._state = state

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are told apart by their own prefix."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The verdicts of the last look."""
        for name, text, verdict in (
            (
                "speculation_active",
                "1 if the speculative server really speculates, 0 if that is lost.",
                self._state.speculation,
            ),
            (
                "pair_parity",
                "1 if nothing makes the comparison of the two servers unfair.",
                self._state.parity,
            ),
        ):
            family = GaugeMetricFamily(PREFIX + name, text)
            if verdict is not None:
                family.add_metric([], float(verdict))
            yield family
