"""The rules that decide by curves: what they choose, why, and that the numbers bear it out."""

from __future__ import annotations

import math
import timeit
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.agreement import agrees
from router.load import BackendLoad, LoadSnapshot, LoadTracker, PolicyMemory, Role
from router.offered import estimated, first_estimate
from router.policies import PolicyError, make_policy, policy_name
from router.policy import Decision, Fences, Marks, Policy, Reason
from router.request import NOTHING_KNOWN, RequestInfo
from router.rules import (
    JUDGE_S,
    ForecastParameters,
    ForecastPolicy,
    JoinPolicy,
    RuleError,
    read_parameters,
)
from router.speeds import (
    COLUMNS,
    Forecast,
    Operation,
    in_flight,
    joined_delay,
    joined_speed,
    speeds,
)

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
# Twice as fast alone and half as fast when full: they cross at about 20 requests.
FAST = [(1.0, 200.0), (8.0, 1000.0), (32.0, 1600.0), (128.0, 2000.0)]
WIDE = [(1.0, 100.0), (8.0, 700.0), (32.0, 2000.0), (128.0, 4000.0)]
TINY = ForecastParameters(horizon=0.05)
FORECAST = ForecastPolicy((FAST, WIDE), TINY)


class Drive:
    """A policy and a tracker, with requests that arrive and end when the test says so."""

    def __init__(self, policy: ForecastPolicy) -> None:
        self.policy = policy
        self.tracker = LoadTracker()
        self.now = 100.0
        self.open: list[Any] = []
        self.decisions: list[Decision] = []

    def arrive(self, info: RequestInfo = NOTHING_KNOWN) -> Decision:
        decision = self.policy.decide(self.tracker.snapshot(self.now), info)
        assert decision.backend is not None
        self.open.append(self.tracker.lease(decision.backend, self.now, decision.memory))
        self.decisions.append(decision)
        return decision

    def end(self, count: int) -> None:
        for _ in range(min(count, len(self.open))):
            self.open.pop(0).release(self.now)

    def load(self, rate: float, in_flight: int, seconds: float) -> None:
        """`rate` arrivals a second with so many in flight, for some time."""
        for _ in range(round(rate * seconds)):
            self.now += 1.0 / rate
            self.arrive()
            self.end(len(self.open) - in_flight)


def test_speeds_between_and_beyond_levels() -> None:
    """Levels give their tokens/s; the first holds per request below, the last in all above."""
    table = speeds([(2.0, 100.0), (4.0, 160.0)])
    assert table[:3] == (0.0, 50.0, 100.0)
    assert table[4] == pytest.approx(160.0)
    assert table[3] == pytest.approx(3 / ((2 / 100 + 4 / 160) / 2))
    assert table[400] == pytest.approx(160.0)
    assert (
        speeds([(1.0, 10.0), (64.0, 200.0)], cap=8)[64] == speeds([(1.0, 10.0), (64.0, 200.0)])[8]
    )


def test_noise_never_makes_a_request_faster() -> None:
    """A level with more requests and less waiting for each is noise, and taken as equal."""
    table = speeds([(4.0, 100.0), (8.0, 400.0)])
    assert table[8] == pytest.approx(200.0)


@pytest.mark.parametrize(
    "levels", [[], [(0.5, 1.0)], [(1.0, 0.0)], [(1.0, math.inf)], [(1.0, math.nan)]]
)
def test_no_curve(levels: list[tuple[float, float]]) -> None:
    """No levels, less than one request and no tokens are refused."""
    with pytest.raises(ValueError, match="a curve needs levels"):
        speeds(levels)


def test_one_server_queue_is_the_known_one() -> None:
    """With a speed that does not grow the mean in flight is rho / (1 - rho)."""
    table = (0.0, *([100.0] * 511))
    for rho in (0.1, 0.5, 0.9):
        assert in_flight(table, 100 * rho) == pytest.approx(rho / (1 - rho), rel=1e-6)
    assert in_flight(table, 0.0) == 0.0
    assert in_flight(table, 1000.0) > 500  # overload fills whatever is told apart


