"""`crossover doctor` on simulated servers over real HTTP, with faults planted into them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from loadtest.engine import EngineConfig, RunningEngine, running_engine
from router.__main__ import app
from router.doctor import CANARY_TOKENS
from router.load import Role
from tests.engines import looped
from tests.ports import free_port
from tests.scripted_backend import Call, response, scripted_backend
from tests.test_engine_cli import engine as engine_process

ROOT = Path(__file__).resolve().parent.parent
SOUND: dict[str, Any] = {"max_running_requests": 256, "time_scale": 0.002}


@pytest.fixture(autouse=True)
def _no_outer_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"PATH": "/usr/bin:/bin", "COLUMNS": "120", "TERM": "dumb"})


@contextlib.asynccontextmanager
async def running_pair(
    spec: dict[str, Any] | None = None, base: dict[str, Any] | None = None
) -> AsyncIterator[tuple[RunningEngine, RunningEngine]]:
    """Two simulated servers that make a sound pair, but for these settings."""
    ours = EngineConfig.quick(Role.SPECULATIVE, **SOUND | (spec or {}))
    theirs = EngineConfig.quick(Role.BASELINE, **SOUND | (base or {}))
    async with running_engine(ours) as speculative, running_engine(theirs) as baseline:
        yield speculative, baseline


async def doctor(speculative: str, baseline: str, *flags: str) -> Result:
    """The command, in a thread of its own: it has its own event loop."""
    arguments = ["doctor", "--speculative", speculative, "--baseline", baseline, *flags]
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


def spoiled(result: Result) -> set[str]:
    """The rules that spoil a calibration, from the JSON."""
    found = json.loads(result.stdout)["findings"]
    return {each["rule"] for each in found if each["severity"] == "spoils"}


def warned(result: Result) -> set[str]:
    """The rules that warn, without those that the sound pair has already."""
    found = json.loads(result.stdout)["findings"]
    rules = {each["rule"] for each in found if each["severity"] == "warning"}
    return rules - {"random-weights", "zombies"}


@looped
async def test_a_sound_pair() -> None:
    """A sound pair gives 0, in the table and in JSON, and each server had one canary."""
    async with running_pair() as (spec, base):
        result = await doctor(spec.url, base.url)
        assert result.exit_code == 0
        assert "Sound: nothing spoils a calibration of this pair." in result.stdout
        assert "EAGLE3, steps 3, topk 1" in result.stdout
        assert "Not judged, because a server does not say: spec-v2-env" in result.stdout
        for each in (spec, base):
            posts = [seen for seen in each.server.seen if seen.method == "POST"]
            (canary,) = posts
            assert canary.path == "/generate"
            assert json.loads(canary.body)["sampling_params"]["max_new_tokens"] == CANARY_TOKENS
        result = await doctor(spec.url, base.url, "--json")
        assert result.exit_code == 0
        found = json.loads(result.stdout)
        assert found["sound"] is True
        assert found["speculative"]["speculates"] is True
        assert found["speculative"]["accept_length"] == pytest.approx(2.0, abs=0.1)
        assert found["baseline"]["canary_verify"] == 0
        assert (spoiled(result), warned(result)) == (set(), set())
        assert {each["rule"] for each in found["unjudged"]} == {
            "spec-v2-env",
            "simulated-acceptance",
        }


FAULTS: list[tuple[dict[str, Any], dict[str, Any], set[str], set[str]]] = [
    (
        {"version": "0.5.12", "topk": 4},
        {"version": "0.5.12"},
        {"topk-old", "overlap-off", "overlap"},
        set(),
    ),
    ({"version": "0.5.12"}, {"version": "0.5.12"}, set(), set()),
    ({"version": "0.5.23"}, {"version": "0.5.23"}, set(), set()),
    ({"topk": 4}, {}, set(), {"topk-tree"}),
    ({"accept_length": 1.0}, {}, {"accept-length"}, set()),
    ({"accept_length": 1.2}, {}, set(), {"accept-length"}),
    ({"max_running_requests": 48}, {}, {"running-cap"}, set()),
    ({"context_length": 4096}, {}, {"context-length"}, set()),
    ({"metrics": False}, {}, set(), {"metrics-off"}),
    ({"role": Role.BASELINE}, {}, {"speculation-off"}, set()),
    ({}, {"role": Role.SPECULATIVE}, {"baseline-speculates"}, set()),
    ({"version": "0.5.23"}, {}, {"version"}, set()),
    ({"model": "other"}, {}, set(), {"served-name"}),
]


@pytest.mark.parametrize(("spec", "base", "spoils", "warns"), FAULTS)
@looped
async def test_planted_faults(
    spec: dict[str, Any], base: dict[str, Any], spoils: set[str], warns: set[str]
) -> None:
    """Each planted fault is found by its rules and by no other, and decides the exit code."""
    ours = EngineConfig.quick(**{"role": Role.SPECULATIVE} | SOUND | spec)
    theirs = EngineConfig.quick(**{"role": Role.BASELINE} | SOUND | base)
    async with running_engine(ours) as speculative, running_engine(theirs) as baseline:
        result = await doctor(speculative.url, baseline.url, "--json")
        assert (spoiled(result), warned(result)) == (spoils, warns)
        assert result.exit_code == (1 if spoils else 0)
        assert json.loads(result.stdout)["sound"] is not bool(spoils)
        table = await doctor(speculative.url, baseline.url)
        assert table.exit_code == result.exit_code
        for name in spoils | warns:
            assert name in table.stdout
        if spoils:
            assert "Do not calibrate this pair" in table.stdout


def test_the_first_pairs_trap_through_the_command_lines() -> None:
    """Servers and doctor as processes: topk 4 on 0.5.12 is found, explained and exits with 1."""
    old = ["--sglang-version", "0.5.12", "--time-scale", "0.01", "--max-running-requests", "256"]
    with (
        engine_process("--role", "speculative", "--topk", "4", *old) as (_, spec),
        engine_process("--role", "baseline", *old) as (_, base),
    ):
        command = [sys.executable, "-m", "router", "doctor"]
        command += ["--speculative", spec, "--baseline", base]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == ""
    assert "EAGLE3 with disable_overlap_schedule true" in result.stdout
    assert "speculative_eagle_topk 4 on 0.5.12" in result.stdout
    assert "-> --speculative-eagle-topk 1" in result.stdout


@looped
async def test_the_threshold_is_looked_at(tmp_path: Path) -> None:
    """A threshold above the cap is a finding, from a flag and from a file that serve would use."""
    async with running_pair({"max_running_requests": 100}, {"max_running_requests": 100}) as pair:
        spec, base = (each.url for each in pair)
        result = await doctor(spec, base, "--json", "--threshold", "120")
        assert warned(result) == {"cap-threshold"}
        assert json.loads(result.stdout)["threshold"] == 120
        config = tmp_path / "c.toml"
        config.write_text(f'speculative = "{spec}"\nbaseline = "{base}/v1"\nthreshold = "always"\n')
        arguments = ["doctor", "--config", str(config), "--json"]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert (result.exit_code, warned(result)) == (0, set())
        assert json.loads(result.stdout)["threshold"] == "always"


@looped
async def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's key is used and never shown; without it the doctor says what to give."""
    async with running_pair({"api_key": "sk-spec"}) as (spec, base):
        result = await doctor(spec.url, base.url)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert "refuses a request without a key (status 401)" in result.stderr
        assert "CROSSOVER_SPECULATIVE_API_KEY" in result.stderr
        monkeypatch.setenv("CROSSOVER_SPECULATIVE_API_KEY", "sk-spec")
        result = await doctor(spec.url, base.url, "--json")
        assert (result.exit_code, warned(result)) == (0, {"api-key"})
        assert "sk-spec" not in result.stdout
        result = await doctor(spec.url, base.url, "--speculative-api-key", "sk-wrong")
        assert result.exit_code == 2
        assert "refuses this key" in result.stderr
        assert "sk-wrong" not in result.stderr


