"""Whether the demo's pair was worth it: judged where the machine was fast enough to tell.

Nothing real is run or asked here. The demo's servers are simulated ones with planted curves, so what
the same load gives in virtual time is known before it runs (`virtual`): no machine makes more, and
one that is slow or busy makes less. So the two runs of one server measure the machine, and the run of
the pair is judged by their side:

    not judged   a level is too short for an answer; or one server alone made less than `FAST_ENOUGH` of
                 its tokens in virtual time, or the pair did while only one of them was at work: then the
                 machine was the bottleneck, and the comparison would be one of noise
    passed       the pair made at least `LEAST` of the tokens of the better server alone, both at the
                 speed of virtual time: each run's tokens by what the machine made of it in that run
    failed       it made less

In virtual time the pair makes 1.03 times the better server's tokens; with a line that is never reached
it makes 0.97, and if the load is split evenly 0.65.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from loadtest.arrivals import Closed
from loadtest.curve_files import shipped_curve
from loadtest.demo_stage import LINE, PAIR
from loadtest.record import RequestRecord
from loadtest.simulator import PairModel, ServerModel, Simulation
from loadtest.simulator_contention import Contention
from loadtest.simulator_load import Size
from loadtest.verdict import TIE, Score, level_scores, total_score
from router.frontier import Frontier
from router.load import Role
from router.policies import make_policy

# Tokens of a question of the demo, the chat template's own included.
PROMPT_TOKENS: Final = 22
TELEMETRY_S: Final = 0.2  # the router's default
# Twice what an answer takes at the slowest level (28 tokens of 26 ms).
SHORTEST_LEVEL_S: Final = 1.5
# Two cores that others keep busy (load 3 to 5) make 0.96 of the tokens that virtual time makes, at a
# load of 8 they make 0.91; the pair, which has the most to do, is then the first to be late.
FAST_ENOUGH: Final = 0.93
# As good as the better server, but for what two runs of the same thing differ by.
LEAST: Final = 1.0 - TIE


class Speed(msgspec.Struct, frozen=True):
    """The verdict on speed."""

    ok: bool | None  # None: not judged
    text: str


class Run(msgspec.Struct, frozen=True):
    """One run of the load, measured or in virtual time."""

    tok_s: float
    levels: list[Score]


def summed(records: Sequence[RequestRecord], load: Closed) -> Run:
    """What a run comes to."""
    return Run(total_score(records, load).tok_s, level_scores(records, load))


def virtual(load: Closed, tokens: Iterator[int], only: Role | None) -> Run:
    """The run in virtual time, on a machine that is never late. Takes some milliseconds.

    `tokens`: of each answer, in the order in which the demo asks for them.
    """
    curves = {role: shipped_curve(PAIR, role) for role in Role}
    speculative, baseline = (
        ServerModel(curve=curve, max_running=curve.max_running) for curve in curves.values()
    )
    kept = [curve.kept_share for curve in curves.values()]
    pair = PairModel(
        speculative=speculative, baseline=baseline, contention=Contention.constant(*kept)
    )
    line = Frontier.total(LINE.threshold)
    policy = (
        make_policy("frontier", frontier=line, band=LINE.band, dwell=LINE.dwell)
        if only is None
        else make_policy(only.value)
    )
    sizes = (Size(PROMPT_TOKENS, count) for count in tokens)
    run = Simulation(pair, policy, telemetry_s=TELEMETRY_S).keep(load, sizes)
    records = [
        RequestRecord(
            id=str(at),
            backend=run.backend[at],
            started=run.started[at],
            first_chunk=run.first[at],
            ended=run.ended[at],
            output_tokens=run.output[at],
        )
        for at in range(len(run))
    ]
    return summed(records, load)


def judge(load: Closed, measured: Mapping[Role | None, Run], known: Mapping[Role, Run]) -> Speed:
    """The verdict. `known`: both single servers in virtual time."""
    shortest = min(level.end - level.start for level in load.levels)
    if shortest < SHORTEST_LEVEL_S:
        return _not(
            f"levels of {shortest:g} s are too short for their answers; it takes"
            f" {SHORTEST_LEVEL_S:g} s (--seconds-per-level)"
        )
    shares = [measured[role].tok_s / run.tok_s for role, run in known.items()]
    for role, share in zip(known, shares, strict=True):
        if share < FAST_ENOUGH:
            return _not(_slow(f"{role.value} only", share))
    alone = _where_one_works(measured[None].levels, known) or statistics.fmean(shares)
    if alone < FAST_ENOUGH:
        return _not(_slow("the pair, while one server was at work,", alone))
    better = max(known, key=lambda role: known[role].tok_s)
    gain = measured[None].tok_s / alone / known[better].tok_s
    wanted = f"at least {LEAST:.2f} is wanted, and this machine had {min(*shares, alone):.0%}"
    return Speed(
        ok=gain >= LEAST,
        text=f"the pair made {gain:.2f} times the tokens of {better.value} only, the better server"
        f" ({wanted} of the speed of virtual time)",
    )


def _where_one_works(levels: Sequence[Score], known: Mapping[Role, Run]) -> float | None:
    """The pair's tokens by those of virtual time, where all went to one server for two levels."""
    made = expected = 0.0
    for at in range(1, len(levels)):
        used = {
            role for level in levels[at - 1 : at + 1] for role in Role if level.by_backend[role]
        }
        if len(used) == 1:
            made += levels[at].tok_s
            expected += known[used.pop()].levels[at].tok_s
    return made / expected if expected else None


def _slow(what: str, share: float) -> str:
    return (
        f"{what} made {share:.1%} of its tokens in virtual time, less than {FAST_ENOUGH:.0%}: this"
        " machine is too slow, or too busy with other things"
    )


def _not(why: str) -> Speed:
    return Speed(ok=None, text=f"not judged: {why}")
