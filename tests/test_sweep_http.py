"""`loadtest sweep` over real HTTP: two simulated servers, a kill, a resume, and bad values."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.engine import EngineConfig, RunningEngine, running_engine
from loadtest.record import read_records
from loadtest.sweep_cli import command_given
from loadtest.sweep_run import Options, run_sweep
from loadtest.sweep_schema import Pace, Plan, Sweep, decode_sweep
from router.load import Role
from tests.engines import looped
from tests.sweeps import BASE, SPEC, Notes

ROOT = Path(__file__).parent.parent
QUICK = Pace(warm_up_s=0.1, window_s=0.25, most_window_s=2.0, per_slot=1, poll_s=0.05)


@looped
async def test_two_servers_in_turn(tmp_path: Path) -> None:
    """A pair that is planted to cross at 12 is measured so: speculative ahead below, behind above."""
    plan = Plan(levels=(2, 24), passes=2)
    async with (
        # Slow enough for servers and client on one busy core.
        running_engine(EngineConfig.quick(SPEC, time_scale=0.5)) as spec,
        running_engine(EngineConfig.quick(BASE, time_scale=0.5)) as base,
    ):
        options = Options(
            targets=((SPEC, spec.url), (BASE, base.url)), out=tmp_path / "out", plan=plan,
            pace=QUICK, output_tokens=24, input_tokens=40,
        )  # fmt: skip
        found = await run_sweep(options, Notes())
        assert (spec.in_flight, base.in_flight) == (0, 0)
    speed = {(one.role, one.level): one.output_tok_s.value for one in found.levels}
    assert speed[SPEC, 2] > 1.15 * speed[BASE, 2]
    assert speed[SPEC, 24] < 0.85 * speed[BASE, 24]
    by_role = {one.role: one for one in found.levels if one.level == 24}
    assert by_role[SPEC].accept_length == pytest.approx(2.0, abs=0.25)
    assert by_role[BASE].accept_length is None
    assert by_role[SPEC].cap == 48
    assert (by_role[SPEC].running or 0) > 12
    assert all(one.errors == 0 for one in found.levels)
    assert all(p.input_tokens == pytest.approx(53, abs=1) for p in found.points)  # with a template
    assert all(p.output_tokens == pytest.approx(24) for p in found.points)
    written = decode_sweep((tmp_path / "out" / "sweep.json").read_bytes())
    assert written == found
    records = list(read_records(tmp_path / "out" / "records-speculative-2.jsonl"))
    assert {(r.run, r.level) for r in records} == {("speculative-2-2", 2), ("speculative-2-24", 24)}


class Engines:
    """Simulated servers in a thread of their own, for a sweep that is a process."""

    def __init__(self) -> None:
        self.running: dict[Role, RunningEngine] = {}
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with (
            running_engine(EngineConfig.quick(SPEC)) as spec,
            running_engine(EngineConfig.quick(BASE)) as base,
        ):
            self.running = {SPEC: spec, BASE: base}
            self._ready.set()
            await self._stop.wait()

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    def arguments(self, out: Path, *more: str) -> list[str]:
        found = ["sweep", "--out", str(out), "--output-tokens", "24", "--seconds", "0.25"]
        found += ["--warm-up", "0.1", "--per-slot", "1"]
        for role, engine in self.running.items():
            found += ["--url", engine.url, "--role", role.value]
        return [*found, *more]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    found = Engines()
    found.start()
    try:
        yield found
    finally:
        found.stop()


@contextmanager
def process(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "loadtest", *arguments],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as found:  # fmt: skip
        try:
            yield found
        finally:
            found.kill()


def swept(out: Path) -> Sweep | None:
    path = out / "sweep.json"
    return decode_sweep(path.read_bytes()) if path.exists() else None


def wait_for_points(out: Path, count: int) -> None:
    limit = time.monotonic() + 20
    while True:
        found = swept(out)
        if found is not None and len(found.points) >= count:
            return
        assert time.monotonic() < limit, f"not {count} points"
        time.sleep(0.01)


def test_killed_and_gone_on_with(tmp_path: Path, engines: Engines) -> None:
    """After SIGKILL within a level the same command measures what is left, and nothing twice."""
    arguments = engines.arguments(tmp_path, "--levels", "1,2,4", "--passes", "1")
    with process(arguments) as first:
        wait_for_points(tmp_path, 3)
        time.sleep(0.1)  # into the next level
        first.kill()
        first.wait(10)
    kept = swept(tmp_path)
    assert kept is not None
    assert 3 <= len(kept.points) < 6
    sent = {role: engine.server.requests["/v1/chat/completions", "POST"]
            for role, engine in engines.running.items()}  # fmt: skip
    with process(arguments) as second:
        output, errors = second.communicate(timeout=40)
    assert second.returncode == 0, errors
    found = swept(tmp_path)
    assert found is not None
    assert len(found.points) == 6
    done = {one.run for one in kept.points}
    assert [one for one in found.points if one.run in done] == list(kept.points)
    begun = [line.partition(":")[0] for line in errors.splitlines() if " of 6: " in line]
    assert begun == [f"{at} of 6" for at in range(len(kept.points) + 1, 7)]
    # Each level is there once, and what the servers saw after the kill is for the levels left.
    counts = {one.run: one.records for one in found.points}
    lines: dict[str, int] = {}
    for path in tmp_path.glob("records-*.jsonl"):
        for record in read_records(path):
            lines[record.run] = lines.get(record.run, 0) + 1
    assert lines == counts
    for role, engine in engines.running.items():
        left = sum(n for run, n in counts.items() if run.startswith(role.value) and run not in done)
        more = engine.server.requests["/v1/chat/completions", "POST"] - sent[role]
        assert (
            left <= more <= left + 12
        )  # with those that were cut when a level, or the first process, ended
    assert "Written to" in output


def test_ended_by_a_signal(tmp_path: Path, engines: Engines) -> None:
    """SIGTERM ends a sweep in order: its own exit code, one line, and no request left."""
    arguments = engines.arguments(tmp_path, "--levels", "1,2,4", "--passes", "3")
    with process(arguments) as running:
        wait_for_points(tmp_path, 1)
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=20)
    assert running.returncode == 143
    assert errors.splitlines()[-1] == "Stopped; the same command goes on from here."
    assert "Traceback" not in errors


def test_one_at_a_time(
    tmp_path: Path, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second sweep in the same directory is refused while the first is at work."""
    arguments = engines.arguments(tmp_path, "--levels", "1", "--passes", "9")
    with process(arguments):
        wait_for_points(tmp_path, 1)
        assert main(arguments) == 2
    assert "another sweep is at work in --out" in capsys.readouterr().err


