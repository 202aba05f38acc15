"""Conversations in virtual time: what staying with a prefix brings, and where it does not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadtest import affinity_held_out
from loadtest.__main__ import app
from loadtest.affinity_tried import KeepingPolicy
from loadtest.arms import shipped_trace
from loadtest.compare import Outcome, play, rules, staying
from loadtest.own_prompts import CACHE_TOKENS, TURNS, Talks, for_prompts, own_prompts_pair
from loadtest.policy_table_text import table_text
from loadtest.simulator_load import steps
from router.affinity import Prefix
from router.load import BackendLoad, LoadSnapshot, PolicyMemory, Role
from router.policies import make_policy
from router.policy import Decision, Reason
from router.request import RequestInfo

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
ROWS = shipped_trace()
PAIR = own_prompts_pair("topk4-2.8", ROWS, talks=True, gpus=2)
LOAD = Talks("4", 4.0, 100.0, 30.0)


@pytest.mark.parametrize("name", ["threshold", "join-speed", "join-delay"])
def test_staying_saves_prefill_and_time_on_two_gpus(name: str) -> None:
    """With a GPU each a conversation that stays is answered sooner, and more of it is cached."""
    load = LOAD if name != "threshold" else Talks("6", 6.0, 120.0, 40.0)
    plain = next(each for each in rules(PAIR) if each.name == name)
    kept = next(each for each in staying(PAIR) if each.name == f"{name}, affinity")
    without, found = play(plain, load, ROWS), play(kept, load, ROWS)
    assert found.ms_per_token < 0.98 * without.ms_per_token
    assert found.ttft_ms is not None
    assert without.ttft_ms is not None
    assert found.ttft_ms < without.ttft_ms
    assert found.cached is not None
    assert without.cached is not None
    assert found.cached > without.cached + 0.01


def test_nobody_stays_where_nothing_is_cached_or_the_gpu_is_shared() -> None:
    """Affinity is compared only with conversations on a GPU each."""
    assert [each.remembers for each in staying(PAIR)] == [True] * 3
    assert staying(own_prompts_pair("topk4-2.8", ROWS, talks=True)) == []
    assert staying(own_prompts_pair("topk4-2.8", ROWS, gpus=2)) == []


def test_conversations_are_seeded_and_keep_the_rate() -> None:
    """The same seed gives the same conversations, another one others; their openings come rarer."""
    first = list(LOAD.calls(ROWS))
    assert first == list(LOAD.calls(ROWS))
    assert first != list(LOAD._replace(seed=1).calls(ROWS))
    requests = sum(1 + len(call.then) for call in first)
    assert requests / len(first) == pytest.approx(TURNS, rel=0.15)
    longer = list(LOAD._replace(turns=8.0).calls(ROWS))
    assert len(longer) < 0.6 * len(first)  # arrivals come in bursts
    moving = Talks("steps", steps((1.0, 3.0), 20.0), 80.0)
    assert 0 < len(list(moving.calls(ROWS))) < len(first)


def test_a_rule_is_told_of_what_no_cache_holds() -> None:
    """The prompts that a rule knows the servers by are shorter with conversations."""
    alone = for_prompts(PAIR, ROWS, None)
    assert (alone.cache_tokens, PAIR.cache_tokens) == (0.0, CACHE_TOKENS)
    assert PAIR.prompt_tokens < 0.5 * alone.prompt_tokens


# ---------------------------------------------------------------------- what was tried on one GPU


def keep(seconds: float, *, since: float, here: int = 3, there: int = 3, **more: Any) -> Decision:
    """A turn that the inner policy sends to the baseline, with its prefix on the other one."""
    snapshot = LoadSnapshot(
        100.0,
        BackendLoad(SPEC, there, cap=more.get("cap")),
        BackendLoad(BASE, here, available=more.get("available", True)),
        PolicyMemory(BASE, since),
        more.get("prefix", Prefix(4000, 0, 99.0)),
    )
    return KeepingPolicy(make_policy("baseline"), seconds=seconds).decide(
        snapshot, RequestInfo(prompt_bytes=5000)
    )


def test_what_was_tried_keeps_for_a_while() -> None:
    """For some seconds after a switch, while both servers run; or always."""
    kept = keep(3.0, since=98.0)
    assert (kept.backend, kept.reason) == (SPEC, Reason.PREFIX)
    assert keep(3.0, since=96.0).backend is BASE
    assert keep(3.0, since=98.0, there=0).backend is BASE
    assert keep(math.inf, since=0.0, there=0).backend is SPEC
    assert keep(math.inf, since=0.0, cap=3).backend is BASE
    assert keep(math.inf, since=0.0, prefix=None).backend is BASE
    assert keep(math.inf, since=0.0, prefix=Prefix(9000, 0, 99.0)).backend is BASE


# ---------------------------------------------------------------------- tables and commands


def cell(name: str, wait: float, first: float) -> Outcome:
    return Outcome(name, "rule", "3", wait, 9.0, 1.0, 0.5, 0, 9, first, 0.5)


def test_the_tables_of_conversations() -> None:
    """Each policy stands beside itself with affinity, and the shared GPU beside its better server."""
    names = ("two speculative", "threshold", "join-speed", "join-delay")
    cells = {("stay", "arm", "3", name): cell(name, 5.0, 50.0) for name in names}
    cells |= {
        ("stay", "arm", "3", f"{name}, affinity"): cell(name, 4.0, 40.0) for name in names[1:]
    }
    alone = {"speculative only": 6.0, "baseline only": 7.0, "forecast": 6.5, "forecast, kept": 8.0}
    cells |= {("shared", "arm", "3", name): cell(name, wait, 60.0) for name, wait in alone.items()}
    text = table_text(cells)
    assert "| arm | 3 | 5.00 / 50 | 5.00 / 50 | 4.00 / 40 | 5.00 / 50 | 4.00 / 40 |" in text
    assert "| arm | 3 | 6.00 / 60 | 6.50 / 60 | 8.00 / 60 |" in text
    assert "kept" not in table_text({})


def test_the_command_compares_conversations() -> None:
    """`--turns` adds prefix caches, and on two GPUs each rule with affinity."""
    given = ["compare", "--arm", "topk4-2.8", "--scale", "2", "--seconds", "40", "--turns", "4"]
    result = CliRunner().invoke(app, [*given, "--gpus", "two"])
    assert result.exit_code == 0, result.output
    for said in ("conversations of 4 turns", "join-delay, affinity", "cached"):
        assert said in result.output
    alone = CliRunner().invoke(app, given)
    assert alone.exit_code == 0
    assert "affinity" not in alone.output


def test_a_calibration_has_no_prefill_of_its_own(tmp_path: Path) -> None:
    """Its step times hold the sweep's prefill, so what a lost prefix costs cannot be said."""
    path = tmp_path / "c.json"
    path.write_text("{}")
    result = CliRunner().invoke(app, ["compare", "--calibration", str(path), "--turns", "4"])
    assert result.exit_code == 2
    assert "--turns needs prefill apart from the step times" in result.output


def test_what_was_held_out() -> None:
    """Each policy has a line for each kind of prompt, with its ratios to itself without affinity."""
    found = list(affinity_held_out.measure(ROWS, [0.0], [3.0], ["topk4-2.8"]))
    assert {each.prompts for each in found} == {"as recorded", "longer"}
    assert len(found) == 6
    assert all(0.5 < each.mean < 1.02 for each in found)
    lines = affinity_held_out.summary(found).splitlines()
    assert len(lines) == 8
    assert lines[2].startswith("| as recorded | threshold | ")


@pytest.mark.parametrize("arguments", [[], ["/nope", "1"], ["/nope", "x"]])
def test_held_out_says_what_is_wrong(arguments: list[str], capsys: Any) -> None:
    """A missing trace, no minute and one that is none are one line and exit code 2."""
    assert affinity_held_out.main(arguments) == 2
    assert capsys.readouterr().err.startswith("loadtest.affinity_held_out: ")
