"""What the admin listener shows of time passing, moved on by the router's sweep.

It costs no request anything: a sample of the load once a second, and the decisions since the last tick
for whoever listens.
"""

from __future__ import annotations

from router.decision_feed import DecisionFeed
from router.status_path import LoadPath
from router.view import RelayView


class Live:
    """The path of the last minutes and the feed of decisions of one relay."""

    def __init__(self, relay: RelayView) -> None:
        self.path = LoadPath()
        self.feed = DecisionFeed(relay.decisions)
        self._relay = relay

    def tick(self) -> None:
        """Time passed."""
        now = self._relay.clock()
        load = self._relay.tracker.snapshot(now)
        self.path.sample(now, load.speculative.concurrency, load.baseline.concurrency)
        self.feed.tick(now)
