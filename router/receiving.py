"""What comes in on one client connection: requests, whole, checked and in order.

The base of `router.frontend.RelayProtocol`. It replaces uvicorn's parser callbacks: each request is
collected as an `Incoming`, refused as early as its head allows, and put in the connection's one
queue when it is whole. Answering is the subclass's.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router import errors
from router.framing import ChunkedReader, FramingError
from router.incoming import MAX_OWN_BODY, Incoming
from router.routes import TABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from router.errors import ErrorAnswer
    from router.relay import Relay
    from router.routes import Route

MAX_AHEAD: Final = 65_536  # bytes that a client may send while its last request is being answered
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_log = logging.getLogger("crossover")


class Phase(enum.Enum):
    """What a connection is doing; each phase has its own timer."""

    HEAD = enum.auto()  # waiting for the rest of a request head
    BODY = enum.auto()
    IDLE = enum.auto()  # between requests
    BUSY = enum.auto()  # an answer is under way
    CLOSING = enum.auto()  # the last answer was written; what still comes is ignored


class ReceivingProtocol(HttpToolsProtocol):
    """Collects requests; `_advance` of the subclass takes them from `queue`."""

    table: Mapping[bytes, Route] = TABLE  # what this listener relays

    def __init__(
        self,
        relay: Relay,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.relay = relay
        self.phase = Phase.HEAD
        self.since = relay.clock()  # when the phase began; in BODY, when the last bytes came
        self.incoming: Incoming | None = None
        self.queue: deque[Incoming] = deque()
        self._ahead = 0  # bytes received while BUSY
        self._deaf = False  # nothing that still comes can be a request
        self._head_bytes = 0  # received in this phase, if it is HEAD
        self._raw_body: ChunkedReader | int | None = None  # after an Upgrade, see `_upgraded`
        self._buffered = 0  # bytes of bodies counted in `relay.buffered`

    def data_received(self, data: bytes) -> None:
        """Feed the parser; its callbacks do the rest."""
        if self._deaf:
            return
        if self.phase is Phase.BUSY:
            self._ahead += len(data)
            if self._ahead > MAX_AHEAD:
                self.transport.abort()
                return
        elif self.phase is Phase.BODY:
            self.since = self.relay.clock()
        if self._raw_body is not None:
            self._feed_raw_body(data)
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgraded(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._deaf:
                self._refuse(errors.BAD_REQUEST)
        if self.phase is Phase.HEAD and not self._deaf:
            # The parser keeps an unfinished header to itself, however long it grows.
            self._head_bytes += len(data)
            if self._head_bytes > self.relay.head_limits.total:
                self._refuse(errors.HEADERS_TOO_LARGE)

    # ------------------------------------------------------------------ after an Upgrade
    # llhttp takes what follows the head of an upgrade for another protocol. It is HTTP/1.1 here,
    # so the body is read by hand; the connection ends after the answer, as nothing may follow it.

    def _upgraded(self, rest: bytes) -> None:
        incoming = self.incoming
        if incoming is None or self._deaf:
            self._deaf = True
            return
        self._raw_body = ChunkedReader() if incoming.facts.chunked else incoming.facts.length or 0
        self._feed_raw_body(rest)

    def _feed_raw_body(self, data: bytes) -> None:
        reader = self._raw_body
        try:
            if isinstance(reader, ChunkedReader):
                for payload in reader.feed(data):
                    self.on_body(payload)
                whole = reader.done
            else:
                left = reader or 0
                if left:
                    self.on_body(data[:left])
                self._raw_body = left - min(left, len(data))
                whole = self._raw_body == 0
        except FramingError:
            self._refuse(errors.BAD_REQUEST)
            return
        if whole and not self._deaf:
            self._whole()
            self._deaf = True

    # ------------------------------------------------------------------ parser callbacks
    # An exception of ours in one would become a parser error and a 400: they catch their own.

    def on_message_begin(self) -> None:
        """A request begins."""
        self.incoming = Incoming(self.relay.head_limits, self.table)
        if self.phase is Phase.IDLE:
            self._enter(Phase.HEAD)

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        if self.incoming is not None:
            self.incoming.url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer, which is dropped."""
        incoming = self.incoming
        if incoming is not None and not incoming.headers_done:
            incoming.header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there: refuse it now, or let the body come."""
        incoming = self.incoming
        if incoming is None:
            return
        try:
            parser = self.parser
            incoming.head_complete(
                parser.get_method(),
                parser.get_http_version(),
                keep_alive=parser.should_keep_alive(),
            )
            # Only with the Connection header that belongs to it is an Upgrade one to the parser.
            incoming.facts.upgrade = bool(parser.should_upgrade())
            error = incoming.error or self.relay.admission_error(incoming)
            if error is not None:
                self._refuse(error)
                return
            if incoming.facts.expects:
                incoming.waits_for_continue = True
                self._say_continue()
            if self.phase is Phase.HEAD:
                self._enter(Phase.BODY)
        except Exception:  # noqa: BLE001 (see above)
            _log.exception("request head")
            self._refuse(errors.INTERNAL)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        incoming = self.incoming
        if incoming is None or self._deaf:
            return
        incoming.waits_for_continue = False
        limit = self.relay.settings.max_body if incoming.route is not None else MAX_OWN_BODY
        if incoming.size + len(body) > limit:
            self._refuse(errors.BODY_TOO_LARGE)
        elif self.relay.buffered + len(body) > self.relay.settings.max_buffered:
            self._refuse(errors.OVERLOADED)
        else:
            incoming.size += len(body)
            self._buffered += len(body)
            self.relay.buffered += len(body)
            incoming.body.append(body)

    def on_message_complete(self) -> None:
        """The request is whole, or the head of an upgrade is."""
        if self.incoming is not None and not self.incoming.facts.upgrade:
            self._whole()

    def _whole(self) -> None:
        incoming, self.incoming = self.incoming, None
        if incoming is None or self._deaf:
            return
        incoming.complete = True
        self.queue.append(incoming)
        self._advance()

    # ------------------------------------------------------------------ shared with the subclass

    def _advance(self) -> None:
        """Start the next request if nothing is being answered."""
        raise NotImplementedError  # the subclass's

    def _refuse(self, error: ErrorAnswer) -> None:
        """Answer the request being received in its turn, and read no further ones."""
        incoming = self.incoming or Incoming(self.relay.head_limits, self.table)
        self.incoming = None
        self._deaf = True
        incoming.error = error
        self.relay.metrics.reject(error.code)
        self.queue.append(incoming)
        self._advance()

    def _say_continue(self) -> None:
        """Let a client that waits for it send its body, unless an answer is under way."""
        incoming = self.incoming
        if (
            incoming is not None
            and incoming.waits_for_continue
            and self.phase is not Phase.BUSY
            and not self.queue
        ):
            incoming.waits_for_continue = False
            self.write(CONTINUE)

    def write(self, data: bytes) -> None:
        """Write to the client, unless it is being closed."""
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._head_bytes = 0
        self.since = self.relay.clock()

    def _release_all_but_waiting(self) -> None:
        """Give back the bytes of bodies that are no longer held."""
        held = sum(waiting.size for waiting in self.queue)
        if self.incoming is not None:
            held += self.incoming.size
        self.relay.buffered -= self._buffered - held
        self._buffered = held
