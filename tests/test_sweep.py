"""The sweep in virtual time: order, load, windows, telemetry, resuming, conditions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.prompts import Lengths, Listed
from loadtest.sweep_files import SweepDirectory
from loadtest.sweep_phases import Phase
from loadtest.sweep_schema import (
    Pace,
    Plan,
    ServerFailedError,
    Sweep,
    SweepError,
    Workload,
    decode_sweep,
)
from loadtest.sweep_turns import Step, Turn, order
from router.load import Role
from tests.sweeps import BASE, PACE, SPEC, FakeServer, Notes, make_sweep, server
from tests.virtual_time import run

PLAN = Plan(levels=(1, 4), passes=2)


def pair() -> dict[Role, FakeServer]:
    return {SPEC: FakeServer(), BASE: FakeServer(cap=4096, accept=None)}


def swept(path: Path, servers: dict[Role, FakeServer], plan: Plan = PLAN, **options: Any) -> Sweep:
    return run(make_sweep(path, servers, plan, **options).run())


def test_order_is_fair() -> None:
    """Passes go up and down, and the servers of a level take turns in being first."""
    turns = [turn.run for turn in order(Plan(levels=(1, 8), passes=2), (SPEC, BASE))]
    assert turns == [
        "speculative-1-1", "baseline-1-1", "baseline-1-8", "speculative-1-8",
        "baseline-2-8", "speculative-2-8", "speculative-2-1", "baseline-2-1",
    ]  # fmt: skip
    assert [t.run for t in order(Plan(rates=(0.5,), passes=1), (BASE,))] == ["baseline-1-r0.5"]
    assert Turn(3, Step(level=16), SPEC).run == "speculative-3-16"


def test_a_level_keeps_its_requests_in_flight(tmp_path: Path) -> None:
    """A closed loop has exactly its level in flight, and its figures are the server's."""
    servers = pair()
    found = swept(tmp_path, servers, Plan(levels=(4,), passes=1))
    assert servers[SPEC].most == servers[BASE].most == 4
    point = found.points[0]
    assert (point.level, point.requests, point.errors) == (4, point.requests, 0)
    # 50 tokens in 0.05 + 50 * 0.02 seconds, four at a time.
    assert point.output_tok_s.value == pytest.approx(4 * 50 / 1.05, rel=0.02)
    assert point.latency_s.mean == pytest.approx(1.05, rel=0.01)
    assert point.ttft_s.mean == pytest.approx(0.05, rel=0.05)
    assert point.concurrency == pytest.approx(4.0, rel=0.01)
    assert point.window_s == pytest.approx(10.0, abs=0.1)


def test_telemetry_of_the_window(tmp_path: Path) -> None:
    """Running, queued, cap and accept length are those of the window; a baseline has no steps."""
    found = swept(tmp_path, pair(), Plan(levels=(4,), passes=1))
    by_role = {point.role: point for point in found.points}
    spec, base = by_role[SPEC], by_role[BASE]
    assert spec.accept_length == pytest.approx(2.0, abs=0.01)
    assert spec.verify_steps == pytest.approx(spec.requests * 25, rel=0.05)
    assert (spec.cap, base.cap) == (48, 4096)
    assert spec.running == pytest.approx(4.0, abs=0.2)
    assert spec.polls == pytest.approx(20, abs=2)
    assert (base.accept_length, base.verify_steps) == (None, None)
    assert spec.page_s == pytest.approx(spec.window_s, abs=0.01)


def test_first_answers_are_of_different_lengths(tmp_path: Path) -> None:
    """Slots do not stay in step: only the first answer of each is shortened, and by chance."""
    fake = FakeServer()
    swept(tmp_path, {SPEC: fake}, Plan(levels=(8,), passes=1))
    tokens = [chat["max_tokens"] for chat in fake.chats]
    assert len(set(tokens[:8])) > 4
    assert max(tokens[:8]) <= 50
    assert set(tokens[8:]) == {50}


