"""What a fuzzer may throw bytes at: each target takes some and raises when a promise is broken.

    guard    a request's head, as fields: it never raises, and forwards no line that it must not
    request  bytes of a client: cut anywhere they are the same requests, with the bodies that h11
             finds, and what is forwarded is one request to h11 too
    answer   bytes of a backend: cut anywhere they are the same answer, with h11's body
    sse      a stream: cut anywhere the scanner learns the same of it
    info     a body: it never raises, and whether to stream is read as the json module does

Where a target compares ways to cut, the end of the bytes says where: see `pieces_of`. Neither
h11's refusals nor ours are held against the other: only what both accept must be the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any, Final, cast

import h11
import uvicorn
from uvicorn.server import ServerState

from router import sse
from router.backend import BackendConnection
from router.errors import ErrorAnswer
from router.framing import ChunkedReader, ResponseHead
from router.guard import path_of, pinned_role, read_head
from router.headers import CREDENTIALS, HOP_BY_HOP, OWN_PREFIX
from router.incoming import HeadLimits, Incoming
from router.known_heads import KnownAnswers, KnownRequests
from router.parsing import IDLE
from router.pool import BackendPool
from router.receiving import ReceivingProtocol
from router.relay import Relay
from router.request import BodyError, read_info
from router.sse import SseScanner, error_code, first_event, payloads, usage_of

BYTE_BY_BYTE: Final = 7  # as the number of cuts
KEPT_BY_US: Final = CREDENTIALS | HOP_BY_HOP | {b"host", b"content-length", b"expect"}
BACKEND_HEAD: Final = b"POST /v1/chat/completions HTTP/1.1\r\nhost: backend\r\n"
SMALL_EVENT: Final = 48  # bytes, in place of MAX_EVENT, which a fuzzer would never reach


def pieces_of(data: bytes) -> tuple[bytes, list[bytes]]:
    """A stream and a way to cut it: the last byte is the number of cuts, two before it for each."""
    if not data:
        return b"", []
    count = data[-1] % 8
    if count == BYTE_BY_BYTE:
        whole = data[:-1]
        return whole, [whole[at : at + 1] for at in range(len(whole))]
    whole, told = data[: -1 - 2 * count], data[-1 - 2 * count : -1]
    size = len(whole) + 1
    cuts = sorted(int.from_bytes(told[at : at + 2], "big") % size for at in range(0, len(told), 2))
    ends = [*cuts, len(whole)]
    return whole, [whole[a:b] for a, b in zip([0, *cuts], ends, strict=True) if a < b]


# ---------------------------------------------------------------------- guard


def guard(data: bytes) -> None:
    """The first line is the target, each further one a header; what a parser refuses is left out."""
    target, *lines = data.split(b"\n")
    headers = []
    for line in lines:
        name, _, value = line.partition(b":")
        name = bytes(c for c in name.lower() if chr(c).isalnum() or c in b"-_!#$%&'*+.^`|~")
        value = bytes(c for c in value if c == 9 or (c >= 32 and c != 127)).strip(b" \t")
        if name.isascii() and name:
            headers.append((name, value))
    path = path_of(target)
    assert path is None or (path.isascii() and b"?" not in path and path[:1] in {b"/", b"*"})
    pinned_role(data)
    facts = read_head("1.0" if data[:1] == b"0" else "1.1", headers)
    if isinstance(facts, ErrorAnswer):
        assert 400 <= facts.status < 600
        return
    assert sum(name == b"host" for name, _ in headers) <= 1
    named = b",".join(value for name, value in headers if name == b"connection").lower()
    # `close` is an option and names no header, even where there is one of that name.
    hops = {token.strip() for token in named.split(b",")} - {b"close"}
    assert facts.forwarded == b"" or facts.forwarded.endswith(b"\r\n")
    for line in facts.forwarded.split(b"\r\n")[:-1]:
        name, colon, value = line.partition(b": ")
        assert colon
        assert (name, value) in headers
        assert name not in KEPT_BY_US
        assert name not in hops
        assert b"_" not in name
        assert not name.startswith(OWN_PREFIX)


# ---------------------------------------------------------------------- requests


class _Transport:
    """Takes what is written."""

    def __init__(self) -> None:
        self.closed = False

    def get_extra_info(self, _: str) -> None:
        return None

    def write(self, _: bytes) -> None:
        assert not self.closed

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    close = abort


class _Relay:
    """As much of a relay as receiving needs."""

    head_limits = HeadLimits(32_768, 100, 8192)
    max_body = 1_000_000
    max_buffered = 10_000_000

    def __init__(self, known: KnownRequests) -> None:
        self.buffered = 0
        self.known_requests = known

    def clock(self) -> float:
        return 0.0

    def admission_error(self, _: Incoming) -> None:
        return None


class _Collector(ReceivingProtocol):
    """Answers each request at once."""

    got: list[Incoming]

    def _advance(self) -> None:
        while self.queue:
            self._begin(self.queue.pop(0))

    def _begin(self, incoming: Incoming) -> None:
        self.got.append(incoming)
        self._enter(IDLE, 0.0)


@functools.cache
def _config() -> uvicorn.Config:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Never called."""

    config = uvicorn.Config(app, ws="none", log_config=None, lifespan="off")
    config.load()
    return config


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One that is closed: receiving starts nothing in it."""
    loop = asyncio.new_event_loop()
    loop.close()
    return loop


Read = tuple[bytes, bytes, bytes, str | None]  # method, target, body, code of an error


def _receive(pieces: list[bytes], known: KnownRequests) -> tuple[list[Read], list[Incoming]]:
    relay = _Relay(known)
    protocol = _Collector(cast(Relay, relay), _config(), ServerState(), {}, _loop())
    protocol.got = []
    protocol.connection_made(cast(asyncio.Transport, _Transport()))
    for piece in pieces:
        protocol.data_received(piece)
    found: list[Read] = []
    for each in protocol.got:
        if each.error is not None:  # how much had arrived by then is nobody's business
            found.append((b"", b"", b"", each.error.code))
        else:
            found.append((each.method, each.target, b"".join(each.body), None))
    return found, protocol.got


def _h11_requests(whole: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """The whole requests that h11 finds, up to the first that it refuses."""
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=1_000_000)
    server.receive_data(whole)
    found = []
    head: h11.Request | None = None
    body = b""
    with contextlib.suppress(h11.RemoteProtocolError):
        while True:
            event = server.next_event()
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                found.append((head.method, head.target, body))
                server.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                server.send(h11.EndOfMessage())
                if server.our_state is not h11.DONE or server.their_state is not h11.DONE:
                    return found
                server.start_next_cycle()
            else:
                return found
    return found


def request(data: bytes) -> None:
    """Bytes of a client."""
    whole, pieces = pieces_of(data)
    known = KnownRequests()
    found, got = _receive([whole] if whole else [], known)
    assert _receive(pieces, KnownRequests())[0] == found
    # Heads that are known now mean what they meant, whole and in pieces.
    assert _receive([whole] if whole else [], known)[0] == found
    assert _receive(pieces, known)[0] == found
    for ours, theirs in zip(found, _h11_requests(whole), strict=False):
        if ours[3] is not None:
            break
        assert ours[:3] == theirs
    for each in got:
        if each.error is not None or each.route is None:
            continue
        body = b"".join(each.body)
        sent = (
            BACKEND_HEAD + each.facts.forwarded + b"content-length: %d\r\n\r\n" % len(body) + body
        )
        assert _h11_requests(sent) == [(b"POST", b"/v1/chat/completions", body)]


# ---------------------------------------------------------------------- answers


class _Answer:
    """Hears of one answer."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.body = b""
        self.end: str | None = None

    def backend_begin(self, head: ResponseHead, now: float) -> None:
        assert self.head is None
        assert self.end is None
        self.head = head

    def backend_payload(self, payload: bytes, framed: bytes, count: int, now: float) -> None:
        assert self.end is None
        assert self.head is not None
        assert count >= 1
        if framed:
            assert b"".join(ChunkedReader().feed(framed)) == payload
        self.body += payload

    def backend_whole(self, head: ResponseHead, body: bytes, now: float, *, reusable: bool) -> None:
        self.backend_begin(head, now)
        self.backend_payload(body, b"", 1, now)
        self.backend_end(now, reusable=reusable)

    def backend_rest(self, payload: bytes, count: int, now: float, *, reusable: bool) -> None:
        self.backend_payload(payload, b"", count, now)
        self.backend_end(now, reusable=reusable)

    def backend_read(self) -> None:
        pass

    def backend_end(self, now: float, *, reusable: bool) -> None:
        assert self.end is None
        self.end = "end"

    def backend_lost(self, *, answered: bool, invalid: bool = False) -> None:
        assert self.end is None
        self.end = "invalid" if invalid else "lost"


