"""A small chaos and a short soak, and that their verdicts can be bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.load import Role
from tests.chaos.load import Result
from tests.chaos.soak import MIB, Sample, line_through
from tests.chaos.soak import Report as SoakReport
from tests.chaos.soak import broken_promises as soak_promises
from tests.chaos.soak_load import Kind, kind_of, request
from tests.chaos.stage import Entry
from tests.chaos.timeline import Happened
from tests.chaos.verdict import Evidence, judge

ROOT = Path(__file__).parents[2]
SPECULATIVE, BASELINE = Role.SPECULATIVE, Role.BASELINE


def run_program(module: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run a program of this directory, and read the report that it wrote."""
    report = Path(arguments[-1])
    found = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=55,
    )  # fmt: skip
    return found, json.loads(report.read_bytes()) if report.exists() else None


@pytest.mark.slow
def test_a_small_chaos_keeps_every_promise(tmp_path: Path) -> None:
    """A server is killed under load and comes back: nothing is lost, twice or left."""
    found, report = run_program(
        "tests.chaos.run", "--seconds", "5", "--clients", "40", "--json", str(tmp_path / "r.json")
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "every promise was kept" in found.stdout
    assert report["broken_promises"] == []
    assert report["whole"] > 20
    assert report["sent"] == sum(
        (report["whole"], report["broken"], report["left"], sum(report["errors"].values()))
    )
    assert {each["step"] for each in report["happened"]} >= {"kill"}


@pytest.mark.slow
def test_a_short_soak_grows_by_nothing(tmp_path: Path) -> None:
    """Seconds of requests that are all different: files, series and counts are where they were."""
    found, report = run_program(
        "tests.chaos.soak",
        *("--seconds", "2", "--connections", "8", "--rate", "800"),
        *("--json", str(tmp_path / "r.json")),
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert report["broken_promises"] == []
    assert report["requests"] > 100
    assert report["series"][0] == report["series"][1]


# ---------------------------------------------------------------------- the verdict of chaos


def line(name: str, **fields: object) -> str:
    told = {"event": "request", "level": "info", "request_id": name, "replay": None}
    return json.dumps(told | fields)


def entry(name: str, role: Role, at: float, orders: str = "none") -> Entry:
    return Entry(f"{at} {name} {orders}", role)


def evidence(**given: Any) -> Evidence:
    """One request that was answered as it should be, and what is given."""
    step = Happened(step="kill", role="baseline", at=1, held=1, to_use=0.1)
    sound: dict[str, Any] = {
        "results": [Result("a-1", 1.0, 2.0, "whole", 200)],
        "journal": [entry("a-1", SPECULATIVE, 1.1)],
        "log": [line("a-1")],
        "counts": {"router: baseline": 0},
        "exit_code": 0,
        "happened": [step],
        "seconds": 10.0,
    }
    return Evidence(**(sound | given))


def test_a_sound_play_breaks_no_promise() -> None:
    """Without a fault there is no broken promise."""
    assert judge(evidence()).broken_promises == []


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"results": [Result("a-1", 1.0, 2.0, "lost")]}, "lost silently"),
        ({"results": []}, "no request was answered whole"),
        ({"journal": [entry("a-1", r, 1.0) for r in Role]}, "wrongly sent twice"),
        ({"log": []}, "not counted once"),
        ({"log": [line("a-1"), line("a-1")]}, "not counted once"),
        ({"counts": {"router: baseline": 1}}, "counts are left"),
        ({"log": [line("a-1"), "Traceback (most recent call last):"]}, "nobody handled"),
        ({"log": [line("a-1"), line("x", event="sweep", level="error")]}, "nobody handled"),
        ({"exit_code": 143}, "exit code 143"),
        ({"exit_code": None}, "exit code None"),
        ({"happened": [Happened(step="kill", role="baseline", at=1, held=1)]}, "was not used"),
    ],
)  # fmt: skip
def test_each_fault_breaks_its_promise(given: dict[str, Any], what: str) -> None:
    """Every kind of fault is found, by itself and under its name."""
    (said,) = [text for text in judge(evidence(**given)).broken_promises if what in text]
    assert said


