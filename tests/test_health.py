"""Health: when a backend may get work, and why not."""

from __future__ import annotations

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.breaker import Breaker, BreakerState, Verdict
from router.health import Answer, Health, HealthState, PairHealth, Probe
from router.load import ROLES, LoadTracker, Role

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Verdict.SUCCESS),
        (204, Verdict.SUCCESS),
        (302, Verdict.SUCCESS),
        (400, Verdict.NEUTRAL),
        (404, Verdict.NEUTRAL),
        (429, Verdict.BACK_PRESSURE),
        (499, Verdict.NEUTRAL),
        (500, Verdict.FAILURE),
        (502, Verdict.FAILURE),
        (503, Verdict.BACK_PRESSURE),
        (504, Verdict.FAILURE),
    ],
)
def test_outcome_of_status(status: int, outcome: Verdict) -> None:
    """A refusal is not a failure, and a client's mistake says nothing."""
    assert Verdict.of_status(status) is outcome


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, Answer.PASS),
        (503, Answer.REFUSED),
        (500, Answer.MISS),
        (502, Answer.MISS),
        (404, Answer.ABSENT),
        (401, Answer.ABSENT),
        (307, Answer.ABSENT),
    ],
)
def test_answer_of_status(status: int, answer: Answer) -> None:
    """Only 503 is SGLang's own no."""
    assert Answer.of_status(status) is answer


def broken(breaker: Breaker, now: float = 0.0, times: int = 5) -> Breaker:
    for _ in range(times):
        breaker.record(Verdict.FAILURE, now)
    return breaker


def test_breaker_opens_after_failures_in_a_row() -> None:
    """Success breaks the row; what says nothing does not."""
    breaker = broken(Breaker(), times=4)
    for outcome in (Verdict.NEUTRAL, Verdict.BACK_PRESSURE):
        breaker.record(outcome, 0.0)
    assert breaker.consecutive == 4
    breaker.record(Verdict.SUCCESS, 0.0)
    broken(breaker, times=4)
    assert breaker.state is CLOSED
    broken(breaker, 1.0, times=1)
    assert breaker.state is OPEN
    assert breaker.open_until == 6.0


def test_breaker_lets_one_trial_through() -> None:
    """Half-open, one request is on trial; its success closes the breaker."""
    breaker = broken(Breaker())
    breaker.advance(4.9)
    assert not breaker.allows(4.9)
    breaker.advance(5.0)
    assert breaker.state is HALF_OPEN
    assert breaker.allows(5.0)
    ticket = breaker.admit(5.0)
    assert not breaker.allows(5.1)
    breaker.record(Verdict.SUCCESS, 6.0)
    assert breaker.state is HALF_OPEN, "an older request does not count"
    breaker.record(Verdict.SUCCESS, 6.0, ticket)
    assert breaker.state is CLOSED


@pytest.mark.parametrize("outcome", [Verdict.NEUTRAL, Verdict.BACK_PRESSURE])
def test_trial_without_verdict_gives_its_right_back(outcome: Verdict) -> None:
    """A trial whose client leaves frees the place for the next."""
    breaker = broken(Breaker())
    breaker.advance(5.0)
    breaker.record(outcome, 5.1, breaker.admit(5.0))
    assert breaker.state is HALF_OPEN
    assert breaker.allows(5.1)


def test_trial_lapses() -> None:
    """A trial that never ends locks nobody out, and its late end frees no place of another."""
    breaker = broken(Breaker(trial_lapse=30.0))
    breaker.advance(5.0)
    first = breaker.admit(5.0)
    assert not breaker.allows(34.9)
    assert breaker.allows(35.0)
    second = breaker.admit(35.0)
    breaker.record(Verdict.NEUTRAL, 36.0, first)
    assert not breaker.allows(36.0)
    breaker.record(Verdict.NEUTRAL, 36.0, second)
    assert breaker.allows(36.0)


def test_breaker_doubles_up_to_a_bound() -> None:
    """Each failed trial doubles the time; a success starts over."""
    breaker, now = broken(Breaker()), 0.0
    for span in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        assert breaker.open_until == now + span
        now = breaker.open_until
        breaker.advance(now)
        breaker.record(Verdict.FAILURE, now, breaker.admit(now))
    now = breaker.open_until
    breaker.advance(now)
    breaker.record(Verdict.SUCCESS, now, breaker.admit(now))
    assert broken(breaker, now).open_until == now + 5.0


def test_open_breaker_of_the_last_backend() -> None:
    """A request sent all the same is a trial: its success closes, its failure changes nothing."""
    breaker = broken(Breaker())
    breaker.record(Verdict.FAILURE, 1.0, breaker.admit(1.0))
    assert (breaker.state, breaker.open_until) == (OPEN, 5.0)
    breaker.record(Verdict.SUCCESS, 1.0, breaker.admit(1.0))
    assert breaker.state is CLOSED


