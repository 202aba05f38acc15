"""Rules that decide by the pair's measured curves instead of one number of requests.

No clock and no I/O, as in `policy`: what a rule remembers is in `PolicyMemory`, so a decision is a
function of (snapshot, request). Two kinds:

`ForecastPolicy`, for servers that share GPUs. Everything goes to one server; which one is judged anew
at every arrival, at most every `JUDGE_S`. It looks at the offered load (`offered`), which does not
depend on the server in use, instead of the concurrency, which does. `speeds.Forecast` says what
switching would bring at that load, at one and a quarter standard deviations below it and above it
(the three-point Gauss-Hermite rule); the mean is the gain. What runs here, and the overlap with it,
are in the forecast. So staying near the crossover, where switching cannot pay for its overlap, and
leaving at once in overload, where it can, are one formula. What is left to parameters:

* the load is taken to be `lean` larger than estimated: real arrivals are burstier than the ones of
  the tables, and the baseline is the server that bursts do not hurt;
* leaving the speculative server waits until the gain, as a share of what is in flight, has summed up
  to `patience` seconds: a large gain is believed at once, a small one when it lasts;
* the way back waits for `dwell` seconds of a gain above `margin` of what is in flight, since a load
  that dips comes back.

A cap on the speculative server is no reason of its own to move everybody. What queues behind it counts
as in flight, at the speed of the last level, so it is in the forecast; only a cap below the levels that
were measured, of which the curve promises too much, is left when it is reached.

`JoinPolicy`, for a GPU each: the server on which one more request costs less, or adds more; the one
that has the conversation's prefix, where the gain does not pay for prefilling it again (`affinity`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from router.affinity import outweighs
from router.load import BASELINE, SPECULATIVE, LoadSnapshot, PolicyMemory, Role
from router.offered import LoadEstimate, estimated, first_estimate
from router.policy import Decision, Fences, Marks, Reason, overruled
from router.request import RequestInfo
from router.speeds import (
    BEYOND,
    MOST,
    Forecast,
    Levels,
    Operation,
    Table,
    joined_delay,
    joined_speed,
    speeds,
)

# Between two judgements a decision only repeats the last one: 20 a second are enough for a queue
# that needs seconds to change, and keep the cost of a decision small under any load.
JUDGE_S: Final = 0.05
# Share of the fast window that has to have passed before anything is judged.
SEEN: Final = 0.3
GAUSS_HERMITE: Final = 1.22  # sqrt(3/2): the outer nodes, in standard deviations
# As long as more than this share of all requests is on the other server, a switch is not over.
OVERLAP: Final = 0.5

Curves = tuple[Levels, Levels]  # of the speculative and of the baseline server


class RuleError(ValueError):
    """A parameter that the rule does not have, or a value that it cannot take."""


class ForecastParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that can be set. The defaults were found on the arms and loads in loadtest/RULES.md."""

    horizon: float = 0.5  # how far ahead, in seconds per output token of a mean request
    fast: float = 2.0  # seconds
    slow: float = 20.0  # seconds
    jump: float = 3.0  # standard deviations
    spread: float = 0.05  # share of the load
    lean: float = 0.05  # share of the load
    patience: float = 0.2  # seconds, for leaving the speculative server
    margin: float = 0.05  # of the requests in flight, for the way back
    dwell: float = 10.0  # seconds, for the way back
    # Of a mean request, until some have ended. This one and the shares are for a calibration that does
    # not know them (`calibrated.known_of`).
    output_tokens: float = 128.0
    speculative_share: float = 0.6  # of its speed, while the other server works too
    baseline_share: float = 0.57  # (means of the overlaps measured on one H200)

    def __post_init__(self) -> None:
        """Raise RuleError for a value that makes no sense."""
        positive = ("horizon", "fast", "slow", "jump", "output_tokens")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0.0 <= value < math.inf or (name in positive and value == 0.0):
                least = "above 0" if name in positive else "from 0 up"
                raise RuleError(f"rule parameter {name}: not a number {least}: {value}")
        for name in ("speculative_share", "baseline_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise RuleError(f"rule parameter {name}: not above 0 and at most 1")
        if self.fast >= self.slow:
            raise RuleError(f"rule parameter slow: not above fast ({self.fast:g}): {self.slow:g}")


def read_parameters(given: Mapping[str, float]) -> ForecastParameters:
    """The parameters in a calibration. Raises RuleError, which names the one that is wrong."""
    try:
        return msgspec.convert(dict(given), ForecastParameters)
    except msgspec.ValidationError as error:
        known = ", ".join(ForecastParameters.__struct_fields__)
        raise RuleError(f"rule parameters: {error} (there are {known})") from error


class ForecastPolicy:
    """Everything to one server; the other one when that is expected to pay for the switch."""

    def __init__(
        self,
        curves: Curves,
        parameters: ForecastParameters = ForecastParameters(),  # noqa: B008  (frozen)
        *,
        marks: Marks = Marks(),  # noqa: B008  (frozen)
        fences: Fences = Fences(),  # noqa: B008  (frozen)
    ) -> None:
        """Settle the tables, which takes a tenth of a second. ValueError for curves that are none."""
        self.parameters = parameters
        # A few requests that wait for a prefill are no reason for an overlap of both servers; a
        # queue that grows is one, and the forecast sees it as requests in flight.
        self.marks = msgspec.structs.replace(marks, queued=sys.maxsize)
        self.fences = fences
        levels = list(curves[0])
        spec, base = speeds(levels), speeds(curves[1])
        self._measured = max(level for level, _ in levels)
        top = BEYOND * max(*spec, *base)
        self._operations = one, other = Operation(spec, top), Operation(base, top)
        self._speeds = (spec, base)
        self._shares = shares = (parameters.speculative_share, parameters.baseline_share)
        horizon = parameters.horizon
        self._leave = Forecast(one, other, shares, horizon, top)
        self._return = Forecast(other, one, shares[::-1], horizon, top)

    def decide(self, snapshot: LoadSnapshot, info: RequestInfo) -> Decision:
        """Choose a backend for one request."""
        spec, base = snapshot.speculative, snapshot.baseline
        n, m = spec.in_flight + spec.foreign, base.in_flight + base.foreign
        memory, now = snapshot.memory, snapshot.now
        estimate, side, since, arrived = (
            memory.estimate, memory.side, memory.since, memory.arrived,
        )  # fmt: skip
        reason, limit, switched = Reason.FORECAST_UNSURE, None, False
        if estimate is None or now - estimate.at >= JUDGE_S:
            estimate = self._judge(self._estimate(estimate, snapshot, n, m, arrived), side, n, m)
            arrived, switched = 0, self._switches(estimate, side)
        gain = estimate.gain
        if switched:
            side, since, reason = side.other, now, Reason.FORECAST_SWITCH
            estimate = msgspec.structs.replace(estimate, gain=None, due=0.0)
        elif gain is not None:
            reason = Reason.FORECAST if gain <= 0.0 else Reason.DWELL
        if side is SPECULATIVE and spec.cap is not None and n >= spec.cap < self._measured:
            side, since, reason, limit = BASELINE, now, Reason.CAP, float(spec.cap)
        backend, reason = overruled(snapshot, info, side, reason, self.marks, self.fences)
        counted = arrived + (backend is not None)
        memory = PolicyMemory(side, since, memory.above_at, counted, estimate)
        return Decision(backend, reason, n, m, limit, memory, limit, estimate.offered or 0.0, gain)

    def _estimate(
        self, last: LoadEstimate | None, snapshot: LoadSnapshot, n: int, m: int, arrived: int
    ) -> LoadEstimate:
        """The offered load, from what came and what ended since the last judgement."""
        own = snapshot.speculative.in_flight + snapshot.baseline.in_flight
        if last is None:
            return first_estimate(snapshot.now, n, m, own, self.parameters.output_tokens)
        # Between two judgements the number in flight is taken to change evenly.
        one, other = min((last.n + n) // 2, MOST - 1), min((last.m + m) // 2, MOST - 1)
        served, other_served = self._speeds[0][one], self._speeds[1][other]
        if one and other:
            served, other_served = served * self._shares[0], other_served * self._shares[1]
        served += other_served
        return estimated(last, snapshot.now, (n, m, own), arrived, served, self.parameters)

    def _judge(self, estimate: LoadEstimate, side: Role, n: int, m: int) -> LoadEstimate:
        """The gain of leaving this side, if it can be judged, and the evidence for it."""
        given = self.parameters
        here, there = (n, m) if side is SPECULATIVE else (m, n)
        offered = estimate.offered
        if estimate.fast_seen <= SEEN or offered is None or there > OVERLAP * (here + there):
            return msgspec.structs.replace(estimate, gain=None, due=0.0)
        offered *= 1.0 + given.lean
        away = offered * estimate.spread * GAUSS_HERMITE
        forecast, least = self._leave, 0.0
        if side is BASELINE:
            forecast, least = self._return, given.margin * here
        gain = forecast.gain(here, offered) + forecast.gain(here, offered - away)
        gain = (gain + forecast.gain(here, offered + away)) / 3.0 - least
        due = 0.0
        if gain > 0.0:
            share = gain / (here + 1) if side is SPECULATIVE else 1.0
            due = estimate.due + share * estimate.passed
        return msgspec.structs.replace(estimate, gain=gain, due=due)

    def _switches(self, estimate: LoadEstimate, side: Role) -> bool:
        if estimate.gain is None or estimate.gain <= 0.0:
            return False
        given = self.parameters
        return estimate.due >= (given.patience if side is SPECULATIVE else given.dwell)


class JoinPolicy:
    """The server that one more request serves better, by a table for each; a tie speculates."""

    def __init__(
        self,
        curves: Curves,
        by: Literal["speed", "delay"],
        *,
        marks: Marks = Marks(),  # noqa: B008  (frozen)
        fences: Fences = Fences(),  # noqa: B008  (frozen)
        affinity: bool = False,
    ) -> None:
        """`by`: the tokens/s that it adds, or the delay that it makes (see `speeds`); `affinity`:
        conversations stay with their prefix.
        """
        self.by = by
        self.marks = marks
        self.fences = fences
        self.affinity = affinity
        one, other = speeds(curves[0]), speeds(curves[1])
        self._delays: tuple[Table, Table] = (joined_delay(one), joined_delay(other))
        self._values = self._delays
        if by == "speed":
            self._values = (joined_speed(one), joined_speed(other))

    def decide(self, snapshot: LoadSnapshot, info: RequestInfo) -> Decision:
        """Choose a backend for one request."""
        spec, base = snapshot.speculative, snapshot.baseline
        n, m = spec.in_flight + spec.foreign, base.in_flight + base.foreign
        one, other = self._values
        last = len(one) - 1
        gain = one[min(n, last)] - other[min(m, last)]
        if n > last or m > last:  # beyond the tables the longer queue is longer
            gain = float(m - n)
        side, reason, limit = SPECULATIVE if gain >= 0.0 else BASELINE, Reason.JOIN, None
        if snapshot.prefix is not None and self.affinity:
            lost = snapshot.prefix.lost(info.prompt_bytes, speculative=side is SPECULATIVE)
            if lost > 0 and self._stays(side, n, m, lost):
                side, reason = side.other, Reason.PREFIX
        if side is SPECULATIVE and spec.cap is not None and n >= spec.cap:
            side, reason, limit = BASELINE, Reason.CAP, float(spec.cap)
        backend, reason = overruled(snapshot, info, side, reason, self.marks, self.fences)
        return Decision(backend, reason, n, m, limit, snapshot.memory, limit, None, gain)

    def _stays(self, side: Role, n: int, m: int, lost: int) -> bool:
        """Whether `side` is not enough better to prefill there what the other server has."""
        one, other = self._delays
        last = len(one) - 1
        gain = one[min(n, last)] - other[min(m, last)]
        return outweighs(lost, n, gain) if side is SPECULATIVE else outweighs(lost, m, -gain)
