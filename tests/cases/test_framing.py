"""Cases of HTTP framing, headers and encodings: one reading of every message, and nothing recoded."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import itertools
import random
import zlib

from router.load import Role
from tests.cases.common import DONE, END, TOKEN, body, every, pair, says
from tests.raw_client import CHAT, Client, ask, chunked, get, post
from tests.scripted_backend import STREAM_HEAD, Call, answer_ok, chunk, response
from tests.stack import run

BODY = b'{"messages":[]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
SMUGGLED = get("/metrics", "connection: close")


def test_H8_no_request_is_read_as_two() -> None:
    """The five most telling inputs, a GET behind each: one refusal and a close, or one request.

    The whole corpus is in `tests/wire/`.
    """
    te = b"transfer-encoding: chunked\r\n"
    refused = {
        "CL and TE": HEAD + b"content-length: 4\r\n" + te + b"\r\n" + chunked(BODY),
        "two CL": HEAD + b"content-length: 15\r\ncontent-length: 50\r\n\r\n" + BODY,
        "gzip, chunked": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunked(BODY),
        "bare LF in a chunk": HEAD + te + b"\r\nf\n" + BODY + b"\r\n0\r\n\r\n",
        "obs-fold": HEAD + b"x: a\r\n content-length: 0\r\ncontent-length: 15\r\n\r\n" + BODY,
    }

    async def work() -> None:
        async with pair() as both:
            for role, (name, raw) in itertools.product(Role, refused.items()):
                chosen, spare = both.on(role, answer_ok)
                client = await Client.open(both.port)
                await client.send(raw + SMUGGLED)
                assert await client.closed(), name
                assert client.raw.count(b"HTTP/1.1 ") == 1, name
                assert client.raw[9:12] in {b"400", b"501"}, name
                assert chosen.calls + spare.calls == [], name
                client.close()
            # Of a sound one the length is what counts, and what follows is a request of its own.
            for role in Role:
                chosen, _ = both.on(role, answer_ok)
                client = await Client.open(both.port)
                await client.send(HEAD + b"content-length: 15\r\n\r\n" + BODY + SMUGGLED)
                assert await client.closed()
                assert client.raw.count(b"HTTP/1.1 ") == 2
                assert [call.body for call in chosen.calls] == [BODY]
                client.close()

    run(work, 20)


def test_H4_the_length_is_always_that_of_the_body() -> None:
    """Non-ASCII both ways: Content-Length counts bytes, and no body is ever rewritten."""
    text = '{"choices":[{"message":{"content":"你好 😀 é — ß"}}]}'.encode()
    asked = (
        '{"model":"alias","messages":[{"role":"user","content":"你好 😀"}],"stream":%b}'.encode()
    )

    async def work() -> None:
        async with pair() as both:
            for role, path, stream in every():
                chosen, _ = both.on(role, says(response(text)))
                sent = asked.replace(b"%b", b"true" if stream else b"false")
                reply = await both.ask(sent, path)
                assert (reply.whole, reply.body, reply.rest) == (True, text, b"")
                assert reply.header("content-length") == str(len(text))
                (call,) = chosen.calls
                assert call.body == sent
                assert call.headers[b"content-length"] == str(len(sent)).encode()

    run(work, 20)


def coded() -> dict[str, bytes]:
    """Bodies as they are on the wire: two real codings, and two that we could not even read."""
    plain = b'{"choices":[{"text":"hello"}]}' * 50
    return {
        "gzip": gzip.compress(plain),
        "deflate": zlib.compress(plain),
        "br": bytes(range(256)) * 3,
        "zstd": b"\x28\xb5\x2f\xfd" + bytes(reversed(range(256))),
    }


def test_H1_compressed_bodies_pass_with_their_coding() -> None:
    """Compressed JSON and events reach the client as the same bytes under the same coding."""
    events = gzip.compress(TOKEN % b"a" + DONE)

    async def work() -> None:
        async with pair() as both:
            for role, path, stream in every():
                for coding, packed in coded().items():
                    extra = f"content-encoding: {coding}\r\nvary: accept-encoding\r\n".encode()
                    chosen, _ = both.on(role, says(response(packed, extra=extra)))
                    reply = await both.ask(body(stream=stream), path, f"accept-encoding: {coding}")
                    assert (reply.whole, reply.body) == (True, packed)
                    assert reply.header("content-encoding") == coding
                    assert reply.header("content-length") == str(len(packed))
                    assert chosen.calls[0].headers[b"accept-encoding"] == coding.encode()

                head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")

                async def cut(call: Call, head: bytes = head) -> None:
                    await call.send(head + chunk(events[:20]))
                    await asyncio.sleep(0.001)
                    await call.send(chunk(events[20:]) + END)

                both.on(role, cut)
                reply = await both.ask(body(stream=stream), path, "accept-encoding: gzip")
                assert (reply.whole, reply.header("content-encoding")) == (True, "gzip")
                assert gzip.decompress(reply.body) == TOKEN % b"a" + DONE

    run(work, 20)


def test_H2_the_coding_is_named_wherever_bytes_are_untouched() -> None:
    """Content-Encoding stays on answers of every status, refusals among them."""
    packed = gzip.compress(b'{"error":{"message":"x"}}')

    async def work() -> None:
        async with pair(retry_budget=1) as both:
            for role, path, stream in every():
                for status in ("200 OK", "400 X", "404 X", "422 X", "429 X", "500 X", "503 X"):
                    sent = response(packed, status, b"content-encoding: gzip\r\n")
                    both.on(role, says(sent), says(sent))
                    reply = await both.ask(body(stream=stream), path, "accept-encoding: gzip")
                    assert (reply.status, reply.body) == (int(status[:3]), packed)
                    assert reply.header("content-encoding") == "gzip"

    run(work, 20)


def framings(headers: list[bytes]) -> list[bytes]:
    """The headers that say where a body ends."""
    return [name for name in headers if name in {b"content-length", b"transfer-encoding"}]


def test_H5_each_side_has_exactly_one_framing() -> None:
    """Chunked, announced and close-delimited answers and uploads have one framing header each."""
    close = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}"

    async def work() -> None:
        async with pair() as both:
            for role, path, stream in every():
                for sent, by_end in (
                    (STREAM_HEAD + chunk(TOKEN % b"a") + chunk(DONE) + END, False),
                    (response(b"{}"), False),
                    (close, True),
                ):
                    for upload in (True, False):
                        chosen, _ = both.on(role, says(sent, close=by_end))
                        raw = post(body(stream=stream), path)
                        if upload:
                            data = raw.partition(b"\r\n\r\n")[2]
                            framing = b"transfer-encoding: chunked"
                            raw = post(chunked(data[:5], data[5:]), path, framing=framing)
                        reply = await ask(both.port, raw)
                        assert (reply.status, reply.whole) == (200, True)
                        assert len(framings([name for name, _ in reply.headers])) == 1
                        lines = chosen.calls[0].head.lower().split(b"\r\n")
                        names = [line.partition(b":")[0] for line in lines]
                        assert framings(names) == [b"content-length"]

    run(work, 20)


def test_H6_chunked_uploads_arrive_unchanged() -> None:
    """200 chunks of 1 to 9,000 bytes with 0x00 and 0xFF, sent slowly, arrive as the same bytes.

    A pause of 1 ms after every tenth chunk. A JSON string may hold no raw 0x00, so those go to a
    route that reads no JSON: a compressed body, which the router cannot look into.
    """
    dice = random.Random(606)
    pieces = [dice.randbytes(dice.randint(1, 9000)) + b"\0\xff" for _ in range(200)]
    text = [b'{"x":"', *[b"\xc3\xa9" * dice.randint(1, 4000) for _ in range(198)], b'"}']

    async def work() -> None:
        async with pair() as both:
            for role in Role:
                for parts, extra in ((pieces, "content-encoding: zstd"), (text, "x-plain: 1")):
                    chosen, _ = both.on(role, answer_ok)
                    client = await Client.open(both.port)
                    await client.send(
                        post(b"", CHAT, (extra,), framing=b"transfer-encoding: chunked")
                    )
                    for n, piece in enumerate(parts):
                        await client.send(chunk(piece))
                        if n % 10 == 0:
                            await asyncio.sleep(0.001)
                    await client.send(END)
                    assert (await client.reply()).status == 200
                    client.close()
                    got = hashlib.sha256(chosen.calls[0].body).digest()
                    assert got == hashlib.sha256(b"".join(parts)).digest()

    run(work, 20)


def test_H7_hop_by_hop_headers_stay_on_their_hop() -> None:
    """What belongs to one connection, and what Connection names, passes in neither direction."""
    asked = (
        "connection: close, X-Hop", "X-Hop: 1", "Keep-Alive: timeout=9", "TE: trailers",
        "Proxy-Authorization: Basic eA==", "Proxy-Connection: keep-alive", "Trailer: x",
        "Upgrade: h2c", "HTTP2-Settings: AAA", "x-kept: 1",
    )  # fmt: skip
    gone = {
        "connection", "x-hop", "keep-alive", "te", "proxy-authorization", "proxy-connection",
        "trailer", "upgrade", "http2-settings", "proxy-authenticate",
    }  # fmt: skip
    extra = (
        b"connection: close, X-Hop\r\nx-hop: 1\r\nkeep-alive: timeout=1\r\nupgrade: h2c\r\n"
        b"proxy-authenticate: Basic\r\nx-kept: 1\r\ntrailer: x\r\n"
    )

    async def work() -> None:
        async with pair() as both:
            for role, path, stream in every():
                chosen, _ = both.on(role, says(response(extra=extra), close=True))
                reply = await both.ask(body(stream=stream), path, *asked)
                assert (reply.status, reply.whole) == (200, True)
                names = {name.decode() for name in chosen.calls[0].headers}
                assert names & gone == set()
                assert "x-kept" in names
                back = {name.decode() for name, _ in reply.headers}
                assert back & (gone - {"connection"}) == set()  # its own says close, as asked
                assert (reply.header("connection"), reply.header("x-kept")) == ("close", "1")

                # The client's connection lives on although the backend closes its own.
                client = await Client.open(both.port)
                for _ in range(2):
                    await client.send(post(body(stream=stream), path))
                    reply = await client.reply()
                    assert (reply.status, reply.header("connection")) == (200, None)
                client.close()

    run(work, 20)


def test_H9_one_date_and_one_server() -> None:
    """Each answer has one Date and one Server, the router's, whoever makes it."""
    extra = b"date: Thu, 01 Jan 1970 00:00:00 GMT\r\nserver: uvicorn\r\n"

    async def work() -> None:
        async with pair() as both:
            replies = []
            for role, path, stream in every():
                both.on(role, says(response(extra=extra)))
                replies.append(await both.ask(body(stream=stream), path))
                both.on(role, says(response(b"{}", "400 X", extra)))
                replies.append(await both.ask(body(stream=stream), path))
            for raw in (get("/health"), get("/nothing"), post(b"["), b"nonsense\r\n\r\n"):
                replies.append(await ask(both.port, raw))  # noqa: PERF401
            for reply in replies:
                assert "1970" not in (reply.header("date") or "1970")
                assert reply.header("server") == "crossover"

    run(work, 20)
