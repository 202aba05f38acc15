"""A simulated server over real HTTP: streams, clients that leave, load, and how it ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from loadtest.engine import ConfigError, EngineConfig, running_engine
from loadtest.service import ServiceCurve
from router.load import Role
from tests.engines import (
    Answer,
    ManualClock,
    ask,
    connection,
    exchange_bytes,
    looped,
    request,
    take_apart,
)
from tests.stack import until

CHAT = {"messages": [{"role": "user", "content": "hello there"}], "ignore_eos": True}
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 5000, "ignore_eos": True, "stream": True}


def text_of(answer: Answer) -> str:
    """The words of a stream."""
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for event in answer.events[:-1]
        for choice in event["choices"]
    )


def long(**more: Any) -> bytes:
    """A request for a stream that goes on for long."""
    return request("/v1/completions", LONG | more)


@looped
async def test_in_one_piece_and_streamed() -> None:
    """A prompt gets the same words in one piece and as a stream, and as many as asked for."""
    async with running_engine(EngineConfig.quick("speculative")) as engine:
        whole = (await ask(engine, "/v1/chat/completions", CHAT | {"max_tokens": 20})).json
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 20}
        stream = await ask(engine, "/v1/chat/completions", CHAT | options)
    content = whole["choices"][0]["message"]["content"]
    assert len(content.split()) == 20
    assert text_of(stream) == content
    assert whole["usage"] == stream.events[-2]["usage"]
    assert whole["usage"]["completion_tokens"] == 20


@looped
async def test_both_servers_say_the_same() -> None:
    """The servers of a pair answer a prompt alike, and another seed answers otherwise."""
    texts = []
    for role, seed in (("speculative", 0), ("baseline", 0), ("baseline", 1)):
        async with running_engine(EngineConfig.quick(role, seed=seed)) as engine:
            body = {"prompt": "which words?", "max_tokens": 500, "stream": True}
            texts.append(text_of(await ask(engine, "/v1/completions", body)))
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(("role", "pieces"), [("speculative", 11), ("baseline", 21)])
@looped
async def test_tokens_per_chunk(role: str, pieces: int) -> None:
    """A speculating server puts several tokens into a chunk: 21 are 1 and then 2 at a time."""
    async with running_engine(EngineConfig.quick(role)) as engine:
        body = {"prompt": "x", "max_tokens": 21, "ignore_eos": True, "stream": True}
        answer = await ask(engine, "/v1/completions", body)
    assert len(answer.events) - 1 == pieces


@looped
async def test_ends_by_itself() -> None:
    """Without `ignore_eos` an answer ends where the model stops, and says so."""
    async with running_engine(EngineConfig.quick(natural_tokens=(40, 50))) as engine:
        body = {"prompt": "x", "max_tokens": 2000}
        choice = (await ask(engine, "/v1/completions", body)).json
        cut = (await ask(engine, "/v1/completions", body | {"max_tokens": 10})).json
        least = (await ask(engine, "/v1/completions", body | {"min_tokens": 60})).json
    assert choice["choices"][0]["finish_reason"] == "stop"
    assert 40 <= choice["usage"]["completion_tokens"] <= 50
    assert cut["choices"][0]["finish_reason"] == "length"
    assert least["usage"]["completion_tokens"] == 60


@looped
async def test_usage_in_every_chunk() -> None:
    """With `continuous_usage_stats` each chunk of a completion says how many tokens there are."""
    async with running_engine(EngineConfig.quick("speculative")) as engine:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = LONG | {"max_tokens": 9, "stream_options": options}
        answer = await ask(engine, "/v1/completions", body)
    counts = [event["usage"]["completion_tokens"] for event in answer.events[:-1]]
    assert counts == [1, 3, 5, 7, 9, 9]


@looped
async def test_several_prompts_and_choices() -> None:
    """Two prompts with two choices each are four choices, and each prompt counts once."""
    async with running_engine(EngineConfig.quick()) as engine:
        body = {"prompt": [[1, 2, 3], [4]], "n": 2, "max_tokens": 5, "ignore_eos": True}
        answer = (await ask(engine, "/v1/completions", body)).json
        stream = await ask(engine, "/v1/completions", body | {"stream": True})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 20)
    last = [event["choices"][0] for event in stream.events[:-1]]
    assert sum(choice["finish_reason"] == "length" for choice in last) == 4


@looped
async def test_head_comes_with_the_first_chunk() -> None:
    """Not a byte of a stream is sent before its first token exists."""
    async with running_engine(EngineConfig.quick()) as engine:
        engine.core.pause()
        async with connection(engine, long()) as (reader, _):
            await until(lambda: engine.core.waiting == 1, what="queued")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.03)
            engine.core.resume()
            assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"


@looped
async def test_streaming_client_leaves() -> None:
    """A stream whose client is gone is aborted at once; the others go on."""
    async with running_engine(EngineConfig.quick()) as engine:
        async with connection(engine, long()) as (staying, _):
            await staying.readline()
            async with connection(engine, long()) as (reader, leave):
                await reader.readline()
                assert engine.in_flight == 2
                leave()
                await until(lambda: engine.core.running == 1, what="one left")
                assert (engine.aborted, engine.in_flight) == (1, 1)
        await until(lambda: engine.core.batch.idle, what="idle")
        assert engine.aborted == 2


@looped
async def test_queued_client_leaves() -> None:
    """A stream that still waits is dropped from the queue when its client leaves."""
    config = EngineConfig.quick(max_running_requests=1)
    async with running_engine(config) as engine, connection(engine, long()):
        await until(lambda: engine.core.running == 1, what="running")
        async with connection(engine, long()) as (_, leave):
            await until(lambda: engine.core.waiting == 1, what="waiting")
            leave()
            await until(lambda: engine.core.waiting == 0, what="left the queue")
            assert engine.core.running == 1


@looped
async def test_other_client_leaves() -> None:
    """A request that does not stream runs on until the next look for its client, every 4 s."""
    clock = ManualClock()
    curve = ServiceCurve(label="slow", source="made up", points=((1, 60.0),))
    async with running_engine(EngineConfig(curve=curve), clock=clock) as engine:
        async with connection(engine, long(stream=False)):
            await until(lambda: engine.core.running == 1, what="running")
            clock.advance(1.0)
        await until(lambda: engine.connections == 0, what="the server saw it leave")
        clock.advance(2.9)
        await asyncio.sleep(0.01)
        assert engine.aborted == 0
        clock.advance(0.2)
        await until(lambda: engine.aborted == 1, what="aborted")


@looped
async def test_cap() -> None:
    """More than the cap wait, and their first token comes when a place is free."""
    async with running_engine(EngineConfig.quick(max_running_requests=2)) as engine:
        asked = [
            asyncio.ensure_future(ask(engine, "/v1/completions", LONG | {"max_tokens": 100}))
            for _ in range(5)
        ]
        await until(lambda: engine.core.waiting == 3, what="three wait")
        assert engine.core.running == 2
        answers = await asyncio.gather(*asked)
    assert [answer.events[-1] for answer in answers] == ["[DONE]"] * 5


@pytest.mark.parametrize(("role", "cap"), [("speculative", 48), ("baseline", 4096)])
def test_default_cap(role: str, cap: int) -> None:
    """A server that speculates runs 48 requests at most if it is told nothing, as SGLang."""
    assert EngineConfig(role=Role(role)).cap == cap


@looped
async def test_abort_by_id() -> None:
    """An order to abort ends all requests whose id starts so, with that reason and `[DONE]`."""
    async with running_engine(EngineConfig.quick()) as engine:
        asked = [
            asyncio.ensure_future(ask(engine, "/v1/completions", LONG | {"rid": rid}))
            for rid in ("job-1", "job-2", "else")
        ]
        await until(lambda: engine.core.running == 3, what="running")
        for nothing in ({"rid": ""}, {"rid": "nobody"}, b"{"):
            assert (await ask(engine, "/abort_request", nothing)).status == "HTTP/1.1 200 OK"
        await ask(engine, "/abort_request", {"rid": "job"})
        ended = await asyncio.gather(*asked[:2])
        assert [answer.events[-1] for answer in ended] == ["[DONE]"] * 2
        assert {answer.events[-2]["choices"][0]["finish_reason"] for answer in ended} == {"abort"}
        assert not asked[2].done()
        await ask(engine, "/abort_request", {"abort_all": True})
        assert (await asked[2]).events[-1] == "[DONE]"


@looped
async def test_same_id_twice() -> None:
    """A request id that is in use is refused."""
    config = EngineConfig.quick()
    async with running_engine(config) as engine, connection(engine, long(rid="mine")):
        await until(lambda: engine.core.running == 1, what="running")
        answer = await ask(engine, "/v1/completions", LONG | {"rid": "mine"})
    assert answer.status == "HTTP/1.1 400 Bad Request"
    assert "Duplicate request ID" in answer.json["message"]


@looped
async def test_what_was_seen() -> None:
    """The server remembers what it received: path, query, headers and the body's bytes."""
    async with running_engine(EngineConfig.quick()) as engine:
        raw = b'{"prompt":"x",  "max_tokens":1}'
        await ask(engine, "/v1/completions?a=b", raw, headers="X-Thing: Some\r\n")
        await ask(engine, "/v1/models")
        seen = engine.seen[0]
        assert (seen.method, seen.path, seen.query) == ("POST", "/v1/completions", "a=b")
        assert (seen.headers["x-thing"], seen.body) == ("Some", raw)
        assert (b"x-thing", b"Some") in seen.raw_headers
        assert [one.path for one in engine.seen] == ["/v1/completions", "/v1/models"]


