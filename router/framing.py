"""How a backend's answer is framed: its head, and where its body ends.

Strict where it matters: an answer that could be read in two ways is an error, never a guess. The
body itself is not looked at. `ChunkedReader` finds the payloads in chunked framing and says when a
read was nothing but whole plain chunks, so that those bytes can be passed on as they came.

Why not httptools, as on the client's side: its parser is bound to one connection and hands out one
callback per line and chunk; an answer needs its head once, as values, and the chunk lengths. Tests
compare this module with h11 on generated answers.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

MAX_HEAD: Final = 65_536  # bytes; llhttp's, nginx's and HAProxy's limits are 8 to 64 KiB
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: ([^\x00-\x08\x0a-\x1f\x7f]*))?")
_TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# A chunk's size line: at most 15 hex digits, so that no size can overflow, then an extension.
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})\r\n")
_CHUNK_EXT = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_MAX_LINE: Final = 4096  # bytes of a chunk's size line or a trailer line


class FramingError(ValueError):
    """The backend's bytes are not one unambiguous HTTP/1.1 answer."""


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """One parsed head. Header names are lower case, values stripped."""

    status: int
    reason: bytes
    headers: list[tuple[bytes, bytes]]
    framing: Literal["none", "length", "chunked", "close"]
    length: int = 0  # bytes of the body, when the framing is "length"
    keep_alive: bool = True
    event_stream: bool = False
    connection: frozenset[bytes] = frozenset()  # headers that Connection makes hop-by-hop

    def has(self, name: bytes) -> bool:
        """Whether a header is there."""
        return any(key == name for key, _ in self.headers)


class _Facts:
    """What the framing headers of one head say."""

    __slots__ = ("chunked", "connection", "event_stream", "length")

    def __init__(self) -> None:
        self.length: int | None = None
        self.chunked = False
        self.event_stream = False
        self.connection: frozenset[bytes] = frozenset()

    def take(self, name: bytes, value: bytes) -> None:
        """Note one header. Raises FramingError."""
        if name == b"content-length":
            if self.length is not None or not value.isdigit() or len(value) > 18:
                msg = "bad or repeated Content-Length"
                raise FramingError(msg)
            self.length = int(value)
        elif name == b"transfer-encoding":
            if self.chunked or value.lower() != b"chunked":
                msg = "unknown or repeated Transfer-Encoding"
                raise FramingError(msg)
            self.chunked = True
        elif name == b"content-type":
            self.event_stream = value[:17].lower() == b"text/event-stream"
        elif name == b"connection":
            tokens = frozenset(token.strip().lower() for token in value.split(b","))
            self.connection = self.connection | tokens


_FRAMING_NAMES = frozenset(
    {b"content-length", b"transfer-encoding", b"content-type", b"connection"}
)


def parse_head(block: bytes, *, head_request: bool = False) -> ResponseHead:
    """Parse a head given without its final empty line. Raises FramingError."""
    lines = block.split(b"\r\n")
    if block.count(b"\n") != len(lines) - 1 or block.count(b"\r") != len(lines) - 1:
        msg = "bare CR or LF in the head"
        raise FramingError(msg)
    first = _STATUS.fullmatch(lines[0])
    if first is None:
        msg = "bad status line"
        raise FramingError(msg)
    headers: list[tuple[bytes, bytes]] = []
    facts = _Facts()
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name.translate(None, _TOKEN) or b"\0" in value:
            msg = "bad header line"
            raise FramingError(msg)
        name, value = name.lower(), value.strip(b" \t")
        headers.append((name, value))
        if name in _FRAMING_NAMES:
            facts.take(name, value)
    return _conclude(first, headers, facts, head_request=head_request)


