"""What the metrics say of conversations: how many are remembered, and where their turns went.

One more collector beside `exposition`, because it reads another object: the memory that the tracker
keeps. How many requests stayed on a server that the line would not have chosen is
`crossover_decisions_total{reason="prefix"}`.

Nothing is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.affinity import Prefixes
from router.exposition import PREFIX


class AffinityCollector(Collector):
    """Turns the memory's numbers into families of metrics, once per scrape."""

    def __init__(self, prefixes: Prefixes) -> None:
        self._prefixes = prefixes

    def describe(self) -> Iterable[Metric]:
        """Nothing: no other collector has these names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        known = self._prefixes
        held = GaugeMetricFamily(
            PREFIX + "conversations", "Conversations of which it is remembered where they are."
        )
        held.add_metric([], len(known))
        yield held
        turns = CounterMetricFamily(
            PREFIX + "conversation_turns",
            "Later turns, by whether they went to the server that had seen the most of it.",
            labels=["prefix"],
        )
        turns.add_metric(["kept"], known.stayed)
        turns.add_metric(["lost"], known.moved)
        yield turns
