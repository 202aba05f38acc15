"""Which headers pass towards the client; what passes towards a backend is in test_guard."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import errors, headers
from router.framing import parse_head
from router.headers import (
    CREDENTIALS,
    HOP_BY_HOP,
    NOT_TO_BACKEND,
    NOT_TO_CLIENT,
    answer_head,
    common_lines,
    error_answer,
    named_in_connection,
)

COMMON = b"date: Sun, 29 Nov 2026 12:00:00 GMT\r\nserver: crossover\r\n"
OWN = b"x-crossover-backend: baseline\r\nx-request-id: r-1\r\n"
LENGTH = b"content-length: 5\r\n"

Lines = list[tuple[bytes, bytes]]


def split(answer: bytes) -> tuple[bytes, Lines, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return first, [(line.partition(b": ")[0], line.partition(b": ")[2]) for line in lines], body


def relay(*headers: bytes, status: bytes = b"200 OK", close: bool = False) -> Lines:
    """The header lines that a client gets for an answer with these."""
    head = parse_head(b"\r\n".join([b"HTTP/1.1 " + status, *headers]))
    first, lines, body = split(answer_head(head, OWN, LENGTH, COMMON, close=close))
    assert first == b"HTTP/1.1 " + status
    assert body == b""
    return lines


def names(lines: Lines) -> list[bytes]:
    return [name for name, _ in lines]


OURS = [b"date", b"server", b"x-crossover-backend", b"x-request-id", b"content-length"]


@pytest.mark.parametrize(
    ("second", "date"),
    [(0, b"Thu, 01 Jan 1970 00:00:00 GMT"), (1_800_000_000, b"Fri, 15 Jan 2027 08:00:00 GMT")],
)
def test_what_every_answer_says(second: int, date: bytes) -> None:
    """One date, of the second that it is, and one server."""
    for _ in range(2):
        assert common_lines(second) == b"date: " + date + b"\r\nserver: crossover\r\n"


def test_an_answer_without_headers_has_ours() -> None:
    """One date, one server, the explanation, the request's id and the framing are always there."""
    assert sorted(names(relay(b"Content-Length: 5"))) == sorted(OURS)


@pytest.mark.parametrize(
    "line",
    [
        b"Connection: keep-alive",
        b"Connection: close",
        b"Keep-Alive: timeout=5",
        b"Proxy-Authenticate: Basic",
        b"Proxy-Authorization: Basic eA==",
        b"Proxy-Connection: keep-alive",
        b"TE: trailers",
        b"Trailer: X-Sum",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAM",
        b"Date: Mon, 01 Jan 2001 00:00:00 GMT",
        b"Server: uvicorn",
        b"X-Request-Id: theirs",
        b"X-Crossover-Backend: speculative",
        b"x-crossover-anything: 1",
        b"Access-Control-Allow-Origin: *",
        b"Access-Control-Allow-Credentials: true",
        b"Access-Control-Expose-Headers: *",
        b"Access-Control-Allow-Methods: GET, POST",
        b"Access-Control-Allow-Headers: authorization",
        b"Access-Control-Allow-Private-Network: true",
        b"Access-Control-Max-Age: 600",
    ],
)
def test_what_a_client_never_gets_of_a_backend(line: bytes) -> None:
    """Hop-by-hop, date, server, CORS and what only the router may say are not passed on."""
    assert sorted(names(relay(line, b"Content-Length: 5"))) == sorted(OURS)


def test_what_connection_names_is_dropped() -> None:
    """A header that any Connection header names is of that connection alone."""
    lines = relay(
        b"X-Hop: 1", b"Connection: X-Hop, close", b"X-Kept: 2", b"connection:  x-LATER ,,",
        b"X-Later: 3", b"Content-Length: 5",
    )  # fmt: skip
    assert set(names(lines)) - set(OURS) == {b"x-kept"}


def test_framing_is_ours_alone() -> None:
    """Of a chunked answer the client gets the framing that it is told, once."""
    assert names(relay(b"Transfer-Encoding: chunked")).count(b"content-length") == 1
    assert b"transfer-encoding" not in names(relay(b"Transfer-Encoding: chunked"))
    assert names(relay(b"Content-Length: 99")).count(b"content-length") == 1
    assert dict(relay(b"Content-Length: 99"))[b"content-length"] == b"5"


def test_everything_else_passes_unchanged() -> None:
    """Repeats stay repeated and in order, values as they were, content-encoding with its bytes."""
    lines = relay(
        b"Set-Cookie: a=1; Path=/", b"Set-Cookie: b=2", b"Content-Encoding: gzip",
        b"Content-Type: application/json; charset=utf-8", b"Vary: Origin", b"Retry-After: 7",
        b"X-Odd:   two  spaces, kept\xff ", b'ETag: W/"x"', b"X-Empty:", b"Content-Length: 5",
        b"WWW-Authenticate: Bearer", b"Location: /elsewhere", b"Allow: POST",
    )  # fmt: skip
    assert [line for line in lines if line[0] not in OURS] == [
        (b"set-cookie", b"a=1; Path=/"), (b"set-cookie", b"b=2"), (b"content-encoding", b"gzip"),
        (b"content-type", b"application/json; charset=utf-8"), (b"vary", b"Origin"),
        (b"retry-after", b"7"), (b"x-odd", b"two  spaces, kept\xff"), (b"etag", b'W/"x"'),
        (b"x-empty", b""), (b"www-authenticate", b"Bearer"), (b"location", b"/elsewhere"),
        (b"allow", b"POST"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "count"),
    [
        ([b"Content-Type: text/event-stream"], 1),
        ([b"Content-Type: text/event-stream; charset=utf-8", b"X-Accel-Buffering: no"], 1),
        ([b"Content-Type: text/event-stream", b"X-Accel-Buffering: yes"], 1),
        ([b"Content-Type: application/json"], 0),
    ],
)
def test_streams_are_not_to_be_held_back(headers: list[bytes], count: int) -> None:
    """A stream tells nginx once not to buffer it; what the backend says of that stays."""
    assert names(relay(*headers)).count(b"x-accel-buffering") == count


