"""The admin listener's `/status`: the live objects, gathered into one typed body.

It reads and changes nothing.
"""

from __future__ import annotations

import math
from typing import Literal

from router import __version__
from router.admin_models import (
    AffinityItem,
    BackendItem,
    ConnectionsItem,
    FindingItem,
    FrontierItem,
    PairItem,
    PolicyItem,
    QueueItem,
    ReasonItem,
    Status,
    TelemetryItem,
)
from router.exposition import frontier_in_force
from router.frontier import Frontier
from router.health import Health
from router.load import ROLES, LoadSnapshot, Role
from router.pair_watch import PairState
from router.policies import policy_name
from router.policy import FrontierPolicy
from router.rules import JoinPolicy
from router.status_advice import advise
from router.status_calibration import as_requests, calibration_item
from router.status_path import LoadPath
from router.view import ConnectionCounts, RelayView

Word = Literal["up", "down", "unknown"]
Parity = Literal["fair", "unfair", "unknown"]
_WORDS: dict[Health, Word] = {Health.UP: "up", Health.DOWN: "down", Health.UNKNOWN: "unknown"}
_BREAKER: tuple[Literal["closed", "half_open", "open"], ...] = ("closed", "half_open", "open")


def status_body(
    relay: RelayView, pair: PairState | None = None, path: LoadPath | None = None
) -> Status:
    """The whole router at one moment, with what the watch over the pair knows and where it was."""
    now = relay.clock()
    snapshot = relay.tracker.snapshot(now)
    counts = relay.connection_counts()
    settings = relay.settings
    unix = relay.decisions.unix(0.0)
    status = Status(
        time=round(unix + now, 3),
        version=__version__,
        uptime=round(now - relay.started_at, 3),
        draining=relay.draining,
        ready=relay.health.ready() and not relay.draining,
        policy=policy_item(relay),
        backends=[_backend(relay, role, snapshot, counts) for role in ROLES],
        pair=None if pair is None else _pair(pair, now),
        calibration=None
        if relay.calibration is None
        else calibration_item(relay, relay.calibration),
        affinity=_affinity(relay),
        queue=QueueItem(
            waiting=relay.waiting,
            queue_size=settings.queue_size,
            queue_timeout=settings.queue_timeout,
            in_flight=relay.tracker.in_flight,
            max_in_flight=settings.max_in_flight,
        ),
        client_connections=counts.client,
        findings=[],
        reasons=[
            ReasonItem(backend=backend, reason=reason, count=count)
            for (backend, reason), count in relay.metrics.decisions.items()
            if count
        ],
        path=[
            (round(at + unix, 1), n, m) for at, n, m in (path.samples() if path is not None else ())
        ],
        settings=settings.redacted(),
    )
    status.findings = advise(status)
    return status


def _affinity(relay: RelayView) -> AffinityItem | None:
    known, policy = relay.tracker.prefixes, relay.policy
    if known is None:
        return None
    return AffinityItem(
        in_force=isinstance(policy, (FrontierPolicy, JoinPolicy)) and policy.affinity,
        conversations=len(known),
        size=known.size,
        kept=known.stayed,
        lost=known.moved,
    )


def policy_item(relay: RelayView) -> PolicyItem:
    """What decides, and what it remembers."""
    now = relay.clock()
    memory = relay.tracker.memory
    policy = relay.policy
    frontier = None
    if isinstance(policy, FrontierPolicy):
        frontier = _frontier(policy, relay.tracker.snapshot(now))
    return PolicyItem(
        name=policy_name(policy),
        configured=policy is relay.configured,
        frontier=frontier,
        side=memory.side if frontier is not None else None,
        side_for=None
        if frontier is None or memory.since == -math.inf
        else round(now - memory.since, 3),
    )


def _frontier(policy: FrontierPolicy, snapshot: LoadSnapshot) -> FrontierItem:
    line: Frontier = policy.frontier
    return FrontierItem(
        scope=line.scope,
        threshold=None if line.scope == "table" else as_requests(line.threshold),
        table=[as_requests(value) for value in line.table],
        in_force=as_requests(frontier_in_force(line, snapshot)),
        band=policy.band,
        dwell=policy.dwell,
    )


def _pair(pair: PairState, now: float) -> PairItem:
    words: dict[bool | None, tuple[Literal["active", "lost", "unknown"], Parity]] = {
        True: ("active", "fair"),
        False: ("lost", "unfair"),
        None: ("unknown", "unknown"),
    }
    return PairItem(
        age=None if pair.checked_at is None else round(max(0.0, now - pair.checked_at), 3),
        speculation=words[pair.speculation][0],
        parity=words[pair.parity][1],
        alarm=pair.alarm,
        findings=[
            FindingItem(
                rule=each.rule,
                severity=each.severity.value,
                backend=each.backend,
                seen=each.seen,
                why=each.why,
                mend=each.mend,
            )
            for each in pair.findings
        ],
        unknown=list(pair.unknown),
    )


def _backend(
    relay: RelayView, role: Role, snapshot: LoadSnapshot, counts: ConnectionCounts
) -> BackendItem:
    health = relay.health.status(role)
    load = snapshot.of(role)
    settings = relay.settings
    return BackendItem(
        role=role,
        url=str(settings.speculative if role is Role.SPECULATIVE else settings.baseline),
        usable=health.usable,
        health=_WORDS[health.health],
        ready_probe=_WORDS[health.ready],
        breaker=_BREAKER[health.breaker],
        failures=health.failures,
        drained=health.drained,
        contended=load.contended,
        in_flight=load.in_flight,
        foreign=load.foreign,
        concurrency=load.concurrency,
        connections=ConnectionsItem(
            busy=counts.backend_busy.get(role, 0), idle=counts.backend_idle.get(role, 0)
        ),
        telemetry=_telemetry(relay, role, snapshot),
    )


def _telemetry(relay: RelayView, role: Role, snapshot: LoadSnapshot) -> TelemetryItem | None:
    told = relay.tracker.of(role).telemetry
    if told is None:
        return None
    return TelemetryItem(
        source=told.source,
        age=round(max(0.0, snapshot.now - told.read_at), 3),
        fresh=snapshot.of(role).fresh,
        running=told.running,
        queued=told.queued,
        token_usage=told.token_usage,
        accept_length=told.accept_length,
        max_running=told.max_running,
    )
