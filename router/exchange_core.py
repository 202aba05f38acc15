"""The inside of an exchange: what it knows, and how it moves, commits and ends.

`router.exchange` has the events; this file has what they share. Every path ends in `_settle`, where
the lease is released; a replay (`_move`) gives the first one back when it has its own.

It may not do what it decides: that goes out as actions. Once `start` has taken the lease, nothing
but `_settle` and `_move` may touch it.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from router.actions import Actions, Do, Finish, Open, Request, Sample, Shared, Write
from router.answer import Answer
from router.breaker import Verdict
from router.errors import ErrorAnswer
from router.flow import Flow
from router.framing import ResponseHead
from router.load import Lease, Role
from router.metrics import Outcome, Retry
from router.policy import Decision, Reason
from router.sse import SseScanner, Usage, error_code, first_event

REFUSALS: Final = frozenset({429, 503})  # what SGLang answers before it has worked on a request
NOTHING: Final[Actions] = ()


class State(enum.Enum):
    """Where an exchange stands."""

    DECIDING = enum.auto()  # not started, or waiting in our own queue
    CONNECTING = enum.auto()  # nothing sent
    WAITING = enum.auto()  # sent, no head yet
    HOLDING = enum.auto()  # the head and part of a short body are held
    PEEKING = enum.auto()  # the head of a stream is held until its first event
    RELAYING = enum.auto()  # the head went out
    DONE = enum.auto()


ANSWERING: Final = (State.HOLDING, State.PEEKING, State.RELAYING)
# An enum's members are slow to look up, and these are looked up for every request.
DECIDING, CONNECTING, WAITING, HOLDING, PEEKING, RELAYING, DONE = State
KEEP_BACKEND, NOTE_DECISION = Do.KEEP_BACKEND, Do.NOTE_DECISION
SUCCESS, OK = Verdict.SUCCESS, Outcome.OK


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """An answer kept whole because it may have to be given after all."""

    decision: Decision
    head: ResponseHead
    body: bytes


class ExchangeCore:
    """State and inner steps of one request."""

    # Most exchanges never set most of these: what is not set costs nothing.
    state = State.DECIDING
    decision: Decision | None = None
    head: ResponseHead | None = None
    scanner: SseScanner | None = None
    flow: Flow | None = None  # from the commit on
    retries: tuple[Retry, ...] = ()
    outcome: Outcome | None = None
    error: str | None = None  # code of our own error, if one was made
    error_told = False  # whether the client got it as an event in the middle of a stream
    usage: Usage = (None, None)
    chunks = 0
    decided_at: float | None = None
    sent_at: float | None = None
    first_byte_at: float | None = None
    ended_at = 0.0
    _lease: Lease | None = None
    _reused = False  # the connection had served another request
    _is_refusal = False  # the answer that is coming refuses; the breaker was told
    _will_replay = False  # and is only held to be kept, since the other backend will be asked
    _kept_refusal: Refusal | None = None  # the first backend's, after a replay (c)
    _held_size = 0
    _last_byte_at = 0.0  # until the commit; then it is the flow's to know
    _paused_at: float | None = None  # since when the client has not been reading

    def __init__(self, request: Request, shared: Shared) -> None:
        self.request = request
        self.answer = Answer(request)
        self._shared = shared
        self._held: list[bytes] = []  # of the body, while the head is held too

    @property
    def _role(self) -> Role:
        if self._lease is None:
            raise RuntimeError(f"no lease in state {self.state}")
        return self._lease.role

    # ------------------------------------------------------------------ replays

    def _may_resend(self, now: float, *, answered: bool) -> bool:
        """Whether rule (b) applies."""
        return (
            not answered
            and self.state is State.WAITING
            and self._reused
            and Retry.STALE not in self.retries
            and self.sent_at is not None
            and now - self.sent_at <= self._shared.rules.replay_window
        )

    def _other_usable(self) -> bool:
        other = self._shared.tracker.of(self._role.other)
        return self.request.info.pinned is None and other.usable

    def _may_replay(self) -> bool:
        """Whether rule (c) applies; the budget is charged when it does."""
        moved = Retry.CONNECT in self.retries or Retry.REFUSED in self.retries
        if moved or not self._other_usable():
            return False
        if self._shared.budget.take():
            return True
        self.retries += (Retry.BUDGET_EXHAUSTED,)
        return False

    def _move(self, retry: Retry, reason: Reason, now: float) -> Actions:
        """To the other backend; its lease is taken before the old one is released."""
        old = self._lease
        if old is None:
            raise RuntimeError(f"no lease in state {self.state}")
        tracker = self._shared.tracker
        role = old.role.other
        look = tracker.snapshot(now)
        # n and m do not count the request being decided, which is still counted on the old one.
        own_n = int(old.role is Role.SPECULATIVE)
        n, m = look.speculative.concurrency - own_n, look.baseline.concurrency - (1 - own_n)
        before = self.decision
        threshold = before.threshold if before else None
        frontier = before.frontier if before else None
        self.decision = Decision(role, reason, n, m, frontier, look.memory, threshold)
        self.answer.explain(self.decision)
        info = self.request.info
        self._lease = tracker.lease(role, now, None, info.conversation, info.prompt_bytes)
        old.release(now)
        self.retries += (retry,)
        self.state = State.CONNECTING
        return (Do.NOTE_DECISION, Open(role))

    def _replay_refusal(self, spare: Do, now: float) -> Actions:
        """Rule (c): the refusal is whole; keep it and ask the other backend."""
        if self.decision is None or self.head is None:
            raise RuntimeError("a refusal needs a head")
        self._kept_refusal = Refusal(self.decision, self.head, b"".join(self._held))
        self._held, self._held_size = [], 0
        self._will_replay = self._is_refusal = False
        self.head = self.scanner = None
        return (spare, *self._move(Retry.REFUSED, Reason.REPLAY_REFUSED, now))

    def _give_refusal(self, now: float) -> Actions:
        """The other backend did no better: the first refusal, unchanged."""
        refusal = self._kept_refusal
        if refusal is None:
            raise RuntimeError("no refusal is kept")
        self.decision = refusal.decision
        self.answer.explain(refusal.decision)
        self.head, self._held = refusal.head, [refusal.body]
        self.scanner = None
        out = self._take_held() + self.answer.ending()
        return (Do.DROP_BACKEND, Write(out), *self._done(Outcome.REFUSED, now))

    @property
    def visibly_cut(self) -> bool:
        """Whether a broken answer shows it: by its framing, or by an error event at its end."""
        told = self.answer.chunked or self.error_told
        return told or (self.head is not None and self.head.framing == "length")

    # ------------------------------------------------------------------ what is held

    def _hold(self, payload: bytes) -> None:
        self._held.append(payload)
        self._held_size += len(payload)

    def _peek(self, now: float) -> Actions:
        """A stream that was refused says so in its first event, behind a 200."""
        data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        event = first_event(data)
        if event is None:
            return self._commit() if len(data) > self._shared.rules.peek_bytes else NOTHING
        if b'"error"' not in event or error_code(event) not in REFUSALS:
            return self._commit()
        self._is_refusal = True
        pressure = Sample(self._role, Verdict.BACK_PRESSURE)
        if self._kept_refusal is not None:
            return (pressure, *self._give_refusal(now))
        if self._may_replay():
            self._will_replay = True
            self.state = State.HOLDING
            return (pressure,)
        return (pressure, *self._commit())

    def _commit(self) -> Actions:
        """Let the head go, and with it what was held."""
        self._will_replay = False
        self.flow = Flow(self.scanner, self._shared.gaps[self._role], self._last_byte_at)
        self.state = RELAYING
        out = Write(self._take_held())
        # A client that was slow before there was a connection to pause: pause it now.
        return (out,) if self._paused_at is None else (out, Do.PAUSE_BACKEND)

    def _take_held(self) -> bytes:
        """The head and the held part of the body, as they go out."""
        if self.head is None:
            raise RuntimeError("no head to give")
        shared = self._shared
        out = self.answer.begin(self.head, shared.common, draining=shared.draining)
        if self._held:
            body = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            out += self.answer.frame(body)
            self.answer.bytes_out += len(body)
            if self.scanner is not None:
                self.scanner.feed(body)
                self.chunks += len(self._held)
            self._held, self._held_size = [], 0
        return out

    # ------------------------------------------------------------------ endings

    def _failure(self) -> Actions:
        """The sample of an attempt that failed; none when it had said that it refuses."""
        return () if self._is_refusal else (Sample(self._role, Verdict.FAILURE),)

    def _judge(self, status: int) -> tuple[Verdict | None, Outcome]:
        """What a complete answer says of the backend (None: it was said), and how it ended."""
        if self._is_refusal:
            return None, Outcome.REFUSED
        code = self.scanner.error if self.scanner is not None else None
        if code is not None:
            verdict = Verdict.FAILURE if code >= 500 else Verdict.NEUTRAL
            return (Verdict.BACK_PRESSURE if code in REFUSALS else verdict), Outcome.BACKEND_ERROR
        if status < 400:
            return SUCCESS, OK
        if status < 500:
            return Verdict.NEUTRAL, Outcome.CLIENT_ERROR
        return Verdict.FAILURE, Outcome.BACKEND_ERROR

    def _reject(self, error: ErrorAnswer, now: float) -> Actions:
        """An answer of our own; nothing was sent to a backend."""
        self.error = error.code
        shared = self._shared
        out = self.answer.error(error, shared.common, draining=shared.draining)
        return (Write(out), *self._done(Outcome.REJECTED, now))

    def _give_up(self, error: ErrorAnswer, outcome: Outcome, now: float) -> Actions:
        """The backend cannot be had: the kept refusal, our error, or an explicit break."""
        if self._kept_refusal is not None and not self.answer.begun:
            return self._give_refusal(now)
        self.error = error.code
        shared = self._shared
        if not self.answer.begun:
            out = self.answer.error(error, shared.common, draining=shared.draining)
            return (Do.DROP_BACKEND, Write(out), *self._done(outcome, now))
        return (Do.DROP_BACKEND, *self._broken(outcome, now, error))

    def _broken(self, outcome: Outcome, now: float, error: ErrorAnswer | None = None) -> Actions:
        """The head went out: an error event where one fits, then no proper end.

        None fits in an announced length: with it the answer could pass for whole.
        """
        self._settle(outcome, now)
        scanner, head = self.scanner, self.head
        if error is None or scanner is None or head is None or self._paused_at is not None:
            return (Do.BREAK_CLIENT,)
        if head.framing == "length" or not scanner.between_events:
            return (Do.BREAK_CLIENT,)
        self.error_told = True
        self.answer.bytes_out += len(error.event)
        return (Write(self.answer.frame(error.event)), Do.BREAK_CLIENT)

    def _done(self, outcome: Outcome, now: float) -> Actions:
        """The client has a whole answer."""
        self._settle(outcome, now)
        return (Finish(close=self.answer.close),)

    def _settle(self, outcome: Outcome, now: float) -> None:
        """The one exit: stop counting, remember how it ended."""
        if self.scanner is not None:
            self.usage = self.scanner.usage
        if self.flow is not None:
            self.chunks += self.flow.chunks
            self.answer.bytes_out += self.flow.bytes_out
        self.state = DONE
        self.outcome = outcome
        self.ended_at = now
        self._held = []
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release(now)
