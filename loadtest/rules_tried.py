"""Rules that were tried and are not in the router, and the bound of one that knows the future.

The law of this file: pure, and only for `loadtest.policy_table`. Each differs from the router's
`ForecastPolicy` in one thing, how it judges; what it knows of the load is the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import msgspec

from router.load import BASELINE, SPECULATIVE, LoadSnapshot, Role
from router.offered import LoadEstimate
from router.policy import Decision, Reason
from router.request import RequestInfo
from router.rules import SEEN, ForecastPolicy

# Share by which the other server has to be better.
BAND: Final = 0.05
# A regret is never held against less than this, in requests x seconds.
LEAST_COST: Final = 30.0


class OfferedLoadPolicy(ForecastPolicy):
    """The server that would have fewer requests in flight under the offered load, in the long run."""

    def _judge(self, estimate: LoadEstimate, side: Role, n: int, m: int) -> LoadEstimate:
        regret = self._regret(estimate, side)
        if regret is None:
            return msgspec.structs.replace(estimate, gain=None, due=0.0)
        here, there = regret
        gain = here - there * (1.0 + BAND) if n + m > 0 else 0.0
        return msgspec.structs.replace(estimate, gain=gain, due=math.inf if gain > 0.0 else 0.0)

    def _regret(self, estimate: LoadEstimate, side: Role) -> tuple[float, float] | None:
        """Requests in flight in the long run, on this server and on the other."""
        offered = estimate.offered
        if estimate.fast_seen <= SEEN or offered is None:
            return None
        one, other = (operation.mean(offered) for operation in self._operations)
        return (one, other) if side is SPECULATIVE else (other, one)


class RegretPolicy(OfferedLoadPolicy):
    """The other server when the regret of staying has summed up to what a switch costs."""

    def _judge(self, estimate: LoadEstimate, side: Role, n: int, m: int) -> LoadEstimate:
        regret = self._regret(estimate, side)
        if regret is None:
            return msgspec.structs.replace(estimate, gain=None, due=0.0)
        here, there = regret
        due = max(0.0, estimate.due + (here - there) * estimate.passed)
        gain = due - self._cost(estimate, side, n if side is SPECULATIVE else m, there)
        if here <= there:
            gain = min(gain, 0.0)
        return msgspec.structs.replace(estimate, gain=gain, due=due)

    def _switches(self, estimate: LoadEstimate, side: Role) -> bool:  # noqa: ARG002 - the base's
        return estimate.gain is not None and estimate.gain > 0.0

    def _cost(self, estimate: LoadEstimate, side: Role, running: int, there: float) -> float:
        """Requests x seconds lost while what runs here is finished beside the new ones there."""
        if not running:
            return LEAST_COST
        at = 0 if side is SPECULATIVE else 1
        share, other = self._shares[at], self._shares[1 - at]
        length = estimate.work / estimate.ended
        speed = self._speeds[at][min(running, len(self._speeds[at]) - 1)]
        overlap = running * length / (share * speed)
        lost = (1.0 - share) * running / 2.0 + (1.0 - other) * there / 2.0
        return max(LEAST_COST, overlap * lost)


class SchedulePolicy:
    """Sides at given times: what somebody would do who knows the load beforehand."""

    def __init__(self, changes: Sequence[tuple[float, Role]]) -> None:
        """`changes`: (seconds, side from then on), in order; the first holds from the start."""
        self._changes = tuple(changes)

    def decide(self, snapshot: LoadSnapshot, info: RequestInfo) -> Decision:  # noqa: ARG002 - a policy
        """Choose the side of this moment."""
        side = self._changes[0][1]
        for at, role in self._changes:
            if at > snapshot.now:
                break
            side = role
        n, m = snapshot.speculative.in_flight, snapshot.baseline.in_flight
        return Decision(side, Reason.FIXED, n, m, None, snapshot.memory)


def cheapest(
    costs: Sequence[tuple[float, float]], penalty: float, slot_s: float
) -> list[tuple[float, Role]]:
    """The cheapest way through slots that cost (speculative, baseline), a change costing `penalty`.

    Dynamic programming over the slots, a state for each side.
    """
    total = [0.0, 0.0]
    came: list[tuple[int, int]] = []  # by slot and side: the side of the slot before
    for cost in costs:
        step = []
        for side in (0, 1):
            stay, change = total[side], total[1 - side] + penalty
            step.append((min(stay, change) + cost[side], side if stay <= change else 1 - side))
        came.append((step[0][1], step[1][1]))
        total = [step[0][0], step[1][0]]
    side = 0 if total[0] <= total[1] else 1
    sides = []
    for before in reversed(came):
        sides.append(side)
        side = before[side]
    sides.reverse()
    roles = (SPECULATIVE, BASELINE)
    changes = [(0.0, roles[sides[0]])]
    changes += [
        (slot * slot_s, roles[now])
        for slot, (was, now) in enumerate(itertools.pairwise(sides), start=1)
        if was != now
    ]
    return changes
