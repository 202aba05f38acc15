"""What three runs of the same load say of a pair, and whether its decisions explain themselves.

Pure: records and the router's decisions in, numbers and sentences out.

How the numbers are made:

    tok/s          output tokens that came while the load lasted, by the time that it lasted; a
                   request's tokens count in the levels in which they came
    ms per token   of one request: its whole time by its output tokens, first token included. A
                   request belongs to the level in which it started. Over a whole load each level
                   counts alike, however many requests it had: a slow server answers fewer
                   requests, and would hide just its slow levels in a plain mean

The speed of the pair is compared with the better single server, and with a router that cannot be:
the better server at every level, with switches that cost nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from loadtest.arrivals import Closed, Level
from loadtest.record import RequestRecord, Threshold, as_number
from router.agreement import agrees
from router.load import PolicyMemory, Role
from router.policy import Decision, Reason

# Two runs of the same thing on a busy machine differ by a few percent.
TIE: Final = 0.03


class Line(msgspec.Struct, frozen=True):
    """The line that the pair was run with: n + m against K."""

    threshold: float  # K
    band: float
    dwell: float  # seconds

    @property
    def lower(self) -> float:
        """The lower edge of the band, in requests."""
        return self.threshold * (1.0 - self.band)


class Decided(msgspec.Struct, frozen=True, tag_field="kind", tag="decision"):
    """One decision as the router's /decisions shows it; what is not needed here is left out."""

    request_id: str
    backend: Role | None
    reason: Reason
    n: int
    m: int
    frontier: Threshold | None = None  # F(m)
    threshold: Threshold | None = None  # K


class Happened(msgspec.Struct, frozen=True, tag_field="kind", tag="event"):
    """Something that an operator did, in the same list."""

    event: str
    detail: str


class DecisionPage(msgspec.Struct, frozen=True):
    """The body of /decisions."""

    items: list[Decided | Happened]


class Score(msgspec.Struct, frozen=True):
    """How fast one run was: over its whole load, or in one level of it."""

    tok_s: float
    ms_per_token: float | None  # mean; None if no request started there
    p95_ms_per_token: float | None
    requests: int
    by_backend: dict[Role, int]


class Check(msgspec.Struct, frozen=True):
    """One thing that has to be true of the run."""

    ok: bool
    text: str


def level_scores(records: Sequence[RequestRecord], load: Closed) -> list[Score]:
    """One score for each level of the load."""
    return [_level(records, level) for level in load.levels]


def total_score(records: Sequence[RequestRecord], load: Closed) -> Score:
    """One score for the whole load, each level counting alike."""
    weighted: list[tuple[float, float]] = []
    for level in load.levels:
        values = _ms_per_token(_started_in(records, level))
        weighted += [(value, 1.0 / len(values)) for value in values]
    weight = sum(share for _, share in weighted)
    return Score(
        sum(record.tokens_between(0.0, load.seconds) for record in records) / load.seconds,
        sum(value * share for value, share in weighted) / weight if weighted else None,
        quantile(weighted, 0.95),
        len(records),
        _by_backend(records),
    )


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float | None:
    """The smallest value that this share of the weight does not exceed; None of nothing."""
    limit = share * sum(weight for _, weight in weighted)
    ordered = sorted(weighted)
    reached = itertools.accumulate(weight for _, weight in ordered)
    for (value, _), sum_so_far in zip(ordered, reached, strict=True):
        if sum_so_far >= limit:
            return value
    return ordered[-1][0] if ordered else None


def best_of_each_level(runs: Iterable[Sequence[Score]]) -> float:
    """Tok/s of the better server at every level, were switching free."""
    return statistics.fmean(
        max(score.tok_s for score in level) for level in zip(*runs, strict=True)
    )


def overlap_seconds(records: Iterable[RequestRecord]) -> float:
    """How long both servers had work at once."""
    edges: list[tuple[float, int, Role]] = []
    for record in records:
        if record.backend is not None:
            edges += [(record.started, 1, record.backend), (record.ended, -1, record.backend)]
    edges.sort(key=lambda edge: edge[:2])
    open_on: Counter[Role] = Counter()
    total = 0.0
    for (at, change, role), (later, _, _) in itertools.pairwise(edges):
        open_on[role] += change
        if all(open_on[each] for each in Role):
            total += later - at
    return total


