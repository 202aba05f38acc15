"""The life of one proxied request: every rule of replay, peeking, holding and ending, as tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from router import errors
from router.actions import Actions, Do, Finish, Open, RetryBudget, Rules, Sample, Shared, Write
from router.breaker import Verdict
from router.errors import ErrorAnswer
from router.exchange import Exchange
from router.exchange_core import State
from router.framing import ChunkedReader, ResponseHead, parse_head
from router.load import Lease, LoadTracker, PolicyMemory, Role
from router.metrics import CHUNK_GAP_BOUNDS, Histogram, Outcome, Retry
from router.policy import Decision, FixedPolicy, Policy, Reason
from router.request import RequestInfo
from tests.test_answer import COMMON, Read, make_request, read_answer

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
FAILURE, PRESSURE, SUCCESS = Verdict.FAILURE, Verdict.BACK_PRESSURE, Verdict.SUCCESS
CAPTURES = Path(__file__).parent / "data" / "sse"

# --------------------------------------------------------------------------- the harness


class LoggedLease(Lease):
    """A lease that writes down when it is given back."""

    __slots__ = ("_log",)

    def __init__(self, tracker: LoggedTracker, role: Role) -> None:
        super().__init__(tracker.of(role))
        self._log = tracker.log

    def release(self, now: float) -> None:
        super().release(now)
        self._log.append(f"-{self.role}")


class LoggedTracker(LoadTracker):
    """A tracker that writes down the order of leases and releases."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def lease(
        self,
        role: Role,
        now: float,
        memory: PolicyMemory | None = None,
        conversation: int | None = None,
        length: int = 0,
    ) -> Lease:
        super().lease(role, now, memory, conversation, length)
        self.log.append(f"+{role}")
        return LoggedLease(self, role)

    @property
    def counts(self) -> tuple[int, int]:
        return self.speculative.in_flight, self.baseline.in_flight


def make_shared(
    policy: Policy | None = None,
    rules: Rules | None = None,
    *,
    share: float = 0.2,
    refresh: Callable[[float], None] = lambda _now: None,
) -> tuple[Shared, LoggedTracker]:
    tracker = LoggedTracker()
    gaps = {role: Histogram(CHUNK_GAP_BOUNDS) for role in Role}
    shared = Shared(
        tracker, policy or FixedPolicy(SPEC), rules or Rules(), RetryBudget(share), gaps, refresh
    )
    shared.common = COMMON
    return shared, tracker


class Shell:
    """Carries out actions as the driver does, and remembers them. `now` is set by the test."""

    def __init__(
        self,
        shared: Shared | None = None,
        *,
        pinned: Role | None = None,
        http10: bool = False,
        keep_alive: bool = True,
        rules: Rules | None = None,
        share: float = 0.2,
        usable: tuple[Role, ...] = (SPEC, BASE),
        stream: bool = False,
    ) -> None:
        if shared is None:
            shared, _ = make_shared(rules=rules, share=share)
        assert isinstance(shared.tracker, LoggedTracker)
        self.shared = shared
        self.tracker = shared.tracker
        for role in Role:
            self.tracker.set_usable(role, usable=role in usable)
        info = RequestInfo(pinned=pinned, stream=stream)
        self.exchange = Exchange(
            make_request(info=info, http10=http10, keep_alive=keep_alive), shared
        )
        self.now = 100.0
        self.wire = b""
        self.opens: list[Open] = []
        self.samples: list[tuple[Role, Verdict]] = []
        self.decisions: list[Decision] = []
        self.ends: list[Finish | Do] = []
        self.backend: list[Do] = []  # what was done to backend connections

    def run(self, actions: Actions) -> Actions:
        for action in actions:
            assert not self.ends, "an action after the end"
            if isinstance(action, Write):
                self.wire += action.data
            elif isinstance(action, Open):
                self.opens.append(action)
            elif isinstance(action, Sample):
                self.samples.append((action.role, action.verdict))
            elif isinstance(action, Finish) or action is Do.BREAK_CLIENT:
                self.ends.append(action)
            elif action is Do.NOTE_DECISION:
                assert self.exchange.decision is not None
                self.decisions.append(self.exchange.decision)
            else:
                self.backend.append(action)
        return actions

    # events, in the driver's words

    def start(self) -> Actions:
        return self.run(self.exchange.start(self.now))

    def sent(self, *, reused: bool = False) -> None:
        self.exchange.sent(self.now, reused=reused)

    def send_late(self) -> Actions:
        """An event without actions, as one that has none."""
        self.sent()
        return ()

    def unreachable(self, *, timed_out: bool = False) -> Actions:
        return self.run(self.exchange.unreachable(self.now, timed_out=timed_out))

    def begin(self, head: ResponseHead) -> Actions:
        return self.run(self.exchange.begin(head, self.now))

    def body(self, payload: bytes) -> Actions:
        return self.run(self.exchange.body(payload, self.now))

    def end(self, *, reusable: bool = True) -> Actions:
        return self.run(self.exchange.end(self.now, reusable=reusable))

    def lost(self, *, answered: bool = False, invalid: bool = False) -> Actions:
        return self.run(self.exchange.lost(self.now, answered=answered, invalid=invalid))

    def client_gone(self) -> Actions:
        return self.run(self.exchange.client_gone(self.now))

    def client_paused(self) -> Actions:
        return self.run(self.exchange.client_paused(self.now))

    def client_resumed(self) -> Actions:
        return self.run(self.exchange.client_resumed(self.now))

    def peek_expired(self) -> Actions:
        return self.run(self.exchange.peek_expired())

    def tick(self, after: float = 0.0) -> Actions:
        self.now += after
        return self.run(self.exchange.tick(self.now))

    def abort(self) -> Actions:
        return self.run(self.exchange.abort(self.now))

    def reject(self, error: ErrorAnswer = errors.QUEUE_FULL) -> Actions:
        return self.run(self.exchange.reject(error, self.now))

    # some events in a row

    def go(self, *, reused: bool = False) -> Shell:
        """To WAITING on the first backend."""
        self.start()
        self.sent(reused=reused)
        return self

    def answer(self, head: ResponseHead, *pieces: bytes) -> None:
        """A whole answer of the backend."""
        self.begin(head)
        for piece in pieces:
            self.body(piece)
        self.end()

    def read(self) -> Read:
        return read_answer(self.wire, closed=True)

    def own_error(self) -> str:
        """The code of the error of ours that the client got, whole."""
        read = self.read()
        assert read.complete
        assert read.rest == b""
        code = json.loads(read.body)["error"]["code"]
        assert isinstance(code, str)
        return code

    def over(self, outcome: Outcome) -> None:
        """It ended like this, and everything that was taken is given back."""
        assert self.exchange.state is State.DONE
        assert self.exchange.outcome is outcome
        assert self.exchange.ended_at == self.now
        assert self.tracker.counts == (0, 0)
        log = self.tracker.log
        assert sorted(x[1:] for x in log if x[0] == "+") == sorted(
            x[1:] for x in log if x[0] == "-"
        )


def make_head(
    status: int = 200, framing: str | int = "chunked", kind: str = "text/event-stream"
) -> ResponseHead:
    lines = f"HTTP/1.1 {status} Reason\r\ncontent-type: {kind}\r\nx-from: {framing}"
    if isinstance(framing, int):
        lines += f"\r\ncontent-length: {framing}"
    elif framing == "chunked":
        lines += "\r\ntransfer-encoding: chunked"
    return parse_head(lines.encode())


def make_json(body: bytes, status: int = 200) -> ResponseHead:
    return make_head(status, len(body), "application/json")


def capture(name: str) -> tuple[ResponseHead, bytes]:
    """Head and body of a captured answer."""
    head, _, body = (CAPTURES / name).read_bytes().partition(b"\r\n\r\n")
    parsed = parse_head(head)
    if parsed.framing == "chunked":
        body = b"".join(ChunkedReader().feed(body))
    return parsed, body