def _conclude(
    first: re.Match[bytes],
    headers: list[tuple[bytes, bytes]],
    facts: _Facts,
    *,
    head_request: bool,
) -> ResponseHead:
    """RFC 9112 section 6.3, with what is ambiguous refused."""
    status = int(first[2])
    if facts.chunked and (facts.length is not None or first[1] == b"0"):
        msg = "Transfer-Encoding beside Content-Length or in HTTP/1.0"
        raise FramingError(msg)
    tokens = facts.connection
    keep_alive = b"close" not in tokens and (first[1] == b"1" or b"keep-alive" in tokens)
    length = 0
    framing: Literal["none", "length", "chunked", "close"]
    if head_request or status < 200 or status in {204, 304}:
        framing = "none"
    elif facts.chunked:
        framing = "chunked"
    elif facts.length is not None:
        framing, length = "length", facts.length
    else:
        framing, keep_alive = "close", False
    named = tokens - {b"close", b"keep-alive", b""} if tokens else tokens
    return ResponseHead(
        status, first[3] or b"", headers, framing, length, keep_alive, facts.event_stream, named
    )


class ChunkedReader:
    """Finds payloads in chunked framing, whatever the cuts between reads.

    After `feed`: `plain` says that the read was whole chunks without extensions, `done` that the
    terminating chunk was seen, `rest` what came after it.
    """

    __slots__ = ("_left", "_line", "_trailers", "done", "plain", "rest")

    def __init__(self) -> None:
        self._left = 0  # bytes still to come of the current chunk, its CRLF included
        self._line = b""  # a size line, or a trailer line, that is not whole yet
        self._trailers = False
        self.done = False
        self.plain = False
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of one read. Raises FramingError."""
        self.plain = not self._left and not self._line and not self._trailers
        payloads: list[bytes] = []
        at = self._finish_chunk(data, payloads) if self._left else 0
        if self._line:
            data, at, self._line = self._line + data[at:], 0, b""
        while at < len(data) and not self._trailers:
            match = _CHUNK.match(data, at)
            if match is None:
                self.plain = False
                match = _CHUNK_EXT.match(data, at)
                if match is None:
                    self._keep_line(data[at:])
                    return payloads
            size, start = int(match[1], 16), match.end()
            if size == 0:
                self._trailers = True
                at = start
                break
            end = start + size
            if end + 2 > len(data):
                self.plain = False
                self._left = end + 2 - len(data)
                if start < len(data):
                    payloads.append(data[start:end])
                if end < len(data) and data[end:] != b"\r":
                    msg = "chunk does not end in CRLF"
                    raise FramingError(msg)
                return payloads
            if data[end : end + 2] != b"\r\n":
                msg = "chunk does not end in CRLF"
                raise FramingError(msg)
            payloads.append(data[start:end])
            at = end + 2
        if self._trailers:
            self._skip_trailers(data, at)
        return payloads

    def _finish_chunk(self, data: bytes, payloads: list[bytes]) -> int:
        """Take what belongs to a chunk begun in an earlier read; where the next one starts."""
        take = min(self._left, len(data))
        payload = max(0, min(take, self._left - 2))
        if payload:
            payloads.append(data[:payload])
        ending = data[payload:take]
        if ending and ending != b"\r\n"[2 - (self._left - payload) :][: len(ending)]:
            msg = "chunk does not end in CRLF"
            raise FramingError(msg)
        self._left -= take
        return take

    def _keep_line(self, line: bytes) -> None:
        """Keep the beginning of a size line; refuse what can never become one."""
        if len(line) > _MAX_LINE or (b"\n" in line) or not _could_be_size(line):
            msg = "bad chunk size line"
            raise FramingError(msg)
        self._line = line

    def _skip_trailers(self, data: bytes, at: int) -> None:
        """Drop trailer lines until the empty one."""
        while True:
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > _MAX_LINE:
                    msg = "trailer line too long"
                    raise FramingError(msg)
                self._line = data[at:]
                self.plain = False
                return
            if end == at:
                self.done = True
                self.rest = data[end + 2 :]
                return
            self.plain = False
            at = end + 2


_SIZE_BEGIN = re.compile(rb"[0-9a-fA-F]{0,15}(?:[ \t]*(?:;[^\r\n]*)?)?\r?")


def _could_be_size(line: bytes) -> bool:
    return _SIZE_BEGIN.fullmatch(line) is not None
