"""A uvicorn server as one of the two listeners of a process.

What uvicorn does at its own end and we do not want is taken out here. It holds no rule of ours.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn


class Listener(uvicorn.Server):
    """A uvicorn server that leaves signals alone, and nothing behind."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's affair, not a listener's."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the application's lifespan in order, also when the end is forced or cut short.

        uvicorn leaves it running then: it would be cancelled with the event loop and logged as an
        error, with a traceback, at each stop that reaches the drain limit.
        """
        ended = False
        try:
            await super().shutdown(sockets)
            ended = not self.force_exit
        finally:
            if not ended:
                await self.lifespan.shutdown()