@pytest.mark.parametrize(("close", "expected"), [(True, [b"close"]), (False, [])])
def test_only_closing_is_announced(close: bool, expected: list[bytes]) -> None:
    """The client's connection has its own fate, whatever becomes of the backend's."""
    for theirs in (b"Connection: close", b"Connection: keep-alive"):
        lines = relay(theirs, b"Content-Length: 5", close=close)
        assert [value for name, value in lines if name == b"connection"] == expected


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found", b"529 Overloaded", b"418 "])
def test_the_status_line_passes(status: bytes) -> None:
    """Status and reason are the backend's, also where they are nobody's."""
    relay(b"Content-Length: 5", status=status)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (b"", set()),
        (b"close", set()),
        (b"Keep-Alive", set()),
        (b"close, X-A", {b"x-a"}),
        (b" ,, x-a ,\tX-B\t, ", {b"x-a", b"x-b"}),
        (b"Upgrade, HTTP2-Settings", {b"upgrade", b"http2-settings"}),
    ],
)
def test_named_in_connection(value: bytes, named: set[bytes]) -> None:
    """The options close and keep-alive name no header; all else does, in any case."""
    assert named_in_connection(value) == named


def test_the_lists_hold_what_they_must() -> None:
    """No credential and no hop-by-hop header is on its way to a backend, nor the latter back."""
    assert HOP_BY_HOP | CREDENTIALS | {b"host", b"content-length", b"expect"} <= NOT_TO_BACKEND
    assert NOT_TO_CLIENT >= HOP_BY_HOP
    assert not NOT_TO_CLIENT & {b"set-cookie", b"content-encoding", b"content-type"}
    assert {b"authorization", b"x-api-key", b"cookie", b"proxy-authorization"} <= NOT_TO_BACKEND


tokens = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).map(str.encode)
texts = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12).map(str.encode)


@given(headers=st.lists(st.tuples(tokens, texts), max_size=12), drop=st.lists(tokens, max_size=3))
@settings(deadline=None)
def test_no_header_is_lost_or_invented(headers: Lines, drop: list[bytes]) -> None:
    """What a client gets is ours, then theirs without what is dropped, in their order."""
    special = {b"content-length", b"transfer-encoding", b"connection", b"content-type"}
    headers = [(name, value) for name, value in headers if name not in special]
    raw = [b"%b: %b" % header for header in headers]
    connection = [b"Connection: " + b", ".join(drop)] if drop else []
    lines = relay(*raw, *connection, b"Content-Length: 5")
    expected = [
        header
        for header in headers
        if header[0] not in NOT_TO_CLIENT
        and header[0] not in drop
        and not header[0].startswith(b"x-crossover-")
    ]
    assert lines[: len(expected)] == expected
    assert len(lines) == len(expected) + len(OURS)


# ---------------------------------------------------------------------- answers of our own


@pytest.mark.parametrize("row", [errors.NO_BACKEND, errors.BAD_BODY, errors.UNAUTHORIZED,
                                 errors.QUEUE_TIMEOUT.with_message("später")])  # fmt: skip
def test_an_error_is_a_whole_answer(row: errors.ErrorAnswer) -> None:
    """An error has status, type, a length that fits its body, and the explanation."""
    first, lines, body = split(error_answer(row, OWN, COMMON, close=False))
    fields = dict(lines)
    assert first == b"HTTP/1.1 %d %b" % (row.status, errors.phrase(row.status))
    assert body == row.body
    assert fields[b"content-length"] == b"%d" % len(body)
    assert fields[b"content-type"] == b"application/json"
    assert fields[b"x-request-id"] == b"r-1"
    assert len(fields) == len(lines)
    assert fields.get(b"retry-after") == (
        None if row.retry_after is None else b"%d" % row.retry_after
    )
    assert (b"www-authenticate" in fields) is (row.status == 401)
    assert b"connection" not in fields


def test_an_error_may_close() -> None:
    """Where the connection cannot go on, the error says so."""
    _, lines, _ = split(error_answer(errors.BAD_REQUEST, b"", COMMON, close=True))
    assert (b"connection", b"close") in lines


def test_an_error_to_head_has_no_body() -> None:
    """The answer to HEAD has the length of what GET would give, and no byte of it."""
    whole = error_answer(errors.NOT_FOUND, b"", COMMON, close=False)
    head = error_answer(errors.NOT_FOUND, b"", COMMON, close=False, head_only=True)
    assert whole == head + errors.NOT_FOUND.body
    assert b"content-length: %d\r\n" % len(errors.NOT_FOUND.body) in head


@pytest.mark.parametrize("header", [(b"x-" + b"n" * 600, b"1"), (b"x-v", b"v" * 600)])
def test_a_long_header_passes_and_is_not_remembered(header: tuple[bytes, bytes]) -> None:
    """What a backend makes up takes no memory beyond its answer, be it the name or the value."""
    line = b"%b: %b" % header
    assert [relay(line)[0] for _ in range(2)] == [header] * 2
    assert header not in headers._out
