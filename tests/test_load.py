"""Who is counted where, whatever happens in whatever order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from router.load import (
    ROLES,
    BackendCounts,
    BackendLoad,
    Lease,
    LeaseError,
    LoadSnapshot,
    LoadTracker,
    PeakWindow,
    PolicyMemory,
    Role,
    Telemetry,
)

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
NOW = 1000.0  # monotonic seconds
SLOT = PeakWindow.SLOT
SPAN = PeakWindow.SLOT * PeakWindow.SLOTS  # seconds that the window remembers


def told(
    running: int = 0,
    queued: int = 0,
    *,
    taken_at: float = NOW,
    read_at: float = NOW,
    **more: float | None,
) -> Telemetry:
    return Telemetry(running, queued, taken_at, read_at, "test", **more)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- values


def test_the_other_role_is_the_other_one() -> None:
    """Each role's other is the one that it is not, and there are two."""
    assert [role.other for role in ROLES] == [BASE, SPEC]
    assert [role.other.other for role in Role] == list(ROLES)


def test_concurrency_is_own_and_foreign() -> None:
    """Concurrency is in-flight plus what other clients run, and nothing else."""
    assert BackendLoad(SPEC, in_flight=3, foreign=4, queued=100, cap=1).concurrency == 7


def test_a_snapshot_names_its_backends_by_role() -> None:
    """`of` gives the load of the role asked for, in the snapshot and in the tracker."""
    spec, base = BackendLoad(SPEC), BackendLoad(BASE)
    snapshot = LoadSnapshot(NOW, spec, base)
    assert [snapshot.of(role) for role in ROLES] == [spec, base]
    tracker = LoadTracker()
    assert [tracker.of(role) for role in ROLES] == [tracker.speculative, tracker.baseline]


@pytest.mark.parametrize("value", [BackendLoad(SPEC), told(), PolicyMemory()])
def test_values_are_frozen(value: object) -> None:
    """What a decision sees cannot be changed under it."""
    with pytest.raises(AttributeError):
        value.in_flight = 1  # type: ignore[attr-defined]


def test_a_snapshot_stays_as_it_was() -> None:
    """A lease taken after the look does not change what was seen."""
    tracker = LoadTracker()
    before = tracker.snapshot(NOW)
    tracker.lease(SPEC, NOW)
    assert before.speculative.in_flight == 0
    assert tracker.snapshot(NOW).speculative.in_flight == 1


# ---------------------------------------------------------------------- leases


def test_a_lease_counts_until_released() -> None:
    """One lease is one request on one backend, from the lease to the release."""
    tracker = LoadTracker()
    lease = tracker.lease(BASE, NOW)
    assert (lease.role, lease.held) == (BASE, True)
    assert (tracker.speculative.in_flight, tracker.baseline.in_flight) == (0, 1)
    assert tracker.in_flight == 1
    lease.release(NOW)
    assert lease.held is False
    assert tracker.in_flight == 0


def test_a_second_release_is_an_error() -> None:
    """A lease released twice raises, and takes nothing from the requests still counted."""
    tracker = LoadTracker()
    other, lease = tracker.lease(SPEC, NOW), tracker.lease(SPEC, NOW)
    lease.release(NOW)
    with pytest.raises(LeaseError, match="lease on speculative released twice"):
        lease.release(NOW)
    assert tracker.speculative.in_flight == 1
    other.release(NOW)
    assert tracker.in_flight == 0


def test_a_count_below_zero_is_an_error() -> None:
    """A count that would be negative raises and stays zero: drift is never hidden."""
    counts = BackendCounts(BASE)
    with pytest.raises(LeaseError, match="in-flight of baseline would be -1"):
        counts.count(NOW, -1)
    assert counts.in_flight == 0


def test_a_lease_of_nothing_cannot_hide() -> None:
    """A lease that was never counted raises when it is released."""
    with pytest.raises(LeaseError):
        Lease(BackendCounts(SPEC)).release(NOW)