def test_both_servers_are_asked_the_same(tmp_path: Path) -> None:
    """Prompts and lengths of a level are the same for both, unique, and new in the next pass."""
    servers = pair()
    swept(tmp_path, servers, Plan(levels=(2,), passes=2))
    first, other = (
        [(c["messages"][0]["content"], c["max_tokens"]) for c in fake.chats]
        for fake in servers.values()
    )
    assert set(first) == set(other)
    prompts = [prompt for prompt, _ in first]
    assert len(set(prompts)) == len(prompts)
    assert all(prompt.startswith("(Request abc-") for prompt in prompts)


def test_requests_carry_what_was_asked_for(tmp_path: Path) -> None:
    """Temperature and natural ends are in the body when they are asked for, and only then."""
    fake, plain = FakeServer(), FakeServer()
    work = Workload(prompts="corpus", output_tokens=50, ignore_eos=False, temperature=0.0)
    swept(tmp_path / "a", {SPEC: fake}, Plan(levels=(1,), passes=1), workload=work)
    swept(tmp_path / "b", {SPEC: plain}, Plan(levels=(1,), passes=1))
    assert fake.chats[0]["temperature"] == 0.0
    assert "ignore_eos" not in fake.chats[0]
    assert "temperature" not in plain.chats[0]
    assert plain.chats[0]["ignore_eos"] is True
    assert plain.chats[0]["stream_options"] == {"include_usage": True}


def test_nothing_runs_on_after_a_level(tmp_path: Path) -> None:
    """What began after the window is cut, and is neither a record nor an error."""
    fake = FakeServer()
    found = swept(tmp_path, {SPEC: fake}, Plan(levels=(8,), passes=1))
    assert fake.running == 0
    assert fake.cut > 0
    assert found.points[0].errors == 0
    assert found.points[0].records == len(fake.chats) - fake.cut


def test_an_open_loop(tmp_path: Path) -> None:
    """At a rate the server keeps up with, answers come at that rate, and there is no level."""
    servers = pair()
    found = swept(tmp_path, servers, Plan(rates=(5.0,), passes=1))
    for point in found.points:
        assert (point.level, point.rate, point.run[-5:]) == (None, 5.0, "-1-r5")
        assert point.requests_s == pytest.approx(5.0, rel=0.5)
        # Little's law
        assert point.concurrency == pytest.approx(point.requests_s * 1.05, rel=0.2)
        assert point.errors == 0
    starts = [
        sorted(record.started for record in SweepDirectory(tmp_path).records(point))[:20]
        for point in found.points
    ]
    assert starts[0] == pytest.approx(starts[1], abs=1e-5)  # the same load for both


def test_a_rate_that_is_too_much(tmp_path: Path) -> None:
    """A server that falls behind an offered rate is named."""
    slow = FakeServer(token_s=lambda running: 0.02 * running / 4)
    pace = Pace(warm_up_s=5, window_s=20, most_window_s=20)
    found = swept(tmp_path, {SPEC: slow}, Plan(rates=(20.0,), passes=1), pace=pace)
    assert "behind-rate" in found.points[0].notices
    assert found.points[0].concurrency > 50


def test_a_window_is_longer_while_answers_are_few(tmp_path: Path) -> None:
    """A slow level gets more time, up to its bound, and then says that it was too short."""
    slow = FakeServer(token_s=lambda _running: 0.1)  # 5 seconds an answer
    found = swept(tmp_path / "a", {SPEC: slow}, Plan(levels=(2,), passes=1))
    assert found.points[0].window_s == pytest.approx(15, abs=1)
    assert "short-window" not in found.points[0].notices
    slower = FakeServer(token_s=lambda _running: 0.4)
    found = swept(tmp_path / "b", {SPEC: slower}, Plan(levels=(2,), passes=1))
    assert found.points[0].window_s == pytest.approx(40, abs=0.1)
    assert "short-window" in found.points[0].notices


def test_notices_reach_point_level_sweep_and_summary(tmp_path: Path) -> None:
    """A level above the cap is said in all places."""
    found = swept(tmp_path, {SPEC: FakeServer(cap=3)}, Plan(levels=(2, 4), passes=1))
    assert [p.notices for p in found.points] == [(), ("above-cap",)]
    assert [level.notices for level in found.levels] == [(), ("above-cap",)]
    assert [n.code for n in found.notices] == ["few-passes", "above-cap"]
    text = (tmp_path / "summary.txt").read_text(encoding="utf-8")
    assert "above-cap (speculative, level 4, pass 1): the server runs 3 requests at once" in text
    assert "usage), not chunks" in text


