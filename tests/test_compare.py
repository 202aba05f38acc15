"""Comparing arrangements: the advice in clear cases, the choice of a rule, the table and its cache."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadtest import held_out, policy_table
from loadtest.__main__ import app
from loadtest.arms import (
    ARMS,
    Level,
    arm_curves,
    curve_from_levels,
    levels_of,
    read_trace,
    shipped_trace,
)
from loadtest.choose import best_rule
from loadtest.clairvoyant import best_schedule
from loadtest.compare import (
    Arrangement,
    Kind,
    Load,
    Outcome,
    Pair,
    advice,
    arrangements,
    play,
    rules,
    singles,
)
from loadtest.compare_report import show
from loadtest.compare_run import Given, read_pair, run_compare
from loadtest.own_prompts import Talks, own_prompts_pair
from loadtest.policy_table_text import table_text
from loadtest.rules_tried import OfferedLoadPolicy, RegretPolicy, SchedulePolicy, cheapest
from loadtest.service import CurveError
from loadtest.simulator_contention import H200, SEPARATE, Contention
from loadtest.simulator_load import Row, steps
from router.load import Role
from router.policy import Reason

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
HALF = Contention.constant(0.6, 0.6)
FAST = [Level(1, 200), Level(8, 1000), Level(32, 1600), Level(128, 2000)]
WIDE = [Level(1, 100), Level(8, 700), Level(32, 2000), Level(128, 4000)]
# Four requests a second of 100 tokens each.
ROWS = [Row(i * 0.25, 50, 100) for i in range(400)]


def pair(spec: list[Level] = FAST, base: list[Level] = WIDE, gpus: Any = 1, **more: Any) -> Pair:
    return Pair(
        speculative=curve_from_levels(spec, "spec"),
        baseline=curve_from_levels(base, "base"),
        contention=HALF,
        gpus=gpus,
        prompt_tokens=0,
        **more,
    )


def outcome(name: str, kind: Kind, wait: float) -> Outcome:
    return Outcome(name, kind, "x1", wait, wait, 1.0, 0.5, 0, 10)


def compared(found: Pair, load: Load) -> tuple[str, dict[str, Outcome]]:
    outcomes = [play(each, load, ROWS) for each in arrangements(found)]
    return advice(outcomes, found.gpus), {each.name: each for each in outcomes}


def test_a_curve_from_levels_gives_its_levels_back() -> None:
    """Levels with their accept lengths make a curve whose closed loop gives the same tokens/s."""
    levels = [Level(c, r, None, 2.0) for c, r, *_ in WIDE]
    made = curve_from_levels([*levels, Level(8, 900, None, 2.0)], "test")
    assert made.tokens_per_step == 2.0
    again = dict(level[:2] for level in levels_of(made, 999, 128))
    assert again == pytest.approx({1: 100, 8: 800, 32: 2000, 128: 4000})
    with pytest.raises(CurveError, match="not a level"):
        curve_from_levels([Level(1, 0)], "test")
    with pytest.raises(CurveError, match="no decode step"):
        curve_from_levels(levels, "test", output_tokens=1)


def test_shipped_arms_and_trace() -> None:
    """The four arms share their baseline; the trace is ten minutes of chat."""
    assert len({arm_curves(arm)[1] for arm in ARMS}) == 1
    assert arm_curves("topk1-1.6")[0].tokens_per_step == 1.6
    assert arm_curves("topk1-1.6")[0].points == arm_curves("topk1-2.0")[0].points
    rows = shipped_trace()
    assert (len(rows), round(rows[-1].at)) == (2867, 600)
    with pytest.raises(CurveError, match="no arm is called"):
        arm_curves("topk9")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a,b"], "has the columns"),
        (["seconds,prompt,output", "0,1"], "line 2: no arrival"),
        (["seconds,prompt,output", "1,1,1", "0,1,1"], "line 3: earlier"),
    ],
)
def test_no_trace(lines: list[str], message: str) -> None:
    """What is no trace is refused with its line."""
    with pytest.raises(CurveError, match=message):
        read_trace(lines, "t.csv")


def test_the_azure_format_is_read_over_midnight() -> None:
    """Its times count from the first arrival, and a new day goes on."""
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 23:59:59.5000000,374,44",
        "2023-11-17 00:00:01.0000000,396,109",
    ]
    assert read_trace(lines, "t") == [Row(0.0, 374, 44), Row(1.5, 396, 109)]


def test_one_gpu_and_a_light_load_need_one_server() -> None:
    """Where one server is better all the time the advice is to run that one."""
    said, found = compared(pair(), Load("x0.5", 0.5, 60.0, 10.0))
    assert said.startswith("Run one server (speculative only), not the pair")
    assert found["forecast"].ms_per_token == pytest.approx(
        found["speculative only"].ms_per_token, rel=0.01
    )
    assert found["round robin"].ms_per_token > found["speculative only"].ms_per_token
    assert found["round robin"].switches == found["round robin"].requests - 1


def test_one_gpu_and_a_load_that_changes_is_for_the_pair() -> None:
    """Where each server is far better for minutes at a time the advice is to run both."""
    quick = [Level(1, 400), Level(8, 1500), Level(32, 1600), Level(128, 1600)]
    changing = steps((2.0, 5.0), 120.0)
    said, found = compared(pair(quick), Load("steps", changing, 480.0, 0.0))
    assert said.startswith("Run the pair with ")
    assert found["forecast"].ms_per_token < found["baseline only"].ms_per_token
    assert found["forecast"].ms_per_token < found["speculative only"].ms_per_token


def test_two_gpus_are_compared_with_equal_servers() -> None:
    """With a GPU each the control is two servers of the better kind."""
    slow = [Level(level.concurrency, level.tokens_per_second / 10) for level in WIDE]
    said, found = compared(pair(FAST, slow, 2), Load("x2", 2.0, 60.0, 10.0))
    assert said.startswith("Run two equal servers (two speculative), not the pair")
    assert {"two baseline", "two speculative"} <= found.keys()


def test_adaptive_is_a_single_server_and_a_control() -> None:
    """A curve of the engine's own adaptive speculation is compared on one GPU and on two."""
    adaptive = curve_from_levels(WIDE, "adaptive")
    one = {each.name for each in arrangements(pair(adaptive=adaptive))}
    two = {each.name for each in arrangements(pair(gpus=2, adaptive=adaptive))}
    assert "adaptive only" in one
    assert "two adaptive" not in one
    assert "two adaptive" in two


