"""What probes and traffic say of one backend: up, down, or not known yet.

Pure: `now` is monotonic seconds.
"""

from __future__ import annotations

import enum


class Probe(enum.StrEnum):
    """What is asked: `/ready` reads a flag (from 0.5.20), `/health` runs the model (1 s and up)."""

    READY = "ready"
    HEALTH = "health"


class Answer(enum.Enum):
    """What a probe heard."""

    PASS = "pass"  # noqa: S105 (not a password)
    REFUSED = "refused"  # 503, SGLang's own word: starting, draining or unhealthy
    MISS = "miss"  # no answer in time, another 5xx
    UNREACHABLE = "unreachable"  # no connection: nobody is there
    ABSENT = "absent"  # any other answer: this backend does not have this endpoint

    @classmethod
    def of_status(cls, status: int) -> Answer:
        """What an HTTP status says."""
        if 200 <= status < 300:
            return cls.PASS
        if status == 503:
            return cls.REFUSED
        return cls.MISS if status >= 500 else cls.ABSENT


class Health(enum.IntEnum):
    """What probes and traffic say. Numbered for a gauge."""

    DOWN = 0
    UP = 1
    UNKNOWN = 2


UNKNOWN = Health.UNKNOWN


class _Tally:
    """The row of answers of one probe, and what follows from it."""

    __slots__ = ("missed_at", "misses", "passes", "verdict")

    def __init__(self) -> None:
        self.verdict = Health.UNKNOWN
        self.missed_at = float("-inf")
        self.misses = 0
        self.passes = 0


class HealthState:
    """What is known of one backend. Each probe has its own tally: a quick `/ready` that passes
    must not wipe out that `/health` hangs. Down if either says so.
    """

    __slots__ = ("_down_after", "_life_window", "_lived", "_tallies", "_up_after", "state")

    def __init__(self, *, down_after: int = 3, up_after: int = 2, life_window: float = 5.0) -> None:
        """`life_window`: seconds for which traffic that succeeded outweighs probes that miss."""
        self._down_after = down_after
        self._up_after = up_after
        self._life_window = life_window
        self._lived = float("-inf")
        self._tallies = {probe: _Tally() for probe in Probe}
        self.state = Health.UNKNOWN

    def observe(self, probe: Probe, answer: Answer, now: float) -> None:
        """Take in one answer."""
        tally = self._tallies[probe]
        if answer is Answer.PASS:
            tally.misses = 0
            tally.passes += 1
            if tally.verdict is Health.UNKNOWN or tally.passes >= self._up_after:
                tally.verdict = Health.UP
        elif answer is Answer.REFUSED:
            tally.passes = 0
            tally.verdict = Health.DOWN
        elif answer is Answer.ABSENT:
            self._tallies[probe] = _Tally()
        else:
            self._miss(tally, now, sure=answer is Answer.UNREACHABLE)
        self._sum_up()

    def _miss(self, tally: _Tally, now: float, *, sure: bool) -> None:
        """Traffic that succeeded of late outweighs a slow probe, but not that nobody is there."""
        tally.passes = 0
        if self._lived > tally.missed_at:
            tally.misses = 0
        tally.missed_at = now
        if sure or now - self._lived >= self._life_window:
            tally.misses += 1
            if tally.misses >= self._down_after:
                tally.verdict = Health.DOWN

    def lived(self, now: float) -> None:
        """Traffic succeeded: misses up to now do not count. An explicit 503 still does."""
        self._lived = now  # all that the path of a request pays; `_miss` does the rest
        if self.state is Health.UNKNOWN:
            self._sum_up()

    def lived_since(self, then: float) -> bool:
        """Whether traffic succeeded after this moment."""
        return self._lived > then

    def verdict(self, probe: Probe) -> Health:
        """What one probe alone says."""
        return self._tallies[probe].verdict

    def _sum_up(self) -> None:
        verdicts = [tally.verdict for tally in self._tallies.values()]
        if Health.DOWN in verdicts:
            self.state = Health.DOWN
        elif Health.UP in verdicts or self._lived > float("-inf"):
            self.state = Health.UP
        else:
            self.state = Health.UNKNOWN