def test_a_server_that_says_nothing(tmp_path: Path) -> None:
    """Without telemetry there are figures all the same, and what is missing is named."""
    fake = FakeServer(speaks=False)
    found = swept(tmp_path, {SPEC: fake}, Plan(levels=(2,), passes=1))
    assert found.points[0].output_tok_s.value > 80
    assert (found.points[0].running, found.points[0].accept_length) == (None, None)
    assert found.points[0].cap == 48  # what /server_info said
    assert set(found.points[0].notices) == {"no-telemetry", "no-accept-length"}


def test_processor_time_of_the_window(tmp_path: Path) -> None:
    """The client's share of a core is that of the window, and makes its notice."""
    ticks = iter(range(0, 1000, 9))
    found = swept(
        tmp_path, {SPEC: FakeServer()}, Plan(levels=(2,), passes=1), cpu=lambda: float(next(ticks))
    )
    assert found.points[0].client_cpu == pytest.approx(0.9, abs=0.01)
    assert found.points[0].client_lag_s == pytest.approx(0.0, abs=1e-6)
    assert "client-bound" in found.points[0].notices


def test_repeated_prompts_are_named(tmp_path: Path) -> None:
    """Without marks a short file repeats itself, which is counted; with marks nothing repeats."""
    listed = Listed(["a", "b", "c"], 0)
    work = Workload(prompts="p.txt (12)", output_tokens=50, unique=False)
    found = swept(
        tmp_path / "a",
        {SPEC: FakeServer()},
        Plan(levels=(2,), passes=1),
        workload=work,
        prompts=listed,
    )
    assert found.points[0].repeated >= found.points[0].records - 3
    assert "repeated-prompts" in found.points[0].notices
    marked = msgspec.structs.replace(work, unique=True)
    found = swept(
        tmp_path / "b",
        {SPEC: FakeServer()},
        Plan(levels=(2,), passes=1),
        workload=marked,
        prompts=listed,
    )
    assert found.points[0].repeated == 0


def test_lengths_of_a_trace(tmp_path: Path) -> None:
    """With a trace prompts and answers are as long as its rows."""
    fake = FakeServer()
    work = Workload(prompts="corpus", trace="t.csv (1)")
    swept(
        tmp_path, {SPEC: fake}, Plan(levels=(1,), passes=1), workload=work,
        lengths=Lengths(None, [(100, 20), (300, 60)]),
    )  # fmt: skip
    tokens = [chat["max_tokens"] for chat in fake.chats[1:]]
    assert set(tokens) == {20, 60}
    words = {c["max_tokens"]: len(c["messages"][0]["content"].split()) for c in fake.chats[1:]}
    assert words[60] > 2.5 * words[20]


def test_failures_are_kept_as_they_are(tmp_path: Path) -> None:
    """Some errors leave a level with its figures and a notice that quotes the first."""
    fake = FakeServer(fails=lambda number: "status 503: full" if number % 10 == 0 else None)
    found = swept(tmp_path, {SPEC: fake}, Plan(levels=(2,), passes=1))
    assert 1 <= found.points[0].errors < found.points[0].requests
    assert found.points[0].error == "status 503: full"
    assert "errors" in found.points[0].notices


def test_a_level_that_gives_up(tmp_path: Path) -> None:
    """A server that begins to fail for good ends its level early, with what came before."""
    fake = FakeServer(fails=lambda number: "status 500: dead" if number > 20 else None)
    found = swept(tmp_path, {SPEC: fake}, Plan(levels=(4,), passes=1))
    assert found.points[0].gave_up
    assert found.points[0].requests > 0
    assert {"errors", "gave-up"} <= set(found.points[0].notices)


def test_a_server_that_fails_ends_the_sweep(tmp_path: Path) -> None:
    """Where nothing is answered the sweep stops, says where and why, and keeps what is measured."""
    servers = pair()
    servers[BASE].fails = lambda _number: "Connection refused"
    with pytest.raises(ServerFailedError, match=r"baseline-1-1: Connection refused.*same command"):
        swept(tmp_path, servers)
    kept = SweepDirectory(tmp_path).read()
    assert kept is not None
    assert [point.run for point in kept.points] == ["speculative-1-1"]
    servers[BASE].fails = lambda _number: None
    assert len(swept(tmp_path, servers).points) == 8


