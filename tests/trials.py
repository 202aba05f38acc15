"""Reported cases as trials that any proxy can be put through: all is decided from outside.

A trial talks raw HTTP to a proxy on a port and owns the two backends behind it. It raises
AssertionError with what was wrong. It may know nothing of the proxy: no metric, no own header, no
setting but the defaults. `tests.matrix` runs them; the same cases are tried on Crossover more
closely in `tests/cases/`.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import random
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.raw_client import CHAT, COMPLETIONS, Client, Reply, ask, chunked, get, post
from tests.scripted_backend import (
    QUEUE_FULL_EVENT,
    STREAM_HEAD,
    Answer,
    Call,
    ScriptedBackend,
    answer_ok,
    chunk,
    response,
)

END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
TOKEN = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n'
)
ERROR = b'{"error":{"message":"as it was","type":"t","param":null,"code":null}}'
FACTS = {
    b"/v1/models": b'{"object":"list","data":[{"id":"m","object":"model","created":1,'
    b'"owned_by":"sglang","root":"m","parent":null,"max_model_len":32768}]}',
    b"/server_info": b'{"model_path":"m","tokenizer_path":"m","served_model_name":"m","tp_size":1,'
    b'"dp_size":1,"max_running_requests":256,"max_total_num_tokens":400000,'
    b'"disaggregation_mode":"null","version":"0.5.9","internal_states":[{}]}',
    b"/model_info": b'{"model_path":"m","tokenizer_path":"m","is_generation":true,'
    b'"weight_version":"default","model_type":"llama","architectures":["LlamaForCausalLM"]}',
}
FACTS[b"/get_server_info"], FACTS[b"/get_model_info"] = (
    FACTS[b"/server_info"], FACTS[b"/model_info"],
)  # fmt: skip
LIMIT_S = 20.0


class Bench:
    """One proxy and its two backends."""

    def __init__(
        self, port: int, a: ScriptedBackend, b: ScriptedBackend, process: asyncio.subprocess.Process
    ) -> None:
        self.port = port
        self.a = a
        self.b = b
        self.process = process

    def both(self, answer: Answer, other: Answer | None = None) -> None:
        """How the backends answer a POST from now on; to a GET they answer as an engine does."""
        for backend, own in ((self.a, answer), (self.b, other or answer)):
            backend.answer = engine(own)
            backend.calls.clear()

    @property
    def posts(self) -> list[Call]:
        """The requests that reached a backend, GETs of the proxy's own left out."""
        return [call for call in self.a.calls + self.b.calls if call.head.startswith(b"POST")]

    @property
    def in_flight(self) -> int:
        """Requests that the backends have open."""
        return self.a.in_flight + self.b.in_flight

    async def ask(
        self,
        fields: dict[str, Any] | bytes,
        path: str = CHAT,
        *lines: str,
        seconds: float = LIMIT_S,
    ) -> Reply:
        """One request on a connection of its own."""
        return await ask(self.port, post(fields, path, lines), seconds)


def engine(answer: Answer) -> Answer:
    """An engine whose POSTs are answered so."""

    async def answered(call: Call) -> None:
        path = call.path.partition(b"?")[0]
        if call.head.startswith(b"POST"):
            await answer(call)
        elif call.head.startswith((b"GET", b"HEAD")) and path in FACTS:
            body = FACTS[path]
            await call.send(response(body) if call.head.startswith(b"GET") else response(b""))
        elif path in {CHAT.encode(), COMPLETIONS.encode()}:
            await call.send(response(ERROR, "405 Method Not Allowed", b"allow: POST\r\n"))
        else:
            await call.send(response(ERROR, "404 Not Found"))

    return answered


