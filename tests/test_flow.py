"""The plain way of a stream comes to the same as the ordinary one, byte for byte and count for count."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.flow import Flow
from router.framing import ChunkedReader
from router.metrics import CHUNK_GAP_BOUNDS, Histogram
from router.sse import SseScanner

EVENT = b'data: {"choices":[{"delta":{"content":"hello"}}]}\n\n'
USAGE = b'data: {"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\n'
ERROR = b'data: {"error":{"code":503}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunked(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class Passing:
    """A stream's reads, taken the plain way where that is possible and the ordinary one otherwise."""

    def __init__(self) -> None:
        self.scanner = SseScanner()
        self.gaps = Histogram(CHUNK_GAP_BOUNDS)
        self.flow = Flow(self.scanner, self.gaps, 0.0)
        self.reader = ChunkedReader()
        self.out = b""
        self.passed = 0
        self.now = 0.0

    def read(self, data: bytes) -> None:
        """As `BackendConnection` does."""
        self.now += 0.005
        flow, reader = self.flow, self.reader
        if flow.passes(data, self.now):
            self.passed += 1
            self.out += data
            return
        payloads = reader.feed(data)
        flow.ready = False
        if payloads:
            payload = b"".join(payloads)
            flow.count(self.now, len(payloads), len(payload))
            flow.look(payload)
            self.out += chunked(payload)
            flow.ready = flow.ready and reader.between_chunks


def test_whole_events_in_whole_chunks_pass() -> None:
    """From the second read on, each read that is one chunk of whole events is passed on as it is."""
    stream = Passing()
    for _ in range(5):
        stream.read(chunked(EVENT))
    assert stream.passed == 4
    assert stream.out == chunked(EVENT) * 5
    assert (stream.flow.chunks, stream.flow.bytes_out) == (5, 5 * len(EVENT))
    assert (stream.gaps.count, round(stream.gaps.sum, 6)) == (5, 0.025)


@pytest.mark.parametrize(
    "data",
    [
        chunked(EVENT)[:-1],
        chunked(EVENT) + b"\r\n",
        chunked(EVENT) * 2,
        chunked(EVENT[:-1]),
        chunked(EVENT).replace(b"\r\n", b";a=b\r\n", 1),
        b"0" + chunked(EVENT),
        chunked(EVENT).replace(b"\r\n", b"\n"),
        chunked(b"data: {" + b" " * 0xAB0 + b"}\n\n"),
        b"%X\r\n%b\r\n" % (0x3B, b"data: {" + b" " * (0x3B - 10) + b"}\n\n"),
        b"0\r\n\r\n",
        b"",
    ],
)
def test_anything_else_takes_the_ordinary_way(data: bytes) -> None:
    """A read that is more, less or other than one plain chunk of whole events does not pass."""
    stream = Passing()
    stream.read(chunked(EVENT))
    assert stream.flow.ready
    assert not stream.flow.passes(data, 1.0)
    assert (stream.flow.chunks, stream.flow.last_at) == (1, 0.005)


def test_what_tells_something_is_read_on_the_plain_way() -> None:
    """Usage, errors and the end are found whichever way a read takes."""
    stream = Passing()
    for payload in (EVENT, USAGE, ERROR, EVENT, DONE):
        stream.read(chunked(payload))
    assert stream.passed == 4
    assert (stream.scanner.usage, stream.scanner.error, stream.scanner.done) == ((3, 7), 503, True)


@given(
    events=st.lists(
        st.sampled_from([EVENT, USAGE, ERROR, DONE, b": ping\n\n", b'data: {"a":1}\r\n\r\n',
                         b"data: x\n", b"\n", b"\r\n", b'data: {"n_tokens":1}\n\n', EVENT * 2]),
        min_size=1, max_size=12,
    ),
    cuts=st.lists(st.integers(0, 700), max_size=12),
)  # fmt: skip
def test_every_way_to_cut_a_stream_gives_the_same(events: list[bytes], cuts: list[int]) -> None:
    """Bytes, counts, usage, errors and boundaries do not depend on where the reads were cut."""
    wire = b"".join(map(chunked, events))
    edges = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    stream = Passing()
    for start, end in itertools.pairwise(edges):
        stream.read(wire[start:end])
    alone = SseScanner()
    alone.feed(b"".join(events))
    assert b"".join(ChunkedReader().feed(stream.out)) == b"".join(events)
    assert stream.flow.bytes_out == len(b"".join(events))
    assert (stream.scanner.usage, stream.scanner.error, stream.scanner.done) == (
        alone.usage,
        alone.error,
        alone.done,
    )
    assert stream.scanner.between_events is alone.between_events


@given(st.lists(st.sampled_from([EVENT, USAGE, ERROR, DONE, EVENT * 3]), min_size=1, max_size=30))
def test_chunks_read_one_by_one_are_counted_one_by_one(events: list[bytes]) -> None:
    """Each read of one chunk is one chunk and one gap, and its bytes are the backend's own."""
    stream = Passing()
    for payload in events:
        stream.read(chunked(payload))
    assert stream.out == b"".join(map(chunked, events))
    assert stream.passed == len(events) - 1
    assert stream.flow.chunks == stream.gaps.count == len(events)