@looped
async def test_without_a_canary() -> None:
    """No request is sent, and what only a canary shows is not judged."""
    async with running_pair() as (spec, base):
        result = await doctor(spec.url, base.url, "--no-canary", "--json")
        assert result.exit_code == 0
        assert [seen for seen in spec.server.seen if seen.method == "POST"] == []
        unjudged = {each["rule"] for each in json.loads(result.stdout)["unjudged"]}
        assert {"verify-count", "prompt-tokens"} <= unjudged


def one_line(result: Result) -> str:
    """What it says when it could not look: one line, and nothing else."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("crossover doctor: ")
    return result.stderr


@looped
async def test_nobody_there() -> None:
    """A server that is not up is said in one line, with the exit code for it."""
    async with running_pair() as (spec, _):
        said = one_line(await doctor(spec.url, f"http://127.0.0.1:{free_port()}"))
        assert "cannot reach the baseline server" in said
        assert "is it up" in said


SERVER = b'{"model_path": "m", "version": "0.5.17"}'


@pytest.mark.parametrize(
    ("answers", "flags", "said"),
    [
        ({}, [], "has no /server_info (status 404): is it SGLang"),
        ({b"/server_info": response(b"x" * 9)}, ["--no-canary"], "not JSON. Give the address"),
        ({b"/server_info": response(b"{}")}, ["--no-canary"], "is not SGLang's"),
        (
            {b"/server_info": response(b'{"model_path": 1, "crossover": {}}')},
            ["--no-canary"],
            "it is a Crossover router, not a server",
        ),
        ({b"/server_info": response(b"{}", "500 No")}, [], "has no /server_info (status 500)"),
        ({b"/server_info": b""}, [], "cannot reach the speculative server"),
        (
            {b"/server_info": response(SERVER), b"/generate": response(b"{}", "503 Full")},
            [],
            "answered the canary with status 503: look in its log",
        ),
        (
            {b"/server_info": response(SERVER), b"/generate": b""},
            [],
            "did not answer the canary within 30 s (RemoteProtocolError): give it longer",
        ),
        (
            {b"/server_info": response(SERVER), b"/generate": b"-"},
            ["--timeout", "0.3"],
            "did not answer the canary within 0.3 s",
        ),
    ],
)
@looped
async def test_it_cannot_look(answers: dict[bytes, bytes], flags: list[str], said: str) -> None:
    """Whatever a server does instead of answering, one line says what and how to go on."""
    release = asyncio.Event()

    async def answer(call: Call) -> None:
        reply = answers.get(call.path)
        if reply == b"-":
            await release.wait()
        await call.send(response(b"{}", "404 Not Found") if reply is None else reply or b"")
        if reply == b"":
            call.close()

    async with scripted_backend(answer, probes=False) as odd, running_pair() as (_, base):
        assert said in one_line(await doctor(odd.url, base.url, *flags))
        release.set()


@looped
async def test_a_server_behind_a_gate_that_lets_only_v1_through() -> None:
    """Without /generate the canary goes to /v1/completions, and what it tells is used."""
    details = {"spec_tokens_details": {"spec_verify_ct": 20}}
    usage = {"prompt_tokens": 17, "completion_tokens": 64}
    answer_body = json.dumps({"usage": usage, "sglext": details}).encode()
    info = json.dumps({"model_path": "m", "speculative_algorithm": "EAGLE3"}).encode()

    async def answer(call: Call) -> None:
        found = {b"/get_server_info": info, b"/v1/completions": answer_body}.get(call.path)
        await call.send(response(b"{}", "404 Not Found") if found is None else response(found))

    async with scripted_backend(answer, probes=False) as gate, running_pair() as (_, base):
        found = json.loads((await doctor(gate.url, base.url, "--json")).stdout)
        assert found["speculative"]["accept_length"] == 3.2
        asked = [call for call in gate.calls if call.path == b"/v1/completions"]
        assert json.loads(asked[0].body)["return_spec_tokens_details"] is True


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "speculative (not set): required: give --speculative URL"),
        (["--speculative", "http://a:1", "--baseline", "http://a:1"], "they are the same server"),
        (["--config", "no-such-file.toml"], "No such file"),
        (
            ["--speculative", "http://a:1", "--baseline", "http://b:1", "--threshold", "-3"],
            "not a number of requests",
        ),
    ],
)
def test_a_refused_configuration(flags: list[str], said: str) -> None:
    """What serve would refuse of the two addresses is refused here, with the code for it."""
    result = CliRunner().invoke(app, ["doctor", *flags])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr
    assert all(line.startswith("crossover doctor: ") for line in result.stderr.splitlines())


def test_a_broken_calibration(tmp_path: Path) -> None:
    """A calibration that cannot be read is said in one line."""
    path = tmp_path / "calibration.json"
    path.write_text("{}")
    config = tmp_path / "c.toml"
    config.write_text(
        f'speculative = "http://a:1"\nbaseline = "http://b:1"\ncalibration = "{path}"\n'
    )
    assert "calibration" in one_line(CliRunner().invoke(app, ["doctor", "--config", str(config)]))
