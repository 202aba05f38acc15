"""The demo as a user runs it, only shorter; and that no process of it outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.__main__ import main
from loadtest.arrivals import Ramp
from loadtest.children import ChildError, Children
from loadtest.closed_loop import ClosedRun
from loadtest.demo_view import Board
from loadtest.record import RequestRecord, read_records
from router.load import Role
from tests.launching import wait_for

ROOT = Path(__file__).resolve().parent.parent
SHORT = ("--seconds-per-level", "0.15")
LIMIT_S = 45.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start demos whose temporary files are in this test's directory; end them with the test."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "loadtest", "demo", *arguments],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(tmp_path), "CROSSOVER_THRESHOLD": "never"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell may have us ignore Ctrl-C, which a child would inherit.
            preexec_fn=lambda: signal.signal(  # noqa: PLW1509 (touches no lock)
                signal.SIGINT, signal.default_int_handler
            ),
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def running(directory: Path) -> list[str]:
    """The commands of the simulated servers that share a GPU in this directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes()
        except OSError:
            continue
        if b"--gpu-lock\0" + bytes(directory) in command:
            found.append(command.replace(b"\0", b" ").decode())
    return found


def processes() -> dict[int, int]:
    """The parents of all processes that have not ended."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state != "Z":
            found[int(entry.parent.name)] = int(parent)
    return found


def read_until(demo: subprocess.Popen[str], last: str) -> str:
    """What a demo prints, up to the line that holds `last`, or all of it."""
    assert demo.stdout is not None
    lines = []
    for line in demo.stdout:
        lines.append(line)
        if last in line:
            break
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_demo_passes_and_keeps_running(start: Start, tmp_path: Path) -> None:
    """It shows its runs, tables and checks, then how to use what runs, and ends with 0."""
    records = tmp_path / "records.jsonl"
    demo = start(*SHORT, "--no-live", "--keep", "--records", str(records))
    text = read_until(demo, "stops everything")
    for name in ("the pair", "speculative only", "baseline only"):
        assert re.search(rf"✓ Run \d of 3: {name} +\d+ requests +\d+ tok/s  0 errors", text), text
    assert re.search(r"\n +\d\.\d s  level +\d+  n +\d+  m +\d+  side", text)
    assert re.search(r"\nspeculative  below_threshold +\d+  n \+ m < 12", text)
    assert re.search(r"\nbaseline     at_threshold +\d+  n \+ m >= 12", text)
    assert re.search(r"✓ \d+ requests, 0 errors\n", text)
    assert "✓ no count leaked" in text
    assert re.search(r"✓ the pair used both servers: \d+ requests to speculative, \d+", text)
    assert re.search(r"✓ the reasons of (\d+) of \1 decisions agree with their\s+numbers", text)
    assert "✓ every answer's headers are what /decisions holds of it" in text
    assert re.search(r"\nSpeed\. The pair is ", text)
    assert "simulated" in text
    assert "planted" in text
    assert "- speed not judged: levels of 0.15 s are too short for their answers" in text
    assert "PASSED: all 5 checks; speed was not judged" in text
    written = list(read_records(records))
    assert {one.run for one in written} == {"the pair", "speculative only", "baseline only"}
    assert all(one.ok and one.output_tokens for one in written)

    url = re.search(r'base_url="(http://127\.0\.0\.1:\d+/v1)"', text)
    assert url
    assert f"chat       {url[1]}" in text
    for path in ("metrics", "status", "decisions"):
        assert re.search(rf"{path} +http://127\.0\.0\.1:\d+/{path}\n", text)
    assert len(running(tmp_path)) == 2
    demo.send_signal(signal.SIGINT)
    assert demo.wait(LIMIT_S) == 0
    assert running(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_live_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal it draws a panel in place of lines, and ends by itself with 0."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    assert main(["demo", *SHORT]) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "Run 1 of 3: the pair ─" in text
    assert "s  level" not in text
    assert "PASSED: all 5 checks" in text
    assert max(map(len, text.splitlines())) <= 101  # a panel drawn over another begins with \r
    assert running(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_no_process_is_left(start: Start, tmp_path: Path, number: int, code: int) -> None:
    """However the demo is ended, both servers and the router end too."""
    demo = start("--no-live")
    assert "s  level" in read_until(demo, "s  level")
    engines = running(tmp_path)
    assert len(engines) == 2
    ports = re.findall(r"port \d+", "".join(engines))
    assert ports == ["port 0", "port 0"]
    children = {pid for pid, parent in processes().items() if parent == demo.pid}
    assert len(children) == 4  # a guard, too
    demo.send_signal(number)
    assert demo.wait(LIMIT_S) == code
    wait_for(lambda: not children & processes().keys())
    assert running(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_server_that_dies(start: Start, tmp_path: Path) -> None:
    """When one of its processes dies, the demo ends with 1, says which and leaves none."""
    demo = start("--no-live")
    assert "s  level" in read_until(demo, "s  level")
    for pid, parent in processes().items():
        if parent == demo.pid and b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    text = read_until(demo, "(the end)")
    assert demo.wait(LIMIT_S) == 1
    assert "✗ the router ended with exit code -9" in text
    assert "listening on port" in text  # its last words
    assert running(tmp_path) == []


def test_a_child_that_fails(tmp_path: Path) -> None:
    """A process that ends before it is ready is an error with its exit code and its last words."""
    with Children(tmp_path) as children:
        child = children.start("bad server", "loadtest", "engine", "--port", "0")
        with pytest.raises(ChildError, match=r"(?s)bad server ended with exit code 2.*--role"):
            child.wait_for("never said", LIMIT_S)
        with pytest.raises(ChildError, match="bad server ended"):
            children.check()


def test_a_child_that_is_slow(tmp_path: Path) -> None:
    """A process that does not get ready is an error, and is ended with the others."""
    with Children(tmp_path) as children:
        child = children.start("slow one", "http.server", "0")
        children.check()
        with pytest.raises(ChildError, match="slow one was not ready within 0 s"):
            child.wait_for("never said", 0)
    assert child.process.returncode is not None


def board(*, has_line: bool) -> Board:
    async def send(number: int, level: int) -> RequestRecord:
        raise AssertionError

    now = iter([0.0])
    run = ClosedRun(Ramp((1, 8), 2.0), send, lambda: next(now, 3.0))
    run.began = 0.0
    next(now)
    run.records = [
        RequestRecord(
            id="a", backend=Role.BASELINE, reason="at_threshold", started=2.0, first_chunk=2.0,
            ended=2.5, output_tokens=100,
        )
    ]  # fmt: skip
    made = Board("Run 1 of 3: the pair", run, has_line=has_line)
    made.status = {
        "backends": [
            {"role": "speculative", "in_flight": 2},
            {"role": "baseline", "in_flight": 5},
        ],
        "policy": {"side": "baseline"},
    }
    return made


def test_the_live_panel() -> None:
    """The panel shows load, in-flight, side, speed, decisions and errors within 100 columns."""
    console = Console(file=StringIO(), width=100)
    console.print(board(has_line=True).panel())
    output = console.file
    assert isinstance(output, StringIO)
    text = output.getvalue()
    assert max(map(len, text.splitlines())) == 100
    for part in (
        "Run 1 of 3: the pair",
        "▂█  8 in flight wanted",
        "speculative   2 ██ ",
        "baseline      5 █████ ",
        "in all        7 threshold 12: new requests go to baseline",
        "50 tok/s over the last 2 s",
        "baseline      1 at_threshold 1",
        "errors      0",
        "3.0 of 4.0 s",
    ):
        assert part in text, text


def test_the_line() -> None:
    """Without a terminal the same is one line; a policy without a line has no side."""
    assert board(has_line=True).line() == (
        "    3.0 s  level  8  n  2  m  5  side baseline       50 tok/s  errors 0  at_threshold 1"
    )
    assert "side fixed" in board(has_line=False).line()
