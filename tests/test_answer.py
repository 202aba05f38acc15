"""The client's side of an exchange as bytes, read by h11."""

from __future__ import annotations

import math
from typing import Any

import h11
import msgspec
import pytest

from router import errors
from router.actions import Request
from router.answer import Answer
from router.framing import ResponseHead, parse_head
from router.load import PolicyMemory, Role
from router.policy import Decision, Reason
from router.request import RequestInfo
from router.routes import TABLE

COMMON = b"date: Sun, 29 Nov 2026 17:51:26 GMT\r\nserver: crossover\r\n"
LENGTH = parse_head(b"HTTP/1.1 200 OK\r\ncontent-length: 5")
CHUNKED = parse_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked")
CLOSE = parse_head(b"HTTP/1.1 200 OK\r\nx-a: 1")


def make_request(
    *,
    info: RequestInfo | None = None,
    http10: bool = False,
    keep_alive: bool = True,
    extra: bytes = b"",
) -> Request:
    route, info = TABLE[b"/v1/chat/completions"], info or RequestInfo()
    return Request("req-1", route, info, b"{}", b"", 0.0, http10, keep_alive, extra)


class Read(msgspec.Struct):
    """What an HTTP client makes of the bytes it got."""

    status: int
    headers: dict[str, str]
    names: list[str]
    body: bytes
    complete: bool
    rest: bytes


