"""Steady load from a process of its own: so many clients, each with one request open at any time.

    python -m tests.chaos.load --port 8000 --clients 200 --prefix a --expected FILE --out FILE

Every request has an id of its own and a prompt whose answer is known, so that an answer is not
only ended as it should be but the right one, word for word. Most stream; some leave in the middle.
After SIGTERM nothing new is sent, what runs may end, and the process exits. One JSON line a
request says what became of it:

    whole    the right answer, with its proper end
    error    in the shape of OpenAI: an HTTP error, or a stream that is nothing but an error event
    broken   explicitly: the connection broke, before or within the answer, or an error event in it
    left     by ourselves, on purpose
    unsent   no connection: nothing was sent
    lost     silently: a proper end of what is not the answer, or nothing for a long time
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final, cast

import httptools
import msgspec
import uvloop

TOKENS: Final = 24
LOST_S: Final = 45.0  # nothing for so long: the request is lost
RETRY_S: Final = 0.2  # after a refused connection, and after an error
PAUSE_S: Final = 0.02  # the most between two requests of one client
LEAVING: Final = 0.03  # share of the requests
WHOLE_BODY: Final = 0.2  # share that does not stream


class Result(msgspec.Struct):
    """What became of one request. Times are monotonic seconds, which all processes share."""

    id: str
    sent: float
    ended: float
    kind: str
    status: int = 0
    detail: str = ""
    backend: str = ""
    reason: str = ""


class Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.gone = False
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.parser = httptools.HttpResponseParser(self)
        self.news = asyncio.Event()
        self.whole = False
        self._transport: asyncio.Transport

    def begin(self, data: bytes) -> None:
        """Send a request."""
        self.headers, self.body, self.whole = {}, bytearray(), False
        self.parser = httptools.HttpResponseParser(self)
        self._transport.write(data)

    def close(self) -> None:
        """Hang up."""
        self.gone = True
        self._transport.abort()

    @property
    def status(self) -> int:
        """Of the answer; 0 before its head."""
        return self.parser.get_status_code() if self.headers else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self.news.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.whole = True
        if not self.parser.should_keep_alive():
            self.close()


class Load:
    """All clients."""

    def __init__(self, told: argparse.Namespace) -> None:
        self.port: int = told.port
        self.prefix: str = told.prefix
        self.expected: dict[str, str] = json.loads(told.expected.read_bytes())
        self.prompts = sorted(self.expected)
        self.stopped = asyncio.Event()
        self.results: list[Result] = []
        self.numbers = iter(range(1 << 40))
        self.random = random.Random(told.prefix)

    async def client(self) -> None:
        """One request after another."""
        connection: Connection | None = None
        while not self.stopped.is_set():
            if connection is None or connection.gone:
                connection = await self._connect()
            if connection is not None:
                await self._one(connection)
                fine = self.results[-1].kind in {"whole", "left"}
                await asyncio.sleep(self.random.uniform(0, PAUSE_S) if fine else RETRY_S)
        if connection is not None and not connection.gone:
            connection.close()

    async def _connect(self) -> Connection | None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self.port)
        except OSError as error:
            now = time.monotonic()
            self.results.append(Result("-", now, now, "unsent", detail=type(error).__name__))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopped.wait(), RETRY_S)
            return None
        return connection

    async def _one(self, connection: Connection) -> None:
        name = f"{self.prefix}-{next(self.numbers)}"
        prompt = self.random.choice(self.prompts)
        stream = self.random.random() >= WHOLE_BODY
        leaves = self.random.random() < LEAVING
        body = request_body(prompt, name, stream=stream)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: chaos\r\nx-request-id: {name}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        result = Result(name, time.monotonic(), 0.0, "lost")
        connection.begin(head.encode() + body)
        try:
            async with asyncio.timeout(LOST_S):
                await self._wait(connection, leaves=leaves)
            result.kind, result.detail = judge(connection, self.expected[prompt], stream=stream)
        except TimeoutError:
            result.detail = f"nothing within {LOST_S:.0f} s"
            connection.close()
        if leaves and result.kind == "broken":
            result.kind = "left"
        result.ended = time.monotonic()
        result.status = connection.status
        result.backend = connection.headers.get(b"x-crossover-backend", b"").decode()
        result.reason = connection.headers.get(b"x-crossover-reason", b"").decode()
        self.results.append(result)

    async def _wait(self, connection: Connection, *, leaves: bool) -> None:
        """For the end of the answer, or for its first byte."""
        while not (connection.whole or connection.gone):
            connection.news.clear()
            await connection.news.wait()
            if leaves and not connection.whole:
                connection.close()


def request_body(prompt: str, name: str, *, stream: bool) -> bytes:
    """The body of one request."""
    fields: dict[str, Any] = {
        "model": "sim-llama-8b", "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS, "ignore_eos": True, "stream": stream, "user": name,
    }  # fmt: skip
    return msgspec.json.encode(fields)


def judge(connection: Connection, expected: str, *, stream: bool) -> tuple[str, str]:
    """What an answer is, and why."""
    if not connection.whole:
        return "broken", f"after {len(connection.body)} bytes"
    body = bytes(connection.body)
    if connection.status != 200:
        try:
            error = json.loads(body)
            code = error.get("error", error)["code"]  # SGLang's own errors are flat
        except (ValueError, KeyError, TypeError, AttributeError):
            return "lost", f"a {connection.status} without an error: {body[:80]!r}"
        return "error", str(code)
    try:
        text, done, failed = read_stream(body) if stream else read_whole(body)
    except (ValueError, KeyError, TypeError, IndexError):
        return "lost", f"not readable: {body[-80:]!r}"
    if failed is not None:
        return "broken" if text else "error", f"event {failed}"
    if not done:
        return "lost", "a proper end without [DONE]"
    return ("whole", "") if text == expected else ("lost", f"another answer: {text[:80]!r}")


def read_whole(body: bytes) -> tuple[str, bool, None]:
    """The text of an answer in one piece."""
    return json.loads(body)["choices"][0]["message"]["content"], True, None


def read_stream(body: bytes) -> tuple[str, bool, str | None]:
    """Text, whether `[DONE]` came, and the code of an error event."""
    text: list[str] = []
    for event in body.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            return "".join(text), True, None
        if not data:
            continue
        found = msgspec.json.decode(data)
        if "error" in found:
            return "".join(text), False, str(found["error"]["code"])
        text += [choice["delta"].get("content") or "" for choice in found["choices"]]
    return "".join(text), False, None


async def run(told: argparse.Namespace) -> None:
    """The load, until SIGTERM."""
    load = Load(told)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, load.stopped.set)
    async with asyncio.TaskGroup() as group:
        for _ in range(told.clients):
            group.create_task(load.client())
    encode = msgspec.json.encode
    told.out.write_bytes(b"".join(encode(result) + b"\n" for result in load.results))


def main(arguments: list[str]) -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.load")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--expected", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    uvloop.run(run(parser.parse_args(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
