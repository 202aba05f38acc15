"""When a backend's failures take it out of use: a state machine, `now` in seconds as an argument.

    CLOSED     all requests count: `failures` failures without a success between them  -> OPEN
    OPEN       nothing is admitted for `open_for` seconds, doubled with each re-opening up to
               `open_max`; when they are over                                          -> HALF_OPEN
    HALF_OPEN  one trial request at a time; only trials count: a success               -> CLOSED
               a failure                                                               -> OPEN

The right to be the trial cannot be lost: any verdict on the trial gives it back, the client's
leaving too, and should none come it lapses. Ordinary requests that were under way when the
breaker opened say nothing about the backend as it is now, so they do not count until it is closed.
"""

from __future__ import annotations

import enum


class Verdict(enum.Enum):
    """What an exchange says about its backend."""

    SUCCESS = "success"  # answered, to the last byte
    NEUTRAL = "neutral"  # 4xx, or the client left: says nothing about the backend
    BACK_PRESSURE = "back_pressure"  # 429 or 503: alive, and asks for less
    FAILURE = "failure"  # other 5xx, no connection, a timeout, a cut body

    @classmethod
    def of_status(cls, status: int) -> Verdict:
        """The verdict on a complete answer with this HTTP status."""
        if status in {429, 503}:
            return cls.BACK_PRESSURE
        if status >= 500:
            return cls.FAILURE
        return cls.NEUTRAL if status >= 400 else cls.SUCCESS


class BreakerState(enum.IntEnum):
    """Numbered for a gauge: the higher, the worse."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """The breaker of one backend. All times are seconds."""

    __slots__ = (
        "_failures",
        "_open_for",
        "_open_max",
        "_span",
        "_ticket",
        "_trial_lapse",
        "_trial_until",
        "consecutive",
        "open_until",
        "state",
    )

    def __init__(
        self,
        *,
        failures: int = 5,
        open_for: float = 5.0,
        open_max: float = 60.0,
        trial_lapse: float = 30.0,
    ) -> None:
        """`trial_lapse`: a trial may be a stream of minutes; so long alone is long enough."""
        self._failures = failures
        self._open_for = open_for
        self._open_max = open_max
        self._trial_lapse = trial_lapse
        self._span = open_for
        self.open_until = float("-inf")  # when a trial is allowed again; meaningful while open
        self._trial_until = float("-inf")
        self._ticket = 0
        self.state = BreakerState.CLOSED
        self.consecutive = 0

    def allows(self, now: float) -> bool:
        """Whether a request may be sent, as far as this breaker goes."""
        if self.state is BreakerState.HALF_OPEN:
            return now >= self._trial_until
        return self.state is BreakerState.CLOSED

    def advance(self, now: float) -> None:
        """Let time pass: an open breaker whose time is over becomes half-open."""
        if self.state is BreakerState.OPEN and now >= self.open_until:
            self.state = BreakerState.HALF_OPEN
            self._trial_until = float("-inf")

    def admit(self, now: float) -> int:
        """Note that a request is sent; its ticket is for `record`. 0: an ordinary request.

        A request that is sent although the breaker is open (no other backend was left) is a trial
        too: what becomes of it is news.
        """
        if self.state is BreakerState.CLOSED:
            return 0
        self._ticket += 1
        if self.state is BreakerState.HALF_OPEN:
            self._trial_until = now + self._trial_lapse
        return self._ticket

    def record(self, verdict: Verdict, now: float, ticket: int = 0) -> None:
        """Take in what became of a request, with the ticket that `admit` gave it."""
        if self.state is BreakerState.CLOSED:
            if verdict is Verdict.SUCCESS:
                self.consecutive = 0
            elif verdict is Verdict.FAILURE:
                self.consecutive += 1
                if self.consecutive >= self._failures:
                    self._open(now)
        elif ticket == 0:
            return
        elif verdict is Verdict.SUCCESS:
            self.state = BreakerState.CLOSED
            self.consecutive = 0
            self._span = self._open_for
        elif self.state is BreakerState.HALF_OPEN:
            if verdict is Verdict.FAILURE:
                self._span = min(2.0 * self._span, self._open_max)
                self._open(now)
            elif ticket == self._ticket:
                self._trial_until = float("-inf")

    def _open(self, now: float) -> None:
        self.state = BreakerState.OPEN
        self.open_until = now + self._span
