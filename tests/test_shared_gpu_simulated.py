"""The forecast on a shared GPU with a capped server or with conversations, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest import shared_held_out
from loadtest.arms import shipped_trace
from loadtest.clairvoyant import best_schedule
from loadtest.compare import Load, Pair, play, rules, singles
from loadtest.own_prompts import Talks, own_prompts_pair
from loadtest.policy_table import CAP, capped, measured_pair

ROWS = shipped_trace()


def test_a_capped_pair_is_measured_up_to_its_cap() -> None:
    """The rule's curve ends where the server queues, and the server queues there."""
    pair = capped(measured_pair("topk1-2.8"))
    assert pair.model.speculative.max_running == CAP
    assert max(level for level, _ in pair.levels[0]) == CAP
    assert max(level for level, _ in pair.levels[1]) > CAP


def test_a_server_that_is_better_is_not_left_at_its_cap() -> None:
    """SGLang runs 48 requests at once when it speculates: reaching them is no reason to leave.

    The speculative server is twice as fast at this load, and touches its cap now and then.
    """
    pair = capped(measured_pair("topk1-2.8"))
    load = Load("4", 4.0, 200.0)
    baseline, speculative = (play(each, load, ROWS) for each in singles(pair))
    assert speculative.ms_per_token < 0.6 * baseline.ms_per_token
    found = play(rules(pair)[2], load, ROWS)
    assert found.switches == 0
    assert found.ms_per_token == pytest.approx(speculative.ms_per_token)


def test_the_bound_of_conversations_is_no_worse_than_a_server() -> None:
    """A schedule is found for turns that are asked after the load has ended, too."""
    pair: Pair = own_prompts_pair("topk1-1.6", ROWS, talks=True)
    load = Talks("3", 3.0, 80.0, 20.0)
    alone = [play(each, load, ROWS).ms_per_token for each in singles(pair)]
    assert best_schedule(pair, load, ROWS).ms_per_token <= min(alone) * 1.0001


def test_what_was_held_out() -> None:
    """Each kind is a line of the table, and a light load stays on the better server."""
    groups = list(shared_held_out.groups(ROWS, [0.0], ["topk4-2.8"], [1.0], [1.0]))
    assert [group.kind for group in groups] == list(shared_held_out.KINDS)
    assert [group.pair.speculative.max_running for group in groups] == [256, CAP, CAP]
    short = [
        groups[1]._replace(loads=[Talks("1", 1.0, 70.0), Talks("steps", 1.0, 30.0, 0.0)]),
        groups[2]._replace(loads=[Load("1", 1.0, 70.0), Load("steps", 1.0, 30.0, 0.0)]),
    ]
    found = shared_held_out.measure(short)
    assert list(found) == ["forecast, conversations, cap 48", "forecast, cap 48"]
    assert {each[0][:2] for each in found.values()} == {("1", 1.0)}


@pytest.mark.parametrize("arguments", [[], ["/nope", "1"], ["/nope", "x"]])
def test_held_out_says_what_is_wrong(arguments: list[str], capsys: Any) -> None:
    """A missing trace, no minute and one that is none are one line and exit code 2."""
    assert shared_held_out.main(arguments) == 2
    assert capsys.readouterr().err.startswith("loadtest.shared_held_out: ")