@pytest.mark.parametrize(
    ("wait", "said"),
    [(5.0, "Run the pair with forecast"), (9.9, "as good and no better"), (12.0, "20% slower")],
)
def test_advice(wait: float, said: str) -> None:
    """A gain below 2 % is not worth a second server, and a loss is said as one."""
    found = [outcome("baseline only", "single", 10.0), outcome("forecast", "rule", wait)]
    assert said in advice(found, 1)


def test_the_table_marks_the_fastest() -> None:
    """Every arrangement has its line, with mean, 95th percentile and share."""
    text = io.StringIO()
    show(Console(file=text, width=120), [outcome("forecast", "rule", 9.87)], "title")
    assert "forecast" in text.getvalue()
    assert "9.87" in text.getvalue()


def test_the_best_rule_where_the_curves_cross() -> None:
    """On one GPU a measured pair that crosses is best with the forecast, told of the overlaps."""
    spec, base = arm_curves("topk4-2.8")
    found = best_rule(levels_of(spec, 0, 128), levels_of(base, 0, 128), H200, 1, shares=(0.45,))
    assert found.name == "forecast"
    assert found.parameters["speculative_share"] == pytest.approx(0.637, abs=0.001)
    assert found.lead > 0
    assert found.runner_up in found.scores
    assert "forecast is best" in found.sentence


def test_the_best_rule_where_one_server_wins() -> None:
    """Where one server is faster at every load nothing beats `always` or `never`."""
    slow = [Level(level.concurrency, level.tokens_per_second * 0.8) for level in WIDE]
    always = best_rule(WIDE, slow, HALF, 1, rows=ROWS, shares=(0.5,))
    assert always.scores["always"] == pytest.approx(1.0)
    assert (always.name, always.parameters) == ("always", {})
    assert "as good as" in always.sentence
    never = best_rule(slow, WIDE, HALF, 1, rows=ROWS, shares=(0.5,))
    assert never.scores["never"] == pytest.approx(1.0, abs=0.01)