def body(*, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """A request that every proxy takes for valid."""
    return {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "stream": stream,
        **fields,
    }


def says(data: bytes) -> Answer:
    """Answer with these bytes."""

    async def answer(call: Call) -> None:
        await call.send(data)

    return answer


def stream(*events: bytes) -> bytes:
    """A whole stream."""
    return STREAM_HEAD + b"".join(map(chunk, events)) + END


async def held(call: Call) -> None:
    """Take the request and say nothing."""
    await call.peer_closed.wait()


async def wait_for(check: Callable[[], bool], seconds: float, what: str) -> None:
    """AssertionError with `what` when it does not come to hold."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.01)


def same(found: object, wanted: object, what: str) -> None:
    """AssertionError with both, shortened, when they differ."""
    assert found == wanted, f"{what}: {str(found)[:80]} for {str(wanted)[:80]}"


# ---------------------------------------------------------------------- streaming


async def s8_stream(bench: Bench) -> None:
    """A stream that was cut does not end properly."""
    for rst in (False, True):

        async def answer(call: Call, rst: bool = rst) -> None:
            await call.send(STREAM_HEAD + chunk(TOKEN % b"a") + chunk(TOKEN % b"b"))
            await asyncio.sleep(0.05)
            call.reset() if rst else call.close()

        bench.both(answer)
        reply = await bench.ask(body(stream=True))
        assert not reply.whole or b'"error"' in reply.body, "it ends as if it were complete"
        assert b"[DONE]" not in reply.body, "[DONE] is made up"


async def s8_plain(bench: Bench) -> None:
    """An answer of announced length that was cut becomes a 502 in JSON."""

    async def answer(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        await call.send(b"content-length: 100\r\n\r\n" + b"x" * 40)
        call.close()

    bench.both(answer)
    reply = await bench.ask(body())
    same((reply.status, reply.whole), (502, True), "status and wholeness")
    assert "error" in reply.json(), "no error in JSON"


async def relayed(bench: Bench, sent: bytes, send: Answer, what: str) -> None:
    """A stream that arrives byte for byte."""
    bench.both(send)
    reply = await bench.ask(body(stream=True))
    assert reply.whole, f"{what}: not whole"
    same(reply.body, sent, what)


async def s1(bench: Bench) -> None:
    """Characters cut between two segments arrive unharmed."""
    text = TOKEN % "你好 😀 é".encode()
    await relayed(bench, text + DONE, lambda call: call.cut(stream(text, DONE), 1, 0.001), "bytes")


async def s3(bench: Bench) -> None:
    """Usage beside no choices, beside choices or nowhere passes unchanged."""
    usage = b'"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}'
    for last in (b'data: {"choices":[],' + usage + b"}\n\n", TOKEN[:-3] + b"," + usage + b"}\n\n"):
        events = ((TOKEN % b"a"), last.replace(b"%b", b"b"), DONE)
        await relayed(bench, b"".join(events), says(stream(*events)), "usage")


async def s4(bench: Bench) -> None:
    """Fragments of tool calls pass one by one and unchanged."""
    part = TOKEN.replace(b'"content":"%b"', b'"tool_calls":[%b]')
    events = [part % b'{"index":%d,"function":{"arguments":"x"}}' % (n % 2) for n in range(20)]
    events += [part % b'{"function":{"arguments":"y"}}', DONE]
    await relayed(bench, b"".join(events), says(stream(*events)), "fragments")


async def s5(bench: Bench) -> None:
    """The head reaches the client before the first token, each token before the next."""
    seen = asyncio.Event()
    tokens = [TOKEN % b"t%d" % n for n in range(3)]

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for token in tokens:
            async with asyncio.timeout(3):
                await seen.wait()
            seen.clear()
            await call.send(chunk(token))
        await call.send(END)

    bench.both(answer)
    client = await Client.open(bench.port)
    await client.send(post(body(stream=True), CHAT, ("accept-encoding: gzip",)))
    for mark in (b"\r\n\r\n", *(b'"t%d"' % n for n in range(3))):
        await client.saw(mark, 2)
        seen.set()
    assert b"content-encoding" not in client.raw.lower(), "recoded"
    client.close()


SPELLINGS = (
    b'data: {"a":1}\r\n\r\ndata: [DONE]\r\n\r\n',
    b'data:{"a":1}\n\ndata:[DONE]\n\n',
    b'data: {"a":\ndata: 1}\n\ndata: [DONE]\n\n',
    b'event: x\nid: 7\nretry: 10\ndata: {"a":1}\n\ndata: [DONE]\n\n',
    b': ping\n\ndata: {"a":1}\n\ndata: [DONE]\n\n',
    b'data: {"a":1}\n\n' * 3 + b"data: [DONE]\n\n",
)


async def s6(bench: Bench) -> None:
    """Events in any spelling, three in a segment or cut in many, are the same bytes."""
    for text in SPELLINGS:
        cuts = [text[at : at + 3] for at in range(0, len(text), 3)]
        await relayed(bench, text, says(stream(text)), "events in one chunk")
        await relayed(bench, text, says(stream(*cuts)), "an event in many chunks")


async def s10(bench: Bench) -> None:
    """A stream that fails between two events ends in one error event and a broken transfer."""

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + chunk(TOKEN % b"a"))
        await asyncio.sleep(0.05)
        call.close()

    bench.both(answer)
    reply = await bench.ask(body(stream=True))
    last = reply.body.removeprefix(TOKEN % b"a")
    assert re.match(rb'data: \{"error":\{.*\}\}\n\n', last), f"no error event: {last[:60]!r}"


async def s11(bench: Bench) -> None:
    """A stream that begins with `queue full` becomes a 503, or the other backend's answer."""
    good = stream(TOKEN % b"a", DONE)
    bench.both(says(stream(QUEUE_FULL_EVENT, DONE)), says(good))
    for _ in range(4):  # whichever backend is first
        reply = await bench.ask(body(stream=True))
        refused = reply.status == 200 and b"queue" in reply.body
        assert not refused, "the refusal is handed on as a 200"


async def s12(bench: Bench) -> None:
    """Tokens arrive spread out, as they were sent."""

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for n in range(20):
            await call.send(chunk(TOKEN % b"%d" % n))
            await asyncio.sleep(0.02)
        await call.send(chunk(DONE) + END)

    bench.both(answer)
    client = await Client.open(bench.port)
    await client.send(post(body(stream=True)))
    await client.saw(b'"0"')
    began = time.monotonic()
    await client.saw(b'"19"')
    client.close()
    assert time.monotonic() - began > 0.3, "in one burst"


# ---------------------------------------------------------------------- errors


async def e1(bench: Bench) -> None:
    """400, 429 and 503 to a stream keep status, body and Retry-After; no connection is a 502."""
    for status, extra in (
        ("400 Bad Request", b""),
        ("429 Too Many Requests", b"retry-after: 7\r\n"),
        ("503 Service Unavailable", b"retry-after: 9\r\n"),
    ):
        bench.both(says(response(ERROR, status, extra)))
        reply = await bench.ask(body(stream=True))
        same((reply.status, reply.body), (int(status[:3]), ERROR), "status and body")
        wanted = extra.decode().strip().partition(": ")[2] or None
        same(reply.header("retry-after"), wanted, "Retry-After")
    await bench.a.leave()
    await bench.b.leave()
    same((await bench.ask(body(stream=True))).status, 502, "status without a backend")


async def e2(bench: Bench) -> None:
    """Fifteen statuses and their bodies pass unchanged."""
    for code in (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 502, 503, 504, 529):
        text = b'{"error":{"message":"x","code":%d}}' % code
        bench.both(says(response(text, f"{code} Reason")))
        for streamed in (True, False):
            reply = await bench.ask(body(stream=streamed))
            same((reply.status, reply.body), (code, text), f"answer {code}")


async def e3(bench: Bench) -> None:
    """HTML, nothing, plain text, gzip and half a JSON pass byte for byte."""
    packed = gzip.compress(ERROR)
    for status, kind, extra, sent in (
        (502, "text/html", b"", b"<html>x</html>"),
        (500, "application/json", b"", b""),
        (503, "text/plain", b"", b"busy"),
        (400, "application/json", b"content-encoding: gzip\r\n", packed),
        (200, "text/html", b"", b"<html>x</html>"),
        (200, "application/json", b"", b'{"half'),
    ):
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n".encode() + extra
        bench.both(says(head + b"content-length: %d\r\n\r\n" % len(sent) + sent))
        reply = await bench.ask(body())
        same((reply.status, reply.body), (status, sent), f"a {status} of {kind}")
        same(reply.header("content-type"), kind, "content type")


async def e4(bench: Bench) -> None:
    """Bodies that are no object end in 400, 415 or 422 and never in a 5xx."""
    bench.both(says(response(ERROR, "400 Bad Request")))
    for bad in (
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"1",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model":5}',
    ):
        reply = await bench.ask(bad)
        assert reply.status in {400, 415, 422}, f"{reply.status} for {bad[:10]!r}"
        assert "error" in reply.json(), f"no error in JSON for {bad[:10]!r}"


async def e5(bench: Bench) -> None:
    """Retry-After and rate-limit headers of a 429 pass."""
    extra = b"retry-after: 30\r\nretry-after-ms: 29500\r\nx-ratelimit-limit-requests: 60\r\n"
    bench.both(says(response(ERROR, "429 Too Many Requests", extra)))
    reply = await bench.ask(body())
    for line in extra.decode().splitlines():
        name, _, value = line.partition(": ")
        same(reply.header(name), value, name)


async def e8(bench: Bench) -> None:
    """A reset before the head, and nobody there, are a 502 in JSON without an address."""

    async def resets(call: Call) -> None:
        call.reset()

    for _ in range(2):
        bench.both(resets)
        reply = await bench.ask(body())
        same(reply.status, 502, "status")
        assert reply.body[:1] == b"{", f"no JSON: {reply.body[:40]!r}"
        assert b"127.0.0.1" not in reply.body, "a backend's address is told"
        await bench.a.leave()
        await bench.b.leave()


async def e9(bench: Bench) -> None:
    """Malformed multipart is no 500."""
    bench.both(says(response(ERROR, "400 Bad Request")))
    reply = await bench.ask(
        b"not-multipart", CHAT, "content-type: multipart/form-data; boundary=no"
    )
    assert reply.status in {400, 415, 422}, f"{reply.status}"


# ---------------------------------------------------------------------- lifecycle


async def leaves(bench: Bench, *, streamed: bool) -> None:
    """A client that leaves closes the backend's connection within 1 s, by FIN and by RST."""
    for rst in (False, True):

        async def endless(call: Call) -> None:
            await call.send(STREAM_HEAD)
            while not call.peer_closed.is_set():
                await call.send(chunk(TOKEN % b"t"))
                await asyncio.sleep(0.02)

        bench.both(endless if streamed else held)
        client = await Client.open(bench.port)
        await client.send(post(body(stream=streamed)))
        if streamed:
            await client.saw(b'"t"')
        await wait_for(lambda: bench.in_flight == 1, 2, "it never reached a backend")
        client.abort() if rst else client.close()
        await wait_for(lambda: bench.in_flight == 0, 1.2, "the backend works on")


async def d6(bench: Bench) -> None:
    """A refusal that comes after the client left starts nothing on the other backend."""
    left = asyncio.Event()

    async def refuses(call: Call) -> None:
        await left.wait()
        await call.send(response(ERROR, "503 Service Unavailable"))

    bench.both(refuses)
    client = await Client.open(bench.port)
    await client.send(post(body()))
    await wait_for(lambda: bench.in_flight == 1, 2, "it never reached a backend")
    client.close()
    await asyncio.sleep(0.3)
    left.set()
    await asyncio.sleep(1)
    same(len(bench.posts), 1, "POSTs")


async def d8(bench: Bench) -> None:
    """500 streams at once are served, or told with 429 or 503."""
    free = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + chunk(TOKEN % b"a"))
        await free.wait()
        await call.send(chunk(DONE) + END)

    bench.both(answer)
    bench.a.watch_s = bench.b.watch_s = 0.2
    clients = await asyncio.gather(*(Client.open(bench.port) for _ in range(500)))
    await asyncio.gather(*(client.send(post(body(stream=True))) for client in clients))
    await asyncio.sleep(3)
    free.set()
    replies = await asyncio.gather(*(client.reply(LIMIT_S) for client in clients))
    for client in clients:
        client.close()
    assert all(r.whole and r.status in {200, 429, 503} for r in replies), "some were lost"


