"""Where the line is while the accept length is not the calibrated one."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.curve_files import shipped_curve
from loadtest.simulator import PairModel, ServerModel, Simulation
from loadtest.simulator_load import Acceptance, Call
from router.calibrated import policy_of, read_terms
from router.calibration_state import CalibrationState
from router.curves import Curve, Curves, Point
from router.frontier import Frontier
from router.live_line import (
    DEAD_ZONE,
    FORGET,
    LiveRatio,
    calibrated_accept_length,
    live_frontier,
)
from router.load import LoadSnapshot, Role
from router.policy import Decision, FrontierPolicy, Policy
from router.request import RequestInfo
from tests.calibrations import ACCEPT, LEVELS, document, planted
from tests.fake_relay import make_settings

CURVES = planted(16.0)


def threshold(ratio: float, line: Frontier | None = None, curves: Curves = CURVES) -> float:
    return live_frontier(line or Frontier.total(16), curves, ratio).threshold


@pytest.mark.parametrize(
    ("ratio", "wanted"),
    [(1.0, 16), (0.5, 4), (0.75, 9), (1.5, 36), (2.0, 64), (4.0, 64), (0.25, 0), (0.2, 0)],
)
def test_the_line_is_the_crossover_of_the_moved_curves(ratio: float, wanted: float) -> None:
    """A power law's crossover goes with the square of the speed-up, up to the highest level."""
    assert threshold(ratio) == wanted


def test_at_ratio_one_the_line_is_the_calibrated_one_whatever_it_is() -> None:
    """A line chosen for another objective is not replaced by the crossover of throughput."""
    for line in (Frontier.total(7), Frontier.from_table((9.0, 5.0)), Frontier.speculative_only(99)):
        assert live_frontier(line, CURVES, 1.0) is line


def test_a_line_that_is_not_the_crossover_moves_by_the_same_factor() -> None:
    """Half the accept length is a quarter of these curves' crossover, and of any other line."""
    assert threshold(0.5, Frontier.total(12)) == 3
    assert threshold(0.5, Frontier.speculative_only(40)) == 10
    assert live_frontier(Frontier.from_table((12.0, 8.0, 0.0)), CURVES, 0.5).table == (3, 2, 0)


def test_no_line_goes_beyond_what_was_measured() -> None:
    """64 is the last level; a line that was beyond it already stays where it was."""
    assert threshold(2.0, Frontier.total(60)) == 64
    assert threshold(2.0, Frontier.total(100)) == 100
    assert threshold(0.5, Frontier.total(100)) == 25


def test_always_holds_as_long_as_the_curves_say_so() -> None:
    """An infinite line becomes a number when acceptance falls, and is infinite again after."""
    ahead = planted(100.0)  # speculative is ahead at every level
    line = Frontier.total(math.inf)
    assert threshold(1.2, line, ahead) == math.inf
    assert threshold(0.5, line, ahead) == 25
    assert threshold(2.0, line, CURVES) == math.inf  # chosen for another reason: not ours to bound


def test_never_opens_only_where_the_curves_open() -> None:
    """A line of zero that the curves give opens with a better acceptance; any other zero stays."""
    behind = planted(0.5)
    assert behind.crossover() == 0.0
    assert threshold(2.0, Frontier.total(0), behind) == 2
    assert threshold(2.0, Frontier.total(0), CURVES) == 0


@given(
    st.lists(st.integers(0, 80) | st.just(math.inf), min_size=1, max_size=8).map(sorted),
    st.booleans(),
    st.floats(0.25, 4.0),
    st.sampled_from([0.5, 8.0, 16.0, 100.0]),
)
def test_any_line_stays_a_line(
    values: list[float], falls: bool, ratio: float, crossover: float
) -> None:
    """Whatever is moved by whatever, the result is a frontier, and never rises for a lower ratio."""
    table = tuple(float(v) for v in (reversed(values) if falls else values))
    curves = planted(crossover)
    found = live_frontier(Frontier.from_table(table), curves, ratio)
    assert len(found.table) == len(table)
    for number in values:
        moved = threshold(ratio, Frontier.total(number), curves)
        assert moved <= number if ratio < 1.0 else moved >= number
        assert moved <= max(number, LEVELS[-1])


