"""The life of one proxied request, as a state machine without I/O.

Events come in as method calls, actions go out as values (`router.actions`); time is an argument.
All rules of replay, peeking, holding, back-pressure and outcome are here and in `exchange_core`,
what the events share. It may not know of sockets, decode what it relays, or send anything twice but
by the rules below. An event that comes too late for its state is no event.

    DECIDING -> CONNECTING -> WAITING -> HOLDING  -> DONE    a small answer: of known length, or JSON
                                      -> PEEKING  -> ...     a stream, until its first event
                                      -> RELAYING -> DONE    everything else, and what was held
                                                             longer than it may be

The rules of replay, in full. Nothing else is ever sent twice, since an unanswered request may be
what killed the server:

    (a) the connection could not be made, so nothing was sent: the other backend;
    (b) a reused connection broke without a byte of an answer within `replay_window` of sending:
        once more on a fresh connection to the same backend, and if that fails too, 502;
    (c) the backend refused before working (429, 503, or a stream's first event that says so): the
        other backend, once, within the budget. If that one refuses too, is down, or is out of
        budget, the client gets the first refusal's status, headers and bytes unchanged.

A replay takes its new lease before the old one is released.
"""

from __future__ import annotations

from router import errors
from router.actions import FLOWING, Action, Actions, Do, Finish, Open, Sample, Write
from router.breaker import Verdict
from router.errors import ErrorAnswer
from router.exchange_core import (
    ANSWERING,
    CONNECTING,
    DECIDING,
    DONE,
    HOLDING,
    KEEP_BACKEND,
    NOTE_DECISION,
    NOTHING,
    PEEKING,
    REFUSALS,
    RELAYING,
    WAITING,
    ExchangeCore,
)
from router.framing import ResponseHead
from router.metrics import Outcome, Retry
from router.policy import Reason
from router.sse import SseScanner, usage_of