STREAM = make_head()
BODY = b'{"usage":{"prompt_tokens":3,"completion_tokens":5}}'
JSON = make_json(BODY)
EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
LARGE = make_head(200, 300_000, "application/json")
JSON_IN_CHUNKS = make_head(200, "chunked", "application/json")
CHUNKED_REFUSAL = make_head(503, "chunked", "text/plain")

# One refusal of each kind: its head, its pieces.
QUEUE_FULL_STREAM = capture("queue_full.http")
QUEUE_FULL_PLAIN = capture("queue_full_plain.http")
REFUSALS = {
    "plain-503": (QUEUE_FULL_PLAIN[0], [QUEUE_FULL_PLAIN[1]]),
    "plain-429": (make_head(429, 4, "text/plain"), [b"sl", b"ow"]),
    "empty-503": (make_head(503, 0, "text/plain"), []),
    "chunked-503": (make_head(503, "chunked", "text/plain"), [b"no"]),
    "close-503": (make_head(503, "close", "text/plain"), [b"no"]),
    "stream-status-503": (make_head(503), [b"data: {}\n\n"]),
    "stream-503": (QUEUE_FULL_STREAM[0], [QUEUE_FULL_STREAM[1]]),
    "stream-bytes": (
        QUEUE_FULL_STREAM[0],
        [bytes([byte]) for byte in QUEUE_FULL_STREAM[1]],
    ),
    "stream-429": (STREAM, [b'data: {"error":{"code":429}}\n\n', DONE]),
    "stream-crlf": (STREAM, [b'data: {"error":{"code":503}}\r\n\r\ndata: [DONE]\r\n\r\n']),
    "stream-split-crlf": (STREAM, [b'data: {"error":{"code":503}}\r\n\r', b"\ndata: [DONE]\r\n\r\n"]),
    "stream-named": (STREAM, [b'event: error\ndata: {"error":{"code":503}}\n\n']),
    "stream-lines": (STREAM, [b'data: {"error":\ndata: {"code":503}}\n\n']),
    "stream-comment": (STREAM, [b": ping\n\n", b'data: {"error":{"code":503}}\n\n']),
    "stream-length": (make_head(200, 30), [b'data: {"error":{"code":503}}\n\n']),
}  # fmt: skip


@pytest.fixture(params=REFUSALS)
def refusal(request: pytest.FixtureRequest) -> tuple[ResponseHead, list[bytes]]:
    return REFUSALS[request.param]


def is_refusal_of(shell: Shell, refusal: tuple[ResponseHead, list[bytes]], role: Role) -> None:
    """The client got this refusal, unchanged and whole, with the headers of this backend."""
    head, pieces = refusal
    read = shell.read()
    assert (read.status, read.body, read.complete, read.rest) == (
        head.status,
        b"".join(pieces),
        True,
        b"",
    )
    assert shell.wire.startswith(b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason))
    assert read.headers["x-crossover-backend"] == role
    kept = {"content-type", "vary", "x-from"}
    assert {name: value for name, value in read.headers.items() if name in kept} == {
        name.decode(): value.decode() for name, value in head.headers if name.decode() in kept
    }


# --------------------------------------------------------------------------- the decision


def test_the_decision_and_the_count_are_one_step() -> None:
    """After the start the request is counted on the backend that it is sent to."""
    shell = Shell()
    assert shell.start() == (Do.NOTE_DECISION, Open(SPEC))
    assert shell.tracker.counts == (1, 0)
    assert shell.exchange.state is State.CONNECTING
    assert shell.exchange.decided_at == 100.0
    assert shell.decisions[0].reason is Reason.FIXED


def test_time_passes_before_the_decision() -> None:
    """Health is brought up to date first, so the decision sees who is usable now."""
    tracker: list[LoggedTracker] = []

    def refresh(now: float) -> None:
        assert now == 100.0
        tracker[0].set_usable(SPEC, usable=False)

    shared, found = make_shared(refresh=refresh)
    tracker.append(found)
    assert Shell(shared).start() == (Do.NOTE_DECISION, Open(BASE))


def test_the_policys_memory_is_kept() -> None:
    """What the policy wants remembered is stored with the lease, and not by a replay."""

    class Remembering:
        def decide(self, snapshot: object, info: RequestInfo) -> Decision:
            return Decision(SPEC, Reason.FIXED, 0, 0, 8.0, PolicyMemory(BASE, 7.0), 9.0)

    shared, tracker = make_shared(Remembering())
    shell = Shell(shared)
    shell.start()
    assert tracker.memory == PolicyMemory(BASE, 7.0)
    tracker.memory = PolicyMemory(SPEC, 8.0)
    shell.unreachable()
    assert tracker.memory == PolicyMemory(SPEC, 8.0)
    decision = shell.exchange.decision
    assert decision is not None
    assert (decision.frontier, decision.threshold, decision.memory.since) == (8.0, 9.0, 8.0)


@pytest.mark.parametrize(
    ("pinned", "usable", "message"),
    [
        (None, (), errors.NO_BACKEND.message),
        (SPEC, (BASE,), errors.PINNED_UNAVAILABLE.message),
        (BASE, (SPEC,), errors.PINNED_UNAVAILABLE.message),
    ],
)
def test_no_backend(pinned: Role | None, usable: tuple[Role, ...], message: str) -> None:
    """Without a backend to take it the request gets a 503 at once and is counted nowhere."""
    shell = Shell(pinned=pinned, usable=usable)
    shell.start()
    assert shell.own_error() == "no_backend"
    assert json.loads(shell.read().body)["error"]["message"] == message
    assert shell.read().headers["x-crossover-backend"] == "none"
    assert shell.ends == [Finish(close=False)]
    assert (shell.opens, shell.samples, shell.tracker.log) == ([], [], [])
    assert len(shell.decisions) == 1
    shell.over(Outcome.REJECTED)


def test_an_own_limit() -> None:
    """A request that found no place is answered without a decision."""
    shell = Shell()
    shell.reject()
    assert shell.own_error() == "queue_full"
    assert shell.read().status == 429
    assert shell.decisions == []
    assert shell.exchange.error == "queue_full"
    shell.over(Outcome.REJECTED)


def test_a_started_request_is_not_rejected() -> None:
    """Once decided, our own limits have nothing to say."""
    shell = Shell()
    shell.start()
    assert shell.reject() == ()
    assert shell.exchange.state is State.CONNECTING


def test_a_request_is_started_once() -> None:
    """A second start takes no second lease."""
    shell = Shell()
    shell.start()
    assert shell.start() == ()
    assert shell.tracker.log == ["+speculative"]


def test_each_request_pays_into_the_budget() -> None:
    """A start deposits its share."""
    shell = Shell()
    shell.shared.budget.saved = 0.0
    shell.start()
    assert shell.shared.budget.saved == 0.2


# --------------------------------------------------------------------------- plain answers


@pytest.mark.parametrize("http10", [False, True])
@pytest.mark.parametrize("framing", [len(BODY), "chunked", "close"])
@pytest.mark.parametrize("step", [1, 7, 100])
def test_an_answer_passes_unchanged(http10: bool, framing: str | int, step: int) -> None:
    """Body, status and headers reach each client whatever the framing and the cuts."""
    shell = Shell(http10=http10).go()
    shell.begin(make_head(200, framing, "application/json"))
    for at in range(0, len(BODY), step):
        shell.body(BODY[at : at + step])
    shell.end()
    read = shell.read()
    assert (read.status, read.body, read.complete, read.rest) == (200, BODY, True, b"")
    assert read.headers["x-from"] == str(framing)
    assert shell.ends == [Finish(close=http10)]
    assert shell.samples == [(SPEC, SUCCESS)]
    assert shell.backend == [Do.KEEP_BACKEND]
    assert shell.exchange.answer.bytes_out == len(BODY)
    shell.over(Outcome.OK)


