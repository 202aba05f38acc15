"""The idle and open connections to one backend: which to take, how to make one.

A connection is taken again only while it has been idle for less than the backend's own keep-alive,
the one used last first, so that few stay warm and the rest grow old and are closed.

It may not limit how many there are (the relay counts requests, `files` open files), send anything,
or say whether a backend is well.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from router.backend import BackendConnection
from router.known_heads import KnownAnswers
from router.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.config import BackendUrl
    from router.load import Role
    from router.routes import Route


class BackendPool:
    """Connections to one backend: idle ones to take, new ones to make."""

    def __init__(
        self,
        role: Role,
        url: BackendUrl,
        *,
        key: str | None,
        keep_alive: float,
        connect_timeout: float,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`keep_alive` and `connect_timeout` in seconds; `key` is the backend's own API key.

        `turns`: those of the process; without them its own.
        """
        self.role = role
        self.url = url
        self.keep_alive = keep_alive
        self.connect_timeout = connect_timeout
        self.idle: list[BackendConnection] = []  # the one idle for the longest time first
        self.open: set[BackendConnection] = set()  # all that are there, the idle ones too
        self._making: set[BackendConnection] = set()
        self._key = f"authorization: Bearer {key}\r\n".encode() if key else b""
        self._tls = (
            tls if tls is not None or url.scheme != "https" else ssl.create_default_context()
        )
        self.clock = clock
        self.turns = turns if turns is not None else Turns()
        self._heads: dict[Route, bytes] = {}  # as many as there are routes
        self.known_answers = KnownAnswers()

    @property
    def connecting(self) -> int:
        """How many connections are being made; one that is made is open and not counted here."""
        return len(self._making)

    def head_for(self, route: Route) -> bytes:
        """The constant beginning of a request for this route: request line, Host, key."""
        head = self._heads.get(route)
        if head is None:
            head = self._heads[route] = self.head(route.method, route.path)
        return head

    def head(self, method: bytes, path: bytes) -> bytes:
        """The beginning of any request: request line, Host, key."""
        target = self.url.prefix.encode() + path
        return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b" % (method, target, self.url.authority, self._key)

    def take(self, now: float) -> BackendConnection | None:
        """The idle connection used last, if one is young enough."""
        while self.idle:
            connection = self.idle.pop()
            transport = connection.transport
            if (
                now - connection.idle_since < self.keep_alive
                and transport is not None
                and not transport.is_closing()
            ):
                return connection
            connection.drop()
        return None

    async def connect(self) -> BackendConnection:
        """A new connection. Raises OSError, or TimeoutError after `connect_timeout`.

        Names are looked up each time, so a backend that moved is found without a restart.
        """
        connection = BackendConnection(self)
        loop = asyncio.get_running_loop()
        self._making.add(connection)
        try:
            async with asyncio.timeout(self.connect_timeout):
                await loop.create_connection(
                    lambda: connection, self.url.host, self.url.port, ssl=self._tls
                )
        except BaseException:
            # Cancelled between the handshake and our waking up. uvloop then never says that the
            # connection is lost.
            connection.drop()
            self.forget(connection)
            raise
        finally:
            self._making.discard(connection)
        return connection

    def made(self, connection: BackendConnection) -> None:
        """A connection is there; who asked for it may hear of that only later."""
        self._making.discard(connection)
        self.open.add(connection)

    def forget(self, connection: BackendConnection) -> None:
        """A connection is gone."""
        self.open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Close connections that have been idle too long."""
        while self.idle and now - self.idle[0].idle_since >= self.keep_alive:
            self.idle.pop(0).drop()

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self.open):
            connection.drop()
