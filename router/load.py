"""Who is counted where: the only writer of in-flight.

The law of this file: a request is counted from the decision that sends it to a backend until its
last byte, by holding a `Lease`; nothing else changes an in-flight count, nothing resets one, and a
count that would go below zero is an error, not a zero. What a backend reports about itself
(`Telemetry`) is kept beside our own count and never mixed into it. The two meet in one formula:

    concurrency = in_flight + foreign
    foreign     = max(0, running + queued - own)

`own` is our largest in-flight between the moment the backend took its snapshot and the moment we
read it: SGLang's snapshots lag by up to 15 decode steps, and a request of ours that finished in
between must not look like somebody else's.

No clock and no I/O: `now` (monotonic seconds) is an argument everywhere.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from router.affinity import Prefix, Prefixes
from router.offered import LoadEstimate


class Role(enum.StrEnum):
    """Which of the two servers a backend is."""

    SPECULATIVE = "speculative"
    BASELINE = "baseline"

    @property
    def other(self) -> Role:
        """The role of the other backend of the pair."""
        return Role.BASELINE if self is Role.SPECULATIVE else Role.SPECULATIVE


ROLES: Final = (Role.SPECULATIVE, Role.BASELINE)
SPECULATIVE, BASELINE = ROLES  # an enum's members are slow to look up on the path of a request


class LeaseError(RuntimeError):
    """A lease was released twice, or a count would have gone below zero: a fault of ours."""


class Telemetry(msgspec.Struct, frozen=True, gc=False):
    """What one backend reported about itself.

    `taken_at` is when the backend took the snapshot and `read_at` when we read it, both in our
    monotonic seconds. What a source does not say is None, never zero.
    """

    running: int
    queued: int
    taken_at: float
    read_at: float
    source: str
    token_usage: float | None = None  # share of the KV cache in use, 0 to 1
    accept_length: float | None = None  # tokens per verify step of late, 1 and up
    max_running: int | None = None  # effective cap: beyond it requests queue inside the backend
    lifetime_accept_length: float | None = None  # mean since the backend started: never live
    gen_throughput: float | None = None  # output tokens per second, by the backend's own count


class PolicyMemory(msgspec.Struct, frozen=True, gc=False):
    """What a policy remembers between decisions.

    The side it is on and since when, and when the concurrency was last seen at or above the edge
    below which the way back is open (all in seconds). A rule that judges the load keeps its estimate
    and the requests that it has sent since.
    """

    side: Role = Role.SPECULATIVE
    since: float = float("-inf")
    above_at: float = float("-inf")
    arrived: int = 0
    estimate: LoadEstimate | None = None


class BackendLoad(msgspec.Struct, frozen=True, gc=False):
    """One backend as a decision sees it."""

    role: Role
    in_flight: int = 0
    foreign: int = 0
    available: bool = True
    contended: bool = False  # it refused work a moment ago, or hangs: prefer the other
    queued: int | None = None
    token_usage: float | None = None
    cap: int | None = None
    fresh: bool = False  # whether telemetry is known and not stale

    @property
    def concurrency(self) -> int:
        """In-flight plus other clients' share: the number that is compared."""
        return self.in_flight + self.foreign


class LoadSnapshot(msgspec.Struct, frozen=True, gc=False):
    """The frozen value that a policy decides on."""

    now: float
    speculative: BackendLoad
    baseline: BackendLoad
    memory: PolicyMemory = PolicyMemory()
    prefix: Prefix | None = None  # of the conversation that the request goes on with

    def of(self, role: Role) -> BackendLoad:
        """The load of the backend with this role."""
        return self.speculative if role is Role.SPECULATIVE else self.baseline


class PeakWindow:
    """The largest value of a counter over the last few seconds, in constant time and memory.

    Time is cut in slots of `SLOT` seconds; a slot holds the largest value seen in it. 64 slots of
    50 ms span 3.2 s, more than the age at which telemetry counts as stale.
    """

    SLOT: Final = 0.05
    SLOTS: Final = 64

    __slots__ = ("_last", "_peaks", "_value")

    def __init__(self) -> None:
        self._peaks = [0] * self.SLOTS
        self._last = -1
        self._value = 0

    def _roll(self, slot: int) -> None:
        """Fill the slots passed since the last change with the value that held in them."""
        for i in range(max(self._last + 1, slot - self.SLOTS + 1), slot + 1):
            self._peaks[i % self.SLOTS] = self._value
        self._last = slot

    def change(self, now: float, value: int) -> None:
        """Note that the counter now has this value."""
        slot = int(now / self.SLOT)
        if slot > self._last:
            self._roll(slot)
        self._value = value
        at = self._last % self.SLOTS
        if value > self._peaks[at]:  # noqa: PLR1730 (taken twice per request)
            self._peaks[at] = value

    def since(self, then: float, now: float) -> int:
        """The largest value between `then` and `now`; `then` is clipped to the window."""
        slot = int(now / self.SLOT)
        if slot > self._last:
            self._roll(slot)
        first = max(int(then / self.SLOT), self._last - self.SLOTS + 1, 0)
        slots = range(min(first, self._last), self._last + 1)
        return max(self._peaks[i % self.SLOTS] for i in slots)