@pytest.mark.parametrize(
    ("status", "verdict", "outcome"),
    [
        (200, Verdict.SUCCESS, Outcome.OK),
        (204, Verdict.SUCCESS, Outcome.OK),
        (304, Verdict.SUCCESS, Outcome.OK),
        (307, Verdict.SUCCESS, Outcome.OK),
        (400, Verdict.NEUTRAL, Outcome.CLIENT_ERROR),
        (404, Verdict.NEUTRAL, Outcome.CLIENT_ERROR),
        (500, Verdict.FAILURE, Outcome.BACKEND_ERROR),
        (502, Verdict.FAILURE, Outcome.BACKEND_ERROR),
        (504, Verdict.FAILURE, Outcome.BACKEND_ERROR),
        (529, Verdict.FAILURE, Outcome.BACKEND_ERROR),
    ],
)
def test_what_a_status_says(status: int, verdict: Verdict, outcome: Outcome) -> None:
    """Each status passes, is one sample and never a replay."""
    shell = Shell().go()
    pieces = [] if status in {204, 304} else [b"body"]
    shell.answer(make_head(status, 4, "text/plain"), *pieces)
    read = shell.read()
    assert (read.status, read.body, read.complete) == (status, b"".join(pieces), True)
    assert shell.samples == [(SPEC, verdict)]
    assert shell.opens == [Open(SPEC)]
    shell.over(outcome)


def test_a_connection_that_may_not_live_on_is_dropped() -> None:
    """A backend that closes after its answer is not kept."""
    shell = Shell().go()
    shell.begin(JSON)
    shell.body(BODY)
    shell.end(reusable=False)
    assert shell.backend == [Do.DROP_BACKEND]
    shell.over(Outcome.OK)


def test_usage_of_a_held_answer() -> None:
    """Tokens are read from an answer that is held whole, and only if it has some."""
    shell = Shell().go()
    shell.answer(JSON, BODY)
    assert shell.exchange.usage == (3, 5)
    other = Shell().go()
    other.answer(make_json(b"{}"), b"{}")
    assert other.exchange.usage == (None, None)


def test_a_drain_closes_the_connection_after_the_answer() -> None:
    """While draining, a whole answer says that the connection ends with it."""
    shell = Shell().go()
    shell.shared.draining = True
    shell.answer(JSON, BODY)
    assert shell.read().headers["connection"] == "close"
    assert shell.ends == [Finish(close=True)]


# --------------------------------------------------------------------------- replays: unreachable backends


def test_an_unreachable_backend() -> None:
    """The request moves to the other one; its new lease comes before the old one goes."""
    shell = Shell()
    shell.start()
    actions = shell.unreachable()
    assert actions == (Sample(SPEC, FAILURE), Do.NOTE_DECISION, Open(BASE))
    assert shell.tracker.log == ["+speculative", "+baseline", "-speculative"]
    assert shell.tracker.counts == (0, 1)
    assert shell.decisions[1].reason is Reason.REPLAY_CONNECT
    assert (shell.decisions[1].n, shell.decisions[1].m) == (0, 0)
    assert list(shell.exchange.retries) == [Retry.CONNECT]
    shell.sent()
    shell.answer(JSON, BODY)
    assert shell.read().headers["x-crossover-backend"] == "baseline"
    assert shell.samples == [(SPEC, FAILURE), (BASE, SUCCESS)]
    shell.over(Outcome.OK)


def test_a_move_does_not_count_the_request_itself() -> None:
    """The n and m of a replay's decision are the others' requests, in both directions."""
    for first in Role:
        shared, tracker = make_shared(FixedPolicy(first))
        others = [tracker.lease(SPEC, 0.0) for _ in range(3)] + [tracker.lease(BASE, 0.0)]
        shell = Shell(shared)
        shell.start()
        shell.unreachable()
        assert (shell.decisions[1].n, shell.decisions[1].m) == (3, 1)
        for lease in others:
            lease.release(0.0)


@pytest.mark.parametrize(
    ("timed_out", "status", "code"),
    [(False, 502, "backend_connect_failed"), (True, 502, "backend_connect_timeout")],
)
def test_two_unreachable_backends(timed_out: bool, status: int, code: str) -> None:
    """If the other one cannot be reached either, it is a 502 with the class of the last try."""
    shell = Shell()
    shell.start()
    shell.unreachable(timed_out=not timed_out)
    shell.unreachable(timed_out=timed_out)
    assert shell.own_error() == code
    assert shell.read().status == status
    assert shell.opens == [Open(SPEC), Open(BASE)]
    assert shell.samples == [(SPEC, FAILURE), (BASE, FAILURE)]
    assert shell.exchange.error == code
    assert shell.ends == [Finish(close=False)]
    shell.over(Outcome.BACKEND_LOST)


@pytest.mark.parametrize(("pinned", "usable"), [(SPEC, (SPEC, BASE)), (None, (SPEC,))])
def test_no_other_backend_to_go_to(pinned: Role | None, usable: tuple[Role, ...]) -> None:
    """A pinned request, or one whose other backend is out of use, stays where it failed."""
    shell = Shell(pinned=pinned, usable=usable)
    shell.start()
    shell.unreachable()
    assert shell.own_error() == "backend_connect_failed"
    assert shell.opens == [Open(SPEC)]
    shell.over(Outcome.BACKEND_LOST)


def test_after_a_move_a_refusal_is_final(refusal: tuple[ResponseHead, list[bytes]]) -> None:
    """A request that moved once because of (a) does not move back because of (c)."""
    shell = Shell()
    shell.start()
    shell.unreachable()
    shell.sent()
    shell.answer(refusal[0], *refusal[1])
    is_refusal_of(shell, refusal, BASE)
    assert len(shell.opens) == 2
    assert shell.shared.budget.saved == 10.0
    assert shell.samples == [(SPEC, FAILURE), (BASE, PRESSURE)]
    shell.over(Outcome.REFUSED)


# --------------------------------------------------------------------------- replays: stale connections


@pytest.mark.parametrize("after", [0.0, 0.1, 0.25])
def test_a_stale_connection(after: float) -> None:
    """A reused connection that broke at once is replayed to the same backend on a fresh one."""
    shell = Shell().go(reused=True)
    shell.now += after
    assert shell.lost() == (Open(SPEC, fresh=True),)
    assert shell.tracker.log == ["+speculative"]
    assert list(shell.exchange.retries) == [Retry.STALE]
    shell.now += 1
    shell.sent()
    assert shell.exchange.sent_at == shell.now
    shell.answer(JSON, BODY)
    assert shell.read().body == BODY
    assert shell.samples == [(SPEC, SUCCESS)]
    assert len(shell.decisions) == 1
    shell.over(Outcome.OK)


@pytest.mark.parametrize(
    ("reused", "after", "answered", "invalid", "code"),
    [
        (True, 0.251, False, False, "backend_lost"),
        (True, 60.0, False, False, "backend_lost"),
        (False, 0.0, False, False, "backend_lost"),
        (True, 0.0, True, False, "backend_lost"),
        (True, 0.0, True, True, "backend_protocol"),
        (False, 0.0, True, True, "backend_protocol"),
    ],
)
def test_an_unanswered_request_is_never_sent_again(
    reused: bool, after: float, answered: bool, invalid: bool, code: str
) -> None:
    """Too late, on a fresh connection, or after one byte: 502, and nobody else is asked."""
    shell = Shell().go(reused=reused)
    shell.now += after
    shell.lost(answered=answered, invalid=invalid)
    assert shell.own_error() == code
    assert shell.read().status == 502
    assert shell.opens == [Open(SPEC)]
    assert shell.samples == [(SPEC, FAILURE)]
    assert list(shell.exchange.retries) == []
    shell.over(Outcome.BACKEND_LOST)


