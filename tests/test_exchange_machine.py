"""Exchanges driven in every order that their shell can produce, against a model of what they owe.

The model is a faithful shell with a backend that misbehaves at will: a connection may fail, break,
answer nonsense or fall silent at any point, the client may leave or stop reading at any point, and
several exchanges share one tracker and one budget. After each step the counts must be those of the
open leases; at each end the client's bytes are read with h11 and compared with what the backend
sent.
"""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router import errors
from router.actions import Actions, Do, Finish, Open, Rules
from router.exchange_core import State
from router.framing import ResponseHead, parse_head
from router.load import Role
from router.metrics import Outcome, Retry
from router.policy import FixedPolicy
from tests.test_exchange import LATE, LoggedTracker, Shell, make_shared

RULES = Rules(
    replay_window=1.0, peek_bytes=64, hold_bytes=400, first_byte_timeout=50.0, idle_timeout=20.0,
    write_timeout=10.0,
)  # fmt: skip
EVENT = b'data: {"choices":[{"delta":{"content":"xyz"}}]}\n\n'
LONG_EVENT = b'data: {"text":"' + b"y" * 90 + b'"}\n\n'
USAGE = b'data: {"usage":{"prompt_tokens":3,"completion_tokens":5}}\r\n\r\n'
REFUSED = b'data: {"error":{"message":"full","code":503}}\n\ndata: [DONE]\n\n'
FAILED = b'data: {"error":{"message":"odd","code":500}}\n\n'


class Plan(msgspec.Struct):
    """One answer that a backend means to give."""

    status: int
    framing: str
    kind: str
    body: bytes
    piece: int  # bytes per read

    def head(self, mark: str) -> ResponseHead:
        lines = f"HTTP/1.1 {self.status} X\r\ncontent-type: {self.kind}\r\nx-mark: {mark}"
        if self.framing == "length":
            lines += f"\r\ncontent-length: {len(self.body)}"
        elif self.framing == "chunked":
            lines += "\r\ntransfer-encoding: chunked"
        return parse_head(lines.encode())

    @property
    def refuses(self) -> bool:
        """Whether the backend refuses before it works."""
        stream = self.status == 200 and self.kind == "text/event-stream"
        said = self.body.removeprefix(b": ping\n\n").startswith(REFUSED[:30])
        return self.status in {429, 503} or (stream and said)


BODIES = st.sampled_from(
    [b"", b"{}", b'{"usage":{"completion_tokens":4}}', b"z" * 399, b"z" * 1000]
)
STREAMS = st.sampled_from(
    [
        b"", EVENT, EVENT * 3 + USAGE + b"data: [DONE]\n\n", LONG_EVENT * 2, REFUSED,
        b": ping\n\n" + REFUSED, b": ping\n\n" * 9, EVENT + REFUSED, EVENT + FAILED, FAILED,
        EVENT[:20], b"data: x\r\n\r\ndata: y\r\rdata: z\r\n\r\n",
    ]
)  # fmt: skip
PIECES = st.sampled_from([1, 7, 48, 10_000])
FRAMINGS = st.sampled_from(["length", "chunked", "close"])
PLANS = st.one_of(
    st.builds(
        Plan, st.sampled_from([200, 200, 400, 500]), FRAMINGS, st.just("application/json"), BODIES,
        PIECES,
    ),
    st.builds(Plan, st.just(200), FRAMINGS, st.just("text/event-stream"), STREAMS, PIECES),
    st.builds(
        Plan, st.sampled_from([429, 503]), FRAMINGS,
        st.sampled_from(["application/json", "text/event-stream"]),
        st.sampled_from([b"", b"no", b"data: {}\n\n", b"n" * 390, b"n" * 800]), PIECES,
    ),
    st.builds(
        Plan, st.sampled_from([204, 304]), st.just("none"), st.just("text/plain"), st.just(b""),
        PIECES,
    ),
)  # fmt: skip


class Attempt:
    """One sending of the request."""

    def __init__(self, role: Role, plan: Plan, mark: str, *, reused: bool, at: float) -> None:
        self.role = role
        self.plan = plan
        self.mark = mark
        self.reused = reused
        self.at = at
        self.began = False
        self.given = b""  # body bytes that the backend sent
        self.whole = False
        self.answered = False
        self.lost_at: float | None = None