@looped
async def test_connection_is_kept() -> None:
    """Several requests go through one connection."""
    async with (
        running_engine(EngineConfig.quick()) as engine,
        httpx.AsyncClient(base_url=engine.url) as client,
    ):
        for _ in range(3):
            body = {"prompt": "x", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert engine.connections == 1
        assert engine.in_flight == 0


@looped
async def test_idle_report_is_fresh() -> None:
    """An idle server's report is of this moment, with nobody in it."""
    clock = ManualClock()
    async with running_engine(EngineConfig(), clock=clock) as engine:
        first = (await ask(engine, "/v1/loads?include=core")).json["loads"][0]
        clock.advance(100)
        later = (await ask(engine, "/v1/loads?include=core")).json["loads"][0]
    assert later["timestamp"] - first["timestamp"] == pytest.approx(100)
    assert (later["num_running_reqs"], "memory" in later) == (0, False)


@looped
async def test_loads_sections() -> None:
    """Sections come as asked for; a name that is none is a 400."""
    async with running_engine(EngineConfig.quick("speculative")) as engine:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        before = (await ask(engine, "/v1/loads?include=spec")).json["loads"][0]
        await ask(engine, "/v1/completions", body)
        after = (await ask(engine, "/v1/loads?include=core,spec")).json["loads"][0]
        wrong = await ask(engine, "/v1/loads?include=core,spectral")
    assert "speculative" not in before
    assert after["speculative"]["accept_length"] == pytest.approx(2, abs=0.05)
    assert wrong.status == "HTTP/1.1 400 Bad Request"
    assert "spectral" in wrong.json["detail"]


@pytest.mark.parametrize(
    ("version", "ready", "get_load"), [("0.5.17", 404, 200), ("0.5.23", 200, 404)]
)
@looped
async def test_versions(version: str, ready: int, get_load: int) -> None:
    """A newer server has `/ready`, has lost `/get_load`, and says more in `/v1/loads`."""
    async with (
        running_engine(EngineConfig.quick(version=version)) as engine,
        httpx.AsyncClient(base_url=engine.url) as client,
    ):
        assert (await client.get("/ready")).status_code == ready
        assert (await client.get("/get_load")).status_code == get_load
        loads = (await client.get("/v1/loads")).json()
        info = (await client.get("/server_info")).json()
    assert loads["version"] == info["version"] == version
    assert ("num_prealloc_ready_tokens" in loads["loads"][0]) == (version == "0.5.23")
    assert ("launch_command" in info) == (version == "0.5.23")


@looped
async def test_server_info_tells_secrets() -> None:
    """`/server_info` gives the key away, as the real one does; a router must not pass it on."""
    async with running_engine(EngineConfig.quick(api_key="sk-secret")) as engine:
        answer = await ask(engine, "/server_info", headers="Authorization: Bearer sk-secret\r\n")
    assert answer.json["api_key"] == "sk-secret"
    assert answer.json["internal_states"][0]["api_key"] == "sk-secret"


@looped
async def test_health_takes_its_time() -> None:
    """`/health` answers after its delay and not before."""
    clock = ManualClock()
    async with running_engine(EngineConfig(), clock=clock) as engine:
        asked = asyncio.ensure_future(ask(engine, "/health"))
        await until(lambda: len(engine.seen) == 1, what="received")
        clock.advance(0.9)
        await asyncio.sleep(0.01)
        assert not asked.done()
        clock.advance(0.2)
        assert (await asked).status == "HTTP/1.1 200 OK"


@looped
async def test_terminate() -> None:
    """After SIGTERM health is 503 at once, new work is still taken, and the end waits for it."""
    clock = ManualClock()
    async with running_engine(EngineConfig(version="0.5.23"), clock=clock) as engine:
        async with connection(engine, long()):
            await until(lambda: engine.in_flight == 1, what="in flight")
            engine.terminate()
            engine.terminate()
            for path in ("/health", "/ready", "/ping"):
                assert (await ask(engine, path)).status == "HTTP/1.1 503 Service Unavailable"
            async with connection(engine, long()):
                await until(lambda: engine.in_flight == 2, what="taken")
                clock.advance(5)
                await asyncio.sleep(0.01)
                assert not engine.stopped.is_set()
        await until(lambda: engine.in_flight == 0, what="all gone")
        assert not engine.stopped.is_set()
        clock.advance(5)
        await asyncio.wait_for(engine.stopped.wait(), 5)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", engine.port)


@looped
async def test_terminate_lets_streams_end() -> None:
    """A stream that runs when SIGTERM comes ends with `[DONE]`."""
    async with running_engine(EngineConfig.quick()) as engine:
        asked = asyncio.ensure_future(ask(engine, "/v1/completions", LONG | {"max_tokens": 60}))
        await until(lambda: engine.core.running == 1, what="running")
        engine.terminate()
        answer = await asked
        await engine.stopped.wait()
    assert answer.complete
    assert answer.events[-1] == "[DONE]"


@looped
async def test_kill() -> None:
    """SIGKILL cuts a stream without its end, and one in one piece without a byte."""
    async with running_engine(EngineConfig.quick()) as engine:
        stream = asyncio.ensure_future(exchange_bytes(engine, request("/v1/completions", LONG)))
        body = LONG | {"stream": False}
        whole = asyncio.ensure_future(exchange_bytes(engine, request("/v1/completions", body)))
        await until(lambda: engine.core.running == 2, what="running")
        await until(lambda: engine.core.batch.decode_steps > 3, what="some tokens")
        engine.kill()
        cut = take_apart(await stream)
        assert await whole == b""
        assert engine.stopped.is_set()
    assert cut.status == "HTTP/1.1 200 OK"
    assert not cut.complete
    assert cut.events[-1] != "[DONE]"


@looped
async def test_bad_token_without_death() -> None:
    """Told not to die, the server closes only the connection that brought the bad token."""
    async with running_engine(EngineConfig.quick(die_on_bad_token=False)) as engine:
        raw = request("/v1/completions", {"prompt": [128_256], "max_tokens": 1})
        assert await exchange_bytes(engine, raw) == b""
        assert (await ask(engine, "/v1/models")).status == "HTTP/1.1 200 OK"
        assert not engine.stopped.is_set()


@looped
async def test_slow_reader_gets_larger_chunks() -> None:
    """A client that reads slowly loses nothing: what piled up comes in fewer chunks."""
    async with running_engine(EngineConfig.quick(time_scale=0.01)) as engine:
        body = LONG | {"max_tokens": 4000, "model": "m" * 20_000}
        async with connection(engine, request("/v1/completions", body)) as (reader, _):
            await until(lambda: engine.core.finished == 1, what="all made")
            answer = take_apart(await reader.read())
    assert answer.events[-1] == "[DONE]"
    assert len(text_of(answer).split()) == 4000
    assert len(answer.events) < 4000


@looped
async def test_metrics_can_be_off() -> None:
    """Without metrics there is no page, and throughput in `/v1/loads` stays 0."""
    async with running_engine(EngineConfig.quick(metrics=False)) as engine:
        assert (await ask(engine, "/metrics")).status == "HTTP/1.1 404 Not Found"


@looped
async def test_flush_cache_under_load() -> None:
    """The cache is not flushed while somebody runs."""
    async with running_engine(EngineConfig.quick()) as engine, connection(engine, long()):
        await until(lambda: engine.core.running == 1, what="running")
        assert (await ask(engine, "/flush_cache", {})).status == "HTTP/1.1 400 Bad Request"


@looped
async def test_failing() -> None:
    """Told to fail, the server answers 500 to whatever generates, and to nothing else."""
    async with running_engine(EngineConfig.quick()) as engine:
        engine.failing = True
        answer = await ask(engine, "/v1/completions", LONG)
        assert answer.status == "HTTP/1.1 500 Internal Server Error"
        assert answer.json["type"] == "InternalServerError"
        assert (await ask(engine, "/v1/models")).status == "HTTP/1.1 200 OK"
        engine.failing = False
        assert not engine.failing
        body = {"prompt": "x", "max_tokens": 1}
        assert (await ask(engine, "/v1/completions", body)).status == "HTTP/1.1 200 OK"


@looped
async def test_cut() -> None:
    """A cut ends the connections that are open, and the server goes on."""
    async with running_engine(EngineConfig.quick()) as engine:
        stream = asyncio.ensure_future(exchange_bytes(engine, long()))
        await until(lambda: engine.core.batch.decode_steps > 3, what="some tokens")
        engine.cut()
        assert not take_apart(await stream).complete
        await until(lambda: engine.in_flight == 0, what="aborted")
        assert (await ask(engine, "/v1/models")).status == "HTTP/1.1 200 OK"


@looped
async def test_client_leaves_during_its_upload() -> None:
    """A request whose body never came whole is not served."""
    async with running_engine(EngineConfig.quick()) as engine:
        async with connection(engine, long()[:-5]):
            await until(lambda: engine.connections == 1, what="connected")
        await until(lambda: engine.connections == 0, what="gone")
        assert (engine.seen, engine.in_flight) == ([], 0)


@looped
async def test_idle_connections_close() -> None:
    """A connection that nobody uses is closed after its time."""
    async with running_engine(EngineConfig.quick(keep_alive_s=0.01)) as engine:
        raw = request("/v1/models").replace(b"connection: close\r\n", b"")
        answer = take_apart(await exchange_bytes(engine, raw))
        assert answer.json["object"] == "list"
        assert engine.connections == 0


@looped
async def test_two_engines_in_one_process() -> None:
    """Two servers run side by side, each with its own load."""
    async with (
        running_engine(EngineConfig.quick("speculative")) as one,
        running_engine(EngineConfig.quick("baseline")) as two,
    ):
        assert one.url != two.url
        async with connection(one, long()):
            await until(lambda: one.core.running == 1, what="running")
            assert two.core.running == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time_scale": 0.0}, "--time-scale must be above 0, got 0.0"),
        ({"max_running_requests": 0}, "--max-running-requests must be 1 or more"),
        ({"max_queued_requests": -1}, "--max-queued-requests must be 0 or more"),
        (
            {"version": "0.4"},
            r"--sglang-version must be 0\.5\.17 or 0\.5\.23 or 0\.5\.12, got 0\.4",
        ),
        ({"context_length": 1}, "--context-length must be 2 or more"),
        ({"max_total_tokens": 10}, "--max-total-tokens must be at least the context length"),
        ({"accept_length": 0.5}, "--accept-length must be 1 or more"),
    ],
)
def test_config(settings: dict[str, Any], message: str) -> None:
    """A setting that cannot work is refused by its name, with what would do."""
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_all_problems_at_once() -> None:
    """Several bad settings are named together."""
    with pytest.raises(ConfigError, match=r"time-scale.*; .*context-length"):
        EngineConfig(time_scale=-1, context_length=0)


def test_baseline_does_not_accept() -> None:
    """A baseline has no accept length."""
    with pytest.raises(ConfigError, match="one token per step"):
        _ = EngineConfig(role=Role.BASELINE, accept_length=2.0).service


@looped
async def test_json_is_compact() -> None:
    """Bodies are written as the real server writes them, without spaces."""
    async with running_engine(EngineConfig.quick()) as engine:
        answer = await ask(engine, "/v1/models")
    assert answer.body == json.dumps(answer.json, separators=(",", ":")).encode()