@pytest.mark.parametrize("reused", [False, True])
def test_a_stale_connection_is_replayed_once(reused: bool) -> None:
    """If the fresh connection breaks too it is a 502, whatever it claims to be."""
    shell = Shell().go(reused=True)
    shell.lost()
    shell.sent(reused=reused)
    shell.lost()
    assert shell.own_error() == "backend_lost"
    assert shell.opens == [Open(SPEC), Open(SPEC, fresh=True)]
    assert shell.samples == [(SPEC, FAILURE)]
    shell.over(Outcome.BACKEND_LOST)


def test_a_stale_replay_never_goes_to_the_other_backend() -> None:
    """If no fresh connection can be made, the request may have run: 502."""
    shell = Shell().go(reused=True)
    shell.lost()
    shell.unreachable()
    assert shell.own_error() == "backend_connect_failed"
    assert [opened.role for opened in shell.opens] == [SPEC, SPEC]
    assert shell.samples == [(SPEC, FAILURE)]
    shell.over(Outcome.BACKEND_LOST)


def test_a_replay_window_of_ones_own() -> None:
    """The window is a setting."""
    shell = Shell(rules=Rules(replay_window=0.0)).go(reused=True)
    shell.now += 0.01
    shell.lost()
    assert shell.own_error() == "backend_lost"


# --------------------------------------------------------------------------- replays: refusals


def refused(
    refusal: tuple[ResponseHead, list[bytes]], shell: Shell | None = None, *, reused: bool = False
) -> Shell:
    """To CONNECTING on the second backend."""
    shell = shell or Shell()
    shell.go(reused=reused).answer(refusal[0], *refusal[1])
    assert shell.exchange.state is State.CONNECTING
    assert shell.wire == b""
    return shell


def test_a_refusal_goes_to_the_other_backend(refusal: tuple[ResponseHead, list[bytes]]) -> None:
    """A whole refusal is kept back and the other backend is asked; its answer is the answer."""
    shell = refused(refusal)
    assert shell.samples == [(SPEC, PRESSURE)]
    assert shell.backend == [Do.KEEP_BACKEND]
    assert shell.tracker.log == ["+speculative", "+baseline", "-speculative"]
    assert shell.tracker.counts == (0, 1)
    assert list(shell.exchange.retries) == [Retry.REFUSED]
    assert shell.shared.budget.saved == 9.0
    assert shell.decisions[1].reason is Reason.REPLAY_REFUSED
    shell.sent()
    shell.answer(STREAM, EVENT, DONE)
    read = shell.read()
    assert (read.status, read.body) == (200, EVENT + DONE)
    assert read.headers["x-crossover-backend"] == "baseline"
    assert read.headers["x-crossover-reason"] == "replay_refused"
    assert shell.samples == [(SPEC, PRESSURE), (BASE, SUCCESS)]
    shell.over(Outcome.OK)


def test_nothing_of_a_refused_stream_is_left() -> None:
    """After a refused stream a plain answer is plain: no scanner, its own usage, its own head."""
    shell = refused(REFUSALS["stream-503"])
    shell.sent()
    shell.answer(JSON, BODY)
    assert shell.exchange.scanner is None
    assert shell.exchange.usage == (3, 5)
    assert "x-accel-buffering" not in shell.read().headers
    assert shell.samples == [(SPEC, PRESSURE), (BASE, SUCCESS)]
    shell.over(Outcome.OK)


def second_refuses(shell: Shell) -> None:
    shell.sent()
    shell.begin(make_head(503, 6, "text/plain"))


def second_refuses_in_stream(shell: Shell) -> None:
    shell.sent()
    shell.begin(STREAM)
    shell.body(b'data: {"error":{"code":429,"message":"second"}}\n\n')


def second_unreachable(shell: Shell) -> None:
    shell.unreachable(timed_out=True)


def second_lost(shell: Shell) -> None:
    shell.sent()
    shell.lost()


def second_lost_stale(shell: Shell) -> None:
    shell.sent(reused=True)
    shell.lost()
    assert shell.opens[-1] == Open(BASE, fresh=True)
    shell.unreachable()


def second_lost_held(shell: Shell) -> None:
    shell.sent()
    shell.begin(JSON)
    shell.body(BODY[:5])
    shell.lost(answered=True)


def second_lost_peeking(shell: Shell) -> None:
    shell.sent()
    shell.begin(STREAM)
    shell.body(EVENT[:5])
    shell.lost(answered=True)


def second_invalid(shell: Shell) -> None:
    shell.sent()
    shell.lost(answered=True, invalid=True)


def second_silent(shell: Shell) -> None:
    shell.sent()
    shell.tick(901.0)


def second_stuck(shell: Shell) -> None:
    shell.sent()
    shell.begin(JSON)
    shell.tick(301.0)


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        (second_refuses, PRESSURE), (second_refuses_in_stream, PRESSURE),
        (second_unreachable, FAILURE), (second_lost, FAILURE), (second_lost_stale, FAILURE),
        (second_lost_held, FAILURE), (second_lost_peeking, FAILURE), (second_invalid, FAILURE),
        (second_silent, FAILURE), (second_stuck, FAILURE),
    ],
)  # fmt: skip
def test_the_other_backend_does_no_better(
    refusal: tuple[ResponseHead, list[bytes]], second: Callable[[Shell], None], verdict: Verdict
) -> None:
    """The client gets the first refusal's status, headers and bytes, with the first's own reason."""
    shell = refused(refusal)
    second(shell)
    is_refusal_of(shell, refusal, SPEC)
    assert shell.read().headers["x-crossover-reason"] == "fixed"
    assert shell.samples == [(SPEC, PRESSURE), (BASE, verdict)]
    assert shell.backend == [Do.KEEP_BACKEND, Do.DROP_BACKEND]
    assert shell.ends == [Finish(close=False)]
    assert shell.exchange.error is None
    decision = shell.exchange.decision
    assert decision is not None
    assert decision.backend is SPEC
    assert not any(opened.role is SPEC for opened in shell.opens[1:])
    shell.over(Outcome.REFUSED)


@pytest.mark.parametrize(
    ("pinned", "usable", "share", "retries"),
    [
        (SPEC, (SPEC, BASE), 0.2, []),
        (None, (SPEC,), 0.2, []),
        (None, (SPEC, BASE), 0.0, [Retry.BUDGET_EXHAUSTED]),
    ],
)
def test_a_refusal_that_may_not_move(
    refusal: tuple[ResponseHead, list[bytes]],
    pinned: Role | None,
    usable: tuple[Role, ...],
    share: float,
    retries: list[Retry],
) -> None:
    """Pinned, alone or out of budget: the refusal passes unchanged."""
    shell = Shell(pinned=pinned, usable=usable, share=share).go()
    shell.answer(refusal[0], *refusal[1])
    is_refusal_of(shell, refusal, SPEC)
    assert shell.opens == [Open(SPEC)]
    assert shell.samples == [(SPEC, PRESSURE)]
    assert list(shell.exchange.retries) == retries
    shell.over(Outcome.REFUSED)


def test_the_budget_bounds_replays_under_overload() -> None:
    """When every request is refused, 20 % of them and the reserve of ten are sent again."""
    shared, _ = make_shared()
    sent = 0
    for _ in range(200):
        shell = Shell(shared).go()
        shell.answer(*REFUSALS["plain-503"][:1], *REFUSALS["plain-503"][1])
        if shell.exchange.state is not State.DONE:
            second_refuses(shell)
        sent += len(shell.opens)
        is_refusal_of(shell, REFUSALS["plain-503"], SPEC)
    assert 200 + 48 <= sent <= 200 + 50


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("how", ["lost", "invalid", "stuck"])
def test_a_refusal_cut_short(how: str, moves: bool) -> None:
    """A refusal that does not come whole is a 502 or 504, one sample, and is not replayed."""
    shell = Shell(pinned=None if moves else SPEC).go()
    shell.begin(make_head(503, 10, "text/plain"))
    shell.body(b"no")
    if how == "stuck":
        shell.tick(301.0)
    else:
        shell.lost(answered=True, invalid=how == "invalid")
    code = {"lost": "backend_lost", "invalid": "backend_protocol", "stuck": "idle_timeout"}
    assert shell.own_error() == code[how]
    assert shell.opens == [Open(SPEC)]
    assert shell.samples == [(SPEC, PRESSURE)]
    shell.over(Outcome.TIMEOUT if how == "stuck" else Outcome.BACKEND_LOST)


