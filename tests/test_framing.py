"""Heads and chunks of backends: the cases of the smuggling corpus, and h11 as the judge."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.framing import _MAX_LINE, ChunkedReader, FramingError, ResponseHead, parse_head

# --------------------------------------------------------------------------- helpers


def judge(wire: bytes) -> tuple[h11.Response, bytes, bytes] | None:
    """Head, body and what is beyond, as h11 reads them; None when it refuses or waits for more."""
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1_000_000)
    client.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(wire)
    head: h11.Response | None = None
    body = b""
    while True:
        try:
            event: Any = client.next_event()
        except h11.RemoteProtocolError:
            return None
        if isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            return head, body, bytes(client.trailing_data[0])
        elif event is h11.NEED_DATA:
            return None


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The pieces of `data` cut at these places, as far as they lie within."""
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(bounds)]


def read_chunks(pieces: list[bytes]) -> tuple[bytes, bool, bytes]:
    """The body found in these reads, whether it ended, and what came after it."""
    reader = ChunkedReader()
    body = b""
    for at, piece in enumerate(pieces):
        body += b"".join(reader.feed(piece))
        if reader.done:
            return body, True, reader.rest + b"".join(pieces[at + 1 :])
    return body, False, b""


def chunk(payload: bytes, size: bytes | None = None, extension: bytes = b"") -> bytes:
    line = b"%x" % len(payload) if size is None else size
    return line + extension + b"\r\n" + payload + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

# --------------------------------------------------------------------------- heads: a table


@pytest.mark.parametrize(
    ("block", "framing", "length", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5", "length", 5, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length:0", "length", 0, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 007", "length", 7, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked", "chunked", 0, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding:\t chunked \t", "chunked", 0, True),
        (b"HTTP/1.1 200 OK", "close", 0, False),
        (b"HTTP/1.1 200", "close", 0, False),
        (b"HTTP/1.1 200 ", "close", 0, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5", "length", 5, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\nConnection: Keep-Alive", "length", 5, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: Close", "length", 5, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: x,\tclose ", "length", 5, False),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: x\r\nConnection: close",
            "length",
            5,
            False,
        ),
        (b"HTTP/1.1 204 No Content", "none", 0, True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5", "none", 0, True),
        (b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked", "none", 0, True),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x", "none", 0, True),
        (b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1", "close", 0, False),
    ],
)
def test_framing_and_reuse(block: bytes, framing: str, length: int, keep_alive: bool) -> None:
    """Where a body ends, and whether the connection lives on, per RFC 9112 section 6.3."""
    head = parse_head(block)
    assert (head.framing, head.length, head.keep_alive) == (framing, length, keep_alive)


def test_a_head_as_values() -> None:
    """Status, reason, names in lower case, stripped values in their order, repeats kept."""
    head = parse_head(
        b"HTTP/1.1 404 Not \xe4 Found\r\nX-B: \t1 2\t\r\nA:\r\nX-B: 3:4\r\n"
        b"Connection: X-Hop, keep-alive,, CLOSE"
    )
    assert (head.status, head.reason) == (404, b"Not \xe4 Found")
    assert head.headers == [
        (b"x-b", b"1 2"),
        (b"a", b""),
        (b"x-b", b"3:4"),
        (b"connection", b"X-Hop, keep-alive,, CLOSE"),
    ]
    assert head.connection == {b"x-hop"}
    assert head.has(b"a")
    assert not head.has(b"b")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (b"Content-Type: text/event-stream", True),
        (b"Content-Type: Text/Event-Stream; charset=utf-8", True),
        (b"Content-Type: application/json", False),
        (b"Content-Type: text/event-stream\r\nContent-Encoding: identity", True),
        (b"Content-Type: text/event-stream\r\nContent-Encoding: gzip", False),
        (b"X: text/event-stream", False),
    ],
)
def test_what_can_be_read_as_a_stream(lines: bytes, expected: bool) -> None:
    """An event stream is one by its content type, unless it is compressed."""
    assert parse_head(HEAD + lines).event_stream is expected


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 5\r\nContent-Length: 5",
        b"Content-Length: 5, 5",
        b"Content-Length: +3",
        b"Content-Length: -1",
        b"Content-Length: 0x3",
        b"Content-Length: 1_0",
        b"Content-Length: 1 0",
        b"Content-Length: \xb2",
        b"Content-Length: \xd9\xa3",
        b"Content-Length:",
        b"Content-Length: 1.0",
        b"Content-Length: 18446744073709551617",
        b"Content-Length: 0000000000000000003",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: identity\r\nContent-Length: 3",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: \x0bchunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: ,chunked",
        b"Transfer-Encoding: chunked;q=1",
        b"Transfer-Encoding:",
        b"A: 1\nB: 2",
        b"A: 1\rB: 2",
        b"A: 1\r\r\nB: 2",
        b"A: 1\n\r\nB: 2",
        b"A: 1\r",
        b"A: 1\n",
        b"A: \x00",
        b"A: a\x0bb",
        b"A: a\x7f",
        b"A: a\x1b[0m",
        b"A: 1\r\n folded",
        b"A: 1\r\n\tfolded",
        b" A: 1",
        b"A : 1",
        b"A\t: 1",
        b"no colon",
        b": empty name",
        b"\xe4: 1",
        b"A(: 1",
        b"\r\nA: 1",
        b"A: 1\r\n",
    ],
)
def test_an_ambiguous_head_is_refused(lines: bytes) -> None:
    """A header section that could be read in two ways is an error, never a guess."""
    with pytest.raises(FramingError):
        parse_head(HEAD + lines)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\r\nHTTP/1.1 200 OK", b"HTTP/1.1", b"HTTP/1.1 ", b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000 OK", b"HTTP/1.1 099 x", b"HTTP/1.1 600 x", b"HTTP/1.1  200 OK",
        b"HTTP/1.1\t200 OK", b"HTTP/2.0 200 OK", b"HTTP/0.9 200 OK", b"HTTP/1.2 200 OK",
        b"http/1.1 200 OK", b"ICY 200 OK", b" HTTP/1.1 200 OK", b"HTTP/1.1 2\xb20 OK",
        b"HTTP/1.1 200OK", b"HTTP/1.1 200 O\x01K", b"HTTP/1.1 +20 OK", b"POST / HTTP/1.1",
    ],
)  # fmt: skip
def test_a_bad_status_line_is_refused(line: bytes) -> None:
    """Only HTTP/1.0 and 1.1 with a status of 100 to 599 begin an answer."""
    with pytest.raises(FramingError):
        parse_head(line + b"\r\nContent-Length: 0")