class _Pool:
    """As much of a pool as a connection needs."""

    def __init__(self, known: KnownAnswers) -> None:
        self.open: set[Any] = set()
        self.idle: list[Any] = []
        self.known_answers = known

    def clock(self) -> float:
        return 0.0

    def made(self, _: BackendConnection) -> None:
        pass

    def forget(self, _: BackendConnection) -> None:
        pass


def _read_answer(pieces: list[bytes], known: KnownAnswers) -> _Answer:
    answer = _Answer()
    connection = BackendConnection(cast(BackendPool, _Pool(known)))
    connection.connection_made(cast(asyncio.Transport, _Transport()))
    connection.send(answer, b"", b"")
    for piece in pieces:
        if answer.end is None:
            connection.data_received(piece)
    if answer.end is None:
        connection.connection_lost(None)
    return answer


def _h11_answer(whole: bytes) -> tuple[int, bytes] | None:
    """Status and body as h11 reads them; None when it refuses, or it is not whole."""
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1_000_000)
    client.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    status, body = 0, b""
    with contextlib.suppress(h11.RemoteProtocolError):
        client.receive_data(whole)
        closed = False
        while True:
            event = client.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return status, body
            elif event is h11.NEED_DATA and not closed:
                closed = True
                client.receive_data(b"")
            elif not isinstance(event, h11.InformationalResponse):
                return None
    return None


