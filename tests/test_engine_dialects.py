"""The dialects of a simulated server, through the clients that people use."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest

from loadtest.engine import EngineConfig, RunningEngine, running_engine
from tests.engines import ask, connection, looped, request
from tests.stack import until

MESSAGES: Any = [{"role": "user", "content": "how many servers?"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "unit": {"type": "string", "enum": ["servers", "GPUs"]},
        "note": {"type": "string"},
        "more": {"type": "object"},
    },
    "required": ["count", "unit", "note", "more"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "other", "parameters": {}}},
    {"type": "function", "function": {"name": "answer", "parameters": PARAMETERS}},
]
ARGUMENTS = {"count": 2, "unit": "servers", "note": "two", "more": {}}
FULL = EngineConfig.quick(max_running_requests=1, max_queued_requests=0)
LONG = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def openai_client(**settings: Any) -> AsyncIterator[tuple[RunningEngine, openai.AsyncOpenAI]]:
    async with (
        running_engine(EngineConfig.quick("speculative", **settings)) as engine,
        openai.AsyncOpenAI(base_url=engine.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        yield engine, client


@asynccontextmanager
async def anthropic_client(
    config: EngineConfig | None = None,
) -> AsyncIterator[tuple[RunningEngine, anthropic.AsyncAnthropic]]:
    async with (
        running_engine(config or EngineConfig.quick("speculative")) as engine,
        anthropic.AsyncAnthropic(base_url=engine.url, api_key="any", max_retries=0) as client,
    ):
        yield engine, client


@looped
async def test_openai_chat() -> None:
    """OpenAI's client reads a chat completion and a stream of one, usage included."""
    async with openai_client() as (engine, client):
        whole = await client.chat.completions.create(
            model="sim-llama-8b", messages=MESSAGES, max_tokens=20
        )
        stream = await client.chat.completions.create(
            model="sim-llama-8b",
            messages=MESSAGES,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert [model.id async for model in client.models.list()] == [engine.config.model]
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert content == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20


@looped
async def test_openai_tool_call() -> None:
    """A function that must be called is called, with arguments that fit its schema."""
    choice: Any = {"type": "function", "function": {"name": "answer"}}
    async with openai_client() as (_, client):
        whole = await client.chat.completions.create(
            model="m", messages=MESSAGES, tools=TOOLS, tool_choice=choice
        )
        stream = await client.chat.completions.create(
            model="m", messages=MESSAGES, tools=TOOLS, tool_choice=choice, stream=True
        )
        chunks = [chunk async for chunk in stream]
        free = await client.chat.completions.create(
            model="m", messages=MESSAGES, tools=TOOLS, max_tokens=5
        )
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    calls: Any = whole.choices[0].message.tool_calls
    assert (calls[0].function.name, json.loads(calls[0].function.arguments)) == (
        "answer",
        ARGUMENTS,
    )
    deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert deltas[0].function is not None
    assert deltas[0].function.name == "answer"
    assert len(deltas) > 3
    pieces = [delta.function.arguments or "" for delta in deltas if delta.function]
    assert json.loads("".join(pieces)) == ARGUMENTS
    assert free.choices[0].message.tool_calls is None


@looped
async def test_openai_tool_choice_required() -> None:
    """If any function will do, the first is called."""
    async with openai_client() as (_, client):
        whole = await client.chat.completions.create(
            model="m", messages=MESSAGES, tools=TOOLS, tool_choice="required"
        )
    calls: Any = whole.choices[0].message.tool_calls
    assert (calls[0].function.name, calls[0].function.arguments) == ("other", "{}")


@looped
async def test_openai_errors() -> None:
    """A request that is refused is the client's own exception."""
    async with openai_client() as (_, client):
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="m", messages=MESSAGES, temperature=-1)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("nope")


@looped
async def test_logprobs() -> None:
    """Log probabilities are one for each token, in both of OpenAI's shapes."""
    async with openai_client() as (_, client):
        chat = await client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2
        )
        stream = await client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=5, logprobs=True, stream=True
        )
        streamed = [
            token.token
            async for chunk in stream
            for choice in chunk.choices
            if choice.logprobs
            for token in choice.logprobs.content or []
        ]
        text = await client.completions.create(model="m", prompt="x", max_tokens=5, logprobs=1)
    assert chat.choices[0].logprobs is not None
    tokens = chat.choices[0].logprobs.content or []
    assert "".join(token.token for token in tokens) == chat.choices[0].message.content
    assert [len(token.top_logprobs) for token in tokens] == [2] * 5
    assert streamed == [token.token for token in tokens]
    assert text.choices[0].logprobs is not None
    assert "".join(text.choices[0].logprobs.tokens or []) == text.choices[0].text
    assert (text.choices[0].logprobs.text_offset or [])[0] == 0


