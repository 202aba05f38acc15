"""Which server, and why: the last thousand decisions, and what an operator did between them.

On the hot path: a decision is one small mutable struct in a ring. It never holds a prompt, a
header's value or a backend's address.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Literal

import msgspec

from router.load import Role
from router.metrics import Outcome
from router.policy import Decision, Reason

Clock = Callable[[], float]
Threshold = float | Literal["infinity"] | None

RING_SIZE: Final = 1000
MAX_ID: Final = 128  # characters of a request id that are kept


def safe_id(request_id: str) -> str:
    """A request id fit for a line of text: ASCII, and no longer than `MAX_ID`."""
    if len(request_id) > MAX_ID:
        request_id = request_id[:MAX_ID]
    if request_id.isascii():
        return request_id
    return request_id.encode("ascii", "backslashreplace").decode()


def shown_threshold(value: float | None) -> Threshold:
    """JSON has no infinity: a line that is never reached is written as the word."""
    return "infinity" if value == math.inf else value


class DecisionEntry(msgspec.Struct, gc=False):
    """One decision in the ring. The exchange that caused it calls `finish` when it ends."""

    at: float  # monotonic seconds
    request_id: str
    route: str
    backend: Role | None
    reason: Reason
    n: int
    m: int
    frontier: float | None  # F(m) in force, requests
    threshold: float | None  # K, or F(m) for a line without one
    replay: bool = False
    outcome: Outcome | None = None
    status: int | None = None
    ended_at: float | None = None
    offered: float | None = None  # tokens/s, of a rule that decides by curves
    gain: float | None = None  # whose sign decided there

    def finish(self, outcome: Outcome, status: int, now: float) -> None:
        """Note how the request ended: its outcome, the status sent, monotonic seconds."""
        self.outcome = outcome
        self.status = status
        self.ended_at = now


class Event(msgspec.Struct, gc=False):
    """Something that an operator did, in the same ring: it explains the decisions after it."""

    at: float  # monotonic seconds
    event: str
    detail: str


class DecisionView(msgspec.Struct):
    """A decision as `/decisions` shows it."""

    time: float  # unix seconds
    kind: Literal["decision"]
    request_id: str
    route: str
    backend: Role | None
    reason: Reason
    n: int
    m: int
    frontier: Threshold
    threshold: Threshold
    replay: bool
    outcome: Outcome | None  # None while the request runs
    status: int | None
    duration: float | None  # seconds from the decision to the end
    offered: float | None = None  # tokens/s
    gain: float | None = None


class EventView(msgspec.Struct):
    """An event as `/decisions` shows it."""

    time: float  # unix seconds
    kind: Literal["event"]
    event: str
    detail: str


class DecisionLog:
    """The last decisions and events, oldest out first."""

    def __init__(
        self, *, size: int = RING_SIZE, clock: Clock = time.monotonic, wall: Clock = time.time
    ) -> None:
        """`clock` gives monotonic and `wall` unix seconds; both are read only to show the ring."""
        self._ring: deque[DecisionEntry | Event] = deque(maxlen=size)
        self.added = 0
        """How many were ever added: the number of the newest one."""
        self._clock = clock
        self._wall = wall

    def __len__(self) -> int:
        """How many decisions and events are held."""
        return len(self._ring)

    def add(
        self, now: float, request_id: str, route: str, decision: Decision, *, replay: bool = False
    ) -> DecisionEntry:
        """Keep one decision, made at `now` (monotonic seconds); the caller finishes the entry."""
        entry = DecisionEntry(
            now,
            request_id,
            route,
            decision.backend,
            decision.reason,
            decision.n,
            decision.m,
            decision.frontier,
            decision.threshold,
            replay,
        )
        if decision.offered is not None or decision.gain is not None:
            entry.offered, entry.gain = decision.offered, decision.gain
        self._ring.append(entry)
        self.added += 1
        return entry

    def event(self, now: float, event: str, detail: str) -> None:
        """Keep one event, such as a change of policy; `now` in monotonic seconds."""
        self._ring.append(Event(now, event, detail))
        self.added += 1

    def unix(self, at: float) -> float:
        """The unix time of a monotonic one, both in seconds."""
        return at + self._wall() - self._clock()

    def view(
        self,
        *,
        reason: Reason | None = None,
        backend: Role | None = None,
        limit: int = RING_SIZE,
    ) -> list[DecisionView | EventView]:
        """The newest entries first. A filter by reason or backend leaves the events out."""
        offset = self.unix(0.0)
        found: list[DecisionView | EventView] = []
        for entry in self._matching(reason, backend):
            if len(found) >= limit:
                break
            found.append(_shown(entry, offset))
        return found

    def _matching(
        self, reason: Reason | None, backend: Role | None
    ) -> Iterator[DecisionEntry | Event]:
        for entry in reversed(self._ring):
            if isinstance(entry, Event):
                if reason is None and backend is None:
                    yield entry
            elif reason in (None, entry.reason) and backend in (None, entry.backend):
                yield entry


def _shown(entry: DecisionEntry | Event, offset: float) -> DecisionView | EventView:
    """An entry with unix time."""
    at = round(entry.at + offset, 6)
    if isinstance(entry, Event):
        return EventView(at, "event", entry.event, entry.detail)
    duration = None if entry.ended_at is None else round(entry.ended_at - entry.at, 6)
    return DecisionView(
        at, "decision", safe_id(entry.request_id), entry.route, entry.backend, entry.reason,
        entry.n, entry.m, shown_threshold(entry.frontier), shown_threshold(entry.threshold),
        entry.replay, entry.outcome, entry.status, duration, _short(entry.offered),
        _short(entry.gain),
    )  # fmt: skip


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
