"""The simulated server against captured bytes of real ones: the same requests, field by field."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.curve_files import shipped_curve
from loadtest.engine import EngineConfig, RunningEngine, running_engine
from router.load import Role
from tests.engines import Answer, ask, exchange_bytes, looped, request, take_apart
from tests.stack import until

CAPTURES = Path(__file__).parent / "data" / "sglang-0.5.17"

# Everything that is not compared by value. Of all but the last two the JSON type still is.
LEFT_OUT = {
    "id": "made up for every request",
    "created": "the time of the answer",
    "timestamp": "the time of a snapshot, or of another clock (ts_tic)",
    "text": "a random model's words: content, text, their ids and bytes",
    "logprob": "what that model thought of them",
    "text prompt tokens": "the simulated tokenizer counts words: prompt_tokens and total_tokens",
    "load so far": "work done before, and the pace and fill of the moment",
    "meta times": "durations, moments and draft counts of a native answer",
    "date": "a header",
    "pieces": "into how many chunks a speculating server cuts the same tokens",
}
FIELDS = {
    "id": {"id"},
    "created": {"created"},
    "timestamp": {"timestamp", "ts_tic"},
    "text": {"content", "text", "output_ids", "token", "bytes"},
    "logprob": {"logprob"},
    "load so far": {
        *{"total_prefill_uncached_tokens", "total_prefill_busy_us", "decode_moments"},
        *{"gen_throughput", "num_used_tokens", "num_total_tokens", "num_active_tokens"},
        *{"num_tokens", "token_usage", "accept_length", "accept_rate", "weight_gb"},
        *{"kv_cache_gb", "graph_gb", "num_waiting_uncached_tokens"},
    },
    "meta times": {
        *{"forward_entry_time", "prefill_finished_time", "queue_time", "e2e_latency"},
        *{
            "cached_tokens",
            "device",
            "spec_accept_rate",
            "spec_accept_length",
        },
        *{"spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_verify_ct"},
        *{"spec_accepted_drafts", "spec_proposed_drafts", "spec_correct_drafts_histogram"},
        *{"spec_accept_histogram", "request_received_ts", "api_server_dispatch_finish_ts"},
        *{"request_finished_ts", "decode_throughput", "response_sent_to_client_ts"},
    },
}
TYPE_ONLY = frozenset[str]().union(*FIELDS.values())

SERVERS = {
    "base": EngineConfig.quick(Role.BASELINE, max_running_requests=256),
    "k1": EngineConfig.quick(
        Role.SPECULATIVE,
        curve=shipped_curve("h200-topk4", Role.SPECULATIVE),
        accept_length=2.8,
        max_running_requests=256,
    ),
    "mini": EngineConfig.quick(
        Role.BASELINE,
        max_running_requests=2,
        max_queued_requests=2,
        max_total_tokens=16384,
        api_key="sk-test-local",
    ),
}
# Requests that were too large to keep, and what they were.
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "err_too_long": ("/v1/completions", {"prompt": [1000] * 9000, "max_tokens": 24}),
    "err_too_long_stream": (
        "/v1/completions",
        {"prompt": [1000] * 9000, "max_tokens": 24, "stream": True},
    ),
    "err_sum_too_long": ("/v1/completions", {"prompt": [1000] * 8000, "max_tokens": 1000}),
    "err_too_long_chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "the " * 9000}], "max_tokens": 24},
    ),
    "err_too_long_chat_stream": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "the " * 9000}], "stream": True},
    ),
}
CRASH = "err_prompt_ids_out_of_vocab_CRASHES_SERVER"


def names(server: str, *, loaded: bool) -> list[str]:
    found = sorted(
        path.name.removesuffix(".resp.http") for path in (CAPTURES / server).glob("*.resp.http")
    )
    return [name for name in found if name.startswith("load_") is loaded and name != CRASH]


def captured(server: str, name: str) -> Answer:
    return take_apart((CAPTURES / server / f"{name}.resp.http").read_bytes())


def sent(server: str, name: str) -> bytes:
    if name in LARGE:
        path, body = LARGE[name]
        return request(path, body)
    return (CAPTURES / server / f"{name}.req.http").read_bytes()


def comparable(value: Any, *, counts: bool, name: str = "") -> Any:
    """A JSON value with its keys in order, and only the types of what is left out."""
    if isinstance(value, dict):
        return [(key, comparable(item, counts=counts, name=key)) for key, item in value.items()]
    if name in TYPE_ONLY or (name in {"prompt_tokens", "total_tokens"} and not counts):
        return kind(value)
    if isinstance(value, list):
        return [comparable(item, counts=counts, name=name) for item in value]
    return value


def kind(value: Any) -> str:
    """The JSON type; of a list that of its items, since how many there are is left out with it."""
    if isinstance(value, list):
        return f"list of {sorted({kind(item) for item in value})}"
    if isinstance(value, bool | str) or value is None:
        return type(value).__name__
    return "number"


def counts_are_known(raw: bytes) -> bool:
    """Whether prompt tokens are what the request says: then it gave ids, or the text was one word."""
    body = raw.partition(b"\r\n\r\n")[2]
    try:
        prompt = json.loads(body)["prompt"]
    except (ValueError, KeyError, TypeError):
        return b"messages" in body  # the captured chat's words cost a token each
    return prompt == "the" or not isinstance(prompt, str)


def stream_shape(answer: Answer, *, counts: bool, pieces: bool) -> list[Any]:
    """A stream's chunks, one event each, in their order.

    Choices are numbered as they first appear (real servers differ in who comes first), and where
    the number of pieces is left out, neighbours that differ in nothing else are one.
    """
    order: dict[int, int] = {}
    shape: list[Any] = []
    for chunk in answer.chunks:
        assert chunk.startswith(b"data: "), chunk
        assert chunk.endswith(b"\n\n"), chunk
        assert chunk.count(b"data: ") == 1, chunk
        text = chunk[6:-2].decode()
        event = text if text == "[DONE]" else json.loads(text)
        if isinstance(event, dict) and "choices" in event:
            for choice in event["choices"]:
                number = order.setdefault(choice["index"], len(order))
                choice["index"] = number
        one = comparable(event, counts=counts)
        if not pieces:
            one = json.loads(
                re.sub(r'(\["(?:completion|total)_tokens", )\d+', r"\g<1>0", json.dumps(one))
            )
        if pieces or shape[-1:] != [one]:
            shape.append(one)
    return shape


def headers_shape(answer: Answer) -> dict[str, str]:
    left = {"date"} | ({"content-length"} if answer.body else set())
    return {name: value for name, value in answer.headers.items() if name not in left}


def assert_same(real: Answer, ours: Answer, raw: bytes, *, speculative: bool) -> None:
    """Both answers say the same, but for what is left out."""
    counts = counts_are_known(raw)
    assert ours.status == real.status
    assert headers_shape(ours) == headers_shape(real)
    assert ours.complete
    if real.chunks:
        shapes = [
            stream_shape(answer, counts=counts, pieces=not speculative) for answer in (real, ours)
        ]
        assert shapes[1] == shapes[0]
    elif real.headers.get("content-type") == "application/json" and real.body:
        assert comparable(ours.json, counts=counts) == comparable(real.json, counts=counts)
    elif "text/plain; version" in real.headers.get("content-type", ""):
        assert names_of(ours.body) == names_of(real.body)
    else:
        assert ours.body == real.body


def names_of(page: bytes) -> list[str]:
    """What a page in the text format is made of, without the values."""
    return [
        line if line.startswith("#") else line.rsplit(" ", 1)[0]
        for line in page.decode().splitlines()
    ]


async def same(engine: RunningEngine, server: str, name: str) -> None:
    raw = sent(server, name)
    ours = take_apart(await exchange_bytes(engine, raw), head=raw.startswith(b"HEAD"))
    assert_same(captured(server, name), ours, raw, speculative=server == "k1")


def test_left_out_is_short() -> None:
    """At most ten things are left out, and usage, finish reasons and errors are not among them."""
    assert len(LEFT_OUT) <= 10
    assert set(FIELDS) <= set(LEFT_OUT)
    assert not TYPE_ONLY & {"completion_tokens", "finish_reason", "error", "message", "code"}
    assert not TYPE_ONLY & {"status", "object", "type", "role", "num_running_reqs"}


@pytest.mark.parametrize("server", ["base", "k1"])
@pytest.mark.parametrize("name", names("base", loaded=False))
@looped
async def test_idle(server: str, name: str) -> None:
    """An idle server answers this captured request as the real one did."""
    async with running_engine(SERVERS[server]) as engine:
        await same(engine, server, name)


@pytest.mark.parametrize("server", ["base", "k1"])
@looped
async def test_loaded(server: str) -> None:
    """With 32 requests running a server tells of them as the real one did."""
    config = SERVERS[server]
    async with running_engine(config) as engine:
        body = {"prompt": [1] * 64, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        load = [
            asyncio.ensure_future(exchange_bytes(engine, request("/v1/completions", body)))
            for _ in range(32)
        ]
        await until(lambda: engine.core.load().running == 32, what="32 are published")
        await until(lambda: engine.core.pace.verify_calls > 0, what="the first decode log")
        for name in names(server, loaded=True):
            await same(engine, server, name)
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)


@looped
async def test_full() -> None:
    """Two run and two wait; what comes then is refused as by the real server, in both ways."""
    async with running_engine(SERVERS["mini"]) as engine:
        filler = (CAPTURES / "mini" / "queue_4.req.http").read_bytes()
        load = [asyncio.ensure_future(exchange_bytes(engine, filler)) for _ in range(4)]
        await until(
            lambda: engine.core.load().running + engine.core.load().waiting == 4, what="full"
        )
        for name in ("queue_4", "queue_full_chat", "queue_full_stream", "queue_health"):
            await same(engine, "mini", name)
        await until(lambda: engine.core.pace.verify_calls > 0, what="the first decode log")
        await same(engine, "mini", "queue_loads")
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)


@pytest.mark.parametrize(
    "name", [name for name in names("mini", loaded=False) if name.startswith("auth")]
)
@looped
async def test_key(name: str) -> None:
    """A server with a key opens and refuses as the real one."""
    async with running_engine(SERVERS["mini"]) as engine:
        await same(engine, "mini", name)


@looped
async def test_crash() -> None:
    """A token id outside the vocabulary closes the connection with no byte, and all others."""
    async with running_engine(SERVERS["k1"]) as engine:
        raw = sent("k1", CRASH)
        assert (CAPTURES / "k1" / f"{CRASH}.resp.http").read_bytes() == b""
        assert await exchange_bytes(engine, raw) == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", engine.port)


@pytest.mark.parametrize("server", ["base", "k1"])
@looped
async def test_server_info(server: str) -> None:
    """`/server_info` has the keys that matter, with values of the same type, after some use."""
    real = json.loads((CAPTURES / server / "load_server_info.trimmed.json").read_text())
    async with running_engine(SERVERS[server]) as engine:
        body = {"prompt": [1], "max_tokens": 200, "ignore_eos": True}
        await ask(engine, "/v1/completions", body)
        ours = (await ask(engine, "/server_info")).json
    internal, real_internal = ours["internal_states"][0], real.pop("internal_states")[0]
    for mine, theirs in ((ours, real), (internal, real_internal)):
        assert {key: kind(mine[key]) for key in theirs} == {k: kind(v) for k, v in theirs.items()}
    for key in ("speculative_algorithm", "speculative_eagle_topk", "disable_overlap_schedule"):
        assert ours[key] == real[key] == internal[key]


@pytest.mark.parametrize("server", ["base", "k1"])
@looped
async def test_metrics(server: str) -> None:
    """Every metric has the name, type, help, labels and buckets of the real page."""
    real = samples((CAPTURES / server / "load_metrics.trimmed.txt").read_text())
    async with running_engine(SERVERS[server]) as engine:
        for stream in (False, True):
            body = {"prompt": [1], "max_tokens": 100, "ignore_eos": True, "stream": stream}
            await ask(engine, "/v1/completions", body)
        page = await ask(engine, "/metrics")
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    ours = samples(page.body.decode())
    assert ours == real


def samples(page: str) -> dict[str, Any]:
    """Head lines as they are, and for each sample's name its label names and its buckets."""
    found: dict[str, Any] = {}
    for line in page.splitlines():
        if line.startswith("#"):
            found[line] = True
            continue
        name, _, labels = line.partition("{")
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        entry = found.setdefault(name, (sorted(pairs), set()))
        if "le" in pairs:
            entry[1].add(pairs["le"])
    return found
