"""An HTTP/1.1 client over a raw socket: what it sends and what it got are bytes.

    reply = await ask(port, post({"messages": []}))

Nothing is smoothed over: a `Reply` says whether the answer came to its proper end (`whole`), whether
the connection was reset, and every header line as it came, repeats included. It retries nothing,
follows nothing and decodes no content.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_BODILESS = frozenset({204, 304})


@dataclass
class Reply:
    """One answer as far as it came."""

    status: int = 0  # 0: no head came
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # names in lower case
    body: bytes = b""  # without the framing
    whole: bool = False  # it came to its proper end
    reset: bool = False  # the connection ended with RST
    timed_out: bool = False  # nobody ended it within the time
    raw: bytes = b""
    rest: bytes = b""  # what came behind a whole answer

    def all(self, name: str) -> list[bytes]:
        """The values of a header, in the order in which they came."""
        return [value for key, value in self.headers if key == name.encode()]

    def header(self, name: str) -> str | None:
        """The value of a header that is there once; None when it is absent."""
        found = self.all(name)
        assert len(found) < 2, f"{name} came {len(found)} times"
        return found[0].decode("latin-1") if found else None

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error object in OpenAI's shape."""
        found = self.json()["error"]
        assert set(found) >= {"message", "type", "param", "code"}, found
        return found


def post(
    body: bytes | dict[str, Any],
    path: str = CHAT,
    headers: tuple[str, ...] = (),
    *,
    framing: bytes | None = None,
) -> bytes:
    """A POST as bytes; `framing` is the header line in place of Content-Length."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    line = b"content-length: %d" % len(data) if framing is None else framing
    lines = [f"POST {path} HTTP/1.1", "host: proxy", *headers]
    if not any(header.lower().startswith("content-type") for header in headers):
        lines.append("content-type: application/json")
    return "\r\n".join(lines).encode() + b"\r\n" + line + b"\r\n\r\n" + data


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    """A request without a body as bytes."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: proxy", *headers, "", ""]).encode()


def chunked(*pieces: bytes) -> bytes:
    """A whole chunked body, one chunk for each piece."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def parse(raw: bytes, *, ended: bool = False, head_only: bool = False) -> Reply:
    """The first final answer in the bytes; `ended`: the connection was closed with FIN."""
    while True:
        end = raw.find(b"\r\n\r\n")
        if end < 0:
            return Reply(raw=raw)
        lines = raw[:end].split(b"\r\n")
        match = re.fullmatch(rb"HTTP/1\.[01] (\d{3})(?: .*)?", lines[0])
        if match is None:
            return Reply(raw=raw)
        status = int(match[1])
        if status >= 200:
            break
        raw = raw[end + 4 :]
    pairs = [line.partition(b":") for line in lines[1:]]
    reply = Reply(status, [(n.lower(), v.strip(b" \t")) for n, _, v in pairs], raw=raw)
    data = raw[end + 4 :]
    lengths, codings = reply.all("content-length"), reply.all("transfer-encoding")
    if head_only or status in _BODILESS:
        reply.whole, reply.rest = True, data
    elif codings:
        reply.body, rest = _dechunk(data)
        reply.whole, reply.rest = rest is not None, rest or b""
    elif lengths:
        length = int(lengths[0])
        reply.body, reply.rest = data[:length], data[length:]
        reply.whole = len(data) >= length
    else:
        reply.body, reply.whole = data, ended
    return reply


def _dechunk(data: bytes) -> tuple[bytes, bytes | None]:
    """The payload so far, and what follows the last chunk once that is there."""
    body: list[bytes] = []
    at = 0
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return b"".join(body), None
        line = data[at:end].partition(b";")[0]
        if not re.fullmatch(rb"[0-9a-fA-F]+", line):
            return b"".join(body), None  # not chunked framing: never whole
        size, at = int(line, 16), end + 2
        if size == 0:
            last = data.find(b"\r\n", at)
            return b"".join(body), data[last + 2 :] if last == at else None
        body.append(data[at : at + size])
        if data[at + size : at + size + 2] != b"\r\n":
            return b"".join(body), None
        at += size + 2


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.raw = b""
        self.ended = False
        self.reset = False
        self._reader = reader

    @classmethod
    async def open(cls, port: int, host: str = "127.0.0.1") -> Client:
        """Connect."""
        return cls(*await asyncio.open_connection(host, port))

    async def send(self, data: bytes) -> None:
        """Send bytes now; a connection that is gone already shows when reading."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def _more(self) -> None:
        try:
            piece = await self._reader.read(262_144)
        except ConnectionError:
            self.ended = self.reset = True
            return
        self.raw += piece
        self.ended = not piece

    async def saw(self, text: bytes, seconds: float = 5.0) -> None:
        """Wait until these bytes have come. AssertionError when they do not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while text not in self.raw and not self.ended:
                    await self._more()
        assert text in self.raw, f"{text!r} did not come, but {self.raw[-300:]!r}"

    async def reply(self, seconds: float = 5.0, *, head_only: bool = False) -> Reply:
        """The next answer, whole or as far as it came."""
        timed_out = False
        try:
            async with asyncio.timeout(seconds):
                while not self.ended and not parse(self.raw, head_only=head_only).whole:
                    await self._more()
        except TimeoutError:
            timed_out = True
        found = parse(self.raw, ended=self.ended and not self.reset, head_only=head_only)
        found.reset, found.timed_out = self.reset, timed_out
        self.raw = found.rest
        return found

    async def closed(self, seconds: float = 5.0) -> bool:
        """Whether the other side ends the connection within the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.ended:
                    await self._more()
        return self.ended

    def close(self) -> None:
        """End the connection with FIN."""
        self.writer.close()

    def abort(self) -> None:
        """End the connection with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def ask(
    port: int, raw: bytes, seconds: float = 5.0, *, head_only: bool = False, host: str = "127.0.0.1"
) -> Reply:
    """Send one request on a connection of its own; the answer."""
    client = await Client.open(port, host)
    try:
        await client.send(raw)
        return await client.reply(seconds, head_only=head_only)
    finally:
        client.close()
