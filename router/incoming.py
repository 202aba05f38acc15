"""One request as it arrived on a client's connection, before anything is done with it.

Pure. It looks its route up and has its head checked; it neither reads the body's meaning, which is
for `request`, nor knows whether there is room for it, which is for `relay`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from router import errors
from router.errors import ErrorAnswer
from router.guard import HeadFacts, path_of, read_head
from router.request import Body
from router.routes import Route

# Bodies of the router's own endpoints are a few fields of JSON.
MAX_OWN_BODY = 1_048_576
# Bytes of a piece of a body that is kept as it came. An object of its own takes some 50 bytes beside
# them, so that smaller ones (a client may send chunks of 2) are put together: what is held is then
# what is counted, but for a tenth.
WORTH_KEEPING = 512
# What a 405 names before it is known what is there (RFC 9110 section 15.5.6 wants it to name some).
SOME_METHOD = b"DELETE, GET, HEAD, OPTIONS, POST"
Headers = list[tuple[bytes, bytes]]

_NOTHING_READ = HeadFacts()


class HeadLimits(msgspec.Struct, frozen=True):
    """How large a request head may be: bytes of all headers, their number, bytes of the target."""

    header_bytes: int
    headers: int
    url_bytes: int

    @property
    def total(self) -> int:
        """Bytes beyond which a head that is still not whole is given up."""
        return self.header_bytes + self.url_bytes + 64  # the method, the version, the line ends


class RoomFor(Protocol):
    """Memory for a large body, as `router.room.Room` is."""

    def write(self, piece: bytes) -> None:
        """Add the next bytes."""
        ...

    def whole(self) -> memoryview:
        """All of it."""
        ...


class Incoming:
    """A request whose head is there; the body follows. `error` is the answer to a bad one."""

    # Most requests never set these: what is not set costs nothing.
    error: ErrorAnswer | None = None
    allow = b""  # for a 405
    complete = False
    waits_for_continue = False
    length: int | None = None  # of the body, as announced
    size = 0  # bytes of the body so far
    path = b""
    route: Route | None = None
    facts = _NOTHING_READ
    room: RoomFor | None = None  # for a large body; others are kept in pieces

    def __init__(
        self,
        method: bytes = b"",
        target: bytes = b"",
        headers: Headers | None = None,
        version: str = "1.1",
        *,
        keep_alive: bool = False,
    ) -> None:
        """Header names are lower case. Without arguments: a request that was never read."""
        self.method = method
        self.target = target
        self.headers: Headers = headers if headers is not None else []
        self.version = version
        self.keep_alive = keep_alive and version == "1.1"
        self.body: list[bytes | bytearray] = []

    def again(self, length: int) -> Incoming:
        """Another request with this head, sound as this one is, and a body of `length` bytes."""
        other = Incoming(self.method, self.target, self.headers, keep_alive=True)
        other.path, other.route, other.facts = self.path, self.route, self.facts
        other.length = length
        return other

    @classmethod
    def failed(cls, error: ErrorAnswer) -> Incoming:
        """A request that could not be read."""
        incoming = cls()
        incoming.error = error
        return incoming

    def check(
        self, limits: HeadLimits, table: Mapping[bytes, Route], at_most: int | None = None
    ) -> None:
        """Check the head, take from it what is needed, and find the route.

        `at_most`: bytes that it had at most, where that is known.
        """
        small = at_most is not None and at_most <= limits.header_bytes
        if not small or len(self.headers) > limits.headers or len(self.target) > limits.url_bytes:
            self.error = self._over(limits)
            if self.error is not None:
                return
        facts = read_head(self.version, self.headers)
        if isinstance(facts, ErrorAnswer):
            self.error = facts
            return
        self.facts, self.length = facts, facts.length
        route = table.get(self.target)  # the plain spelling, which nearly all clients use
        if route is not None and route.method == self.method:
            self.path, self.route = self.target, route
            return
        path = path_of(self.target)
        if self.method in {b"CONNECT", b"TRACE"}:
            self.error = errors.METHOD_NOT_ALLOWED
            route = table.get(path or b"")
            self.allow = SOME_METHOD if route is None else _allowed(route)
        elif path is None:
            self.error = errors.BAD_REQUEST.with_message("the request target is not a path")
        else:
            self._find(path, table)

    def _over(self, limits: HeadLimits) -> ErrorAnswer | None:
        """The limit that the head exceeds, counted exactly."""
        if len(self.target) > limits.url_bytes:
            return errors.URL_TOO_LONG
        size = 0
        for name, value in self.headers:
            size += len(name) + len(value) + 4
        if size > limits.header_bytes or len(self.headers) > limits.headers:
            return errors.HEADERS_TOO_LARGE
        return None

    def _find(self, path: bytes, table: Mapping[bytes, Route]) -> None:
        """The route of this path, or a 405. HEAD and OPTIONS are not relayed: we answer them."""
        self.path = path
        route = table.get(path)
        if route is None:
            return
        if self.method == route.method:
            self.route = route
        elif self.method not in {b"OPTIONS", b"HEAD"} or (
            self.method == b"HEAD" and route.method != b"GET"
        ):
            self.error = errors.METHOD_NOT_ALLOWED
            self.allow = _allowed(route)

    def add(self, piece: bytes) -> None:
        """Another piece of the body."""
        self.size += len(piece)
        body = self.body
        if self.room is not None:
            self.room.write(piece)
        elif len(piece) >= WORTH_KEEPING or not body:
            body.append(piece)
        elif isinstance(last := body[-1], bytearray):
            last += piece
        else:
            body.append(bytearray(piece))

    def take_body(self) -> Body:
        """The whole body; it is given away and not kept twice."""
        if self.room is not None:
            room, self.room = self.room, None
            return room.whole()
        first = self.body[0] if len(self.body) == 1 else None
        body = first if isinstance(first, bytes) else b"".join(self.body)
        self.body = []
        return body


def _allowed(route: Route) -> bytes:
    """The methods of a route, as a 405 must name them."""
    return b"GET, HEAD" if route.method == b"GET" else route.method
