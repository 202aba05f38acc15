"""What `deploy/calibrations/measure.sh` runs: a load that changes, a core of its own, one table."""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.calibrations.changing import STEPS, arrivals, rates, speed
from deploy.calibrations.pin import family, listening, main
from deploy.calibrations.together import table
from loadtest.arms import read_trace_file

FOLDER = Path("deploy/calibrations")
KEPT = FOLDER / "h200-sim-acc2.0" / "calibration.json"
POINTS = [
    {"concurrency": 8.0, "tokens_per_second": 800.0},
    {"concurrency": 16.0, "tokens_per_second": 1200.0},
]


@pytest.mark.parametrize(
    ("level", "expected"), [(4, 400.0), (8, 800.0), (12, 1000.0), (16, 1200.0), (99, 1200.0)]
)
def test_speed_between_levels(level: float, expected: float) -> None:
    """In proportion below what was measured, linear in between, flat beyond."""
    assert speed(POINTS, level) == expected


def test_rates_below_and_above_the_line() -> None:
    """For the measured pair: a third of the line, and nine tenths of what it can at its last level."""
    low, high = rates(json.loads(KEPT.read_bytes()), 256)
    # Speculative at 62: between 6037 at 32 and 9014 at 64. The baseline is ahead at 192.
    assert low * 256 == pytest.approx(6037 + 2977 * 30 / 32, rel=0.03) or low == high / 2
    assert 0.85 * 12711 < high * 256 < 0.95 * 12864
    assert low < 0.8 * high


def test_a_changing_load_is_a_trace(tmp_path: Path) -> None:
    """The command's file is read as a trace; its rate steps, its answers have the asked mean."""
    out = tmp_path / "changing.csv"
    command = [sys.executable, str(FOLDER / "changing.py"), str(KEPT), str(out)]
    said = subprocess.run(
        [*command, "--output-tokens", "256", "--step", "5"], capture_output=True, text=True, check=True
    ).stdout  # fmt: skip
    assert "requests a second, 5 s each" in said
    rows = read_trace_file(out)
    low, high = rates(json.loads(KEPT.read_bytes()), 256)
    assert rows[-1].at == pytest.approx(5 * STEPS, rel=0.05)
    for at, rate in ((0, low), (1, high), (2, low)):
        count = sum(5 * at <= row.at + rows[0].at < 5 * at + 5 for row in rows)
        assert count == pytest.approx(5 * rate, rel=0.3)
    assert statistics.fmean(row.output for row in rows) == pytest.approx(256, rel=0.05)
    assert {row.prompt for row in rows} == {64}
    assert list(arrivals(1.0, 2.0, 5.0, 1, 9, 3)) == list(arrivals(1.0, 2.0, 5.0, 1, 9, 3))


LISTENER = """
import socket, threading, time
held = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(held.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.fixture
def listener() -> Iterator[tuple[int, int]]:
    """A process with two threads that listens: its pid and its port."""
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


def test_a_core_of_its_own(
    listener: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every thread of the process that listens is moved to that core, and back again by `all`."""
    pid, port = listener
    assert listening(port) == pid
    threads = set(family(pid))
    assert len(threads) == 2
    monkeypatch.setattr(os, "getppid", lambda: pid)  # and not whoever runs the tests
    before = os.sched_getaffinity(pid)
    core = min(before)
    moved: list[tuple[int, set[int]]] = []
    real = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, to: moved.append((who, set(to))))
    assert main([str(port), str(core)]) == 0
    assert {who for who, to in moved if to == {core}} == threads
    assert moved[-1] == (pid, set(range(os.cpu_count() or 1)) - {core} or {core})
    assert f"process {pid}, 2 threads on 1 cores" in capsys.readouterr().out
    monkeypatch.setattr(os, "sched_setaffinity", real)
    assert main([str(port), "all"]) == 0
    assert os.sched_getaffinity(pid) >= before


def test_no_such_process(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    assert main([str(port), "0"]) == 1
    assert capsys.readouterr().err == f"pin.py: no process here listens on port {port}\n"
    assert main(["8000"]) == 1
    assert "give a port, a core or `all`" in capsys.readouterr().err


def test_one_table_of_all_arms(tmp_path: Path) -> None:
    """Arm and load come from the folder's name, the lowest load first, with half intervals."""
    kept = json.loads((FOLDER / "h200-sim-acc2.0" / "compare" / "compare.json").read_bytes())
    outcome = next(each for each in kept["outcomes"] if each["policy"] == "baseline")
    for name in ("two-baseline.least-in-flight-192", "pair.frontier-62"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "compare.json").write_text(json.dumps({"outcomes": [outcome]}))
    lines = table(tmp_path)
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| 62", "pair.frontier"],
        ["| 192", "two-baseline.least-in-flight"],
    ]
    assert f"{outcome['tok_s']['value']:.0f} ±" in lines[2]


def test_the_script_is_whole(tmp_path: Path) -> None:
    """Bash reads it, and each part that its head names is there, and no other."""
    path = FOLDER / "measure.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text(encoding="utf-8")
    head, parts = text.split("set -uo pipefail", 1)
    offered = set(re.findall(r"^    ([a-z-]+)\)", parts.split("case $name in", 1)[1], re.MULTILINE))
    assert len(offered) == 12
    assert [part for part in offered if not re.search(rf"^#.*\b{part}\b", head, re.MULTILINE)] == []
    refused = subprocess.run(
        ["bash", str(path), "nonsense"], capture_output=True, text=True, check=False,
        env={**os.environ, "LAUNCH": "false", "RESULTS": str(tmp_path)},
    )  # fmt: skip
    assert refused.returncode == 2
    assert "no such part: nonsense" in refused.stderr


def test_no_part_is_begun_without_time(tmp_path: Path) -> None:
    """WITHIN bounds all parts together: when nothing is left of it, that is said and nothing is run."""
    done = subprocess.run(
        ["bash", str(FOLDER / "measure.sh"), "adaptive=60"], capture_output=True, text=True, check=False,
        env={**os.environ, "LAUNCH": "false", "RESULTS": str(tmp_path), "WITHIN": "0"},
    )  # fmt: skip
    assert done.returncode == 0
    assert "out of time" in done.stdout
    assert list(tmp_path.iterdir()) == []
