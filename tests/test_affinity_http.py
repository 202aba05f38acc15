"""Over HTTP: a conversation stays on the server that has its prefix, and is a hit there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from loadtest.engine import RunningEngine, running_engine
from loadtest.engine_config import EngineConfig
from router.load import Role
from tests.stack import Stack, run, running_router, until

OPENING = "Tell me a long story of two servers and a router between them. " * 20


@contextlib.asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[Stack]:
    """A router before two simulated servers that keep prefixes; a line of 4 for the speculative one."""
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[Role, RunningEngine] = {}
        for role in Role:
            config = EngineConfig.quick(role, prefix_cache=True)
            engines[role] = await stack.enter_async_context(running_engine(config))
        yield await stack.enter_async_context(
            running_router(
                engines[Role.SPECULATIVE].url,
                engines[Role.BASELINE].url,
                **{"threshold": 4, "scope": "speculative", "band": 0, "dwell": 0} | settings,
            )
        )


async def busy(stack: Stack, seconds: asyncio.Event) -> None:
    """One long stream, until it is told to end."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True,
            "max_tokens": 7000, "ignore_eos": True}  # fmt: skip
    async with stack.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        await seconds.wait()


async def two_turns(stack: Stack) -> list[tuple[str, str, int]]:
    """A turn while the speculative server is at its line, and one when it is below; where they went."""
    ends = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(busy(stack, end)) for end in ends]
    await until(lambda: stack.in_flight() == (4, 0))
    messages = [{"role": "user", "content": OPENING}]
    first = await asked(stack, messages)
    for end in ends[:2]:
        end.set()
    await until(lambda: stack.in_flight() == (2, 0))
    content = first.json()["choices"][0]["message"]["content"]
    messages += [
        {"role": "assistant", "content": content},
        {"role": "user", "content": "And then?"},
    ]
    second = await asked(stack, messages)
    for end in ends[2:]:
        end.set()
    await asyncio.gather(*tasks)
    return [told(first), told(second)]


async def asked(stack: Stack, messages: list[dict[str, str]]) -> httpx.Response:
    answer = await stack.chat(messages=messages, max_tokens=16, ignore_eos=True)
    assert answer.status_code == 200
    return answer


def told(answer: httpx.Response) -> tuple[str, str, int]:
    details = answer.json()["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
    headers = answer.headers
    return headers["x-crossover-backend"], headers["x-crossover-reason"], details["cached_tokens"]


def test_a_conversation_stays_and_its_prefix_is_a_hit() -> None:
    """Headers, decisions, metrics and status all say that it stayed, and the server that it paid."""

    async def work() -> None:
        async with pair() as stack:
            first, second = await two_turns(stack)
            assert first == ("baseline", "at_threshold", 0)
            assert second[:2] == ("baseline", "prefix")
            assert second[2] > 240  # of about 290 tokens
            async with httpx.AsyncClient(base_url=stack.admin_url, trust_env=False) as admin:
                kept = (await admin.get("/decisions?reason=prefix")).json()["items"]
                assert [(each["backend"], each["n"]) for each in kept] == [("baseline", 2)]
                status = (await admin.get("/status")).json()["affinity"]
                # The four streams open alike: one conversation, whose every turn was a later one.
                assert (status["in_force"], status["lost"], status["kept"]) == (True, 0, 4)
                assert (status["conversations"], status["size"]) == (2, 16384)
                page = (await admin.get("/metrics")).text
            assert 'crossover_decisions_total{backend="baseline",reason="prefix"} 1.0' in page
            assert 'crossover_conversation_turns_total{prefix="kept"} 4.0' in page
            assert 'crossover_conversation_turns_total{prefix="lost"} 0.0' in page
            assert "crossover_conversations 2.0" in page
            assert OPENING[:20].encode() not in b"".join(stack.lines)

    run(work, 20.0)


@pytest.mark.parametrize(
    ("settings", "known"), [({"affinity": "off"}, None), ({"scope": "total"}, (False, 1))]
)
def test_it_moves_where_it_may_not_stay(
    settings: dict[str, Any], known: tuple[bool, int] | None
) -> None:
    """With affinity off, and on shared GPUs, the line alone decides, and the prefix is lost."""

    async def work() -> None:
        async with pair(**settings) as stack:
            first, second = await two_turns(stack)
            assert first == ("baseline", "at_threshold", 0)
            assert second == ("speculative", "below_threshold", 0)
            async with httpx.AsyncClient(base_url=stack.admin_url, trust_env=False) as admin:
                status = (await admin.get("/status")).json()["affinity"]
                page = (await admin.get("/metrics")).text
            if known is None:
                assert status is None
                assert "crossover_conversations" not in page
            else:
                assert (status["in_force"], status["lost"]) == known

    run(work, 20.0)