async def d9(bench: Bench) -> None:
    """A reused connection that is closed without a byte is replayed once, without an error."""

    async def answer(call: Call) -> None:
        if call.reused:
            call.close()
        else:
            await call.send(response())

    bench.both(answer)
    for n in range(8):
        same((await bench.ask(body())).status, 200, f"request {n + 1}")


async def d12(bench: Bench) -> None:
    """A POST that was answered with 502 or 504, or reset after reading, is not sent again.

    On a fresh connection each time: of a reused one nobody knows whether it was read (D9).
    """
    close = b"connection: close\r\n"

    async def resets(call: Call) -> None:
        call.reset()

    for answer, what in (
        (says(response(ERROR, "502 Bad Gateway", close)), "502"),
        (says(response(ERROR, "504 Gateway Timeout", close)), "504"),
        (resets, "RST"),
    ):
        bench.both(answer)
        await bench.ask(body())
        same(len(bench.posts), 1, f"POSTs after {what}")


async def d13(bench: Bench) -> None:
    """Once bytes went out nothing is tried again."""

    async def dies(call: Call) -> None:
        await call.send(STREAM_HEAD + chunk(TOKEN % b"a"))
        await asyncio.sleep(0.05)
        call.reset()

    bench.both(dies)
    reply = await bench.ask(body(stream=True))
    same((len(bench.posts), reply.body.count(TOKEN % b"a")), (1, 1), "POSTs and tokens")


