"""The side scanner: one answer for every way to cut a stream."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.framing import ChunkedReader
from router.sse import MAX_EVENT, SseScanner, Usage, error_code, first_event, payloads, usage_of

CAPTURES = Path(__file__).parent / "data" / "sse"
Answer = tuple[Usage, bool, int | None, bool]


def scan(pieces: list[bytes]) -> Answer:
    """What the scanner knows after these reads: usage, [DONE], error, between two events."""
    scanner = SseScanner()
    for piece in pieces:
        scanner.feed(piece)
    return scanner.usage, scanner.done, scanner.error, scanner.between_events


def singly(stream: bytes, step: int = 1) -> list[bytes]:
    return [stream[at : at + step] for at in range(0, len(stream), step)]


def capture(name: str) -> bytes:
    """The body of a captured stream."""
    wire = (CAPTURES / name).read_bytes()
    return b"".join(ChunkedReader().feed(wire.partition(b"\r\n\r\n")[2]))


def event(value: object, end: bytes = b"\n\n", name: bytes = b"data: ") -> bytes:
    return name + (value if isinstance(value, bytes) else json.dumps(value).encode()) + end


USAGE = {"usage": {"prompt_tokens": 30, "completion_tokens": 8}}
TEXT = {"choices": [{"delta": {"content": "x"}}], "usage": None}
ERROR = {"error": {"message": "The request queue is full.", "code": 503}}
DONE = event(b"[DONE]")

# --------------------------------------------------------------------------- captures


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chat_usage.http", ((30, 24), True, None, True)),
        ("chat_continuous_usage.http", ((30, 8), True, None, True)),
        ("completions_usage.http", ((9, 24), True, None, True)),
        ("generate.http", ((3, 8), True, None, True)),
        ("queue_full.http", ((None, None), True, 503, True)),
    ],
)
def test_captured_streams(name: str, expected: Answer) -> None:
    """SGLang's own streams are understood, at once, byte by byte and at every single cut."""
    stream = capture(name)
    assert scan([stream]) == expected
    assert scan(singly(stream)) == expected
    for at in range(len(stream)):
        assert scan([stream[:at], stream[at:]]) == expected


def test_a_captured_answer_that_is_not_streamed() -> None:
    """The usage of a plain answer is read from its body."""
    body = (CAPTURES / "chat.http").read_bytes().partition(b"\r\n\r\n")[2]
    assert usage_of(body) == (30, 24)


def test_the_captured_refusal_is_the_first_event() -> None:
    """A full queue is told by the first event, known as soon as its empty line is there."""
    stream = capture("queue_full.http")
    whole = stream.index(b"\n\n") + 2
    for at in range(whole):
        assert first_event(stream[:at]) is None
    for at in range(whole, len(stream)):
        found = first_event(stream[:at])
        assert found is not None
        assert error_code(found) == 503


# --------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (USAGE, (30, 8)),
        ({"usage": {"input_tokens": 3, "output_tokens": 4}}, (3, 4)),
        ({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 4}}, (None, 4)),
        ({"meta_info": {"prompt_tokens": 5, "completion_tokens": 6, "id": "x"}}, (5, 6)),
        (
            {
                "type": "response.completed",
                "response": {"usage": {"input_tokens": 7, "output_tokens": 9}},
            },
            (7, 9),
        ),
        ({"usage": {"prompt_tokens": 0, "completion_tokens": 0}}, (0, 0)),
        ({"usage": {"prompt_tokens": 5, "total_tokens": 5}}, (5, None)),
        ({"usage": None}, (None, None)),
        ({"usage": {}}, (None, None)),
        ({"response": {"usage": None}}, (None, None)),
        ({"usage": "no"}, (None, None)),
        ({"usage": {"prompt_tokens": "5"}}, (None, None)),
        ([USAGE], (None, None)),
        ({"choices": []}, (None, None)),
    ],
)
def test_usage_by_dialect(value: object, expected: Usage) -> None:
    """Chat, completions, messages, responses and generate each name their tokens."""
    body = json.dumps(value).encode()
    assert usage_of(body) == expected
    assert scan([event(value)])[0] == expected


