"""The light servers behind the router of `loadtest scale`; both are one process.

    python -m loadtest.scale_backend

Those of `loadtest bench`, and besides: an answer that comes as fast as it is taken (`user` is
`flood`), with each event numbered so that its reader can tell a lost one; a large request body, which is
counted and not kept; and how many chunks were sent, since a server may be what cannot keep up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import uvloop

from loadtest import bench_backend
from loadtest.bench_answers import ANSWER, STREAM_HEAD, as_chunk
from loadtest.bench_backend import LENGTH, Counts, Wanted, serve

FLOOD: Final = "flood"
FILL: Final = "x" * 994  # with the rest of the event it is 1 KiB
LARGE: Final = 2**20  # bytes; a longer body is counted only
AT_ONCE: Final = 64  # events in a write


class Sent(Counts):
    """What both servers have seen, and the chunks that they have sent."""

    sent: int = 0


def event(number: int) -> str:
    """What follows `data: ` in one event of a flood; with it and the newlines 1 KiB."""
    return f'{{"n":"{number:07d}","x":"{FILL}"}}'


def flood(events: int) -> Iterator[bytes]:
    """The chunks of a flood of so many events, and its end."""
    for number in range(events):
        yield as_chunk(event(number))
    yield as_chunk("[DONE]") + b"0\r\n\r\n"


class Server(bench_backend.Server):
    """One connection to a server."""

    def __init__(self, counts: Sent) -> None:
        """`counts` are shared by all connections."""
        super().__init__(counts)
        self._sent = counts
        self._missing = 0  # bytes of a large body
        self._rest: Iterator[bytes] | None = None
        self._full = False

    def data_received(self, data: bytes) -> None:
        """Count a large body; anything else is as in the bench."""
        if self._missing:
            self._count(len(data))
            return
        head = self._buffer + data if self._buffer else data
        end = head.find(b"\r\n\r\n")
        found = LENGTH.search(head, 0, end) if end >= 0 else None
        if found is None or int(found[1]) < LARGE:
            super().data_received(data)
            return
        self._buffer = b""
        self._missing = int(found[1])
        self._counts.requests += 1
        self._count(len(head) - end - 4)

    def _count(self, size: int) -> None:
        self._missing -= size
        if self._missing <= 0:
            self._missing = 0
            self._answer(b"200 OK", ANSWER)

    def pause_writing(self) -> None:
        """The other side takes no more for now."""
        self._full = True

    def resume_writing(self) -> None:
        """It does again."""
        self._full = False
        self._pour()

    def _generate(self, asked: Wanted) -> None:
        if asked.user != FLOOD:
            super()._generate(asked)
            return
        self._transport.write(STREAM_HEAD)
        self._rest = flood(asked.max_tokens)
        self._pour()

    def _pour(self) -> None:
        while self._rest is not None and not self._full:
            some = b"".join(islice(self._rest, AT_ONCE))
            if not some:
                self._rest = None
                return
            self._transport.write(some)

    def _next(self) -> None:
        self._sent.sent += 1
        super()._next()


def main() -> None:
    """Serve on two free ports until killed."""
    counts = Sent()

    def make() -> Server:
        return Server(counts)

    uvloop.run(serve(make, make))


if __name__ == "__main__":
    main()
