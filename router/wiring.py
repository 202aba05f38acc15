"""Builds one relay and its watchers from settings: all parts are known here, and no rule."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from router.access_log import AccessLog
from router.affinity import Prefixes
from router.asking import BODY_LIMIT, PROBE_LIMIT, WATCH_LIMIT
from router.auth import load_keys
from router.breaker import Breaker
from router.calibrated import Terms, policy_of, read_terms
from router.calibration import CalibrationError
from router.calibration_state import CalibrationState
from router.calibration_watch import LIMIT, CalibrationWatch
from router.doctor import Target, examined
from router.doctor_facts import threshold_in
from router.explain import DecisionLog
from router.health import HealthState, PairHealth
from router.load import ROLES, LoadTracker, Role
from router.metrics import RelayMetrics
from router.pair_watch import PairWatch
from router.policies import configured_policy, make_frontier
from router.poller import AcceptPoller, TelemetryPoller
from router.pool import BackendPool
from router.pool_client import PoolClient
from router.probes import HealthProber
from router.relay import Relay
from router.silence import silence_of
from router.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.asking import Ask
    from router.config import Settings
    from router.frontier import Frontier
    from router.logs import LineWriter
    from router.policy import Policy

_log = logging.getLogger("crossover")

READY_TIMEOUT: Final = 2.0  # seconds; `/ready` reads a flag
INFO_TIMEOUT: Final = 10.0  # seconds; `/server_info` waits for the scheduler's step to end
VET_TIMEOUT: Final = 3.0  # seconds that a start waits for a look at the pair
ACCEPT_INTERVAL: Final = 5.0  # seconds; a page of metrics costs a backend 15 ms

Runs = AcceptPoller | TelemetryPoller | HealthProber | PairWatch | CalibrationWatch


def read_line(settings: Settings) -> tuple[Frontier | None, float | None, float | None]:
    """The configured line, and band and dwell where a calibration says them and no setting does.

    Raises CalibrationError, which names the file and says why.
    """
    loaded = _load_calibration(settings)
    if loaded is not None:
        terms = loaded[0]
        return terms.frontier, terms.band, terms.dwell
    return _plain_line(settings), None, None


def _plain_line(settings: Settings) -> Frontier | None:
    return None if settings.threshold is None else make_frontier(settings.threshold, settings.scope)


def _load_calibration(settings: Settings) -> tuple[Terms, bytes] | None:
    """What the calibration says under these settings, and its bytes; None without one."""
    path = settings.calibration
    if path is None:
        return None
    try:
        content = read_file(path)
        terms = read_terms(content, settings)
    except (CalibrationError, OSError) as error:
        msg = f"calibration {path}: {error}"
        raise CalibrationError(msg) from error
    if terms.calibration.verdict == "unsure":
        _log.warning("the calibration %s is not sure of its line", path)
    return terms, content


def read_file(path: Path) -> bytes:
    """The file's bytes. Raises OSError, also for one that is too long to be a calibration."""
    with Path(path).open("rb") as file:
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise OSError(errno.EFBIG, f"longer than {LIMIT} bytes")
    return content


def _line_policy(settings: Settings, terms: Terms | None) -> Policy | None:
    """The policy of the name `frontier`; None without a line."""
    if terms is None:
        line = _plain_line(settings)
        return None if line is None else configured_policy("frontier", settings, line)
    try:
        return policy_of(terms, settings)
    except CalibrationError as error:
        msg = f"calibration {settings.calibration}: {error}"
        raise CalibrationError(msg) from error


def first_policy(settings: Settings) -> tuple[Policy, Frontier | None]:
    """The policy that settings and calibration ask for, and the line. Raises CalibrationError."""
    loaded = _load_calibration(settings)
    terms = loaded[0] if loaded is not None else None
    line = _plain_line(settings) if terms is None else terms.frontier
    return _start_policy(settings, _line_policy(settings, terms), line), line


def _start_policy(settings: Settings, configured: Policy | None, line: Frontier | None) -> Policy:
    if settings.policy == "frontier" and configured is not None:
        return configured
    return configured_policy(settings.policy, settings, line)


def build_relay(
    settings: Settings,
    writer: LineWriter,
    *,
    call_later: Callable[[float, Callable[[], None]], object],
    clock: Callable[[], float] = time.monotonic,
) -> Relay:
    """One relay, not yet listening. Raises CalibrationError as `first_policy` does."""
    loaded = _load_calibration(settings)
    terms = loaded[0] if loaded is not None else None
    frontier = _plain_line(settings) if terms is None else terms.frontier
    configured = _line_policy(settings, terms)
    tracker = LoadTracker(
        stale_after=settings.telemetry_stale,
        prefixes=Prefixes() if settings.affinity == "auto" else None,
    )
    health = PairHealth(
        tracker,
        breaker=lambda: Breaker(
            failures=settings.breaker_failures,
            open_for=settings.breaker_open,
            open_max=settings.breaker_open_max,
        ),
        health=lambda: HealthState(
            down_after=settings.health_down_after, up_after=settings.health_up_after
        ),
        cool_down=settings.cool_down,
    )
    turns = Turns()
    return Relay(
        settings,
        policy=_start_policy(settings, configured, frontier),
        frontier=frontier,
        configured=configured,
        calibration=None if loaded is None else _calibration_state(settings, *loaded),
        tracker=tracker,
        health=health,
        pools={role: _pool(settings, role, clock, turns) for role in ROLES},
        metrics=RelayMetrics(),
        decisions=DecisionLog(clock=clock),
        access_log=AccessLog(writer, call_later=call_later, enabled=settings.access_log),
        keys=load_keys(settings),
        turns=turns,
        clock=clock,
    )


