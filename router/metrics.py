"""What the hot path counts: plain integers and lists, touched once per request or once per chunk.

Nothing here knows Prometheus, a clock or a socket. `RelayMetrics` is written by the relay on the
event loop and read by `router.exposition`, which gives every number its name, help and labels.
Every cell exists from the start, so counting is one lookup and one addition, and the set of series
does not grow with the traffic: its labels are closed sets.

What is observed when:

* first chunk: streamed requests that got an answer below 400, from the moment the whole request had
  been read to the first byte of the answer. Of an answer in one piece the first byte tells
  nothing that its total does not;
* total: requests with the outcome `ok`, from the same moment to the last byte. A request cut short
  by its client would make a backend look fast;
* overhead: requests that were sent to a backend once, from the same moment to the moment they
  were sent, without the time in our own queue. It holds the decision and, now and then, a connect;
* queue wait: every request that was ever put in our own queue.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from itertools import product
from typing import Final

import msgspec

from router.explained import Explained
from router.load import ROLES, Role
from router.policy import Reason
from router.routes import ROUTES


class Outcome(Explained):
    """How a request ended. A closed set: each is a metric label."""

    OK = "ok", "the whole answer was relayed"
    CLIENT_ERROR = "client_error", "the backend answered 4xx"
    REFUSED = "refused", "429 or 503, or a stream whose first event says so"
    BACKEND_ERROR = "backend_error", "another 5xx, or an error event in the middle of a stream"
    BACKEND_LOST = "backend_lost", "the connection could not be made or was cut"
    TIMEOUT = "timeout", "the backend did not begin, or stopped, for longer than it may"
    CLIENT_GONE = "client_gone", "the client left before the end"
    REJECTED = "rejected", "our own answer: nothing was sent to a backend"
    BROKEN = "broken", "cut by us at the drain limit"


class Retry(Explained):
    """Why a request was sent a second time, or was not for want of budget."""

    CONNECT = "replay_connect", "to the other backend: the first could not be reached"
    STALE = "replay_stale", "to the same backend: a reused connection was dead"
    REFUSED = "replay_refused", "to the other backend: the first refused before working"
    BUDGET_EXHAUSTED = "budget_exhausted", "a refusal was handed on: too many replays of late"


class Rejection(enum.StrEnum):
    """Why we answered a request ourselves: the codes of our own errors (`router.errors`)."""

    BAD_REQUEST = "bad_request"
    INVALID_BODY = "invalid_body"
    STATEFUL_REQUEST = "stateful_request"
    INVALID_BACKEND = "invalid_backend"
    INVALID_API_KEY = "invalid_api_key"
    CROSS_SITE = "cross_site"
    REQUEST_TIMEOUT = "request_timeout"
    BODY_TOO_LARGE = "body_too_large"
    URL_TOO_LONG = "url_too_long"
    EXPECTATION_FAILED = "expectation_failed"
    HEADERS_TOO_LARGE = "headers_too_large"
    HTTP_VERSION = "http_version"
    TRANSFER_ENCODING = "transfer_encoding"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    OVERLOADED = "overloaded"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    NO_BACKEND = "no_backend"
    DRAINING = "draining"
    INTERNAL_ERROR = "internal_error"
    OTHER = "other"


class Finished(msgspec.Struct, gc=False):
    """All that is known of one relayed request when it ends.

    The five moments are monotonic seconds; None means that it did not come to that. `received_at`
    is when the whole request had been read.
    """

    request_id: str
    route: str
    backend: Role | None
    reason: Reason | None
    n: int
    m: int
    threshold: float | None  # K at the decision, or F(m) for a line without a K; requests
    status: int  # what the client was told; 0 when it got no head
    outcome: Outcome
    stream: bool
    received_at: float
    decided_at: float | None
    sent_at: float | None
    first_byte_at: float | None
    ended_at: float
    queue_wait: float  # seconds in our own queue; 0.0 when it never waited
    bytes_in: int  # of the request's body
    bytes_out: int  # of the answer's body, as written to the client
    chunks: int  # pieces of a streamed answer
    prompt_tokens: int | None  # from usage
    output_tokens: int | None  # from usage
    replay: str | None  # a `Retry`, when the request was sent twice
    error: str | None  # class of a failure, never with an address


# Bounds in seconds. Each list says what it must tell apart.

# Time to a first token is 20 ms on an idle server (measured on an H200) and minutes in a full
# queue; SGLang's own list starts at 100 ms, too coarse to see speculation at work.
FIRST_CHUNK_BOUNDS: Final = (
    0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0,
    30.0, 60.0, 120.0, 240.0,
)  # fmt: skip
# A whole request: a classification of a few tokens up to half an hour of reasoning.
TOTAL_BOUNDS: Final = (
    0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
)  # fmt: skip
# A decode step is 5 ms alone and 50 ms in a full batch; behind a long prefill it is seconds.
CHUNK_GAP_BOUNDS: Final = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0, 2.0,
    5.0, 15.0, 60.0,
)  # fmt: skip
# Waiting in our own queue ends at `queue_timeout`, seconds to a few minutes.
QUEUE_WAIT_BOUNDS: Final = (
    0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
# Ours alone: tens of microseconds on an idle loop, a millisecond with a connect, more is a fault.
OVERHEAD_BOUNDS: Final = (
    0.00002, 0.00005, 0.0001, 0.0002, 0.00035, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1.0,
)  # fmt: skip

OTHER_ROUTE: Final = "other"
ROUTE_NAMES: Final = (*(route.name for route in ROUTES), OTHER_ROUTE)
BACKENDS: Final[tuple[Role | None, ...]] = (*ROLES, None)


class Histogram:
    """Counts per bucket and a sum. Bucket i holds values up to and including `bounds[i]`."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: rising upper bounds without infinity, whose bucket comes last by itself."""
        if list(bounds) != sorted(set(bounds)):
            msg = f"the bounds of a histogram must rise: {bounds}"
            raise ValueError(msg)
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