def test_the_last_usage_counts() -> None:
    """With usage on every chunk, the last one holds; what comes after it without one does not."""
    stream = b"".join(
        event({"usage": {"prompt_tokens": 30, "completion_tokens": n}}) for n in range(1, 9)
    )
    tail = event(TEXT) + event({"choices": [], "usage": {}}) + DONE
    for pieces in ([stream + tail], [stream, tail], singly(stream + tail, 7)):
        assert scan(pieces)[:2] == ((30, 8), True)


@pytest.mark.parametrize("text", ["max_tokens", '"completion_tokens": 99', "usage"])
def test_text_is_not_usage(text: str) -> None:
    """Words of an answer that look like usage, quoted or at its end, are not taken for it."""
    late = event({"choices": [{"delta": {"content": text}}]})
    for pieces in ([event(USAGE), late], [event(USAGE) + late], singly(event(USAGE) + late)):
        assert scan(pieces)[0] == (30, 8)


# --------------------------------------------------------------------------- errors and the end


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (ERROR, 503),
        ({"error": {"message": "no", "code": 429}}, 429),
        ({"error": {"message": "no", "code": "rate_limit_exceeded"}}, 500),
        ({"error": {"message": "no", "code": None}}, 500),
        ({"error": {"message": "no"}}, 500),
        ({"error": {"code": 5030}}, 500),
        ({"error": {"code": -42}}, 500),
        ({"error": "no"}, 500),
        ({"error": ["no"]}, 500),
        ({"type": "error", "error": {"type": "api_error", "message": "no"}}, 500),
        ({"error": None}, None),
        ({"error": False}, None),
        ({"error": ""}, None),
        ({"error": {}}, None),
        ({"message": "no"}, None),
        ({"response": {"error": {"code": 503}}}, None),
        ([ERROR], None),
        ("error", None),
        ({"usage": "odd", "error": {"code": 503}}, 503),
    ],
)
def test_error_events(value: object, code: int | None) -> None:
    """An event is an error when it has one on its top level; the code is 500 if it names none."""
    assert error_code(json.dumps(value).encode()) == code
    assert scan([event(value)])[2] == code


@pytest.mark.parametrize(
    "text", ['"error"', 'data: {"error": {"code": 503}}', "[DONE]", "\n\n[DONE]"]
)
def test_text_is_no_error_and_no_end(text: str) -> None:
    """A model that writes about errors and ends makes none."""
    stream = event({"choices": [{"delta": {"content": text}}], "error": None})
    for pieces in ([stream], singly(stream)):
        assert scan(pieces) == ((None, None), False, None, True)


def test_the_last_error_counts_and_text_after_it_does_not() -> None:
    """The code of the last error event is kept."""
    stream = event({"error": {"code": 429}}) + event(ERROR) + event(TEXT) + DONE
    assert scan([stream]) == ((None, None), True, 503, True)


@pytest.mark.parametrize(
    "damage", [b'{"error": {', b'{"error": {"code": 503}', b'"error" {', b"\xff"]
)
def test_damaged_json_is_no_error(damage: bytes) -> None:
    """What cannot be parsed says nothing and breaks nothing."""
    assert error_code(damage) is None
    assert scan([event(damage + b'"error" "x_tokens":')]) == ((None, None), False, None, True)
    assert usage_of(damage) == (None, None)


@pytest.mark.parametrize("deep", [b"[", b'{"a":', b'{"error":[', b'{"usage":{"a":'])
def test_deep_json_is_survived(deep: bytes) -> None:
    """A hostile depth ends in no answer, not in an exception."""
    assert usage_of(deep * 50_000) == (None, None)
    assert error_code(deep * 50_000) is None
    assert error_code(b'{"error":{"a":' + b"[" * 900 + b"]" * 900 + b"}}") == 500