def answer(data: bytes) -> None:
    """Bytes of a backend."""
    whole, pieces = pieces_of(data)
    known = KnownAnswers()
    one, many = _read_answer([whole] if whole else [], known), _read_answer(pieces, KnownAnswers())
    again = _read_answer([whole] if whole else [], known)  # with a head that is known now
    assert (one.head, one.end, one.body) == (again.head, again.end, again.body)
    assert (one.head, one.end) == (many.head, many.end)
    if one.end != "invalid":  # then what came before it depends on the reads
        assert one.body == many.body
    theirs = _h11_answer(whole)
    if one.end == "end" and one.head is not None and theirs is not None:
        assert (one.head.status, one.body) == theirs


# ---------------------------------------------------------------------- streams and bodies


def _scan(pieces: list[bytes]) -> tuple[object, ...]:
    scanner = SseScanner()
    for piece in pieces:
        scanner.feed(piece)
        assert len(scanner._carry) <= sse.MAX_EVENT + 16
    return scanner.usage, scanner.done, scanner.error, scanner.between_events


def sse_stream(data: bytes) -> None:
    """A stream, scanned with the usual limit and with a small one."""
    whole, pieces = pieces_of(data)
    usual = sse.MAX_EVENT
    for limit in (usual, SMALL_EVENT):
        sse.MAX_EVENT = limit  # type: ignore[misc]
        try:
            assert _scan([whole]) == _scan(pieces)
        finally:
            sse.MAX_EVENT = usual  # type: ignore[misc]
    found = payloads(whole)
    first = first_event(whole)
    assert first is None or found[0] == first
    for payload in found:
        error_code(payload)
        usage_of(payload)


def info(data: bytes) -> None:
    """A request's body."""
    try:
        found = read_info(data, None)
    except BodyError:
        return
    assert data.lstrip()[:1] == b"{"
    assert found.choices >= 0  # a 0 is for the engine to refuse
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
        assert found.stream is (value.get("stream") is True)


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "guard": guard,
    "request": request,
    "answer": answer,
    "sse": sse_stream,
    "info": info,
}
