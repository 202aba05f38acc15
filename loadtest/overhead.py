"""What a router costs on real servers: windows in turns, and what their difference says.

Pure. One server is loaded directly and through the router, in windows of one length:

    round 1   direct, router, router, direct     (A B B A)
    round 2   router, direct, direct, router

so that what drifts evenly (heat, a neighbour) falls on both alike. The two windows of each half of a
round are a pair: they ask the same prompts and the same lengths, each pair others than the next. The
difference is the mean of the logarithms of the ratios, one ratio from each pair, with the interval of
Student's t over the pairs: what two windows of the same thing differ by is in it.

The document `overhead.json`, schema `crossover.overhead/1`, is `Found`, written whole after each
window. Times are seconds, rates per second; what is not known is null.
"""

from __future__ import annotations

import bisect
import enum
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from loadtest.intervals import mean_figure
from loadtest.live_schema import LiveError
from loadtest.record import RequestRecord
from loadtest.summary import Window
from loadtest.sweep_schema import Figure, Pace, Point, Workload
from router.load import Role

SCHEMA: Final = "crossover.overhead/1"
# Requests that are sent within this time of each other count as sent together: about one decode
# step of a busy server, which takes up new prompts between two steps.
TOGETHER_S: Final = 0.01


class Way(enum.StrEnum):
    """How the server is reached."""

    DIRECT = "direct"
    ROUTER = "router"


class Verdict(enum.StrEnum):
    """What a difference says, in one word."""

    LEVEL = "level"  # the whole interval lies within the margin
    SLOWER = "slower"  # it lies below nought: the router costs
    FASTER = "faster"  # above it: something else differs, and should be looked for
    UNSURE = "unsure"  # wider than what there is to see


class Turn(NamedTuple):
    """One window."""

    pair: int  # from 1
    way: Way

    @property
    def run(self) -> str:
        """The name in its records."""
        return f"{self.way.value}-{self.pair}"

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.way.value}, pair {self.pair}"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One window, as client, engine and router saw it."""

    pair: int
    way: Way
    point: Point  # as in a sweep; its pass is the pair
    ms_per_token: float | None  # a request's whole time by its tokens, mean
    engine_tok_s: float | None = None  # the engine's own figure while it decodes, mean of its polls
    counted_tok_s: float | None = None  # growth of the engine's counter of finished answers
    router_cpu: float | None = None  # cores that the router's process used
    together: float | None = None  # requests sent within 10 ms of a request, itself included, mean


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What must be the same to go on."""

    direct: str
    url: str
    role: Role
    level: int
    model: str
    workload: Workload
    pace: Pace


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Through the router against direct, as a share of direct: -0.1 is ten per cent fewer."""

    what: str
    share: Figure
    pairs: int
    verdict: Verdict


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document."""

    schema: str = SCHEMA
    created: str
    command: str
    version: str
    servers: str  # what the server said of itself
    conditions: Conditions
    rounds: int
    margin: float  # a share: what is too little to matter
    windows: tuple[Measured, ...] = ()
    differences: tuple[Difference, ...] = ()


def order(rounds: int) -> Iterator[Turn]:
    """What is measured after what."""
    for number in range(rounds):
        first, then = (Way.DIRECT, Way.ROUTER) if number % 2 == 0 else (Way.ROUTER, Way.DIRECT)
        yield from (Turn(2 * number + 1, first), Turn(2 * number + 1, then))
        yield from (Turn(2 * number + 2, then), Turn(2 * number + 2, first))


def resumed(before: Found | None, wanted: Found) -> Found:
    """The document to go on with. Raises LiveError when the conditions differ, naming the first."""
    if before is None:
        return wanted
    then = msgspec.structs.asdict(before.conditions)
    for name, now in msgspec.structs.asdict(wanted.conditions).items():
        if then[name] != now:
            raise LiveError(
                f"--out holds windows with another {name} ({then[name]}, now {now}): give the same"
                " again, or another --out"
            )
    return msgspec.structs.replace(wanted, created=before.created, windows=before.windows)


def judged(found: Found) -> Found:
    """With the differences that its windows show."""
    speeds = _ratios(found.windows, lambda each: each.point.output_tok_s.value)
    times = _ratios(found.windows, lambda each: each.ms_per_token)
    said = [
        difference(what, ratios, margin=found.margin, more_is_slower=slow)
        for what, ratios, slow in (
            ("output tokens per second", speeds, False),
            ("time per token of a request", times, True),
        )
        if ratios
    ]
    return msgspec.structs.replace(found, differences=tuple(said))


def difference(
    what: str, ratios: Sequence[float], *, margin: float, more_is_slower: bool = False
) -> Difference:
    """The difference that these ratios (router by direct) show. There is at least one, above 0."""
    mean = mean_figure([math.log(ratio) for ratio in ratios])
    low, high = (None if end is None else math.expm1(end) for end in (mean.low, mean.high))
    share = Figure(math.expm1(mean.value), low, high)
    verdict = Verdict.UNSURE
    if low is not None and high is not None:
        if -margin <= low and high <= margin:
            verdict = Verdict.LEVEL
        elif high < 0.0:
            verdict = Verdict.FASTER if more_is_slower else Verdict.SLOWER
        elif low > 0.0:
            verdict = Verdict.SLOWER if more_is_slower else Verdict.FASTER
    return Difference(what=what, share=share, pairs=len(ratios), verdict=verdict)


def _ratios(windows: Sequence[Measured], value: Callable[[Measured], float | None]) -> list[float]:
    """Router by direct, of each pair that is whole."""
    found: dict[int, dict[Way, float]] = {}
    for each in windows:
        told = value(each)
        if told:
            found.setdefault(each.pair, {})[each.way] = told
    return [
        both[Way.ROUTER] / both[Way.DIRECT]
        for _, both in sorted(found.items())
        if both.keys() == set(Way)
    ]


def sent_together(records: Sequence[RequestRecord], window: Window) -> float | None:
    """How many requests are sent within `TOGETHER_S` of a request of the window, in the mean.

    A closed loop answers each end with a new request, so that answers of one length that began
    together end together for ever, and the server takes their prompts up in one step. What spreads
    them out makes it interrupt its decoding more often. 1: each is sent alone.
    """
    at = sorted(r.started for r in records if window.start <= r.started < window.end)
    if not at:
        return None
    near = (
        bisect.bisect_right(at, when + TOGETHER_S) - bisect.bisect_left(at, when - TOGETHER_S)
        for when in at
    )
    return statistics.fmean(near)


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def decode(data: bytes, name: str) -> Found:
    """Read an `overhead.json`. Raises LiveError."""
    try:
        found = msgspec.json.decode(data, type=Found)
    except msgspec.MsgspecError as error:
        raise LiveError(f"{name} is no overhead.json: {error}") from error
    if found.schema != SCHEMA:
        raise LiveError(f"{name}: schema {found.schema!r} is not {SCHEMA!r}")
    return found
