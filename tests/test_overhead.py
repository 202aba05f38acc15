"""`loadtest overhead`: the order of its windows, what a difference says, and a run over real HTTP."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadtest.__main__ import main
from loadtest.live_schema import LiveError
from loadtest.overhead import (
    Conditions,
    Found,
    Measured,
    Verdict,
    Way,
    decode,
    difference,
    judged,
    order,
    resumed,
    sent_together,
)
from loadtest.overhead_run import FILE, run_overhead
from loadtest.overhead_view import report, sentence
from loadtest.overhead_window import Between, Options
from loadtest.prompts import Place, PromptError
from loadtest.record import read_records
from loadtest.summary import Window
from loadtest.sweep_schema import Figure, Pace, Workload
from tests.engines import looped
from tests.live_pair import KEY, Pair, pair, policy_of
from tests.sweeps import BASE, SPEC, Notes, point, record

QUICK = Pace(warm_up_s=0.1, window_s=0.3, most_window_s=5.0, per_slot=1, poll_s=0.05)


def window(number: int, way: Way, speed: float, **fields: Any) -> Measured:
    """A window of this speed, whose requests take as much longer."""
    told = point(role=BASE, number=number, output_tok_s=Figure(speed), run=f"{way}-{number}")
    usual: dict[str, Any] = {"pair": number, "way": way, "point": told, "ms_per_token": 1e4 / speed}
    return Measured(**(usual | fields))


def document(*windows: Measured, **fields: Any) -> Found:
    asked = Conditions(
        direct="http://a", url="http://r", role=BASE, level=64, model="m",
        workload=Workload(prompts="corpus", trace="answers of 64 to 192 tokens"), pace=QUICK,
    )  # fmt: skip
    usual: dict[str, Any] = {
        "created": "then", "command": "", "version": "0", "servers": "", "conditions": asked,
        "rounds": 1, "margin": 0.03, "windows": windows,
    }  # fmt: skip
    return Found(**(usual | fields))


def test_windows_take_turns() -> None:
    """A B B A, then B A A B: a drift that is even falls on both ways alike, in each two rounds."""
    turns = list(order(2))
    assert [turn.run for turn in turns] == [
        "direct-1", "router-1", "router-2", "direct-2",
        "router-3", "direct-3", "direct-4", "router-4",
    ]  # fmt: skip
    places = {way: [at for at, turn in enumerate(turns) if turn.way is way] for way in Way}
    assert sum(places[Way.DIRECT]) == sum(places[Way.ROUTER])
    assert list(order(1)) == turns[:4]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0, 1.01, 0.99, 1.0], Verdict.LEVEL),
        ([0.985, 0.986, 0.984, 0.985], Verdict.LEVEL),  # sure, and too little to matter
        ([0.89, 0.91, 0.9, 0.9], Verdict.SLOWER),
        ([1.1, 1.12, 1.09, 1.11], Verdict.FASTER),
        ([0.8, 1.2, 0.9, 1.05], Verdict.UNSURE),
        ([0.9], Verdict.UNSURE),  # one pair cannot know how much pairs differ by
    ],
)
def test_what_a_difference_says(ratios: list[float], verdict: Verdict) -> None:
    """Level within the margin, slower or faster beyond nought, else unsure; mirrored for times."""
    assert difference("tok/s", ratios, margin=0.03).verdict is verdict
    mirrored = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}
    times = difference("ms", ratios, margin=0.03, more_is_slower=True)
    assert times.verdict is mirrored.get(verdict, verdict)


def test_the_interval_is_students_t_over_the_logarithms() -> None:
    """Two pairs of 0.9 and 1.0: their geometric mean, and 12.7 times the standard error."""
    found = difference("tok/s", [0.9, 1.0], margin=0.03)
    middle = math.log(0.9) / 2
    half = 12.706 * abs(math.log(0.9)) / math.sqrt(2) / math.sqrt(2)
    assert found.share.value == pytest.approx(math.exp(middle) - 1)
    assert found.share.low == pytest.approx(math.exp(middle - half) - 1)
    assert found.share.high == pytest.approx(math.exp(middle + half) - 1)


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=12))
def test_the_interval_holds_the_mean(ratios: list[float]) -> None:
    """Whatever the pairs gave, the figure lies in its interval and between the smallest and largest."""
    found = difference("tok/s", ratios, margin=0.03).share
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.value + 1e-12
    assert found.value <= found.high + 1e-12
    assert min(ratios) - 1 - 1e-9 <= found.value <= max(ratios) - 1 + 1e-9


def test_only_whole_pairs_count() -> None:
    """A window whose other half is not measured yet says nothing; both figures are judged."""
    found = judged(
        document(
            window(1, Way.DIRECT, 1000.0), window(1, Way.ROUTER, 900.0),
            window(2, Way.ROUTER, 905.0), window(2, Way.DIRECT, 1000.0),
            window(3, Way.ROUTER, 2000.0),
        )
    )  # fmt: skip
    speed, time = found.differences
    assert (speed.pairs, time.pairs) == (2, 2)
    assert speed.share.value == pytest.approx(math.sqrt(0.9 * 0.905) - 1)
    assert time.share.value == pytest.approx(1 / math.sqrt(0.9 * 0.905) - 1)
    assert speed.verdict is time.verdict is Verdict.SLOWER
    assert judged(document()).differences == ()


def test_how_many_are_sent_together() -> None:
    """A wave of four and one alone: (4 x 4 + 1) / 5; requests outside of the window do not count."""
    wave = [record(5.0 + 0.001 * at, 9.0) for at in range(4)]
    alone = [record(7.0, 9.0), record(1.0, 2.0)]
    assert sent_together([*wave, *alone], Window(4.0, 8.0)) == pytest.approx(17 / 5)
    assert sent_together([], Window(4.0, 8.0)) is None


def test_lengths_are_a_function_of_the_place() -> None:
    """Both ways ask the same lengths, every one between the bounds comes, and pairs differ."""
    lengths = [
        [Between(64, 192, 32, 0).of(Place(pair, "8", at)) for at in range(600)]
        for pair in (1, 1, 2)
    ]
    assert lengths[0] == lengths[1]
    assert lengths[0] != lengths[2]
    assert {asked for asked, _ in lengths[0]} == {32}
    answers = {tokens for _, tokens in lengths[0]}
    assert min(answers) == 64
    assert max(answers) == 192
    assert {tokens for _, tokens in (Between(9, 9, None, 0).of(Place(1, "8", 1)),)} == {9}


def test_another_load_is_not_gone_on_with() -> None:
    """More rounds may be added; another level is refused, by its name."""
    before = document(window(1, Way.DIRECT, 1.0), created="before")
    more = resumed(before, document(rounds=3))
    assert (more.rounds, more.created, more.windows) == (3, "before", before.windows)
    asked = msgspec.structs.replace(before.conditions, level=8)
    with pytest.raises(LiveError, match="another level \\(64, now 8\\)"):
        resumed(before, document(conditions=asked))


def test_a_broken_document_is_refused() -> None:
    """By its name, and with the reason."""
    with pytest.raises(LiveError, match=r"x\.json is no overhead\.json"):
        decode(b"[", "x.json")
    data = msgspec.json.encode(document(schema="crossover.overhead/2"))
    with pytest.raises(LiveError, match=r"schema 'crossover\.overhead/2' is not"):
        decode(data, "x.json")


def options(up: Pair, out: Path, **fields: Any) -> Options:
    usual: dict[str, Any] = {
        "direct": up.base.url, "role": BASE, "url": up.stack.url, "out": out, "level": 4,
        "admin_url": up.stack.admin_url, "admin_key": KEY, "rounds": 1, "pace": QUICK,
        "shortest": 8, "longest": 24, "input_tokens": 40, "settle_s": 5.0, "idle_s": 0.02,
    }  # fmt: skip
    return Options(**(usual | fields))


@looped
async def test_both_ways_are_measured_and_the_router_is_given_back(tmp_path: Path) -> None:
    """Four windows of the same requests, figures of engine and router on both; then a round more."""
    out = tmp_path / "out"
    notes = Notes()
    async with pair(tmp_path) as up:
        before = policy_of(up.stack)
        found = await run_overhead(options(up, out), notes)
        assert policy_of(up.stack) == before
        assert [each.point.run for each in found.windows] == [turn.run for turn in order(1)]
        more = await run_overhead(options(up, out, rounds=2), notes)
        assert more.windows[:4] == found.windows
        assert len(more.windows) == 8
        assert policy_of(up.stack) == before
        # Nothing is left: nothing is measured, and nothing is changed.
        again = await run_overhead(options(up, out, rounds=2), notes)
        assert again.windows == more.windows
    for number in (1, 2):
        asked = []
        for way in Way:
            records = list(read_records(out / f"records-{way.value}-{number}.jsonl"))
            assert all(each.ok for each in records)
            assert {each.backend for each in records} == {BASE if way is Way.ROUTER else None}
            order_of = sorted(records, key=lambda each: each.started)
            asked.append([each.asked_tokens or 0 for each in order_of][:4])
        assert sorted(asked[0]) == sorted(asked[1])
    for each in more.windows:
        assert each.point.output_tok_s.value > 0
        assert each.router_cpu is not None
        assert (each.together or 0) >= 1
    # A machine that does something else for the length of one window leaves that window without a
    # poll, so these hold for one window of each way at least.
    for way in Way:
        turns = [each for each in more.windows if each.way is way]
        assert any(each.point.polls > 0 for each in turns)
        assert any(each.counted_tok_s for each in turns)
        assert any(each.ms_per_token for each in turns)
    written = decode((out / FILE).read_bytes(), "it")
    assert written.windows == more.windows
    assert [each.pairs for each in written.differences] == [4, 4]
    assert not (out / "borrowed.json").exists()
    shown = io.StringIO()
    Console(file=shown, width=160).print(report(more))
    assert "through the router (4)" in shown.getvalue()
    assert "router: cores used" in shown.getvalue()
    assert "over 4 pairs, margin 3%" in sentence(more.differences[0], 0.03)
    assert notes.begun[0] == ("direct, pair 1", 0, 4)
    assert notes.begun[4] == ("router, pair 3", 4, 8)
    assert len(notes.over) == 8


@looped
async def test_the_wrong_server_is_refused(tmp_path: Path) -> None:
    """A server that the router does not have in this role would be compared with another one."""
    async with pair(tmp_path) as up:
        before = policy_of(up.stack)
        asked = options(up, tmp_path / "out", direct=up.spec.url)
        with pytest.raises(LiveError, match="give --direct as the router has it"):
            await run_overhead(asked, Notes())
        asked = options(up, tmp_path / "out", direct=up.spec.url, role=SPEC, url="ftp://x")
        with pytest.raises(ValueError, match="ftp"):
            await run_overhead(asked, Notes())
        assert policy_of(up.stack) == before


@pytest.mark.parametrize("text", ["1", "x", "9-8", "1-2-3", ""])
def test_bad_lengths(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says how they are written; exit code 2."""
    asked = ["overhead", "--direct", "http://a", "--role", "baseline", "--url", "http://b"]
    assert main([*asked, "--admin-url", "http://c", "--output-tokens", text]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--output-tokens is as in 128 or 64-192" in line


@looped
async def test_prompts_are_as_long_as_they_are(tmp_path: Path) -> None:
    """A length beside a file of prompts would be written down and never asked for: it is refused."""
    file = tmp_path / "prompts.txt"
    file.write_text("Why?\n", encoding="utf-8")
    async with pair(tmp_path) as up:
        before = policy_of(up.stack)
        with pytest.raises(PromptError, match="leave out --input-tokens"):
            await run_overhead(options(up, tmp_path / "out", prompts=file), Notes())
        assert policy_of(up.stack) == before


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A router that is not there is one line, and exit code 1."""
    nobody = "http://127.0.0.1:9"
    asked = ["overhead", "--direct", nobody, "--role", "baseline", "--url", nobody]
    assert main([*asked, "--admin-url", nobody, "--out", str(tmp_path / "out")]) == 1
    assert "start the router, or mend --admin-url" in capsys.readouterr().err


def test_the_document_is_json() -> None:
    """Other programs read it: ways, pass and verdict are plain texts and numbers."""
    found = judged(document(window(1, Way.DIRECT, 10.0), window(1, Way.ROUTER, 9.0)))
    read = json.loads(msgspec.json.encode(found))
    assert read["windows"][1]["way"] == "router"
    assert read["windows"][1]["point"]["pass"] == 1
    assert read["differences"][0]["verdict"] == "unsure"
    assert decode(msgspec.json.encode(found), "it") == found