def test_the_best_rule_on_two_gpus() -> None:
    """With a GPU each a rule that joins the better server wins."""
    found = best_rule(FAST, WIDE, SEPARATE, 2, rows=ROWS, shares=(0.4,))
    assert found.name.startswith("join-")
    assert found.parameters == {}


def test_the_cheapest_way_through_slots() -> None:
    """A free change follows the cheaper side, a dear one stays, and the start is free."""
    costs = [(1.0, 9.0), (1.0, 9.0), (9.0, 1.0), (1.0, 9.0)]
    assert cheapest(costs, 0.0, 10.0) == [(0.0, SPEC), (20.0, BASE), (30.0, SPEC)]
    assert cheapest(costs, 5.0, 10.0) == [(0.0, SPEC)]
    assert cheapest([(9.0, 1.0)], 100.0, 10.0) == [(0.0, BASE)]


def test_who_knows_the_load_is_not_slower_than_one_server() -> None:
    """The clairvoyant schedule is at least as good as either server alone, and a rule no better."""
    load = Load("steps", steps((0.25, 6.0), 60.0), 240.0, 0.0)
    found = pair()
    bound = best_schedule(found, load, ROWS).ms_per_token
    alone = [play(each, load, ROWS).ms_per_token for each in singles(found)]
    assert bound <= min(alone) * 1.0001
    forecast = play(rules(found)[2], load, ROWS).ms_per_token
    assert forecast > bound * 0.98


@pytest.mark.parametrize("kind", [OfferedLoadPolicy, RegretPolicy])
def test_what_was_tried_decides_both_ways(kind: type[OfferedLoadPolicy]) -> None:
    """The rules that were tried leave an overloaded server and come back when the load is light."""
    found = pair()
    each = rules(found)[2]._replace(policy=kind(found.levels))
    load = Load("steps", steps((6.0, 0.25), 90.0), 180.0, 0.0)
    run = play(each, load, ROWS)
    assert 0.0 < run.speculative_share < 0.9
    assert run.switches >= 1


def test_a_schedule_is_kept() -> None:
    """A schedule sends everything to the side of the moment."""
    load = Load("x1", 1.0, 20.0, 0.0)
    policy = SchedulePolicy([(0.0, SPEC), (10.0, BASE)])
    run = play(rules(pair())[0]._replace(policy=policy), load, ROWS)
    assert run.speculative_share == pytest.approx(0.5, abs=0.02)
    assert run.switches == 1


def test_conversations_cost_less_where_they_stay() -> None:
    """With prefix caches round robin prefills more than one server and is slower for it."""
    rows = shipped_trace()
    found = own_prompts_pair("topk1-2.0", rows, talks=True)
    load = Talks("1.5", 1.5, 60.0, 10.0)
    named = {each.name: play(each, load, rows) for each in arrangements(found)[:4]}
    assert named["round robin"].ms_per_token > named["speculative only"].ms_per_token * 1.2


