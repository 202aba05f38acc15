"""A backend that says nothing at all is given new work only if the other one cannot take it.

A process that is frozen (SIGSTOP, a hung driver, a machine that swaps) still accepts connections and
requests; its probes must time out three times before it is down. Until then each new request waits
there. Sooner than by a probe it is known by everything together:

    the load, which was known, is asked for twice in a row and twice does not come in time, and
    in the last seconds no byte of any answer came from it, though some are awaited

A busy server is not like that: under a long prefill SGLang's `/health` takes up to 20 s, but the load
is read from memory (or between two steps), and the tokens of other requests flow. What follows is
soft and short: the other server is preferred, as after a 503, for as long as it is so. Where both
are silent nothing changes. A server that only does not tell its load any more is heard when its next
answer comes, and is then left alone until its load has been known again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from router.frontend import RelayProtocol
    from router.health import PairHealth
    from router.load import LoadTracker, Role

_log = logging.getLogger("crossover")

# Polls in a row without an answer in time: one may be a stall of ours, or of the network.
AFTER: Final = 2
# Seconds without a sign of life: less than two polls take (3 s) less what a stream that flowed counts
# as alive after its last byte (1 s).
QUIET: Final = 2.0
# Seconds for which the other one is preferred after each: longer than from one poll to the next.
HOLD: Final = 3.0


class Silence:
    """How long nothing was heard of one backend. `TelemetryPoller` tells it of its polls."""

    def __init__(self, heard: Callable[[float], bool], avoid: Callable[[float], None]) -> None:
        """`heard` says whether a byte of an answer came after a moment; `avoid` is told until when the
        other backend is to be preferred. Both in monotonic seconds.
        """
        self._heard = heard
        self._avoid = avoid
        self._misses = 0

    def missed(self, now: float, *, known: bool) -> None:
        """A poll had no answer in time. `known`: the load was known until now."""
        if not known and not self._misses:
            return
        self._misses += 1
        if self._misses < AFTER:
            return
        if self._heard(now - QUIET):
            self.answered()
        else:
            self._avoid(now + HOLD)

    def answered(self) -> None:
        """It said something, if only that it cannot say."""
        self._misses = 0


def nowhere() -> Silence:
    """Watches nothing."""
    return Silence(lambda _since: True, lambda _until: None)


class Served(Protocol):
    """What is looked at of the relay."""

    tracker: LoadTracker
    health: PairHealth
    connections: set[RelayProtocol]


def silence_of(relay: Served, role: Role) -> Silence:
    """Watch one backend of a running relay."""

    def heard(since: float) -> bool:
        return relay.health.lived_since(role, since) or came(relay, role, since)

    def avoid(until: float) -> None:
        counts = relay.tracker.of(role)
        if not counts.in_flight:
            return  # nothing is awaited: it may be asked, and that tells
        if counts.contended_until < until - 2 * HOLD:  # not said a moment ago
            fields = {"backend": role.value, "in_flight": counts.in_flight}
            _log.warning("%s says nothing: the other one is preferred", role.value, extra=fields)
        relay.tracker.refused(role, until)

    return Silence(heard, avoid)


def came(relay: Served, role: Role, since: float) -> bool:
    """Whether a byte of an answer that is under way came from this backend after `since`."""
    drivers = (connection.driver for connection in relay.connections)
    exchanges = (each.exchange for each in drivers if each is not None)
    for exchange in exchanges:
        decision, flow = exchange.decision, exchange.flow
        if decision is not None and decision.backend is role:
            at = exchange.first_byte_at if flow is None else flow.last_at
            if at is not None and at > since:
                return True
    return False