class Life(Shell):
    """One exchange, its backend connection, and what must come of them."""

    def __init__(self, machine: Machine, number: int, plans: list[Plan], *, http10: bool, pinned: Role | None) -> None:  # fmt: skip
        usable = tuple(role for role in Role if machine.tracker.of(role).usable)
        super().__init__(machine.shared, http10=http10, pinned=pinned, usable=usable)
        self.machine = machine
        self.number = number
        self.http10 = http10
        self.plans = plans
        self.attempts: list[Attempt] = []
        self.tries = 0  # openings that are not the replay of a stale connection
        self.connecting: Open | None = None
        self.connection: Attempt | None = None
        self.backend_paused = False
        self.client_left = False
        self.peek_over = False
        self.checked = False

    @property
    def done(self) -> bool:
        return self.exchange.state is State.DONE

    def run(self, actions: Actions) -> Actions:
        self.now = self.machine.now
        for action in actions:
            if isinstance(action, Open):
                assert self.connection is None, "a second connection at the same time"
                assert self.connecting is None
                assert not self.done
                self.connecting = action
                self.tries += not action.fresh
            elif action in {Do.DROP_BACKEND, Do.KEEP_BACKEND}:
                if action is Do.KEEP_BACKEND:
                    assert self.connection is None or self.connection.whole
                self.connection = None
            elif action is Do.PAUSE_BACKEND:
                self.backend_paused = True
            elif action is Do.RESUME_BACKEND:
                self.backend_paused = False
        super().run(actions)
        if self.done:
            self.connecting = self.connection = None
        return actions

    # ------------------------------------------------------------------ what happens to it

    def connect(self, how: str) -> None:
        opened, self.connecting = self.connecting, None
        assert opened is not None
        if how in {"refused", "timeout"}:
            self.unreachable(timed_out=how == "timeout")
            return
        plan = self.plans[min(len(self.attempts), len(self.plans) - 1)]
        mark = f"{self.number}.{len(self.attempts)}"
        reused = how in {"reused", "stale", "odd"} and not opened.fresh
        attempt = Attempt(opened.role, plan, mark, reused=reused, at=self.machine.now)
        self.attempts.append(attempt)
        self.connection = attempt
        self.sent(reused=reused)
        if how in {"stale", "odd"}:
            self.break_off(invalid=how == "odd")

    def proceed(self) -> None:
        """The backend sends the next piece of its answer."""
        attempt = self.connection
        assert attempt is not None
        plan = attempt.plan
        if not attempt.began:
            attempt.began = True
            self.begin(plan.head(attempt.mark))
        elif len(attempt.given) < len(plan.body):
            at = len(attempt.given)
            piece = plan.body[at : at + plan.piece]
            attempt.given += piece
            if attempt.given == plan.body and plan.framing == "chunked" and plan.piece > 1:
                attempt.whole = True  # its last chunks came with the end
                rest = self.exchange.rest(piece, 1, self.machine.now, reusable=True)
                self.run(rest)
                return
            if self.exchange.state is State.RELAYING:  # as the driver does
                framed = b"%x\r\n%b\r\n" % (len(piece), piece) if plan.framing == "chunked" else b""
                self.wire += self.exchange.relay(piece, framed, 1, self.machine.now)
            else:
                self.body(piece)
        if self.connection is attempt and attempt.given == plan.body and not attempt.whole:
            attempt.whole = True
            self.end(reusable=plan.framing != "close")

    def break_off(self, *, invalid: bool) -> None:
        attempt, self.connection = self.connection, None
        assert attempt is not None
        attempt.lost_at = self.machine.now
        attempt.answered = attempt.began or invalid
        self.lost(answered=attempt.answered, invalid=invalid)

    # ------------------------------------------------------------------ what must hold at its end

    def check(self) -> None:
        """Everything that is owed at the end."""
        self.checked = True
        self.check_replays()
        self.check_samples()
        outcome = self.exchange.outcome
        assert outcome is not None
        if self.client_left:
            assert outcome is Outcome.CLIENT_GONE
            assert self.ends == []
        else:
            assert len(self.ends) == 1
            self.check_answer(outcome)
        assert self.exchange.start(self.machine.now) == ()

    def check_replays(self) -> None:
        """Each sending but the last ended in a way that a rule allows to be followed by one."""
        for attempt, following in pairwise(self.attempts):
            if following.role is attempt.role:  # (b)
                assert attempt.reused
                assert attempt.lost_at is not None
                assert attempt.lost_at - attempt.at <= RULES.replay_window
                assert not attempt.answered
            else:  # (c)
                assert attempt.plan.refuses
                assert attempt.whole
                assert self.exchange.request.info.pinned is None
        moves = [retry for retry in self.exchange.retries if retry is not Retry.STALE]
        assert len(moves) <= 1
        assert self.exchange.retries.count(Retry.STALE) <= 1
        assert len(self.opens) <= 3

    def check_samples(self) -> None:
        """At most one sample per try, in their order; none for what nobody can be blamed for."""
        assert len(self.samples) <= self.tries
        roles = [opened.role for opened in self.opens if not opened.fresh]
        assert [role for role, _ in self.samples] == roles[: len(self.samples)]

    def check_answer(self, outcome: Outcome) -> None:
        """The client has one whole answer, or an explicit break."""
        code = self.exchange.error
        if not self.wire:
            assert self.ends == [Do.BREAK_CLIENT]  # it never read what was sent before
            assert code == "write_timeout"
            return
        read = self.read()
        finished = isinstance(self.ends[0], Finish)
        assert read.rest == b""
        assert len(read.names) == len(set(read.names))
        if finished:
            assert read.complete
            assert (self.ends == [Finish(close=True)]) is (
                read.headers.get("connection") == "close"
            )
        mark = read.headers.get("x-mark")
        if mark is None:  # an answer of our own
            assert finished
            assert json.loads(read.body)["error"]["code"] == code
            assert read.status in {429, 502, 503, 504}
            if Retry.REFUSED in self.exchange.retries:  # else the refusal is what it gets
                assert code == "drain_limit"
            return
        (attempt,) = [attempt for attempt in self.attempts if attempt.mark == mark]
        plan = attempt.plan
        assert read.status == plan.status
        assert read.headers["x-crossover-backend"] == attempt.role
        decision = self.exchange.decision
        assert decision is not None
        assert decision.backend is attempt.role
        if finished:
            assert attempt.whole
            assert read.body == plan.body
            assert code is None
            assert (outcome is Outcome.REFUSED) is plan.refuses or self.peek_over
            if attempt is not self.attempts[-1]:
                assert outcome is Outcome.REFUSED
        else:
            self.check_break(read.body, attempt, complete=read.complete)

    def check_break(self, body: bytes, attempt: Attempt, *, complete: bool) -> None:
        """What went out is what came, and it cannot be taken for whole."""
        assert attempt is self.attempts[-1]
        code = self.exchange.error
        event = b""
        if not attempt.given.startswith(body):
            rows = (
                errors.BACKEND_LOST,
                errors.BACKEND_PROTOCOL,
                errors.IDLE_TIMEOUT,
                errors.DRAIN_LIMIT,
            )
            (row,) = [row for row in rows if row.code == code]
            event = row.event
            assert body.endswith(event)
            assert attempt.plan.kind == "text/event-stream"
            assert attempt.plan.framing != "length"
            assert not attempt.given or attempt.given.endswith(
                (b"\n\n", b"\r\n\r\n", b"\r\r", b"\r\n\r")
            )
        assert body.removesuffix(event) == attempt.given
        if not (self.http10 and attempt.plan.framing != "length"):
            assert not complete