def test_the_policy_table_is_resumed(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """What is in the cache is not simulated again, a torn line is; other code starts over."""
    monkeypatch.setattr(policy_table, "SCALES", (1.0,))
    monkeypatch.setattr(policy_table, "TWO_SCALES", (1.0,))
    monkeypatch.setattr(policy_table, "OWN_SCALES", ())
    monkeypatch.setattr(policy_table, "TALK_SCALES", ())
    monkeypatch.setattr(policy_table, "STAY_SCALES", (1.0,))
    monkeypatch.setattr(policy_table, "CAP_SCALES", (1.0,))
    monkeypatch.setattr(policy_table, "changing_talks", lambda: [Talks("3", 1.0, 70.0)])
    monkeypatch.setattr(policy_table, "STEADY_S", 70.0)
    monkeypatch.setattr(policy_table, "ARMS", {"topk4-2.8": None})
    monkeypatch.setattr(policy_table, "changing", lambda: [Load("steps", 1.0, 30.0, 0.0)])
    monkeypatch.setattr(policy_table, "digest", lambda: "one")
    cache = tmp_path / "runs" / "table.jsonl"
    assert policy_table.main([str(cache)]) == 0
    text = capsys.readouterr().out
    assert "### One GPU, topk4-2.8" in text
    assert "| clairvoyant |" in text
    assert "### Two GPUs, conversations: with and without affinity" in text
    assert "| arm | load | better server | forecast | forecast, kept 3 s | forecast, kept" in text
    assert "forecast, kept always | clairvoyant |" in text
    assert "### One GPU, topk4-2.8, a speculative server that runs 48 at most" in text
    lines = cache.read_bytes().splitlines()
    cache.write_bytes(b"\n".join([*lines[:-1], lines[-1][:20]]))
    played: list[str] = []

    def counted(each: Arrangement, *rest: Any) -> Outcome:
        played.append(each.name)
        return play(each, *rest)

    monkeypatch.setattr(policy_table, "play", counted)
    assert policy_table.main([str(cache)]) == 0
    assert capsys.readouterr().out == text
    assert len(played) == 1
    assert policy_table.read_cache(cache, "another") == {}


def test_the_tables_show_the_better_server() -> None:
    """A rule's ratios are to the single server with the lower mean, whatever its 95th percentile."""
    named = {
        "speculative only": Outcome("", "single", "1", 10.0, 30.0, 1, 1, 0, 9),
        "baseline only": Outcome("", "single", "1", 12.0, 20.0, 1, 0, 0, 9),
        "forecast": Outcome("", "rule", "1", 11.0, 33.0, 1, 0, 3, 9),
    }
    cells = {
        ("one", "arm", load, name): each for load in ("1", "steps") for name, each in named.items()
    }
    text = table_text(cells)
    assert "| 1 | 10.0 / 30.0 | 12.0 / 20.0 | 11.0 / 33.0 | 1.100 | 1.100 | 3 |  |" in text


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["compare", *arguments])


