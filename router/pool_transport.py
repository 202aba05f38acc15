"""httpx over our own connections, for the small GETs that watch a backend.

A poll every 200 ms through httpx's stock transport costs 2 ms of CPU on an idle loop, most of it
in its pool, h11 and anyio; that would be a fortieth of the core that relays. The client API stays
httpx's; beneath it, the relay's `BackendConnection` does the work. A request that is cancelled
closes its connection and holds no place in any pool, which the stock one does when it is cancelled
while connecting.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from router.backend import BackendConnection
    from router.framing import ResponseHead
    from router.pool import BackendPool


class _Reader:
    """Collects one answer, as the driver of an exchange would."""

    def __init__(self, limit: int) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.head: ResponseHead | None = None
        self.body = bytearray()
        self._limit = limit

    def backend_begin(self, head: ResponseHead, now: float) -> None:  # noqa: ARG002
        self.head = head

    def backend_payload(self, payload: bytes, framed: bytes, count: int, now: float) -> None:  # noqa: ARG002
        self.body += payload
        if len(self.body) > self._limit:
            self._fail(httpx.ReadError(f"longer than {self._limit} bytes"))

    def backend_whole(self, head: ResponseHead, body: bytes, now: float, *, reusable: bool) -> None:
        self.backend_begin(head, now)
        self.backend_payload(body, b"", 1, now)
        self.backend_end(now, reusable=reusable)

    def backend_read(self) -> None:
        """Nothing is held back, so nothing is waited for."""

    def backend_end(self, now: float, *, reusable: bool) -> None:  # noqa: ARG002
        if not self.done.done():
            self.done.set_result(reusable)

    def backend_lost(self, *, answered: bool, invalid: bool = False) -> None:
        text = "the connection broke" if not invalid else "not an HTTP/1.1 answer"
        self._fail(httpx.RemoteProtocolError(text) if answered else httpx.ReadError(text))

    def _fail(self, error: httpx.TransportError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class PoolTransport(httpx.AsyncBaseTransport):
    """Sends requests without a body over a pool of our own connections."""

    def __init__(self, pool: BackendPool, *, limit: int) -> None:
        """`limit`: bytes of an answer that are read at most."""
        self._pool = pool
        self._limit = limit

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One request; once more on a fresh connection when a reused one turns out dead.

        Raises httpx's transport errors.
        """
        pool = self._pool
        idle = pool.take(pool.clock())
        if idle is not None:
            try:
                return await self._ask(idle, request)
            except httpx.ReadError:
                pass  # no byte came: it was closed while it lay idle, and a GET may be repeated
        try:
            connection = await pool.connect()
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time") from error
        except OSError as error:
            raise httpx.ConnectError(type(error).__name__) from error
        return await self._ask(connection, request)

    async def _ask(self, connection: BackendConnection, request: httpx.Request) -> httpx.Response:
        reader = _Reader(self._limit)
        lines = [b"%b %b HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)]
        lines += [b"%b: %b\r\n" % header for header in request.headers.raw]
        connection.send(reader, b"".join(lines) + b"\r\n", b"")
        try:
            reusable = await reader.done
        except BaseException:
            connection.drop()
            raise
        if reusable:
            connection.keep(self._pool.clock())
        else:
            connection.drop()
        head = reader.head
        if head is None:
            raise httpx.RemoteProtocolError("an answer without a head")
        return httpx.Response(head.status, headers=head.headers, content=bytes(reader.body))

    async def aclose(self) -> None:
        """Close every connection."""
        self._pool.close()
