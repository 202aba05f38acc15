"""One line of JSON for each request, without its prompt.

Never a header's value, never a backend's address. Whatever the client put in its request id, a line
stays one line: the id is cut, made ASCII and JSON-escaped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from router.explain import Clock, Threshold, safe_id, shown_threshold
from router.load import Role
from router.logs import LineWriter
from router.metrics import Finished, Outcome
from router.policy import Reason

MAKE_LINES: Final = 50
FLUSH_LINES: Final = 200
FLUSH_SECONDS: Final = 0.5

_FAULTS: Final = frozenset({Outcome.BACKEND_ERROR, Outcome.BACKEND_LOST, Outcome.TIMEOUT})


class _Line(msgspec.Struct, gc=False):
    """One request in the log. The names and their order are what a reader of the log relies on."""

    timestamp: str
    level: str
    event: str
    request_id: str
    route: str
    backend: str | None
    reason: str | None
    n: int
    m: int
    threshold: Threshold
    status: int
    outcome: str
    stream: bool
    duration_ms: float
    first_byte_ms: float | None
    overhead_ms: float | None
    queue_wait_ms: float
    bytes_in: int
    bytes_out: int
    chunks: int
    prompt_tokens: int | None
    output_tokens: int | None
    replay: str | None
    error: str | None


_encode = msgspec.json.Encoder().encode
# Plain strings: an enum's member costs the encoder more than all the rest of a line.
_WORDS: Final[dict[Role | Reason | Outcome | None, str | None]] = {
    None: None,
    **{word: str(word.value) for words in (Role, Reason, Outcome) for word in words},
}
_LEVELS: Final = {o: "warning" if o in _FAULTS else "info" for o in Outcome}


def line_of(done: Finished, stamp: str) -> bytes:
    """One request as a line of JSON, without its end.

    Milliseconds are cut to the microsecond: `round` would take five times as long.
    """
    received, first, sent, wait = (
        done.received_at, done.first_byte_at, done.sent_at, done.queue_wait,
    )  # fmt: skip
    return _encode(
        _Line(
            stamp, _LEVELS[done.outcome], "request", safe_id(done.request_id), done.route,
            _WORDS[done.backend], _WORDS[done.reason], done.n, done.m,
            shown_threshold(done.threshold), done.status, str(_WORDS[done.outcome]), done.stream,
            int((done.ended_at - received) * 1e6) / 1000,
            None if first is None else int((first - received) * 1e6) / 1000,
            None if sent is None else int((sent - received - wait) * 1e6) / 1000,
            int(wait * 1e6) / 1000,
            done.bytes_in, done.bytes_out, done.chunks, done.prompt_tokens, done.output_tokens,
            done.replay, done.error,
        )
    )  # fmt: skip


class AccessLog:
    """One JSON line per request, made and written in batches, written by the writer's thread.

    Lines are made a few dozen at a time, which costs half of making each at its request's end: the
    code is then still in the processor's caches.
    """

    def __init__(
        self,
        writer: LineWriter,
        *,
        wall: Clock = time.time,
        clock: Clock = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
        enabled: bool = True,
    ) -> None:
        """`wall` is in unix seconds, `clock` the one of the records.

        `call_later` is the event loop's; without it, lines leave in batches and at `flush`.
        """
        self.enabled = enabled
        self._writer = writer
        self._wall = wall
        self._clock = clock
        self._call_later = call_later
        self._records: list[Finished] = []
        self._lines: list[bytes] = []
        self._armed = False
        self._second = -1
        self._prefix = ""

    def add(self, done: Finished) -> None:
        """Log one request that ended. Never blocks and never raises for what a client sent."""
        if not self.enabled:
            return
        self._records.append(done)
        if len(self._records) >= MAKE_LINES:
            self._make()
            if len(self._lines) >= FLUSH_LINES:
                self.flush()
        elif not self._armed and self._call_later is not None:
            self._armed = True
            self._call_later(FLUSH_SECONDS, self._timer)

    def flush(self) -> None:
        """Hand what is buffered to the writer, which drops it if it is stuck."""
        self._make()
        if self._lines:
            lines, self._lines = self._lines, []
            self._writer.put(b"\n".join(lines) + b"\n", len(lines))

    def _make(self) -> None:
        records, self._records = self._records, []
        offset = self._wall() - self._clock()
        self._lines += [line_of(done, self._stamp(done.ended_at + offset)) for done in records]

    def _timer(self) -> None:
        self._armed = False
        self.flush()

    def _stamp(self, at: float) -> str:
        """ISO 8601 in UTC, to the millisecond."""
        second = int(at)
        if second != self._second:
            self._second = second
            self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._prefix}.{int((at - second) * 1000):03d}Z"