@given(st.floats(1, 5000), st.floats(1, 5000))
def test_more_load_is_never_fewer_requests(one: float, other: float) -> None:
    """Mean in flight rises with the load, and the outflow read backwards is the load again."""
    operation = Operation(speeds(WIDE), 4600.0)
    low, high = sorted((one, other))
    assert operation.mean(low) <= operation.mean(high) + 1e-9
    mean = operation.mean(low)
    if 1.0 < mean < 200.0:
        assert operation.outflow(mean) == pytest.approx(low, rel=0.15)


def test_a_forecast_knows_overload_and_overlap() -> None:
    """Leaving pays where the other server is faster for long, and never where it is slower."""
    one, other = Operation(speeds(FAST), 4600.0), Operation(speeds(WIDE), 4600.0)
    leave = Forecast(one, other, (0.6, 0.6), 0.2, 4600.0)
    back = Forecast(other, one, (0.6, 0.6), 0.2, 4600.0)
    assert leave.gain(10, 3000.0) > 0 > back.gain(10, 3000.0)
    assert leave.gain(2, 300.0) < 0 < back.gain(2, 300.0)
    # What runs here is finished in an overlap, which costs the more the more runs.
    free = Forecast(one, other, (1.0, 1.0), 0.2, 4600.0)
    costs = [free.gain(n, 1500.0) - leave.gain(n, 1500.0) for n in COLUMNS[1:8]]
    assert costs == sorted(costs)
    assert costs[0] > 0
    assert leave.gain(9, -1.0) == leave.gain(9, 0.0)
    assert math.isfinite(leave.gain(100_000, 1e9))


def test_joined_tables() -> None:
    """One more request adds what the next level has more; its delay counts what others lose."""
    assert joined_speed((0.0, 100.0, 150.0)) == (100.0, 50.0)
    assert joined_delay((0.0, 100.0, 150.0)) == pytest.approx((-0.01, -(4 / 150 - 0.01)))


def test_the_estimate_of_a_steady_load() -> None:
    """Arrivals at a steady rate that end after as much work give the load and its length."""
    windows = ForecastParameters()
    estimate = first_estimate(0.0, 0, 0, 10, 500.0)
    for step in range(1, 2000):
        # 10 arrivals and 10 ends a second, each of 100 tokens: 1000 tokens/s are served.
        estimate = estimated(estimate, step * 0.1, (10, 0, 10), 1, 1000.0, windows)
    assert estimate.offered == pytest.approx(1000.0, rel=0.02)
    assert estimate.work / estimate.ended == pytest.approx(100.0, rel=0.02)
    assert 0.05 < estimate.spread < 0.08


def test_a_jump_is_seen_at_once() -> None:
    """A load that grows fourfold is most of the way there after two seconds, and widely uncertain."""
    windows = ForecastParameters()
    estimate = first_estimate(0.0, 0, 0, 0, 100.0)
    now = 0.0
    for rate, seconds in ((10.0, 60.0), (40.0, 2.0)):
        for _ in range(round(rate * seconds)):
            now += 1.0 / rate
            estimate = estimated(estimate, now, (5, 0, 0), 1, rate * 100.0, windows)
    assert estimate.offered is not None
    assert 2000.0 < estimate.offered < 4400.0
    assert estimate.slow_seen < 0.25


def test_it_starts_on_the_speculative_server_and_says_that_it_knows_nothing() -> None:
    """Before anything has been seen the reason is that nothing has been judged."""
    drive = Drive(FORECAST)
    first = drive.arrive()
    assert (first.backend, first.reason, first.gain) == (SPEC, Reason.FORECAST_UNSURE, None)