def test_a_refused_stream_broken_after_its_event() -> None:
    """A refusal that went out and is then cut is one sample, not two."""
    shell = Shell(pinned=SPEC).go()
    shell.begin(STREAM)
    shell.body(b'data: {"error":{"code":503}}\n\n')
    shell.lost(answered=True)
    assert shell.samples == [(SPEC, PRESSURE)]
    assert shell.ends == [Do.BREAK_CLIENT]
    shell.over(Outcome.BACKEND_LOST)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_too_large_to_keep(streamed: bool) -> None:
    """A refusal beyond what may be held is relayed as it comes, and not replayed."""
    shell = Shell(rules=Rules(hold_bytes=100)).go()
    first = b'data: {"error":{"code":503}}\n\n'
    shell.begin(STREAM if streamed else make_head(503, "chunked", "text/plain"))
    shell.body(first)
    assert shell.wire == b""
    shell.body(b"x" * 100)
    assert shell.exchange.state is State.RELAYING
    shell.body(b"y")
    shell.end()
    assert shell.read().body == first + b"x" * 100 + b"y"
    assert shell.opens == [Open(SPEC)]
    assert shell.samples == [(SPEC, PRESSURE)]
    shell.over(Outcome.REFUSED)


def test_a_refusal_after_a_stale_replay_may_move() -> None:
    """Rules (b) and (c) are about different things: each may happen once."""
    shell = Shell().go(reused=True)
    shell.lost()
    shell.sent()
    shell.answer(*REFUSALS["empty-503"][:1])
    assert shell.opens == [Open(SPEC), Open(SPEC, fresh=True), Open(BASE)]
    shell.sent(reused=True)
    shell.lost()
    is_refusal_of(shell, REFUSALS["empty-503"], SPEC)
    assert len(shell.opens) == 3
    assert shell.samples == [(SPEC, PRESSURE), (BASE, FAILURE)]
    shell.over(Outcome.REFUSED)


# --------------------------------------------------------------------------- the peek


def test_a_stream_waits_for_its_first_event() -> None:
    """Nothing goes out with the head alone; the first event releases both at once."""
    shell = Shell().go()
    assert shell.begin(STREAM) == ()
    for at in range(len(EVENT) - 1):
        assert shell.body(EVENT[at : at + 1]) == ()
    assert len(shell.body(EVENT[-1:])) == 1
    assert shell.exchange.state is State.RELAYING
    assert read_answer(shell.wire, closed=False).body == EVENT


@pytest.mark.parametrize(
    "first",
    [
        EVENT,
        EVENT.replace(b"\n", b"\r\n"),
        EVENT.replace(b"\n", b"\r"),
        b'data: {"error":{"code":500}}\n\n',
        b'data: {"error":{"code":400}}\n\n',
        b'data: {"error":null}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\"error\\": 503"}}]}\n\n',
        b": ping\n\n" + EVENT,
        b"event: message_start\ndata: {}\n\n",
        DONE,
    ],
)
def test_a_first_event_that_is_no_refusal(first: bytes) -> None:
    """Anything but an error of code 429 or 503 is relayed at once, byte for byte."""
    shell = Shell().go()
    shell.begin(STREAM)
    assert len(shell.body(first)) == 1
    shell.body(b'data: {"error":{"code":503}}\n\n')
    shell.end()
    assert shell.read().body == first + b'data: {"error":{"code":503}}\n\n'
    assert shell.opens == [Open(SPEC)]
    shell.over(Outcome.BACKEND_ERROR)


def test_comments_do_not_end_the_peek() -> None:
    """A comment is no event: the peek goes on behind it, within its limits."""
    shell = Shell(rules=Rules(peek_bytes=30)).go()
    shell.begin(STREAM)
    assert shell.body(b": ping\n\n") == ()
    assert shell.body(b": ping\n\n: ping\n\n") == ()
    assert len(shell.body(b": ping\n\n")) == 1
    assert read_answer(shell.wire, closed=False).body == b": ping\n\n" * 4


@pytest.mark.parametrize("size", [8192, 8193])
def test_the_peek_is_bounded_in_bytes(size: int) -> None:
    """A first event is waited for up to 8 KB and no further."""
    shell = Shell().go()
    shell.begin(STREAM)
    shell.body(b"data: " + b"x" * (size - 6))
    assert (shell.exchange.state is State.RELAYING) is (size > 8192)


@pytest.mark.parametrize("held", [b"", EVENT[:5]])
def test_the_peek_is_bounded_in_time(held: bytes) -> None:
    """When its time is over the head goes out, with what came; a later refusal passes."""
    shell = Shell().go()
    shell.begin(STREAM)
    shell.body(held)
    assert len(shell.peek_expired()) == 1
    assert read_answer(shell.wire, closed=False).body == held
    assert shell.peek_expired() == ()
    shell.body(b'data: {"error":{"code":503}}\n\n'[len(held) :])
    shell.end()
    assert shell.opens == [Open(SPEC)]
    shell.over(Outcome.BACKEND_ERROR)


def test_an_expired_peek_means_nothing_elsewhere() -> None:
    """The timer of a peek that is over, or of a refusal being held, changes nothing."""
    shell = Shell().go()
    assert shell.peek_expired() == ()
    shell.begin(STREAM)
    shell.body(b'data: {"error":{"code":503}}\n\n')
    assert shell.peek_expired() == ()
    assert shell.wire == b""


def test_a_stream_that_ends_within_the_peek() -> None:
    """A stream without a whole event is still a whole answer."""
    for pieces in ([], [b": x\n\n"], [b"data: x"]):
        shell = Shell().go()
        shell.answer(STREAM, *pieces)
        read = shell.read()
        assert (read.body, read.complete) == (b"".join(pieces), True)
        shell.over(Outcome.OK)


def test_an_event_stream_of_another_status_is_not_peeked() -> None:
    """A 400 is told by its status; its stream is relayed, and its events are read."""
    shell = Shell().go()
    shell.begin(make_head(400))
    assert shell.exchange.state is State.RELAYING
    shell.body(b'data: {"error":{"code":400}}\n\n')
    shell.end()
    assert shell.samples == [(SPEC, Verdict.NEUTRAL)]
    short = Shell().go()
    short.answer(make_head(400, 5), b"data:")
    assert short.read().body == b"data:"


# --------------------------------------------------------------------------- streams


def test_a_stream_is_followed() -> None:
    """Usage, chunks and gaps are noted; the bytes are relayed as they came."""
    shell = Shell().go()
    head, body = capture("chat_usage.http")
    events = [event + b"\n\n" for event in body.split(b"\n\n")[:-1]]
    shell.begin(head)
    for event in events:
        shell.now += 0.01
        shell.body(event)
    shell.end()
    exchange = shell.exchange
    assert shell.read().body == body
    assert exchange.usage == (30, 24)
    assert exchange.chunks == len(events)
    assert exchange.first_byte_at == 100.0
    assert exchange.answer.bytes_out == len(body)
    assert shell.shared.gaps[SPEC].count == len(events) - 1
    assert shell.shared.gaps[SPEC].sum == pytest.approx(0.01 * (len(events) - 1))
    assert shell.shared.gaps[BASE].count == 0
    shell.over(Outcome.OK)


