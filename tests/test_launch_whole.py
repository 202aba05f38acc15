"""`crossover launch` as a process, on two simulated servers: served, killed, stopped, no orphans."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import uuid
from pathlib import Path

import httpx
import pytest

from tests.launching import Launcher, launcher, processes, wait_for

LONG = {"model": "m", "prompt": "count", "max_tokens": 2000, "ignore_eos": True, "stream": True}


@pytest.fixture
def mark() -> str:
    """A text that is in the environment of every process of one launch, and of no other."""
    return f"launch-{uuid.uuid4()}"


def ask(up: Launcher) -> str:
    """The backend that answered one small request; it must answer."""
    body = {"model": "m", "prompt": "hello", "max_tokens": 2}
    answer = httpx.post(f"{up.url}/v1/completions", json=body, timeout=20, trust_env=False)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 2
    return answer.headers["x-crossover-backend"]


def engine_of(mark: str, role: str) -> int:
    """The process id of a simulated server."""
    wanted = f"\0loadtest\0engine\0--role\0{role}\0".encode()
    (pid,) = [
        pid
        for pid in processes(mark)
        if wanted in (line := Path(f"/proc/{pid}/cmdline").read_bytes())
        and b"launch_keeper" not in line
    ]
    return pid


@pytest.mark.slow
def test_a_whole_life(mark: str) -> None:
    """A pair is served, survives the loss of a server, and on SIGTERM lets a stream finish."""
    with launcher("--threshold", "8", marker=mark) as up:
        up.wait("| ready after")
        up.wait("doctor: nothing spoils a calibration of this pair")
        assert ask(up) == "speculative"
        everything = len(processes(mark))
        assert everything == 7  # the launcher, three keepers and what they keep

        os.kill(engine_of(mark, "speculative"), signal.SIGKILL)
        up.wait("the speculative server ended (killed by SIGKILL): starting it again in 1 s")
        assert ask(up) == "baseline"
        up.wait("the speculative server is ready again")
        wait_for(lambda: ask(up) == "speculative")
        assert len(processes(mark)) == everything

        with httpx.stream(
            "POST", f"{up.url}/v1/completions", json=LONG, timeout=20, trust_env=False
        ) as stream:
            chunks = stream.iter_text()
            text = next(chunks)
            up.process.send_signal(signal.SIGTERM)
            up.wait("stopping: the router drains, then the servers end")
            assert "[DONE]" not in text
            text += "".join(chunks)
        assert text.endswith("data: [DONE]\n\n")
        assert up.process.wait(20) == 0
        assert processes(mark) == []
        assert {line.split(" | ")[0].strip() for line in up.lines} == {
            "crossover", "speculative", "baseline", "router",
        }  # fmt: skip


@pytest.mark.slow
def test_interrupted(mark: str, tmp_path: Path) -> None:
    """SIGINT in a stream drains as SIGTERM does; a second one cuts it and ends at once, with 130."""
    config = tmp_path / "c.toml"
    config.write_text('threshold = "never"\n[launch]\nstop_timeout = "10m"\n')
    with launcher("--config", str(config), marker=mark) as up:
        up.wait("| ready after")
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream(
                "POST",
                f"{up.url}/v1/completions",
                json=LONG | {"max_tokens": 7000},
                timeout=20,
                trust_env=False,
            ) as stream,
        ):
            assert stream.headers["x-crossover-backend"] == "baseline"
            chunks = stream.iter_text()
            next(chunks)
            up.process.send_signal(signal.SIGINT)
            up.wait('"event": "draining"')
            next(chunks)
            up.process.send_signal(signal.SIGINT)
            assert "[DONE]" not in "".join(chunks)
        assert up.process.wait(5) == 130
        assert processes(mark) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_many_signals(mark: str, number: signal.Signals) -> None:
    """Whoever goes on asking gets the end that the second signal made: its code, and nothing left."""
    with launcher("--threshold", "8", marker=mark) as up:
        up.wait("| ready after")
        while up.process.poll() is None:
            up.process.send_signal(number)
            time.sleep(0.005)
        assert up.process.returncode == 130
        assert up.lines[-1] == "crossover   | stopped"
        assert processes(mark) == []


@pytest.mark.slow
def test_a_launcher_that_is_killed(mark: str) -> None:
    """SIGKILL of the launcher takes everything along."""
    with launcher("--threshold", "8", marker=mark) as up:
        up.wait("| ready after")
        assert len(processes(mark)) == 7
        up.process.kill()
        up.process.wait()
        wait_for(lambda: not processes(mark), 10.0)


@pytest.mark.slow
def test_a_keeper_that_is_killed(mark: str) -> None:
    """When a keeper is lost, what it kept is ended too, also behind a shell that does not exec."""
    engine = (
        f"{sys.executable} -m loadtest engine --role {{role}} --port {{port}} --time-scale 0.05"
    )
    wrapper = f"sh -c '{engine} --health-seconds 0 & wait'"
    with launcher("--threshold", "8", "--server-command", wrapper, marker=mark) as up:
        up.wait("| ready after")
        engine_pid = engine_of(mark, "baseline")
        shell = parent_of(engine_pid)
        os.kill(parent_of(shell), signal.SIGKILL)
        up.wait("the baseline server ended (killed by SIGKILL)")
        wait_for(lambda: engine_pid not in processes(mark))
        up.wait("the baseline server is ready again")
        assert len(processes(mark)) == 9  # a shell more for each server
        up.process.terminate()
        assert up.process.wait(20) == 0
        assert processes(mark) == []


def parent_of(pid: int) -> int:
    """The parent of a process."""
    found = re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1])
