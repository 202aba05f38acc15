"""Builds one relay and its watchers from settings: the only place that knows all the parts."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from router.access_log import AccessLog
from router.auth import load_keys
from router.breaker import Breaker
from router.calibrated import read_rule
from router.calibration import CalibrationError, parse_calibration
from router.doctor import Target, ask
from router.doctor_facts import threshold_in
from router.explain import DecisionLog
from router.health import HealthState, PairHealth
from router.load import ROLES, LoadTracker, Role
from router.metrics import RelayMetrics
from router.pair_watch import PairWatch
from router.policies import PolicyError, configured_policy, make_frontier
from router.poller import BODY_LIMIT, AcceptPoller, TelemetryPoller, probe_client
from router.pool import BackendPool
from router.pool_transport import PoolTransport
from router.probes import HealthProber
from router.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

    from router.calibration import Calibration
    from router.config import Settings
    from router.frontier import Frontier
    from router.logs import LineWriter
    from router.policy import Policy

_log = logging.getLogger("crossover")

READY_TIMEOUT: Final = 2.0  # seconds; `/ready` reads a flag
INFO_TIMEOUT: Final = 10.0  # seconds; `/server_info` waits for the scheduler's step to end


def read_line(settings: Settings) -> tuple[Frontier | None, float | None, float | None]:
    """The configured line, and band and dwell where a calibration says them and no setting does.

    Raises CalibrationError, which names the file and says why.
    """
    if settings.calibration is not None:
        calibration = _read_calibration(settings.calibration)
        if calibration.verdict == "unsure":
            _log.warning("the calibration %s is not sure of its line", settings.calibration)
        given, switch = settings.model_fields_set, calibration.switch
        return (
            calibration.line,
            None if "band" in given else switch.band,
            None if "dwell" in given else switch.dwell,
        )
    if settings.threshold is not None:
        return make_frontier(settings.threshold, settings.scope), None, None
    return None, None, None


def _read_calibration(path: Path) -> Calibration:
    try:
        return parse_calibration(Path(path).read_bytes())
    except (CalibrationError, OSError) as error:
        msg = f"calibration {path}: {error}"
        raise CalibrationError(msg) from error


def first_policy(settings: Settings) -> tuple[Policy, Frontier | None]:
    """The policy that the settings and the calibration ask for, and the configured line.

    Raises CalibrationError as `read_line` does, and where a rule cannot be made of what is there.
    """
    frontier, band, dwell = read_line(settings)
    name, rule = settings.policy, None
    if name == "frontier" and settings.calibration is not None:
        rule = read_rule(_read_calibration(settings.calibration), settings.rule)
    try:
        policy = configured_policy(
            name if rule is None else rule.name,
            settings,
            frontier,
            band=band,
            dwell=dwell,
            curves=rule.curves if rule is not None else None,
            parameters=rule.parameters if rule is not None else {},
        )
    except PolicyError as error:
        msg = f"calibration {settings.calibration}: {error}"
        raise CalibrationError(msg) from error
    return policy, frontier


def build_relay(
    settings: Settings,
    writer: LineWriter,
    *,
    call_later: Callable[[float, Callable[[], None]], object],
    clock: Callable[[], float] = time.monotonic,
) -> Relay:
    """One relay, not yet listening. Raises CalibrationError as `first_policy` does."""
    policy, frontier = first_policy(settings)
    tracker = LoadTracker(stale_after=settings.telemetry_stale)
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
    return Relay(
        settings,
        policy=policy,
        frontier=frontier,
        tracker=tracker,
        health=health,
        pools={role: _pool(settings, role, clock) for role in ROLES},
        metrics=RelayMetrics(),
        decisions=DecisionLog(clock=clock),
        access_log=AccessLog(writer, call_later=call_later, enabled=settings.access_log),
        keys=load_keys(settings),
        clock=clock,
    )


def _key(settings: Settings, role: Role) -> str | None:
    key = settings.backend_key(role.value)
    return key.get_secret_value() if key is not None else None


def _url(settings: Settings, role: Role) -> str:
    return str(settings.speculative if role is Role.SPECULATIVE else settings.baseline)


def _pool(settings: Settings, role: Role, clock: Callable[[], float]) -> BackendPool:
    return BackendPool(
        role,
        settings.speculative if role is Role.SPECULATIVE else settings.baseline,
        key=_key(settings, role),
        keep_alive=settings.backend_keep_alive,
        connect_timeout=settings.connect_timeout,
        clock=clock,
    )


class Watchers:
    """The pollers and probes of both backends, each with a client of its own."""

    def __init__(self, relay: Relay) -> None:
        self.clients: list[httpx.AsyncClient] = []
        self.pollers: dict[Role, TelemetryPoller] = {}
        self.runs: list[AcceptPoller | TelemetryPoller | HealthProber | PairWatch] = []
        for role in ROLES:
            self._watch(relay, role)
        self.pair = self._watch_pair(relay)
        self.runs.append(self.pair)

    def _client(
        self, settings: Settings, role: Role, timeout: float, clock: Callable[[], float]
    ) -> httpx.AsyncClient:
        # A pool for each: a probe that hangs delays no other, and none is in the way of the relay.
        key = _key(settings, role)
        transport = PoolTransport(_pool(settings, role, clock), limit=BODY_LIMIT)
        client = probe_client(_url(settings, role), key=key, timeout=timeout, transport=transport)
        self.clients.append(client)
        return client

    def _watch(self, relay: Relay, role: Role) -> None:
        settings, clock = relay.settings, relay.clock
        accept = AcceptPoller(self._client(settings, role, 2.0, clock), clock=clock)
        poller = TelemetryPoller(
            role,
            self._client(settings, role, 1.0, clock),
            relay.tracker,
            interval=settings.telemetry_interval,
            accept=accept.value,
            clock=clock,
        )
        prober = HealthProber(
            role,
            relay.health,
            ready_client=self._client(settings, role, READY_TIMEOUT, clock),
            health_client=self._client(settings, role, settings.health_timeout, clock),
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
        clients = {role: self._client(settings, role, INFO_TIMEOUT, clock) for role in ROLES}
        speculative, baseline = (
            Target(role, _url(settings, role), _key(settings, role)) for role in ROLES
        )
        return PairWatch(
            (speculative, baseline),
            lambda target: ask(
                clients[target.role], target, canary=False, timeout=INFO_TIMEOUT, clock=clock
            ),
            threshold=threshold_in(relay.frontier),
            interval=settings.pair_interval,
            comebacks=lambda: sum(ups[role, "health", "up"] for role in ROLES),
            clock=clock,
        )


__all__ = ["CalibrationError", "Watchers", "build_relay", "first_policy", "read_line"]
