"""The simulated server's prefix cache: what it holds, what it spares, and what it says of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.batching import ContinuousBatch, Kind
from loadtest.curve_files import shipped_curve
from loadtest.engine import running_engine
from loadtest.engine_config import EngineConfig
from loadtest.engine_messages import message_tokens
from loadtest.engine_prefix import BLOCK, PrefixCache, prompt_words, with_answer
from router.load import Role
from tests.engines import looped

WORDS = st.lists(st.sampled_from("ab"), max_size=60)
LONG = "Tell me a long story of two servers and a router between them. " * 5


@given(st.lists(WORDS, max_size=8), WORDS)
def test_a_hit_is_the_longest_common_beginning(kept: list[list[str]], asked: list[str]) -> None:
    """In whole blocks, and never the last token of the prompt."""
    cache = PrefixCache(1_000_000)
    for words in kept:
        cache.keep(words)
    common = 0
    for words in kept:
        same = 0
        while same < min(len(words), len(asked)) and words[same] == asked[same]:
            same += 1
        common = max(common, same // BLOCK * BLOCK)
    assert cache.hit(asked) == max(0, min(common, len(asked) - 1))


def test_what_was_used_least_recently_goes_out() -> None:
    """The cache holds no more than it may, and a hit counts as a use."""
    cache = PrefixCache(3 * BLOCK)
    one, other = ["x"] * BLOCK, ["y"] * BLOCK
    cache.keep(one)
    cache.keep(other)
    assert len(cache) == 2 * BLOCK
    assert cache.hit([*one, "?"]) == BLOCK
    cache.keep(["z"] * 2 * BLOCK)
    assert len(cache) == 3 * BLOCK
    assert (cache.hit([*one, "?"]), cache.hit([*other, "?"])) == (BLOCK, 0)
    cache.flush()
    assert (len(cache), cache.hit([*one, "?"])) == (0, 0)


def test_a_prompt_has_as_many_words_as_tokens() -> None:
    """Chat prompts are counted with their template, and the next turn begins with turn and answer."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Why is that so?"}]},
    ]
    words = prompt_words(json.dumps({"messages": messages}).encode())
    assert words is not None
    assert len(words) == message_tokens(messages)
    later = [*messages, {"role": "assistant", "content": "So be it"}]
    assert prompt_words(json.dumps({"messages": later}).encode()) == with_answer(
        words, " So be it", chat=True
    )
    assert prompt_words(b'{"prompt":"once upon a time"}') == ["once", "upon", "a", "time"]
    assert with_answer(["once"], " upon a time", chat=False) == ["once", "upon", "a", "time"]
    assert prompt_words(b'{"messages":[{"role":"user","content":7}]}') is not None
    assert prompt_words(b'{"prompt":["a","b"]}') is None


def test_cached_tokens_cost_no_prefill() -> None:
    """A batch takes the time of what is fresh, and counts only that as prefilled."""
    curve = shipped_curve("planted-12", Role.BASELINE)
    seconds = []
    for cached in (0, 900):
        batch = ContinuousBatch(curve, max_running=4)
        assert batch.submit(1000, 10, cached) is not None
        step = batch.begin()
        assert step is not None
        assert (step.kind, step.prompt_tokens) == (Kind.PREFILL, 1000 - cached)
        seconds.append(step.seconds)
        batch.finish()
        assert batch.counters().prompt_tokens == 1000 - cached
    assert seconds[0] - seconds[1] == pytest.approx(
        curve.prefill_s(1, 1000) - curve.prefill_s(1, 100)
    )
    assert seconds[0] > seconds[1]


@looped
async def test_the_next_turn_is_a_hit_and_says_so() -> None:
    """usage, meta_info and the metrics tell of it as SGLang's do with --enable-cache-report."""
    config = EngineConfig.quick(Role.BASELINE, prefix_cache=True)
    async with running_engine(config) as engine, httpx.AsyncClient(base_url=engine.url) as client:
        messages = [{"role": "user", "content": LONG}]
        first = await said(client, messages)
        assert first["usage"]["prompt_tokens_details"] is None
        answer = first["choices"][0]["message"]
        messages += [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": "And then?"},
        ]
        before = first["usage"]["prompt_tokens"] + 7 + first["usage"]["completion_tokens"]
        second = await said(client, messages)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert before - BLOCK < cached <= before
        page = (await client.get("/metrics")).text
        assert 'sglang:cached_tokens_total{cache_source="device",' in page
        assert f"}} {float(cached)}" in page
        streamed = await client.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": messages, "max_tokens": 4, "stream": True,
                  "stream_options": {"include_usage": True}},
        )  # fmt: skip
        told = json.loads(streamed.text.split("data: ")[-2])["usage"]["prompt_tokens_details"]
        assert told["cached_tokens"] >= cached
        text = {"text": LONG, "sampling_params": {"max_new_tokens": 4}}
        native = [(await client.post("/generate", json=text)).json() for _ in range(2)]
        counts = [each["meta_info"]["cached_tokens"] for each in native]
        assert (counts[0], counts[1] >= 56) == (0, True)
        assert (await client.get("/server_info")).json()["enable_cache_report"] is True
        await client.post("/flush_cache")
        assert (await said(client, messages))["usage"]["prompt_tokens_details"] is None


@looped
async def test_without_the_flag_nothing_is_cached() -> None:
    """By default every prompt is prefilled, and no number tells of a cache."""
    config = EngineConfig.quick(Role.BASELINE)
    async with running_engine(config) as engine, httpx.AsyncClient(base_url=engine.url) as client:
        for _ in range(2):
            answer = await said(client, [{"role": "user", "content": LONG}])
            assert answer["usage"]["prompt_tokens_details"] is None
        assert "cached_tokens_total" not in (await client.get("/metrics")).text
        assert (await client.get("/server_info")).json()["enable_cache_report"] is False


async def said(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, "max_tokens": 24, "ignore_eos": True}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found
