"""What to do when something is wrong: each finding of `/status`, and the silence when all is well."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from router.admin import create_admin_app
from router.breaker import Verdict
from router.calibrated import read_terms
from router.calibration_state import CalibrationState
from router.curves import Curve, Point
from router.doctor_findings import Finding, Group, Severity
from router.fingerprint import Judgement, Mismatch
from router.load import ROLES, PolicyMemory, Role
from router.pair_watch import PairState
from router.policies import make_policy
from router.policy import Decision, FixedPolicy, FrontierPolicy, Reason
from router.status_calibration import POINTS, downsampled
from router.status_live import Live
from router.vitals import Answer, Probe
from tests.calibrations import document, planted
from tests.fake_relay import BASELINE, SPECULATIVE, START, UNIX, FakeRelay, make_settings

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
FLAGS = f"--speculative {SPECULATIVE} --baseline {BASELINE}"


class Watched:
    """A relay whose pair is well, until a test harms it."""

    def __init__(self, **settings: Any) -> None:
        self.relay = FakeRelay(make_settings(**settings))
        self.relay.make_ready()
        for role in ROLES:
            self.relay.report(role, 0, max_running=48)
        self.pair = PairState()
        self.pair.speculation = self.pair.parity = True
        self.pair.checked_at = START
        self.live = Live(self.relay)

    def calibrate(self, document: bytes) -> CalibrationState:
        terms = read_terms(document, self.relay.settings)
        state = CalibrationState("cal.json", document, terms, wall=lambda: UNIX)
        self.relay.calibration = state
        return state

    def status(self) -> dict[str, Any]:
        app = create_admin_app(self.relay, pair=self.pair, live=self.live)

        async def get() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                return await client.get("/status")

        found: dict[str, Any] = asyncio.run(get()).json()
        return found

    def found(self) -> list[tuple[str, str, str | None]]:
        return [(f["code"], f["severity"], f["backend"]) for f in self.status()["findings"]]


def test_a_pair_that_is_well_has_no_findings() -> None:
    """Nothing is made up: the list is empty."""
    assert Watched().found() == []
    well = Watched()
    well.calibrate(document(16, curves=planted(16.0)))
    assert well.found() == []


def down(watched: Watched) -> None:
    for _ in range(3):
        watched.relay.health.probed(SPEC, Probe.READY, Answer.UNREACHABLE, START, "gone")


def fail(watched: Watched) -> None:
    for _ in range(5):
        watched.relay.health.record(SPEC, Verdict.FAILURE, START)


def drain(watched: Watched) -> None:
    watched.relay.health.drain(BASE, drained=True, now=START)


def drain_both(watched: Watched) -> None:
    for role in ROLES:
        watched.relay.health.drain(role, drained=True, now=START)


def grow_old(watched: Watched) -> None:
    watched.relay.now += 10


def queue(watched: Watched) -> None:
    watched.relay.report(SPEC, 48, 3)
    watched.relay.tracker.speculative.foreign = 0


def fill(watched: Watched) -> None:
    watched.relay.report(BASE, 0, token_usage=0.97)


def refuse(watched: Watched) -> None:
    watched.relay.tracker.refused(BASE, START + 1)


def share(watched: Watched) -> None:
    watched.relay.report(BASE, 4)


def wait(watched: Watched) -> None:
    watched.relay.waiting = 7


def shut_down(watched: Watched) -> None:
    watched.relay.draining = True


def switch(watched: Watched) -> None:
    watched.relay.policy = make_policy("round-robin")


def lose(watched: Watched) -> None:
    watched.pair.speculation = False
    watched.pair.findings = (
        Finding(
            "spec-off", Group.SPECULATION, Severity.SPOILS, SPEC, "no draft", "it is slow", "--x"
        ),
        Finding("old", Group.SETUP, Severity.NOTE, None, "a note", "why", "nothing"),
    )


def lost_before(watched: Watched) -> None:
    watched.pair.speculation = None
    watched.pair.alarm = "spec-off: no draft"


def unasked(watched: Watched) -> None:
    watched.pair.unknown = ("baseline: status 401",)


def unsure(watched: Watched) -> None:
    watched.calibrate(document(16, curves=planted(16.0), verdict="unsure"))


def another_pair(watched: Watched) -> None:
    watched.calibrate(document(16)).judgement = Judgement(False, (), "it is of the model x")


def drifted(watched: Watched) -> None:
    state = watched.calibrate(document(16))
    state.judgement = Judgement(False, (Mismatch("gpu", "H200", "H100"),))


def bad_file(watched: Watched) -> None:
    watched.calibrate(document(16)).refuse("schema: 'x' is not ours")


@pytest.mark.parametrize(
    ("harm", "code", "severity", "backend", "mend"),
    [
        (down, "down", "wrong", SPEC, f"curl {SPECULATIVE}/health"),
        (fail, "breaker", "wrong", SPEC, f"curl {SPECULATIVE}/v1/models"),
        (drain, "drained", "warning", BASE, "POST /backends/baseline/enable"),
        (drain_both, "no_backend", "wrong", None, "bring one back"),
        (grow_old, "telemetry", "warning", SPEC, "--enable-metrics"),
        (queue, "queued", "warning", SPEC, "--max-running-requests"),
        (fill, "kv_cache", "warning", BASE, "--mem-fraction-static"),
        (refuse, "contended", "warning", BASE, "--max-queued-requests"),
        (share, "foreign", "note", BASE, "all clients through this router"),
        (wait, "queue", "warning", None, "--max-in-flight"),
        (shut_down, "draining", "warning", None, "elsewhere"),
        (switch, "policy", "note", None, '{"policy": "frontier"}'),
        (lose, "pair:spec-off", "wrong", SPEC, "--x"),
        (lost_before, "speculation", "wrong", SPEC, f"crossover doctor {FLAGS}"),
        (unasked, "unasked", "warning", None, "--backend-api-key"),
        (unsure, "unsure", "warning", None, "loadtest report cal.json"),
        (another_pair, "calibration_alarm", "wrong", None, f"loadtest calibrate {FLAGS} --out cal.json"),
        (drifted, "recalibrate", "warning", None, f"loadtest calibrate {FLAGS} --out cal.json"),
        (bad_file, "calibration_file", "wrong", None, f"loadtest calibrate {FLAGS} --out cal.json"),
    ],
)  # fmt: skip
def test_each_harm_is_found_with_its_mend(
    harm: Callable[[Watched], None], code: str, severity: str, backend: Role | None, mend: str
) -> None:
    """What is wrong is named once, with its backend and the command or flag that mends it."""
    watched = Watched()
    harm(watched)
    status = watched.status()
    assert status["findings"], "nothing was found"
    named = [each for each in status["findings"] if each["code"] == code]
    wanted = backend.value if backend is not None else None
    assert (named[0]["severity"], named[0]["backend"]) == (severity, wanted)
    assert mend in named[0]["mend"]
    assert "pair:old" not in json.dumps(status["findings"])


def test_the_worst_comes_first() -> None:
    """Wrong before warnings before notes."""
    watched = Watched()
    for harm in (share, drain, down):
        harm(watched)
    assert [severity for _, severity, _ in watched.found()] == ["wrong", "wrong", "warning", "note"]


def test_a_server_that_was_never_heard_is_a_note() -> None:
    """A cold start is no fault, and says what it waits for."""
    watched = Watched()
    watched.relay = FakeRelay()
    assert watched.found() == [
        ("unknown", "note", "speculative"),
        ("unknown", "note", "baseline"),
    ]


def test_a_rule_of_the_calibration_is_no_change_by_an_operator() -> None:
    """With a calibration's rule the policy has that rule's name, and nobody changed it."""
    watched = Watched()
    curves = [(1.0, 10.0), (64.0, 100.0)]
    watched.relay.policy = make_policy("join-speed", curves=(curves, curves))
    assert watched.found() == []


@pytest.mark.parametrize("role", ROLES)
def test_a_line_that_is_not_trusted_is_no_change_by_an_operator(role: Role) -> None:
    """The watch sends everything to the server that does not speculate, whichever that really is."""
    watched = Watched()
    another_pair(watched)
    watched.relay.policy = watched.relay.configured = FixedPolicy(role)
    (finding,) = watched.status()["findings"]
    assert finding["code"] == "calibration_alarm"
    assert "everything goes to the server that does not speculate" in finding["seen"]


def test_counts_by_reason_are_those_of_the_metrics() -> None:
    """Only what ever happened is listed."""
    watched = Watched()
    for _ in range(3):
        watched.relay.metrics.decided(SPEC, Reason.BELOW_THRESHOLD)
    watched.relay.metrics.decided(None, Reason.UNAVAILABLE)
    assert watched.status()["reasons"] == [
        {"backend": "speculative", "reason": "below_threshold", "count": 3},
        {"backend": None, "reason": "unavailable", "count": 1},
    ]


def test_the_path_is_in_unix_time() -> None:
    """Samples come oldest first, and the moment of the answer is told with them."""
    watched = Watched()
    watched.live.path.sample(START, 3, 1)
    watched.live.path.sample(START + 1, 4, 2)
    watched.relay.now += 2
    status = watched.status()
    assert status["path"] == [[UNIX, 3, 1], [UNIX + 1, 4, 2]]
    assert status["time"] == UNIX + 2


def test_the_curves_are_the_calibrations() -> None:
    """The points are the file's own, with the interval and the factor of the live accept length."""
    watched = Watched()
    watched.calibrate(document(16, curves=planted(16.0), interval=[12, "infinity"]))
    curves = watched.status()["calibration"]["curves"]
    assert curves["baseline"][:2] == [[1.0, 100.0], [2.0, 200.0]]
    assert curves["speculative"][0] == [1.0, 400.0]
    assert (curves["ratio"], curves["interval"]) == (1.0, [12.0, "infinity"])
    watched.calibrate(document(16))
    assert watched.status()["calibration"]["curves"] is None


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    """However many levels were swept, few points are sent, and none that cannot be drawn."""
    points = tuple(Point(float(n), 10.0 * n) for n in range(500, -1, -1))
    found = downsampled(Curve(points))
    assert len(found) == POINTS
    assert (found[0], found[-1]) == ((1.0, 10.0), (500.0, 5000.0))
    assert found == sorted(set(found))
    assert downsampled(Curve(())) == []


def test_a_decision_carries_no_memory_of_the_page() -> None:
    """Reading the status changes nothing that decides."""
    watched = Watched()
    memory = PolicyMemory(BASE, START)
    watched.relay.tracker.memory = memory
    before = watched.relay.policy
    watched.status()
    assert watched.relay.tracker.memory is memory
    assert watched.relay.policy is before
    assert isinstance(before, FrontierPolicy)
    decision = Decision(SPEC, Reason.BELOW_THRESHOLD, 0, 0, 8.0, PolicyMemory(), 8.0)
    watched.relay.decisions.add(START, "r", "generate", decision)
    assert watched.relay.decisions.added == 1
