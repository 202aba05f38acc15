"""A relay that relays nothing: the real tracker, health, metrics and log, and no sockets."""

from __future__ import annotations

from router.calibration_state import CalibrationState
from router.config import Settings, load_settings
from router.explain import DecisionLog
from router.frontier import Frontier
from router.health import PairHealth
from router.load import ROLES, LoadTracker, Role, Telemetry
from router.metrics import RelayMetrics
from router.policies import configured_policy
from router.policy import Policy
from router.view import ConnectionCounts

SPECULATIVE = "http://speculative.test:31000"
BASELINE = "http://baseline.test:30000"
START = 1000.0  # monotonic seconds
UNIX = 1_800_000_000.0  # the wall clock at START


def make_settings(**given: object) -> Settings:
    pair = {"speculative": SPECULATIVE, "baseline": BASELINE, "threshold": 8}
    return load_settings(pair | given, environ={})


class FakeRelay:
    """Fulfils `RelayView`; a test sets what it wants seen."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or make_settings()
        self.tracker = LoadTracker()
        self.health = PairHealth(self.tracker)
        self.metrics = RelayMetrics()
        self.now = START
        self.decisions = DecisionLog(clock=self.clock, wall=lambda: UNIX + self.now - START)
        self.frontier: Frontier | None = Frontier.total(8)
        self.policy: Policy = configured_policy("frontier", self.settings, self.frontier)
        self.configured: Policy | None = self.policy
        self.calibration: CalibrationState | None = None
        self.draining = False
        self.started_at = START
        self.waiting = 0
        self.counts = ConnectionCounts(3, {Role.SPECULATIVE: 2}, {Role.BASELINE: 1})

    def clock(self) -> float:
        return self.now

    def connection_counts(self) -> ConnectionCounts:
        return self.counts

    def make_ready(self) -> None:
        for role in ROLES:
            self.health.alive(role, self.now)

    def report(self, role: Role, running: int, queued: int = 0, **more: float) -> None:
        told = Telemetry(running, queued, self.now, self.now, "v1_loads", **more)  # type: ignore[arg-type]
        self.tracker.observe(role, told)