async def d14(bench: Bench) -> None:
    """Streams end whole after the signal that asks for a graceful stop; the process ends at once."""
    free = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + chunk(TOKEN % b"a"))
        await free.wait()
        await call.send(chunk(DONE) + END)

    bench.both(answer)
    client = await Client.open(bench.port)
    await client.send(post(body(stream=True)))
    await client.saw(b'"a"')
    bench.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(3)
    free.set()
    reply = await client.reply()
    client.close()
    assert reply.whole, "the stream is cut"
    assert reply.body.endswith(DONE), "the stream lacks its end"
    async with asyncio.timeout(5):
        await bench.process.wait()


# ---------------------------------------------------------------------- framing


async def h1(bench: Bench) -> None:
    """Compressed bodies pass as they are, under their coding, on every status."""
    packed = gzip.compress(b'{"choices":[]}' * 20)
    for status in ("200 OK", "400 Bad Request"):
        bench.both(says(response(packed, status, b"content-encoding: gzip\r\n")))
        reply = await bench.ask(body(), CHAT, "accept-encoding: gzip")
        same(reply.header("content-encoding"), "gzip", f"coding of a {status[:3]}")
        same(reply.body, packed, f"bytes of a {status[:3]}")


async def h1_stream(bench: Bench) -> None:
    """A compressed stream passes as it is, under its coding."""
    packed = gzip.compress(TOKEN % b"a" + DONE)
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    bench.both(says(head + chunk(packed[:20]) + chunk(packed[20:]) + END))
    reply = await bench.ask(body(stream=True), CHAT, "accept-encoding: gzip")
    same(reply.header("content-encoding"), "gzip", "coding")
    same(reply.body, packed, "bytes")