class BreakerMachine(RuleBasedStateMachine):
    """A breaker as a relay uses it: tickets come back in any order, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = Breaker(failures=3, open_for=5.0, open_max=20.0, trial_lapse=30.0)
        self.running: list[tuple[int, float]] = []

    @rule(seconds=st.floats(0.0, 40.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.breaker.advance(self.now)

    @rule()
    def send(self) -> None:
        if self.breaker.allows(self.now):
            self.running.append((self.breaker.admit(self.now), self.now))

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data(), outcome=st.sampled_from(Verdict))
    def end(self, data: st.DataObject, outcome: Verdict) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        ticket, _ = self.running.pop(index)
        before = self.breaker.state
        self.breaker.record(outcome, self.now, ticket)
        after = self.breaker.state
        if before is not CLOSED and after is CLOSED:
            assert ticket
            assert outcome is Verdict.SUCCESS
        if before is not OPEN and after is OPEN:
            assert outcome is Verdict.FAILURE
            assert self.now < self.breaker.open_until <= self.now + 20.0

    @precondition(lambda self: bool(self.running))
    @rule()
    def lose(self) -> None:
        """An outcome that never comes."""
        self.running.pop()

    @invariant()
    def at_most_one_trial_in_its_time(self) -> None:
        if self.breaker.state is HALF_OPEN and self.breaker.allows(self.now):
            tickets = [ticket for ticket, since in self.running if ticket and self.now - since < 30]
            assert self.breaker._ticket not in tickets

    @invariant()
    def never_locked(self) -> None:
        """Time alone always leads to a request being allowed."""
        self.breaker.advance(self.now)
        later = self.now + 30.0
        if self.breaker.state is OPEN:
            assert self.breaker.open_until <= self.now + 20.0
        else:
            assert self.breaker.allows(later)


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def told(state: HealthState, *answers: Answer, probe: Probe = Probe.READY) -> Health:
    for answer in answers:
        state.observe(probe, answer, 100.0)
    return state.state


PASS, REFUSED, MISS, ABSENT = Answer.PASS, Answer.REFUSED, Answer.MISS, Answer.ABSENT


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ([], Health.UNKNOWN),
        ([PASS], Health.UP),
        ([MISS, MISS], Health.UNKNOWN),
        ([MISS, MISS, MISS], Health.DOWN),
        ([PASS, MISS, MISS, PASS, MISS, MISS], Health.UP),
        ([PASS, REFUSED], Health.DOWN),
        ([REFUSED], Health.DOWN),
        ([REFUSED, PASS], Health.DOWN),
        ([REFUSED, PASS, MISS, PASS], Health.DOWN),
        ([REFUSED, PASS, PASS], Health.UP),
        ([REFUSED, ABSENT], Health.UNKNOWN),
        ([ABSENT], Health.UNKNOWN),
    ],
)
def test_health_of_a_row_of_answers(answers: list[Answer], state: Health) -> None:
    """Three misses take down, two passes bring up, a 503 takes down at once."""
    assert told(HealthState(), *answers) is state


def test_probes_are_counted_apart() -> None:
    """A /ready that passes does not hide that /health hangs."""
    state = HealthState()
    for _ in range(3):
        told(state, PASS, PASS)
        told(state, MISS, probe=Probe.HEALTH)
    assert state.state is Health.DOWN
    assert (state.verdict(Probe.READY), state.verdict(Probe.HEALTH)) == (Health.UP, Health.DOWN)
    assert told(state, PASS, PASS, probe=Probe.HEALTH) is Health.UP


def test_traffic_counts_as_life() -> None:
    """Requests that succeed outweigh probes that miss, but not a 503."""
    state = HealthState(life_window=5.0)
    for now in range(100, 110):
        state.lived(float(now))
        state.observe(Probe.HEALTH, MISS, now + 4.9)
    assert told(state) is Health.UP
    state.observe(Probe.HEALTH, REFUSED, 110.0)
    assert told(state) is Health.DOWN


def test_traffic_restarts_the_row_of_misses() -> None:
    """Two misses, a success, and two more are not three in a row."""
    state = HealthState(life_window=1.0)
    for at in (0.0, 1.0):
        state.observe(Probe.READY, MISS, at)
    state.lived(2.0)
    for at in (4.0, 5.0):
        state.observe(Probe.READY, MISS, at)
    assert told(state) is Health.UP
    state.observe(Probe.READY, MISS, 6.0)
    assert told(state) is Health.DOWN
    state.lived(6.0)
    assert told(state) is Health.DOWN, "only probes bring it back"


class Pair:
    """A pair with its tracker; `usable` as a decision would see it."""

    def __init__(self) -> None:
        self.tracker = LoadTracker()
        self.health = PairHealth(self.tracker)

    def usable(self) -> set[Role]:
        return {role for role in ROLES if self.tracker.of(role).usable}

    def fail(self, role: Role, now: float = 0.0, times: int = 5) -> None:
        for _ in range(times):
            self.health.record(role, Verdict.FAILURE, now)

    def down(self, role: Role, now: float = 0.0) -> None:
        self.health.probed(role, Probe.READY, REFUSED, now, "status 503")

    def up(self, role: Role, now: float = 0.0) -> None:
        for _ in range(2):
            self.health.probed(role, Probe.READY, PASS, now, "status 200")


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_cold_start(pair: Pair) -> None:
    """Nothing known: both may be routed to, and nothing is called ready."""
    assert pair.usable() == {SPEC, BASE}
    assert not pair.health.ready()
    assert not pair.health.impaired


def test_first_success_or_pass_is_ready(pair: Pair) -> None:
    """A probe or traffic says that a backend is up."""
    pair.health.record(BASE, Verdict.SUCCESS, 0.0)
    assert pair.health.ready()
    other = Pair()
    other.health.probed(SPEC, Probe.HEALTH, PASS, 0.0, "status 200")
    assert other.health.ready()


def test_breaker_takes_one_out(pair: Pair) -> None:
    """The failing backend is out until its time is over; then one trial goes there."""
    pair.fail(SPEC)
    assert pair.usable() == {BASE}
    assert pair.health.impaired
    pair.health.refresh(4.9)
    assert pair.usable() == {BASE}
    pair.health.refresh(5.0)
    assert pair.usable() == {SPEC, BASE}
    assert pair.health.admit(BASE, 5.0) == 0
    ticket = pair.health.admit(SPEC, 5.0)
    assert pair.usable() == {BASE}
    pair.health.record(SPEC, Verdict.SUCCESS, 6.0, ticket)
    assert pair.usable() == {SPEC, BASE}
    assert not pair.health.impaired
    assert pair.health.admit(SPEC, 6.0) == 0


@pytest.mark.parametrize("outcome", [Verdict.NEUTRAL, Verdict.BACK_PRESSURE])
def test_trial_given_back_to_the_pair(pair: Pair, outcome: Verdict) -> None:
    """A trial whose client leaves makes the backend usable for the next one."""
    pair.fail(SPEC)
    pair.health.refresh(5.0)
    ticket = pair.health.admit(SPEC, 5.0)
    pair.health.record(SPEC, outcome, 5.5, ticket)
    assert pair.usable() == {SPEC, BASE}


def test_trial_lapse_takes_effect_by_refresh(pair: Pair) -> None:
    """A trial that streams for long does not keep the others out for ever."""
    pair.fail(SPEC)
    pair.health.refresh(5.0)
    pair.health.admit(SPEC, 5.0)
    pair.health.refresh(34.9)
    assert pair.usable() == {BASE}
    pair.health.refresh(35.0)
    assert pair.usable() == {SPEC, BASE}


def test_breakers_never_take_out_both(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Both open: both stay in use, said once; the first to succeed is then alone."""
    pair.fail(SPEC)
    pair.fail(BASE)
    assert pair.usable() == {SPEC, BASE}
    assert [r.message for r in caplog.records].count(
        "open breakers are ignored: no other backend is left"
    ) == 1
    pair.health.record(BASE, Verdict.SUCCESS, 1.0, pair.health.admit(BASE, 1.0))
    assert pair.usable() == {BASE}