def test_the_whole_command(
    tmp_path: Path, engines: Engines, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """A file's prompts, a trace, an open loop: exit code 0, table and notices on stdout, files."""
    trace = tmp_path / "t.csv"
    trace.write_text("ContextTokens,GeneratedTokens\n9,24\n8000,24\n", encoding="utf-8")
    prompts = tmp_path / "p.txt"
    prompts.write_text("one two\nthree\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["x", "sweep", "--url", "http://user:pw@host:1/v1"])
    out = tmp_path / "out"
    more = ["--rate", "40", "--passes", "1", "--prompts", str(prompts), "--repeat-prompts"]
    more += ["--trace", str(trace)]
    assert main(engines.arguments(out, *more)) == 0
    printed = capsys.readouterr()
    assert "2 of 2: " in printed.err
    for text in ("speculative", "baseline", "40/s", "repeated-prompts", "few-passes"):
        assert text in printed.out
    found = swept(out)
    assert found is not None
    assert found.command == "loadtest sweep --url http://host:1/v1"
    assert found.workload.prompts.startswith("p.txt (")
    assert (found.workload.trace or "").endswith(", without 1 too long for the context")
    summary = (out / "summary.txt").read_text(encoding="utf-8")
    assert "repeated-prompts (baseline, 40 requests a second, pass 1)" in summary


BAD: list[tuple[list[str], str]] = [
    (["--levels", "1,x"], "--levels are whole numbers from 1 up"),
    (["--levels", "0"], "--levels are whole numbers from 1 up"),
    (["--rate", "0"], "--rate is above 0"),
    (["--rate", "a"], "--rate is above 0"),
    (["--prompts", "/nowhere/p.txt"], "cannot be read: No such file"),
    (["--trace", "/nowhere/t.csv"], "cannot be read: No such file"),
    (["--input-tokens", "9000"], "the server has a context of 8192"),
    (["--role", "baseline"], "one --role for each --url"),
]


@pytest.mark.parametrize(("more", "words"), BAD)
def test_bad_values(
    tmp_path: Path,
    engines: Engines,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    words: str,
) -> None:
    """A bad value is exit code 2 and one line that says what and how to mend it."""
    assert main(engines.arguments(tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error


def test_bad_places(tmp_path: Path, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths for a file's prompts, a URL that is none and a directory that is a file are refused."""
    prompts = tmp_path / "p.txt"
    prompts.write_text("a\n", encoding="utf-8")
    out = ["--out", str(tmp_path / "out")]
    one = ["sweep", "--role", "baseline", "--url", engines.running[BASE].url]
    assert main([*one, *out, "--prompts", str(prompts), "--input-tokens", "9"]) == 2
    assert "leave out --input-tokens" in capsys.readouterr().err
    assert main(["sweep", "--role", "baseline", "--url", "host", *out]) == 2
    assert "looks like http://127.0.0.1:30000" in capsys.readouterr().err
    assert main([*one, "--out", str(prompts)]) == 2
    assert "cannot be used" in capsys.readouterr().err


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that does not answer is exit code 1 with its address."""
    arguments = ["sweep", "--url", "http://127.0.0.1:9", "--role", "baseline"]
    assert main([*arguments, "--out", str(tmp_path)]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_the_key_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key opens the server's doors and is in no file."""

    async def work() -> None:
        config = EngineConfig.quick(BASE, api_key="sk-secret")
        async with running_engine(config) as engine:
            arguments = [
                "sweep", "--url", engine.url, "--role", "baseline", "--out", str(tmp_path / "out"),
                "--levels", "1", "--passes", "1", "--seconds", "0.3", "--warm-up", "0",
                "--output-tokens", "16",
            ]  # fmt: skip
            environment = os.environ | {"LOADTEST_API_KEY": "sk-secret"}
            running = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "loadtest", *arguments, cwd=ROOT, env=environment,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            output, errors = await running.communicate()
            assert running.returncode == 0, errors
            assert b"sk-secret" not in output + errors

    asyncio.run(work())
    for path in (tmp_path / "out").iterdir():
        assert b"sk-secret" not in path.read_bytes()


def test_command_without_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in the file is as typed, but for users and passwords in URLs."""
    typed = ["/x/loadtest", "sweep", "--url", "https://a:b@h/v1", "--out", "my dir"]
    monkeypatch.setattr(sys, "argv", typed)
    assert command_given() == "loadtest sweep --url https://h/v1 --out 'my dir'"
