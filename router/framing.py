"""How a backend's answer is framed: its head, and where its body ends.

`ChunkedReader` finds the payloads in chunked framing and says when a read was nothing but whole
plain chunks, so that those bytes can be passed on as they came; `receiving` reads with it the bodies
of requests that the parser does not.

It may not guess: what could be read in two ways is an error. Nor may it look at a body, or know of
an answer to HEAD, since the relay asks none.

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
# Some parsers take these for white space or line ends (llhttp and RFC 9110 section 5.5 refuse them).
_BARE = bytes([*range(0x09), *range(0x0A, 0x20), 0x7F])
# A chunk's size line: at most 15 hex digits, so that no size can overflow, then an extension.
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})\r\n")
_CHUNK_EXT = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_MAX_LINE: Final = 4096  # bytes of a chunk's size line or a trailer line, CRLF included


class FramingError(ValueError):
    """These bytes are not framed as HTTP/1.1 in a way that allows of one reading."""


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """One parsed head. Header names are lower case, values stripped."""

    status: int
    reason: bytes
    headers: list[tuple[bytes, bytes]]
    framing: Literal["none", "length", "chunked", "close"]
    length: int = 0  # bytes of the body, when the framing is "length"
    keep_alive: bool = True
    event_stream: bool = False  # one that can be read: not compressed
    connection: frozenset[bytes] = frozenset()  # headers that Connection makes hop-by-hop
    lines: bytes = b""  # status line and headers as a client gets them, where that was made ready

    def has(self, name: bytes) -> bool:
        """Whether a header is there."""
        return any(key == name for key, _ in self.headers)

    @property
    def is_json(self) -> bool:
        """Whether the body is one JSON value, and no stream of them."""
        return any(
            key == b"content-type" and value[:16].lower() == b"application/json"
            for key, value in self.headers
        )


class _Line(msgspec.Struct, frozen=True, gc=False):
    """One header line that was read and found sound."""

    header: tuple[bytes, bytes]
    plain: bool = True  # it says nothing about the framing
    length: int | None = None
    chunked: bool = False
    event_stream: bool = False
    encoded: bool = False
    connection: frozenset[bytes] = frozenset()


# A backend's heads are alike but for a few values: what a line says is remembered. So many lines
# mean that the memory is of no use; it is emptied, which costs less than knowing which were used.
REMEMBERED: Final = 1024
MEMORABLE: Final = 512  # bytes of a line
_lines: dict[bytes, _Line] = {}
_status_lines: dict[bytes, tuple[bool, int, bytes]] = {}


def _read_line(line: bytes) -> _Line:
    """Read one header line. Raises FramingError."""
    name, colon, value = line.partition(b":")
    if not colon or not name or name.translate(None, _TOKEN):
        raise FramingError("bad header line")
    if len(value.translate(None, _BARE)) != len(value):
        raise FramingError("control character, bare CR or bare LF in the head")
    name, value = name.lower(), value.strip(b" \t")
    found = _understand(name, value)
    if len(line) <= MEMORABLE:
        if len(_lines) >= REMEMBERED:
            _lines.clear()
        _lines[line] = found
    return found


def _understand(name: bytes, value: bytes) -> _Line:
    """What a header says about the framing. Raises FramingError."""
    header = (name, value)
    if name == b"content-length":
        if not value.isdigit() or len(value) > 18:
            raise FramingError("bad Content-Length")
        return _Line(header, plain=False, length=int(value))
    if name == b"transfer-encoding":
        if value.lower() != b"chunked":
            raise FramingError("unknown Transfer-Encoding")
        return _Line(header, plain=False, chunked=True)
    if name == b"content-type" and value[:17].lower() == b"text/event-stream":
        return _Line(header, plain=False, event_stream=True)
    if name == b"content-encoding" and value.lower() != b"identity":
        return _Line(header, plain=False, encoded=True)
    if name == b"connection":
        tokens = frozenset(token.strip().lower() for token in value.split(b","))
        return _Line(header, plain=False, connection=tokens)
    return _Line(header)


def _read_status(line: bytes) -> tuple[bool, int, bytes]:
    """Whether it is HTTP/1.1, the status and its phrase. Raises FramingError."""
    match = _STATUS.fullmatch(line)
    if match is None:
        raise FramingError("bad status line")
    found = (match[1] == b"1", int(match[2]), match[3] or b"")
    if len(_status_lines) >= REMEMBERED:
        _status_lines.clear()
    _status_lines[line] = found
    return found


def parse_head(block: bytes) -> ResponseHead:
    """Parse a head given without its final empty line. Raises FramingError."""
    first, *rest = block.split(b"\r\n")
    modern, status, reason = _status_lines.get(first) or _read_status(first)
    headers: list[tuple[bytes, bytes]] = []
    length: int | None = None
    chunked = event_stream = encoded = False
    tokens: frozenset[bytes] = frozenset()
    for raw in rest:
        line = _lines.get(raw) or _read_line(raw)
        headers.append(line.header)
        if line.plain:
            continue
        if (line.length is not None and length is not None) or (line.chunked and chunked):
            raise FramingError("repeated Content-Length or Transfer-Encoding")
        if line.length is not None:
            length = line.length
        chunked = chunked or line.chunked
        event_stream = event_stream or line.event_stream
        encoded = encoded or line.encoded
        if line.connection:
            tokens |= line.connection
    # RFC 9112 section 6.3, with what is ambiguous refused.
    if chunked and (length is not None or not modern):
        raise FramingError("Transfer-Encoding beside Content-Length or in HTTP/1.0")
    keep_alive = b"close" not in tokens and (modern or b"keep-alive" in tokens)
    framing: Literal["none", "length", "chunked", "close"] = "close"
    if status < 200 or status in {204, 304}:
        framing, length = "none", None
    elif chunked:
        framing = "chunked"
    elif length is not None:
        framing = "length"
    else:
        keep_alive = False
    return ResponseHead(
        status,
        reason,
        headers,
        framing,
        length or 0,
        keep_alive,
        event_stream and not encoded,
        tokens - {b"close", b"keep-alive", b""} if tokens else tokens,
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

    @property
    def between_chunks(self) -> bool:
        """Whether the next byte begins a chunk."""
        return not (self._left or self._line or self._trailers)

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of one read. Raises FramingError."""
        self.plain = not self._left and not self._line and not self._trailers
        if self.plain:  # and then nearly always: one whole chunk
            match = _CHUNK.match(data)
            if match is not None:
                start = match.end()
                end = start + int(match[1], 16)
                if start < end == len(data) - 2 and data.endswith(b"\r\n"):
                    return [data[start:end]]
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
                if match.end() - at > _MAX_LINE:
                    raise FramingError("chunk size line too long")
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
                    raise FramingError("chunk does not end in CRLF")
                return payloads
            if data[end : end + 2] != b"\r\n":
                raise FramingError("chunk does not end in CRLF")
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
            raise FramingError("chunk does not end in CRLF")
        self._left -= take
        return take

    def _keep_line(self, line: bytes) -> None:
        """Keep the beginning of a size line; refuse what can never become one."""
        if len(line) >= _MAX_LINE or not _could_be_size(line):
            raise FramingError("bad chunk size line")
        self._line = line

    def _skip_trailers(self, data: bytes, at: int) -> None:
        """Drop trailer lines until the empty one."""
        while True:
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at >= _MAX_LINE:
                    raise FramingError("trailer line too long")
                self._line = data[at:]
                self.plain = False
                return
            if end == at:
                self.done = True
                self.rest = data[end + 2 :]
                return
            line = data[at:end]
            if len(line) + 2 > _MAX_LINE or b"\n" in line or b"\r" in line:
                raise FramingError("bad trailer line")
            self.plain = False
            at = end + 2


_SIZE_BEGIN = re.compile(rb"[0-9a-fA-F]{0,15}(?:[ \t]*(?:;[^\r\n]*)?)?\r?")


def _could_be_size(line: bytes) -> bool:
    return _SIZE_BEGIN.fullmatch(line) is not None
