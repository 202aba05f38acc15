"""The shell of one exchange: events from two transports in, actions carried out.

No rule is decided here. Actions are carried out in order and never entered twice: what an event
asks for while others are being carried out waits behind them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from router.actions import Action, Actions, Do, Finish, Open, Sample, Write
from router.breaker import Outcome as Verdict
from router.exchange import Exchange, State
from router.load import Role

if TYPE_CHECKING:
    from router.actions import Request
    from router.backend import BackendConnection, BackendPool
    from router.errors import ErrorAnswer
    from router.explain import DecisionEntry
    from router.framing import ResponseHead
    from router.frontend import RelayProtocol
    from router.relay import Relay

_log = logging.getLogger("crossover")


class Driver:
    """Carries out what one `Exchange` asks for."""

    __slots__ = ("_clock", "_connecting", "_connection", "_peek_timer", "_pending", "_relay",
                 "_reported", "_role", "_running", "_ticket", "client", "entries", "exchange", "queued")  # fmt: skip

    def __init__(self, request: Request, client: RelayProtocol, relay: Relay) -> None:
        self.exchange = Exchange(request, relay.shared)
        self.client = client
        self.entries: list[DecisionEntry] = []  # its decisions in the log, to be finished
        self.queued = False  # whether it waited in our own queue
        self._relay = relay
        self._clock = relay.clock
        self._connection: BackendConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._peek_timer: asyncio.TimerHandle | None = None
        self._pending: deque[Action] = deque()
        self._running = False
        self._reported = False
        self._role: Role = Role.BASELINE  # of the current attempt
        self._ticket = 0  # the breaker's, for the current attempt

    # ------------------------------------------------------------------ events

    def start(self) -> None:
        """A place is free: decide and go."""
        self._run(self.exchange.start(self._clock()))

    def reject(self, error: ErrorAnswer) -> None:
        """A limit of ours was reached."""
        self._run(self.exchange.reject(error, self._clock()))

    def backend_begin(self, head: ResponseHead) -> None:
        """The answer's head came."""
        if head.status < 400:
            self._alive()
        self._run(self.exchange.begin(head, self._clock()))

    def backend_payload(self, payload: bytes, framed: bytes, count: int) -> None:
        """Body bytes came. The one path that is taken per chunk."""
        exchange = self.exchange
        if exchange.state is State.RELAYING:
            self.client.write(exchange.relay(payload, framed, count, self._clock()))
        else:
            self._run(exchange.body(payload, self._clock()))

    def backend_read(self) -> None:
        """The read that brought the head is worked off; a stream may still lack its first event."""
        if self.exchange.state is State.PEEKING:
            delay = self._relay.shared.rules.peek_timeout
            loop = asyncio.get_running_loop()
            self._peek_timer = loop.call_later(delay, self._peek_expired)

    def backend_end(self, *, reusable: bool) -> None:
        """The answer is complete."""
        self._run(self.exchange.end(self._clock(), reusable=reusable))

    def backend_lost(self, *, answered: bool, invalid: bool = False) -> None:
        """The connection broke."""
        self._connection = None
        self._run(self.exchange.lost(self._clock(), answered=answered, invalid=invalid))

    def client_gone(self) -> None:
        """The client left."""
        self._run(self.exchange.client_gone(self._clock()))

    def client_paused(self) -> None:
        """The client's transport is full."""
        self._run(self.exchange.client_paused(self._clock()))

    def client_resumed(self) -> None:
        """The client's transport drained."""
        self._run(self.exchange.client_resumed(self._clock()))

    def tick(self, now: float) -> None:
        """Time passed."""
        if self.exchange.flowing(now):
            self._alive()
        actions = self.exchange.tick(now)
        if actions:
            self._run(actions)

    def abort(self) -> None:
        """The drain limit is reached."""
        self._run(self.exchange.abort(self._clock()))

    def _peek_expired(self) -> None:
        self._peek_timer = None
        self._run(self.exchange.peek_expired())

    # ------------------------------------------------------------------ actions

    def _run(self, actions: Actions) -> None:
        self._pending.extend(actions)
        if self._running:
            return
        self._running = True
        try:
            while self._pending:
                self._carry_out(self._pending.popleft())
        finally:
            self._running = False
        if self.exchange.state is State.DONE and not self._reported:
            self._reported = True
            if self._peek_timer is not None:
                self._peek_timer.cancel()
            if self._connecting is not None:
                self._connecting.cancel()
            if self._ticket:  # an end that says nothing gives the breaker's trial back
                self._sample(self._role, Verdict.NEUTRAL)
            self._relay.finished(self)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Write):
            self.client.write(action.data)
        elif isinstance(action, Open):
            self._open(action.role, fresh=action.fresh)
        elif isinstance(action, Sample):
            self._sample(action.role, action.verdict)
        elif isinstance(action, Finish):
            self.client.exchange_done(self, close=action.close)
        else:
            self._do(action)

    def _do(self, action: Do) -> None:
        connection = self._connection
        if action is Do.NOTE_DECISION:
            self._relay.decided(self)
        elif action is Do.BREAK_CLIENT:
            self.client.exchange_broken(self)
        elif connection is None:
            return
        elif action is Do.KEEP_BACKEND:
            self._connection = None
            connection.keep(self._clock())
        elif action is Do.DROP_BACKEND:
            self._connection = None
            connection.drop()
        elif action is Do.PAUSE_BACKEND:
            connection.pause()
        else:
            connection.resume()

    def _sample(self, role: Role, verdict: Verdict) -> None:
        ticket, self._ticket = self._ticket, 0
        self._relay.health.record(role, verdict, self._clock(), ticket)

    def _alive(self) -> None:
        self._relay.health.alive(self._role, self._clock())

    def _open(self, role: Role, *, fresh: bool) -> None:
        self._role = role
        pool = self._relay.pools[role]
        if not fresh:  # a stale connection's replay is the same attempt
            self._ticket = self._relay.health.admit(role, self._clock())
        idle = None if fresh else pool.take(self._clock())
        if idle is not None:
            self._send(pool, idle, reused=True)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(pool))

    async def _connect(self, pool: BackendPool) -> None:
        try:
            connection = await pool.connect()
        except Exception as error:  # noqa: BLE001 (whatever it is, the exchange must go on)
            self._connecting = None
            timed_out = isinstance(error, TimeoutError)
            if not isinstance(error, OSError):  # TimeoutError and ssl.SSLError are OSErrors
                _log.exception("connect to %s", pool.role)
            self._run(self.exchange.unreachable(self._clock(), timed_out=timed_out))
            return
        self._connecting = None
        if self.exchange.state is State.CONNECTING:
            self._send(pool, connection, reused=False)
        else:
            connection.keep(self._clock())

    def _send(self, pool: BackendPool, connection: BackendConnection, *, reused: bool) -> None:
        request = self.exchange.request
        head = pool.head_for(request.route) + request.headers
        if request.route.method == b"POST":
            head += b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
                request.id.encode(),
                len(request.body),
            )
        else:
            head += b"x-request-id: %b\r\n\r\n" % request.id.encode()
        self._connection = connection
        connection.send(self, head, request.body)
        self.exchange.sent(self._clock(), reused=reused)
