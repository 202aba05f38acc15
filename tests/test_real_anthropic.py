"""The official `anthropic` client on /v1/messages, through the router, with keys."""

from __future__ import annotations

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.stack import run
from tests.test_real_openai import pair


def test_messages_work_streaming_and_not_with_x_api_key() -> None:
    """The client's x-api-key is accepted, and both forms of a message come through."""

    async def work() -> None:
        async with (
            pair(api_keys="sk-anthropic") as stack,
            AsyncAnthropic(base_url=stack.url, api_key="sk-anthropic", max_retries=0) as client,
        ):
            message = await client.messages.create(
                model="m", max_tokens=8, messages=[{"role": "user", "content": "hello"}]
            )
            assert message.content[0].type == "text"
            assert message.usage.output_tokens > 0
            async with client.messages.stream(
                model="m", max_tokens=8, messages=[{"role": "user", "content": "hello"}]
            ) as stream:
                final = await stream.get_final_message()
            assert final.usage.output_tokens > 0

    run(work)


def test_a_wrong_key_is_the_clients_own_exception() -> None:
    """A key that is not configured is an AuthenticationError."""

    async def work() -> None:
        async with (
            pair(api_keys="sk-anthropic") as stack,
            AsyncAnthropic(base_url=stack.url, api_key="sk-other", max_retries=0) as client,
        ):
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(
                    model="m", max_tokens=8, messages=[{"role": "user", "content": "hello"}]
                )

    run(work)
