"""Cases of streaming fidelity: what a backend streams is what a client gets, when it comes."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable

from router.load import Role
from router.metrics import Outcome
from tests.cases.common import (
    DONE,
    END,
    JSON_HEAD,
    TOKEN,
    Pair,
    body,
    every,
    pair,
    streams,
)
from tests.raw_client import CHAT, COMPLETIONS, Client, post
from tests.scripted_backend import (
    QUEUE_FULL_EVENT,
    STREAM_HEAD,
    Answer,
    Call,
    chunk,
    response,
)
from tests.stack import run, until

FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'


def breaks(*sends: bytes, rst: bool) -> Answer:
    """A backend that sends these and then breaks the connection."""

    async def answer(call: Call) -> None:
        for data in sends:
            await call.send(data)
            await asyncio.sleep(0.005)
        call.reset() if rst else call.close()

    return answer


async def paced(pair: Pair, role: Role, head: bytes, pieces: list[bytes], path: str) -> bytes:
    """Each piece must be with the client before the backend sends the next; the client's bytes."""
    seen = [asyncio.Event() for _ in range(len(pieces) + 1)]

    async def answer(call: Call) -> None:
        await call.send(head)
        for piece, before in zip(pieces, seen, strict=False):
            await asyncio.wait_for(before.wait(), 5)
            await call.send(chunk(piece))
        await seen[-1].wait()
        await call.send(END)

    pair.on(role, answer)
    client = await Client.open(pair.port)
    await client.send(post(body(stream=True), path, ("accept-encoding: gzip",)))
    await client.saw(b"\r\n\r\n")
    seen[0].set()
    sofar = b""
    for piece, event in zip(pieces, seen[1:], strict=True):
        sofar += piece
        await client.saw(chunk(piece))
        event.set()
    reply = await client.reply()
    client.close()
    assert reply.whole
    assert reply.body == sofar
    assert reply.header("content-encoding") is None
    assert reply.header("x-accel-buffering") == "no"
    return client.raw or reply.raw


def test_S8_cut_stream_is_not_a_clean_end() -> None:
    """A cut answer never looks complete: a stream breaks, after an error event between two events."""

    async def work() -> None:
        events = STREAM_HEAD + chunk(TOKEN % b"a") + chunk(TOKEN % b"b")
        half = JSON_HEAD + b"content-length: 100\r\n\r\n" + b"x" * 40
        half_stream = half.replace(b"application/json", b"text/event-stream")
        half_chunk = JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b'{"half":')
        cuts = list(itertools.product((False, True), (events, half, half_stream, half_chunk)))
        async with pair() as both:
            for role, path, stream in every():
                for rst, sent in cuts:
                    label = (role, path, stream, rst, sent[:60])
                    lost = both.count(Outcome.BACKEND_LOST)
                    _, spare = both.on(role, breaks(sent, rst=rst))
                    reply = await both.ask(body(stream=stream), path)
                    assert not reply.timed_out, label
                    assert b"[DONE]" not in reply.body, label
                    assert b"finish_reason" not in reply.body, label
                    if sent is half or (sent is half_chunk and not stream):
                        assert (reply.status, reply.whole) == (502, True), label
                        assert reply.error["code"] == "backend_lost", label
                    elif sent is events:
                        assert (reply.status, reply.whole) == (200, False), label
                        whole = (TOKEN % b"a") + (TOKEN % b"b")
                        assert reply.body.startswith(whole), label
                        last = reply.body[len(whole) :]
                        assert json.loads(last.removeprefix(b"data: "))["error"]["code"], label
                        assert last.endswith(b"}\n\n"), label
                    else:
                        assert (reply.status, reply.whole) in {(200, False), (502, True)}, label
                    await until(lambda: both.stack.in_flight() == (0, 0))
                    assert both.count(Outcome.BACKEND_LOST) == lost + 1, label
                    assert spare.calls == [], label

    run(work, 30)


async def send_cut(call: Call, data: bytes, at: list[int]) -> None:
    """Send the data in segments that are cut there."""
    for start, end in itertools.pairwise([0, *at, len(data)]):
        await call.send(data[start:end])
        await asyncio.sleep(0.001)