# --------------------------------------------------------------------------- line ends and shapes


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("name", [b"data: ", b"data:"])
def test_all_line_ends_and_no_space(end: bytes, name: bytes) -> None:
    """LF, CRLF and CR end lines, and the space behind the colon may be missing."""
    stream = (
        b": hello" + end + end + b"event: x" + end + event(USAGE, end + end, name) + b"id: 1" + end
        + event(ERROR, end + end, name) + event(b"[DONE]", end + end, name)
    )  # fmt: skip
    expected = ((30, 8), True, 503, True)
    assert scan([stream]) == expected
    assert scan(singly(stream)) == expected
    for at in range(len(stream)):
        assert scan([stream[:at], stream[at:]]) == expected


def test_an_event_of_several_data_lines_is_one() -> None:
    """Data lines of one event are joined, as the standard says, before they are read."""
    stream = b'data: {"error":\ndata: {"code":\r\ndata:429}}\n\ndata: {"usage": {\ndata: "prompt_tokens": 4}}\n\n'
    expected = ((4, None), False, 429, True)
    assert scan([stream]) == expected
    assert scan(singly(stream)) == expected
    assert payloads(stream) == [b'{"error":\n{"code":\n429}}', b'{"usage": {\n"prompt_tokens": 4}}']


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"", True), (b"\n", True), (b"\r\n\r\n\r\n", True), (b"data: x\n\n", True),
        (b"data: x\r\n\r", True), (b"data: x\n\n\n", True), (b"d", False), (b"data: x", False),
        (b"data: x\n", False), (b"data: x\r\n", False), (b"data: x\n\nd", False),
        (b": ping\n", False), (b": ping\n\n", True), (b"event: x\n", False),
    ],
)  # fmt: skip
def test_between_events(stream: bytes, expected: bool) -> None:
    """The stream stands between two events when its last byte ended one, however it was cut."""
    assert scan([stream])[3] is expected
    assert scan(singly(stream))[3] is expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", None), (b"data: x", None), (b"data: x\n", None), (b"data: x\n\n", b"x"),
        (b"data: x\r\n", None), (b"data: x\r\n\r\n", b"x"), (b"data:x\r\rdata: y", b"x"),
        (b": ping\n\n", None), (b": ping\n\ndata: x\n\n", b"x"), (b": ping\ndata: x\n\n", b"x"),
        (b"event: e\n\ndata: x\n\n", b"x"), (b"\n\n\n\n", None), (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data:\n\n", b""), (b"event: error\ndata: x\n\n", b"x"), (b"data: x\n\ndata: y\n\n", b"x"),
    ],
)  # fmt: skip
def test_the_first_event(data: bytes, expected: bytes | None) -> None:
    """Comments and events without data are passed over; an event counts when it is whole."""
    assert first_event(data) == expected


# --------------------------------------------------------------------------- size


@pytest.mark.parametrize("step", [997, 60_000, MAX_EVENT, MAX_EVENT + 20, 10**7])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_huge_event_is_bounded_and_not_read(step: int, end: bytes) -> None:
    """Of an event beyond the limit nothing is read, at any cut, and what follows is."""
    huge = {"text": "x" * (2 * MAX_EVENT), "error": {"code": 503}, **USAGE}
    assert scan(singly(event(huge, end * 2), step)) == ((None, None), False, None, True)
    stream = event(huge, end * 2) + event(USAGE, end * 2) + event(b"[DONE]", end * 2)
    assert scan(singly(stream, step)) == ((30, 8), True, None, True)
    scanner = SseScanner()
    for piece in singly(stream[: 2 * MAX_EVENT], step):
        scanner.feed(piece)
        assert len(scanner._carry) < MAX_EVENT + 100
        assert not scanner.between_events


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("over", [-1, 0, 1, 2, 3, 9])
def test_the_limit_is_the_same_at_all_cuts(end: bytes, over: int) -> None:
    """An event of exactly the limit is read, one byte more is not, wherever it is cut."""
    bare = event({"usage": {"prompt_tokens": 1}, "text": ""}, b"")
    long = bare.replace(b'""', b'"' + b"x" * (MAX_EVENT + over - len(bare)) + b'"')
    assert len(long) == MAX_EVENT + over
    stream = event(TEXT, end) + long + end + event(TEXT, end)
    expected = ((1 if over <= 0 else None, None), False, None, True)
    begin = len(event(TEXT, end))
    near = [begin - 1, begin, begin + 1, *range(begin + len(long) - 1, begin + len(long) + 5)]
    for at in near:
        assert scan([stream[:at], stream[at:]]) == expected
        a, b = sorted((begin + 5, at))
        assert scan([stream[:a], stream[a:b], stream[b:]]) == expected
    assert scan([stream]) == expected


