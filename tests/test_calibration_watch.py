"""The calibration in force: its file, the servers it is of, the traffic it is of."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from router.admin import Admin
from router.admin_models import CalibrationItem, PolicyChange
from router.calibrated import policy_of, read_terms
from router.calibration import CalibrationError
from router.calibration_exposition import CalibrationCollector
from router.calibration_state import CalibrationState
from router.calibration_watch import CalibrationWatch
from router.drift import ENOUGH
from router.fingerprint import fingerprint
from router.frontier import Frontier
from router.load import PolicyMemory, Role
from router.pair_watch import PairState
from router.policies import policy_name
from router.policy import FixedPolicy, FrontierPolicy
from router.rules import ForecastPolicy
from router.status_view import status_body
from router.wiring import read_file
from tests.calibrations import document, planted
from tests.fake_relay import UNIX, FakeRelay, make_settings
from tests.test_fingerprint import info

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
TOPK1, PLAIN = "captured-0.5.17-eagle3-topk1", "captured-0.5.17-baseline"
FACTS = fingerprint(SPEC, info(TOPK1)) | fingerprint(BASE, info(PLAIN))


class Desk:
    """A watch over a file that is a value, with a clock that is a number."""

    def __init__(self, content: bytes = document(16), **settings: Any) -> None:
        self.content: bytes | OSError = content
        self.reads = 0
        self.accept: float | None = None
        self.pair = PairState()
        # The file itself is read by `read`; settings only have to allow a calibration.
        path = Path(__file__)
        self.relay = relay = FakeRelay(make_settings(threshold=None, calibration=path, **settings))
        terms = read_terms(content, relay.settings)
        acceptance = (relay.settings.acceptance_smoothing, relay.settings.acceptance_bound)
        self.state = relay.calibration = CalibrationState(
            "c.json",
            content,
            terms,
            wall=lambda: UNIX + relay.now - 1000.0,
            acceptance=acceptance if relay.settings.acceptance_aware == "auto" else None,
        )
        relay.frontier = terms.frontier
        relay.policy = relay.configured = policy_of(terms, relay.settings)
        self.watch = CalibrationWatch(
            relay, self.state, self.pair, self.read,
            accept=lambda _now: self.accept, clock=relay.clock,
        )  # fmt: skip

    def read(self) -> bytes:
        self.reads += 1
        if isinstance(self.content, OSError):
            raise self.content
        return self.content

    def look(self, content: bytes | OSError | None = None, seconds: float = 2.0) -> Desk:
        if content is not None:
            self.content = content
        self.relay.now += seconds
        asyncio.run(self.watch.look())
        return self

    def for_seconds(self, seconds: float, accept: float | None) -> None:
        self.accept = accept
        for _ in range(int(seconds / 2)):
            self.look()

    def see(self, spec: dict[str, Any], base: dict[str, Any]) -> None:
        """The watch over the pair has looked at these servers."""
        self.pair.fingerprints = {SPEC: fingerprint(SPEC, spec), BASE: fingerprint(BASE, base)}
        self.look()

    @property
    def threshold(self) -> float:
        policy = self.relay.policy
        assert isinstance(policy, FrontierPolicy)
        return policy.frontier.threshold

    @property
    def status(self) -> CalibrationItem:
        item = status_body(self.relay).calibration
        assert item is not None
        return item

    @property
    def events(self) -> list[str]:
        found = self.relay.decisions.view()
        return [each.detail for each in reversed(found) if each.kind == "event"]

    def metrics(self) -> dict[str, float]:
        registry = CollectorRegistry()
        registry.register(CalibrationCollector(self.relay, self.state))
        lines = generate_latest(registry).decode().splitlines()
        rows = [line.split() for line in lines if not line.startswith("#")]
        return {row[0].removeprefix("crossover_"): float(row[1]) for row in rows}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ---------------------------------------------------------------------- the file


def test_a_replaced_file_is_in_force_without_a_restart() -> None:
    """Line, band and dwell are the new file's; what the policy remembers and the counts stay."""
    desk = Desk()
    lease = desk.relay.tracker.lease(SPEC, desk.relay.now, PolicyMemory(BASE, 7.0, 9.0))
    desk.look()
    assert (desk.threshold, desk.events) == (16, [])
    desk.look(document(24, switch={"band": 0.4, "dwell": 9.0}, verdict="at", created="2026-11-29"))
    assert desk.threshold == 24
    assert desk.relay.frontier == Frontier.total(24)
    assert desk.relay.policy is desk.relay.configured
    assert isinstance(desk.relay.policy, FrontierPolicy)
    assert (desk.relay.policy.band, desk.relay.policy.dwell) == (0.4, 9.0)
    assert desk.relay.tracker.memory == PolicyMemory(BASE, 7.0, 9.0)
    assert desk.relay.tracker.of(SPEC).in_flight == 1
    lease.release(desk.relay.now)
    assert desk.events == [
        "c.json is in force: scope total, threshold 24.0, rule threshold, verdict at"
    ]
    item = desk.status
    assert (item.path, item.created, item.verdict) == ("c.json", "2026-11-29", "at")
    assert (item.threshold, item.live_threshold, item.rule) == (24, 24, "threshold")
    assert item.loaded == UNIX + 4.0
    assert item.age is not None
    assert (item.problem, item.alarm, item.advice, item.matches) == (None, None, None, None)
    found = desk.metrics()
    assert found["threshold_calibrated"] == 24
    assert found['calibration_loads_total{result="ok"}'] == 2
    assert found['calibration_loads_total{result="refused"}'] == 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (document(24)[:-9], "truncated"),
        (b"", "truncated"),
        (OSError(2, "No such file or directory"), "it cannot be read: No such file or directory"),
        (b'{"schema": "crossover.calibration/2", "frontier": {"threshold": 1}}', "schema"),
        (document(24).replace(b"threshold", b"treshold"), "treshold"),
    ],
)
def test_a_broken_file_is_refused_once_and_a_mended_one_taken(
    content: bytes | OSError, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The old line stays, /status says why, and the log says it once however long it lasts."""
    desk = Desk()
    policy = desk.relay.policy
    for _ in range(3):
        desk.look(content)
    assert desk.relay.policy is policy
    assert why in (desk.status.problem or "")
    assert len(warnings(caplog)) == 1
    assert desk.metrics()['calibration_loads_total{result="refused"}'] == 1
    desk.look(document(24))
    assert (desk.threshold, desk.status.problem) == (24, None)


def test_a_file_that_is_back_is_as_it_was() -> None:
    """Gone and back with the same content is no load, and no problem any more."""
    desk = Desk()
    policy = desk.relay.policy
    desk.look(OSError(2, "No such file"))
    assert desk.status.problem is not None
    desk.look(document(16))
    assert desk.status.problem is None
    assert desk.relay.policy is policy
    assert desk.metrics()['calibration_loads_total{result="ok"}'] == 1


def test_a_file_against_the_settings_is_refused() -> None:
    """The rule that a setting wants decides by curves, and the new file has none."""
    desk = Desk(document(16, curves=planted()), rule="join-speed")
    desk.look(document(24))
    assert "curves" in (desk.status.problem or "")
    assert policy_name(desk.relay.policy) == "join-speed"


def test_settings_win_over_a_new_file_too() -> None:
    """A band that was given stays, whatever the file says."""
    desk = Desk(band=0.5)
    desk.look(document(24, switch={"band": 0.1, "dwell": 1.0}))
    assert isinstance(desk.relay.policy, FrontierPolicy)
    assert (desk.relay.policy.band, desk.relay.policy.dwell) == (0.5, 1.0)


def test_an_operators_policy_stays() -> None:
    """Only what `frontier` means is replaced; the operator gets the newest line back by that name."""
    desk = Desk()
    admin = Admin(desk.relay, CollectorRegistry())
    asyncio.run(admin.set_policy(PolicyChange.model_validate({"policy": "least-in-flight"})))
    desk.look(document(24))
    assert policy_name(desk.relay.policy) == "least-in-flight"
    assert (desk.relay.frontier, desk.status.live_threshold) == (Frontier.total(24), 24)
    asyncio.run(admin.set_policy(PolicyChange.model_validate({"policy": "frontier"})))
    assert desk.threshold == 24
    desk.look(document(30))
    assert desk.threshold == 30
    own = {"policy": "frontier", "threshold": 3}
    asyncio.run(admin.set_policy(PolicyChange.model_validate(own)))
    desk.look(document(31))
    assert desk.threshold == 3


def test_another_rule_keeps_the_server_in_use_and_forgets_the_rest() -> None:
    """From a line to a rule by curves: the side stays, an estimate would mean nothing."""
    desk = Desk()
    desk.relay.tracker.memory = PolicyMemory(BASE, 7.0, 9.0, arrived=3)
    rule = {"name": "forecast", "parameters": {}}
    desk.look(document(16, curves=planted(), switch_rule=rule))
    assert isinstance(desk.relay.policy, ForecastPolicy)
    assert desk.relay.tracker.memory == PolicyMemory(BASE, 7.0, 9.0)
    desk.look(document(16, curves=planted(), switch_rule=rule, note="again"))
    assert desk.relay.tracker.memory == PolicyMemory(BASE, 7.0, 9.0)


def test_a_rule_with_parameters_that_it_cannot_take_is_refused() -> None:
    """What only the making of the policy can tell is told before anything is replaced."""
    desk = Desk()
    rule = {"name": "forecast", "parameters": {"horizon": -1.0}}
    desk.look(document(16, curves=planted(), switch_rule=rule))
    assert "horizon" in (desk.status.problem or "")
    assert desk.threshold == 16


def test_a_file_longer_than_any_calibration_is_not_read(tmp_path: Path) -> None:
    """The size of a file is bounded before it is in memory."""
    path = tmp_path / "long.json"
    with path.open("wb") as file:
        file.truncate(17 * 1024 * 1024)
    with pytest.raises(OSError, match="longer than"):
        read_file(path)


def test_an_unsure_verdict_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It is taken, as at the start, and said."""
    Desk().look(document(24, verdict="unsure"))
    assert any("unsure" in line for line in warnings(caplog))


def test_the_watch_outlives_what_it_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    """An exception of ours is logged and the file is looked at again."""
    desk = Desk()
    seen: list[int] = []

    def read() -> bytes:
        seen.append(1)
        if len(seen) == 1:
            raise RuntimeError("odd")
        return document(24)

    async def sleep(_seconds: float) -> None:
        if len(seen) == 2:
            raise asyncio.CancelledError

    watch = CalibrationWatch(desk.relay, desk.state, desk.pair, read, sleep=sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch.run())
    assert "odd" in caplog.text
    assert desk.threshold == 24


# ---------------------------------------------------------------------- the servers


def test_servers_that_are_those_match() -> None:
    """Before a look nothing is known; then it is 1, and nothing is said."""
    desk = Desk(document(16, fingerprint=FACTS))
    assert "calibration_matches" not in desk.metrics()
    assert desk.status.matches is None
    desk.see(info(TOPK1), info(PLAIN))
    assert desk.metrics()["calibration_matches"] == 1
    assert desk.status.matches is True
    assert desk.events == []


def test_another_flag_is_a_warning_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    """The line stays in force; log, status and metric say what differs, and when it is over."""
    desk = Desk(document(16, fingerprint=FACTS))
    for _ in range(2):
        desk.see(info(TOPK1) | {"speculative_eagle_topk": 4}, info(PLAIN))
    said = "speculative.speculative_eagle_topk: calibrated 1, live 4"
    assert desk.status.mismatches == [said]
    assert desk.status.advice == f"recalibrate: {said}"
    assert desk.metrics()["calibration_matches"] == 0
    assert desk.metrics()["calibration_trusted"] == 1
    assert desk.threshold == 16
    assert len(warnings(caplog)) == 1
    desk.see(info(TOPK1), info(PLAIN))
    assert desk.status.matches is True
    assert desk.status.advice is None
    assert len(warnings(caplog)) == 1


def test_a_new_file_of_another_pair_is_taken_and_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What differs is said of each file, the same as before or not."""
    desk = Desk(document(16, fingerprint=FACTS))
    desk.see(info(TOPK1), info(PLAIN))
    for threshold in (24, 25):
        desk.look(document(threshold, fingerprint=FACTS | {"engine": "sglang 0.5.9"}))
        assert desk.threshold == threshold
        assert desk.status.matches is False
    said = [line for line in warnings(caplog) if "measured on another pair" in line]
    assert len(said) == 2


def test_the_right_file_ends_an_alarm() -> None:
    """The servers came first, then the calibration of their model: it is in force at once."""
    desk = Desk(document(16, fingerprint=FACTS))
    other = {"model_path": "/models/other", "served_model_name": "other"}
    desk.see(info(TOPK1) | other, info(PLAIN) | other)
    assert desk.status.alarm is not None
    facts = fingerprint(SPEC, info(TOPK1) | other) | fingerprint(BASE, info(PLAIN) | other)
    desk.look(document(24, fingerprint=facts))
    assert (desk.threshold, desk.status.matches) == (24, True)
    assert desk.status.alarm is None


def test_another_model_is_not_trusted_and_serving_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Everything goes to the baseline until the servers are the calibrated ones again."""
    desk = Desk(document(16, fingerprint=FACTS))
    other = {"model_path": "/models/other", "served_model_name": "other"}
    desk.see(info(TOPK1) | other, info(PLAIN) | other)
    policy = desk.relay.policy
    assert isinstance(policy, FixedPolicy)
    assert policy.role is BASE
    assert "/models/other" in (desk.status.alarm or "")
    assert desk.metrics()["calibration_trusted"] == 0
    assert [r.levelname for r in caplog.records if r.levelno >= logging.WARNING] == ["ERROR"]
    desk.see(info(TOPK1), info(PLAIN))
    assert (desk.threshold, desk.status.alarm) == (16, None)


def test_swapped_servers_leave_everything_to_the_one_that_does_not_speculate() -> None:
    """Which is the one given as speculative."""
    desk = Desk(document(16, fingerprint=FACTS))
    desk.see(info(PLAIN), info(TOPK1))
    policy = desk.relay.policy
    assert isinstance(policy, FixedPolicy)
    assert policy.role is SPEC
    assert "in each other's place" in (desk.status.alarm or "")


def test_an_operators_policy_is_not_touched_by_an_alarm() -> None:
    """The operator has decided; the name frontier brings back what is safe."""
    desk = Desk(document(16, fingerprint=FACTS))
    desk.relay.policy = own = FixedPolicy(SPEC)
    desk.see(info(TOPK1) | {"model_path": "/m/x", "served_model_name": "x"}, info(PLAIN))
    assert desk.relay.policy is own
    assert isinstance(desk.relay.configured, FixedPolicy)


def test_a_new_file_of_another_model_is_refused_until_the_servers_are_it() -> None:
    """The file comes first, then the servers are restarted: it is judged again, without a touch."""
    desk = Desk(document(16, fingerprint=FACTS))
    desk.see(info(TOPK1), info(PLAIN))
    other = {"model_path": "/models/other", "served_model_name": "other"}
    facts = fingerprint(SPEC, info(TOPK1) | other) | fingerprint(BASE, info(PLAIN) | other)
    desk.look(document(24, fingerprint=facts))
    desk.look()
    assert "/models/other" in (desk.status.problem or "")
    assert desk.metrics()['calibration_loads_total{result="refused"}'] == 1
    assert (desk.threshold, desk.status.alarm) == (16, None)
    desk.see(info(TOPK1) | other, info(PLAIN) | other)
    assert (desk.threshold, desk.status.problem, desk.status.alarm) == (24, None, None)


def test_the_start_is_refused_for_another_model() -> None:
    """Servers that are up are judged before anything is served, those that are not later."""
    desk = Desk(document(16, fingerprint=FACTS))
    desk.watch.vet()
    desk.pair.fingerprints = {
        BASE: fingerprint(BASE, {"model_path": "/models/other", "served_model_name": "other"})
    }
    with pytest.raises(CalibrationError, match=r"calibration c\.json: it is of the model"):
        desk.watch.vet()


# ---------------------------------------------------------------------- the traffic


def test_drift_is_said_once_and_advises() -> None:
    """Requests at half the speed of the curve: a metric, one warning, recalibrate."""
    desk = Desk(document(16, curves=planted(accept=None)))
    assert desk.state.drift is not None
    for _ in range(ENOUGH):
        desk.state.drift.observe(BASE, 3, 3, 100, 100 / 50.0)  # the curve says 100 tokens/s
    desk.look()
    desk.look()
    assert desk.metrics()['calibration_drift_ratio{backend="baseline"}'] == pytest.approx(0.5)
    assert 'calibration_drift_ratio{backend="speculative"}' not in desk.metrics()
    assert desk.status.drift == {BASE: 0.5}
    assert (desk.status.advice or "").startswith("recalibrate: requests on the baseline server")
    assert len(desk.events) == 1
    desk.look(document(16, curves=planted(accept=None), note="measured again"))
    assert desk.status.drift == {}


def test_the_line_follows_the_accept_length_and_comes_back() -> None:
    """2.8 calibrated, 1.6 live, 2.8 again: both lines are exported, and so is the ratio."""
    desk = Desk(document(16, curves=planted()))
    assert "accept_length_ratio" not in desk.metrics()
    desk.for_seconds(60, 2.8)
    assert desk.threshold == 16
    desk.for_seconds(240, 1.6)
    assert 4 <= desk.threshold <= 5
    assert desk.relay.frontier == Frontier.total(16)
    found = desk.metrics()
    assert found["threshold_calibrated"] == 16
    assert found["accept_length_ratio"] == pytest.approx(1.6 / 2.8, rel=0.01)
    item = desk.status
    assert (item.threshold, item.live_threshold) == (16, desk.threshold)
    assert (item.accept_length, item.accept_length_calibrated) == (1.6, 2.8)
    desk.for_seconds(240, 2.8)
    assert desk.threshold == 16
    assert all("the line follows the accept length" in each for each in desk.events)


def test_without_accept_lengths_or_switched_off_nothing_follows() -> None:
    """No accept length on the curve, or the setting: the line is the calibrated one."""
    for desk in (
        Desk(document(16, curves=planted(accept=None))),
        Desk(document(16, curves=planted()), acceptance_aware="off"),
        Desk(document(16)),
    ):
        desk.for_seconds(200, 1.4)
        assert desk.threshold == 16
        assert "accept_length_ratio" not in desk.metrics()


def test_a_new_file_starts_at_the_ratio_of_what_was_heard() -> None:
    """The smoothed accept length outlives the file it was compared with."""
    desk = Desk(document(16, curves=planted()))
    desk.for_seconds(300, 1.6)
    desk.look(document(16, curves=planted(accept=1.6)))
    assert desk.threshold == 16
    desk.look(document(16, curves=planted(accept=2.8), note="again"))
    assert desk.threshold < 6


def test_a_rule_by_curves_is_made_anew_but_seldom() -> None:
    """Its tables move with the accept length, at most every half minute."""
    rule = {"name": "join-speed", "parameters": {}}
    desk = Desk(document(16, curves=planted(), switch_rule=rule))
    made = [desk.relay.policy]
    desk.accept = 1.4
    for _ in range(60):
        desk.look()
        if desk.relay.policy is not made[-1]:
            made.append(desk.relay.policy)
    assert 2 <= len(made) - 1 <= 4
    assert policy_name(made[-1]) == "join-speed"
    assert desk.state.ratio < 0.6
    assert desk.status.live_threshold is None


def test_an_accept_length_beyond_the_bound_advises() -> None:
    """What is not followed any more is said."""
    desk = Desk(document(16, curves=planted()), acceptance_bound=1.2)
    desk.for_seconds(200, 1.4)
    assert desk.state.ratio == pytest.approx(1 / 1.2)
    assert "accept length" in (desk.status.advice or "")


def test_curves_that_cannot_be_compared_are_for_a_reader() -> None:
    """A calibration whose curves have no level in common is a line and no more."""
    bad = json.loads(document(16, curves=planted()))
    bad["curves"]["baseline"]["points"] = [{"concurrency": 900, "tokens_per_second": 5}]
    desk = Desk(json.dumps(bad).encode())
    assert (desk.state.drift, desk.state.live) == (None, None)
    desk.for_seconds(100, 1.4)
    assert desk.threshold == 16


@pytest.mark.parametrize(
    ("created", "age"),
    [
        ("2027-01-15T08:00:00+00:00", 0.0),
        ("2027-01-15T07:59:00Z", 60.0),
        ("2027-01-15T07:00:00", 3600.0),
        ("last week", None),
        (None, None),
    ],
)
def test_the_age_of_a_calibration(created: str | None, age: float | None) -> None:
    """Seconds since it was made; unknown where it does not say when in a form that can be read."""
    fields: dict[str, Any] = {} if created is None else {"created": created}
    assert Desk(document(16, **fields)).status.age == age
