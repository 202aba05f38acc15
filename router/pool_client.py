"""The GETs that watch a backend, over the relay's own connections.

A poll every 200 ms through httpx takes 0.6 ms of CPU each time, most of it in its models of URL,
headers and streams; four backends' worth of polls and probes would be a hundredth of the core that
relays. A request that is cancelled closes its connection, and holds no place in any pool.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.asking import BODY_LIMIT, COMPRESSED, NoReply, Reply, too_long, too_slow

if TYPE_CHECKING:
    from router.backend import BackendConnection
    from router.framing import ResponseHead
    from router.pool import BackendPool

_LINES = b"accept: */*\r\naccept-encoding: identity\r\nuser-agent: crossover\r\n\r\n"
_NOTHING_CAME = NoReply("the connection broke")


class _Reader:
    """Collects one answer, as the driver of an exchange would."""

    def __init__(self, limit: int) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[NoReply | None] = loop.create_future()
        self.status = 0
        self.pieces: list[bytes] = []
        self.reusable = False
        self._room = limit
        self._limit = limit

    def backend_begin(self, head: ResponseHead, now: float) -> None:  # noqa: ARG002
        self.status = head.status
        for name, value in head.headers:
            if name == b"content-encoding" and value.lower() != b"identity":
                self._fail(COMPRESSED)

    def backend_payload(self, payload: bytes, framed: bytes, count: int, now: float) -> None:  # noqa: ARG002
        self._room -= len(payload)
        if self._room >= 0:
            self.pieces.append(payload)
        else:
            self._fail(too_long(self._limit))

    def backend_rest(self, payload: bytes, count: int, now: float, *, reusable: bool) -> None:
        self.backend_payload(payload, b"", count, now)
        self.backend_end(now, reusable=reusable)

    def backend_whole(self, head: ResponseHead, body: bytes, now: float, *, reusable: bool) -> None:
        self.backend_begin(head, now)
        self.backend_payload(body, b"", 1, now)
        self.backend_end(now, reusable=reusable)

    def backend_read(self) -> None:
        """Nothing is held back, so nothing is waited for."""

    def backend_end(self, now: float, *, reusable: bool) -> None:  # noqa: ARG002
        self.reusable = reusable
        if not self.done.done():
            self.done.set_result(None)

    def backend_lost(self, *, answered: bool, invalid: bool = False) -> None:
        if invalid:
            self._fail(NoReply("not an HTTP/1.1 answer"))
        else:
            self._fail(NoReply("the answer is cut short") if answered else _NOTHING_CAME)

    def _fail(self, why: NoReply) -> None:
        if not self.done.done():
            self.done.set_result(why)


class PoolClient:
    """Asks one backend over a pool of our own connections."""

    def __init__(self, pool: BackendPool, *, limit: int = BODY_LIMIT) -> None:
        """`limit`: bytes of an answer that are read at most."""
        self._pool = pool
        self._limit = limit

    async def ask(self, path: str, within: float) -> Reply | NoReply:
        """GET `path`, relative to the root of the backend's routes: an `Ask`."""
        sent_at = self._pool.clock()
        try:
            async with asyncio.timeout(within):
                return await self._get(path.encode("ascii"), sent_at)
        except TimeoutError:
            return too_slow(within)
        except Exception as error:  # noqa: BLE001 (the last frame that can: a poller must survive)
            return NoReply(type(error).__name__)

    async def _get(self, path: bytes, sent_at: float) -> Reply | NoReply:
        """Once more on a fresh connection when a reused one turns out dead: a GET may be repeated."""
        pool = self._pool
        idle = pool.take(sent_at)
        if idle is not None:
            reply = await self._once(idle, path, sent_at)
            if reply is not _NOTHING_CAME:
                return reply
        try:
            connection = await pool.connect()
        except OSError as error:  # a TimeoutError is one
            return NoReply(f"no connection: {type(error).__name__}", connected=False)
        return await self._once(connection, path, sent_at)

    async def _once(
        self, connection: BackendConnection, path: bytes, sent_at: float
    ) -> Reply | NoReply:
        pool = self._pool
        if connection.closing:  # it broke before anything was sent
            return _NOTHING_CAME
        reader = _Reader(self._limit)
        connection.send(reader, pool.head(b"GET", b"/" + path) + _LINES, b"")
        try:
            failure = await reader.done
        except BaseException:
            connection.drop()
            raise
        now = pool.clock()
        if failure is None and reader.reusable:
            connection.keep(now)
        else:
            connection.drop()
        if failure is not None:
            return failure
        return Reply(reader.status, b"".join(reader.pieces), sent_at, now)

    def close(self) -> None:
        """Close every connection."""
        self._pool.close()