async def h4(bench: Bench) -> None:
    """Content-Length counts bytes both ways."""
    text = '{"choices":[{"message":{"content":"你好 😀"}}]}'.encode()
    bench.both(says(response(text)))
    sent = json.dumps(body() | {"user": "é😀"}, ensure_ascii=False).encode()
    reply = await bench.ask(sent)
    same((reply.body, reply.rest), (text, b""), "answer")
    json.loads(bench.posts[0].body)


async def h5(bench: Bench) -> None:
    """Each side has exactly one framing header."""
    bench.both(says(stream(TOKEN % b"a", DONE)))
    data = json.dumps(body(stream=True)).encode()
    raw = post(chunked(data[:5], data[5:]), framing=b"transfer-encoding: chunked")
    reply = await ask(bench.port, raw, LIMIT_S)
    same(len(reply.all("content-length") + reply.all("transfer-encoding")), 1, "of the answer")
    head = bench.posts[0].head.lower()
    same(len(re.findall(rb"\r\n(?:content-length|transfer-encoding):", head)), 1, "of the request")


async def h6(bench: Bench) -> None:
    """A request in 200 chunks of any size arrives whole."""
    dice = random.Random(6)
    text = "é😀" * 3000 + "x" * 100_000
    data = json.dumps(body(user=text), ensure_ascii=False).encode()
    bench.both(answer_ok)
    client = await Client.open(bench.port)
    await client.send(post(b"", framing=b"transfer-encoding: chunked"))
    at = 0
    while at < len(data):
        size = dice.randint(1, 2000)
        await client.send(chunk(data[at : at + size]))
        at += size
    await client.send(END)
    same((await client.reply(LIMIT_S)).status, 200, "status")
    client.close()
    found = str(json.loads(bench.posts[0].body)["user"]).encode()  # it may be written anew
    same(hashlib.sha256(found).hexdigest(), hashlib.sha256(text.encode()).hexdigest(), "sha256")