def test_the_command_compares_files(tmp_path: Path) -> None:
    """Curve files by name, a picture, and one sentence at the end."""
    files = {}
    for name, levels in (("base", WIDE), ("spec", FAST)):
        points = [
            {"C": c, "out_tok_s": r, "tokens_per_chunk": 1.0, "ttft_ms": {"p50": 10.0}}
            for c, r, *_ in levels
        ]
        body = {"label": name, "input_tokens": 10, "output_tokens": [64, 192], "points": points}
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(json.dumps(body))
    result = run(
        "--curves", ",".join(f"{name}={path}" for name, path in files.items()),
        "--scale", "0.5", "--seconds", "40", "--gpus", "two",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "two speculative" in result.output
    assert "Run " in result.output.splitlines()[-1] or "Run " in result.output


def test_the_command_compares_what_a_sweep_left() -> None:
    """`--curves` takes the sweep.json of `loadtest sweep`, also as SGLang's adaptive speculation."""
    kept = "deploy/calibrations/h200-sim-acc2.0/sweep.json"
    result = run(
        "--curves", f"base={kept},spec={kept},adaptive={kept}", "--scale", "1", "--seconds", "40"
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "adaptive" in result.output


@pytest.mark.parametrize(("scale", "piles_up"), [("4", False), ("30", True)])
def test_a_load_that_nobody_carries_is_said(scale: str, piles_up: bool) -> None:
    """Without a word, an overload looks like a verdict on the pair."""
    out = io.StringIO()
    given = Given(
        curves=None, calibration=None, arm="topk4-2.8", trace=None, scale=float(scale), low=1.5,
        shape="steady", seconds=60.0, judged_after=None, gpus=1, plot=None,
    )  # fmt: skip
    run_compare(given, Console(file=out, width=200))
    assert ("Nothing here keeps up with this load" in out.getvalue()) is piles_up


def test_the_command_compares_a_calibration(tmp_path: Path) -> None:
    """A calibration's curves are taken as they are."""
    points = {
        name: {"points": [{"concurrency": c, "tokens_per_second": r} for c, r, *_ in levels]}
        for name, levels in (("speculative", FAST), ("baseline", WIDE))
    }
    body = {"schema": "crossover.calibration/1", "frontier": {"threshold": 12}, "curves": points}
    path = tmp_path / "c.json"
    path.write_text(json.dumps(body))
    result = run("--calibration", str(path), "--scale", "0.5", "--seconds", "40")
    assert result.exit_code == 0, result.output
    assert "forecast" in result.output


@pytest.mark.parametrize(
    ("said", "tokens"),
    [({"output_tokens": "100-300"}, 200), ({"output_tokens": 16}, 16), ({}, 128)],
)
def test_the_forecast_knows_the_length_of_the_calibration(
    tmp_path: Path, said: dict[str, str], tokens: int
) -> None:
    """It is told what its sweep asked for, as the router tells it, and 128 where nothing is said."""
    points = {
        name: {"points": [{"concurrency": c, "tokens_per_second": r} for c, r, *_ in levels]}
        for name, levels in (("speculative", FAST), ("baseline", WIDE))
    }
    body = {"schema": "crossover.calibration/1", "frontier": {"threshold": 12}, "curves": points}
    path = tmp_path / "c.json"
    path.write_text(json.dumps(body | {"fingerprint": said}))
    given = Given(
        curves=None, calibration=path, arm=None, trace=None, scale=1.0, low=0.5, shape="steady",
        seconds=40.0, judged_after=None, gpus=1, plot=None,
    )  # fmt: skip
    pair = read_pair(given, [])
    assert pair.parameters["output_tokens"] == tokens
    # And its levels are those of the file, whatever the length.
    for found, levels in zip(pair.levels, (FAST, WIDE), strict=True):
        assert dict(found) == pytest.approx(dict(level[:2] for level in levels))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name the servers by one of"),
        (("--arm", "x"), "no arm is called"),
        (("--curves", "base=a"), "--curves names"),
        (("--curves", "base=/nope,spec=/nope"), "cannot be read"),
        (("--arm", "topk4-2.8", "--trace", "/nope"), "cannot be read"),
        (("--arm", "topk4-2.8", "--shape", "day", "--low", "5"), "--low 5 is not below"),
        (("--calibration", "/nope"), "cannot be read"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: tuple[str, ...], said: str) -> None:
    """Bad input is one line and exit code 2."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert result.output.count("\n") <= 1


def test_every_reason_of_the_rules_is_explained() -> None:
    """The simulator's runs use only reasons of the closed set."""
    run = play(rules(pair())[2], Load("x2", 2.0, 30.0, 0.0), ROWS)
    assert run.requests > 0
    assert {Reason.FORECAST, Reason.FORECAST_SWITCH, Reason.FORECAST_UNSURE} <= set(Reason)


def test_windows_of_a_trace_are_brought_to_one_load() -> None:
    """A window starts at its minute, and one that asks for half as much is played twice as fast."""
    rows = [Row(float(at), 10, 50) for at in range(1300)]
    part = held_out.window(rows, 10)
    assert (len(part), part[0].at, part[-1].at) == (600, 0.0, 599.0)
    assert held_out.tokens_per_second(part) == 50.0
    assert held_out.scaled(Load("a", 3.0, 1.0), 2.0).scale == 6.0
    moving = held_out.scaled(Load("b", lambda now: now, 1.0), 2.0).scale
    assert callable(moving)
    assert moving(4.0) == 8.0
    with pytest.raises(CurveError, match="from minute 50 on"):
        held_out.window(rows, 50)


def test_the_held_out_table() -> None:
    """Each rule has a line with its ratios to the better single server; those have none."""
    rows = shipped_trace()
    loads = [Load("1", 1.0, 70.0), Load("steps", 2.0, 30.0, 0.0)]
    found = held_out.measure(rows, [0.0], loads, ["topk4-2.8"])
    assert "speculative only" not in found
    assert found["forecast"][0] == held_out.Ratio("1", 1.0, 1.0)
    assert found["least in-flight"][0].mean > 1.2
    assert "| forecast | 1 of 1 | 1.00 | 1.00 | 1.000 | 1.000 | 0 of 1 |" in held_out.summary(found)


@pytest.mark.parametrize("arguments", [[], ["/nope", "1"], ["/nope", "x"]])
def test_held_out_says_what_is_wrong(arguments: list[str], capsys: Any) -> None:
    """A missing trace, no minute and one that is none are one line and exit code 2."""
    assert held_out.main(arguments) == 2
    assert capsys.readouterr().err.startswith("loadtest.held_out: ")