def _calibration_state(settings: Settings, terms: Terms, content: bytes) -> CalibrationState:
    acceptance = (settings.acceptance_smoothing, settings.acceptance_bound)
    return CalibrationState(
        str(settings.calibration),
        content,
        terms,
        wall=time.time,
        acceptance=acceptance if settings.acceptance_aware == "auto" else None,
    )


def _key(settings: Settings, role: Role) -> str | None:
    key = settings.backend_key(role.value)
    return key.get_secret_value() if key is not None else None


def _url(settings: Settings, role: Role) -> str:
    return str(settings.speculative if role is Role.SPECULATIVE else settings.baseline)


def _pool(
    settings: Settings, role: Role, clock: Callable[[], float], turns: Turns | None = None
) -> BackendPool:
    return BackendPool(
        role,
        settings.speculative if role is Role.SPECULATIVE else settings.baseline,
        key=_key(settings, role),
        keep_alive=settings.backend_keep_alive,
        connect_timeout=settings.connect_timeout,
        clock=clock,
        turns=turns,
    )


class Watchers:
    """What looks at the pair beside the traffic, each over connections of its own."""

    def __init__(self, relay: Relay) -> None:
        self.clients: list[PoolClient] = []
        self.pollers: dict[Role, TelemetryPoller] = {}
        self.accepts: dict[Role, AcceptPoller] = {}
        self.runs: list[Runs] = []
        for role in ROLES:
            self._watch(relay, role)
        self.pair = self._watch_pair(relay)
        self.calibration = self._watch_calibration(relay)
        self.runs += [self.pair, *([self.calibration] if self.calibration else [])]

    async def vet(self) -> None:
        """Look at the pair once, before anything is served, where a calibration can be wrong for it.

        Servers that are not up yet are judged when they are. Raises CalibrationError.
        """
        if self.calibration is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(VET_TIMEOUT):
                await self.pair.look()
        self.calibration.vet()

    def _asker(
        self, settings: Settings, role: Role, clock: Callable[[], float], limit: int = WATCH_LIMIT
    ) -> Ask:
        # A pool for each: a probe that hangs delays no other, and none is in the way of the relay.
        client = PoolClient(_pool(settings, role, clock), limit=limit)
        self.clients.append(client)
        return client.ask

    def _watch(self, relay: Relay, role: Role) -> None:
        settings, clock = relay.settings, relay.clock
        # Often enough that the smoothing has something to smooth.
        every = min(ACCEPT_INTERVAL, settings.acceptance_smoothing / 6)
        asker = self._asker(settings, role, clock)
        self.accepts[role] = accept = AcceptPoller(asker, interval=every, clock=clock)
        poller = TelemetryPoller(
            role,
            self._asker(settings, role, clock),
            relay.tracker,
            interval=settings.telemetry_interval,
            accept=accept.value,
            silence=silence_of(relay, role),
            clock=clock,
        )
        prober = HealthProber(
            role,
            relay.health,
            ready=self._asker(settings, role, clock, PROBE_LIMIT),
            health=self._asker(settings, role, clock, PROBE_LIMIT),
            ready_interval=settings.ready_interval,
            ready_timeout=READY_TIMEOUT,
            health_interval=settings.health_interval,
            health_timeout=settings.health_timeout,
            clock=clock,
        )
        self.pollers[role] = poller
        self.runs += [accept, poller, prober]

    def _watch_pair(self, relay: Relay) -> PairWatch:
        settings, clock, ups = relay.settings, relay.clock, relay.health.transitions
        askers = {role: self._asker(settings, role, clock, BODY_LIMIT) for role in ROLES}
        speculative, baseline = (
            Target(role, _url(settings, role), _key(settings, role)) for role in ROLES
        )
        return PairWatch(
            (speculative, baseline),
            lambda target: examined(askers[target.role], target, timeout=INFO_TIMEOUT),
            threshold=lambda: threshold_in(relay.frontier),
            interval=settings.pair_interval,
            comebacks=lambda: sum(ups[role, "health", "up"] for role in ROLES),
            clock=clock,
        )

    def _watch_calibration(self, relay: Relay) -> CalibrationWatch | None:
        path, state = relay.settings.calibration, relay.calibration
        if path is None or state is None:
            return None
        return CalibrationWatch(
            relay,
            state,
            self.pair.state,
            lambda: read_file(path),
            accept=self.accepts[Role.SPECULATIVE].value,
            interval=relay.settings.calibration_interval,
            clock=relay.clock,
        )


__all__ = ["CalibrationError", "Watchers", "build_relay", "first_policy", "read_line"]
