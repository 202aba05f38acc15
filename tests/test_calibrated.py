"""From a calibration to the policy that it asks for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from router import admin
from router.admin_models import PolicyChange
from router.calibrated import read_rule
from router.calibration import Calibration, CalibrationError, Curve, Curves, Line, Point
from router.config import SettingsError, load_settings
from router.policies import policy_name
from router.policy import FixedPolicy, FrontierPolicy
from router.rules import ForecastPolicy, JoinPolicy
from router.wiring import first_policy
from tests.calibrations import FAST, WIDE, written
from tests.fake_relay import FakeRelay

CURVES = Curves(
    speculative=Curve(tuple(Point(c, r) for c, r in FAST)),
    baseline=Curve(tuple(Point(c, r) for c, r in WIDE)),
)
PAIR = {"speculative": "http://a:1", "baseline": "http://b:1"}


def calibrated(**fields: Any) -> Calibration:
    """A calibration with these fields, also such as only its newer versions have."""
    plain = Calibration("crossover.calibration/1", Line(threshold=12), curves=CURVES)
    known = {name: getattr(plain, name) for name in plain.__struct_fields__}
    return cast("Calibration", SimpleNamespace(**(known | fields)))


def named(name: str, **parameters: float) -> Any:
    return SimpleNamespace(name=name, parameters=parameters)


def test_a_calibration_without_a_rule_follows_its_line() -> None:
    """No rule, `threshold` and `frontier` all mean the line."""
    assert read_rule(calibrated(), None) is None
    assert read_rule(calibrated(switch_rule=named("threshold")), None) is None
    assert read_rule(calibrated(switch_rule=named("frontier")), None) is None


def test_a_named_rule_comes_with_curves_and_parameters() -> None:
    """The calibration's rule has its parameters, and the setting wins over it."""
    found = calibrated(switch_rule=named("forecast", dwell=7.0))
    rule = read_rule(found, None)
    assert rule is not None
    assert (rule.name, rule.parameters, rule.curves) == ("forecast", {"dwell": 7.0}, (FAST, WIDE))
    other = read_rule(found, "join-speed")
    assert other is not None
    assert (other.name, other.parameters) == ("join-speed", {})
    assert read_rule(found, "threshold") is None


def test_shares_come_from_the_measured_contention() -> None:
    """What an overlap costs is taken from the calibration unless the parameters say it."""
    shares = SimpleNamespace(speculative=0.7, baseline=None)
    rule = read_rule(calibrated(contention=shares), "forecast")
    assert rule is not None
    assert rule.parameters == {"speculative_share": 0.7}
    said = named("forecast", speculative_share=0.9)
    rule = read_rule(calibrated(contention=shares, switch_rule=said), None)
    assert rule is not None
    assert rule.parameters == {"speculative_share": 0.9}


def test_a_rule_that_cannot_be_followed_is_refused() -> None:
    """An unknown rule and a rule without curves are errors that say so."""
    with pytest.raises(CalibrationError, match="'fastest' is none of threshold, forecast"):
        read_rule(calibrated(switch_rule=named("fastest")), None)
    with pytest.raises(CalibrationError, match="there are none"):
        read_rule(calibrated(curves=None), "forecast")


def test_the_setting_makes_the_policy(tmp_path: Path) -> None:
    """`rule` decides how frontier follows a calibration; a policy that is none ignores it."""
    given = {**PAIR, "calibration": written(tmp_path)}

    def policy(**more: str) -> str:
        return policy_name(first_policy(load_settings(given | more, environ={}))[0])

    assert policy() == "frontier"
    assert policy(rule="threshold") == "frontier"
    assert policy(rule="forecast") == "forecast"
    assert policy(rule="join-delay") == "join-delay"
    assert policy(rule="forecast", policy="baseline") == "baseline"


def test_marks_and_fences_are_the_settings(tmp_path: Path) -> None:
    """A rule has the configured fences and KV mark; a short queue never overrules it."""
    given = {**PAIR, "calibration": written(tmp_path), "rule": "forecast"}
    settings = load_settings({**given, "kv_mark": 0.5, "fence_n": True}, environ={})
    policy, line = first_policy(settings)
    assert isinstance(policy, ForecastPolicy)
    assert policy.marks.kv_cache == 0.5
    assert policy.marks.queued > 1_000_000
    assert policy.fences.choices
    assert line is not None
    assert line.threshold == 12


def test_a_rule_needs_a_calibration(tmp_path: Path) -> None:
    """A rule with a threshold only, or with a calibration that has no curves, is refused."""
    with pytest.raises(SettingsError, match="decides by the curves of a calibration"):
        load_settings({**PAIR, "threshold": "8", "rule": "forecast"}, environ={})
    given = {**PAIR, "calibration": written(tmp_path, curves=None), "rule": "forecast"}
    with pytest.raises(CalibrationError, match="there are none"):
        first_policy(load_settings(given, environ={}))


def test_curves_that_are_none_are_refused(tmp_path: Path) -> None:
    """A rule on a curve without tokens is one line that names the file."""
    bad = {"points": [{"concurrency": 1, "tokens_per_second": 0}]}
    path = written(tmp_path, curves={"speculative": bad, "baseline": bad})
    with pytest.raises(
        CalibrationError, match=r"calibration.json: policy: forecast: a curve needs"
    ):
        first_policy(load_settings({**PAIR, "calibration": path, "rule": "forecast"}, environ={}))


def test_an_operator_gets_the_rule_back() -> None:
    """`frontier` is the rule again where the start made it one; a line of its own is a line."""
    relay = FakeRelay()
    relay.policy = relay.configured = first = JoinPolicy((FAST, WIDE), "speed")
    desk = admin.Admin(relay, CollectorRegistry())
    assert isinstance(
        desk._policy(PolicyChange.model_validate({"policy": "baseline"})), FixedPolicy
    )
    assert desk._policy(PolicyChange.model_validate({"policy": "frontier"})) is first
    line = desk._policy(PolicyChange.model_validate({"policy": "frontier", "threshold": 3}))
    assert isinstance(line, FrontierPolicy)