def test_S1_characters_survive_any_cut() -> None:
    """Characters of several bytes arrive as they were, cut inside each and byte by byte."""
    text = 'data: {"choices":[{"delta":{"content":"你好 😀 é"}}]}\n\n'
    tool = 'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"é😀"}}]}}]}\n\n'

    async def work() -> None:
        async with pair() as both:
            for role, path in itertools.product(Role, (CHAT, COMPLETIONS)):
                for sent in (text.encode(), tool.encode()):
                    whole = STREAM_HEAD + chunk(sent) + chunk(DONE) + END
                    inside = [at for at, byte in enumerate(whole) if 0x80 <= byte < 0xC0]

                    def at_each(
                        call: Call, at: list[int] = inside, data: bytes = whole
                    ) -> Awaitable[None]:
                        return send_cut(call, data, at)

                    gap = 0.001 if role is Role.SPECULATIVE and path == CHAT else 0.0

                    def by_byte(call: Call, data: bytes = whole, s: float = gap) -> Awaitable[None]:
                        return call.cut(data, 1, s)

                    for answer in (at_each, by_byte):
                        both.on(role, answer)
                        reply = await both.ask(body(stream=True), path)
                        assert (reply.whole, reply.body) == (True, sent + DONE)
            # Without a stream, in a body whose length is announced in bytes.
            short = '{"choices":[{"text":"你好 😀 é"}]}'.encode()
            for role in Role:
                both.on(role, lambda call: call.cut(response(short), 1))
                reply = await both.ask(body())
                assert (reply.whole, reply.body) == (True, short)

    run(work, 30)


def test_S11_error_event_in_a_stream_is_seen() -> None:
    """A queue that is full says so in the first event: tried once elsewhere, else passed unchanged."""
    first = QUEUE_FULL_EVENT + DONE
    late = (TOKEN % b"a") * 3 + QUEUE_FULL_EVENT + DONE

    async def work() -> None:
        async with pair(retry_budget=1) as both:
            for role, path in itertools.product(Role, (CHAT, COMPLETIONS)):
                refuse = streams(QUEUE_FULL_EVENT, DONE)
                chosen, spare = both.on(role, refuse, streams(TOKEN % b"a", FINISH, DONE))
                reply = await both.ask(body(stream=True), path)
                assert reply.body == TOKEN % b"a" + FINISH + DONE
                assert reply.header("x-crossover-reason") == "replay_refused"
                assert (len(chosen.calls), len(spare.calls)) == (1, 1)

                refused = both.count(Outcome.REFUSED)
                both.on(role, refuse, refuse)
                reply = await both.ask(body(stream=True), path)
                assert (reply.status, reply.whole, reply.body) == (200, True, first)
                assert both.count(Outcome.REFUSED) == refused + 1

                failed = both.count(Outcome.BACKEND_ERROR)
                _, spare = both.on(
                    role, streams((TOKEN % b"a"), (TOKEN % b"a") * 2, QUEUE_FULL_EVENT, DONE)
                )
                reply = await both.ask(body(stream=True), path)
                assert (reply.status, reply.whole, reply.body) == (200, True, late)
                assert both.count(Outcome.BACKEND_ERROR) == failed + 1
                assert spare.calls == []
            assert both.count(Outcome.OK) == 4

    run(work, 20)


def test_S3_usage_in_any_event_is_relayed_and_read() -> None:
    """Usage beside no choices, beside choices, in every event, or nowhere: relayed and counted once."""
    usage = b'"usage":{"prompt_tokens":7,"completion_tokens":%d,"total_tokens":9}'
    plain = TOKEN % b"a"
    empty = b'data: {"choices":[],' + usage % 2 + b"}\n\n"
    beside = b'data: {"choices":[{"index":0,"delta":{}}],' + usage % 2 + b"}\n\n"
    running = [b'data: {"choices":[{"index":0}],' + usage % n + b"}\n\n" for n in (0, 1, 2)]
    cases = [([plain, empty], 7, 2), ([plain, beside], 7, 2), (running, 7, 2), ([plain], 0, 0)]

    async def work() -> None:
        async with pair() as both:
            for role, path in itertools.product(Role, (CHAT, COMPLETIONS)):
                for events, prompt, output in cases:
                    counted = both.relay.metrics.backends[role]
                    before = (counted.prompt_tokens, counted.output_tokens)
                    chosen, _ = both.on(role, streams(*events, DONE))
                    asked = body(stream=True, stream_options={"include_usage": True})
                    reply = await both.ask(asked, path)
                    assert (reply.whole, reply.body) == (True, b"".join(events) + DONE)
                    assert json.loads(chosen.calls[0].body) == asked
                    await until(lambda: both.stack.in_flight() == (0, 0))
                    after = (counted.prompt_tokens, counted.output_tokens)
                    assert after == (before[0] + prompt, before[1] + output)
            # A client that did not ask gets no usage of our making.
            chosen, _ = both.on(Role.BASELINE, streams(plain, DONE))
            reply = await both.ask(body(stream=True))
            assert b"stream_options" not in chosen.calls[0].body
            assert reply.body == plain + DONE

    run(work, 20)