class BackendCounts:
    """The mutable record of one backend inside the tracker. Read it, never write it."""

    __slots__ = ("_peak", "cap", "contended_until", "foreign", "in_flight", "role", "telemetry",
                 "usable")  # fmt: skip

    def __init__(self, role: Role) -> None:
        self.role = role
        self.in_flight = 0
        self.foreign = 0
        self.telemetry: Telemetry | None = None
        # The cap is a setting of the backend: it outlives the telemetry that named it.
        self.cap: int | None = None
        self.usable = True
        self.contended_until = float("-inf")
        self._peak = PeakWindow()

    def count(self, now: float, change: int) -> None:
        """Add `change` to in-flight. Raises LeaseError below zero."""
        value = self.in_flight + change
        if value < 0:
            msg = f"in-flight of {self.role} would be {value}"
            raise LeaseError(msg)
        self.in_flight = value
        self._peak.change(now, value)

    def own_peak(self, then: float, now: float) -> int:
        """Our largest in-flight between the two moments."""
        return self._peak.since(then, now)


class Lease:
    """The right to be counted on one backend, from the decision to the last byte."""

    __slots__ = ("_counts", "role")

    def __init__(self, counts: BackendCounts) -> None:
        self._counts: BackendCounts | None = counts
        self.role = counts.role

    @property
    def held(self) -> bool:
        """Whether the lease still counts."""
        return self._counts is not None

    def release(self, now: float) -> None:
        """Stop being counted. Raises LeaseError the second time."""
        if self._counts is None:
            msg = f"lease on {self.role} released twice"
            raise LeaseError(msg)
        counts, self._counts = self._counts, None
        counts.count(now, -1)


class LoadTracker:
    """Own counts, telemetry and availability of the pair; makes snapshots and leases."""

    def __init__(self, *, stale_after: float = 2.0, prefixes: Prefixes | None = None) -> None:
        """`stale_after`: seconds after which telemetry counts as absent; without `prefixes` no
        conversation is remembered.
        """
        self.stale_after = stale_after
        self.prefixes = prefixes
        self.speculative = BackendCounts(Role.SPECULATIVE)
        self.baseline = BackendCounts(Role.BASELINE)
        self.memory = PolicyMemory()

    def of(self, role: Role) -> BackendCounts:
        """The record of the backend with this role."""
        return self.speculative if role is Role.SPECULATIVE else self.baseline

    @property
    def in_flight(self) -> int:
        """Requests that this router has open on both backends."""
        return self.speculative.in_flight + self.baseline.in_flight

    def snapshot(self, now: float, conversation: int | None = None) -> LoadSnapshot:
        """The load as it is known now. Takes the place of a look at two moving servers."""
        prefix = None
        if conversation is not None and self.prefixes is not None:
            prefix = self.prefixes.find(conversation, now)
        one, other = self._load(self.speculative, now), self._load(self.baseline, now)
        return LoadSnapshot(now, one, other, self.memory, prefix)

    def lease(
        self,
        role: Role,
        now: float,
        memory: PolicyMemory | None = None,
        conversation: int | None = None,
        length: int = 0,
    ) -> Lease:
        """Count one request on a backend; keep what is to be remembered.

        `length`: of the body, in bytes, which is how far that backend then knows the conversation.
        """
        counts = self.speculative if role is SPECULATIVE else self.baseline
        counts.count(now, 1)
        if memory is not None:
            self.memory = memory
        if conversation is not None and self.prefixes is not None:
            self.prefixes.keep(conversation, length, now, speculative=role is SPECULATIVE)
        return Lease(counts)

    def observe(self, role: Role, telemetry: Telemetry) -> None:
        """Take in what a backend reported. Never touches in-flight."""
        counts = self.of(role)
        own = counts.own_peak(telemetry.taken_at, telemetry.read_at)
        counts.telemetry = telemetry
        if telemetry.max_running is not None:
            counts.cap = telemetry.max_running
        counts.foreign = max(0, telemetry.running + telemetry.queued - own)

    def set_usable(self, role: Role, *, usable: bool) -> None:
        """Say whether new work may go to a backend (health, breaker, drain)."""
        self.of(role).usable = usable

    def refused(self, role: Role, until: float) -> None:
        """Note that a backend refused work: prefer the other one until then."""
        counts = self.of(role)
        counts.contended_until = max(counts.contended_until, until)

    def _load(self, counts: BackendCounts, now: float) -> BackendLoad:
        contended = counts.contended_until > now
        told = counts.telemetry
        if told is None or now - told.read_at > self.stale_after:
            return BackendLoad(
                counts.role, counts.in_flight, 0, counts.usable, contended, None, None, counts.cap
            )
        return BackendLoad(
            counts.role,
            counts.in_flight,
            counts.foreign,
            counts.usable,
            contended,
            told.queued,
            told.token_usage,
            counts.cap,
            fresh=True,
        )