def test_what_is_whole_is_not_measured_again(tmp_path: Path) -> None:
    """A second start measures nothing, a longer plan only what is new, a damaged level again."""
    first = swept(tmp_path, pair())
    servers, notes = pair(), Notes()
    assert swept(tmp_path, servers, notes=notes).points == first.points
    assert (servers[SPEC].chats, notes.begun) == ([], [])

    more = swept(tmp_path, servers, Plan(levels=(1, 2, 4), passes=2), notes=notes)
    assert set(servers[SPEC].runs) == {"speculative-1-2", "speculative-2-2"}
    assert [(done, of) for _, done, of in notes.begun] == [(8, 12), (9, 12), (10, 12), (11, 12)]
    assert [p for p in more.points if p.level != 2] == list(first.points)

    path = tmp_path / "records-speculative-1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])  # the last one is of level 4 or 2
    torn = json.loads(lines[-1])["run"]
    servers = pair()
    swept(tmp_path, servers, Plan(levels=(1, 2, 4), passes=2))
    assert set(servers[SPEC].runs) == {torn}
    assert servers[BASE].runs == []


def test_a_half_level_leaves_no_trace(tmp_path: Path) -> None:
    """Records of a level that the sweep does not know, half a line, half a file: all dropped."""
    swept(tmp_path, pair(), Plan(levels=(1,), passes=1))
    path = tmp_path / "records-speculative-1.jsonl"
    good = path.read_bytes()
    foreign = good.splitlines(keepends=True)[0].replace(b"speculative-1-1", b"speculative-1-4")
    path.write_bytes(good + foreign + foreign[:30])
    (tmp_path / "records-speculative-2.jsonl").write_bytes(foreign)
    swept(tmp_path, pair(), Plan(levels=(1,), passes=1))
    assert path.read_bytes() == good
    assert not (tmp_path / "records-speculative-2.jsonl").exists()


