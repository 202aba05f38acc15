"""Heads that were read before: a client sends the same one over and over, and so does a backend.

Only the digits of its Content-Length change, so a head is remembered without them. A match is the
same bytes at the same place and has therefore the same meaning; everything else is read in full.

Of requests only those are learned that the parser and the guard accepted and that are plain
(relayed, HTTP/1.1, kept alive, of a known length, without a request id of their own), and it is
checked here that they are exactly these lines. Heads of requests may hold a client's key: they live
no longer than the process and are few.

It may not refuse, nor understand a request's head by itself: what is not known is not its affair.
"""

from __future__ import annotations

from typing import Final

import msgspec

from router.framing import ResponseHead, parse_head
from router.headers import passing_lines
from router.incoming import Incoming

MAX_HEADS: Final = 256  # so many mean that they are no two alike: all are forgotten
MAX_BYTES: Final = 2048  # of a head; what httpx and the official clients send is 300 to 900
_END: Final = b"\r\n\r\n"
# The end of `content-length: ` in either spelling; that it is this header is checked when learning.
_MARK: Final = b"ength: "
_WIDTH: Final = len(_MARK)
_MAX_DIGITS: Final = 9  # of a length; a longer one is read in full


class KnownRequests:
    """A bounded memory of heads; forgets all of them when it is full."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, Incoming] = {}

    def __len__(self) -> int:
        """How many heads are known."""
        return len(self._heads)

    def find(self, data: bytes) -> tuple[Incoming, int, int] | None:
        """The request that this read begins with, if its head is known.

        Gives one with the same head (to be copied, never changed), where this one's body starts, and
        how many bytes it has. A read without an end or a length makes a key that no head has.
        """
        end = data.find(_END) + 4
        at = data.find(_MARK, 0, end) + _WIDTH
        stop = data.find(b"\r", at, end)
        known = self._heads.get(data[:at] + data[stop:end])
        if known is None:
            return None
        digits = data[at:stop]
        if not digits.isdigit() or len(digits) > _MAX_DIGITS:
            return None
        return known, end, int(digits)

    def learn(self, data: bytes, incoming: Incoming) -> None:
        """Remember the head that `data` begins with: it was read as `incoming`, and accepted."""
        facts = incoming.facts
        end = data.find(_END) + 4
        if (
            not 4 < end <= MAX_BYTES
            or incoming.route is None
            or facts.length is None
            or facts.chunked
            or facts.expects
            or facts.upgrade
            or facts.request_id is not None
            or not incoming.keep_alive
            or not _is_exactly(data[: end - 4], incoming)
        ):
            return
        at = data.find(_MARK, 0, end) + _WIDTH
        stop = data.find(b"\r", at, end)
        if not _is_length_line(data, at) or data[at:stop] != b"%d" % facts.length:
            return
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        self._heads[data[:at] + data[stop:end]] = incoming.again(facts.length)


class KnownAnswers:
    """Reads the heads of answers; forgets all it knows when it is full, as `date` changes."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, ResponseHead] = {}

    def read(self, data: bytes, end: int) -> ResponseHead:
        """The head that this read begins with and that ends before `end`. Raises FramingError."""
        at = data.find(_MARK, 0, end) + _WIDTH
        if at < _WIDTH:  # not found
            return self._heads.get(data[:end]) or self._learn(data[:end], data[:end], 0)
        stop = data.find(b"\r", at, end)
        if stop < 0:
            stop = end
        digits = data[at:stop]
        key = data[:at] + data[stop:end]
        known = self._heads.get(key)
        if known is None or not digits.isdigit() or len(digits) > _MAX_DIGITS:
            return self._learn(data[:end], key, at)
        return ResponseHead(
            known.status, known.reason, known.headers, "length", int(digits), known.keep_alive,
            known.event_stream, known.connection, known.lines,
        )  # fmt: skip

    def _learn(self, block: bytes, key: bytes, at: int) -> ResponseHead:
        """Read a head in full; `key` is it without what stands at `at`, unless that is 0."""
        read = parse_head(block)
        # The length is said by the framing; among the headers it would be a later answer's.
        headers = [header for header in read.headers if header[0] != b"content-length"]
        head = msgspec.structs.replace(read, headers=headers, lines=passing_lines(read))
        if at and (read.framing != "length" or not _is_length_line(block, at)):
            return head
        if len(block) <= MAX_BYTES:
            if len(self._heads) >= MAX_HEADS:
                self._heads.clear()
            self._heads[key] = head
        return head


def _is_length_line(block: bytes, at: int) -> bool:
    """Whether what stands at `at` is the value of a Content-Length."""
    return block[block.rfind(b"\n", 0, at) + 1 : at].lower() == b"content-length: "


def _is_exactly(block: bytes, incoming: Incoming) -> bool:
    """Whether these lines, read in the plainest way, are this request."""
    first, *lines = block.split(b"\r\n")
    if first != b"%b %b HTTP/1.1" % (incoming.method, incoming.target):
        return False
    if len(lines) != len(incoming.headers):
        return False
    for line, (name, value) in zip(lines, incoming.headers, strict=True):
        read_name, _, read_value = line.partition(b":")
        if read_name.lower() != name or read_value.strip(b" \t") != value:
            return False
    return True