@pytest.mark.parametrize(("role", "tells"), [("speculative", True), ("baseline", False)])
@looped
async def test_speculation_details(role: str, tells: bool) -> None:
    """Asked for, a speculating server says what its drafts were worth; a baseline has nothing."""
    body = {
        "prompt": "x",
        "max_tokens": 201,
        "ignore_eos": True,
        "return_spec_tokens_details": True,
    }
    async with running_engine(EngineConfig.quick(role, version="0.5.23")) as engine:
        whole = (await ask(engine, "/v1/completions", body)).json
        stream = await ask(engine, "/v1/completions", body | {"stream": True})
        chat = await ask(
            engine, "/v1/chat/completions", body | {"messages": MESSAGES, "stream": True}
        )
    details = whole.get("sglext", {}).get("spec_tokens_details", {})
    assert bool(details) == tells
    assert sum("sglext" in event for event in stream.events[:-1]) == tells
    assert sum("sglext" in event for event in chat.events[:-1]) == tells
    if tells:
        assert details["spec_verify_ct"] == 100
        assert details["spec_accept_length"] == pytest.approx(2.01)


@looped
async def test_anthropic_message() -> None:
    """Anthropic's client reads a message and a stream of one, and they say the same."""
    async with anthropic_client() as (_, client):
        whole = await client.messages.create(
            model="m", max_tokens=12, system="Be brief.", messages=MESSAGES
        )
        async with client.messages.stream(
            model="m", max_tokens=12, system="Be brief.", messages=MESSAGES
        ) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(
            model="m", system="Be brief.", messages=MESSAGES
        )
    assert whole.content[0].type == "text"
    assert "".join(texts) == whole.content[0].text
    assert (whole.stop_reason, streamed.stop_reason) == ("max_tokens", "max_tokens")
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 12
    assert counted.input_tokens == whole.usage.input_tokens


@looped
async def test_anthropic_tool_use() -> None:
    """A tool that must be used is used, in one piece and streamed."""
    tools: Any = [{"name": "answer", "input_schema": PARAMETERS}]
    asked: Any = {"model": "m", "max_tokens": 100, "messages": MESSAGES, "tools": tools}
    async with anthropic_client() as (_, client):
        whole = await client.messages.create(**asked, tool_choice={"type": "any"})
        choice: Any = {"type": "tool", "name": "answer"}
        async with client.messages.stream(**asked, tool_choice=choice) as stream:
            streamed = await stream.get_final_message()
    messages: list[Any] = [whole, streamed]
    for message in messages:
        assert message.stop_reason == "tool_use"
        assert message.content[0].type == "tool_use"
        assert (message.content[0].name, message.content[0].input) == ("answer", ARGUMENTS)


@looped
async def test_anthropic_errors() -> None:
    """A bad message is Anthropic's kind of 400, and a full queue no fault of the request."""
    async with anthropic_client(FULL) as (engine, client):
        with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
            await client.messages.create(model="m", max_tokens=5, messages=[])
        missing = await ask(engine, "/v1/messages", {"model": "m", "max_tokens": 5})
        assert "messages: Field required" in missing.json["error"]["message"]
        assert (await ask(engine, "/v1/messages/count_tokens", {})).json["type"] == "error"
        async with connection(engine, request("/v1/completions", LONG)):
            await until(lambda: engine.core.running == 1, what="full")
            with pytest.raises(anthropic.APIStatusError, match="internal_error"):
                await client.messages.create(model="m", max_tokens=5, messages=MESSAGES)
            with pytest.raises(anthropic.APIError, match="Stream processing error"):
                async with client.messages.stream(
                    model="m", max_tokens=5, messages=MESSAGES
                ) as stream:
                    await stream.get_final_message()


