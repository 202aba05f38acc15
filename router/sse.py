"""A side scanner of server-sent events: it looks, the relay relays.

It reads what metrics and outcomes need (usage, `[DONE]`, error events, whether the stream stands
between two events) and gives the same answer however the bytes were cut. Nothing here decodes,
changes or holds back a byte, and memory is bounded: an event longer than `MAX_EVENT` is not read,
and while it lasts only its end is kept, so that its boundary is still found.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

# Bytes. A usage event is a few hundred, but the last one of /v1/responses holds the whole answer.
MAX_EVENT: Final = 262_144
# What a carried event may be longer than that, so that it is known to be too long at its end
# whatever line ends are around it.
_SLACK: Final = 8
# Some streams report usage with every event: only one in so many is read.
_MAX_TELLING: Final = 4
# An event without any of these tells the scanner nothing. With the colon: a piece of text may end
# in `_tokens`, and the quote comes after it.
TELLS_USAGE: Final = b'_tokens":'
TELLS_DONE: Final = b"[DONE]"
TELLS_ERROR: Final = b'"error"'
# Two line ends in a row, each CRLF, LF or CR (WHATWG HTML section 9.2.6); one CRLF is never taken for
# two. Not with an atomic group: then the search looks at each byte by the slow way.
_BOUNDARY = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
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


class _ErrorEvent(msgspec.Struct, gc=False):
    error: msgspec.Raw = msgspec.Raw()


class _ErrorBody(msgspec.Struct, gc=False):
    code: msgspec.Raw = msgspec.Raw()


_events = msgspec.json.Decoder(_Event)
_error_events = msgspec.json.Decoder(_ErrorEvent)
_error_bodies = msgspec.json.Decoder(_ErrorBody)
_NO_ERROR = frozenset({b"", b"null", b"false", b'""', b"{}"})

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
        raw = bytes(_error_events.decode(json).error)
    except (msgspec.DecodeError, RecursionError):
        return None
    if raw in _NO_ERROR:
        return None
    try:
        code = bytes(_error_bodies.decode(raw).code)
    except (msgspec.DecodeError, RecursionError):
        return 500
    return int(code) if code.isdigit() and len(code) == 3 else 500


def first_event(data: bytes) -> bytes | None:
    """The payload of the first event; None when none is whole. A comment is no event."""
    end = data.find(b"\n\n")
    if data[:6] == b"data: " and data.find(b"\n") == end > 0 and data.find(b"\r", 0, end) < 0:
        return data[6:end]  # the usual one: a line that ends as nearly all servers end theirs
    start = 0
    for boundary in _BOUNDARY.finditer(data):
        payload = _payload(data[start : boundary.start()])
        if payload is not None:
            return payload
        start = boundary.end()
    return None


def payloads(events: bytes) -> list[bytes]:
    """The payloads of whole events."""
    if events.find(b"\r") < 0:  # then two line ends are these, as nearly all servers write them
        found = map(_plain_payload, events.split(b"\n\n"))
    else:
        found = map(_payload, _BOUNDARY.split(events))
    return [payload for payload in found if payload is not None]


def _plain_payload(event: bytes) -> bytes | None:
    """As `_payload`, of an event without a carriage return."""
    if event[:6] == b"data: " and event.find(b"\n") < 0:
        return event[6:]
    return _payload(event) if event else None


def _payload(event: bytes) -> bytes | None:
    """The data lines of one event, joined as the standard says; None when it has none."""
    lines = _DATA.findall(event)
    return b"\n".join(lines) if lines else None


class SseScanner:
    """Follows one stream. Feed it every payload, read its fields at the end."""

    __slots__ = ("_carry", "_telling", "_usage", "done", "error")

    def __init__(self) -> None:
        self._carry = b""
        self._telling: list[bytes] = []  # events that seem to report usage, not read yet
        self._usage: Usage = (None, None)
        self.done = False  # [DONE] was seen
        self.error: int | None = None  # code of the last error event

    @property
    def between_events(self) -> bool:
        """Whether the last byte seen ended an event."""
        return not self._carry.strip(b"\r\n")

    @property
    def at_boundary(self) -> bool:
        """Whether nothing is carried over to the next read, not even a line end."""
        return not self._carry

    @property
    def usage(self) -> Usage:
        """Tokens of the last event that reported any."""
        self._read_usage()
        return self._usage

    def feed(self, payload: bytes) -> None:
        """Look at the next bytes of the stream."""
        if self._carry or not payload.endswith(b"\n\n") or len(payload) > MAX_EVENT:
            payload = self._whole_events(payload)
        find = payload.find  # not `in`: see `Flow.passes`
        if find(TELLS_USAGE) >= 0:
            self._telling.append(payload)
            if len(self._telling) > _MAX_TELLING:
                self._read_usage()
        if find(TELLS_DONE) >= 0 and TELLS_DONE in payloads(payload):
            self.done = True
        if find(TELLS_ERROR) >= 0:
            self._look_for_error(payload)

    def _whole_events(self, payload: bytes) -> bytes:
        """Join with what was carried; keep the unfinished end for the next read."""
        joined = self._carry + payload
        end = 0
        # The carried part holds no boundary but at its end.
        start = max(0, len(self._carry) - 3)
        if joined.find(b"\r", start) < 0:  # a search of bytes is some 50 times as fast
            found = joined.rfind(b"\n\n", start)
            end = found + 2 if found >= 0 else 0
        else:
            for match in _BOUNDARY.finditer(joined, start):
                end = match.end()
        self._carry = joined[end:][-MAX_EVENT - _SLACK :]
        return joined[:end] if end <= MAX_EVENT else _without_long(joined[:end])

    def _read_usage(self) -> None:
        """Read what may tell usage, the last first: most often that one does."""
        for events in reversed(self._telling):
            for payload in reversed(payloads(events)):
                if payload.find(TELLS_USAGE) < 0:
                    continue
                usage = usage_of(payload)
                if usage != (None, None):
                    self._usage = usage
                    self._telling = []
                    return
        self._telling = []

    def _look_for_error(self, events: bytes) -> None:
        for payload in payloads(events):
            if TELLS_ERROR in payload:
                code = error_code(payload)
                if code is not None:
                    self.error = code


def _without_long(events: bytes) -> bytes:
    """Whole events without those that are longer than may be carried."""
    kept: list[bytes] = []
    start = 0
    for boundary in _BOUNDARY.finditer(events):
        # A CRLF cut in two by a boundary leaves its LF at the beginning of the next event.
        if len(events[start : boundary.start()].lstrip(b"\r\n")) <= MAX_EVENT:
            kept.append(events[start : boundary.end()])
        start = boundary.end()
    return b"".join(kept)