def read_answer(wire: bytes, *, closed: bool) -> Read:
    """Read one answer to a POST with h11; `closed` says that the connection ended after it."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(wire)
    ended = False
    head: h11.Response | None = None
    body = b""
    complete = False
    while not complete:
        try:
            event: Any = client.next_event()
        except h11.RemoteProtocolError as error:
            assert "without sending complete message body" in str(error)  # noqa: PT017
            break
        if event is h11.NEED_DATA:
            if ended or not closed:
                break
            ended = True
            client.receive_data(b"")
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            complete = True
    assert head is not None, wire
    pairs = [(name.decode(), value.decode()) for name, value in head.headers]
    return Read(
        head.status_code, dict(pairs), [name for name, _ in pairs], body, complete,
        client.trailing_data[0],
    )  # fmt: skip


def whole(answer: Answer, head: ResponseHead, pieces: list[bytes]) -> bytes:
    wire = answer.begin(head, COMMON, draining=False)
    return wire + b"".join(map(answer.frame, pieces)) + answer.ending()


@pytest.mark.parametrize("http10", [False, True])
@pytest.mark.parametrize("head", [LENGTH, CHUNKED, CLOSE])
def test_each_framing_reaches_each_client(head: ResponseHead, http10: bool) -> None:
    """Whatever the backend's framing and the client's version, the client reads the same body."""
    answer = Answer(make_request(http10=http10))
    wire = whole(answer, head, [b"he", b"", b"llo"])
    read = read_answer(wire, closed=answer.close)
    assert (read.status, read.body, read.complete, read.rest) == (200, b"hello", True, b"")
    assert answer.status == 200
    assert answer.begun
    assert answer.close is http10
    assert read.headers.get("connection") == ("close" if http10 else None)


def test_the_framing_is_stated_once() -> None:
    """A length stays a length; everything else is chunked to 1.1 and close-delimited to 1.0."""
    framing = {
        (name, http10): {
            key: value
            for key, value in read_answer(
                whole(Answer(make_request(http10=http10)), head, [b"hello"]), closed=True
            ).headers.items()
            if key in {"content-length", "transfer-encoding"}
        }
        for name, head in (("length", LENGTH), ("chunked", CHUNKED), ("close", CLOSE))
        for http10 in (False, True)
    }
    assert framing == {
        ("length", False): {"content-length": "5"},
        ("length", True): {"content-length": "5"},
        ("chunked", False): {"transfer-encoding": "chunked"},
        ("chunked", True): {},
        ("close", False): {"transfer-encoding": "chunked"},
        ("close", True): {},
    }


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body_has_no_framing(status: int) -> None:
    """204 and 304 go out without length, chunks or end, and the connection can go on."""
    answer = Answer(make_request())
    head = parse_head(b"HTTP/1.1 %d x\r\ncontent-length: 7\r\netag: a" % status)
    wire = whole(answer, head, [])
    read = read_answer(wire, closed=False)
    assert (read.status, read.body, read.complete, read.rest) == (status, b"", True, b"")
    assert wire.endswith(b"\r\n\r\n")
    assert {"content-length", "transfer-encoding"}.isdisjoint(read.headers)
    assert read.headers["etag"] == "a"
    assert not answer.close


@pytest.mark.parametrize(
    ("keep_alive", "http10", "draining", "close"),
    [
        (True, False, False, False),
        (False, False, False, True),
        (True, True, False, True),
        (True, False, True, True),
    ],
)
def test_who_closes(keep_alive: bool, http10: bool, draining: bool, close: bool) -> None:
    """The connection ends after the answer if the client says so, is 1.0, or we are draining."""
    answer = Answer(make_request(http10=http10, keep_alive=keep_alive))
    wire = answer.begin(LENGTH, COMMON, draining=draining)
    assert answer.close is close
    assert (b"\r\nconnection: close\r\n" in wire) is close
    own = Answer(make_request(http10=http10, keep_alive=keep_alive))
    wire = own.error(errors.NO_BACKEND, COMMON, draining=draining)
    assert own.close is close
    assert (b"\r\nconnection: close\r\n" in wire) is close


def test_an_error_of_our_own() -> None:
    """An own error is one whole answer with the id, and its body is counted."""
    answer = Answer(make_request(extra=b"vary: origin\r\n"))
    wire = answer.error(errors.NO_BACKEND, COMMON, draining=False)
    read = read_answer(wire, closed=False)
    assert (read.status, read.body, read.complete) == (503, errors.NO_BACKEND.body, True)
    assert read.headers["x-request-id"] == "req-1"
    assert read.headers["vary"] == "origin"
    assert read.headers["retry-after"] == "2"
    assert "x-crossover-backend" not in read.headers
    assert answer.bytes_out == len(read.body)
    assert (answer.status, answer.begun, answer.chunked) == (503, True, False)


@pytest.mark.parametrize(
    ("backend", "threshold", "expected"),
    [
        (Role.SPECULATIVE, 8.0, ("speculative", "8")),
        (Role.BASELINE, 7.5, ("baseline", "7.5")),
        (Role.BASELINE, math.inf, ("baseline", "inf")),
        (None, None, ("none", None)),
    ],
)
def test_the_decision_is_in_the_headers(
    backend: Role | None, threshold: float | None, expected: tuple[str, str | None]
) -> None:
    """Backend, reason, n/m, threshold and id are said; no threshold, no header."""
    answer = Answer(make_request(extra=b"vary: origin\r\n"))
    decision = Decision(backend, Reason.BAND, 3, 4, threshold, PolicyMemory(), threshold)
    answer.explain(decision)
    read = read_answer(whole(answer, LENGTH, [b"hello"]), closed=False)
    assert (
        read.headers["x-crossover-backend"],
        read.headers.get("x-crossover-threshold"),
    ) == expected
    assert read.headers["x-crossover-reason"] == "band"
    assert read.headers["x-crossover-concurrency"] == "3/4"
    assert read.headers["x-request-id"] == "req-1"
    assert read.headers["vary"] == "origin"


def test_the_last_decision_counts() -> None:
    """A second decision replaces the first in the headers, each of which is there once."""
    answer = Answer(make_request())
    for reason in (Reason.BAND, Reason.REPLAY_CONNECT):
        answer.explain(Decision(Role.BASELINE, reason, 0, 0, None, PolicyMemory()))
    read = read_answer(whole(answer, LENGTH, [b"hello"]), closed=False)
    assert read.headers["x-crossover-reason"] == "replay_connect"
    assert len(read.names) == len(set(read.names))


def test_a_backend_cannot_speak_for_the_router() -> None:
    """Hop-by-hop headers, date, server, id and `x-crossover-*` of a backend do not pass."""
    head = parse_head(
        b"HTTP/1.1 200 Fine\r\nDate: then\r\nServer: uvicorn\r\nX-Request-Id: theirs\r\n"
        b"Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
        b"X-Crossover-Backend: lie\r\nContent-Length: 5\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n"
        b"Content-Encoding: gzip"
    )
    answer = Answer(make_request())
    wire = whole(answer, head, [b"hello"])
    read = read_answer(wire, closed=False)
    assert sorted(read.names) == [
        "content-encoding", "content-length", "date", "server", "set-cookie", "set-cookie",
        "x-request-id",
    ]  # fmt: skip
    assert wire.startswith(b"HTTP/1.1 200 Fine\r\n")
    assert read.headers["x-request-id"] == "req-1"
    assert read.headers["server"] == "crossover"