def test_memory_is_stored_with_the_lease() -> None:
    """A lease stores what the policy wants remembered; without any, what was there stays."""
    tracker = LoadTracker()
    never = float("-inf")
    assert tracker.snapshot(NOW).memory == PolicyMemory(SPEC, never, never)
    tracker.lease(BASE, NOW, PolicyMemory(BASE, NOW - 1.0, NOW))
    tracker.lease(SPEC, NOW)
    assert tracker.snapshot(NOW).memory == PolicyMemory(BASE, NOW - 1.0, NOW)


# ---------------------------------------------------------------------- telemetry


def test_observing_never_touches_in_flight() -> None:
    """Whatever a backend reports, our own count is ours."""
    tracker = LoadTracker()
    tracker.lease(SPEC, NOW)
    tracker.observe(SPEC, told(500, 500))
    assert tracker.speculative.in_flight == 1
    tracker.observe(SPEC, told(0, 0))
    assert tracker.speculative.in_flight == 1


@pytest.mark.parametrize(
    ("own", "running", "queued", "foreign"),
    [
        (0, 0, 0, 0),
        (0, 3, 0, 3),
        (0, 0, 3, 3),
        (0, 2, 3, 5),
        (5, 5, 0, 0),
        (5, 3, 2, 0),
        (5, 3, 3, 1),
        (5, 0, 0, 0),  # its snapshot is older than our requests
        (5, 4, 0, 0),
    ],
)
def test_foreign_is_what_is_not_ours(own: int, running: int, queued: int, foreign: int) -> None:
    """Foreign is running plus queued less our own, and never below zero."""
    tracker = LoadTracker()
    for _ in range(own):
        tracker.lease(BASE, NOW)
    tracker.observe(BASE, told(running, queued))
    load = tracker.snapshot(NOW).baseline
    assert (load.in_flight, load.foreign) == (own, foreign)
    assert load.concurrency == own + foreign


def test_a_request_that_just_finished_is_not_foreign() -> None:
    """A backend's old snapshot still counts a request of ours that ended before we read it."""
    tracker = LoadTracker()
    leases = [tracker.lease(SPEC, NOW) for _ in range(8)]
    for lease in leases:
        lease.release(NOW + 1.0)
    tracker.observe(SPEC, told(8, taken_at=NOW + 0.9, read_at=NOW + 1.1))
    assert tracker.snapshot(NOW + 1.1).speculative.foreign == 0


def test_a_request_that_finished_long_ago_is_foreign() -> None:
    """What a backend ran after ours had ended is somebody else's."""
    tracker = LoadTracker()
    tracker.lease(SPEC, NOW).release(NOW + 1.0)
    tracker.observe(SPEC, told(1, taken_at=NOW + 1.1, read_at=NOW + 1.2))
    assert tracker.snapshot(NOW + 1.2).speculative.foreign == 1


def test_own_peak_lies_between_snapshot_and_reading() -> None:
    """A peak of ours within the reading's time is ours, though both of its ends were lower."""
    tracker = LoadTracker()
    leases = [tracker.lease(SPEC, NOW + 0.4) for _ in range(6)]
    for lease in leases:
        lease.release(NOW + 0.6)
    tracker.observe(SPEC, told(7, taken_at=NOW, read_at=NOW + 1.0))
    assert tracker.snapshot(NOW + 1.0).speculative.foreign == 1


def test_one_backends_peak_is_not_the_others() -> None:
    """Our requests on one backend explain nothing that the other one runs."""
    tracker = LoadTracker()
    tracker.lease(SPEC, NOW)
    tracker.observe(BASE, told(1))
    assert tracker.snapshot(NOW).baseline.foreign == 1


