"""What an operator is told agrees with what happened: refusals, overhead, settings, readiness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from router.__main__ import app
from router.breaker import Verdict
from router.config import load_settings
from router.health import PairHealth
from router.load import ROLES, LoadTracker, Role
from router.metrics import Outcome, Rejection
from router.vitals import Answer, Health, HealthState, Probe
from router.wiring import read_line
from tests.scripted_backend import scripted_backend
from tests.stack import run, running_router, until

PAIR = {"speculative": "http://127.0.0.1:1", "baseline": "http://127.0.0.1:2"}


def test_the_overhead_holds_the_decision() -> None:
    """A request on a reused connection has an overhead above zero, and below its whole time."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            for _ in range(3):
                await stack.chat()
            metrics = stack.relay.metrics
            assert metrics.overhead.count == 3
            assert 0 < metrics.overhead.sum < metrics.backends[Role.SPECULATIVE].total.sum

    run(work)


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({}, b"[]", 400, "invalid_body"),
        ({"x-crossover-backend": "foo"}, b"{}", 400, "invalid_backend"),
        ({"authorization": "Bearer sk-wrong"}, b"{}", 401, "invalid_api_key"),
    ],
)
def test_a_refusal_is_counted_logged_and_can_be_found(
    headers: dict[str, str], body: bytes, status: int, code: str
) -> None:
    """What we refuse ourselves has an id, a log line and one count of its reason."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url, allow_pinning=True, api_keys="sk-client") as stack,
        ):
            sent = {"authorization": "Bearer sk-client", "x-request-id": "mine", **headers}
            got = await stack.client.post("/v1/completions", content=body, headers=sent)
            assert (got.status_code, got.json()["error"]["code"]) == (status, code)
            assert got.headers["x-request-id"] == "mine"
            metrics = stack.relay.metrics
            assert metrics.rejections[Rejection(code)] == 1
            assert sum(metrics.rejections.values()) == 1
            assert metrics.requests[None, "completions", Outcome.REJECTED] == 1
            stack.relay.access_log.flush()
            await until(lambda: bool(stack.lines))
            line = json.loads(b"".join(stack.lines).splitlines()[0])
            assert (line["request_id"], line["status"], line["error"]) == ("mine", status, code)
            assert spec.calls == base.calls == []

    run(work)


def test_a_request_without_a_backend_is_counted_by_its_reason() -> None:
    """A 503 for want of a backend is one more of its reason, as every other refusal is."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            for role in ROLES:
                stack.relay.health.drain(role, drained=True, now=stack.relay.clock())
            assert (await stack.chat()).status_code == 503
            assert stack.relay.metrics.rejections[Rejection.NO_BACKEND] == 1

    run(work)


def calibration(path: Path, **fields: object) -> str:
    """A calibration file."""
    found = path / "calibration.json"
    document = {
        "schema": "crossover.calibration/1",
        "frontier": {"threshold": 32},
        "switch": {"band": 0.05, "dwell": 1},
        **fields,
    }
    found.write_text(json.dumps(document))
    return str(found)


def test_a_setting_wins_over_a_calibration(tmp_path: Path) -> None:
    """Band and dwell are the calibration's unless they are set; a scope beside it is refused."""
    given = {**PAIR, "calibration": calibration(tmp_path)}
    _, band, dwell = read_line(load_settings(given, environ={}))
    assert (band, dwell) == (0.05, 1.0)
    _, band, dwell = read_line(load_settings({**given, "band": 0.5}, environ={}))
    assert (band, dwell) == (None, 1.0)
    with pytest.raises(ValueError, match="the calibration says what its line compares"):
        load_settings({**given, "scope": "total"}, environ={})


def test_config_shows_what_a_calibration_puts_in_force(tmp_path: Path) -> None:
    """`crossover config` reads the calibration: its band is shown, a broken one is refused."""
    flags = [item for name, url in PAIR.items() for item in (f"--{name}", url)]
    shown = CliRunner().invoke(app, ["config", *flags, "--calibration", calibration(tmp_path)])
    assert shown.exit_code == 0
    assert "band = 0.05  # calibration\n" in shown.stdout
    broken = calibration(tmp_path, frontier="none")
    refused = CliRunner().invoke(app, ["config", *flags, "--calibration", broken])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("crossover: calibration ")


def test_nobody_there_outweighs_a_late_success() -> None:
    """Three refused connections take a backend down; three slow answers do not, after a success."""
    for answer, expected in ((Answer.UNREACHABLE, Health.DOWN), (Answer.MISS, Health.UP)):
        health = HealthState(down_after=3, life_window=5.0)
        health.observe(Probe.HEALTH, Answer.PASS, 0.0)
        health.lived(9.0)
        for now in (10.0, 11.0, 12.0):
            health.observe(Probe.HEALTH, answer, now)
        assert health.state is expected


def test_two_backends_that_keep_failing_are_not_ready() -> None:
    """With both breakers open requests are still tried, but the pair does not call itself ready."""
    pair = PairHealth(LoadTracker())
    for role in ROLES:
        pair.probed(role, Probe.HEALTH, Answer.PASS, 0.0, "status 200")
    assert pair.ready()
    for role in ROLES:
        for _ in range(5):
            pair.record(role, Verdict.FAILURE, 1.0)
    assert not pair.ready()
    assert all(pair.status(role).usable for role in ROLES)
    pair.refresh(7.0)  # half-open: a trial may go there
    assert pair.ready()
