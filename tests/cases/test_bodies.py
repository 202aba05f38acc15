"""Cases of body fidelity: what a client sends and an engine answers is nobody else's business."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.load import Role
from router.metrics import Rejection
from tests.cases.common import body, defaults, every, pair, says
from tests.cases.process import serving
from tests.raw_client import CHAT, COMPLETIONS, ask, chunked, post
from tests.scripted_backend import Call, answer_ok, response, scripted_backend
from tests.stack import run, until

MIB = 1024 * 1024


def test_B1_unknown_fields_and_odd_spelling_reach_the_engine() -> None:
    """Fields that nobody knows, in any order and with any white space, arrive byte for byte."""
    raw = (
        b'{ "stream" :%b,\t"return_token_ids": true,"chat_template_kwargs":{"a":{"b":[1,2.50,1e2]}},'
        b'"extra_body" : {"x":null},"user":"u","metadata":{"k":"\\u00e9"},"lora_path":"p",'
        b'"zz":1,"zz":2,"model":"m","messages":[ ],"prompt":"x","top_k":-1 ,"n":1,\n'
        b'"stream_options":{"include_usage":true,"new":0.10}  }\r\n'
    )

    async def work() -> None:
        async with pair() as both:
            for role, path, stream in every():
                sent = raw.replace(b"%b", b"true" if stream else b"false")
                chosen, _ = both.on(role, answer_ok)
                assert (await both.ask(sent, path)).status == 200
                assert [call.body for call in chosen.calls] == [sent]
                assert chosen.calls[0].path == path.encode()

    run(work, 10)


def padded(size: int, *, image: bool = False) -> bytes:
    """A request body of exactly so many bytes."""
    kind = (
        b'[{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}]'
        if image
        else b'"%b"'
    )
    frame = b'{"messages":[{"role":"user","content":' + kind + b"}]}"
    return frame % (b"A" * (size - len(frame) + 2))


def test_B4_no_hidden_limit_and_an_exact_one() -> None:
    """Bodies of 1.9 to 32 MB pass by default; a configured limit holds to the byte, said and counted."""

    async def work() -> None:
        assert defaults().max_body >= 32 * MIB
        async with pair() as both:
            for role, size in zip((*Role, *Role), (1.9, 2.1, 10, 32), strict=True):
                sent = padded(int(size * MIB), image=size == 2.1)
                chosen, _ = both.on(role, answer_ok)
                assert (await both.ask(sent)).status == 200
                assert chosen.calls[0].body == sent
        async with pair(max_body=100_000) as both:
            for role in Role:
                for size, status in ((100_000, 200), (100_001, 413)):
                    chosen, _ = both.on(role, answer_ok)
                    sent = padded(size)
                    framing = b"transfer-encoding: chunked"
                    cut = chunked(*(sent[at : at + 9000] for at in range(0, size, 9000)))
                    for raw in (post(sent), post(cut, framing=framing)):
                        reply = await ask(both.port, raw)
                        assert reply.status == status
                        assert status == 200 or reply.error["code"] == "body_too_large"
                    assert len(chosen.calls) == 2 * (status == 200)
            assert both.relay.metrics.rejections[Rejection("body_too_large")] == 4
            both.relay.access_log.flush()
            await until(lambda: b'"body_too_large"' in b"".join(both.stack.lines))

    run(work, 20)


TOOL = {"type": "function", "function": {"name": "f"}}
LENIENT: tuple[dict[str, Any], ...] = (
    {"tools": [TOOL]},
    {"messages": [{"role": "assistant", "content": None}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    {"stream": None},
    {"stream": "true"},
    {"stream": 1},
    {"n": 3},
    {"logprobs": True},
    {"logprobs": 5},
    {"prompt": "x"},
    {"prompt": ["x", "y"]},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1, 2], [3]]},
    {"max_tokens": None},
)


def test_B3_what_is_valid_is_for_the_engine_to_say() -> None:
    """Odd but possible fields are forwarded; a stream is what the engine answers as one."""

    async def work() -> None:
        async with pair() as both:
            for role in Role:
                for fields in LENIENT:
                    sent = {"model": "m", **fields}
                    chosen, _ = both.on(role, answer_ok)
                    for path in (CHAT, COMPLETIONS):
                        assert (await both.ask(sent, path)).status == 200, fields
                    assert [json.loads(call.body) for call in chosen.calls] == [sent, sent]
                    # Whatever was asked for, an answer that is a stream is relayed as one.
                    events = b'data: {"choices":[]}\n\ndata: [DONE]\n\n'
                    kind = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                    both.on(role, says(kind + b"content-length: %d\r\n\r\n" % len(events) + events))
                    reply = await both.ask(sent)
                    assert (reply.whole, reply.body) == (True, events)
                    assert reply.header("x-accel-buffering") == "no"

    run(work, 20)


def test_B7_memory_is_bounded_by_the_bodies() -> None:
    """20 large bodies at once cost at most 2.5 times their sum; a cap turns the rest away.

    5 MB each for 10.
    """
    free = asyncio.Event()

    async def answer(call: Call) -> None:
        await free.wait()
        await call.send(response())

    async def work() -> None:
        sent = post(padded(5 * MIB))
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            serving(spec, base, "--policy", "round-robin") as router,
        ):
            before = router.memory("VmRSS")
            asked = [asyncio.ensure_future(ask(router.port, sent, 20)) for _ in range(20)]
            await until(lambda: spec.in_flight + base.in_flight == 20, 20)
            assert router.memory("VmHWM") - before <= 2.5 * 20 * 5 * MIB
            free.set()
            assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
        free.clear()
        async with pair(answer, max_buffered=20 * MIB, max_body=5 * MIB) as both:
            asked = [asyncio.ensure_future(ask(both.port, sent, 20)) for _ in range(4)]
            await until(lambda: both.relay.tracker.in_flight == 4)
            for framing in (None, b"transfer-encoding: chunked"):
                raw = sent if framing is None else post(chunked(b"{}"), framing=framing)
                reply = await ask(both.port, raw)
                assert (reply.status, reply.error["code"]) == (503, "overloaded")
                assert int(reply.header("retry-after") or 0) >= 1
            free.set()
            assert {reply.status for reply in await asyncio.gather(*asked)} == {200}

    run(work, 40)


@pytest.mark.parametrize(
    "path", ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/files"]
)
def test_B5_uploads_that_are_not_offered_are_said_so_at_once(path: str) -> None:
    """Multipart to a path that the pair does not serve is a 404 in JSON, and never a hang."""
    form = (
        b"--b\r\ncontent-disposition: form-data; name=file; filename=a.wav\r\n\r\n"
        + bytes(range(256)) * 40
        + b"\r\n--b--\r\n"
    )

    async def work() -> None:
        async with pair() as both:
            reply = await both.ask(form, path, "content-type: multipart/form-data; boundary=b")
            assert (reply.status, reply.error["code"]) == (404, "not_found")
            assert both.spec.calls + both.base.calls == []
            # An answer that is no JSON passes as it is on the routes that there are.
            for role in Role:
                text = b"1\n00:00:00,000 --> 00:00:01,000\nhello\n"
                head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
                both.on(role, says(head % len(text) + text))
                reply = await both.ask(body())
                assert (reply.body, reply.header("content-type")) == (text, "text/plain")

    run(work, 10)


def test_B6_unknown_fields_of_an_answer_reach_the_client() -> None:
    """Fields that the router has never heard of, nested nulls and NaN arrive byte for byte."""
    text = (
        b'{"id":"x", "choices":[ {"index":0,"logprobs":{"content":[{"token":"a","logprob":NaN,'
        b'"bytes":null,"top_logprobs":[]}]},"matched_stop":128009,"message":{"content":null,'
        b'"reasoning_content":"r","tool_calls":null}}],"meta_info":{"e2e":1e-3,"nan":NaN,"inf":'
        b'Infinity,"n":[null,[null]]},"usage":{"prompt_tokens":1,"completion_tokens":2,'
        + b"".join(b'"odd_%d":%d,' % (n, n) for n in range(20))
        + b'"prompt_tokens_details":null},"zz":1,"zz":2}\n'
    )

    async def work() -> None:
        async with pair() as both:
            for role, path, stream in every():
                both.on(role, says(response(text)))
                reply = await both.ask(body(stream=stream), path)
                assert (reply.status, reply.whole, reply.body) == (200, True, text)

    run(work, 10)