def test_the_calibrated_accept_length_is_the_median_of_the_levels() -> None:
    """Without one on the speculative curve there is nothing to follow."""
    assert calibrated_accept_length(CURVES) == ACCEPT
    assert calibrated_accept_length(planted(accept=None)) is None
    assert calibrated_accept_length(None) is None
    points = tuple(Point(n, 100.0 * n, accept_length=a) for n, a in ((1, 2.0), (2, 3.0), (4, 9.0)))
    assert calibrated_accept_length(Curves(Curve(points), CURVES.baseline)) == 3.0


def test_scaled_curves_cross_where_the_speed_up_says() -> None:
    """Multiplying the curve and asking with a factor are one thing."""
    points = CURVES.speculative.points
    halved = tuple(
        msgspec.structs.replace(point, tokens_per_second=point.tokens_per_second / 2)
        for point in points
    )
    scaled = Curves(Curve(halved, cap=CURVES.speculative.cap), CURVES.baseline)
    assert scaled.crossover() == pytest.approx(CURVES.crossover(0.5))


def feed(found: LiveRatio, length: float | None, seconds: float, start: float) -> float:
    """The same accept length for so long, heard every two seconds; the time after."""
    now = start
    while now < start + seconds:
        now += 2.0
        found.observe(now, length)
        if (wanted := found.wanted) is not None:
            found.in_force = wanted
    return now


def test_the_ratio_is_smoothed_with_its_time_constant() -> None:
    """After one time constant 63 % of the way is gone, on a logarithmic scale."""
    found = LiveRatio(2.8, smoothing=30.0)
    assert found.ratio is None
    found.observe(0.0, 1.4)
    assert found.ratio == 1.0  # the calibrated one is what is believed until time has passed
    found.observe(30.0, 1.4)
    assert found.ratio == pytest.approx(0.5 ** (1 - math.exp(-1)))
    found.observe(1000.0, 1.4)
    assert found.ratio == pytest.approx(0.5)


def test_how_often_it_is_heard_does_not_matter() -> None:
    """A poll a second and one every ten seconds smooth alike."""
    often, seldom = LiveRatio(2.8), LiveRatio(2.8)
    for now in range(61):
        often.observe(float(now), 2.0)
        if now % 10 == 0:
            seldom.observe(float(now), 2.0)
    assert often.ratio == pytest.approx(seldom.ratio)


def test_nothing_moves_within_the_dead_zone() -> None:
    """Acceptance that wanders by 4 % never changes the line, however long."""
    found = LiveRatio(2.8, smoothing=5.0)
    chance = random.Random(1)
    for now in range(0, 4000, 2):
        found.observe(float(now), 2.8 * (1 + chance.uniform(-0.04, 0.04)))
        assert found.wanted is None


def test_noise_around_another_level_settles() -> None:
    """Around 2.0 with 4 % of noise (a gauge's, as captured) the line moves while it gets there, and then stays."""
    found = LiveRatio(2.8, smoothing=30.0)
    chance = random.Random(1)
    changes = []
    for now in range(0, 4000, 2):
        found.observe(float(now), 2.0 * (1 + chance.uniform(-0.04, 0.04)))
        if (wanted := found.wanted) is not None:
            found.in_force = wanted
            changes.append(now)
    assert found.in_force == pytest.approx(2.0 / 2.8, rel=DEAD_ZONE)
    assert 3 <= len(changes) <= 8
    assert max(changes) < 200


def test_it_returns_to_exactly_one() -> None:
    """When acceptance is what it was, the calibrated line itself is in force again."""
    found = LiveRatio(2.8)
    now = feed(found, 1.6, 200, 0.0)
    assert found.in_force == pytest.approx(1.6 / 2.8, rel=DEAD_ZONE)
    feed(found, 2.8, 300, now)
    assert found.in_force == 1.0


def test_the_ratio_is_bounded_and_says_so() -> None:
    """Beyond the bound nothing more is followed, whichever way."""
    low, high = LiveRatio(2.0, bound=1.5), LiveRatio(2.0, bound=1.5)
    feed(low, 1.0, 400, 0.0)
    feed(high, 4.0, 400, 0.0)
    assert low.in_force == low.ratio == pytest.approx(1 / 1.5)
    assert high.in_force == high.ratio == pytest.approx(1.5)
    assert low.bounded
    assert high.bounded
    still = LiveRatio(2.0, bound=1.0)
    feed(still, 1.0, 400, 0.0)
    assert still.in_force == 1.0