HOPS = ("x-hop", "keep-alive", "te", "proxy-authorization", "upgrade")


async def h7(bench: Bench) -> None:
    """Hop-by-hop headers, and those that Connection names, pass in neither direction."""
    lines = ("connection: close, X-Hop", *(f"{name}: 1" for name in HOPS[:2]), "te: trailers",
             "proxy-authorization: Basic eA==", "upgrade: h2c")  # fmt: skip
    back = (
        b"connection: X-Hop\r\nx-hop: 1\r\nkeep-alive: timeout=1\r\nproxy-authenticate: Basic\r\n"
    )
    bench.both(says(response(extra=back)))
    reply = await bench.ask(body(), CHAT, *lines)
    for name in HOPS:
        assert name.encode() not in bench.posts[0].headers, f"{name} reaches the backend"
    for name in ("x-hop", "keep-alive", "proxy-authenticate"):
        value = reply.header(name)
        assert value in {None, "timeout=75"}, f"{name} reaches the client"


TE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def h8(bench: Bench) -> None:
    """Five requests with two readings are refused, or read in the one way that RFC 9112 allows."""
    data = json.dumps(body(user="first")).encode()
    te = b"transfer-encoding: chunked\r\n"
    length = b"content-length: %d\r\n" % len(data)
    behind = json.dumps(body(user="behind")).encode()
    allowed: list[str]
    # Both: read as chunked and closed (section 6.3). A folded line: a space (section 5.2).
    for name, raw, allowed in (
        ("CL and TE", TE + b"content-length: 4\r\n" + te + b"\r\n" + chunked(data), ["first"]),
        ("two CL", TE + length + b"content-length: 3\r\n\r\n" + data, []),
        ("gzip, chunked", TE + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunked(data), []),
        ("bare LF in a chunk", TE + te + b"\r\n%x\n" % len(data) + data + b"\r\n" + END, []),
        ("obs-fold", TE + b"x: a\r\n content-length: 0\r\n" + length + b"\r\n" + data,
         ["first", "behind"]),
    ):  # fmt: skip
        bench.both(answer_ok)
        client = await Client.open(bench.port)
        await client.send(raw + post(behind))
        await client.closed(2)
        client.close()
        found = sorted((call.arrived, call.body) for call in bench.posts)
        bodies = [json.loads(text)["user"] for _, text in found]  # it may be written anew
        assert bodies in ([], allowed), f"{name}: {len(bodies)} requests reach a backend"
        wanted = len(allowed) if bodies else 1
        same(client.raw.count(b"HTTP/1.1 "), wanted, f"answers to {name}")


