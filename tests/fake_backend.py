r"""A backend's connection without a socket: what a test hands it, it has read.

    connection, transport = connected()
    connection.send(driver, b"", b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\n...")

What is written to it is thrown away.
"""

from __future__ import annotations

from typing import Any, cast

from router.backend import BackendConnection
from router.framing import ResponseHead
from router.pool import BackendPool


class StrictTransport:
    """A transport that holds what comes while it does not read, and says no to what makes no sense."""

    def __init__(self) -> None:
        self.reading = True
        self.closing = False

    def pause_reading(self) -> None:
        assert not self.closing
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.closing
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        """The request: nobody looks at it."""

    def abort(self) -> None:
        self.closing = True


class Taker:
    """A driver that takes what comes, and hears of the end."""

    def __init__(self) -> None:
        self.taken = 0
        self.ended = False

    def backend_begin(self, head: ResponseHead, now: float) -> None:
        assert head.status == 200

    def backend_payload(self, payload: bytes, framed: bytes, count: int, now: float) -> None:
        self.taken += len(payload)

    def backend_rest(self, payload: bytes, count: int, now: float, *, reusable: bool) -> None:
        self.taken += len(payload)
        self.ended = True

    def backend_end(self, now: float, *, reusable: bool) -> None:
        self.ended = True


class _Plain:
    """As much of an address as a pool looks at."""

    scheme = "http"


def connected() -> tuple[BackendConnection, StrictTransport]:
    """A connection that was just made, in a pool of its own."""
    pool = BackendPool(
        cast(Any, "baseline"), cast(Any, _Plain()), key=None, keep_alive=4.0, connect_timeout=1.0,
        clock=lambda: 0.0,
    )  # fmt: skip
    connection, transport = BackendConnection(pool), StrictTransport()
    connection.connection_made(cast(Any, transport))
    return connection, transport