@pytest.mark.parametrize(("age", "fresh"), [(0.0, True), (2.0, True), (2.001, False)])
def test_stale_telemetry_is_absent(age: float, fresh: bool) -> None:
    """Telemetry older than `stale_after` is unknown: not zero, and not saturated."""
    tracker = LoadTracker(stale_after=2.0)
    tracker.lease(SPEC, NOW)
    tracker.observe(SPEC, told(9, 4, token_usage=0.9, max_running=48))
    load = tracker.snapshot(NOW + age).speculative
    expected = BackendLoad(SPEC, 1, 12, queued=4, token_usage=0.9, cap=48, fresh=True)
    assert load == (expected if fresh else BackendLoad(SPEC, 1, cap=48))


def test_unknown_is_not_zero() -> None:
    """Before anything was reported, queue, usage and cap are None."""
    load = LoadTracker().snapshot(NOW).baseline
    assert (load.queued, load.token_usage, load.cap, load.fresh) == (None, None, None, False)
    assert load.available


def test_a_report_replaces_the_one_before() -> None:
    """What a newer report does not say is unknown again."""
    tracker = LoadTracker()
    tracker.observe(SPEC, told(5, 1, token_usage=0.5))
    tracker.observe(SPEC, told(2, 0))
    load = tracker.snapshot(NOW).speculative
    assert (load.foreign, load.queued, load.token_usage) == (2, 0, None)


def test_the_cap_outlives_what_named_it() -> None:
    """The cap is a setting: neither age nor a poorer source makes it forgotten, a new one wins."""
    tracker = LoadTracker()
    tracker.observe(SPEC, told(max_running=48))
    assert tracker.snapshot(NOW + 1e6).speculative.cap == 48
    tracker.observe(SPEC, told(1))
    assert tracker.snapshot(NOW).speculative.cap == 48
    assert tracker.snapshot(NOW + 1e6).speculative.cap == 48
    tracker.observe(SPEC, told(1, max_running=16))
    assert tracker.snapshot(NOW).speculative.cap == 16
    assert tracker.snapshot(NOW).baseline.cap is None


def test_availability_is_set_by_role() -> None:
    """Health says whether a backend may get new work; its counts stay."""
    tracker = LoadTracker()
    tracker.lease(SPEC, NOW)
    tracker.set_usable(SPEC, usable=False)
    snapshot = tracker.snapshot(NOW)
    assert (snapshot.speculative.available, snapshot.baseline.available) == (False, True)
    assert snapshot.speculative.in_flight == 1
    tracker.set_usable(SPEC, usable=True)
    assert tracker.snapshot(NOW).speculative.available


def test_contended_until_the_latest_refusal_ends() -> None:
    """A refusal counts until its time is over; an earlier end does not shorten a later one."""
    tracker = LoadTracker()
    tracker.refused(BASE, NOW + 2.0)
    tracker.refused(BASE, NOW + 1.0)
    seen = [tracker.snapshot(NOW + after).baseline.contended for after in (0.0, 1.5, 2.0)]
    assert seen == [True, True, False]
    assert tracker.snapshot(NOW).speculative.contended is False


def test_contended_does_not_need_telemetry() -> None:
    """A refusal counts whether or not the backend reports anything, and with stale reports."""
    tracker = LoadTracker()
    tracker.observe(BASE, told())
    tracker.refused(BASE, NOW + 100.0)
    assert tracker.snapshot(NOW).baseline.contended
    assert tracker.snapshot(NOW + 50.0).baseline.contended


# ---------------------------------------------------------------------- the window of peaks


@pytest.mark.parametrize("now", [0.0, 0.01, 0.049, 0.05, 1.0, 1e6])
def test_the_window_works_from_any_time(now: float) -> None:
    """A clock that has just begun is as good as one that runs for days."""
    window = PeakWindow()
    assert window.since(now, now) == 0
    window.change(now, 3)
    window.change(now, 1)
    assert window.since(now, now) == 3
    assert window.since(now + 1.0, now + 1.0) == 1


def test_a_value_holds_until_it_changes() -> None:
    """Between two changes the first one's value is the peak, however long the gap."""
    window = PeakWindow()
    window.change(NOW, 5)
    assert window.since(NOW + 500.0, NOW + 1000.0) == 5
    window.change(NOW + 1000.0, 2)
    assert window.since(NOW + 1000.0 - SLOT, NOW + 1000.0) == 5
    assert window.since(NOW + 1001.0, NOW + 1001.0) == 2