async def h9(bench: Bench) -> None:
    """Each answer has one Date and at most one Server."""
    extra = b"date: Thu, 01 Jan 1970 00:00:00 GMT\r\nserver: uvicorn\r\n"
    bench.both(says(response(extra=extra)))
    reply = await bench.ask(body())
    same((len(reply.all("date")), len(reply.all("server")) <= 1), (1, True), "Date, Server")


# ---------------------------------------------------------------------- bodies


async def b1(bench: Bench) -> None:
    """Unknown fields, order and white space arrive byte for byte."""
    raw = (
        b'{ "stream" :false,\t"return_token_ids": true,"chat_template_kwargs":{"a":[1,2.50,1e2]},'
        b'"zz":1,"model":"m","messages":[{"role":"user","content":"x"}] ,"new_field":{"k":null}}\n'
    )
    bench.both(answer_ok)
    same((await bench.ask(raw)).status, 200, "status")
    found = bench.posts[0].body
    missing = [
        name for name in ("return_token_ids", "new_field", "zz") if name.encode() not in found
    ]
    assert not missing, f"dropped: {', '.join(missing)}"
    same(found, raw, "bytes")


async def b3(bench: Bench) -> None:
    """Odd but possible fields are forwarded, for the engine to judge."""
    tool = {"type": "function", "function": {"name": "f"}}
    for path, fields in (
        (CHAT, {"tools": [tool]}),
        (CHAT, {"messages": [{"role": "assistant", "content": None}]}),
        (CHAT, {"stream": None}),
        (CHAT, {"stream": 1}),
        (CHAT, {"n": 3}),
        (CHAT, {"logprobs": 5}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}),
        (CHAT, {"max_tokens": None}),
    ):
        bench.both(answer_ok)
        same((await bench.ask({**body(), **fields}, path)).status, 200, str(fields))


async def b4(bench: Bench) -> None:
    """Bodies of 2.1 and 32 MB pass by default."""
    for size in (2_100_000, 32_000_000):
        bench.both(answer_ok)
        reply = await bench.ask(body(user="x" * size))
        same(reply.status, 200, f"status of {size / 1e6:g} MB")


async def b5(bench: Bench) -> None:
    """A multipart upload is relayed byte for byte or refused at once."""
    form = b"--b\r\ncontent-disposition: form-data; name=file; filename=a.wav\r\n\r\n"
    form += bytes(range(256)) + b"\r\n--b--\r\n"
    bench.both(says(response(b"hello")))
    path = "/v1/audio/transcriptions"
    reply = await bench.ask(form, path, "content-type: multipart/form-data; boundary=b", seconds=5)
    assert not reply.timed_out, "it hangs"
    if reply.status == 200:
        same(bench.posts[0].body, form, "form")
    else:
        assert reply.status in {400, 404, 415}, f"{reply.status}"


async def b6(bench: Bench) -> None:
    """An answer with fields that nobody knows, nulls and NaN passes byte for byte."""
    text = b'{"id":"x", "choices":[ {"index":0,"matched_stop":128009,"message":{"content":null,'
    text += b'"reasoning_content":"r"}}],"meta_info":{"nan":NaN,"n":[null,[null]]},"zz":1}\n'
    bench.both(says(response(text)))
    same((await bench.ask(body())).body, text, "bytes")


# ---------------------------------------------------------------------- security, surface


