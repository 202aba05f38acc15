"""Where the line is while the accept length is not the calibrated one.

Pure. The speed of a server that speculates is its accept length times its steps per second, so other
traffic, or another language, moves its curve up or down as a whole, and the crossover with it.

* The live accept length over the calibrated one is the *ratio*. It is smoothed over time (an
  exponential average of its logarithm; a factor and its inverse weigh the same) and bounded: beyond
  the bound the curves are of another situation and should be measured again.
* Nothing changes within the dead zone: the ratio in force is left alone until the smoothed one is
  5 % away from it. It is exactly 1 again once the smoothed one is within half of that of 1.
* With nothing to measure (a server that does not run, or a line that sends it nothing) the ratio
  goes back towards 1, ten times more slowly. Without this a line that fell to zero would never
  hear of an acceptance that is back.
* The calibrated line stays what it is at ratio 1, whatever it was chosen for. Where it is the
  crossover of the curves, the live line is their crossover at this ratio; where it is another number
  (another objective), it moves by the same factor as the crossover.
* No line is moved beyond the highest level that both servers were measured at. One that was beyond
  already stays where it was.
"""

from __future__ import annotations

import math
import statistics
from typing import Final

from router.curves import Curves, common_levels
from router.frontier import Frontier

DEAD_ZONE: Final = 0.05  # of the ratio in force
FORGET: Final = 10.0  # time constants without a measurement
# A pause longer than this many time constants leaves nothing of what was before: exp(-50) is zero.
_LONG: Final = 50.0


def calibrated_accept_length(curves: Curves | None) -> float | None:
    """Tokens per verify step that the speculative curve was measured with; None if it is not said.

    The median over the levels: acceptance is a property of the traffic, not of the load.
    """
    if curves is None:
        return None
    known = [p.accept_length for p in curves.speculative.points if p.accept_length is not None]
    found = statistics.median(known) if known else None
    return found if found is not None and found >= 1.0 else None


def live_frontier(line: Frontier, curves: Curves, ratio: float) -> Frontier:
    """The line at this ratio (see the module's head). Raises ValueError for curves that are none."""
    if ratio == 1.0:
        return line
    # Rounded, so that a crossover of 36 is not 35.999... and its whole part 35.
    was, now = round(curves.crossover(), 6), round(curves.crossover(ratio), 6)
    one, other = ([p.concurrency for p in c.points] for c in (curves.speculative, curves.baseline))
    top = common_levels(one, other)[-1]

    def moved(value: float) -> float:
        if value == math.inf:  # always: for as long as the curves say so
            return now if was == math.inf else value
        if was != math.inf and value == math.floor(was):
            wanted = now
        elif value == 0.0 or was in {0.0, math.inf}:
            return value  # another number, and no factor to move it by
        else:
            wanted = value * (now / was)
        return min(wanted, max(top, value))

    if line.scope == "table":
        return Frontier.from_table(_monotone(line.table, tuple(moved(v) for v in line.table)))
    return Frontier(line.scope, moved(line.threshold))


def _monotone(before: tuple[float, ...], after: tuple[float, ...]) -> tuple[float, ...]:
    """A table that runs the way it ran, whatever became of its single values."""
    rises = before[-1] >= before[0]
    found: list[float] = []
    for value in after:
        edge = found[-1] if found else value
        found.append(max(edge, value) if rises else min(edge, value))
    return tuple(found)


class LiveRatio:
    """The ratio of the live accept length to the calibrated one, smoothed, and the one in force."""

    def __init__(self, calibrated: float, *, smoothing: float = 30.0, bound: float = 2.0) -> None:
        """`calibrated`: tokens per step; `smoothing`: time constant in seconds; `bound`: 1 and up.

        The ratio is kept within 1/bound and bound.
        """
        self.calibrated = calibrated
        self.in_force = 1.0
        self.live: float | None = None
        """Tokens per verify step as last heard, not smoothed; None when nothing tells."""
        self._smoothing = smoothing
        self._bound = math.log(bound)
        self._log = 0.0
        self._at: float | None = None
        self._heard = False

    @property
    def ratio(self) -> float | None:
        """The smoothed ratio, within the bound; None before anything was heard."""
        return math.exp(self._clipped) if self._heard else None

    @property
    def bounded(self) -> bool:
        """Whether the live accept length is beyond what the line follows."""
        return abs(self._log) > self._bound

    @property
    def _clipped(self) -> float:
        return max(-self._bound, min(self._bound, self._log))

    def observe(self, now: float, accept_length: float | None) -> None:
        """Take in the live accept length at `now` (monotonic seconds); None: not known."""
        passed = max(0.0, now - self._at) if self._at is not None else 0.0
        self._at = now
        self.live = accept_length
        if accept_length is None:
            target, constant = 0.0, FORGET * self._smoothing
        else:
            self._heard = True
            target, constant = math.log(accept_length / self.calibrated), self._smoothing
        keep = math.exp(-min(_LONG, passed / constant))
        self._log = target + (self._log - target) * keep

    @property
    def wanted(self) -> float | None:
        """The ratio that should be in force instead; None while the one that is will do."""
        found = self._clipped
        if abs(found) <= math.log1p(DEAD_ZONE / 2):
            return 1.0 if self.in_force != 1.0 else None
        away = abs(found - math.log(self.in_force))
        # At the bound it goes all the way: it cannot come any nearer.
        edge = abs(found) == self._bound and away > 1e-9
        return math.exp(found) if away >= math.log1p(DEAD_ZONE) or edge else None

    def carry(self, other: LiveRatio) -> None:
        """Go on from what another one heard, against this calibration's accept length."""
        if other._heard:
            shift = math.log(other.calibrated / self.calibrated)
            self._log, self._at, self._heard = other._log + shift, other._at, True
            self.live = other.live
