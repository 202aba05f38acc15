"""Records of a live comparison become outcomes, and outcomes an advice.

Pure. How the figures are made:

    ms per token    of one request: its whole time by its output tokens, first token included. Of
                    complete answers that ended within the window. Over several passes each pass
                    counts alike
    p95             of the requests of all passes (nearest rank)
    tok/s           output tokens that came within the window, by its length
    share, switches of the requests that started within the window and that a server answered, in
                    the order of their starts
    errors          of the whole run, warm-up included

Intervals are those of a sweep (`intervals`): of a mean, Student's t over passes, from three on, else
over equal parts of the window, each as long as a median request or longer; of a percentile, between
two measured values. Parts of one window know nothing of what changes from one hour to the next.

Over all loads each load counts alike: the mean of its times per token.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from loadtest.advice import Time, faster, pair_or
from loadtest.intervals import mean_figure, percentile
from loadtest.live_schema import KINDS, Advice, Cell, Comparison, Offered, Outcome
from loadtest.record import RequestRecord
from loadtest.summary import (
    PASSES_FOR_T,
    Window,
    batches,
    edges,
    ended_within,
    first_token_s,
    tokens_within,
)
from loadtest.sweep_schema import Figure
from router.load import Role

# In sentences a policy that uses one server is called what the simulator calls it.
ALONE: Final = "{} only"


class Passed(NamedTuple):
    """One cell and its records."""

    cell: Cell
    records: Sequence[RequestRecord]

    @property
    def window(self) -> Window:
        """Its window."""
        start = self.cell.window_start_s
        return Window(start, start + self.cell.window_s)


def ms_per_token(records: Iterable[RequestRecord], window: Window) -> list[float]:
    """Of complete answers that ended within the window and whose tokens are known."""
    times = (record.seconds_per_token for record in ended_within(records, window))
    return [seconds * 1e3 for seconds in times if seconds is not None]


def outcome(policy: str, load: str, passes: Sequence[Passed]) -> Outcome:
    """One policy under one load. Raises ValueError where a pass has no answer to judge."""
    times = [ms_per_token(one.records, one.window) for one in passes]
    if not all(times):
        raise ValueError(f"{policy} under load {load}: no answer ended in the window")
    means = [statistics.fmean(each) for each in times]
    speeds = [
        tokens_within(p.records, p.window.start, p.window.end) / p.window.seconds for p in passes
    ]
    parts = [part for one in passes for part in _parts(one)]
    time, interval = _mean(means, parts)
    speed, _ = _mean(speeds, [part for p in passes for part in batches(p.records, p.window)])
    p95 = percentile(sorted(itertools.chain(*times)), 0.95)
    ended = [r for one in passes for r in ended_within(one.records, one.window)]
    firsts = sorted(s * 1e3 for r in ended if (s := first_token_s(r)) is not None)
    sides = [_sides(one) for one in passes]
    routed = list(itertools.chain(*sides))
    return Outcome(
        policy=policy,
        kind=KINDS[policy],
        load=load,
        passes=len(passes),
        interval=interval,
        ms_per_token=time,
        p95_ms_per_token=p95 or time,
        tok_s=speed,
        ttft_p50_ms=percentile(firsts, 0.5),
        speculative_share=routed.count(Role.SPECULATIVE) / len(routed) if routed else 0.0,
        switches=sum(a is not b for each in sides for a, b in itertools.pairwise(each)),
        requests=sum(one.cell.requests for one in passes),
        errors=sum(one.cell.errors for one in passes),
        gave_up=any(one.cell.gave_up for one in passes),
    )


def advise(comparison: Comparison) -> tuple[Advice, ...]:
    """One sentence for each load, and one over all if there are several."""
    found: list[Advice] = []
    whole = {policy: [] for policy in comparison.policies}  # type: dict[str, list[Outcome]]
    for load in comparison.loads:
        outcomes = [each for each in comparison.outcomes if each.load == load.name]
        for each in outcomes:
            whole[each.policy].append(each)
        if outcomes:
            found.append(Advice(load.name, _sentence([[each] for each in outcomes])))
    complete = [each for each in whole.values() if len(each) == len(comparison.loads)]
    if len(comparison.loads) > 1 and complete:
        found.append(Advice(None, _sentence(complete)))
    return tuple(found)


def said_of(advice: Advice, loads: Sequence[Offered]) -> str:
    """The sentence with its place in front."""
    if advice.load is None:
        return f"Over all loads: {advice.text}"
    load = next(load for load in loads if load.name == advice.load)
    return f"At {load}: {advice.text}"


def _sentence(policies: Sequence[Sequence[Outcome]]) -> str:
    """What to run; each policy by its outcomes under one or more loads."""
    ranked = sorted(policies, key=lambda each: _time(each).ms)
    single = next((each for each in ranked if each[0].kind == "single"), None)
    pair = next((each for each in ranked if each[0].kind != "single"), None)
    if len(ranked) == 1:
        text, named = f"Only {_time(ranked[0]).name} is measured: {_time(ranked[0])}.", ranked
    elif single and pair:
        text = pair_or(_time(pair), _time(single), "one server", among="policy")
        named = [pair, single]
    else:
        named = ranked[:2]
        text = faster(_time(ranked[0]), _time(ranked[1]))
        if pair:
            text += " Add baseline and speculative to --policies to know whether to run a pair."
    return text + _doubts(named)


def _doubts(named: Sequence[Sequence[Outcome]]) -> str:
    """What makes a sentence doubtful."""
    errors = {_time(each).name: sum(o.errors for o in each) for each in named}
    text = ""
    if any(errors.values()):
        counts = ", ".join(f"{name} {count}" for name, count in errors.items() if count)
        text += f" Requests failed ({counts}): read the errors first."
    if late := [_time(each).name for each in named if any(o.gave_up for o in each)]:
        text += f" The load was too much for {' and '.join(late)}: its times would go on rising."
    if astray := [_time(each).name for each in named if any(_astray(o) for o in each)]:
        text += f" The router sent some of {' and '.join(astray)} elsewhere: read the reasons."
    if any(o.interval == "none" for each in named for o in each):
        text += " How sure that is, is not known: so few answers have no interval."
    return text


def _astray(outcome: Outcome) -> bool:
    """Whether a policy of one server had requests at the other: refused, replayed or fenced."""
    alone = {"speculative": 1.0, "baseline": 0.0}
    return alone.get(outcome.policy, outcome.speculative_share) != outcome.speculative_share


def _time(outcomes: Sequence[Outcome]) -> Time:
    """Mean over loads; the intervals of independent means add up as squares."""
    first, count = outcomes[0], len(outcomes)
    figures = [each.ms_per_token for each in outcomes]
    halves = [None if f.high is None else f.high - f.value for f in figures]
    known = [half for half in halves if half is not None]
    name = ALONE.format(first.policy) if first.kind == "single" else first.policy
    half = math.hypot(*known) / count if len(known) == count else None
    return Time(name, math.fsum(f.value for f in figures) / count, half)


def _sides(one: Passed) -> list[Role]:
    window = one.window
    started = sorted(
        (r for r in one.records if window.start <= r.started < window.end),
        key=lambda record: record.started,
    )
    return [record.backend for record in started if record.backend is not None]


def _parts(one: Passed) -> list[float]:
    """Mean ms per token in equal parts of the window."""
    found = (
        ms_per_token(one.records, Window(start, end))
        for start, end in itertools.pairwise(edges(one.records, one.window))
    )
    return [statistics.fmean(times) for times in found if times]


def _mean(
    means: Sequence[float], parts: Sequence[float]
) -> tuple[Figure, Literal["passes", "batches", "none"]]:
    if len(means) >= PASSES_FOR_T:
        return mean_figure(means), "passes"
    value = statistics.fmean(means)
    if len(parts) < 2:
        return Figure(value), "none"
    found = mean_figure(parts)
    half = (found.high or found.value) - found.value
    return Figure(value, value - half, value + half), "batches"
