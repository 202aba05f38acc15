"""One large step in each turn of the event loop, so that a stream beside it waits for one of them only.

The loop would do all that is ready before it looks at the sockets again: a read of 256 KiB for each
connection that has one (libuv even takes 32 in a row from one socket), and a decision about each
body of 10 MB that has become whole. Here such steps stand in one line. It may not know what they are;
whoever asks must bear that the world has changed when its step comes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# Bytes of a read or a body that is worth a turn of its own: some 0.1 ms of work, more than the turn costs.
LARGE: Final = 65_536


class Turns:
    """The line of large steps of one process."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def ask(self, step: Callable[[], None]) -> None:
        """Have this step done in a turn of the loop in which no other one is; not in the current one."""
        self._waiting.append(step)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        try:
            self._waiting[0]()
        finally:  # only now is it taken off, so that what it asks for is not done in this turn too
            self._waiting.popleft()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._next)