@pytest.mark.parametrize(
    ("first", "second", "replay", "right"),
    [
        (entry("a-1", BASELINE, 1.0, "refusing"), entry("a-1", SPECULATIVE, 1.1), "replay_refused", True),
        (entry("a-1", BASELINE, 1.0), entry("a-1", SPECULATIVE, 1.1), "replay_refused", False),
        (entry("a-1", BASELINE, 1.0, "refusing"), entry("a-1", SPECULATIVE, 1.1), None, False),
        (entry("a-1", BASELINE, 1.0), entry("a-1", BASELINE, 1.1), "replay_stale", True),
        (entry("a-1", BASELINE, 1.0), entry("a-1", BASELINE, 9.0), "replay_stale", False),
        (entry("a-1", BASELINE, 1.0), entry("a-1", BASELINE, 1.1), "replay_connect", False),
    ],
)  # fmt: skip
def test_only_the_rules_of_replay_excuse_a_second_sighting(
    first: Entry, second: Entry, replay: str | None, right: bool
) -> None:
    """A refusal may go to the other server and a stale connection to the same, nothing else."""
    report = judge(evidence(journal=[second, first], log=[line("a-1", replay=replay)]))
    assert (report.replayed, report.duplicated) == ((1, 0) if right else (0, 1))


def test_three_sightings_are_never_right() -> None:
    """No rule sends a request three times to servers that read it whole."""
    entries = [entry("a-1", SPECULATIVE, at, "refusing") for at in (1.0, 1.1, 1.2)]
    report = judge(evidence(journal=entries, log=[line("a-1", replay="replay_refused")]))
    assert report.duplicated == 1


# ---------------------------------------------------------------------- the verdict of the soak


def samples(*rss: int) -> list[Sample]:
    return [Sample(float(at), at * 1000, size, 50, 400) for at, size in enumerate(rss)]


def soak_report(**given: Any) -> SoakReport:
    sound = SoakReport(
        seconds=10, requests=10_000, rate=1000, errors={}, rss_first=0, rss_last=0, growth=1000,
        growth_a_request=0.1, files_before=30, files_most=60, files_after=30, series=[400, 400],
        in_flight=0, logged=9800, unhandled=[], exit_code=0, samples=[],
    )  # fmt: skip
    return msgspec.structs.replace(sound, **given)


def test_growth_is_the_slope_of_a_line() -> None:
    """A leak of ten bytes a request is found as such, and noise around a level is none."""
    assert line_through(samples(0, 10_000, 20_000, 30_000)) == pytest.approx((30_000, 10.0))
    assert line_through(samples(5000, 5100, 5100, 5000))[0] == pytest.approx(0.0, abs=1)
    assert line_through(samples(5000)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"growth": 4 * MIB, "growth_a_request": 400.0}, "memory grew"),
        ({"files_most": 300}, "300 files"),
        ({"files_after": 40}, "open at rest"),
        ({"series": [400, 401]}, "series rose"),
        ({"in_flight": 1}, "in flight"),
        ({"logged": 9799}, "logged"),
        ({"errors": {"connection lost": 1}}, "errors"),
        ({"unhandled": ["Traceback"]}, "unhandled"),
        ({"exit_code": 1}, "exit code"),
        ({"requests": 0}, "nothing was answered"),
    ],
)
def test_each_growth_breaks_its_promise(given: dict[str, Any], what: str) -> None:
    """Every kind of growth is found, by itself and under its name."""
    assert soak_promises(soak_report(), 9800, 200) == []
    (said,) = soak_promises(soak_report(**given), 9800, 200)
    assert what in said


def test_no_two_requests_of_the_soak_are_alike() -> None:
    """The mixture holds every kind, and each request has its own bytes."""
    kinds = Counter(map(kind_of, range(1000)))
    assert kinds == {
        Kind.PIECE: 790, Kind.STREAM: 150, Kind.REFUSED: 30, Kind.UNKNOWN: 20, Kind.LEAVING: 10
    }  # fmt: skip
    made = [request(number, kind_of(number)) for number in range(1000)]
    assert len(set(made)) == 1000