def test_a_peak_is_forgotten_when_the_window_is_over() -> None:
    """After a gap longer than the window nothing of the time before it is left."""
    window = PeakWindow()
    window.change(NOW, 9)
    window.change(NOW, 1)
    assert window.since(NOW, NOW + SPAN - 2 * SLOT) == 9
    assert window.since(NOW, NOW + SPAN + SLOT) == 1


@pytest.mark.parametrize(("slots", "peak"), [(62, 9), (63, 9), (64, 1), (65, 1), (127, 1)])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_the_window_holds_exactly_its_slots(slots: int, peak: int, step: int) -> None:
    """A peak is known for 63 slots after its own, and gone with the 64th, however often asked."""
    window, start = PeakWindow(), NOW + SLOT / 2
    window.change(start, 9)
    window.change(start, 1)
    for slot in range(step, slots, step):
        window.since(start, start + slot * SLOT)
    assert window.since(start, start + slots * SLOT) == peak
    assert window.since(start + slots * SLOT, start + slots * SLOT) == 1


@pytest.mark.parametrize("then", [-1e9, -1.0, 0.0, NOW - SPAN - 10.0])
def test_an_older_moment_is_clipped_to_the_window(then: float) -> None:
    """Asked for more than it remembers, the window says what it knows."""
    window = PeakWindow()
    window.change(NOW - 1.0, 4)
    window.change(NOW, 0)
    assert window.since(then, NOW) == 4


def test_a_moment_to_come_is_now() -> None:
    """A snapshot stamped after its reading (clocks differ) is compared with the present."""
    window = PeakWindow()
    window.change(NOW, 4)
    assert window.since(NOW + 10.0, NOW) == 4


def test_a_clock_that_steps_back_a_little_loses_nothing() -> None:
    """A change stamped before the last one still counts, at the present end of the window."""
    window = PeakWindow()
    window.change(NOW, 1)
    window.change(NOW - 0.2, 7)
    window.change(NOW - 0.1, 2)
    assert window.since(NOW - 0.2, NOW) == 7
    assert window.since(NOW - 0.2, NOW - 0.2) == 7
    assert window.since(NOW + 1.0, NOW + 1.0) == 2


changes = st.lists(
    st.tuples(st.floats(0.0, 0.4) | st.floats(0.0, 10.0), st.integers(0, 40)), max_size=40
)


@settings(deadline=None)
@given(start=st.floats(0.0, 1e6), steps=changes, back=st.floats(0.0, SPAN - 2 * SLOT))
def test_the_window_is_exact_to_a_slot(
    start: float, steps: list[tuple[float, int]], back: float
) -> None:
    """The peak is at least the true one, and at most that of a span one slot longer."""
    window, now, history = PeakWindow(), start, [(float("-inf"), 0)]
    for wait, value in steps:
        now += wait
        window.change(now, value)
        history.append((now, value))
    then = max(0.0, now - back)

    def peak(since: float) -> int:
        ends = [at for at, _ in history[1:]] + [float("inf")]
        return max(value for (_, value), end in zip(history, ends, strict=True) if end >= since)

    found = window.since(then, now)
    assert peak(then) <= found <= peak(then - SLOT - 1e-6)


# ---------------------------------------------------------------------- any sequence at all


@dataclass
class Expected:
    """The simplest possible count of one backend."""

    leases: set[int] = field(default_factory=set)
    history: list[tuple[float, int]] = field(default_factory=lambda: [(float("-inf"), 0)])
    told: Telemetry | None = None
    cap: int | None = None
    usable: bool = True
    contended_until: float = float("-inf")