@pytest.mark.parametrize("http10", [False, True])
def test_framed_chunks_are_passed_on_as_they_came(http10: bool) -> None:
    """Whole chunks go to a 1.1 client without being framed again; to 1.0 goes the payload."""
    shell = Shell(http10=http10).go()
    shell.begin(STREAM)
    shell.body(EVENT)
    framed = b"0%x\r\n%b\r\n" % (len(EVENT), EVENT)
    out = shell.exchange.relay(EVENT, framed, 3, shell.now)
    assert out == (EVENT if http10 else framed)
    shell.wire += out
    shell.end()
    assert shell.read().body == EVENT * 2
    assert shell.exchange.answer.bytes_out == 2 * len(EVENT)
    assert shell.exchange.chunks == 4


def test_an_event_stream_towards_nginx() -> None:
    """A stream tells nginx not to buffer it."""
    shell = Shell().go()
    shell.answer(STREAM, EVENT)
    assert shell.read().headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize(
    ("code", "verdict"), [(500, FAILURE), (503, PRESSURE), (429, PRESSURE), (400, Verdict.NEUTRAL)]
)
def test_an_error_in_the_middle_of_a_stream(code: int, verdict: Verdict) -> None:
    """A later error event is relayed, counts as a backend's error, and is never replayed."""
    shell = Shell().go()
    event = b'data: {"error":{"code":%d}}\n\n' % code
    shell.answer(STREAM, EVENT, event, DONE)
    assert shell.read().body == EVENT + event + DONE
    assert shell.samples == [(SPEC, verdict)]
    assert shell.opens == [Open(SPEC)]
    shell.over(Outcome.BACKEND_ERROR)


@pytest.mark.parametrize("http10", [False, True])
@pytest.mark.parametrize("tail", [b"", EVENT, EVENT[:-1], b"data: x", b"data: x\n", b": ping\n\n"])
def test_a_stream_lost_in_the_middle(http10: bool, tail: bytes) -> None:
    """An error event only where one fits, then a break: no end of chunks, no made-up [DONE]."""
    shell = Shell(http10=http10).go()
    shell.begin(STREAM)
    shell.body(EVENT)
    if tail:
        shell.body(tail)
    before = shell.wire
    shell.lost(answered=True)
    fits = tail.endswith(b"\n\n") or not tail
    event = errors.BACKEND_LOST.event if fits else b""
    read = shell.read()
    assert read.body == EVENT + tail + event
    assert read.complete is http10  # a client of HTTP/1.0 is told by the reset
    assert b"[DONE]" not in shell.wire
    assert not shell.wire.endswith(b"0\r\n\r\n")
    assert shell.wire.startswith(before)
    assert shell.ends == [Do.BREAK_CLIENT]
    assert shell.backend == [Do.DROP_BACKEND]
    assert shell.samples == [(SPEC, FAILURE)]
    assert shell.exchange.error == "backend_lost"
    shell.over(Outcome.BACKEND_LOST)


def test_no_error_event_in_an_announced_length() -> None:
    """In a stream of known length an added event could make it look whole: it is only broken."""
    shell = Shell().go()
    shell.begin(make_head(200, len(EVENT) + len(errors.BACKEND_LOST.event)))
    shell.body(EVENT)
    shell.lost(answered=True)
    read = shell.read()
    assert (read.body, read.complete) == (EVENT, False)
    assert shell.ends == [Do.BREAK_CLIENT]


def test_no_error_event_in_a_compressed_stream() -> None:
    """A compressed stream is not looked into, not waited for, and only broken."""
    shell = Shell().go()
    head = parse_head(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
        b"Transfer-Encoding: chunked"
    )
    assert len(shell.begin(head)) == 1
    shell.body(b"\x1f\x8b\n\n")
    shell.lost(answered=True)
    read = shell.read()
    assert (read.body, read.complete) == (b"\x1f\x8b\n\n", False)
    assert read.headers["content-encoding"] == "gzip"
    shell.over(Outcome.BACKEND_LOST)


def test_no_error_event_to_a_client_that_does_not_read() -> None:
    """Nothing is added to what a slow client has not taken."""
    shell = Shell().go()
    shell.begin(STREAM)
    shell.body(EVENT)
    shell.client_paused()
    before = shell.wire
    shell.lost(answered=True)
    assert shell.wire == before
    assert shell.ends == [Do.BREAK_CLIENT]


def test_a_plain_chunked_answer_lost_in_the_middle() -> None:
    """What is no stream of events gets no event, only the break."""
    shell = Shell().go()
    shell.begin(make_head(200, "chunked", "application/x-ndjson"))
    shell.body(b'{"a"')
    shell.lost(answered=True)
    read = shell.read()
    assert (read.body, read.complete) == (b'{"a"', False)
    assert shell.ends == [Do.BREAK_CLIENT]
    shell.over(Outcome.BACKEND_LOST)


# --------------------------------------------------------------------------- what is held


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_json_of_unknown_length_is_held(framing: str) -> None:
    """One JSON object is held whatever its framing, unless it was asked for in pieces."""
    shell = Shell().go()
    shell.begin(make_head(200, framing, "application/json; charset=utf-8"))
    shell.body(b'{"a"')
    assert shell.wire == b""
    shell.lost(answered=True)
    assert shell.read().status == 502
    shell = Shell(stream=True).go()
    shell.begin(make_head(200, framing, "application/json"))
    assert shell.exchange.state is State.RELAYING


@pytest.mark.parametrize("invalid", [False, True])
def test_a_small_answer_cut_short_is_a_502(invalid: bool) -> None:
    """An answer of known, small length is held, so that nothing of a cut one goes out."""
    shell = Shell().go()
    shell.begin(JSON)
    shell.body(BODY[:-1])
    assert shell.wire == b""
    shell.lost(answered=True, invalid=invalid)
    assert shell.own_error() == ("backend_protocol" if invalid else "backend_lost")
    assert shell.samples == [(SPEC, FAILURE)]
    shell.over(Outcome.BACKEND_LOST)


def test_a_peeked_stream_cut_short_is_a_502() -> None:
    """Before its first event a lost stream is still an error with a status."""
    shell = Shell().go()
    shell.begin(STREAM)
    shell.body(EVENT[:9])
    shell.lost(answered=True)
    assert shell.own_error() == "backend_lost"
    shell.over(Outcome.BACKEND_LOST)


def test_a_large_answer_cut_short_is_broken() -> None:
    """A long answer is relayed as it comes, and a cut one lacks bytes that it announced."""
    shell = Shell().go()
    assert len(shell.begin(LARGE)) == 1
    shell.body(b"x" * 1000)
    shell.lost(answered=True)
    read = shell.read()
    assert (len(read.body), read.complete) == (1000, False)
    assert shell.ends == [Do.BREAK_CLIENT]
    shell.over(Outcome.BACKEND_LOST)


@pytest.mark.parametrize(("length", "state"), [(262_144, State.HOLDING), (262_145, State.RELAYING)])
def test_how_much_is_held(length: int, state: State) -> None:
    """Up to 256 KB are held whole."""
    shell = Shell().go()
    shell.begin(make_head(200, length, "application/json"))
    assert shell.exchange.state is state
    shell.body(b"x" * length)
    shell.end()
    assert len(shell.read().body) == length
    shell.over(Outcome.OK)


# --------------------------------------------------------------------------- states by name


def at_deciding(shell: Shell) -> None:
    pass


def at_connecting(shell: Shell) -> None:
    shell.start()


def at_waiting(shell: Shell) -> None:
    shell.go(reused=True)


def at_stale_replay(shell: Shell) -> None:
    shell.go(reused=True).lost()


def at_moved(shell: Shell) -> None:
    shell.start()
    shell.unreachable()


def at_holding(shell: Shell) -> None:
    shell.go().begin(JSON)
    shell.body(BODY[:3])


def at_holding_refusal(shell: Shell) -> None:
    shell.go().begin(make_head(503, 10, "text/plain"))
    shell.body(b"no")


def at_peeking(shell: Shell) -> None:
    shell.go().begin(STREAM)
    shell.body(EVENT[:3])


def at_holding_refused_stream(shell: Shell) -> None:
    shell.go().begin(STREAM)
    shell.body(b'data: {"error":{"code":503}}\n\n')


