"""May a backend get new work? Probes, breakers and the operator, in one answer.

    eligible = probes do not say "down", and no operator drained it
    usable   = eligible and its breaker allows; if that leaves none, every eligible one

so a breaker never takes out the last backend that is left, while probes and operators may take out
both. What is not known yet is not down: at a cold start requests are routed by our own count.

Health never touches a count: the only thing written here is `LoadTracker.set_usable` and, for
back-pressure, `LoadTracker.refused`. No I/O and no clock: `now` is monotonic seconds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import msgspec

from router.breaker import Breaker, BreakerState, Verdict
from router.load import ROLES, LoadTracker, Role
from router.vitals import UNKNOWN, Answer, Health, HealthState, Probe

__all__ = ["Answer", "BackendHealth", "Health", "HealthState", "PairHealth", "Probe"]

_log = logging.getLogger("crossover")

SUCCESS = Verdict.SUCCESS  # an enum's members are slow to look up


class BackendHealth(msgspec.Struct, frozen=True, gc=False):
    """One backend for the status page and metrics."""

    role: Role
    usable: bool
    health: Health
    ready: Health  # what /ready alone says; UNKNOWN also when there is none
    breaker: BreakerState
    failures: int  # in a row
    drained: bool


class _Backend:
    __slots__ = ("breaker", "drained", "health", "role", "usable")

    def __init__(self, role: Role, breaker: Breaker, health: HealthState) -> None:
        self.role = role
        self.breaker = breaker
        self.health = health
        self.drained = False
        self.usable = True


class PairHealth:
    """Health, breaker and drain of both backends; the only writer of `usable`."""

    def __init__(
        self,
        tracker: LoadTracker,
        *,
        breaker: Callable[[], Breaker] = Breaker,
        health: Callable[[], HealthState] = HealthState,
        cool_down: float = 1.0,
    ) -> None:
        """`cool_down`: seconds for which a backend that refused work (429, 503) is avoided."""
        self._tracker = tracker
        self._cool_down = cool_down
        self._backends = {role: _Backend(role, breaker(), health()) for role in ROLES}
        self._forced = False
        self.impaired = False
        self.transitions: Counter[tuple[Role, str, str]] = Counter()
        """How often (role, "health" | "breaker" | "drain", new state) was entered."""

    def admit(self, role: Role, now: float) -> int:
        """A request was leased to this backend. The ticket goes to `record` with its outcome."""
        if not self.impaired:
            return 0
        ticket = self._backends[role].breaker.admit(now)
        self._settle(now)
        return ticket

    def record(self, role: Role, verdict: Verdict, now: float, ticket: int = 0) -> None:
        """An exchange is over, or its attempt at this backend is: call once for each `admit`."""
        backend = self._backends[role]
        if verdict is SUCCESS:
            if backend.health.state is UNKNOWN:
                self.alive(role, now)
            else:
                backend.health.lived(now)
            if not ticket and not self.impaired and backend.breaker.consecutive == 0:
                return  # nearly always
        elif verdict is Verdict.BACK_PRESSURE:
            self._tracker.refused(role, now + self._cool_down)
        before = backend.breaker.state
        backend.breaker.record(verdict, now, ticket)
        if before is not BreakerState.CLOSED or backend.breaker.state is not before:
            self._note_breaker(backend, before, f"a request ended as {verdict.value}")
            self._settle(now)

    def alive(self, role: Role, now: float) -> None:
        """Bytes of a good answer came from this backend: it lives, whatever slow probes miss."""
        health = self._backends[role].health
        before = health.state
        health.lived(now)
        if health.state is not before:
            self._note_health(role, health.state, "it answered a request")

    def probed(self, role: Role, probe: Probe, answer: Answer, now: float, reason: str) -> None:
        """A probe has heard something; `reason` is for the log."""
        health = self._backends[role].health
        before = health.state
        health.observe(probe, answer, now)
        if health.state is not before:
            self._note_health(role, health.state, f"/{probe.value}: {reason}")
            self._settle(now)

    def drain(self, role: Role, *, drained: bool, now: float) -> None:
        """An operator takes a backend out of use, or puts it back."""
        backend = self._backends[role]
        if backend.drained is drained:
            return
        backend.drained = drained
        state = "drained" if drained else "enabled"
        self._note(role, "drain", state, "by an operator", logging.INFO)
        self._settle(now)

    def refresh(self, now: float) -> None:
        """Let time pass: open breakers become half-open, trials lapse. Cheap when all is well."""
        if not self.impaired:
            return
        for backend in self._backends.values():
            before = backend.breaker.state
            backend.breaker.advance(now)
            self._note_breaker(backend, before, "its time is over")
        self._settle(now)

    def ready(self) -> bool:
        """Whether a backend takes work, is known to be up, and has not just failed again and again."""
        return any(
            backend.usable
            and backend.health.state is Health.UP
            and backend.breaker.state is not BreakerState.OPEN
            for backend in self._backends.values()
        )

    def lived_since(self, role: Role, then: float) -> bool:
        """Whether traffic of this backend succeeded after this moment."""
        return self._backends[role].health.lived_since(then)

    def verdict(self, role: Role, probe: Probe) -> Health:
        """What one probe alone says of a backend."""
        return self._backends[role].health.verdict(probe)

    def status(self, role: Role) -> BackendHealth:
        """One backend as it stands."""
        backend = self._backends[role]
        return BackendHealth(
            role,
            backend.usable,
            backend.health.state,
            backend.health.verdict(Probe.READY),
            backend.breaker.state,
            backend.breaker.consecutive,
            backend.drained,
        )

    def _settle(self, now: float) -> None:
        """Work out who is usable; see the formula at the top of this file."""
        backends = self._backends.values()
        eligible = [b for b in backends if not b.drained and b.health.state is not Health.DOWN]
        allowed = [b for b in eligible if b.breaker.allows(now)]
        forced = bool(eligible) and all(b.breaker.state is BreakerState.OPEN for b in eligible)
        if forced and not self._forced:
            _log.warning("open breakers are ignored: no other backend is left")
        self._forced = forced
        for backend in backends:
            usable = backend in (allowed or eligible)
            if usable is not backend.usable:
                backend.usable = usable
                self._tracker.set_usable(backend.role, usable=usable)
        self.impaired = any(b.breaker.state is not BreakerState.CLOSED for b in backends)

    def _note_breaker(self, backend: _Backend, before: BreakerState, reason: str) -> None:
        state = backend.breaker.state
        if state is not before:
            level = logging.WARNING if state is BreakerState.OPEN else logging.INFO
            self._note(backend.role, "breaker", state.name.lower(), reason, level)

    def _note_health(self, role: Role, state: Health, reason: str) -> None:
        level = logging.WARNING if state is Health.DOWN else logging.INFO
        self._note(role, "health", state.name.lower(), reason, level)

    def _note(self, role: Role, kind: str, state: str, reason: str, level: int) -> None:
        self.transitions[role, kind, state] += 1
        fields = {"backend": role.value, "kind": kind, "state": state, "reason": reason}
        _log.log(level, "%s of %s is now %s: %s", kind, role.value, state, reason, extra=fields)
