"""The line as points, a calibration's age and its accept length, as Prometheus sees them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from router.calibrated import read_terms
from router.calibration_exposition import CalibrationCollector
from router.calibration_state import CalibrationState
from router.frontier import Frontier
from router.line_exposition import NAME, POINTS, LineCollector, line_points
from router.load import Role
from router.policy import FixedPolicy, FrontierPolicy
from tests.calibrations import ACCEPT, document, planted
from tests.fake_relay import UNIX, FakeRelay, make_settings


def scrape(*collectors: LineCollector | CalibrationCollector) -> dict[str, float]:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(maxsplit=1) for line in lines if not line.startswith("#"))
    }


def test_the_total_goes_from_one_axis_to_the_other() -> None:
    """The sum n + m is K at every point, from all on n to all on m."""
    points = line_points(Frontier.total(16), None)
    assert [number for number, _, _ in points] == list(range(POINTS))
    assert points[0][1:] == (16.0, 0.0)
    assert points[-1][1:] == (0.0, 16.0)
    assert {n + m for _, n, m in points} == {16.0}


def test_the_speculative_threshold_is_upright() -> None:
    """The threshold K is n, whatever m is."""
    points = line_points(Frontier.speculative_only(8), None)
    assert {n for _, n, _ in points} == {8.0}
    assert points[-1][2] == 8.0


def test_never_is_the_axis_and_always_is_nothing() -> None:
    """F = 0 lies on the axis of m; an infinite line has no point."""
    assert {n for _, n, _ in line_points(Frontier.total(0), None)} == {0.0}
    assert line_points(Frontier.total(math.inf), None) == []
    assert {n for _, n, _ in line_points(Frontier.total(math.inf), 48)} == {48.0}


def test_a_table_ends_where_it_reaches_the_axis() -> None:
    """Past its first zero a falling table has nothing more to say; a rising one has its end."""
    assert line_points(Frontier.from_table((8, 4, 0, 0, 0)), None)[-1] == (POINTS - 1, 0.0, 2.0)
    assert line_points(Frontier.from_table((0, 4, 8)), None)[-1] == (POINTS - 1, 8.0, 2.0)
    assert line_points(Frontier.from_table((5,)), None)[-1] == (POINTS - 1, 5.0, 1.0)
    assert line_points(Frontier.from_table((math.inf, 4)), None)[0] == (POINTS - 1, 4.0, 1.0)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40), st.none() | st.integers(1, 64))
def test_every_point_is_on_the_line(values: list[int], cap: int | None) -> None:
    """Each n is F(m), or the cap where that is lower."""
    line = Frontier.from_table(tuple(map(float, sorted(values, reverse=True))))
    for _, n, m in line_points(line, cap):
        assert n == min(line.at(m), math.inf if cap is None else cap)


def test_the_points_are_those_of_the_policy_in_force() -> None:
    """An operator's line and the speculative server's cap move the values; no line, no series."""
    relay = FakeRelay()
    collector = LineCollector(relay)
    found = scrape(collector)
    assert found[f'{NAME}{{axis="n",point="00"}}'] == 8
    assert found[f'{NAME}{{axis="m",point="16"}}'] == 8
    relay.report(Role.SPECULATIVE, 0, max_running=4)
    assert scrape(collector)[f'{NAME}{{axis="n",point="00"}}'] == 4
    relay.policy = FrontierPolicy(Frontier.total(2))
    after = scrape(collector)
    assert after.keys() == found.keys()
    assert after[f'{NAME}{{axis="m",point="16"}}'] == 2
    relay.policy = FixedPolicy(Role.BASELINE)
    assert scrape(collector) == {}


def seen_of(content: bytes) -> dict[str, float]:
    """What is exported of a calibration."""
    relay = FakeRelay(make_settings())
    terms = read_terms(content, relay.settings)
    state = CalibrationState("c.json", content, terms, wall=lambda: UNIX, acceptance=(30.0, 2.0))
    return scrape(CalibrationCollector(relay, state))


def test_the_age_of_a_calibration_is_by_its_own_date() -> None:
    """Seconds since `created`; absent when the file does not say when it was made."""
    name = "crossover_calibration_age_seconds"
    assert seen_of(document(16, created="2027-01-15T07:00:00+00:00"))[name] == 3600
    assert name not in seen_of(document(16))


def test_the_calibrated_accept_length_is_that_of_the_curves() -> None:
    """A dashboard shows it beside the live one; without curves there is none."""
    name = "crossover_accept_length_calibrated"
    assert seen_of(document(16, curves=planted()))[name] == ACCEPT
    assert name not in seen_of(document(16))
