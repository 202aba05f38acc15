"""What an `Exchange` tells its shell to do, and what it is given to work with.

Actions are values, and nothing here acts. The shell carries them out in order; an event that arises on the way (a write
that pauses the client) may change the exchange at once, but its actions wait behind the ones being
carried out, so nothing is ever entered twice.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from router.breaker import Verdict
from router.load import LoadTracker, Role
from router.metrics import Histogram
from router.policy import Policy
from router.request import Body, RequestInfo
from router.routes import Route

if TYPE_CHECKING:
    from router.config import Settings


class Open(msgspec.Struct, frozen=True, gc=False):
    """Get a connection to a backend and send the request on it.

    `fresh` forbids an idle one. The shell answers with `sent` or `unreachable`.
    """

    role: Role
    fresh: bool = False


class Write(msgspec.Struct, frozen=True, gc=False):
    """Write bytes to the client."""

    data: bytes


class Sample(msgspec.Struct, frozen=True, gc=False):
    """Tell the breaker how a backend did."""

    role: Role
    verdict: Verdict


class Finish(msgspec.Struct, frozen=True, gc=False):
    """The answer is complete; close the client's connection or await its next request."""

    close: bool


class Do(enum.Enum):
    """Actions without a value."""

    KEEP_BACKEND = enum.auto()  # the connection may be used again
    DROP_BACKEND = enum.auto()  # close it now: that is what aborts an SGLang request
    PAUSE_BACKEND = enum.auto()  # stop reading from it: the client is slow
    RESUME_BACKEND = enum.auto()
    BREAK_CLIENT = enum.auto()  # close the client's connection without a proper end
    NOTE_DECISION = enum.auto()  # `exchange.decision` is new: count and log it


Action = Open | Write | Sample | Finish | Do
Actions = tuple[Action, ...]


# Seconds. A stream flows if bytes came so recently; the sweep may pass one by for so long, which is
# less than the time between two probes: a stream that flows says that its backend lives.
FLOWING: Final = 1.0
QUIET: Final = 0.7


class Rules(msgspec.Struct, frozen=True):
    """The limits an exchange obeys; seconds and bytes."""

    replay_window: float = 0.25  # a reused connection that breaks later is not replayed
    peek_timeout: float = 0.05  # how long a stream's first event may keep the head waiting
    peek_bytes: int = 8192
    first_byte_timeout: float = 900.0
    idle_timeout: float = 300.0
    write_timeout: float = 60.0
    # An answer of known length, or of JSON, up to this is sent when it is whole, so that one cut
    # short can still become a 502. Longer ones, and streams, are relayed as they come.
    hold_bytes: int = 262_144

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        """The limits as configured."""
        return cls(
            replay_window=settings.replay_window,
            peek_timeout=settings.peek_timeout,
            peek_bytes=settings.peek_bytes,
            first_byte_timeout=settings.first_byte_timeout,
            idle_timeout=settings.idle_timeout,
            write_timeout=settings.write_timeout,
        )

    @property
    def quiet(self) -> float:
        """Seconds in which a stream that flows reaches no limit, though it be paused at once."""
        return QUIET if min(self.write_timeout, self.idle_timeout - FLOWING) >= QUIET else 0.0


class RetryBudget:
    """Replays after a refusal may be a share of all requests, so that overload is not doubled.

    Each request deposits `share`, each replay takes one; at most `reserve` is saved up, and it is
    there from the start, so that a quiet router may fail over (after Finagle's retry budgets).
    """

    def __init__(self, share: float = 0.2, reserve: float = 10.0) -> None:
        self.share = share
        self.reserve = reserve
        self.saved = reserve if share > 0 else 0.0

    def deposit(self) -> None:
        """One more request came."""
        if self.saved < self.reserve:
            self.saved = min(self.reserve, self.saved + self.share)

    def take(self) -> bool:
        """Whether one more replay may be made; it is then paid for."""
        if self.saved < 1.0:
            return False
        self.saved -= 1.0
        return True


class Request(msgspec.Struct, gc=False):
    """One request to relay, wholly received and accepted. Times in monotonic seconds.

    `body` is let go of when nothing can be sent again; `info.prompt_bytes` remains.
    """

    id: str
    route: Route
    info: RequestInfo
    body: Body
    headers: bytes  # the client's header lines that pass, each ending in CRLF
    received_at: float
    http10: bool = False
    keep_alive: bool = True
    extra: bytes = b""  # header lines for the answer (CORS)


class Shared:
    """What all exchanges of one router share. `common`, `draining` and `policy` change with time."""

    def __init__(
        self,
        tracker: LoadTracker,
        policy: Policy,
        rules: Rules,
        budget: RetryBudget,
        gaps: dict[Role, Histogram],
        refresh: Callable[[float], None] = lambda _now: None,
    ) -> None:
        """`refresh` lets time pass for what decides who is usable, before a decision."""
        self.tracker = tracker
        self.policy = policy
        self.rules = rules
        self.budget = budget
        self.gaps = gaps
        self.refresh = refresh
        self.common = b""  # date and server header lines
        self.draining = False
