"""The shell of one exchange: events from two transports in, actions carried out.

It may not decide: what is to be done is in the actions, and it knows of an exchange's state only
which way an event goes. Actions are carried out in order and never entered twice: what an event asks
for while others are being carried out waits behind them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final

from router.actions import Action, Actions, Do, Finish, Open, Sample, Write
from router.breaker import Verdict
from router.exchange import Exchange
from router.exchange_core import State
from router.load import Role

if TYPE_CHECKING:
    from router.actions import Request
    from router.backend import BackendConnection
    from router.errors import ErrorAnswer
    from router.explain import DecisionEntry
    from router.flow import Flow
    from router.framing import ResponseHead
    from router.frontend import RelayProtocol
    from router.pool import BackendPool
    from router.relay import Relay
    from router.request import Body

_log = logging.getLogger("crossover")

# What a connect fails with that says nothing about the backend.
OUR_FAULT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

# An enum's members are slow to look up, and these are looked up several times per request.
RELAYING, PEEKING, DONE = State.RELAYING, State.PEEKING, State.DONE
NOTE_DECISION, KEEP_BACKEND = Do.NOTE_DECISION, Do.KEEP_BACKEND


class Driver:
    """Carries out what one `Exchange` asks for."""

    # Most exchanges never set these: what is not set costs nothing.
    _connection: BackendConnection | None = None
    _connecting: asyncio.Task[None] | None = None
    _peek_timer: asyncio.TimerHandle | None = None
    _running = False
    _reported = False
    _role = Role.BASELINE  # of the current attempt
    _ticket = 0  # the breaker's, for the current attempt
    now = 0.0  # of the event being worked off
    queued = False  # whether it waited in our own queue

    def __init__(self, request: Request, client: RelayProtocol, relay: Relay) -> None:
        self.exchange = Exchange(request, relay.shared)
        self.client = client
        self.entries: list[DecisionEntry] = []  # its decisions in the log, to be finished
        self._relay = relay
        self._clock = relay.clock
        self._pending: list[Action] = []  # to be carried out; a deque takes 600 bytes when empty

    # ------------------------------------------------------------------ events
    # `now` is read once per read of a socket, and kept for the actions that follow.

    def start(self, now: float) -> None:
        """A place is free: decide and go."""
        self.now = now
        self._run(self.exchange.start(now))

    def reject(self, error: ErrorAnswer) -> None:
        """A limit of ours was reached."""
        self.now = self._clock()
        self._run(self.exchange.reject(error, self.now))

    def backend_begin(self, head: ResponseHead, now: float) -> None:
        """The answer's head came."""
        self.now = now
        actions = self.exchange.begin(head, now)
        if head.event_stream and head.status < 400:
            self._relay.health.alive(self._role, now)
        if actions:
            self._run(actions)

    def backend_payload(self, payload: bytes, framed: bytes, count: int, now: float) -> Flow | None:
        """Body bytes came. Once they are relayed, plain reads may take the way of the flow."""
        exchange = self.exchange
        if exchange.state is RELAYING:
            data = exchange.relay(payload, framed, count, now)
            transport = self.client.transport
            if not transport.is_closing():
                transport.write(data)
            flow = exchange.flow
            if flow is not None:
                flow.sink = transport
            return flow
        self.now = now
        actions = exchange.body(payload, now)
        if actions:
            self._run(actions)
        return None

    def backend_whole(self, head: ResponseHead, body: bytes, now: float, *, reusable: bool) -> None:
        """The whole answer came at once."""
        self.now = now
        self._run(self.exchange.whole(head, body, now, reusable=reusable))

    def backend_rest(self, payload: bytes, count: int, now: float, *, reusable: bool) -> None:
        """The last body bytes came, and with them the end."""
        self.now = now
        self._run(self.exchange.rest(payload, count, now, reusable=reusable))

    def backend_read(self) -> None:
        """The read that brought the head is worked off; a stream may still lack its first event."""
        if self.exchange.state is PEEKING:
            delay = self._relay.shared.rules.peek_timeout
            loop = asyncio.get_running_loop()
            self._peek_timer = loop.call_later(delay, self._peek_expired)

    def backend_end(self, now: float, *, reusable: bool) -> None:
        """The answer is complete."""
        self.now = now
        self._run(self.exchange.end(now, reusable=reusable))

    def backend_lost(self, *, answered: bool, invalid: bool = False) -> None:
        """The connection broke."""
        self._connection = None
        self.now = now = self._clock()
        self._run(self.exchange.lost(now, answered=answered, invalid=invalid))

    def client_gone(self) -> None:
        """The client left."""
        self.now = self._clock()
        self._run(self.exchange.client_gone(self.now))

    def client_paused(self) -> None:
        """The client's transport is full."""
        self._run(self.exchange.client_paused(self._clock()))

    def client_resumed(self) -> None:
        """The client's transport drained."""
        self._run(self.exchange.client_resumed(self._clock()))

    def tick(self, now: float) -> float:
        """Time passed. No limit of this exchange can be reached before the moment that is given."""
        if self.exchange.flowing(now):
            self._relay.health.alive(self._role, now)
            return now + self._relay.quiet
        actions = self.exchange.tick(now)
        if actions:
            self.now = now
            self._run(actions)
        return now

    def abort(self) -> None:
        """The drain limit is reached."""
        self.now = self._clock()
        self._run(self.exchange.abort(self.now))

    def _peek_expired(self) -> None:
        self._peek_timer = None
        self._run(self.exchange.peek_expired())

    # ------------------------------------------------------------------ actions

    def _run(self, actions: Actions) -> None:
        """Carry out what an event asked for, and end with the exchange if that has ended."""
        if self._running:
            self._pending.extend(actions)
            return
        self._running = True
        try:
            for action in actions:
                self._HANDLERS[type(action)](self, action)
            while self._pending:
                action = self._pending.pop(0)
                self._HANDLERS[type(action)](self, action)
        except BaseException:
            self._pending.clear()  # a fault of ours: what was left must not run with the next event
            raise
        finally:
            self._running = False
        if self.exchange.flow is not None and self.exchange.request.body:
            self.exchange.request.body = b""  # nothing is sent again once the head went out
            self.client.release_bodies()
        if self.exchange.state is DONE and not self._reported:
            self._reported = True
            if self._peek_timer is not None:
                self._peek_timer.cancel()
            if self._connecting is not None:
                self._connecting.cancel()
            if self._ticket:  # an end that says nothing gives the breaker's trial back
                self._sample(Sample(self._role, Verdict.NEUTRAL))
            self._relay.finished(self)

    def _write(self, action: Write) -> None:
        transport = self.client.transport
        if action.data and not transport.is_closing():
            transport.write(action.data)

    def _sample(self, action: Sample) -> None:
        ticket, self._ticket = self._ticket, 0
        self._relay.health.record(action.role, action.verdict, self.now, ticket)

    def _finish(self, action: Finish) -> None:
        self.client.exchange_done(self, self.now, close=action.close)

    def _do(self, action: Do) -> None:
        """One of the actions without a value; those for the backend need a connection."""
        connection = self._connection
        if action is NOTE_DECISION:
            self._relay.decided(self, self.now)
        elif action is KEEP_BACKEND and connection is not None:
            self._connection = None
            connection.keep(self.now)
        elif action is Do.BREAK_CLIENT:
            self.client.exchange_broken(self)
        elif connection is None:
            return
        elif action is Do.DROP_BACKEND:
            self._connection = None
            connection.drop()
        elif action is Do.PAUSE_BACKEND:
            connection.pause()
        else:
            connection.resume()

    def _open(self, action: Open) -> None:
        """Send on an idle connection, or have one made and send on that."""
        role = self._role = action.role
        if self._peek_timer is not None:  # of a stream that was refused
            self._peek_timer.cancel()
            self._peek_timer = None
        pool = self._relay.pools[role]
        idle = None
        if not action.fresh:  # a stale connection's replay is the same attempt
            self._ticket = self._relay.health.admit(role, self.now)
            idle = pool.take(self.now)
        if idle is not None:
            self._send(pool, idle, reused=True)
        elif not self._relay.files.may_connect():
            self._run(self.exchange.no_means(self.now))
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(pool))

    async def _connect(self, pool: BackendPool) -> None:
        """Make a connection and send on it; a cancelled exchange cancels this."""
        try:
            connection = await pool.connect()
        except Exception as error:  # noqa: BLE001 (whatever it is, the exchange must go on)
            self._connecting = None
            self.now = self._clock()
            timed_out = isinstance(error, TimeoutError)
            if not isinstance(error, OSError):  # TimeoutError and ssl.SSLError are OSErrors
                _log.exception("connect to %s", pool.role)
            if isinstance(error, OSError) and error.errno in OUR_FAULT:
                self._run(self.exchange.no_means(self.now))
            else:
                self._run(self.exchange.unreachable(self.now, timed_out=timed_out))
            return
        self._connecting = None
        self.now = self._clock()
        if self.exchange.state is not State.CONNECTING:  # it ended in the meantime
            connection.keep(self.now)
        elif connection.closing:  # it broke before anything was sent
            self._run(self.exchange.unreachable(self.now, timed_out=False))
        else:
            self._send(pool, connection, reused=False)

    def _send(self, pool: BackendPool, connection: BackendConnection, *, reused: bool) -> None:
        request = self.exchange.request
        head = pool.head_for(request.route) + request.headers
        body: Body = b""
        if request.route.method == b"POST":  # a GET's body would be read as the next request
            body = request.body
            head += b"content-length: %d\r\n" % len(body)
        head += b"x-request-id: %b\r\n\r\n" % request.id.encode()
        self._connection = connection
        connection.send(self, head, body)
        self.exchange.sent(self._clock(), reused=reused)

    _HANDLERS: ClassVar[dict[type[Action], Callable[[Driver, Any], None]]] = {
        Write: _write,
        Open: _open,
        Sample: _sample,
        Finish: _finish,
        Do: _do,
    }