# --------------------------------------------------------------------------- every cut

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
VALUES = st.sampled_from(
    [
        json.dumps(value).encode()
        for value in (
            USAGE, TEXT, ERROR, {"usage": {"input_tokens": 3, "output_tokens": 4}},
            {"meta_info": {"prompt_tokens": 1, "completion_tokens": 2}}, {"error": {"code": 429}},
            {"error": None}, {"choices": [{"delta": {"content": '"error" max_tokens'}}]},
        )
    ]
    + [b"[DONE]", b"", b'{"error"', b"\xff\x00"]
)  # fmt: skip


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Events of several shapes with mixed line ends, perhaps cut short."""
    stream = b""
    for _ in range(draw(st.integers(0, 6))):
        for _ in range(draw(st.integers(0, 2))):
            name = draw(st.sampled_from([b"data: ", b"data:", b": ", b"event: ", b"data", b"id:"]))
            stream += name + draw(VALUES) + draw(ENDS)
        stream += draw(ENDS)
    return stream[: len(stream) - draw(st.sampled_from([0, 0, 0, 1, 2, 5]))]


@given(stream=streams(), places=st.lists(st.integers(0, 10_000), max_size=10))
@example(stream=b"data: x\r\n\r\n", places=[10])
@example(stream=b"data: x\r\r\ndata: [DONE]\r\n\r\n", places=[8, 9])
def test_the_answer_is_the_same_at_all_cuts(stream: bytes, places: list[int]) -> None:
    """Usage, [DONE], error and the place between events do not depend on the cuts."""
    bounds = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    pieces = [stream[a:b] for a, b in pairwise(bounds)]
    once = scan([stream])
    assert scan(pieces) == once
    assert scan(singly(stream)) == once


@given(stream=streams(), step=st.integers(1, 40))
def test_the_answer_is_the_same_for_all_line_ends(stream: bytes, step: int) -> None:
    """Without a carriage return boundaries are found by a plain search, with one by an expression."""
    plain = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    once = scan(singly(plain, step))
    assert scan(singly(plain.replace(b"\n", b"\r\n"), step)) == once
    assert scan(singly(plain.replace(b"\n", b"\r"), step)) == once


def by_the_standard(stream: bytes) -> list[bytes]:
    """The payloads of a stream by the parsing rules of WHATWG HTML section 9.2.6, line by line."""
    lines = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    found: list[bytes] = []
    data: list[bytes] = []
    for line in lines[:-1]:
        if not line:
            if data:
                found.append(b"\n".join(data))
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
    return found


@given(stream=streams())
def test_the_events_are_those_of_the_standard(stream: bytes) -> None:
    """A plain line-by-line parser finds the same first event, end and error."""
    expected = by_the_standard(stream)
    assert first_event(stream) == (expected[0] if expected else None)
    assert payloads(stream + b"\n\n") == by_the_standard(stream + b"\n\n")
    codes = [error_code(payload) for payload in expected]
    errors = [code for code in codes if code is not None]
    _, done, error, _ = scan([stream])
    assert done is (b"[DONE]" in expected)
    assert error == (errors[-1] if errors else None)


@given(st.lists(st.binary(max_size=60), max_size=10))
def test_no_bytes_break_the_scanner(pieces: list[bytes]) -> None:
    """Whatever the bytes, the scanner answers, and the same for every cut."""
    assert scan(pieces) == scan([b"".join(pieces)])
    usage_of(b"".join(pieces))
    error_code(b"".join(pieces))