@pytest.mark.parametrize("how", ["probe", "operator"])
def test_breaker_never_takes_out_the_last(pair: Pair, how: str) -> None:
    """With the other down or drained, an open breaker is not obeyed."""
    if how == "probe":
        pair.down(BASE)
    else:
        pair.health.drain(BASE, drained=True, now=0.0)
    pair.fail(SPEC)
    assert pair.usable() == {SPEC}


def test_probes_may_take_out_both(pair: Pair) -> None:
    """Two backends known to be down are both out, and come back by their probes."""
    pair.down(SPEC)
    pair.down(BASE)
    assert pair.usable() == set()
    assert not pair.health.ready()
    pair.up(BASE)
    assert pair.usable() == {BASE}
    assert pair.health.ready()


def test_operator_drains_and_enables(pair: Pair) -> None:
    """A drained backend is out whatever its probes say, until it is enabled."""
    pair.up(SPEC)
    pair.health.drain(SPEC, drained=True, now=0.0)
    pair.health.drain(SPEC, drained=True, now=0.0)
    pair.up(SPEC)
    assert pair.usable() == {BASE}
    assert pair.health.status(SPEC).drained
    assert not pair.health.ready()
    pair.health.drain(SPEC, drained=False, now=0.0)
    assert pair.usable() == {SPEC, BASE}
    assert pair.health.transitions[SPEC, "drain", "drained"] == 1
    assert pair.health.transitions[SPEC, "drain", "enabled"] == 1


