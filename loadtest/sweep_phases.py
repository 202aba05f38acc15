"""When one level is warm, how long it is measured, and when it is over: rules without a clock.

    warm-up   at least `warm_up_s`, and until each slot has had an answer (bounded): only then
              requests begin and end at all times, and no longer all together. Of runs that are
              measured together, until all are warm
    window    at least `window_s`, and until each slot has had `per_slot` answers (bounded)
    tail      load goes on until the requests that were open at the window's end have ended, since
              what they did within the window is known only then; without load they would end
              faster than they ran. What is still open after that is cut, and counts nowhere

A slot is one of the requests that a closed loop keeps in flight. An open loop has none: it is warm
when its first request has ended, and its window lasts until `OPEN_ANSWERS` have.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Final

from loadtest.arrivals import Level
from loadtest.sweep_schema import Pace

# Answers in a window of an open loop that its percentiles can rest on.
OPEN_ANSWERS: Final = 30
# Seconds between two looks at the time when nothing ends.
TICK_S: Final = 0.05


class Phase(enum.StrEnum):
    """Where a run is."""

    WARM_UP = "warm-up"
    WINDOW = "window"
    TAIL = "tail"
    OVER = "over"


class Meeting:
    """Runs whose windows are to open at the same moment: who is warm first waits, under load."""

    def __init__(self, members: int) -> None:
        """Of so many runs."""
        self._members = members
        self._warm: set[Phases] = set()

    def warm(self, who: Phases) -> bool:
        """This one is warm; whether all are."""
        self._warm.add(who)
        return len(self._warm) >= self._members


class Phases:
    """The phases of one run; also its load, when it is a closed loop (`arrivals.Closed`)."""

    def __init__(self, slots: int | None, pace: Pace, meeting: Meeting | None = None) -> None:
        """`slots`: requests kept in flight; None for an open loop. `meeting`: of windows."""
        self.phase = Phase.WARM_UP
        self.on_change: Callable[[Phase], object] = lambda _phase: None
        """Told the new phase at the moment at which it begins."""
        self.window_start = math.nan  # seconds since the run began
        self.window_end = math.nan
        self.unwarmed = 0  # slots without an answer when the window began
        self.answers = 0  # in the window so far
        self.wanted = OPEN_ANSWERS if slots is None else math.ceil(pace.per_slot * slots)
        self._slots = slots
        self._pace = pace
        self._meeting = meeting
        self._cold = set(range(1 if slots is None else slots))
        self._open: set[int] = set()
        self._straddling: set[int] = set()

    def sent(self, number: int) -> None:
        """The run's request of this number was sent."""
        self._open.add(number)

    def ended(self, number: int) -> None:
        """It has ended, one way or the other."""
        self._open.discard(number)
        self._cold.discard(number)
        self._straddling.discard(number)
        if self.phase is Phase.WINDOW:
            self.answers += 1

    def advance(self, elapsed: float) -> Phase:
        """The phase at this moment, in seconds since the run began."""
        pace = self._pace
        if self.phase is Phase.WARM_UP and elapsed >= pace.warm_up_s:
            warm = not self._cold and (self._meeting is None or self._meeting.warm(self))
            if warm or elapsed >= pace.most_warm_up_s:
                self.window_start, self.unwarmed = elapsed, len(self._cold)
                self._enter(Phase.WINDOW)
        elif (
            self.phase is Phase.WINDOW and (lasted := elapsed - self.window_start) >= pace.window_s
        ):
            if self.answers >= self.wanted or lasted >= pace.most_window_s:
                self.window_end, self._straddling = elapsed, set(self._open)
                self._enter(Phase.TAIL)
        elif self.phase is Phase.TAIL and not self._straddling:
            self._enter(Phase.OVER)
        return self.phase

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.on_change(phase)

    def share(self, elapsed: float) -> float:
        """How much of the run is done, as far as can be said; for a progress bar."""
        pace = self._pace
        whole = pace.warm_up_s + pace.window_s
        if self.phase is Phase.WARM_UP:
            return min(elapsed, pace.warm_up_s) / whole
        if self.phase is Phase.WINDOW:
            lasted = elapsed - self.window_start
            answered = self.answers / self.wanted if self.wanted else 1.0
            done = min(lasted / pace.window_s, max(answered, _share(lasted, pace)))
            return (pace.warm_up_s + pace.window_s * min(1.0, done)) / whole
        return 1.0

    # What a closed run asks of its load.

    @property
    def levels(self) -> tuple[Level, ...]:
        """One stretch; when it ends is not known before."""
        return (Level(self._slots or 0, 0.0, math.inf),)

    @property
    def seconds(self) -> float:
        """At most, without the tail."""
        return self._pace.most_warm_up_s + self._pace.most_window_s

    def level_at(self, elapsed: float) -> Level | None:
        """The level, to be asked for again after a tick; None when all is over."""
        if self.advance(elapsed) is Phase.OVER:
            return None
        return Level(self._slots or 0, 0.0, elapsed + TICK_S)


def _share(lasted: float, pace: Pace) -> float:
    return lasted / pace.most_window_s
