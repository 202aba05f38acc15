"""`RelayProtocol`: uvicorn's HTTP protocol, with relayed routes served below ASGI.

uvicorn keeps what it does well: sockets, TLS, lifespan, and the ASGI path for everything that is
not relayed. Its request handling is taken over whole, because it knows nothing of a request that
has no ASGI task: one queue per connection for relayed and ordinary requests; a shutdown that lets
exchanges finish; limits and timers from the first byte of a connection on.
`tests/test_uvicorn_contract.py` pins what this class relies on in uvicorn's.

It may not begin a request or write an answer before the one ahead is complete, nor pause reading
meanwhile for more than a turn: a paused socket would not show that the client left (`receiving`
caps what is sent ahead). Who is let in the relay says, and what is relayed the exchange.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router import errors
from router.driver import Driver
from router.headers import error_answer
from router.ordinary import scope_for
from router.parsing import BODY, BUSY, CLOSING, HEAD, IDLE
from router.receiving import ReceivingProtocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from router.errors import ErrorAnswer
    from router.incoming import Incoming
    from router.relay import Relay
    from router.routes import Route

NO_LINGER: Final = struct.pack("ii", 1, 0)  # closing sends RST, not FIN
LINGER: Final = 2.0  # seconds to read on after an early refusal, so that the client sees it
ARRIVING: Final = 1.0  # seconds that a new connection has at a shutdown to begin its request

_log = logging.getLogger("crossover")


class RelayProtocol(ReceivingProtocol):
    """One client connection."""

    def __init__(
        self,
        relay: Relay,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(relay, config, server_state, app_state, _loop)
        self.driver: Driver | None = None
        self._paused_at: float | None = None  # since when the client has not been reading
        self._draining = False  # close after the answer under way
        self._advancing = False  # so that requests answered at once are a loop, not a recursion

    # ------------------------------------------------------------------ transport events

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the transport, or turn the client away."""
        super().connection_made(transport)
        if (
            len(self.connections) > self.relay.settings.max_connections
            or not self.relay.files.may_accept()
        ):
            self._write_error(errors.TOO_MANY_CONNECTIONS)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: whatever runs for it ends now."""
        super().connection_lost(exc)
        self._deaf = True
        self.queue.clear()
        self.incoming = None
        self.release_bodies()
        driver, self.driver = self.driver, None
        if driver is not None:
            driver.client_gone()

    def eof_received(self) -> None:
        """The client sends no more, which counts as leaving: what runs for it ends now.

        Left to itself the transport would first wait for the client to read what is buffered.
        """
        if self.driver is not None:
            self.transport.abort()

    def pause_writing(self) -> None:
        """The client reads slower than we write."""
        super().pause_writing()
        self._paused_at = self.clock()
        if self.driver is not None:
            self.driver.client_paused()

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._paused_at = None
        if self.driver is not None:
            self.driver.client_resumed()

    # ------------------------------------------------------------------ one request after another

    def _advance(self) -> None:
        """Begin what is in the queue, one after another, unless an answer is under way."""
        if self._advancing or self.transport.is_closing():  # it may have left while a body waited
            return
        self._advancing = True
        while self.queue and self.phase is not BUSY and self.phase is not CLOSING:
            self.now = self.clock()  # it may have waited since the last read
            self._begin(self.queue.pop(0))
        self._advancing = False

    def _begin(self, incoming: Incoming) -> None:
        """Answer this request now; a fault of ours on the way is answered too."""
        try:
            self._dispatch(incoming)
        except Exception as error:  # noqa: BLE001 (the connection must go on)
            self.fail(error)

    def _dispatch(self, incoming: Incoming) -> None:
        """To its refusal, to the application, or to the relay."""
        self._enter(BUSY, self.now)
        self._ahead = 0
        if incoming.error is not None:
            self._write_error(incoming.error, incoming)
        elif incoming.route is None:
            self._serve_ordinary(incoming)
        else:
            request = self.relay.request_from(incoming, self.now)
            if isinstance(request, errors.ErrorAnswer):
                self._write_error(request, incoming, close=not incoming.keep_alive)
                return
            self.driver = Driver(request, self, self.relay)
            if self.flow.write_paused:  # still full of the answer before
                self.driver.client_paused()
            self.relay.submit(self.driver, self.now)

    def fail(self, error: Exception) -> None:
        """A fault of ours: whatever was counted is released, and the client is told."""
        _log.error("request", exc_info=error)
        driver, self.driver = self.driver, None
        if driver is not None:
            driver.client_gone()
            if driver.exchange.answer.begun:
                return self.exchange_broken(driver)
        return self._write_error(errors.INTERNAL)

    def _serve_ordinary(self, incoming: Incoming) -> None:
        """The ASGI path, with the whole body at hand."""
        cycle = RequestResponseCycle(
            scope=scope_for(self, incoming),
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,  # uvicorn's would write the query, and keys are found in queries
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=incoming.keep_alive and not self._draining,
            on_response=self._ordinary_done,
        )
        cycle.body = bytearray(incoming.take_body())
        cycle.more_body = False
        cycle.message_event.set()
        self.cycle = cycle
        self._start_asgi_task(cycle, self.app)

    def _ordinary_done(self) -> None:
        self.server_state.total_requests += 1
        self._next(self.clock(), close=not self.cycle.keep_alive)

    def exchange_done(self, driver: Driver, now: float, *, close: bool) -> None:
        """A relayed answer is complete."""
        if self.driver is driver:
            self.driver = None
            self.server_state.total_requests += 1
            self._next(now, close=close)

    def exchange_broken(self, driver: Driver) -> None:
        """A relayed answer ends without its proper end, which must be visible as such."""
        self.driver = None
        self._deaf = True
        if driver.exchange.visibly_cut:
            self._close()
        else:
            self._reset()  # a proper end of the connection would pass for the answer's end

    def _next(self, now: float, *, close: bool) -> None:
        """An answer is complete: close, or go on with what came meanwhile."""
        if self._buffered:
            self.release_bodies()
        if close or self._draining or (self._deaf and not self.queue):
            self._close()
            return
        if self.incoming is not None:
            self._enter(BODY, now)
            self._say_continue()
        else:
            self._enter(IDLE if self._headers is None else HEAD, now)
        if self.queue:
            self._advance()

    # ------------------------------------------------------------------ refusing and closing

    def _write_error(
        self, error: ErrorAnswer, incoming: Incoming | None = None, *, close: bool = True
    ) -> None:
        """Answer with an error, now, and go on; `close` unless the request itself was sound."""
        request_id = self.relay.refused(error, incoming, self.since)
        extra = b"x-request-id: %b\r\n" % request_id.encode()
        if incoming is not None:
            extra += self.relay.cors_lines(incoming.facts.origin)
        if incoming is not None and incoming.allow:
            extra += b"allow: %b\r\n" % incoming.allow
        head_only = incoming is not None and incoming.method == b"HEAD"
        close = close or self._draining
        self.write(
            error_answer(error, extra, self.relay.shared.common, close=close, head_only=head_only)
        )
        whole = incoming is not None and incoming.complete
        if close and not whole and not self.transport.is_closing():
            # The client may still be sending: closing now would reset what it has yet to read.
            self._deaf = True
            self.release_bodies()  # the client may linger, its body does not
            self._enter(CLOSING, self.clock())
            if self.transport.can_write_eof():
                self.transport.write_eof()
        else:
            self._next(self.clock(), close=close)

    def _reset(self) -> None:
        """End the connection so that the client sees it as broken."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

    def _close(self) -> None:
        self._deaf = True
        self._enter(CLOSING, self.clock())
        self.transport.close()

    # ------------------------------------------------------------------ time and shutdown

    def tick(self, now: float) -> None:
        """Time passed: every limit in time of this connection is kept here."""
        if self.driver is not None:  # the limits of what is relayed are the exchange's
            self.quiet_until = self.driver.tick(now)
            return
        settings = self.relay.settings
        spent = now - self.since
        paused = self._paused_at
        if paused is not None and now - paused > settings.write_timeout:
            self.transport.abort()
        elif self.phase is CLOSING:
            if spent > (settings.write_timeout if self.transport.is_closing() else LINGER):
                self.transport.abort()
        elif self.phase is BUSY or self.queue:
            pass  # an application answers, or a large body waits for its turn
        elif self.phase is IDLE:
            if spent > settings.keep_alive:
                self._close()
        elif self._draining and self._silent and spent > ARRIVING:
            self._close()
        elif spent > (settings.header_timeout if self.phase is HEAD else settings.body_timeout):
            if self._silent:
                self._close()
            else:
                self._refuse(errors.REQUEST_TIMEOUT)

    def shutdown(self) -> None:
        """Called by uvicorn when the router ends: close as soon as nothing is under way."""
        self._draining = True
        if self.phase is BUSY or self.queue:
            if self.cycle is not None:
                self.cycle.keep_alive = False
        elif self.phase is IDLE or (self._silent and self.clock() - self.since > ARRIVING):
            self._close()
        # Else a request is arriving, or about to: it is answered, or its timer ends it.

    @property
    def _silent(self) -> bool:
        """Whether the client has not said a word yet."""
        return self.phase is HEAD and self.incoming is None and self._headers is None


class OrdinaryProtocol(RelayProtocol):
    """The same guard and timers in front of a listener that relays nothing: the admin listener."""

    table: Mapping[bytes, Route] = {}