def test_back_pressure_cools_down(pair: Pair) -> None:
    """A refusal makes a backend second choice for a second and is no failure."""
    for _ in range(9):
        pair.health.record(SPEC, Verdict.BACK_PRESSURE, 10.0)
    assert pair.usable() == {SPEC, BASE}
    assert pair.tracker.snapshot(10.9).speculative.contended
    assert not pair.tracker.snapshot(11.0).speculative.contended
    assert not pair.tracker.snapshot(10.9).baseline.contended


def test_health_never_touches_counts(pair: Pair) -> None:
    """Going down and coming up leaves in-flight as it was."""
    lease = pair.tracker.lease(SPEC, 0.0)
    pair.down(SPEC)
    pair.fail(SPEC)
    pair.up(SPEC)
    assert pair.tracker.speculative.in_flight == 1
    lease.release(1.0)
    assert pair.tracker.in_flight == 0


def test_each_transition_is_logged_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """One line for a change, with its reason, none for what stays as it was; each is counted."""
    caplog.set_level(logging.INFO, logger="crossover")
    for _ in range(3):
        pair.down(SPEC)
    pair.fail(BASE, times=9)
    pair.up(SPEC)
    pair.health.refresh(5.0)
    pair.health.refresh(5.0)
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("WARNING", "health of speculative is now down: /ready: status 503"),
        ("WARNING", "breaker of baseline is now open: a request ended as failure"),
        ("WARNING", "open breakers are ignored: no other backend is left"),
        ("INFO", "health of speculative is now up: /ready: status 200"),
        ("INFO", "breaker of baseline is now half_open: its time is over"),
    ]
    assert caplog.records[0].__dict__["backend"] == "speculative"
    assert dict(pair.health.transitions) == {
        (SPEC, "health", "down"): 1,
        (SPEC, "health", "up"): 1,
        (BASE, "breaker", "open"): 1,
        (BASE, "breaker", "half_open"): 1,
    }


def test_status(pair: Pair) -> None:
    """The status page gets one frozen value."""
    pair.up(SPEC)
    pair.fail(SPEC, times=2)
    status = pair.health.status(SPEC)
    assert (status.role, status.usable, status.health, status.ready, status.failures) == (
        SPEC,
        True,
        Health.UP,
        Health.UP,
        2,
    )
    assert int(status.breaker) == 0
    assert pair.health.verdict(SPEC, Probe.HEALTH) is Health.UNKNOWN


class PairMachine(RuleBasedStateMachine):
    """Anything in any order: the rule of who is usable always holds."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pair = Pair()
        self.running: list[tuple[Role, int]] = []

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pair.health.refresh(self.now)

    @rule(role=st.sampled_from(Role))
    def send(self, role: Role) -> None:
        if role in self.pair.usable():
            self.running.append((role, self.pair.health.admit(role, self.now)))

    @precondition(lambda self: bool(self.running))
    @rule(outcome=st.sampled_from(Verdict))
    def end(self, outcome: Verdict) -> None:
        role, ticket = self.running.pop(0)
        self.pair.health.record(role, outcome, self.now, ticket)

    @rule(role=st.sampled_from(Role), times=st.integers(1, 6))
    def fail(self, role: Role, times: int) -> None:
        self.pair.fail(role, self.now, times)

    @rule(role=st.sampled_from(Role), probe=st.sampled_from(Probe), answer=st.sampled_from(Answer))
    def probe(self, role: Role, probe: Probe, answer: Answer) -> None:
        self.pair.health.probed(role, probe, answer, self.now, "a test")

    @rule(role=st.sampled_from(Role), drained=st.booleans())
    def drain(self, role: Role, drained: bool) -> None:
        self.pair.health.drain(role, drained=drained, now=self.now)

    @invariant()
    def rule_of_usable(self) -> None:
        status = {role: self.pair.health.status(role) for role in Role}
        eligible = {r for r, s in status.items() if not s.drained and s.health is not Health.DOWN}
        usable = self.pair.usable()
        assert usable == {role for role, told in status.items() if told.usable}
        assert usable <= eligible
        assert bool(usable) == bool(eligible)
        for role in eligible - usable:
            assert status[role].breaker is not CLOSED
        assert self.pair.health.impaired == any(s.breaker is not CLOSED for s in status.values())


TestPairMachine = PairMachine.TestCase
TestPairMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