def test_a_light_load_stays_and_a_heavy_one_leaves_within_seconds() -> None:
    """What the speculative server serves better stays; a step to what it cannot serve is left."""
    drive = Drive(FORECAST)
    drive.load(2.0, 2, 60.0)
    assert {decision.backend for decision in drive.decisions} == {SPEC}
    assert drive.decisions[-1].reason is Reason.FORECAST
    before = len(drive.decisions)
    drive.load(30.0, 40, 5.0)
    later = drive.decisions[before:]
    assert later[-1].backend is BASE
    (switch,) = [decision for decision in later if decision.reason is Reason.FORECAST_SWITCH]
    assert switch.gain is not None
    assert switch.gain > 0


def test_the_way_back_waits() -> None:
    """A load that becomes light again goes back after the dwell, not before."""
    drive = Drive(FORECAST)
    drive.load(30.0, 40, 30.0)
    assert drive.decisions[-1].backend is BASE
    since = drive.now
    while drive.decisions[-1].backend is BASE and drive.now < since + 120.0:
        drive.load(2.0, 2, 1.0)
    assert drive.decisions[-1].backend is SPEC
    assert drive.now - since >= TINY.dwell
    assert Reason.DWELL in {decision.reason for decision in drive.decisions}


def test_curves_that_never_cross_never_switch() -> None:
    """Where one server is faster at every load the rule stays there."""
    better = [(c, 1.5 * r) for c, r in WIDE]
    drive = Drive(ForecastPolicy((better, WIDE), TINY))
    drive.load(2.0, 2, 20.0)
    drive.load(40.0, 60, 20.0)
    assert {decision.backend for decision in drive.decisions} == {SPEC}


def test_between_judgements_a_decision_repeats_the_last() -> None:
    """Within 50 ms the estimate is the same object, and what was sent since is counted."""
    drive = Drive(FORECAST)
    drive.load(20.0, 5, 3.0)
    drive.now += JUDGE_S
    judged = drive.arrive()
    drive.now += JUDGE_S / 10
    repeated = drive.arrive()
    assert repeated.memory.estimate is judged.memory.estimate
    assert (judged.memory.arrived, repeated.memory.arrived) == (1, 2)
    assert repeated.gain == judged.gain


def test_the_cap_is_left() -> None:
    """A full speculative server is left, and the decision holds the cap."""
    full = LoadSnapshot(1.0, BackendLoad(SPEC, 48, cap=48), BackendLoad(BASE, 400))
    for policy in (FORECAST, JoinPolicy((WIDE, FAST), "speed")):
        snapshot = msgspec.structs.replace(full, speculative=BackendLoad(SPEC, 2, cap=2))
        decision = policy.decide(snapshot, NOTHING_KNOWN)
        assert (decision.backend, decision.reason, decision.frontier) == (BASE, Reason.CAP, 2.0)
        assert agrees(decision, 0.2)


def test_a_cap_that_was_measured_moves_nobody() -> None:
    """What queues behind a cap is in the forecast if the curve goes no further; else it is left."""
    for cap, goes in ((127, BASE), (128, SPEC), (300, SPEC)):
        full = LoadSnapshot(1.0, BackendLoad(SPEC, 400, cap=cap, queued=9), BackendLoad(BASE))
        decision = FORECAST.decide(full, NOTHING_KNOWN)
        assert decision.backend is goes
        assert (decision.reason is Reason.CAP) is (goes is BASE)
        assert decision.memory.side is goes


@pytest.mark.parametrize("by", ["speed", "delay"])
def test_join_fills_the_server_that_serves_one_more_better(by: Any) -> None:
    """Alone a request goes where it is faster; a loaded server loses it to the idle one."""
    policy = JoinPolicy((FAST, WIDE), by)

    def goes(n: int, m: int) -> Role | None:
        snapshot = LoadSnapshot(1.0, BackendLoad(SPEC, n), BackendLoad(BASE, m))
        return policy.decide(snapshot, NOTHING_KNOWN).backend

    assert goes(0, 0) is SPEC
    assert goes(60, 1) is BASE
    assert goes(1, 100) is SPEC
    assert goes(5000, 9000) is SPEC
    assert goes(9000, 5000) is BASE


