"""A uvicorn server as one of the two listeners of a process.

What uvicorn does at its own end and we do not want is taken out here. It holds no rule of ours but
one: whoever the system has let connect is served, also at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

ROUNDS: Final = 100  # looks for who waits to be accepted at the end; strangers must not prolong it
TICK: Final = 1.0  # seconds between two looks at the clock for the Date header


class Listener(uvicorn.Server):
    """A uvicorn server that leaves signals alone, and nothing behind."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._asked = asyncio.Event()

    def leave(self) -> None:
        """Ask it to end: close the listening socket, and each connection as it becomes idle."""
        self.should_exit = True
        self._asked.set()

    async def main_loop(self) -> None:
        """Wait to be asked to end. uvicorn looks ten times a second whether it was."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._asked.wait()

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
            # The last look and the closing, which uvicorn does first, are one step of the loop.
            for _ in range(ROUNDS):
                if not self._take_in(sockets or []):
                    break
                await asyncio.sleep(0)
            await super().shutdown(sockets)
            ended = not self.force_exit
        finally:
            if not ended:
                await self.lifespan.shutdown()

    def _take_in(self, sockets: list[socket.socket]) -> int:
        """Accept what waits in the listeners' queues, and how many that were.

        For the client these connections exist, and its request may be on its way: closing a
        listener would reset them, and what is in front of us must take that for a request lost.
        """
        taken = 0
        for listener in sockets:
            with contextlib.suppress(OSError):  # nobody waits, or there is no room for one more
                while True:
                    sock, _ = listener.accept()
                    taken += 1
                    task = asyncio.get_running_loop().create_task(self._serve_last(sock))
                    self.server_state.tasks.add(task)
                    task.add_done_callback(self.server_state.tasks.discard)
        return taken

    async def _serve_last(self, sock: socket.socket) -> None:
        """Serve one connection to the end of its request."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # it has gone again
            _, protocol = await loop.connect_accepted_socket(
                self._make_protocol, sock, ssl=self.config.ssl
            )
            protocol.shutdown()

    def _make_protocol(self) -> Any:
        """As uvicorn's `startup` does."""
        make: Any = self.config.http_protocol_class
        return make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
