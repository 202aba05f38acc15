"""The plain way of a stream: reads that are one whole chunk and one whole event, passed on as they are.

Nearly every read of a token stream is such a one, and it is taken once per token of every stream.
So everything that is done per read is in one object and one function: `Flow.passes` counts it and
looks at it, and says whether these very bytes may go to the client. What is not plain takes the
ordinary way through `framing`, `exchange` and `sse`, which come to the same numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, Protocol

from router.metrics import Histogram
from router.sse import TELLS_DONE, TELLS_ERROR, TELLS_USAGE, SseScanner

_LONGEST: Final = 2048  # bytes of a read; events with many log probabilities take the ordinary way


def _size_line(total: int) -> bytes | None:
    """The size line of a read of `total` bytes that is one chunk, as most servers write it."""
    for digits in range(1, 5):
        size = total - digits - 4
        if size > 0 and len(line := b"%x\r\n" % size) == digits + 2:
            return line
    return None  # no chunk has this length: one hexadecimal digit more would make it longer


_SIZE_LINES: Final = tuple(_size_line(total) for total in range(_LONGEST))
# How an event ends inside the last chunk of a read.
_EVENT_END: Final = b"\n\n\r\n"


class Sink(Protocol):
    """Where plain reads are written: the client's transport."""

    def write(self, data: bytes) -> None:
        """Write, or buffer what cannot be written yet."""
        ...

    def is_closing(self) -> bool:
        """Whether nothing may be written any more."""
        ...


class Flow:
    """One answer while it is relayed: what was passed on, and when."""

    __slots__ = ("_scanner", "bytes_out", "chunks", "gaps", "last_at", "ready", "sink")

    def __init__(self, scanner: SseScanner | None, gaps: Histogram, now: float) -> None:
        """`scanner` for a stream of events; `gaps` counts the time between reads, in seconds."""
        self._scanner = scanner
        self.gaps = gaps
        self.sink: Sink | None = None
        self.last_at = now  # when the last bytes came; monotonic seconds
        self.chunks = 0
        self.bytes_out = 0  # of the body, without its framing
        self.ready = False  # between two events and two chunks: the next read may be a plain one

    def passes(self, data: bytes, now: float) -> bool:
        """Whether this read is to be passed on as it is; it is then counted and looked at."""
        size = len(data)
        if not self.ready or size >= _LONGEST:
            return False
        line = _SIZE_LINES[size]
        if line is None or not data.startswith(line) or not data.endswith(_EVENT_END):
            return False
        # Not `in`: for bytes that tries its left side as a number first, and throws an error away.
        find = data.find
        if find(TELLS_USAGE) >= 0 or find(TELLS_ERROR) >= 0 or find(TELLS_DONE) >= 0:
            self.look(data[len(line) : -2])
        gaps = self.gaps  # as in `count`: a call less per token
        gap = now - self.last_at
        gaps.counts[bisect_left(gaps.bounds, gap)] += 1
        gaps.sum += gap
        self.last_at = now
        self.chunks += 1
        self.bytes_out += size - len(line) - 2
        return True

    def look(self, payload: bytes) -> None:
        """Look for usage, errors and the end in the next bytes of the stream."""
        if self._scanner is not None:
            self._scanner.feed(payload)
            self.ready = self._scanner.at_boundary

    def count(self, now: float, chunks: int, size: int) -> None:
        """Count one read of so many chunks and bytes of the body."""
        gaps = self.gaps
        gap = now - self.last_at
        gaps.counts[bisect_left(gaps.bounds, gap)] += 1
        gaps.sum += gap
        self.last_at = now
        self.chunks += chunks
        self.bytes_out += size