loads: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    in_flight=st.integers(0, 700),
    foreign=st.integers(0, 50),
    available=st.booleans(),
    contended=st.booleans(),
    queued=st.none() | st.integers(0, 3),
    token_usage=st.none() | st.floats(0, 1),
    cap=st.none() | st.integers(1, 300),
)
infos = st.builds(
    RequestInfo,
    structured_output=st.booleans(),
    choices=st.integers(1, 2),
    pinned=st.sampled_from([None, SPEC, BASE]),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), loads, loads, infos), min_size=1, max_size=12),
    st.sampled_from(["forecast", "join-speed", "join-delay"]),
)
def test_every_decision_agrees_with_its_numbers(steps: list[Any], name: str) -> None:
    """Whatever is seen in whatever order, the reason follows from the numbers and somebody serves."""
    fences, marks = Fences(structured_output=True, choices=True), Marks()
    rules: dict[str, Policy] = {
        "forecast": FORECAST,
        "join-speed": JoinPolicy((FAST, WIDE), "speed", fences=fences, marks=marks),
        "join-delay": JoinPolicy((FAST, WIDE), "delay", fences=fences, marks=marks),
    }
    memory, now = PolicyMemory(), 0.0
    for passed, one, other, info in steps:
        now += passed
        spec, base = BackendLoad(SPEC, **one), BackendLoad(BASE, **other)
        snapshot = LoadSnapshot(now, spec, base, memory)
        decision = rules[name].decide(snapshot, info)
        assert agrees(decision, 0.2), decision
        assert rules[name].decide(snapshot, info) == decision  # a pure function
        free = [each.role for each in (spec, base) if each.available]
        if info.pinned is None:
            assert (decision.backend in free) if free else decision.backend is None
        memory = decision.memory


def test_a_decision_is_cheap() -> None:
    """At a thousand requests a second a forecast costs at most five plain decisions."""
    plain = make_policy("least-in-flight")
    drive = Drive(FORECAST)
    drive.load(100.0, 40, 10.0)

    def cost(policy: Any) -> float:
        memory = drive.tracker.memory
        snapshots = []
        now = drive.now
        for _ in range(500):
            now += 0.001
            snapshots.append(
                LoadSnapshot(now, BackendLoad(SPEC, 20), BackendLoad(BASE, 20), memory)
            )

        def run() -> None:
            kept = memory
            for snapshot in snapshots:
                given = msgspec.structs.replace(snapshot, memory=kept)
                kept = policy.decide(given, NOTHING_KNOWN).memory

        return min(timeit.repeat(run, number=1, repeat=7))

    assert cost(FORECAST) < 5 * cost(plain)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"horizont": 1.0}, "horizont"),
        ({"horizon": 0.0}, "horizon: not a number above 0"),
        ({"dwell": -1.0}, "dwell: not a number from 0 up"),
        ({"spread": math.nan}, "spread"),
        ({"baseline_share": 0.0}, "baseline_share: not above 0"),
        ({"fast": 30.0}, "slow: not above fast"),
    ],
)
def test_a_wrong_parameter_is_named(given: dict[str, float], message: str) -> None:
    """A parameter that does not exist or cannot be is refused by its name."""
    with pytest.raises(RuleError, match=message):
        read_parameters(given)


def test_a_rule_by_its_name() -> None:
    """Each rule's name makes it, it tells its name, and without curves it is refused."""
    for name in ("forecast", "join-speed", "join-delay"):
        assert policy_name(make_policy(name, curves=(FAST, WIDE))) == name
        with pytest.raises(PolicyError, match="needs a calibration with the curves"):
            make_policy(name)
    with pytest.raises(PolicyError, match="forecast: a curve needs levels"):
        make_policy("forecast", curves=([], WIDE))
    with pytest.raises(PolicyError, match="no parameters of join-speed"):
        make_policy("join-speed", curves=(FAST, WIDE), parameters={"dwell": 1.0})
    with pytest.raises(PolicyError, match="dwell"):
        make_policy("forecast", curves=(FAST, WIDE), parameters={"dwell": -1.0})
