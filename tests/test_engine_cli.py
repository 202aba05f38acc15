"""`loadtest engine` as a process, and what it says to bad values."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from loadtest.__main__ import main

ROOT = Path(__file__).parent.parent


@contextmanager
def engine(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A simulated server as a process of its own, and its URL."""
    command = [sys.executable, "-m", "loadtest", "engine", "--port", "0", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+:\d+", line)
            assert found, line or process.communicate()[1]
            yield process, found[0]
        finally:
            process.kill()


def test_process() -> None:
    """The process says what it is, serves, and ends by itself after SIGTERM."""
    arguments = ["--role", "speculative", "--time-scale", "0.1", "--shutdown-poll", "0.5"]
    with engine(*arguments, "--model", "mine", "--accept-length", "3") as (process, url):
        assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == "mine"
        body = {"prompt": "x", "max_tokens": 10}
        assert httpx.post(url + "/v1/completions", json=body).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.communicate()[1] == ""


def test_process_dies_of_a_bad_token() -> None:
    """A token id outside the vocabulary ends the process."""
    with engine("--role", "baseline", "--time-scale", "0.01") as (process, url):
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(url + "/v1/completions", json={"prompt": [9999999], "max_tokens": 2})
        assert process.wait(10) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role", "fast", "--port", "0"], "'fast' is not one of"),
        (["--role", "baseline"], "Missing option '--port'"),
        (["--role", "baseline", "--port", "70000"], "65535"),
        (
            ["--role", "baseline", "--port", "0", "--time-scale", "0"],
            "--time-scale must be above 0",
        ),
        (["--role", "baseline", "--port", "0", "--curve", "no.json"], "no.json cannot be read"),
        (
            ["--role", "baseline", "--port", "0", "--accept-length", "2"],
            "leave out --accept-length",
        ),
        (["--role", "baseline", "--port", "0", "--speed", "2"], "No such option: --speed"),
        (["--role", "baseline", "--port", "0", "--gpu-lock", "/"], "choose another --port"),
    ],
)
def test_bad_values(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad value is one line that says what and how to mend it, and exit code 2."""
    assert main(["engine", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("loadtest: ")
    assert message.lower() in said.lower()


def test_port_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """A port that is taken is said in one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["engine", "--role", "baseline", "--port", port]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}" in said


def test_curve_from_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep file does as a curve; one that is neither is refused in one line."""
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({"label": "x"}))
    assert main(["engine", "--role", "baseline", "--port", "0", "--curve", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "neither a curve nor a sweep" in said


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The help names the command."""
    assert main(["--help"]) == 0
    assert "engine" in capsys.readouterr().out