async def x4(bench: Bench) -> None:
    """No admin path of an engine can be reached through the public address."""
    for path in ("/flush_cache", "/update_weights_from_disk", "/abort_request", "/start_profile",
                 "/v1/../flush_cache", "/v1/%2e%2e/flush_cache"):  # fmt: skip
        bench.both(answer_ok)
        await bench.ask(body(), path)
        assert not bench.posts, f"{path} reaches a backend"


def memory(pid: int) -> int:
    """The most memory that a process and its children had, in bytes."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        children = (task / "children").read_text() if (task / "children").exists() else ""
        total += sum(memory(int(child)) for child in children.split())
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return total + (int(found[1]) * 1024 if found else 0)


async def x5(bench: Bench) -> None:
    """Ten clients that never read cost less than 50 MB, whatever the backends could send."""

    async def answer(call: Call) -> None:
        if not json.loads(call.body)["stream"]:
            await call.send(response())
            return
        await call.send(STREAM_HEAD)
        await call.flood(200 * 1024 * 1024, chunk(b"data: " + b"x" * 65_520 + b"\n\n"))

    bench.both(answer)
    bench.a.watch_s = bench.b.watch_s = 0.1
    same((await bench.ask(body())).status, 200, "status without a stream")
    before = memory(bench.process.pid)
    clients = [await Client.open(bench.port) for _ in range(10)]
    for client in clients:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post(body(stream=True)))
    await asyncio.sleep(5)
    grown = memory(bench.process.pid) - before
    for client in clients:
        client.abort()
    assert grown < 50 * 1024 * 1024, f"{grown / 1e6:.0f} MB"


async def x6(bench: Bench) -> None:
    """Half a head is closed within 65 s, although a byte comes now and then."""
    bench.both(answer_ok)
    client = await Client.open(bench.port)
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
    for _ in range(65):
        await client.send(b"a")
        if await client.closed(1):
            break
    assert client.ended, "it is still open"
    client.close()


async def a2(bench: Bench) -> None:
    """A trailing slash is served or 404, and never a redirect."""
    bench.both(answer_ok)
    reply = await bench.ask(body(), CHAT + "/", "x-forwarded-proto: https")
    assert reply.status in {200, 404}, f"{reply.status}"
    same(reply.header("location"), None, "Location")


async def a5(bench: Bench) -> None:
    """HEAD has no body, a wrong method is 405 with Allow, an unknown path 404 in JSON."""
    bench.both(answer_ok)
    reply = await ask(bench.port, get("/health", method="HEAD"), head_only=True)
    same((reply.status, reply.rest), (200, b""), "HEAD /health")
    reply = await ask(bench.port, get(CHAT, method="PUT"))
    assert reply.status == 405, f"PUT: {reply.status}"
    assert "POST" in (reply.header("allow") or ""), "no Allow"
    reply = await ask(bench.port, get("/favicon.ico"))
    same((reply.status, reply.body[:1]), (404, b"{"), "an unknown path")


Trial = Callable[[Bench], Awaitable[None]]
TRIALS: dict[str, Trial] = {
    "S8 stream": s8_stream, "S8 plain": s8_plain, "S1": s1, "S3": s3, "S4": s4, "S5": s5, "S6": s6,
    "S10": s10, "S11": s11, "S12": s12, "E1": e1, "E2": e2, "E3": e3, "E4": e4, "E5": e5, "E8": e8,
    "E9": e9, "D2": lambda bench: leaves(bench, streamed=True),
    "D3": lambda bench: leaves(bench, streamed=False), "D6": d6, "D8": d8, "D9": d9, "D12": d12,
    "D13": d13, "D14": d14, "H1, H2": h1, "H1 stream": h1_stream, "H4": h4, "H5": h5, "H6": h6,
    "H7": h7, "H8": h8, "H9": h9, "B1": b1, "B3": b3, "B4": b4, "B5": b5, "B6": b6, "X4": x4,
    "X5": x5, "X6": x6, "A2": a2, "A5": a5,
}  # fmt: skip