def test_a_server_that_says_nothing_is_believed_to_be_calibrated_after_a_while() -> None:
    """A line that fell so far that nothing speculates any more opens again by itself."""
    found = LiveRatio(2.8, smoothing=30.0)
    now = feed(found, 1.6, 300, 0.0)
    before = found.ratio
    assert before is not None
    feed(found, None, 10, now)
    assert found.in_force == pytest.approx(before, rel=DEAD_ZONE)
    feed(found, None, 4 * FORGET * 30, now + 10)
    assert found.in_force == 1.0
    assert found.live is None


def test_another_calibration_goes_on_from_what_was_heard() -> None:
    """The smoothed live length is kept, and compared with the new calibrated one."""
    old, new = LiveRatio(2.8), LiveRatio(1.6)
    feed(old, 1.6, 400, 0.0)
    new.carry(old)
    assert new.ratio == pytest.approx(1.0, abs=0.01)
    fresh = LiveRatio(2.0)
    fresh.carry(LiveRatio(3.0))
    assert fresh.ratio is None


@given(
    st.lists(st.tuples(st.floats(0, 100), st.none() | st.floats(1, 16)), max_size=40),
    st.floats(1.0, 16.0),
    st.floats(1.0, 5.0),
)
def test_whatever_is_heard_the_ratio_in_force_is_within_the_bound(
    heard: list[tuple[float, float | None]], calibrated: float, bound: float
) -> None:
    """And a change is never asked for twice."""
    found = LiveRatio(calibrated, bound=bound)
    now = 0.0
    for passed, length in heard:
        now += passed
        found.observe(now, length)
        if (wanted := found.wanted) is not None:
            found.in_force = wanted
            assert found.wanted is None
        assert 1 / bound - 1e-9 <= found.in_force <= bound + 1e-9


class Following:
    """A policy in virtual time whose line follows what the server accepts, as the watch does it."""

    def __init__(self, state: CalibrationState, acceptance: Acceptance) -> None:
        self.state = state
        self.acceptance = acceptance
        self.settings = make_settings(threshold=None, policy="baseline")
        self.policy: Policy = policy_of(state.terms, self.settings)
        self.due = 0.0
        self.lines: list[tuple[float, float]] = []

    def decide(self, snapshot: LoadSnapshot, info: RequestInfo) -> Decision:
        live = self.state.live
        if snapshot.now >= self.due and live is not None:
            self.due = snapshot.now + 2.0
            live.observe(snapshot.now, self.acceptance.at(snapshot.now))
            if (wanted := live.wanted) is not None:
                live.in_force = wanted
                self.policy = policy_of(self.state.terms, self.settings, wanted)
            assert isinstance(self.policy, FrontierPolicy)
            self.lines.append((snapshot.now, self.policy.frontier.threshold))
        return self.policy.decide(snapshot, info)


def test_in_the_simulator_a_drifting_acceptance_moves_the_line_and_back() -> None:
    """2.8, then 1.6, then 2.8 again: the line falls to the crossover of 1.6 and returns."""
    drift = ((0.0, 1.0), (100.0, 1.0), (160.0, 1.6 / 2.8), (400.0, 1.6 / 2.8), (460.0, 1.0))
    acceptance = Acceptance(2.8, drift=drift)
    pair = PairModel(
        speculative=ServerModel(
            curve=shipped_curve("planted-12", Role.SPECULATIVE), acceptance=acceptance
        ),
        baseline=ServerModel(curve=shipped_curve("planted-12", Role.BASELINE)),
    )
    content = document(16, curves=CURVES)
    terms = read_terms(content, make_settings())
    state = CalibrationState("c.json", content, terms, wall=lambda: 0.0, acceptance=(30.0, 2.0))
    follow = Following(state, acceptance)
    calls = (Call(0.5 * n, 64, 64) for n in range(1600))
    run = Simulation(pair, follow, seed=3).play(calls)
    assert len(run) == 1600
    lines = dict(follow.lines)

    def at(second: float) -> set[float]:
        return {line for now, line in lines.items() if second <= now < second + 50}

    assert at(50) == {16.0}
    (low,) = at(350)
    # The ratio in force is within the dead zone of the real one, and the line goes with its square.
    assert CURVES.crossover(1.6 / 2.8) * 0.95**2 - 1 <= low <= CURVES.crossover(1.6 / 2.8) * 1.05**2
    assert at(700) == {16.0}
    turns = [a < b for (_, a), (_, b) in itertools.pairwise(follow.lines) if a != b]
    assert turns == sorted(turns)  # down, then up: it never jitters
