"""What is read of a body: leniently, and without ever changing it."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.load import Role
from router.request import NOTHING_KNOWN, BodyError, RequestInfo, read_info

DEEP = 100_000


def info(**fields: Any) -> RequestInfo:
    return read_info(json.dumps(fields).encode())


# ---------------------------------------------------------------------- nothing is too odd


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": None},
        {"stream": "true"},
        {"stream": 1},
        {"stream": {}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},  # without parameters
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"messages": "not a list"},
        {"n": "three"},
        {"n": None},
        {"n": [3]},
        {"n": -1},
        {"logprobs": "yes"},
        {"top_logprobs": 5},
        {"prompt": "text"},
        {"prompt": ["a", "b"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2], [3]]},
        {"max_tokens": None},
        {"max_tokens": -1},
        {"response_format": 7},
        {"response_format": []},
        {"response_format": {"type": 3}},
        {"sampling_params": None},
        {"sampling_params": [{"n": 2}]},
        {"sampling_params": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}, "unknown": {"nested": [{}]}},
        {"": ""},
    ],
)
def test_any_object_is_taken(fields: dict[str, Any]) -> None:
    """Whatever the types of the fields, an object is for the engine to judge."""
    assert info(**fields).prompt_bytes == len(json.dumps(fields))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the request has no body; a JSON object is needed"),
        (b" ", "the body is not a JSON object"),
        (b"null", "the body is not a JSON object"),
        (b"true", "the body is not a JSON object"),
        (b"3", "the body is not a JSON object"),
        (b'"{}"', "the body is not a JSON object"),
        (b"[]", "the body is not a JSON object"),
        (b'[{"stream": true}]', "the body is not a JSON object"),
        (b"stream=true", "the body is not a JSON object"),
        (b"\xff\xfe\x00", "the body is not a JSON object"),
        (b"{", "the body is not valid JSON"),
        (b'  {"a": }', "the body is not valid JSON"),
        (b'{"a": 1', "the body is not valid JSON"),
        (b'{"a": 1} x', "the body is not valid JSON"),
        (b'{"a": 1}{"b": 2}', "the body is not valid JSON"),
        (b"{'a': 1}", "the body is not valid JSON"),
        (b'{"a": 01}', "the body is not valid JSON"),
        (b'{"a": NaN}', "the body is not valid JSON"),  # SGLang reads with orjson: 400 too
        (b'{"stream": Infinity}', "the body is not valid JSON"),
        (b'{"a": "\x00"}', "the body is not valid JSON"),
        (b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}", "the body is nested too deeply"),
        (b'{"a":' * DEEP + b"1" + b"}" * DEEP, "the body is nested too deeply"),
        (b'{"stream":' + b"[" * DEEP, "the body is nested too deeply"),
    ],
)
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_only_what_is_no_object_is_refused(
    body: bytes, why: str, kind: type[bytes | bytearray]
) -> None:
    """What is no JSON object is refused in one line."""
    with pytest.raises(BodyError) as caught:
        read_info(kind(body))
    assert str(caught.value) == why


@pytest.mark.parametrize("secret", [b'{"a": hunter2}', b"hunter2", b'["hunter2"]', b'{"hunter2'])
def test_a_refusal_shows_nothing_of_the_body(secret: bytes) -> None:
    """The text of a refusal holds no byte of what the client wrote."""
    with pytest.raises(BodyError) as caught:
        read_info(secret)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "\xff\xfe"}',
        b'{"\xff": 1}',
        b'{"stream": "\xc3"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": 1e999}',
        b'{"a": -1e-999}',
        b'{"seed": 18446744073709551616}',
        b'{"a":' + b"[" * 200 + b"]" * 200 + b"}",
        b'\r\n\t {"a" :\n1 }\n ',
    ],
)
def test_values_that_nobody_reads_may_be_anything(body: bytes) -> None:
    """Invalid UTF-8, numbers without end and deep lists in other fields are the engine's matter."""
    assert read_info(body) == RequestInfo(prompt_bytes=len(body))


# ---------------------------------------------------------------------- each fact


@pytest.mark.parametrize(
    ("body", "stream"),
    [
        (b'{"stream":true}', True),
        (b'{ "stream" : true }', True),
        (b'{"stream":\n\ttrue\n}', True),
        (b'{"str\\u0065am":true}', True),
        (b'{"stream":false,"stream":true}', True),
        (b'{"stream":true,"stream":false}', False),  # the last one counts, for the engine too
        (b'{"stream":"true"}', False),
        (b'{"stream":1}', False),
        (b'{"stream":null}', False),
        (b'{"stream":[true]}', False),
        (b'{"Stream":true}', False),
        (b'{"stream_options":{"stream":true}}', False),
        (b'{"prompt":"\\"stream\\":true"}', False),
    ],
)
def test_stream_is_the_value_true(body: bytes, stream: bool) -> None:
    """A stream is asked for by the JSON value true of the field itself, and by nothing else."""
    assert read_info(body).stream is stream


SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}