PICKS = st.integers(0, 5)
HOWS = st.sampled_from(["fresh", "fresh", "fresh", "reused", "stale", "odd", "refused", "timeout"])
STEPS = st.sampled_from([1, 1, 2, 3, 6, 2000])


class Machine(RuleBasedStateMachine):
    """Several exchanges at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        shared, tracker = make_shared(FixedPolicy(Role.SPECULATIVE), RULES, share=0.2)
        shared.budget.saved = shared.budget.reserve = 2.0
        self.shared = shared
        self.tracker: LoggedTracker = tracker
        self.all: list[Life] = []

    def alive(self, pick: int) -> Life:
        lives = [life for life in self.all if not life.done]
        return lives[pick % len(lives)]

    @property
    def some_alive(self) -> bool:
        return any(not life.done for life in self.all)

    def after(self, life: Life) -> None:
        if life.done and not life.checked:
            life.check()

    @rule(
        plans=st.lists(PLANS, min_size=3, max_size=3),
        http10=st.booleans(),
        pinned=st.sampled_from([None, None, None, None, None, *Role]),
        started=st.sampled_from([True, True, True, False]),
    )
    def arrive(self, plans: list[Plan], http10: bool, pinned: Role | None, started: bool) -> None:
        life = Life(self, len(self.all), plans, http10=http10, pinned=pinned)
        life.now = self.now
        self.all.append(life)
        if started:
            life.start()
            self.after(life)

    @precondition(lambda self: self.some_alive)
    @rule(pick=PICKS, how=HOWS, steps=STEPS)
    def go_on(self, pick: int, how: str, steps: int) -> None:
        """What comes next for one of them, as it should be or nearly so."""
        life = self.alive(pick)
        for _ in range(steps):
            if life.exchange.state is State.DECIDING:
                life.start()
            elif life.connecting is not None:
                life.connect(how)
                how = "fresh"
            elif life.connection is not None and not life.backend_paused:
                life.proceed()
        self.after(life)

    go_on_again = go_on
    and_again = go_on

    @precondition(lambda self: any(life.connection for life in self.all))
    @rule(pick=PICKS, invalid=st.booleans())
    def break_off(self, pick: int, invalid: bool) -> None:
        lives = [life for life in self.all if life.connection]
        life = lives[pick % len(lives)]
        life.break_off(invalid=invalid)
        self.after(life)

    @precondition(lambda self: any(life.exchange.state is State.PEEKING for life in self.all))
    @rule(pick=PICKS)
    def peek_expires(self, pick: int) -> None:
        lives = [life for life in self.all if life.exchange.state is State.PEEKING]
        life = lives[pick % len(lives)]
        life.peek_over = True
        life.peek_expired()
        self.after(life)

    @precondition(lambda self: self.some_alive)
    @rule(
        pick=PICKS, how=st.sampled_from(["leaves", "drain", "full", *["slow"] * 3, *["reads"] * 3])
    )
    def client_or_limit(self, pick: int, how: str) -> None:
        life = self.alive(pick)
        if how == "leaves":
            life.client_left = True
            assert life.client_gone() == (Do.DROP_BACKEND,)
        elif how == "drain":
            life.abort()
            assert life.exchange.outcome is Outcome.BROKEN
        elif how == "full":
            life.reject(errors.QUEUE_FULL)
        elif how == "slow":
            life.client_paused()
        else:
            life.client_resumed()
            assert not life.backend_paused
        self.after(life)

    @precondition(lambda self: self.some_alive)
    @rule(seconds=st.sampled_from([0.001, 0.001, 0.5, 0.5, 2.0, 9.0, 21.0, 51.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for life in self.all:
            life.now = self.now
            life.run(life.exchange.tick(self.now))
            self.after(life)

    @rule(role=st.sampled_from(list(Role)), usable=st.sampled_from([True, True, False]))
    def backend_changes(self, role: Role, usable: bool) -> None:
        self.tracker.set_usable(role, usable=usable)

    @rule(draining=st.booleans())
    def drain_changes(self, draining: bool) -> None:
        self.shared.draining = draining

    @precondition(lambda self: any(life.done for life in self.all))
    @rule(pick=PICKS, late=st.sampled_from(sorted(LATE)))
    def something_comes_late(self, pick: int, late: str) -> None:
        ended = [life for life in self.all if life.done]
        life = ended[pick % len(ended)]
        outcome, wire = life.exchange.outcome, life.wire
        assert LATE[late](life) == ()
        assert (life.exchange.outcome, life.wire) == (outcome, wire)

    @invariant()
    def counts_are_open_leases(self) -> None:
        """Each exchange under way is counted once, where it is, and nothing else is."""
        open_on = dict.fromkeys(Role, 0)
        for life in self.all:
            if life.exchange.state not in {State.DECIDING, State.DONE}:
                open_on[life.opens[-1].role] += 1
            assert life.checked is life.done
        assert self.tracker.counts == (open_on[Role.SPECULATIVE], open_on[Role.BASELINE])

    @invariant()
    def little_is_held(self) -> None:
        """What is held back is bounded."""
        for life in self.all:
            assert life.exchange._held_size <= RULES.hold_bytes + 10_000
            if life.exchange.state is State.RELAYING:
                assert life.exchange._held == []

    @invariant()
    def the_backend_is_paused_with_the_client(self) -> None:
        """While bytes are relayed to a slow client, its backend is not read."""
        for life in self.all:
            if life.exchange.state is State.RELAYING:
                assert life.backend_paused is (life.exchange._paused_at is not None)

    def teardown(self) -> None:
        for life in self.all:
            if not life.done:
                life.client_left = True
                life.client_gone()
                life.check()
        assert self.tracker.counts == (0, 0)
        log = self.tracker.log
        assert sum(entry[0] == "+" for entry in log) == sum(entry[0] == "-" for entry in log)
        assert self.tracker.in_flight == 0


TestExchanges = Machine.TestCase
TestExchanges.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize(
    ("framing", "status", "expected"), [("none", 204, "none"), ("close", 200, "close")]
)
def test_the_model_makes_heads_that_are_what_they_say(
    framing: str, status: int, expected: str
) -> None:
    """A plan's head is a head that the real parser reads."""
    head = Plan(status, framing, "text/plain", b"", 1).head("0.0")
    assert (head.framing, head.status) == (expected, status)
