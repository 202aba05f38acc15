"""The running relay: what all connections share, and who is let in.

It says what may be relayed and when (own limits and a bounded queue), hears of each decision and
each end exactly once, and lets time pass in one coarse sweep, so that no request pays for a timer
of its own. It may not touch a socket, nor choose a backend: that is the policy's, in `Exchange`.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from router import errors
from router.actions import Request, RetryBudget, Rules, Shared
from router.errors import ErrorAnswer
from router.files import FileBudget
from router.guard import pinned_role
from router.headers import common_lines, cors_lines
from router.incoming import HeadLimits
from router.known_heads import KnownRequests
from router.metrics import Outcome
from router.pages import Pages
from router.report import id_maker, measure, record_of, refusal
from router.request import BodyError, RequestInfo, read_info
from router.view import ConnectionCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from router.access_log import AccessLog
    from router.auth import KeyRing
    from router.calibration_state import CalibrationState
    from router.config import Settings
    from router.driver import Driver
    from router.explain import DecisionLog
    from router.frontend import RelayProtocol
    from router.frontier import Frontier
    from router.health import PairHealth
    from router.incoming import Incoming
    from router.load import LoadTracker, Role
    from router.metrics import Finished, RelayMetrics
    from router.policy import Policy
    from router.pool import BackendPool
    from router.turns import Turns

REJECTED = Outcome.REJECTED  # an enum's members are slow to look up

SWEEP_SECONDS: Final = 0.25  # the grain of every limit in time but the peek's


class Relay:
    """Owns the shared state of one router process. All of it belongs to the event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        policy: Policy,
        frontier: Frontier | None,
        configured: Policy | None = None,
        calibration: CalibrationState | None = None,
        tracker: LoadTracker,
        health: PairHealth,
        pools: Mapping[Role, BackendPool],
        metrics: RelayMetrics,
        decisions: DecisionLog,
        access_log: AccessLog,
        keys: KeyRing,
        turns: Turns,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`frontier` is the configured line and `configured` the policy that follows it, whatever
        policy is in force; `wall` unix seconds.
        """
        self.settings = settings
        self.frontier = frontier
        self.configured = configured
        self.calibration = calibration
        self.tracker = tracker
        self.health, self.pools = health, pools
        self.metrics = metrics
        self.decisions, self.access_log = decisions, access_log
        self.keys, self._keyed = keys, len(keys) > 0
        self.turns = turns
        self.clock = clock
        self.shared = Shared(
            tracker, policy, Rules.of(settings), RetryBudget(settings.retry_budget),
            metrics.chunk_gap, health.refresh,
        )  # fmt: skip
        self.quiet = self.shared.rules.quiet
        self.head_limits = HeadLimits(
            settings.max_header_bytes, settings.max_headers, settings.max_url_bytes
        )
        self.known_requests = KnownRequests()
        self.buffered = 0  # bytes of request bodies held, over all connections
        self.max_body, self.max_buffered = settings.max_body, settings.max_buffered
        self._max_in_flight = settings.max_in_flight
        self.started_at = clock()
        # uvicorn's own sets, once it listens
        self.connections: set[RelayProtocol] = set()
        self.admin_connections: set[RelayProtocol] = set()
        self.files = FileBudget(self)
        self._waiting: deque[Driver] = deque()  # our own queue, oldest first
        self._letting_in = False
        self.pages = Pages(settings.cors_origin, keyed=self._keyed)
        self._origins = self.pages.origins
        self._wall = wall
        self.new_id = id_maker(secrets.token_hex(4))
        self.sweep(self.started_at)

    # ------------------------------------------------------------------ what others see

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.shared.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.shared.policy = policy

    @property
    def draining(self) -> bool:
        """Whether the router is shutting down."""
        return self.shared.draining

    @property
    def waiting(self) -> int:
        """Requests in our own queue."""
        return len(self._waiting)

    def connection_counts(self) -> ConnectionCounts:
        """Open connections on both sides."""
        pools = self.pools
        return ConnectionCounts(
            client=len(self.connections),
            backend_busy={r: len(p.open) - len(p.idle) for r, p in pools.items()},
            backend_idle={role: len(pool.idle) for role, pool in pools.items()},
        )

    # ------------------------------------------------------------------ letting requests in

    def admission_error(self, incoming: Incoming) -> ErrorAnswer | None:
        """What can be refused on the head alone, before a body is asked for."""
        if incoming.length is not None and incoming.length > self.max_body:
            return errors.BODY_TOO_LARGE
        if (
            self._keyed
            and incoming.route is not None
            and not self.keys.accepts(incoming.headers, path=incoming.path)
        ):
            return errors.UNAUTHORIZED
        return None

    def request_from(self, incoming: Incoming, now: float) -> Request | ErrorAnswer:
        """The request to relay, or what is wrong with it."""
        route, facts = incoming.route, incoming.facts
        if route is None:
            raise ValueError("only routes are relayed")
        pinned = None
        if facts.pinned is not None and self.settings.allow_pinning:
            pinned = pinned_role(facts.pinned)
            if pinned is None:
                return errors.BAD_PIN
        body = incoming.take_body()
        if route.json and not facts.encoded:
            try:
                info = read_info(body, pinned)
            except BodyError as error:
                return errors.BAD_BODY.with_message(str(error))
            if route.stateful and info.stateful is not None:
                return errors.STATEFUL.with_message(
                    f"{info.stateful}: {errors.STATEFUL.message}", info.stateful
                )
        else:
            info = RequestInfo(prompt_bytes=len(body), pinned=pinned)
        return Request(
            facts.request_id or self.new_id(),
            route,
            info,
            body,
            facts.forwarded,
            now,
            incoming.version == "1.0",
            incoming.keep_alive,
            self.cors_lines(facts.origin) if self._origins else b"",
        )

    def refused(self, error: ErrorAnswer, incoming: Incoming | None, since: float) -> str:
        """Count and log an answer of our own to a request that was not relayed; its id."""
        request_id = (incoming.facts.request_id if incoming is not None else None) or self.new_id()
        self._report(refusal(request_id, error, incoming, since, self.clock()))
        return request_id

    def _report(self, done: Finished) -> None:
        """The one place where a request that is over is counted and logged."""
        self.metrics.finish(done)
        if done.outcome is REJECTED:
            self.metrics.reject(done.error or "")
        self.access_log.add(done)

    def cors_lines(self, origin: bytes | None) -> bytes:
        """Header lines that let a browser of an allowed origin read the answer."""
        return cors_lines(self._origins, origin)

    def submit(self, driver: Driver, now: float) -> None:
        """Start an exchange now, let it wait its turn, or turn it away."""
        tracker = self.tracker
        in_flight = tracker.speculative.in_flight + tracker.baseline.in_flight
        if not self._waiting and in_flight < self._max_in_flight:
            driver.start(now)
        elif len(self._waiting) < self.settings.queue_size:
            driver.queued = True
            self._waiting.append(driver)
        else:
            driver.reject(errors.QUEUE_FULL)

    # ------------------------------------------------------------------ hearing of them

    def decided(self, driver: Driver, now: float) -> None:
        """An exchange chose a backend, for the first time or for a replay."""
        exchange = driver.exchange
        decision = exchange.decision
        if decision is None:
            return
        self.metrics.decided(decision.backend, decision.reason)
        request = exchange.request
        driver.entries.append(
            self.decisions.add(
                now,
                request.id,
                request.route.name,
                decision,
                replay=bool(exchange.retries),
            )
        )

    def finished(self, driver: Driver) -> None:
        """An exchange is over, whatever way it went."""
        exchange = driver.exchange
        done = record_of(exchange, queued=driver.queued)
        self._report(done)
        if self.calibration is not None and self.calibration.drift is not None:
            measure(self.calibration.drift, exchange, done, self.tracker)
        for retry in exchange.retries:
            self.metrics.retry(retry)
        for entry in driver.entries:
            entry.finish(done.outcome, done.status, done.ended_at)
        if self._waiting:
            # Looked for only if it was put there: while the queue is full, each one turned away ends
            # here too.
            if driver.queued and exchange.decided_at is None and driver in self._waiting:
                self._waiting.remove(driver)  # its client left while it waited
            self._let_in()

    def _let_in(self) -> None:
        """Places are free: start who waits, oldest first; not again from within a start."""
        if self._letting_in:
            return
        self._letting_in = True
        try:
            while self._waiting and self.tracker.in_flight < self._max_in_flight:
                driver = self._waiting.popleft()
                try:
                    driver.start(self.clock())
                except Exception as error:  # noqa: BLE001 (it is this one's, not of whoever ended)
                    driver.client.fail(error)
        finally:
            self._letting_in = False

    # ------------------------------------------------------------------ time

    def sweep(self, now: float) -> None:
        """Let time pass for everything: connections, exchanges, the queue, pools, health."""
        self.shared.common = common_lines(int(self._wall()))
        self.health.refresh(now)
        # A copy, since a tick may close the connection.
        for connection in (*self.connections, *self.admin_connections):
            if connection.quiet_until <= now:
                try:
                    connection.tick(now)
                except Exception as error:  # noqa: BLE001 (time must go on for the others)
                    connection.fail(error)
        for pool in self.pools.values():
            pool.sweep(now)
        limit = self.settings.queue_timeout
        while self._waiting and now - self._waiting[0].exchange.request.received_at >= limit:
            self._waiting.popleft().reject(errors.QUEUE_TIMEOUT)

    def abort_all(self) -> None:
        """The drain limit is reached: end what is left with an explicit break."""
        while self._waiting:
            self._waiting.popleft().reject(errors.DRAIN_LIMIT)
        for connection in list(self.connections):
            if connection.driver is not None:
                connection.driver.abort()
