"""Heads that were read before: a match means the same, and nothing else matches."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ErrorAnswer
from router.framing import FramingError, parse_head
from router.headers import passing_lines
from router.incoming import HeadLimits, Incoming
from router.known_heads import MAX_BYTES, MAX_HEADS, KnownAnswers, KnownRequests
from router.routes import TABLE
from tests.scripted_backend import response, scripted_backend
from tests.stack import run, running_router
from tests.test_frontend import statuses, talk

LIMITS = HeadLimits(header_bytes=16_384, headers=100, url_bytes=8192)
LINES = b"Host: x\r\nUser-Agent: OpenAI/Python\r\nAuthorization: Bearer k\r\n"


class _Parsed:
    """One request read by the real parser, as the protocol would."""

    def __init__(self, data: bytes) -> None:
        self.incoming: Incoming | None = None
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self.incoming = None

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.incoming is None:
            self.incoming = Incoming(
                self._parser.get_method(),
                self._target,
                self._headers,
                self._parser.get_http_version(),
                keep_alive=self._parser.should_keep_alive(),
            )
            self.incoming.check(LIMITS, TABLE)


def read(data: bytes) -> Incoming | None:
    """The first request of these bytes when parser and guard accept its head."""
    incoming = _Parsed(data).incoming
    return None if incoming is None or isinstance(incoming.error, ErrorAnswer) else incoming


def request(
    length: bytes = b"2",
    lines: bytes = LINES,
    name: bytes = b"Content-Length",
    target: bytes = b"/v1/chat/completions",
) -> bytes:
    return b"POST %b HTTP/1.1\r\n%b%b: %b\r\n\r\n{}" % (target, lines, name, length)


def learned(data: bytes) -> KnownRequests:
    known = KnownRequests()
    incoming = read(data)
    assert incoming is not None
    known.learn(data, incoming)
    return known


def same(one: Incoming, other: Incoming) -> bool:
    """Whether two requests mean the same, but for the length that their headers name."""
    fields = ("method", "target", "version", "keep_alive", "path", "route", "length", "error")
    alike = all(getattr(one, name) == getattr(other, name) for name in fields)
    facts = ("forwarded", "request_id", "chunked", "expects", "upgrade", "origin", "pinned")
    return alike and all(getattr(one.facts, n) == getattr(other.facts, n) for n in facts)


@pytest.mark.parametrize("name", [b"Content-Length", b"content-length"])
def test_the_same_head_with_another_length_is_known(name: bytes) -> None:
    """Only the digits of the length may differ; where the body starts and ends comes with it."""
    known = learned(request(b"2", name=name))
    data = request(b"17", name=name)
    found = known.find(data)
    assert found is not None
    model, start, length = found
    assert (data[start:], length) == (b"{}", 17)
    again = model.again(length)
    expected = read(data)
    assert expected is not None
    assert same(again, expected)
    assert (again.body, again.size, again.complete) == ([], 0, False)


@pytest.mark.parametrize(
    "data",
    [
        request(lines=LINES + b"X-Request-Id: 7\r\n"),
        request(lines=LINES + b"Connection: close\r\n"),
        request(lines=LINES + b"Expect: 100-continue\r\n"),
        request(lines=LINES + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
        request(target=b"/v1/models"),
        request(lines=LINES + b"X-Pad: " + b"p" * MAX_BYTES + b"\r\n"),
        request(b"007"),
        b"\r\n" + request(),
        request(lines=LINES + b"x-wavelength: 5\r\n"),
        request(name=b"Content-Length ").replace(b"Content-Length :", b"Content-Length:  "),
        b"POST /v1/completions HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % LINES,
        b"POST /v1/completions HTTP/1.0\r\n%bContent-Length: 2\r\n\r\n{}" % LINES,
        b"GET /api/tags HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_not_plain_is_not_learned(data: bytes) -> None:
    """A head with more to it than a route and a length is read in full each time."""
    assert len(learned(data)) == 0


def test_a_head_that_the_parser_read_otherwise_is_not_learned() -> None:
    """What is learned must be exactly the lines that were accepted."""
    incoming = read(request())
    assert incoming is not None
    known = KnownRequests()
    for data in (
        request(lines=LINES + b"X-More: 1\r\n"),
        request(lines=LINES.replace(b"OpenAI", b"Other")),
        request(target=b"/v1/completions"),
        request(b"3"),
    ):
        known.learn(data, incoming)
    assert len(known) == 0


@pytest.mark.parametrize(
    "length", [b"", b"+2", b"-2", b"2,2", b" 2", b"2 ", b"0x2", b"1" * 10, b"2\n", b"\xb2"]
)
def test_a_known_head_with_an_odd_length_is_read_in_full(length: bytes) -> None:
    """Only plain digits are cut out; anything else is for the parser to judge."""
    assert learned(request()).find(request(length)) is None


def test_so_many_heads_are_forgotten() -> None:
    """The memory is bounded: when it is full it starts afresh."""
    known = KnownRequests()
    for i in range(MAX_HEADS + 1):
        data = request(lines=LINES + b"X-Session: %d\r\n" % i)
        incoming = read(data)
        assert incoming is not None
        known.learn(data, incoming)
    assert len(known) == 1


PIECES = st.sampled_from(
    [b"Host: x\r\n", b"Host: y\r\n", b"Content-Length: 2\r\n", b"content-length: 12\r\n", b"\r\n",
     b"x-wavelength: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"\n",
     b"Content-Length: 2, 2\r\n", b"X-A: ength: 4\r\n", b" folded\r\n", b"Accept: */*\r\n", b"\r",
     b"{}", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n", b"Expect: 100-continue\r\n"]
)  # fmt: skip


@given(first=st.lists(PIECES, max_size=6), second=st.lists(PIECES, max_size=6))
def test_a_match_means_what_the_parser_would_have_read(
    first: list[bytes], second: list[bytes]
) -> None:
    """Whatever was learned: a request that is found is the one that parser and guard read."""
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    known = KnownRequests()
    for pieces in (first, second, [b"Content-Length: 3\r\n", b"\r\n", b"abc"]):
        data = start + b"".join(pieces)
        incoming = read(data)
        if incoming is not None:
            known.learn(data, incoming)
    for pieces in (first, second, [*first, *second]):
        data = start + b"".join(pieces)
        found = known.find(data)
        if found is not None:
            model, at, length = found
            expected = read(data[: at + length])
            assert expected is not None
            assert same(model.again(length), expected)
            assert at == data.find(b"\r\n\r\n") + 4


ANSWER = b"HTTP/1.1 200 OK\r\ndate: %b\r\nserver: uvicorn\r\ncontent-length: %b\r\nx-a: b"


def test_an_answers_head_is_known_but_for_its_length() -> None:
    """The second answer with the same lines is not parsed; its length is its own."""
    known = KnownAnswers()
    for length in (5, 1234):
        block = ANSWER % (b"now", b"%d" % length)
        head = known.read(block + b"\r\n\r\nrest", len(block))
        assert (head.status, head.framing, head.length) == (200, "length", length)
        assert head.headers == [(b"date", b"now"), (b"server", b"uvicorn"), (b"x-a", b"b")]
        assert head.lines == b"HTTP/1.1 200 OK\r\nx-a: b\r\n"


@pytest.mark.parametrize("length", [b"", b"-1", b"1 2", b"+1", b"1" * 19])
def test_a_bad_length_is_refused_of_a_known_answer_too(length: bytes) -> None:
    """Knowing the other lines of a head takes nothing from its checks."""
    known = KnownAnswers()
    good, bad = ANSWER % (b"now", b"5"), ANSWER % (b"now", length)
    assert known.read(good, len(good)).length == 5
    with pytest.raises(FramingError):
        known.read(bad, len(bad))


LINES_OF_ANSWERS = st.sampled_from(
    [b"content-length: 5", b"Content-Length: 77", b"x-wavelength: 5", b"x-wavelength: 6", b"a: b",
     b"transfer-encoding: chunked", b"connection: close", b"connection: a", b"date: x", b"date: y",
     b"content-type: text/event-stream", b"content-encoding: gzip", b"bad line", b"a: length: 9"]
)  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"200 OK", b"204 No Content", b"503 Busy"]),
            st.lists(LINES_OF_ANSWERS, max_size=5),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_known_answers_read_as_unknown_ones(answers: list[tuple[bytes, list[bytes]]]) -> None:
    """Whatever came before, a head means what it means alone, but for the length among headers."""
    known = KnownAnswers()
    for status, lines in answers * 2:
        block = b"\r\n".join([b"HTTP/1.1 " + status, *lines])
        try:
            alone = parse_head(block)
        except FramingError:
            with pytest.raises(FramingError):
                known.read(block + b"\r\n\r\n", len(block))
            continue
        head = known.read(block + b"\r\n\r\n", len(block))
        assert head.lines == passing_lines(alone)
        assert head.headers == [h for h in alone.headers if h[0] != b"content-length"]
        fields = ("status", "reason", "framing", "length", "keep_alive", "event_stream")
        for name in (*fields, "connection"):
            assert getattr(head, name) == getattr(alone, name)


CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"


def test_a_known_request_is_relayed_however_it_is_cut() -> None:
    """The second and later requests of a client arrive whole, in pieces, and pipelined."""

    async def work() -> None:
        async with (
            scripted_backend(
                lambda call: call.send(response(b'{"n":%d}' % len(call.body)))
            ) as spec,
            scripted_backend(lambda call: call.send(response(b"{}"))) as base,
            running_router(spec.url, base.url) as stack,
        ):
            bodies = [b'{"a":%d}' % (10**i) for i in range(6)]
            wire = [CHAT % (len(body), body) for body in bodies]
            end = b"GET / HTTP/2.0\r\nhost: x\r\n\r\n"
            assert statuses(await talk(stack, wire[0] + end)) == [200, 505]
            assert len(stack.relay.known_requests) == 1
            assert statuses(await talk(stack, b"".join(wire) + end)) == [200] * 6 + [505]
            for cut in (1, len(wire[3]) - len(bodies[3]), len(wire[3]) - 1):
                pieces = [wire[3][:cut], wire[3][cut:] + wire[4][:cut], wire[4][cut:] + end]
                assert statuses(await talk(stack, *pieces)) == [200, 200, 505]
            got = [call.body for call in spec.calls]
            assert got == [bodies[0], *bodies, *[bodies[3], bodies[4]] * 3]
            assert stack.relay.buffered == 0

    run(work, limit_s=20)


def test_what_one_listener_knows_is_nothing_to_the_other() -> None:
    """A head that the public listener relays is still not relayed by the admin listener."""

    async def work() -> None:
        async with (
            scripted_backend(lambda call: call.send(response(b"{}"))) as spec,
            scripted_backend(lambda call: call.send(response(b"{}"))) as base,
            running_router(spec.url, base.url) as stack,
        ):
            wire = CHAT % (2, b"{}")
            end = b"GET / HTTP/2.0\r\nhost: x\r\n\r\n"
            assert statuses(await talk(stack, wire + wire + end)) == [200, 200, 505]
            admin = await talk(stack, wire + end, port=stack.router.admin_port)
            assert statuses(admin)[0] in {404, 405}
            assert len(spec.calls) == 2

    run(work, limit_s=20)


def test_a_known_head_is_checked_against_the_limits_and_the_keys_of_now() -> None:
    """Knowing a head admits nothing: a body over the limit is refused as the first time."""

    async def work() -> None:
        async with (
            scripted_backend(lambda call: call.send(response(b"{}"))) as spec,
            scripted_backend(lambda call: call.send(response(b"{}"))) as base,
            running_router(spec.url, base.url, max_body=64) as stack,
        ):
            good, long = CHAT % (2, b"{}"), CHAT % (65, b"{" + b" " * 63 + b"}")
            assert statuses(await talk(stack, good + long)) == [200, 413]
            assert statuses(await talk(stack, long)) == [413]
            assert len(spec.calls) == 1

    run(work, limit_s=20)