def test_chunks_in_http_10_are_refused() -> None:
    """Transfer-Encoding does not exist in HTTP/1.0."""
    with pytest.raises(FramingError, match=r"HTTP/1\.0"):
        parse_head(b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked")


# --------------------------------------------------------------------------- heads: h11 agrees

NAMES = st.sampled_from(
    [b"X-A", b"Content-Type", b"Vary", b"ETag", b"!#$%&'*+-.^_`|~09", b"Retry-After", b"Connection"]
)
VALUES = st.sampled_from(
    [
        b"",
        b"1",
        b"a b",
        b"a\tb",
        b"text/event-stream",
        b"\xe4\xf6",
        b"close",
        b"a:b",
        b'"q,r"',
        b"x",
    ]
)
BODIES = st.binary(max_size=300)


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """One whole, valid answer with a length or in chunks, and its body."""
    body = draw(BODIES)
    lines = [b"HTTP/1.1 %d %b" % (draw(st.integers(200, 599)), draw(VALUES))]
    lines += [
        b"%b:%b%b%b" % (name, draw(st.sampled_from([b"", b" ", b"\t"])), value, draw(blank))
        for name, value in draw(st.lists(st.tuples(NAMES, VALUES), max_size=4))
    ]
    if draw(st.booleans()):
        lines.append(b"Content-Length: %d" % len(body))
        wire = body
    else:
        lines.append(b"Transfer-Encoding: chunked")
        wire = draw(chunkings(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + wire, body


blank = st.sampled_from([b"", b" ", b" \t"])


@st.composite
def chunkings(draw: st.DrawFn, body: bytes) -> bytes:
    """One way to write a body in chunks."""
    wire = b""
    for piece in cut(body, draw(st.lists(st.integers(0, 10_000), max_size=8))):
        size = b"%x" % len(piece)
        size = draw(st.sampled_from([size, size.upper(), size.zfill(15)]))
        extension = draw(st.sampled_from([b"", b"", b";a", b';a="b;c"', b"; x=1"]))
        wire += chunk(piece, size, extension)
    wire += draw(st.sampled_from([b"0", b"000", b"0;end"])) + b"\r\n"
    wire += draw(st.sampled_from([b"", b"", b"X-Role: admin\r\nContent-Length: 50\r\n"]))
    return wire + b"\r\n"


def read_whole(wire: bytes, places: list[int]) -> tuple[ResponseHead, bytes, bytes]:
    """Read one answer the way the relay does: the head, then the body in pieces."""
    end = wire.index(b"\r\n\r\n")
    head = parse_head(wire[:end])
    rest = wire[end + 4 :]
    if head.framing == "chunked":
        body, done, beyond = read_chunks(cut(rest, places))
        assert done
        return head, body, beyond
    length = head.length if head.framing == "length" else 0
    return head, rest[:length], rest[length:]


@given(answer=answers(), places=st.lists(st.integers(0, 10_000), max_size=12))
def test_valid_answers_are_read_as_h11_reads_them(
    answer: tuple[bytes, bytes], places: list[int]
) -> None:
    """Status, reason, headers, body and end are h11's, wherever the reads are cut."""
    wire, sent = answer
    judged = judge(wire)
    assert judged is not None
    theirs, body, beyond = judged
    head, ours, rest = read_whole(wire, places)
    assert (head.status, head.reason) == (theirs.status_code, bytes(theirs.reason))
    assert head.headers == [(bytes(name), bytes(value)) for name, value in theirs.headers]
    assert ours == body
    if head.status not in {204, 304}:
        assert ours == sent
        assert rest == beyond == b""


SPLICES = [
    b"\r", b"\n", b"\r\n", b"\0", b" ", b"\t", b":", b",", b"\x0b", b"\xff", b"0", b"+", b"_", b";",
    b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"chunked", b"HTTP/1.0 ", b"-1",
]  # fmt: skip


@given(
    answer=answers(),
    at=st.integers(0, 10_000),
    drop=st.integers(0, 3),
    splice=st.sampled_from([b"", *SPLICES]),
)
def test_what_is_accepted_is_accepted_by_h11(
    answer: tuple[bytes, bytes], at: int, drop: int, splice: bytes
) -> None:
    """A damaged head is refused, or read exactly as h11 reads it."""
    block = answer[0].partition(b"\r\n\r\n")[0]
    at %= len(block) + 1
    damaged = block[:at] + splice + block[at + drop :]
    damaged = damaged.partition(b"\r\n\r\n")[0]
    try:
        head = parse_head(damaged)
    except FramingError:
        return
    if head.status < 200:
        return
    body = {"length": b"x" * min(head.length, 10_000), "chunked": b"0\r\n\r\n"}.get(
        head.framing, b""
    )
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(damaged + b"\r\n\r\n" + body)
    theirs = client.next_event()
    assert isinstance(theirs, h11.Response)
    assert (theirs.status_code, bytes(theirs.reason)) == (head.status, head.reason)
    assert [(bytes(name), bytes(value)) for name, value in theirs.headers] == head.headers
    if head.length <= len(body):
        event: Any = client.next_event()
        if head.framing == "close":
            assert event is h11.NEED_DATA
        elif head.length:
            assert bytes(event.data) == body
        else:
            assert isinstance(event, h11.EndOfMessage)


@given(st.binary(max_size=200) | st.lists(st.sampled_from([HEAD, *SPLICES])).map(b"".join))
def test_no_bytes_break_the_head_parser(block: bytes) -> None:
    """Whatever the bytes, the answer is a head or a FramingError, and the head is sound."""
    try:
        head = parse_head(block)
    except FramingError:
        return
    assert 100 <= head.status <= 599
    assert not any(set(b"\r\n\0") & set(name + value) for name, value in head.headers)
    assert 0 <= head.length < 10**18


# --------------------------------------------------------------------------- chunks: a table


@pytest.mark.parametrize(
    "wire",
    [
        b"0x3\r\nabc\r\n", b"+3\r\nabc\r\n", b"-3\r\nabc\r\n", b"0_3\r\nabc\r\n", b" 3\r\nabc\r\n",
        b"\r\n3\r\nabc\r\n", b"3\nabc\r\n", b"3\rabc\r\n", b"3\r\nabc\n", b"3\r\nabcd\r\n",
        b"3\r\nabc\r\r\n", b"3\r\nabcX\n", b"3\r\nabc0\r\n\r\n", b"3;a\nb\r\nabc\r\n",
        b"3;a\rb\r\nabc\r\n", b"g\r\n", b";a\r\nabc\r\n", b"\r\n", b"\n", b"3 3\r\nabc\r\n",
        b"3\r\nabc\rX", b"3\r\nab\r\n\r\n", b"12345678901234567\r\n", b"0000000000000003\r\nabc\r\n",
        b"3;" + b"x" * _MAX_LINE + b"\r\nabc\r\n", b"3,3\r\nabc\r\n",
        b"0\r\nA: 1\nB: 2\r\n\r\n", b"0\r\nA: 1\r\r\n\r\n", b"0\r\n\n\r\n\r\n",
        b"0\r\nA: " + b"x" * _MAX_LINE + b"\r\n\r\n",
    ],
)  # fmt: skip
def test_bad_chunks_are_refused_however_they_are_cut(wire: bytes) -> None:
    """A size, an end or a trailer that could be read in two ways is an error at every cut."""
    with pytest.raises(FramingError):
        read_chunks([wire])
    with pytest.raises(FramingError):
        read_chunks([wire[at : at + 1] for at in range(len(wire))])
    for at in range(1, min(len(wire), 40)):
        with pytest.raises(FramingError):
            read_chunks([wire[:at], wire[at:]])


WIRE = (
    chunk(b"hello") + chunk(b"\r\n0\r\n\r\n", b"00000007") + chunk(b"\0" * 17, extension=b" ; a=b")
    + chunk(b"x") + b"0;last\r\nX-Role: admin\r\nContent-Length: 50\r\n\r\n"
)  # fmt: skip
PAYLOAD = b"hello\r\n0\r\n\r\n" + b"\0" * 17 + b"x"


def test_every_pair_of_cuts_gives_the_same_body() -> None:
    """Extensions and trailers are dropped and what follows is given back, at any two cuts."""
    wire = WIRE + b"HTTP/1.1 200 OK"
    expected = (PAYLOAD, True, b"HTTP/1.1 200 OK")
    for a in range(len(wire) + 1):
        for b in range(a, len(wire) + 1, 3):
            assert read_chunks([wire[:a], wire[a:b], wire[b:]]) == expected
    assert read_chunks([wire[at : at + 1] for at in range(len(wire))]) == expected


def test_a_line_may_be_as_long_as_the_limit() -> None:
    """Size and trailer lines of exactly the limit pass, one byte more does not, at any cut."""
    for wire in (b"1;", b"0\r\nA:"):
        fits = wire + b"x" * (_MAX_LINE - len(wire.rpartition(b"\n")[2]) - 2) + b"\r\n"
        end = b"a\r\n0\r\n\r\n" if wire == b"1;" else b"\r\n"
        for pieces in ([fits + end], [fits[:-1], fits[-1:] + end], [fits[:50], fits[50:] + end]):
            assert read_chunks(pieces)[1]
        long = fits[:-2] + b"x\r\n" + end
        for pieces in ([long], [long[:-3], long[-3:]], [long[:50], long[50:]]):
            with pytest.raises(FramingError, match=r"line|size"):
                read_chunks(pieces)


@pytest.mark.parametrize(
    "begin", [b"3;", b"0\r\nA:", b"0\r\n", b"00000000000000000", b"3" + b" " * 9]
)
@pytest.mark.parametrize("step", [1, 100, 5000])
def test_an_endless_line_is_cut_off(begin: bytes, step: int) -> None:
    """A line without an end is refused within the limit, so memory is bounded."""
    reader = ChunkedReader()
    fed = 0

    def feed() -> None:
        nonlocal fed
        for data in [begin, *[b" " * step] * (20_000 // step)]:
            reader.feed(data)
            fed += len(data)
            assert len(reader._line) < _MAX_LINE

    with pytest.raises(FramingError):
        feed()
    assert fed < _MAX_LINE + len(begin)


@pytest.mark.parametrize(
    ("reads", "plain"),
    [
        ([chunk(b"hello")], [True]),
        ([chunk(b"hello") + chunk(b"x", b"001")], [True]),
        ([chunk(b"hello")[:3], chunk(b"hello")[3:], chunk(b"x")], [False, False, True]),
        ([b"5", b"\r\nhello\r\n", chunk(b"x")], [False, False, True]),
        ([b"5\r\n", b"hello\r\n", chunk(b"x")], [False, False, True]),
        ([b"5\r\nhello", b"\r\n", chunk(b"x")], [False, False, True]),
        ([b"5\r\nhello\r", b"\n", chunk(b"x")], [False, False, True]),
        ([chunk(b"hello", extension=b";a=b"), chunk(b"x")], [False, True]),
        ([chunk(b"hello") + b"1"], [False]),
        ([b"0\r\nX: 1\r\n\r\n"], [False]),
        ([b"0\r\n", b"\r\n"], [False, False]),
    ],
)
def test_plain_reads(reads: list[bytes], plain: list[bool]) -> None:
    """Only reads of whole chunks without extensions and trailers may be passed on as they came."""
    reader = ChunkedReader()
    found = []
    for data in reads:
        reader.feed(data)
        found.append(reader.plain)
    assert found == plain


@given(data=st.data(), body=BODIES, places=st.lists(st.integers(0, 10_000), max_size=20))
@example(data=None, body=b"", places=[])
def test_payloads_are_the_body_at_all_cuts(
    data: st.DataObject | None, body: bytes, places: list[int]
) -> None:
    """Payloads joined are the body; plain reads mean the same when they are passed on."""
    wire = data.draw(chunkings(body)) if data is not None else b"0\r\n\r\n"
    reader = ChunkedReader()
    relayed = found = b""
    for piece in cut(wire, places):
        assert not reader.done
        payloads = reader.feed(piece)
        assert all(payloads)
        found += b"".join(payloads)
        if reader.plain and not reader.done:
            relayed += piece
        else:
            relayed += b"".join(map(chunk, payloads))
    assert reader.done
    assert reader.rest == b""
    assert found == body
    judged = judge(CHUNKED + relayed + b"0\r\n\r\n")
    assert judged is not None
    assert judged[1:] == (body, b"")


def verdict(pieces: list[bytes]) -> tuple[bytes, bool, bytes] | None:
    try:
        return read_chunks(pieces)
    except FramingError:
        return None


@given(
    data=st.data(),
    body=BODIES,
    at=st.integers(0, 10_000),
    drop=st.integers(0, 3),
    splice=st.sampled_from([b"", *SPLICES]),
    places=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_damaged_chunks_are_judged_alike_at_all_cuts(
    data: st.DataObject, body: bytes, at: int, drop: int, splice: bytes, places: list[int]
) -> None:
    """Damage is refused or read the same however it is cut, and what is read h11 reads too."""
    wire = data.draw(chunkings(body))
    at %= len(wire) + 1
    wire = wire[:at] + splice + wire[at + drop :]
    once = verdict([wire])
    assert verdict(cut(wire, places)) == once
    assert verdict([wire[i : i + 1] for i in range(len(wire))]) == once
    judged = judge(CHUNKED + wire)
    if once is not None and once[1] and judged is not None:
        assert judged[1:] == (once[0], once[2])


@given(
    st.lists(st.binary(max_size=50) | st.sampled_from([b"5\r\n", b"0\r\n", b"\r\n"]), max_size=20)
)
def test_no_bytes_break_the_chunk_reader(pieces: list[bytes]) -> None:
    """Whatever the bytes, they are read or a FramingError is raised."""
    verdict(pieces)