def speed_sentence(pair: Score, alone: dict[Role, Score], overlap: float, seconds: float) -> str:
    """Whether the pair was worth it here, in one honest sentence."""
    if not all(score.tok_s for score in alone.values()):
        return "There is no verdict on speed: a run made no tokens."
    better = max(alone, key=lambda role: alone[role].tok_s)
    gains = {role: pair.tok_s / score.tok_s - 1.0 for role, score in alone.items()}
    numbers = (
        f"{gains[better]:+.0%} output tokens against {better.value} only,"
        f" {gains[better.other]:+.0%} against {better.other.value} only"
        f"{_waits(pair, alone)}"
    )
    cost = (
        f"both servers had work at once for {overlap:.1f} of {seconds:.1f} s, and share one GPU"
        " meanwhile"
    )
    if gains[better] > TIE:
        return f"The pair is better than either server alone here: {numbers}; {cost}."
    if gains[better] >= -TIE:
        return (
            f"The pair is about as good as {better.value} only here, which is the better single"
            f" server: {numbers}; each switch costs, since {cost}."
        )
    return (
        f"The pair is not better than {better.value} only here, because each switch overlaps both"
        f" servers on one GPU: {numbers}; {cost}."
    )


def _waits(pair: Score, alone: dict[Role, Score]) -> str:
    """The mean times per token, if all are known."""
    others = [f"{score.ms_per_token:.1f}" for score in alone.values() if score.ms_per_token]
    if pair.ms_per_token is None or len(others) < len(alone):
        return ""
    names = " and ".join(f"{role.value}" for role in alone)
    return f", at {pair.ms_per_token:.1f} ms per token ({names}: {' and '.join(others)})"


def disagreement(decided: Decided, line: Line | None, fixed: Role | None = None) -> str | None:
    """What is wrong with a decision's reason, by its own numbers; None if nothing is.

    `line` is what the pair was run with; None under a policy that always names `fixed`.
    """
    decision = Decision(
        decided.backend,
        decided.reason,
        decided.n,
        decided.m,
        as_number(decided.frontier),
        PolicyMemory(),
        as_number(decided.threshold),
    )
    expected = decided.threshold == line.threshold if line else decided.backend is fixed
    if min(decided.n, decided.m) >= 0 and expected and agrees(decision, line.band if line else 0.0):
        return None
    return (
        f"{decided.request_id}: {decided.reason.value} with n={decided.n}, m={decided.m} and"
        f" threshold {decided.threshold}, sent to {decided.backend and decided.backend.value}"
    )


def unseen(records: Iterable[RequestRecord], decisions: Iterable[Decided]) -> list[str]:
    """Requests whose answer and whose entry in /decisions do not say the same."""
    seen = {(each.request_id, each.backend, each.reason, each.n, each.m) for each in decisions}
    return [
        record.id
        for record in records
        if (record.id, record.backend, record.reason, record.n, record.m) not in seen
    ]


def by_reason(records: Iterable[RequestRecord]) -> Counter[tuple[Role | None, str | None]]:
    """How many requests went to each backend for each reason."""
    return Counter((record.backend, record.reason) for record in records)


def _level(records: Sequence[RequestRecord], level: Level) -> Score:
    started = _started_in(records, level)
    values = _ms_per_token(started)
    tokens = sum(record.tokens_between(level.start, level.end) for record in records)
    return Score(
        tokens / (level.end - level.start),
        sum(values) / len(values) if values else None,
        quantile([(value, 1.0) for value in values], 0.95),
        len(started),
        _by_backend(started),
    )


def _started_in(records: Iterable[RequestRecord], level: Level) -> list[RequestRecord]:
    return [record for record in records if level.start <= record.started < level.end]


def _ms_per_token(records: Iterable[RequestRecord]) -> list[float]:
    found = (record.seconds_per_token for record in records)
    return [seconds * 1e3 for seconds in found if seconds is not None]


def _by_backend(records: Iterable[RequestRecord]) -> dict[Role, int]:
    counts = Counter(record.backend for record in records)
    return {role: counts[role] for role in Role}