def test_cancelled_in_a_level(tmp_path: Path) -> None:
    """A sweep that is stopped within a level leaves no request open and goes on later."""
    servers = pair()

    async def work() -> None:
        task = asyncio.ensure_future(make_sweep(tmp_path, servers, PLAN).run())
        await asyncio.sleep(20.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(fake.running == 0 for fake in servers.values())

    run(work())
    kept = SweepDirectory(tmp_path).read()
    assert kept is not None
    assert 1 <= len(kept.points) < 8
    done = {point.run for point in kept.points}
    servers = pair()
    assert len(swept(tmp_path, servers).points) == 8
    assert done.isdisjoint(servers[SPEC].runs + servers[BASE].runs)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"workload": Workload(prompts="corpus", output_tokens=51)}, "output_tokens .50, now 51"),
        ({"workload": Workload(prompts="corpus", output_tokens=50, seed=1)}, "another seed"),
        ({"pace": Pace(window_s=3.0)}, "another warm_up_s"),
        ({"known": (server(SPEC, model="other"),)}, "speculative server's model .m, now other"),
        ({"known": (server(SPEC, cap=64),)}, "speculative server's cap"),
        (
            {"known": (server(SPEC, flags={"speculative_eagle_topk": 4}),)},
            "speculative_eagle_topk .1, now 4",
        ),
    ],
)
def test_other_conditions_are_another_sweep(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    """A directory is gone on with only under its own conditions; the first that differs is named."""
    plan = Plan(levels=(1,), passes=1)
    known = (server(SPEC, flags={"speculative_eagle_topk": 1}),)
    swept(tmp_path, {SPEC: FakeServer()}, plan, known=known)
    with pytest.raises(SweepError, match=words):
        swept(tmp_path, {SPEC: FakeServer()}, plan, **({"known": known} | changed))


def test_what_was_not_told_is_no_change(tmp_path: Path) -> None:
    """A fact that one start knew and the other did not, or another address, is no other server."""
    plan = Plan(levels=(1,), passes=1)
    swept(tmp_path, {SPEC: FakeServer()}, plan, known=(server(SPEC, draft="/d"),))
    known = (server(SPEC, draft=None, url="http://elsewhere"),)
    assert len(swept(tmp_path, {SPEC: FakeServer()}, plan, known=known).points) == 1


def test_the_other_server_may_come_later(tmp_path: Path) -> None:
    """One server's sweep can be completed by the other's, in the same directory."""
    plan = Plan(levels=(1,), passes=1)
    swept(tmp_path, {SPEC: FakeServer()}, plan)
    found = swept(tmp_path, {BASE: FakeServer(accept=None)}, plan)
    assert [point.role for point in found.points] == [BASE, SPEC]
    assert {one.role for one in found.servers} == {SPEC, BASE}


def test_a_role_twice(tmp_path: Path) -> None:
    """Two servers of one role, or none, are refused."""
    with pytest.raises(SweepError, match="each role is given to one server"):
        make_sweep(tmp_path, {}, PLAN)


def test_a_file_that_is_no_sweep(tmp_path: Path) -> None:
    """A broken file, or one of another schema, is refused with its name."""
    (tmp_path / "sweep.json").write_text("{", encoding="utf-8")
    with pytest.raises(SweepError, match=r"sweep\.json is no sweep"):
        SweepDirectory(tmp_path).read()
    found = swept(tmp_path / "a", {SPEC: FakeServer()}, Plan(levels=(1,), passes=1))
    data = msgspec.json.encode(msgspec.structs.replace(found, schema="crossover.sweep/2"))
    with pytest.raises(SweepError, match=r"'crossover\.sweep/2' is not 'crossover"):
        decode_sweep(data)
    (tmp_path / "b" / "sweep.json").mkdir(parents=True)
    with pytest.raises(SweepError, match="cannot be read"):
        SweepDirectory(tmp_path / "b").read()


def test_the_file_is_the_sweep(tmp_path: Path) -> None:
    """What is on disk is what is returned, with names as the schema has them."""
    found = swept(tmp_path, pair())
    data = (tmp_path / "sweep.json").read_bytes()
    assert decode_sweep(data) == found
    raw = json.loads(data)
    assert raw["schema"] == "crossover.sweep/1"
    assert [(p["role"], p["pass"], p["level"]) for p in raw["points"]] == [
        (role, number, level)
        for role in ("baseline", "speculative")
        for level in (1, 4)
        for number in (1, 2)
    ]
    assert set(raw["levels"][0]["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    assert raw["workload"]["tokens_from"] == "usage"
    added = data.replace(b'"schema"', b'"later": 1, "schema"', 1)
    assert decode_sweep(added) == found


def test_records_say_level_and_run(tmp_path: Path) -> None:
    """Each record has its level, its run, and the tokens that were asked for."""
    found = swept(tmp_path, {SPEC: FakeServer()}, Plan(levels=(1, 3), passes=1))
    for point in found.points:
        records = SweepDirectory(tmp_path).records(point)
        assert {(r.level, r.run) for r in records} == {(point.level, point.run)}
        assert all(r.asked_tokens == r.output_tokens for r in records)
        assert min(r.started for r in records) == pytest.approx(0.0, abs=1e-6)


def test_progress_is_told(tmp_path: Path) -> None:
    """While a level runs its phases are told, and a share that does not fall."""
    notes = Notes()
    swept(tmp_path, {SPEC: FakeServer()}, Plan(levels=(2,), passes=1), notes=notes)
    phases = list(dict.fromkeys(one.phase for one in notes.progress))
    assert phases[:2] == [Phase.WARM_UP, Phase.WINDOW]
    shares = [one.share for one in notes.progress]
    assert shares == sorted(shares)
    assert notes.over == ["speculative, pass 1, level 2"]


def test_a_level_waits_for_an_idle_server(tmp_path: Path) -> None:
    """Somebody else's requests delay a level for a moment, and are named when they stay."""
    fake = FakeServer()
    fake.running = 5
    found = swept(tmp_path, {SPEC: fake}, Plan(levels=(2,), passes=1), pace=PACE)
    assert fake.runs[0] == "speculative-1-2"
    assert "other-load" in found.points[0].notices
    assert found.points[0].most_running == 7
