"""A side scanner of server-sent events: it looks, the relay relays.

It reads what metrics and outcomes need (usage, `[DONE]`, error events, whether the stream stands
between two events) and gives the same answer however the bytes were cut. Nothing here decodes,
changes or holds back a byte, and memory is bounded: of an event longer than `MAX_EVENT` only the
end is kept, so its boundary is still found and its content is not read.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

MAX_EVENT: Final = 65_536  # bytes; a usage event is a few hundred
# Two line ends in a row, each CRLF, LF or CR (WHATWG HTML section 9.2.6). Atomic, so that one CRLF
# is never taken for two.
_BOUNDARY = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_DATA = re.compile(rb"(?:^|[\r\n])data: ?([^\r\n]*)")


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None  # Anthropic's and /v1/responses' names
    output_tokens: int | None = None


class _Nested(msgspec.Struct, gc=False):
    usage: _Usage | None = None


class _Event(msgspec.Struct, gc=False):
    usage: _Usage | None = None
    meta_info: _Usage | None = None  # native /generate
    response: _Nested | None = None  # /v1/responses' last event
    error: msgspec.Raw = msgspec.Raw()


class _ErrorBody(msgspec.Struct, gc=False):
    code: msgspec.Raw = msgspec.Raw()


_events = msgspec.json.Decoder(_Event)
_errors = msgspec.json.Decoder(_ErrorBody)

Usage = tuple[int | None, int | None]  # prompt tokens, output tokens


def usage_of(json: bytes) -> Usage:
    """Prompt and output tokens that a JSON object reports; None for what it does not say."""
    try:
        event = _events.decode(json)
    except (msgspec.DecodeError, RecursionError):
        return None, None
    usage = event.usage or event.meta_info or (event.response.usage if event.response else None)
    if usage is None:
        return None, None
    prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    output = usage.completion_tokens
    return prompt, output if output is not None else usage.output_tokens


def error_code(json: bytes) -> int | None:
    """The code of an error event: 500 when it names none, None when this is no error event."""
    try:
        raw = bytes(_events.decode(json).error)
    except (msgspec.DecodeError, RecursionError):
        return None
    if raw in {b"", b"null"}:
        return None
    try:
        code = bytes(_errors.decode(raw).code)
    except (msgspec.DecodeError, RecursionError):
        return 500
    return int(code) if code.isdigit() and len(code) == 3 else 500


def first_event_end(data: bytes) -> int:
    """Where the first event ends, its empty line included; -1 when it is not whole."""
    match = _BOUNDARY.search(data)
    return match.end() if match else -1


def data_lines(events: bytes) -> list[bytes]:
    """The payloads of all data lines."""
    return _DATA.findall(events)


class SseScanner:
    """Follows one stream. Feed it every payload, read its fields at the end."""

    __slots__ = ("_carry", "_last_usage", "done", "error")

    def __init__(self) -> None:
        self._carry = b""
        self._last_usage = b""
        self.done = False  # [DONE] was seen
        self.error: int | None = None  # code of the last error event

    @property
    def between_events(self) -> bool:
        """Whether the last byte seen ended an event."""
        return not self._carry.strip(b"\r\n")

    @property
    def usage(self) -> Usage:
        """Tokens of the last event that reported any."""
        for line in reversed(data_lines(self._last_usage)):
            if b"_tokens" in line:
                return usage_of(line)
        return None, None

    def feed(self, payload: bytes) -> None:
        """Look at the next bytes of the stream."""
        if self._carry or not payload.endswith(b"\n\n"):
            payload = self._whole_events(payload)
        if b'_tokens"' in payload:
            self._last_usage = payload
        if b"[DONE]" in payload and b"[DONE]" in data_lines(payload):
            self.done = True
        if b'"error"' in payload:
            self._look_for_error(payload)

    def _whole_events(self, payload: bytes) -> bytes:
        """Join with what was carried; keep the unfinished end for the next read."""
        joined = self._carry + payload
        end = 0
        # Only the tail can hold the last boundary: the carried part holds none but at its end.
        for match in _BOUNDARY.finditer(joined, max(0, len(self._carry) - 3)):
            end = match.end()
        self._carry = joined[end:][-MAX_EVENT:]
        return joined[:end]

    def _look_for_error(self, events: bytes) -> None:
        for line in data_lines(events):
            if b'"error"' in line:
                code = error_code(line)
                if code is not None:
                    self.error = code