def at_second_connecting(shell: Shell) -> None:
    refused(REFUSALS["plain-503"], shell)


def at_second_waiting(shell: Shell) -> None:
    refused(REFUSALS["stream-503"], shell).sent()


def at_second_peeking(shell: Shell) -> None:
    refused(REFUSALS["stream-503"], shell).sent()
    shell.begin(STREAM)


def at_relaying_stream(shell: Shell) -> None:
    shell.go().begin(STREAM)
    shell.body(EVENT)


def at_relaying_large(shell: Shell) -> None:
    shell.go().begin(LARGE)
    shell.body(b"x")


def at_paused(shell: Shell) -> None:
    at_relaying_stream(shell)
    shell.client_paused()


BEFORE = {
    "deciding": at_deciding, "connecting": at_connecting, "waiting": at_waiting,
    "stale replay": at_stale_replay, "moved": at_moved, "holding": at_holding,
    "holding a refusal": at_holding_refusal, "peeking": at_peeking,
    "holding a refused stream": at_holding_refused_stream,
    "second connecting": at_second_connecting, "second waiting": at_second_waiting,
    "second peeking": at_second_peeking,
}  # fmt: skip
DURING = {
    "relaying a stream": at_relaying_stream,
    "relaying a large answer": at_relaying_large,
    "paused": at_paused,
}
EVERYWHERE = BEFORE | DURING


# --------------------------------------------------------------------------- the client leaves


@pytest.mark.parametrize("where", EVERYWHERE)
def test_the_client_leaves(where: str) -> None:
    """In every state: nothing more is written or started, the backend is dropped, all released."""
    shell = Shell()
    EVERYWHERE[where](shell)
    wire, opens, samples = shell.wire, list(shell.opens), list(shell.samples)
    assert shell.client_gone() == (Do.DROP_BACKEND,)
    shell.over(Outcome.CLIENT_GONE)
    for late in LATE.values():
        assert late(shell) == ()
    assert (shell.wire, shell.opens, shell.samples, shell.ends) == (wire, opens, samples, [])
    shell.over(Outcome.CLIENT_GONE)


def test_a_client_that_left_the_queue_is_never_started() -> None:
    """A request whose client left while it waited in our queue is decided no more."""
    shell = Shell()
    shell.client_gone()
    assert shell.start() == ()
    assert shell.tracker.log == []
    assert shell.shared.budget.saved == 10.0
    shell.over(Outcome.CLIENT_GONE)


# --------------------------------------------------------------------------- after the end

LATE: dict[str, Callable[[Shell], Actions]] = {
    "start": lambda shell: shell.start(),
    "reject": lambda shell: shell.reject(),
    "sent": lambda shell: shell.send_late(),
    "unreachable": lambda shell: shell.unreachable(),
    "begin": lambda shell: shell.begin(JSON),
    "begin a refusal": lambda shell: shell.begin(make_head(503)),
    "body": lambda shell: shell.body(BODY),
    "end": lambda shell: shell.end(),
    "lost": lambda shell: shell.lost(),
    "lost, invalid": lambda shell: shell.lost(answered=True, invalid=True),
    "paused": lambda shell: shell.client_paused(),
    "resumed": lambda shell: shell.client_resumed(),
    "peek": lambda shell: shell.peek_expired(),
    "tick": lambda shell: shell.run(shell.exchange.tick(shell.now + 10_000.0)),
    "abort": lambda shell: shell.abort(),
    "gone": lambda shell: shell.client_gone(),
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("paused", [False, True])
def test_nothing_happens_after_the_end(late: str, paused: bool) -> None:
    """Whatever comes after the end changes nothing, also when the client was slow then."""
    shell = Shell().go()
    shell.begin(STREAM)
    shell.body(EVENT)
    if paused:
        shell.client_paused()
    shell.end()
    shell.over(Outcome.OK)
    assert LATE[late](shell) == ()
    assert not shell.exchange.flowing(shell.now)
    shell.over(Outcome.OK)


@pytest.mark.parametrize("state", ["deciding", "connecting", "waiting"])
def test_events_of_another_state_mean_nothing(state: str) -> None:
    """An event that cannot be in a state does not move it."""
    shell = Shell()
    EVERYWHERE[state](shell)
    before = shell.exchange.state
    absent = {
        "deciding": ["sent", "unreachable", "begin", "body", "end", "lost", "peek", "resumed"],
        "connecting": ["reject", "begin", "body", "end", "lost", "peek", "resumed", "start"],
        "waiting": ["reject", "sent", "unreachable", "body", "end", "peek", "resumed", "start"],
    }
    for name in absent[state]:
        assert LATE[name](shell) == ()
    assert shell.exchange.state is before


# --------------------------------------------------------------------------- the drain limit


@pytest.mark.parametrize("where", EVERYWHERE)
def test_the_drain_limit(where: str) -> None:
    """In every state: a 503 if nothing went out, an explicit break if something did."""
    shell = Shell()
    EVERYWHERE[where](shell)
    opens, samples = list(shell.opens), list(shell.samples)
    shell.shared.draining = True
    shell.abort()
    if where in BEFORE:
        assert shell.own_error() == "drain_limit"
        assert shell.read().headers["connection"] == "close"
        assert shell.ends == [Finish(close=True)]
    else:
        read = shell.read()
        assert not read.complete
        assert read.body.endswith(errors.DRAIN_LIMIT.event) is (where == "relaying a stream")
        assert shell.ends == [Do.BREAK_CLIENT]
    assert shell.backend[-1] is Do.DROP_BACKEND
    assert (shell.opens, shell.samples) == (opens, samples)
    assert shell.exchange.error == "drain_limit"
    shell.over(Outcome.BROKEN)


# --------------------------------------------------------------------------- time


@pytest.mark.parametrize(
    ("where", "limit", "code"),
    [
        ("waiting", 900.0, "first_byte_timeout"),
        ("holding", 300.0, "idle_timeout"),
        ("peeking", 300.0, "idle_timeout"),
    ],
)
def test_a_silent_backend_before_a_byte_went_out(where: str, limit: float, code: str) -> None:
    """Nothing happens up to the limit; beyond it a 504, and the backend is dropped."""
    shell = Shell()
    EVERYWHERE[where](shell)
    assert shell.tick(limit) == ()
    shell.tick(0.001)
    assert shell.own_error() == code
    assert shell.read().status == 504
    assert shell.samples == [(SPEC, FAILURE)]
    assert shell.backend == [Do.DROP_BACKEND]
    assert shell.opens == [Open(SPEC)]
    shell.over(Outcome.TIMEOUT)


def test_a_stream_that_falls_silent() -> None:
    """Each chunk gives new time; without one the stream is broken with an error event."""
    shell = Shell().go()
    shell.begin(STREAM)
    shell.body(EVENT)
    for _ in range(3):
        assert shell.tick(299.0) == ()
        shell.body(EVENT)
    shell.tick(300.5)
    read = shell.read()
    assert read.body == EVENT * 4 + errors.IDLE_TIMEOUT.event
    assert not read.complete
    assert shell.samples == [(SPEC, FAILURE)]
    shell.over(Outcome.TIMEOUT)


@pytest.mark.parametrize("where", ["deciding", "connecting", "stale replay", "second connecting"])
def test_there_is_no_limit_of_ours_on_connecting(where: str) -> None:
    """The queue and the connection have limits of their own, elsewhere."""
    shell = Shell()
    EVERYWHERE[where](shell)
    assert shell.tick(10_000.0) == ()


def test_a_client_that_does_not_read() -> None:
    """Beyond the write timeout a stuck client is cut; the backend is not to blame."""
    shell = Shell()
    at_paused(shell)
    wire = shell.wire
    assert shell.tick(60.0) == ()
    assert shell.tick(0.001) == (Do.DROP_BACKEND, Do.BREAK_CLIENT)
    assert shell.wire == wire
    assert shell.samples == []
    assert shell.exchange.error == "write_timeout"
    shell.over(Outcome.CLIENT_GONE)


def test_a_slow_clients_time_is_not_the_backends() -> None:
    """While the client is slow the backend is not called silent, nor right after."""
    shell = Shell(rules=Rules(write_timeout=1000.0))
    at_paused(shell)
    assert shell.tick(500.0) == ()
    shell.client_resumed()
    assert shell.tick(299.0) == ()
    shell.tick(2.0)
    shell.over(Outcome.TIMEOUT)


@pytest.mark.parametrize("write_timeout", [0.1, 0.69, 0.7, 60.0])
@pytest.mark.parametrize("idle_timeout", [0.1, 1.69, 1.7, 300.0])
@pytest.mark.parametrize("silent", [0.0, 0.999])
@pytest.mark.parametrize("paused", [True, False])
def test_a_stream_that_flows_reaches_no_limit_while_it_is_passed_by(
    write_timeout: float, idle_timeout: float, silent: float, paused: bool
) -> None:
    """Whatever the limits are, nothing is due in the time that `quiet` gives, paused or not."""
    rules = Rules(write_timeout=write_timeout, idle_timeout=idle_timeout)
    shell = Shell(rules=rules)
    at_relaying_stream(shell)
    shell.now += silent
    assert shell.exchange.flowing(shell.now)
    if paused:
        shell.client_paused()
        assert not shell.exchange.flowing(shell.now), "one that is paused is looked at each time"
    assert rules.quiet == (0.7 if write_timeout >= 0.7 and idle_timeout >= 1.7 else 0.0)
    if rules.quiet:
        assert shell.tick(rules.quiet - 0.001) == ()


def test_flowing() -> None:
    """A stream flows when bytes came within the last second."""
    shell = Shell()
    at_peeking(shell)
    assert not shell.exchange.flowing(shell.now)
    shell.body(EVENT[3:])
    assert shell.exchange.flowing(shell.now + 0.9)
    assert not shell.exchange.flowing(shell.now + 1.0)


# --------------------------------------------------------------------------- back-pressure


def test_pausing_is_idempotent() -> None:
    """Only the first of several pauses and the first of several resumptions is an action."""
    shell = Shell()
    at_relaying_stream(shell)
    assert shell.client_resumed() == ()
    assert shell.client_paused() == (Do.PAUSE_BACKEND,)
    assert shell.client_paused() == ()
    assert shell.client_resumed() == (Do.RESUME_BACKEND,)
    assert shell.client_resumed() == ()
    assert shell.client_paused() == (Do.PAUSE_BACKEND,)


def test_a_client_slow_from_before_pauses_what_begins() -> None:
    """If the client was slow before there was a connection, the stream is paused as it begins."""
    shell = Shell()
    shell.start()
    shell.client_paused()
    shell.sent()
    shell.begin(STREAM)
    actions = shell.body(EVENT)
    assert actions[1:] == (Do.PAUSE_BACKEND,)


def test_a_slow_client_gets_a_whole_answer() -> None:
    """An answer that ends while the client is slow ends properly."""
    shell = Shell()
    at_paused(shell)
    shell.end()
    assert shell.read().complete
    assert shell.ends == [Finish(close=False)]
    shell.over(Outcome.OK)


# --------------------------------------------------------------------------- faults of ours


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda exchange: exchange._move(Retry.CONNECT, Reason.REPLAY_CONNECT, 0.0), "no lease"),
        (lambda exchange: exchange._role, "no lease"),
        (lambda exchange: exchange._give_refusal(0.0), "no refusal"),
        (lambda exchange: exchange._replay_refusal(Do.KEEP_BACKEND, 0.0), "needs a head"),
        (lambda exchange: exchange._take_held(), "no head"),
    ],
)
def test_a_step_out_of_order_is_a_fault(step: Callable[[Exchange], object], message: str) -> None:
    """Inner steps refuse to run without what they need, instead of guessing."""
    with pytest.raises(RuntimeError, match=message):
        step(Shell().exchange)