class BackendMetrics:
    """What is counted per backend, beside its requests and decisions."""

    __slots__ = ("chunk_gap", "chunks", "first_chunk", "output_tokens", "prompt_tokens", "total")

    def __init__(self) -> None:
        self.first_chunk = Histogram(FIRST_CHUNK_BOUNDS)
        self.total = Histogram(TOTAL_BOUNDS)
        self.chunk_gap = Histogram(CHUNK_GAP_BOUNDS)
        self.chunks = 0
        self.prompt_tokens = 0
        self.output_tokens = 0


class RelayMetrics:
    """Every hot counter of the router. Written on the event loop only."""

    def __init__(self) -> None:
        self.requests = dict.fromkeys(product(BACKENDS, ROUTE_NAMES, Outcome), 0)
        self.decisions = dict.fromkeys(product(BACKENDS, Reason), 0)
        self.retries = dict.fromkeys(Retry, 0)
        self.rejections = dict.fromkeys(Rejection, 0)
        self.backends = {role: BackendMetrics() for role in ROLES}
        self.chunk_gap = {role: found.chunk_gap for role, found in self.backends.items()}
        self.queue_wait = Histogram(QUEUE_WAIT_BOUNDS)
        self.overhead = Histogram(OVERHEAD_BOUNDS)
        self.bytes_in = 0
        self.bytes_out = 0
        self.log_lines_dropped = 0

    def finish(self, done: Finished) -> None:
        """Count one request that ended, whatever way it ended. Once per request."""
        role = done.backend
        try:
            self.requests[role, done.route, done.outcome] += 1
        except KeyError:
            self.requests[role, OTHER_ROUTE, done.outcome] += 1
        self.bytes_in += done.bytes_in
        self.bytes_out += done.bytes_out
        received = done.received_at
        if done.queue_wait > 0.0:
            self.queue_wait.observe(done.queue_wait)
        if role is None:
            return
        backend = self.backends[role]
        if done.sent_at is not None and done.replay is None:
            self.overhead.observe(done.sent_at - received - done.queue_wait)
        if done.outcome is Outcome.OK:
            backend.total.observe(done.ended_at - received)
        if done.stream:
            backend.chunks += done.chunks
            if done.first_byte_at is not None and done.status < 400:
                backend.first_chunk.observe(done.first_byte_at - received)
        if done.output_tokens is not None:
            backend.output_tokens += done.output_tokens
        if done.prompt_tokens is not None:
            backend.prompt_tokens += done.prompt_tokens

    def decided(self, role: Role | None, reason: Reason) -> None:
        """Count one decision; a replay's new decision counts as one more."""
        self.decisions[role, reason] += 1

    def retry(self, kind: Retry) -> None:
        """Count one replay, or one that the budget forbade."""
        self.retries[kind] += 1

    def reject(self, reason: str) -> None:
        """Count one request that we answered ourselves; an unlisted reason counts as `other`."""
        try:
            self.rejections[Rejection(reason)] += 1
        except ValueError:
            self.rejections[Rejection.OTHER] += 1
