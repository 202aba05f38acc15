"""One request as it arrives on a client's connection, before anything is done with it."""

from __future__ import annotations

from collections.abc import Mapping

from router import errors
from router.errors import ErrorAnswer
from router.guard import HeadFacts, path_of, read_head
from router.routes import Route

# Bodies of the router's own endpoints are a few fields of JSON.
MAX_OWN_BODY = 1_048_576


class HeadLimits:
    """How large a request head may be, bytes and count."""

    __slots__ = ("header_bytes", "headers", "total", "url_bytes")

    def __init__(self, header_bytes: int, headers: int, url_bytes: int) -> None:
        self.header_bytes = header_bytes
        self.headers = headers
        self.url_bytes = url_bytes
        self.total = header_bytes + url_bytes + 64  # a head that is still not whole beyond this


class Incoming:
    """Collects a request from the parser's callbacks; `error` is the answer to a bad one."""

    __slots__ = ("_head_size", "_limits", "_table", "allow", "body", "complete", "error", "facts", "headers",
                 "headers_done", "keep_alive", "method", "path", "route", "size", "target",
                 "version", "waits_for_continue")  # fmt: skip

    def __init__(self, limits: HeadLimits, table: Mapping[bytes, Route]) -> None:
        self._limits = limits
        self._table = table
        self._head_size = 0
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.headers_done = False
        self.method = b""
        self.version = "1.1"
        self.keep_alive = True
        self.path = b""
        self.route: Route | None = None
        self.facts = HeadFacts()
        self.body: list[bytes] = []
        self.size = 0
        self.complete = False
        self.error: ErrorAnswer | None = None
        self.allow = b""  # for a 405
        self.waits_for_continue = False

    def url(self, part: bytes) -> None:
        """A piece of the request target."""
        if len(self.target) + len(part) > self._limits.url_bytes:
            self.error = self.error or errors.URL_TOO_LONG
        else:
            self.target += part

    def header(self, name: bytes, value: bytes) -> None:
        """One header; beyond the limits nothing is kept."""
        self._head_size += len(name) + len(value) + 4
        if self._head_size > self._limits.header_bytes or len(self.headers) >= self._limits.headers:
            self.error = self.error or errors.HEADERS_TOO_LARGE
        else:
            self.headers.append((name.lower(), value))

    def head_complete(self, method: bytes, version: str, *, keep_alive: bool) -> None:
        """All headers are there: check them and find the route."""
        self.headers_done = True
        self.method, self.version = method, version
        self.keep_alive = keep_alive and version == "1.1"
        if self.error is not None:
            return
        facts = read_head(version, self.headers)
        if isinstance(facts, ErrorAnswer):
            self.error = facts
            return
        self.facts = facts
        if facts.upgrade:
            self.keep_alive = False
        path = path_of(self.target)
        if method in {b"CONNECT", b"TRACE"}:
            self.error = errors.METHOD_NOT_ALLOWED
        elif path is None:
            self.error = errors.BAD_REQUEST.with_message("the request target is not a path")
        else:
            self._find(path)

    def _find(self, path: bytes) -> None:
        self.path = path
        route = self._table.get(path)
        if route is None:
            return
        if self.method == route.method:
            self.route = route
        elif self.method not in {b"OPTIONS", b"HEAD"} or (
            self.method == b"HEAD" and route.method != b"GET"
        ):
            self.error = errors.METHOD_NOT_ALLOWED
            self.allow = b"GET, HEAD" if route.method == b"GET" else route.method

    def take_body(self) -> bytes:
        """The whole body; it is given away and not kept twice."""
        body = self.body[0] if len(self.body) == 1 else b"".join(self.body)
        self.body = []
        return body
