"""The official `openai` client, through the router, against the simulated pair."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from loadtest.engine import running_engine
from loadtest.engine_config import EngineConfig
from tests.stack import Stack, run, running_router

ASK: Any = [{"role": "user", "content": "say something"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@contextlib.asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[Stack]:
    """A router in front of two quick simulated servers, ready."""
    async with (
        running_engine(EngineConfig.quick("speculative")) as spec,
        running_engine(EngineConfig.quick("baseline")) as base,
        running_router(spec.url, base.url, **settings) as stack,
    ):
        while (await stack.client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)
        yield stack


def client_of(stack: Stack, key: str = "sk-any") -> AsyncOpenAI:
    """The asynchronous client, without retries of its own."""
    return AsyncOpenAI(base_url=stack.url + "/v1", api_key=key, max_retries=0)


def test_chat_and_completions_answer_with_usage() -> None:
    """Both endpoints give text, a finish reason and usage."""

    async def work() -> None:
        async with pair() as stack, client_of(stack) as client:
            chat = await client.chat.completions.create(
                model="m", messages=ASK, max_tokens=5, extra_body={"ignore_eos": True}
            )
            assert chat.choices[0].message.content
            assert chat.choices[0].finish_reason == "length"
            assert chat.usage is not None
            assert chat.usage.completion_tokens == 5
            text = await client.completions.create(
                model="m", prompt="once", max_tokens=4, extra_body={"ignore_eos": True}
            )
            assert text.choices[0].text
            assert text.usage is not None
            assert text.usage.completion_tokens == 4
            tokens = sum(b.output_tokens for b in stack.relay.metrics.backends.values())
            assert tokens == 9

    run(work)


def test_streams_arrive_in_pieces_and_report_usage() -> None:
    """A stream gives several chunks, and usage in the last when it is asked for."""

    async def work() -> None:
        async with pair() as stack, client_of(stack) as client:
            stream = await client.chat.completions.create(
                model="m",
                messages=ASK,
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            chunks = [chunk async for chunk in stream]
            texts = [c.choices[0].delta.content for c in chunks if c.choices]
            assert len([text for text in texts if text]) > 2
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 20
            spec = stack.relay.metrics.backends
            assert sum(backend.output_tokens for backend in spec.values()) == 20

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_come_through(stream: bool) -> None:
    """A required tool is called, with its name and arguments that are JSON."""

    async def work() -> None:
        async with pair() as stack, client_of(stack) as client:
            if stream:
                pieces = await client.chat.completions.create(
                    model="m", messages=ASK, tools=[TOOL], tool_choice="required", stream=True
                )
                deltas = [
                    call
                    async for chunk in pieces
                    for choice in chunk.choices
                    for call in choice.delta.tool_calls or ()
                ]
                assert any(d.function and d.function.name == "weather" for d in deltas)
            else:
                answer = await client.chat.completions.create(
                    model="m", messages=ASK, tools=[TOOL], tool_choice="required"
                )
                calls = answer.choices[0].message.tool_calls
                assert calls is not None
                assert calls[0].type == "function"
                assert calls[0].function.name == "weather"

    run(work)


def test_models_are_listed_as_one_server() -> None:
    """The list of models, and one of them by its id."""

    async def work() -> None:
        async with pair() as stack, client_of(stack) as client:
            ids = [model.id async for model in await client.models.list()]
            assert ids == ["sim-llama-8b"]
            assert (await client.models.retrieve("sim-llama-8b")).id == "sim-llama-8b"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("org/none:7b")

    run(work)


def test_errors_are_the_clients_own_exceptions() -> None:
    """A backend's 400 and our 401, 404 and 503 are the exceptions that users catch."""

    async def work() -> None:
        async with pair(api_keys="sk-client-one") as stack:
            async with client_of(stack, "sk-client-one") as client:
                with pytest.raises(openai.BadRequestError) as bad:
                    await client.chat.completions.create(model="m", messages=ASK, temperature=-3)
                assert "temperature" in str(bad.value)
                with pytest.raises(openai.NotFoundError):
                    await client.batches.list()
            async with client_of(stack, "sk-client-two") as client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await client.chat.completions.create(model="m", messages=ASK)
                assert refused.value.code == "invalid_api_key"
        async with (
            running_router("http://127.0.0.1:9", "http://127.0.0.1:19") as stack,
            client_of(stack) as client,
        ):
            with pytest.raises(openai.InternalServerError) as down:
                await client.chat.completions.create(model="m", messages=ASK)
            assert down.value.code == "backend_connect_failed"

    run(work)


def test_the_synchronous_client_works_too() -> None:
    """The same in a thread, streaming and not, with a base URL without /v1."""

    def in_a_thread(url: str) -> tuple[str | None, int]:
        with OpenAI(base_url=url, api_key="k", max_retries=0) as client:
            answer = client.chat.completions.create(model="m", messages=ASK, max_tokens=3)
            stream = client.chat.completions.create(
                model="m", messages=ASK, max_tokens=6, stream=True
            )
            return answer.choices[0].message.content, len(list(stream))

    async def work() -> None:
        async with pair() as stack:
            text, chunks = await asyncio.to_thread(in_a_thread, stack.url)
            assert text
            assert chunks > 2

    run(work)


def test_the_explanation_can_be_read_from_the_raw_response() -> None:
    """Which backend answered, why, and under which id, is in the headers of every answer."""

    async def work() -> None:
        async with pair(threshold=4) as stack, client_of(stack) as client:
            raw = await client.chat.completions.with_raw_response.create(
                model="m", messages=ASK, max_tokens=2, extra_headers={"x-request-id": "mine-1"}
            )
            assert raw.headers["x-crossover-backend"] == "speculative"
            assert raw.headers["x-crossover-reason"] == "below_threshold"
            assert raw.headers["x-crossover-concurrency"] == "0/0"
            assert raw.headers["x-crossover-threshold"] == "4"
            assert raw.headers["x-request-id"] == "mine-1"
            found = await stack.client.get(stack.admin_url + "/decisions?limit=1")
            assert found.json()["items"][0]["request_id"] == "mine-1"

    run(work)