@looped
async def test_native() -> None:
    """`/generate` takes texts and ids, one or several, and says what speculation did."""
    parameters = {"max_new_tokens": 9, "ignore_eos": True}
    async with running_engine(EngineConfig.quick("speculative")) as engine:
        one = (await ask(engine, "/generate", {"text": "a b", "sampling_params": parameters})).json
        several = {"input_ids": [[1, 2], [3]], "sampling_params": parameters}
        two = (await ask(engine, "/generate", several)).json
        stream = await ask(engine, "/generate", several | {"stream": True})
        bare = (await ask(engine, "/generate", {"text": "a"}, method="PUT")).json
        nothing = await ask(engine, "/generate", {"sampling_params": parameters})
    assert one["meta_info"]["spec_verify_ct"] == 4
    assert len(one["output_ids"]) == one["meta_info"]["completion_tokens"] == 9
    assert [answer["meta_info"]["prompt_tokens"] for answer in two] == [2, 1]
    assert {event["index"] for event in stream.events[:-1]} == {0, 1}
    assert stream.events[-2]["text"] in {two[0]["text"], two[1]["text"]}
    assert bare["meta_info"]["completion_tokens"] <= 128
    assert nothing.status == "HTTP/1.1 400 Bad Request"
    assert "should be provided" in nothing.json["error"]["message"]


@looped
async def test_native_queue_full() -> None:
    """A full queue refuses `/generate` flat in one piece, and inside a stream's 200."""
    raw = request("/v1/completions", LONG)
    async with running_engine(FULL) as engine, connection(engine, raw):
        await until(lambda: engine.core.running == 1, what="full")
        whole = await ask(engine, "/generate", {"text": "x"})
        stream = await ask(engine, "/generate", {"text": "x", "stream": True})
        chat = await ask(engine, "/api/chat", {"messages": MESSAGES})
    assert (whole.status, whole.json["code"]) == ("HTTP/1.1 503 Service Unavailable", 503)
    assert stream.events[0]["error"]["code"] == 503
    assert stream.events[1] == "[DONE]"
    assert chat.json == {"error": "The request queue is full."}


@looped
async def test_ollama() -> None:
    """Ollama's routes stream lines of JSON unless told not to, and say what the model is."""
    options = {"num_predict": 10, "temperature": 0.5}
    async with (
        running_engine(EngineConfig.quick()) as engine,
        httpx.AsyncClient(base_url=engine.url) as client,
    ):
        chat = {"messages": MESSAGES, "options": options}
        streamed = await client.post("/api/chat", json=chat)
        whole = await client.post("/api/chat", json=chat | {"stream": False})
        body = {"prompt": "x", "system": "y", "options": options}
        generated = await client.post("/api/generate", json=body)
        once = await client.post("/api/generate", json=body | {"stream": False})
        tags = (await client.get("/api/tags")).json()
        shown = (await client.post("/api/show", json={"model": "any"})).json()
        root = await client.head("/")
    assert streamed.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert (
        "".join(line["message"]["content"] for line in lines) == whole.json()["message"]["content"]
    )
    assert [line["done"] for line in lines] == [False] * 10 + [True]
    lines = [json.loads(line) for line in generated.text.splitlines()]
    assert "".join(line["response"] for line in lines) == once.json()["response"]
    assert once.json()["eval_count"] == 10
    assert tags["models"][0]["name"] == "sim-llama-8b"
    assert "num_ctx 8192" in shown["parameters"]
    assert root.status_code == 200


@looped
async def test_tokens() -> None:
    """A text's tokens are its words, and come back as the words that the model knows."""
    async with running_engine(EngineConfig.quick()) as engine:
        one = (await ask(engine, "/v1/tokenize", {"prompt": "the router sends"})).json
        two = (await ask(engine, "/tokenize", {"prompt": ["the router", "zzz"]})).json
        back = await ask(engine, "/v1/detokenize", {"tokens": one["tokens"]})
        both = await ask(engine, "/detokenize", {"tokens": two["tokens"]})
        wrong = await ask(engine, "/v1/detokenize", {"tokens": ["x"]})
        missing = await ask(engine, "/v1/tokenize", {})
    assert (one["count"], two["count"]) == (3, [2, 1])
    assert back.json == {"text": " the router sends"}
    assert both.json["text"][0] == " the router"
    assert {wrong.status, missing.status} == {"HTTP/1.1 400 Bad Request"}


@looped
async def test_browser() -> None:
    """A browser of another origin is let in, with what it asked to send."""
    async with (
        running_engine(EngineConfig.quick()) as engine,
        httpx.AsyncClient(base_url=engine.url, headers={"Origin": "http://page.test"}) as client,
    ):
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        preflight = await client.options("/v1/completions", headers=asked)
        answer = await client.get("/v1/models")
        plain = await client.options("/v1/models")
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    assert answer.headers["access-control-allow-origin"] == "http://page.test"
    assert plain.status_code == 405
