"""What a simulated server makes of a body: the pure part, refusals above all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loadtest.engine_config import EngineConfig
from loadtest.engine_errors import BadToken, Refusal
from loadtest.engine_request import Wanted, chat, completion
from loadtest.engine_text import WORDS, Answer, decode, draw, encode
from loadtest.engine_validation import parse_object
from router.load import Role
from tests.raw_client import CHAT, COMPLETIONS

CONFIG = EngineConfig(context_length=100, max_total_tokens=100)
HELLO = [{"role": "user", "content": "hello"}]


def ask_chat(config: EngineConfig = CONFIG, /, **body: Any) -> Wanted:
    return chat(parse_object(CHAT, msgspec.json.encode({"messages": HELLO} | body)), config)


def ask_text(config: EngineConfig = CONFIG, /, **body: Any) -> Wanted:
    fields = parse_object(COMPLETIONS, msgspec.json.encode({"prompt": "a b c"} | body))
    return completion(fields, config)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": 1.5}, "got a number with a fractional part"),
        ({"max_tokens": []}, "'type': 'int_type'"),
        ({"temperature": "warm"}, "unable to parse string as a number"),
        ({"temperature": {}}, "'type': 'float_type'"),
        (
            {"stream_options": {"include_usage": []}},
            "'loc': ('body', 'stream_options', 'include_usage')",
        ),
        ({"stream": "maybe"}, "'type': 'bool_parsing'"),
        ({"stream": []}, "'type': 'bool_type'"),
        ({"model": 5}, "'type': 'string_type'"),
        ({"stream_options": 5}, "'type': 'dict_type'"),
        ({"messages": ["x"]}, "'type': 'model_type'"),
        ({"messages": [{"content": "x"}]}, "'type': 'missing'"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0."),
    ],
)
def test_refused_chat(body: dict[str, Any], message: str) -> None:
    """A value of the wrong type or out of its range is a 400 that names it."""
    with pytest.raises(Refusal) as caught:
        ask_chat(**body)
    assert caught.value.status == 400
    assert message in caught.value.message


@pytest.mark.parametrize("prompt", [5, [], ["a", 1], [[1], "a"], None])
def test_refused_prompt(prompt: Any) -> None:
    """A prompt is a text, ids, or a list of either."""
    with pytest.raises(Refusal, match="valid string"):
        ask_text(prompt=prompt)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[1]", "valid dictionary or object"),
        (b'{"a": 1} x', "unexpected content after document"),
        (b'{"a": nope}', "invalid literal, expected 'null'"),
        (b'{"a": x}', "unexpected character"),
        (b'{"a": "\xff"}', "invalid utf-8"),
        (b'{"a": NaN}', "JSON decode error"),
    ],
)
def test_refused_body(body: bytes, message: str) -> None:
    """A body that is no JSON object is a 400 in the flat shape."""
    with pytest.raises(Refusal, match="validation error") as caught:
        parse_object(CHAT, body)
    assert message in caught.value.message
    assert msgspec.json.decode(caught.value.body())["type"] == "Bad Request"


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": "7"},
        {"max_tokens": 7.0},
        {"max_completion_tokens": 7, "max_tokens": 50},
        {"max_tokens": 7, "stream": "yes", "temperature": "0.5", "n": True, "logprobs": None},
    ],
)
def test_lenient_types(body: dict[str, Any]) -> None:
    """Numbers and truth values are taken as text too, as pydantic takes them."""
    wanted = ask_chat(ignore_eos=True, **body)
    assert [choice.output_tokens for choice in wanted.choices] == [7]


def test_room() -> None:
    """Without a limit an answer may fill the context, but for what speculation reserves."""
    assert ask_chat(ignore_eos=True).choices[0].output_tokens == 100 - 14
    speculative = msgspec.structs.replace(CONFIG, role=Role.SPECULATIVE)
    assert ask_chat(speculative, ignore_eos=True).choices[0].output_tokens == 100 - 14 - 4
    assert ask_text(ignore_eos=True).choices[0].output_tokens == 16


def test_too_long() -> None:
    """Prompt and output together must fit."""
    assert ask_text(max_tokens=97).choices[0].prompt_tokens == 3
    with pytest.raises(Refusal, match="total of 101 tokens: 3 tokens from the input"):
        ask_text(max_tokens=98)


@pytest.mark.parametrize("prompt", [[128_256], [-1], [[1], [200_000]]])
def test_bad_token(prompt: Any) -> None:
    """An id that the model does not have is more than a refusal."""
    with pytest.raises(BadToken):
        ask_text(prompt=prompt)


def test_content_parts() -> None:
    """Text in parts counts like text; other parts cost nothing."""
    parts = [{"type": "text", "text": "a b"}, {"type": "image_url"}, {"type": "text", "text": "c"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert ask_chat(messages=messages).prompt_tokens == 6 + 2 * 7 + 3


def test_tool_call_that_does_not_fit() -> None:
    """A tool call is cut like any answer if the limit is too low for it."""
    function = {
        "name": "f",
        "parameters": {"properties": {"x": {"type": "string"}}, "required": ["x"]},
    }
    tools = [{"type": "function", "function": function}]
    wanted = ask_chat(tools=tools, tool_choice="required", max_tokens=2)
    assert (wanted.choices[0].output_tokens, wanted.choices[0].finish) == (2, "length")
    wanted = ask_chat(tools=tools, tool_choice="required")
    assert (wanted.choices[0].output_tokens, wanted.choices[0].finish) == (4, "tool_calls")


@pytest.mark.parametrize("choice", ["auto", "none", None, {"function": {"name": "nobody"}}])
def test_no_forced_tool(choice: Any) -> None:
    """Where no known function must be called, the answer is text."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ask_chat(tools=tools, tool_choice=choice).tool is None


def test_answers_differ_by_prompt_and_seed() -> None:
    """Prompt and seed decide an answer and its length, within the bounds."""
    draws = {draw(prompt, seed, (10, 20)) for prompt in (b"a", b"b", b"c") for seed in (0, 1, -1)}
    assert len(draws) > 6
    assert all(10 <= one.natural_tokens <= 20 for one in draws)
    assert draw(b"a", 0, (10, 20)) == draw(b"a", 0, (10, 20))


def test_text_in_any_pieces() -> None:
    """However an answer is cut, the pieces are the same text."""
    answer = Answer(50)
    whole = answer.text(0, 200)
    assert "".join(answer.text(at, 7) for at in range(0, 196, 7)) + answer.text(196, 4) == whole
    assert "".join(answer.words(0, 200)) == whole
    assert decode(answer.ids(0, 200)) == whole
    assert len(whole.split()) == 200


def test_tokens_of_words() -> None:
    """Known words have ids of their own, and unknown ones keep theirs."""
    assert decode(encode("the line")) == " the line"
    assert encode("zebra") == encode("zebra") != encode("horse")
    assert len(set(WORDS)) > 30
