"""How long to wait before a process that ended is started again.

The law of this file: a rule without a clock. Each end in a row doubles the wait up to a bound; one
that lived long enough begins anew. It never gives up: the bound keeps the attempts cheap.
"""

from __future__ import annotations

from typing import Final

LIVED: Final = 60.0  # seconds of being ready after which an end is the first one again


class Backoff:
    """The waits of one process."""

    def __init__(self, first: float, longest: float, *, lived: float = LIVED) -> None:
        """Times in seconds."""
        self._first = first
        self._longest = longest
        self._lived = lived
        self.ends = 0  # in a row

    def after(self, ready_for: float) -> float:
        """Return the wait after an end; `ready_for` is how long it served before it."""
        if ready_for >= self._lived:
            self.ends = 0
        self.ends += 1
        return min(self._first * 2.0 ** min(self.ends - 1, 30), self._longest)