class Exchange(ExchangeCore):
    """One request from the decision to its last byte: the events."""

    # ------------------------------------------------------------------ decision and connection

    def start(self, now: float) -> Actions:
        """Decide and count, in one step."""
        if self.state is not DECIDING:
            return NOTHING
        shared = self._shared
        shared.budget.deposit()
        shared.refresh(now)
        tracker, info = shared.tracker, self.request.info
        decision = shared.policy.decide(tracker.snapshot(now, info.conversation), info)
        self.decision, self.decided_at = decision, now
        self.answer.explain(decision)
        if decision.backend is None:
            error = errors.NO_BACKEND if info.pinned is None else errors.PINNED_UNAVAILABLE
            return (NOTE_DECISION, *self._reject(error, now))
        role, memory = decision.backend, decision.memory
        self._lease = tracker.lease(role, now, memory, info.conversation, info.prompt_bytes)
        self.state = CONNECTING
        return (NOTE_DECISION, Open(role))

    def reject(self, error: ErrorAnswer, now: float) -> Actions:
        """Answer without a backend: a limit of ours was reached before the decision."""
        return self._reject(error, now) if self.state is DECIDING else NOTHING

    def sent(self, now: float, *, reused: bool) -> None:
        """The request was written to a connection."""
        if self.state is CONNECTING:
            self.state = WAITING
            self.sent_at = self._last_byte_at = now
            self._reused = reused

    def unreachable(self, now: float, *, timed_out: bool) -> Actions:
        """No connection could be made: nothing was sent. Rule (a)."""
        if self.state is not CONNECTING:
            return NOTHING
        sample = Sample(self._role, Verdict.FAILURE)
        if not self.retries and self._other_usable():
            return (sample, *self._move(Retry.CONNECT, Reason.REPLAY_CONNECT, now))
        error = errors.CONNECT_TIMEOUT if timed_out else errors.CONNECT_FAILED
        return (sample, *self._give_up(error, Outcome.BACKEND_LOST, now))

    def no_means(self, now: float) -> Actions:
        """No connection could even be tried, for want of files or memory of our own."""
        if self.state is not CONNECTING:
            return NOTHING
        return self._give_up(errors.NO_FILES, Outcome.REJECTED, now)

    # ------------------------------------------------------------------ the backend's answer

    def begin(self, head: ResponseHead, now: float) -> Actions:
        """The head of the answer is there."""
        if self.state is not WAITING:
            return NOTHING
        self.head = head
        self.first_byte_at = self._last_byte_at = now
        if head.status in REFUSALS:
            pressure = Sample(self._role, Verdict.BACK_PRESSURE)
            self._is_refusal = True
            if self._kept_refusal is not None:
                return (pressure, *self._give_refusal(now))
            self._will_replay = self._may_replay()
            self.state = HOLDING
            return (pressure,)
        if head.event_stream:
            self.scanner = SseScanner()
            if head.status == 200:
                self.state = PEEKING
                return NOTHING
        if head.framing == "length":
            hold = head.length <= self._shared.rules.hold_bytes
        else:  # one JSON object, unless it was asked for in pieces
            hold = not self.request.info.stream and head.is_json
        if hold:
            self.state = HOLDING
            return NOTHING
        return self._commit()

    def body(self, payload: bytes, now: float) -> Actions:
        """Body bytes, without their framing."""
        if self.state is RELAYING:
            return (Write(self.relay(payload, b"", 1, now)),)
        self._last_byte_at = now
        if self.state is HOLDING:
            self._hold(payload)
            if self._held_size > self._shared.rules.hold_bytes:
                return self._commit()
            return NOTHING
        if self.state is PEEKING:
            self._hold(payload)
            return self._peek(now)
        return NOTHING

    def whole(self, head: ResponseHead, body: bytes, now: float, *, reusable: bool) -> Actions:
        """The three events at once, as most answers come that are no stream: the short way."""
        if (
            self.state is not WAITING
            or head.status in REFUSALS
            or head.event_stream
            or len(body) > self._shared.rules.hold_bytes
        ):
            begun, held = self.begin(head, now), self.body(body, now)
            return (*begun, *held, *self.end(now, reusable=reusable))
        self.head = head
        self.first_byte_at = now
        if b'_tokens"' in body:
            self.usage = usage_of(body)
        shared = self._shared
        out = self.answer.whole(head, body, shared.common, draining=shared.draining)
        spare = KEEP_BACKEND if reusable else Do.DROP_BACKEND
        verdict, outcome = self._judge(head.status)
        sample = Sample(self._role, verdict or Verdict.NEUTRAL)
        self._settle(outcome, now)
        return (Write(out), sample, spare, Finish(self.answer.close))

    def relay(self, payload: bytes, framed: bytes, count: int, now: float) -> bytes:
        """Body bytes while RELAYING: the bytes to write. The plain ones go through `flow` alone.

        `framed` is the payload in whole chunks as the backend sent it, or empty.
        """
        flow = self.flow
        if flow is None:
            raise RuntimeError(f"nothing is relayed in state {self.state}")
        flow.count(now, count, len(payload))
        flow.look(payload)
        if not self.answer.chunked:
            flow.ready = False
            return payload
        return framed or self.answer.frame(payload)

    def end(self, now: float, *, reusable: bool) -> Actions:
        """The answer is complete."""
        spare = KEEP_BACKEND if reusable else Do.DROP_BACKEND
        if self.state not in ANSWERING or self.head is None:
            return NOTHING
        if self._will_replay:
            return self._replay_refusal(spare, now)
        out = b""
        if self.state is not RELAYING:
            if self.scanner is None and b'_tokens"' in (body := b"".join(self._held)):
                self.usage = usage_of(body)
            out = self._take_held()
        if self.answer.chunked:
            out += self.answer.ending()
        verdict, outcome = self._judge(self.head.status)
        actions: list[Action] = [Write(out)] if out else []
        if verdict is not None:
            actions.append(Sample(self._role, verdict))
        actions.append(spare)
        return (*actions, *self._done(outcome, now))

    def rest(self, payload: bytes, count: int, now: float, *, reusable: bool) -> Actions:
        """The last bytes and the end at once: the same as the two events, in one write."""
        if self.state is RELAYING:
            last: Actions = (Write(self.relay(payload, b"", count, now)),)
        else:
            last = self.body(payload, now)
        end = self.end(now, reusable=reusable)
        if len(last) == 1 and isinstance(last[0], Write) and end and isinstance(end[0], Write):
            return (Write(last[0].data + end[0].data), *end[1:])
        return (*last, *end)

    def lost(self, now: float, *, answered: bool, invalid: bool = False) -> Actions:
        """The backend's connection is gone, or what came on it is `invalid`.

        `answered` says that at least one byte of an answer had come.
        """
        if self.state in {DECIDING, CONNECTING, DONE}:
            return NOTHING
        if self._may_resend(now, answered=answered):
            self.retries += (Retry.STALE,)
            self.state = CONNECTING
            return (Open(self._role, fresh=True),)
        error = errors.BACKEND_PROTOCOL if invalid else errors.BACKEND_LOST
        return (*self._failure(), *self._give_up(error, Outcome.BACKEND_LOST, now))

    # ------------------------------------------------------------------ the client

    def client_gone(self, now: float) -> Actions:
        """The client left. Nothing more is written, nothing is started."""
        if self.state is DONE:
            return NOTHING
        self._settle(Outcome.CLIENT_GONE, now)
        return (Do.DROP_BACKEND,)

    def client_paused(self, now: float) -> Actions:
        """The client reads slower than the backend writes."""
        if self.state is DONE or self._paused_at is not None:
            return NOTHING
        self._paused_at = now
        return (Do.PAUSE_BACKEND,)

    def client_resumed(self, now: float) -> Actions:
        """The client reads again."""
        if self.state is DONE or self._paused_at is None:
            return NOTHING
        self._paused_at = None
        self._last_byte_at = now
        if self.flow is not None:
            self.flow.last_at = now
        return (Do.RESUME_BACKEND,)

    # ------------------------------------------------------------------ time

    def peek_expired(self) -> Actions:
        """The first event did not come soon after the head: let the head go."""
        return self._commit() if self.state is PEEKING else NOTHING

    def tick(self, now: float) -> Actions:
        """Time passed. Called every now and then, so limits are kept to about that grain."""
        rules = self._shared.rules
        if self.state is DONE:
            return NOTHING
        if self._paused_at is not None:
            if now - self._paused_at > rules.write_timeout:
                self.error = "write_timeout"
                return (Do.DROP_BACKEND, *self._broken(Outcome.CLIENT_GONE, now))
            return NOTHING
        silent = now - self._heard_at
        if self.state is WAITING and silent > rules.first_byte_timeout:
            error = errors.FIRST_BYTE_TIMEOUT
        elif self.state in ANSWERING and silent > rules.idle_timeout:
            error = errors.IDLE_TIMEOUT
        else:
            return NOTHING
        return (*self._failure(), *self._give_up(error, Outcome.TIMEOUT, now))

    def flowing(self, now: float) -> bool:
        """Whether bytes of an answer came within the last `FLOWING` seconds, and may go out."""
        waits = self.state is not RELAYING or self._paused_at is not None
        return not waits and now - self._heard_at < FLOWING

    @property
    def _heard_at(self) -> float:
        return self._last_byte_at if self.flow is None else self.flow.last_at

    def abort(self, now: float) -> Actions:
        """The drain limit is reached: end it with an explicit break."""
        if self.state is DONE:
            return NOTHING
        self._kept_refusal = None  # to be turned away by us is the news, not that one was before
        return self._give_up(errors.DRAIN_LIMIT, Outcome.BROKEN, now)