def test_S5_headers_and_tokens_are_not_held_back() -> None:
    """The head is with the client before the first token is sent, and each token before the next.

    Barriers instead of the 2 s and 200 ms of the report: nothing may be held at all.
    """
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncache-control: no-cache\r\n\r\n")

    async def work() -> None:
        async with pair() as both:
            for role, path in itertools.product(Role, (CHAT, COMPLETIONS)):
                tokens = [TOKEN % b"t%d" % n for n in range(5)]
                raw = await paced(both, role, head, [*tokens, DONE], path)
                assert b"\r\ncache-control: no-cache\r\n" in raw

    run(work, 20)


SPELLINGS = {
    "crlf": b'data: {"a":1}\r\n\r\ndata: [DONE]\r\n\r\n',
    "cr": b'data: {"a":1}\r\rdata: [DONE]\r\r',
    "no space": b'data:{"a":1}\n\ndata:[DONE]\n\n',
    "several data lines": b'data: {"a":\ndata: 1}\n\ndata: [DONE]\n\n',
    "fields": b'event: x\nid: 7\nretry: 10\ndata: {"a":1}\n\ndata: [DONE]\n\n',
    "comments": b': ping\n\ndata: {"a":1}\n: more\n\n: \n\ndata: [DONE]\n\n',
    "three events": b'data: {"a":1}\n\n' * 3 + b"data: [DONE]\n\n",
    "no blank line at the end": b'data: [DONE]\n\ndata: {"a":1}\n',
}


def test_S6_events_in_any_spelling_and_cut_pass_unchanged() -> None:
    """Several events in a segment, 50 segments for an event and every line end: the same bytes."""
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}'

    async def work() -> None:
        async with pair() as both:
            for role, (name, sent) in itertools.product(Role, SPELLINGS.items()):
                end = b"\r\r" if name == "cr" else b"\r\n\r\n" if name == "crlf" else b"\n\n"
                text = usage + end + sent
                for pieces in (1, 3, 50):
                    size = -(-len(text) // pieces)
                    cuts = [text[at : at + size] for at in range(0, len(text), size)]

                    async def answer(call: Call, cuts: list[bytes] = cuts) -> None:
                        await call.send(STREAM_HEAD)
                        for cut in cuts:
                            await call.send(chunk(cut))
                            await asyncio.sleep(0.001 * (len(cuts) > 3))  # else they come as one
                        await call.send(END)

                    counted = both.relay.metrics.backends[role]
                    before = counted.output_tokens
                    both.on(role, answer)
                    reply = await both.ask(body(stream=True))
                    assert (reply.whole, reply.body) == (True, text), (name, pieces)
                    await until(lambda: both.stack.in_flight() == (0, 0))
                    assert counted.output_tokens == before + 4, (name, pieces)

    run(work, 30)


def test_S4_tool_call_fragments_pass_as_they_come() -> None:
    """Fragments of two parallel tool calls, with and without index, arrive one by one, in order."""
    part = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[%b]}}]}\n\n'
    first = [part % b'{"index":%d,"id":"c%d","function":{"name":"f","arguments":""}}' % (n, n) for n in (0, 1)]  # fmt: skip
    rest = [part % b'{"index":%d,"function":{"arguments":"x%d"}}' % (n % 2, n) for n in range(40)]
    odd = [part % b'{"function":{"arguments":"y"}}', part % b'{"content":null,"arguments":"z"}']
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'

    async def work() -> None:
        async with pair() as both:
            for role, last in ((Role.SPECULATIVE, [usage, DONE]), (Role.BASELINE, [DONE])):
                await paced(both, role, STREAM_HEAD, [*first, *rest, *odd, *last], CHAT)

    run(work, 20)


