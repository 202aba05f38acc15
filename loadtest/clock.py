"""Where a simulated server gets its time from, so that a test can pass its own.

What measures gets its time with `sweep_level.Instruments`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and waiting for some."""

    def now(self) -> float:
        """Monotonic seconds; on one machine the same for all processes."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; not at all if `seconds` is 0 or less, but let others run."""
        ...


class RealClock:
    """The machine's own time."""

    def now(self) -> float:
        """Monotonic seconds since some moment, the same for all processes of this machine."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait this long."""
        await asyncio.sleep(max(0.0, seconds))
