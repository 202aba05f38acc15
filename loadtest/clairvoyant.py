"""The bound on a load that changes: a schedule of sides made by somebody who knows it beforehand.

Pure. The load is cut in slots. What each single server makes of the requests that start in a slot is
its cost there; the cheapest way through the slots, for several prices of a change, is a schedule, and
each schedule is played in the simulator, where a change costs what it costs, a little earlier or later
at each edge. The best of them is the bound. It is not the optimum: slots are coarse, and a rule that
answers to what really runs has come below it by a percent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from loadtest.compare import TELEMETRY_S, Arrangement, Outcome, Pair, Playable, play, singles
from loadtest.rules_tried import SchedulePolicy, cheapest
from loadtest.simulator import Simulation
from loadtest.simulator_load import Row
from router.load import Role

SLOT_S: Final = 10.0
# Price of a change: the wait of so many requests, as a multiple of the mean one.
PRICES: Final = (0.0, 30.0, 100.0, 300.0, 1000.0, 1e9)
# How much earlier or later than the slots say: to the baseline, and back.
SHIFTS: Final = (
    (0.0, 0.0),
    (-2.0, 0.0),
    (-5.0, 0.0),
    (-5.0, 5.0),
    (-5.0, 10.0),
    (-10.0, 10.0),
    (2.0, 5.0),
)


def best_schedule(pair: Pair, load: Playable, rows: Sequence[Row]) -> Outcome:
    """What comes of the best schedule that was found."""
    alone = [slot_costs(each, load, rows) for each in reversed(singles(pair)[:2])]
    # The last turn of a conversation is asked when the answer before it has ended: on the slower
    # server that is in a later slot.
    costs = [(one, other) for one, other in itertools.zip_longest(*alone, fillvalue=0.0)]
    mean = sum(min(cost) for cost in costs) / max(1, _requests(load, rows))
    tries: set[tuple[tuple[float, Role], ...]] = set()
    for price in PRICES:
        changes = cheapest(costs, price * mean, SLOT_S)
        for up, down in SHIFTS:
            shifted = [changes[0]] + [
                (at + (up if role is Role.BASELINE else down), role) for at, role in changes[1:]
            ]
            tries.add(tuple(sorted(shifted)))
    outcomes = [
        play(Arrangement("clairvoyant", "rule", pair.model, SchedulePolicy(each)), load, rows)
        for each in sorted(tries)
    ]
    return min(outcomes, key=lambda outcome: outcome.ms_per_token)


def slot_costs(each: Arrangement, load: Playable, rows: Sequence[Row]) -> list[float]:
    """Milliseconds per token of the requests that start in each slot, summed."""
    run = Simulation(each.pair, each.policy, telemetry_s=TELEMETRY_S).play(load.calls(rows))
    costs = [0.0] * (int(max(run.started) / SLOT_S) + 1)
    for start, end, output in zip(run.started, run.ended, run.output, strict=True):
        costs[int(start / SLOT_S)] += (end - start) / output * 1e3
    return costs


def _requests(load: Playable, rows: Sequence[Row]) -> int:
    return sum(1 + len(call.then) for call in load.calls(rows))