@pytest.mark.parametrize("status", [200, 201, 400, 404, 429, 500, 503])
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.parametrize("reusable", [True, False])
@pytest.mark.parametrize("draining", [True, False])
@pytest.mark.parametrize("body", [BODY, b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'])
def test_an_answer_that_comes_at_once_is_the_same_as_one_that_comes_in_parts(
    status: int, kind: str, reusable: bool, draining: bool, body: bytes
) -> None:
    """The one event for head, body and end has the effects of the three, whatever the answer."""
    ends = []
    for at_once in (True, False):
        shell = Shell().go()
        shell.shared.draining = draining
        head = make_head(status, len(body), kind)
        if at_once:
            shell.run(shell.exchange.whole(head, body, shell.now, reusable=reusable))
        else:
            shell.begin(head)
            shell.body(body)
            shell.end(reusable=reusable)
        exchange = shell.exchange
        ends.append(
            (shell.wire, shell.ends, shell.samples, shell.backend, shell.opens, exchange.state,
             exchange.outcome, exchange.usage, exchange.answer.bytes_out, exchange.answer.close,
             exchange.first_byte_at, exchange.ended_at, exchange.chunks, shell.tracker.log)
        )  # fmt: skip
    assert ends[0] == ends[1]


@pytest.mark.parametrize("before", [b"", EVENT[:9], EVENT, EVENT * 2])
@pytest.mark.parametrize("last", [EVENT, EVENT[9:], DONE, QUEUE_FULL_STREAM[1], b"no event"])
@pytest.mark.parametrize("head", [STREAM, JSON_IN_CHUNKS, CHUNKED_REFUSAL])
@pytest.mark.parametrize(("http10", "paused"), [(False, False), (True, False), (False, True)])
def test_an_end_that_comes_with_the_last_bytes_is_the_same_as_one_that_comes_after_them(
    before: bytes, last: bytes, head: ResponseHead, http10: bool, paused: bool
) -> None:
    """The one event for the last chunks and the end has the effects of the two, in one write."""
    ends, writes = [], []
    for at_once in (True, False):
        shell = Shell(http10=http10).go()
        if paused:
            shell.client_paused()
        shell.begin(head)
        for payload in [before] if before else []:
            shell.body(payload)
        if at_once:
            rest = shell.run(shell.exchange.rest(last, 1, shell.now, reusable=True))
            writes = [action for action in rest if isinstance(action, Write)]
        else:
            shell.body(last)
            shell.end()
        exchange = shell.exchange
        ends.append(
            (shell.wire, shell.ends, shell.samples, shell.backend, shell.opens, exchange.state,
             exchange.outcome, exchange.usage, exchange.answer.bytes_out, exchange.answer.close,
             exchange.first_byte_at, exchange.ended_at, exchange.chunks, shell.tracker.log)
        )  # fmt: skip
    assert ends[0] == ends[1]
    assert len(writes) <= (2 if paused else 1)


def test_a_long_answer_that_comes_at_once_is_relayed() -> None:
    """More than may be held is relayed at once, as it is when it comes in parts."""
    shell = Shell(rules=Rules(hold_bytes=4)).go()
    shell.run(shell.exchange.whole(make_json(BODY), BODY, shell.now, reusable=True))
    assert shell.read().body == BODY
    assert shell.exchange.answer.bytes_out == len(BODY)
    shell.over(Outcome.OK)


def test_an_answer_that_comes_too_late_changes_nothing() -> None:
    """A whole answer to a request that is over is nobody's."""
    shell = Shell().go()
    shell.client_gone()
    assert shell.exchange.whole(make_json(BODY), BODY, shell.now, reusable=True) == ()


def test_nothing_is_relayed_before_the_head_is() -> None:
    """Relaying without a head is a fault of ours and says so."""
    with pytest.raises(RuntimeError, match="nothing is relayed"):
        Shell().go().exchange.relay(b"x", b"", 1, 1.0)