def test_S10_every_failure_in_a_stream_ends_alike() -> None:
    """Silence, bad framing, FIN and RST after two events: one error event, then a broken transfer."""
    events = STREAM_HEAD + chunk(TOKEN % b"a") + chunk(TOKEN % b"b")

    async def stops(call: Call) -> None:
        await call.send(events)
        await call.peer_closed.wait()

    async def garbles(call: Call) -> None:
        await call.send(events)
        await asyncio.sleep(0.01)
        await call.send(b"no chunk\r\n")
        await call.peer_closed.wait()

    failures = {
        "idle_timeout": stops,
        "backend_protocol": garbles,
        "backend_lost": breaks(events, rst=False),
        "backend_lost ": breaks(events, rst=True),
    }

    async def work() -> None:
        async with pair(idle_timeout="300ms") as both:
            for role, (code, answer) in itertools.product(Role, failures.items()):
                both.on(role, answer)
                reply = await both.ask(body(stream=True))
                assert (reply.status, reply.whole, reply.timed_out) == (200, False, False)
                sent = (TOKEN % b"a") + (TOKEN % b"b")
                assert reply.body.startswith(sent + b"data: {"), code
                assert reply.body.endswith(b"}\n\n"), code
                told = json.loads(reply.body[len(sent) + 6 :])["error"]
                assert told["code"] == code.strip()
                assert set(told) == {"message", "type", "param", "code"}

            # Within an event no error event would be one: the transfer breaks and says no more.
            half = STREAM_HEAD + chunk(TOKEN % b"a") + chunk(b'data: {"half')
            both.on(Role.SPECULATIVE, breaks(half, rst=False))
            reply = await both.ask(body(stream=True))
            assert (reply.whole, reply.body) == (False, TOKEN % b"a" + b'data: {"half')

    run(work, 20)


def test_S7_no_heartbeat_is_made_up() -> None:
    """Silence before the head, between events and within one is passed on as silence.

    0.3 s of silence for 20 s: more than a sweep, the only thing that happens in time.
    """

    async def work() -> None:
        async def answer(call: Call) -> None:
            await asyncio.sleep(0.3)
            await call.send(STREAM_HEAD + chunk(b"id: 1\n" + TOKEN % b"a" + b"data: {"))
            await asyncio.sleep(0.3)
            await call.send(chunk(b'"b":1}\n\n') + chunk(DONE) + END)

        async def watch(role: Role) -> None:
            both.on(role, answer)
            client = await Client.open(both.port)
            await client.send(post(body(stream=True)))
            assert not await client.closed(0.2)
            assert client.raw == b""
            await client.saw(b"data: {\r\n")
            before = client.raw
            assert not await client.closed(0.2)
            assert client.raw == before
            reply = await client.reply()
            client.close()
            assert reply.whole
            assert reply.body == b"id: 1\n" + TOKEN % b"a" + b'data: {"b":1}\n\n' + DONE

        async with pair() as both:
            for role in Role:
                await watch(role)

    run(work, 20)


def test_S12_tokens_do_not_come_in_one_burst() -> None:
    """20 tokens arrive spread out as they were sent, and not after completion.

    20 ms apart for 100 ms; the spread asked for is the same three quarters of the whole.
    """

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for n in range(20):
            await call.send(chunk(TOKEN % b"%d" % n))
            await asyncio.sleep(0.02)
        await call.send(chunk(DONE) + END)

    async def work() -> None:
        async with pair() as both:
            for role, path in zip(Role, (CHAT, COMPLETIONS), strict=True):
                both.on(role, answer)
                client = await Client.open(both.port)
                await client.send(post(body(stream=True), path))
                times = []
                for n in range(20):
                    await client.saw(b'"%d"' % n)
                    times.append(time.monotonic())
                assert (await client.reply()).whole
                client.close()
                assert times[-1] - times[0] >= 0.3
                assert len({round(t, 2) for t in times}) >= 10

    run(work, 20)