class AnySequence(RuleBasedStateMachine):
    """The tracker against a model, under any sequence of what can happen to it."""

    leases: Bundle[tuple[int, Lease]] = Bundle("leases")
    spent: Bundle[Lease] = Bundle("spent")

    @initialize(now=st.floats(0.0, 1e6))
    def begin(self, now: float) -> None:
        self.now = now
        self.tracker = LoadTracker()
        self.expected = {role: Expected() for role in ROLES}
        self.memory = PolicyMemory()
        self.ids = itertools.count()

    def note(self, role: Role) -> None:
        model = self.expected[role]
        model.history.append((self.now, len(model.leases)))

    @rule(seconds=st.floats(0.0, 0.3) | st.floats(0.0, 60.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        target=leases,
        role=st.sampled_from(ROLES),
        memory=st.none()
        | st.builds(PolicyMemory, st.sampled_from(ROLES), st.floats(0.0, 1e6), st.floats(0.0, 1e6)),
    )
    def lease(self, role: Role, memory: PolicyMemory | None) -> tuple[int, Lease]:
        number = next(self.ids)
        taken = self.tracker.lease(role, self.now, memory)
        self.expected[role].leases.add(number)
        self.memory = memory or self.memory
        self.note(role)
        return number, taken

    @rule(target=spent, lease=consumes(leases))
    def release(self, lease: tuple[int, Lease]) -> Lease:
        number, taken = lease
        taken.release(self.now)
        self.expected[taken.role].leases.remove(number)
        self.note(taken.role)
        return taken

    @rule(lease=spent)
    def release_again(self, lease: Lease) -> None:
        with pytest.raises(LeaseError):
            lease.release(self.now)

    @rule(
        role=st.sampled_from(ROLES),
        running=st.integers(0, 50),
        queued=st.integers(0, 50),
        lag=st.floats(0.0, 1.0) | st.floats(0.0, 1e6),
        cap=st.none() | st.integers(1, 64),
    )
    def observe(self, role: Role, running: int, queued: int, lag: float, cap: int | None) -> None:
        model = self.expected[role]
        model.told = told(
            running, queued, taken_at=self.now - lag, read_at=self.now, max_running=cap
        )
        model.cap = model.cap if cap is None else cap
        self.tracker.observe(role, model.told)
        # In the true peak, or in that of a slot more, or of as much as is remembered.
        foreign = self.tracker.of(role).foreign
        most = max(0, running + queued - self.peak(role, self.now - min(lag, SPAN - 2 * SLOT)))
        least = max(0, running + queued - self.peak(role, self.now - lag - SLOT - 1e-6))
        assert least <= foreign <= most

    def peak(self, role: Role, since: float) -> int:
        history = self.expected[role].history
        ends = [at for at, _ in history[1:]] + [float("inf")]
        return max(count for (_, count), end in zip(history, ends, strict=True) if end >= since)

    @rule(role=st.sampled_from(ROLES), usable=st.booleans())
    def set_usable(self, role: Role, usable: bool) -> None:
        self.tracker.set_usable(role, usable=usable)
        self.expected[role].usable = usable

    @rule(role=st.sampled_from(ROLES), seconds=st.floats(-5.0, 5.0))
    def refuse(self, role: Role, seconds: float) -> None:
        model = self.expected[role]
        self.tracker.refused(role, self.now + seconds)
        model.contended_until = max(model.contended_until, self.now + seconds)

    @invariant()
    def as_the_model_says(self) -> None:
        snapshot = self.tracker.snapshot(self.now)
        assert snapshot.memory == self.memory
        for role in ROLES:
            load, model = snapshot.of(role), self.expected[role]
            fresh = model.told is not None and self.now - model.told.read_at <= 2.0
            assert load.role is role
            assert load.in_flight == len(model.leases)
            assert load.fresh is fresh
            assert load.foreign == (self.tracker.of(role).foreign if fresh else 0)
            assert load.queued == (model.told.queued if fresh and model.told else None)
            assert load.available is model.usable
            assert load.contended is (model.contended_until > self.now)
            assert load.cap == model.cap
        assert self.tracker.in_flight == sum(len(m.leases) for m in self.expected.values())


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
