"""What the router's own endpoints may see of the running relay, and the few things they may do.

The relay fulfils this Protocol; tests use a small fake. Everything is read at the moment of asking:
nobody keeps a second copy of a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from router.calibration_state import CalibrationState
from router.config import Settings
from router.explain import DecisionLog
from router.frontier import Frontier
from router.health import PairHealth
from router.load import LoadTracker, Role
from router.metrics import RelayMetrics
from router.policy import Policy


class ConnectionCounts(msgspec.Struct, frozen=True):
    """Open TCP connections on both sides."""

    client: int  # idle ones included
    backend_busy: Mapping[Role, int]  # with a request on them
    backend_idle: Mapping[Role, int]  # kept to be reused


class RelayView(Protocol):
    """The running relay as its listeners see it."""

    @property
    def settings(self) -> Settings:
        """The configuration in force."""
        ...

    @property
    def tracker(self) -> LoadTracker:
        """Who is counted where."""
        ...

    @property
    def health(self) -> PairHealth:
        """The state of the backends."""
        ...

    @property
    def metrics(self) -> RelayMetrics:
        """The hot counters."""
        ...

    @property
    def decisions(self) -> DecisionLog:
        """The last decisions and events."""
        ...

    @property
    def draining(self) -> bool:
        """Whether the router itself is shutting down."""
        ...

    @property
    def started_at(self) -> float:
        """When it started, in monotonic seconds."""
        ...

    @property
    def waiting(self) -> int:
        """Requests in our own queue."""
        ...

    @property
    def frontier(self) -> Frontier | None:
        """The line that the configuration or the calibration gives, whatever policy is in force."""
        ...

    @property
    def configured(self) -> Policy | None:
        """The policy of the name `frontier`, as configured; None without a line."""
        ...

    @property
    def calibration(self) -> CalibrationState | None:
        """What is known of the calibration in force; None without one."""
        ...

    policy: Policy
    """What decides the next request; the admin listener replaces it."""

    def connection_counts(self) -> ConnectionCounts:
        """Open connections on both sides."""
        ...

    def clock(self) -> float:
        """Monotonic seconds, now."""
        ...
