"""What the forecast takes from a calibration: the length of answers, and what an overlap costs."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from loadtest.arms import arm_curves
from loadtest.arms import levels_of as measured_levels
from loadtest.arrivals import ClosedLoop
from loadtest.curve_files import shipped_curve
from loadtest.ruled import with_rule
from loadtest.simulator import PairModel, Run, ServerModel, Simulation
from loadtest.simulator_contention import H200
from loadtest.simulator_load import Size
from router.calibrated import Terms, known_of, policy_of, read_rule
from router.calibration import (
    SCHEMA,
    Calibration,
    Contention,
    Curve,
    Curves,
    Line,
    Point,
    SwitchRule,
)
from router.config import load_settings
from router.load import Role

SPEC, BASE = (shipped_curve("planted-12", role) for role in Role)
PROMPT = 256


def swept(answer: int, said: Any) -> Calibration:
    """A calibration of the planted pair by answers of this length, which its fingerprint says."""
    one, other = (
        Curve(tuple(Point(c, r) for c, r, *_ in measured_levels(curve, PROMPT, answer)))
        for curve in (SPEC, BASE)
    )
    facts = {} if said is None else {"output_tokens": said}
    return Calibration(SCHEMA, Line(threshold=12), curves=Curves(one, other), fingerprint=facts)


def closed_loop(calibration: Calibration, clients: int, answer: int, seconds: float = 10.0) -> Run:
    """So many clients without a pause, in front of the pair that was swept."""
    rule = read_rule(calibration, "forecast")
    terms = Terms(calibration, calibration.line, None, None, rule)
    pair = {"speculative": "http://a:1", "baseline": "http://b:1", "threshold": 12}
    policy = policy_of(terms, load_settings(pair, environ={}))
    servers = PairModel(
        speculative=ServerModel(curve=SPEC), baseline=ServerModel(curve=BASE), contention=H200
    )
    sizes = itertools.repeat(Size(PROMPT, answer))
    return Simulation(servers, policy, telemetry_s=0.2).keep(ClosedLoop(clients, seconds), sizes)


def share(run: Run) -> float:
    return run.backend.count(Role.SPECULATIVE) / len(run)


def test_short_answers_are_no_large_load_at_the_start() -> None:
    """Four clients of 32-token answers stay where they are served faster from the first second on.

    Without the sweep's length each arrival is taken for 128 tokens, and the rule leaves at once for
    the slower server; there are a third fewer answers by the end.
    """
    known, unknown = swept(32, 32), swept(32, None)
    served = closed_loop(known, 4, 32)
    assert share(served) == 1.0
    taken_for_more = closed_loop(unknown, 4, 32)
    assert share(taken_for_more) < 0.25
    assert len(served) > 1.25 * len(taken_for_more)


def test_long_answers_are_no_small_load_at_the_start() -> None:
    """Eight clients of 256-token answers are past the crossover, and the rule leaves sooner."""

    def left(run: Run) -> float:
        return run.started[run.backend.index(Role.BASELINE)]

    known, unknown = (closed_loop(swept(256, said), 8, 256, 15.0) for said in (256, None))
    assert left(known) < 0.6 * left(unknown)


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        (32, 32.0),
        (48.5, 48.5),
        ("64-192", 128.0),
        (None, None),
        ("as in the trace", None),
        ("64-x", None),
        (0, None),
        ("inf", None),
        (True, None),
    ],
)
def test_a_fingerprint_says_the_length_of_an_answer(said: Any, tokens: float | None) -> None:
    """A number or two bounds are a length; what is neither leaves the default."""
    found = known_of(swept(128, said))
    assert found == ({} if tokens is None else {"output_tokens": tokens})


def test_what_the_file_says_of_the_rule_comes_first() -> None:
    """A parameter that somebody wrote is not replaced by what the sweep says."""
    calibration = msgspec.structs.replace(
        swept(32, 32), contention=Contention("shared", speculative=0.8, baseline=1.2)
    )
    measured = {"output_tokens": 32.0, "speculative_share": 0.8, "baseline_share": 1.0}
    rule = read_rule(calibration, "forecast")
    assert rule is not None
    assert rule.parameters == measured
    written = SwitchRule("forecast", {"output_tokens": 64.0, "dwell": 3.0})
    rule = read_rule(msgspec.structs.replace(calibration, switch_rule=written), None)
    assert rule is not None
    assert rule.parameters == {**measured, "output_tokens": 64.0, "dwell": 3.0}
    joined = read_rule(calibration, "join-speed")
    assert joined is not None
    assert joined.parameters == {}


def test_a_calibrated_rule_has_what_was_measured() -> None:
    """The forecast that is chosen for a calibration keeps its answers' length and its shares."""
    spec, base = arm_curves("topk4-2.8")
    curves = Curves(
        *(Curve(tuple(Point(c, r) for c, r, *_ in measured_levels(x, 0, 64))) for x in (spec, base))
    )
    calibration = Calibration(
        SCHEMA,
        Line(threshold=30),
        curves=curves,
        # No overlap is known of both servers: those of the simulation are borrowed.
        contention=Contention("shared", speculative=0.71),
        fingerprint={"output_tokens": 64},
    )
    made = with_rule(calibration)
    assert made.switch_rule is not None
    assert made.switch_rule.name == "forecast"
    given = made.switch_rule.parameters
    assert (given["output_tokens"], given["speculative_share"]) == (64.0, 0.71)
    assert given["baseline_share"] == pytest.approx(0.567, abs=0.001)
