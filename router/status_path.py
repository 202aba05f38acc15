"""Where the pair was in the plane during the last minutes: a bounded ring of (n, m).

Pure. The router's sweep hands over the present concurrencies at every tick; one in `EVERY` seconds is
kept, so that a sample costs the same whatever the traffic, and the ring never grows.
"""

from __future__ import annotations

from collections import deque
from typing import Final

KEPT: Final = 300  # samples: five minutes
EVERY: Final = 1.0  # seconds between two of them


class LoadPath:
    """The last samples, oldest first."""

    def __init__(self, *, kept: int = KEPT, every: float = EVERY) -> None:
        """`kept` samples at most, at least `every` seconds apart."""
        self._ring: deque[tuple[float, int, int]] = deque(maxlen=kept)
        self._every = every
        self._due = float("-inf")

    def sample(self, now: float, n: int, m: int) -> None:
        """Keep (n, m), the concurrencies at `now` (monotonic seconds), if one is due."""
        if now < self._due:
            return
        # In step with the clock rather than with a caller that is a little late each time.
        due = self._due + self._every
        self._due = due if due >= now + self._every / 2 else now + self._every
        self._ring.append((now, n, m))

    def samples(self) -> list[tuple[float, int, int]]:
        """All that is kept: monotonic seconds, n, m."""
        return list(self._ring)
