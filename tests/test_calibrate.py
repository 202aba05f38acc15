"""From two live servers to a calibration that the router follows, without a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.__main__ import main
from loadtest.both_at_once import (
    BOTH,
    BothAtOnce,
    Overlapped,
    TooShortError,
    as_runs,
    pairs_of,
)
from loadtest.calibrate import Class, Wanted, calibrate, fitted
from loadtest.conditions import FitError
from loadtest.engine import EngineConfig, running_engine
from loadtest.importers import read_sweeps
from loadtest.sweep_schema import (
    SCHEMA,
    Figure,
    Pace,
    Plan,
    Point,
    Server,
    Spread,
    Sweep,
    SweepError,
    Workload,
)
from router.calibration import parse_calibration
from router.load import Role
from tests.stack import run, running_router
from tests.sweeps import Notes

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
LEVELS = (1, 2, 4, 8, 16, 32)


def speed(role: Role, level: int, crossing: float = 10.0) -> float:
    """Planted: the baseline grows with the level, the speculative server saturates."""
    base = 100.0 * level / (1.0 + level / 60.0)
    return base if role is BASE else base * (crossing / level) ** 0.25


def point(role: Role, number: int, level: int | None, **more: Any) -> Point:
    times = Spread(0.1, Figure(0.1), Figure(0.2), Figure(0.3))
    tokens = speed(role, level or 1) * (1.0 + 0.01 * (number - 1.5))
    fields: dict[str, Any] = {
        "role": role, "number": number, "run": f"{role.value}-{number}-{level}", "level": level,
        "measured_at": "2026-01-01T00:00:00Z", "records": 10, "concurrency": level or 1.0,
        "window_start_s": 1.0, "window_s": 10.0, "requests": 100, "errors": 0,
        "output_tok_s": Figure(tokens), "requests_s": 1.0, "input_tokens": 64.2,
        "output_tokens": 48.0, "ttft_s": times, "tpot_s": times, "latency_s": times,
        "accept_length": 2.0 if role is SPEC else None, "queued": 0.2,
    }  # fmt: skip
    return Point(**(fields | more))


def server(role: Role) -> Server:
    flags = {"model_path": "meta/llama", "version": "0.5.17", "max_running_requests": 64}
    if role is SPEC:
        flags |= {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}
    return Server(
        role=role, url="http://127.0.0.1:1", model="llama", model_path="meta/llama",
        engine_version="0.5.17", cap=64, flags=flags,
    )  # fmt: skip


def sweep(**more: Any) -> Sweep:
    fields: dict[str, Any] = {
        "created": "2026-01-01T00:00:00Z", "command": "loadtest sweep", "version": "0",
        "workload": Workload(prompts="corpus", input_tokens=64, output_tokens=48),
        "pace": Pace(), "plan": Plan(levels=LEVELS, passes=2),
        "servers": (server(SPEC), server(BASE)),
        "points": tuple(point(r, n, c) for r in Role for n in (1, 2) for c in LEVELS),
    }  # fmt: skip
    return Sweep(**(fields | more))


def wanted(tmp_path: Path, **more: Any) -> Wanted:
    fields: dict[str, Any] = {
        "speculative": "http://127.0.0.1:1", "baseline": "http://127.0.0.1:2", "work": tmp_path,
        "plan": Plan(levels=LEVELS, passes=2),
    }  # fmt: skip
    return Wanted(**(fields | more))


OVERLAPS = (
    Overlapped(8, 8, 5.0, 0.5 * speed(SPEC, 8), 0.5 * speed(BASE, 8), 2.0),
    Overlapped(4, 16, 5.0, 0.6 * speed(SPEC, 4), 0.5 * speed(BASE, 16), 2.0),
)


# ---------------------------------------------------------------------- what a sweep leaves


def test_a_sweep_is_read_back_by_role_and_pass() -> None:
    """`sweep.json` gives a sweep for each role and pass, with the facts that a calibration needs."""
    import msgspec

    found = read_sweeps(msgspec.json.encode(sweep()), "sweep.json")
    assert [(s.role, s.name) for s in found] == [
        (SPEC, "sweep.json, speculative pass 1"), (SPEC, "sweep.json, speculative pass 2"),
        (BASE, "sweep.json, baseline pass 1"), (BASE, "sweep.json, baseline pass 2"),
    ]  # fmt: skip
    first = found[0]
    assert first.kind == "loadtest sweep"
    assert first.cap == 64
    assert [p.concurrency for p in first.points] == list(LEVELS)
    one = first.points[3]
    assert one.tokens_per_second == pytest.approx(speed(SPEC, 8) * 0.995)
    assert (one.ttft, one.ttft_tail, one.time_per_token) == (0.1, 0.3, 0.1)
    assert (one.accept_length, one.waiting, one.requests, one.seconds) == (2.0, 0, 100, 10.0)
    assert first.facts["model"] == "meta/llama"
    assert first.facts["engine"] == "sglang 0.5.17"
    assert first.facts["prompt_tokens"] == 64.2
    assert first.facts["output_tokens"] == 48
    assert first.facts["speculative_num_steps"] == 3
    assert first.facts["cap"] == 64
    assert "speculative_num_steps" not in found[2].facts


def test_an_open_loop_holds_no_concurrency_and_is_left_out() -> None:
    """Points of an offered rate are no levels; a file with nothing else is refused."""
    import msgspec

    from loadtest.values import ResultsError

    open_loop = sweep(points=(point(BASE, 1, None, rate=3.0), point(BASE, 1, 4)))
    (found,) = read_sweeps(msgspec.json.encode(open_loop), "sweep.json")
    assert [p.concurrency for p in found.points] == [4]
    empty = sweep(points=(point(BASE, 1, None, rate=3.0),))
    with pytest.raises(ResultsError, match="has no level in it"):
        read_sweeps(msgspec.json.encode(empty), "sweep.json")


def test_a_damaged_sweep_is_refused_in_one_line() -> None:
    """A file with the right schema and the wrong fields names the file and the place."""
    from loadtest.values import ResultsError

    with pytest.raises(ResultsError, match=r"^sweep\.json: .*created"):
        read_sweeps(json.dumps({"schema": SCHEMA}).encode(), "sweep.json")


# ---------------------------------------------------------------------- from sweeps to a file


def test_the_first_class_decides_and_the_others_are_told(tmp_path: Path) -> None:
    """The planted crossing is found, both shares too; a class with another line makes a note."""
    other = sweep(
        points=tuple(
            point(r, n, c, output_tok_s=Figure(speed(r, c, 4.0)), input_tokens=1024.0)
            for r in Role for n in (1, 2) for c in LEVELS
        )
    )  # fmt: skip
    classes = [Class(64, sweep(), OVERLAPS), Class(1024, other, ())]
    made = fitted(wanted(tmp_path, command="loadtest calibrate"), classes)
    assert made.verdict == "at"
    assert made.interval is not None
    low, high = made.interval
    assert isinstance(low, float)
    assert isinstance(high, float)
    assert low <= 10.0 <= high
    assert made.contention is not None
    assert made.contention.gpus == "shared"
    assert made.contention.speculative == pytest.approx(0.55, abs=0.03)
    assert made.frontier.scope == "total"
    assert made.fingerprint["speculative.speculative_num_steps"] == 3
    assert made.fingerprint["baseline.cap"] == 64
    assert any(n.startswith("prompts of about 1024 tokens: at ") for n in made.notes)
    assert any(n.startswith("simulated on these curves: ") for n in made.notes)
    assert parse_calibration(__import__("msgspec").json.encode(made)) == made


def test_servers_that_do_not_disturb_each_other_have_a_gpu_each(tmp_path: Path) -> None:
    """When both keep their speed, the line looks at the speculative server alone."""
    free = tuple(
        Overlapped(n, m, 5.0, speed(SPEC, n), speed(BASE, m), 2.0) for n, m in ((8, 8), (4, 16))
    )
    made = fitted(wanted(tmp_path), [Class(64, sweep(), free)])
    assert made.contention is not None
    assert (made.contention.gpus, made.frontier.scope) == ("split", "speculative")


def test_a_class_that_cannot_be_fitted_is_told_and_the_first_must_be(tmp_path: Path) -> None:
    """What is missing in a later class is a note; in the first it is the end."""
    bad = sweep(points=tuple(point(BASE, 1, c) for c in LEVELS))
    made = fitted(wanted(tmp_path), [Class(64, sweep(), OVERLAPS), Class(1024, bad, ())])
    assert any("1024 tokens: no level of the speculative sweeps" in n for n in made.notes)
    with pytest.raises(FitError, match="no level of the speculative sweeps"):
        fitted(wanted(tmp_path), [Class(64, bad, OVERLAPS)])


@pytest.mark.parametrize(
    ("levels", "pairs"),
    [
        ((1, 2, 4, 8, 16, 32), ((2, 2), (4, 4), (16, 16), (2, 16))),
        ((8,), ((8, 8),)),
        ((1, 64), ((1, 1), (64, 64), (1, 64))),
    ],
)
def test_few_pairs_of_levels_are_measured_at_once(
    levels: tuple[int, ...], pairs: tuple[tuple[int, int], ...]
) -> None:
    """Low, middle and high on both, and a lopsided pair; nothing twice."""
    assert pairs_of(levels) == pairs


def test_overlaps_say_which_servers_they_are_of() -> None:
    """In the fit's form each overlap is one level of each server, with the sweep's facts."""
    (first, second) = as_runs(OVERLAPS, sweep())
    assert (first.n, first.m, second.n, second.m) == (8, 8, 4, 16)
    assert first.speculative.points[0].accept_length == 2.0
    assert first.baseline.facts["cap"] == 64


def test_a_damaged_file_of_overlaps_is_named(tmp_path: Path) -> None:
    """What cannot be read is not measured over, but said."""
    (tmp_path / BOTH).write_text("{")
    with pytest.raises(SweepError, match=r"both\.json cannot be read"):
        BothAtOnce(tmp_path, [], None, Pace(), None)  # type: ignore[arg-type]


def test_overlaps_are_replaced_as_a_whole(tmp_path: Path) -> None:
    """A kill while a pair is being kept leaves the pairs before it: the file is never half there."""

    class Watched(BothAtOnce):
        async def _pair(self, number: int, n: int, m: int) -> Overlapped:
            return Overlapped(n, m, 6.0, 10.0, 20.0)

    both = Watched(tmp_path, [], None, Pace(), None)  # type: ignore[arg-type]
    asyncio.run(both.run([(4, 4)], print))
    with (tmp_path / BOTH).open("rb") as file:
        asyncio.run(both.run([(4, 4), (8, 8)], print))
        assert len(msgspec.json.decode(file.read())) == 1
    assert len(msgspec.json.decode((tmp_path / BOTH).read_bytes())) == 2


def test_a_pair_of_levels_that_hardly_met_is_left_out(tmp_path: Path) -> None:
    """What was measured before it is kept, and what comes after it is measured."""

    class Hurried(BothAtOnce):
        async def _pair(self, number: int, n: int, m: int) -> Overlapped:
            if (n, m) == (8, 8):
                raise TooShortError("both at once, 8 : 8: the windows overlapped for only 0.1 s")
            return Overlapped(n, m, 6.0, 10.0, 20.0)

    told: list[str] = []
    both = Hurried(tmp_path, [], None, Pace(), None)  # type: ignore[arg-type]
    found = asyncio.run(both.run([(4, 4), (8, 8), (4, 8)], told.append))
    assert [(each.n, each.m) for each in found] == [(4, 4), (4, 8)]
    assert "left out: both at once, 8 : 8: the windows overlapped for only 0.1 s" in told
    assert len(msgspec.json.decode((tmp_path / BOTH).read_bytes())) == 2


# ---------------------------------------------------------------------- over HTTP


@contextlib.asynccontextmanager
async def planted_pair(tmp_path: Path) -> AsyncIterator[tuple[str, str]]:
    """Two simulated servers on one simulated GPU, five times as fast as planted."""
    configs = [
        EngineConfig(
            role=role, time_scale=0.2, max_running_requests=256, health_s=0.0,
            gpu_lock=tmp_path / "gpu.lock",
        )
        for role in Role
    ]  # fmt: skip
    async with running_engine(configs[0]) as spec, running_engine(configs[1]) as base:
        yield f"http://127.0.0.1:{spec.port}", f"http://127.0.0.1:{base.port}"


@pytest.mark.slow
def test_the_planted_line_is_found_and_followed(tmp_path: Path) -> None:
    """Over HTTP: calibrate finds the crossing near 12 within its interval, serve decides by it."""

    async def work() -> None:
        async with planted_pair(tmp_path) as (spec, base):
            asked = wanted(
                tmp_path / "work", speculative=spec, baseline=base, output_tokens=40,
                plan=Plan(levels=(2, 8, 12, 16, 24), passes=1), input_tokens=(48,),
                pace=Pace(warm_up_s=0.2, most_warm_up_s=5.0, window_s=0.6, most_window_s=3.0,
                          per_slot=1.5, poll_s=0.2),
            )  # fmt: skip
            notes = Notes()
            made = await calibrate(asked, notes)
            assert made.verdict in {"at", "unsure"}
            assert made.interval is not None
            low, high = made.interval
            # Wide, since this machine may do a lot else; what a fit is worth is tested elsewhere.
            assert isinstance(low, float)
            assert low <= 17.0
            assert high == "infinity" or (isinstance(high, float) and high >= 8.0)
            assert made.contention is not None
            assert made.contention.gpus == "shared"
            assert notes.said[-1].startswith("fitting")
            # Nothing is measured twice.
            again = Notes()
            assert (await calibrate(asked, again)).curves == made.curves
            # A pair of levels that a busy machine let overlap for too short a time may be tried again.
            left_out = [text for text in notes.said if text.startswith("left out: ")]
            for text in again.said:
                if text.startswith("both at once"):
                    assert any(each.startswith(f"left out: {text}:") for each in left_out)

            from router.calibration import format_calibration

            file = tmp_path / "calibration.json"
            file.write_bytes(format_calibration(made))
            async with running_router(spec, base, calibration=str(file)) as stack:
                answers = await asyncio.gather(*(stack.chat(max_tokens=40) for _ in range(30)))
                assert {a.status_code for a in answers} == {200}
                reasons = {a.headers["x-crossover-reason"] for a in answers}
                assert reasons
                assert stack.in_flight() == (0, 0)

    run(work, limit_s=55)


def test_a_pair_that_the_doctor_refuses_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two baselines are no pair: exit 1, the finding is shown, nothing is written."""

    async def work() -> None:
        quick = [EngineConfig.quick(BASE), EngineConfig.quick(BASE)]
        async with running_engine(quick[0]) as one, running_engine(quick[1]) as other:
            urls = [f"http://127.0.0.1:{each.port}" for each in (one, other)]
            out = tmp_path / "c.json"
            code = await asyncio.to_thread(
                main,
                ["calibrate", "--speculative", urls[0], "--baseline", urls[1], "--out", str(out)],
            )
            assert code == 1
            assert not out.exists()
            assert not (tmp_path / "c.json.sweeps").exists()

    run(work, limit_s=30)
    assert "give --anyway" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--levels", "0"], "--levels are whole numbers"),
        (["--input-tokens", "x"], "--input-tokens are whole numbers"),
        (["--out", "."], "--out . is a directory: name a file, as in calibration.json"),
        (["--baseline", "http://127.0.0.1:1/"], "are the same server, http://127.0.0.1:1/"),
        (["--nothing"], "(see `loadtest calibrate --help`)"),
    ],
)
def test_bad_values_are_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    """A value that cannot be is exit 2 and one line that says what was expected."""
    arguments = ["calibrate", "--speculative", "http://127.0.0.1:1", "--baseline",
                 "http://127.0.0.1:2", "--out", str(tmp_path / "c.json"), "--no-doctor"]  # fmt: skip
    assert main([*arguments, *more]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody at the address: exit 1 and how to mend it, with the doctor and without."""
    arguments = ["calibrate", "--speculative", "http://127.0.0.1:9", "--baseline",
                 "http://127.0.0.1:1", "--out", str(tmp_path / "c.json")]  # fmt: skip
    assert main([*arguments, "--no-doctor"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert main(arguments) == 1
    assert "cannot reach the speculative server" in capsys.readouterr().err


def test_a_key_that_is_missing_is_asked_for_by_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server with a key: the doctor before the sweep names the variable that calibrate reads."""

    async def work() -> None:
        keyed = EngineConfig.quick(SPEC, api_key="sk-engine")
        async with running_engine(keyed) as one, running_engine(EngineConfig.quick(BASE)) as other:
            code = await asyncio.to_thread(
                main,
                ["calibrate", "--speculative", one.url, "--baseline", other.url,
                 "--out", str(tmp_path / "c.json")],
            )  # fmt: skip
            assert code == 1

    run(work, limit_s=30)
    said = capsys.readouterr().err
    assert (
        "refuses a request without a key (status 401): give its own with LOADTEST_API_KEY" in said
    )