@pytest.mark.parametrize(
    ("fields", "structured"),
    [
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, True),
        ({"response_format": {"json_schema": {"name": "text"}, "type": "json_schema"}}, True),
        ({"response_format": {"type": "structural_tag"}}, True),
        ({"response_format": "json"}, True),
        ({"response_format": {}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": None}, False),
        ({"response_format": False}, False),
        ({"response_format": {"type": "text"}, "regex": "a+"}, True),
        ({"regex": "a+"}, True),
        ({"ebnf": "root ::= x"}, True),
        ({"json_schema": "{}"}, True),
        ({"structural_tag": "{}"}, True),
        ({"regex": None, "ebnf": None, "json_schema": None}, False),
        ({"sampling_params": {"json_schema": "{}"}}, True),
        ({"sampling_params": {"regex": "a+"}}, True),
        ({"sampling_params": {"structural_tag": "{}"}}, True),
        ({"sampling_params": {"regex": None, "temperature": 0}}, False),
        ({"sampling_params": {"temperature": 0}, "regex": "a+"}, True),
        ({"messages": [{"role": "user", "content": "regex json_schema"}]}, False),
        ({"tools": [{"function": {"name": "regex"}}]}, False),
    ],
)
def test_structured_output(fields: dict[str, Any], structured: bool) -> None:
    """Any grammar counts, wherever SGLang reads one from; a schema may have a property "text"."""
    assert info(**fields).structured_output is structured


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({"logprobs": True}, True),
        ({"logprobs": 5}, True),
        ({"logprobs": 0}, True),  # of completions: the chosen token's
        ({"logprobs": False}, False),
        ({"logprobs": None}, False),
        ({"return_logprob": True}, True),
        ({"return_logprob": False}, False),
        ({}, False),
    ],
)
def test_logprobs(fields: dict[str, Any], logprobs: bool) -> None:
    """Logprobs are asked for by OpenAI's field or by SGLang's own."""
    assert info(**fields).logprobs is logprobs


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        (b"{}", 1),
        (b'{"n":null}', 1),
        (b'{"n":1}', 1),
        (b'{"n":3}', 3),
        (b'{"n":3.0}', 3),
        (b'{"n":"3"}', 3),
        (b'{"n":0}', 0),
        (b'{"n":-2}', 1),
        (b'{"n":"many"}', 1),
        (b'{"n":""}', 1),
        (b'{"n":[]}', 1),
        (b'{"n":true}', 1),
        (b'{"n":1e2}', 100),
        (b'{"n":1e999}', 1_000_000),
        (b'{"n":999999999999}', 1_000_000),
        (b'{"n":' + b"9" * 5000 + b"}", 1_000_000),
        (b'{"n":"' + b"x" * 5000 + b'"}', 1),
        (b'{"n":"nan"}', 1),
        (b'{"n":2,"n":5}', 5),
        (b'{"sampling_params":{"n":4}}', 4),
        (b'{"sampling_params":{"n":"x"}}', 1),
        (b'{"sampling_params":{}}', 1),
        (b'{"sampling_params":[{"n":4}]}', 1),
    ],
)
def test_choices(body: bytes, choices: int) -> None:
    """The number of choices is read as the engine reads it, and is never an error."""
    assert read_info(body).choices == choices


@pytest.mark.parametrize(
    ("fields", "stateful"),
    [
        ({}, None),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": None}, None),
        ({"background": True}, "background"),
        ({"background": False}, None),
        ({"background": None, "previous_response_id": None}, None),
        ({"background": True, "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"metadata": {"background": True}}, None),
    ],
)
def test_stateful(fields: dict[str, Any], stateful: str | None) -> None:
    """What ties a request to one server's memory is named."""
    assert info(**fields).stateful == stateful


@pytest.mark.parametrize("pinned", [None, *Role])
def test_the_pin_is_passed_on(pinned: Role | None) -> None:
    """The body says nothing of pinning: what the header said is kept."""
    assert read_info(b'{"pinned":"baseline"}', pinned).pinned is pinned


def test_nothing_known_is_an_ordinary_request() -> None:
    """A request of which nothing is known hits no fence."""
    assert info() == RequestInfo(prompt_bytes=2)
    assert RequestInfo() == NOTHING_KNOWN


# ---------------------------------------------------------------------- properties

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
names = st.sampled_from(
    ["stream", "n", "logprobs", "response_format", "regex", "type", "sampling_params", "background"]
) | st.text(max_size=5)  # fmt: skip
documents = st.recursive(
    scalars | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=6),
    max_leaves=20,
)


@given(fields=st.dictionaries(names, documents, max_size=8), spaces=st.sampled_from([None, 2]))
@settings(deadline=None)
def test_every_object_is_read(fields: dict[str, Any], spaces: int | None) -> None:
    """Any JSON object gives facts, however it is laid out, with the stream flag as Python sees it."""
    body = json.dumps(fields, indent=spaces).encode()
    kept = bytes(body)
    found = read_info(body)
    assert body == kept
    assert found.stream is (fields.get("stream") is True)
    assert found.prompt_bytes == len(body)
    assert found.choices >= 0
    assert read_info(bytearray(body)) == found


@given(body=st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    """Whatever the bytes: facts, or the one error."""
    with contextlib.suppress(BodyError):
        assert read_info(body).prompt_bytes == len(body)


def test_a_large_body_costs_less_than_parsing_it() -> None:
    """Ten megabytes are read for less than what Python's own parser takes for them."""
    body = json.dumps({
        "messages": [{"role": "user", "content": f"{i} " * 8} for i in range(160_000)],
        "stream": True,
        "image": "A" * 4_000_000,
    }).encode()  # fmt: skip
    assert len(body) > 10_000_000

    def fastest(work: Any) -> float:
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            work(body)
            times.append(time.perf_counter() - begun)
        return min(times)

    assert read_info(body).stream
    assert fastest(read_info) < fastest(json.loads)
