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
from router.incoming import MAX_OWN_BODY, Headers, Incoming
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


# An enum's members are slow to look up, and these are looked up several times per request.
HEAD, BODY, IDLE, BUSY, CLOSING = Phase


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
        self.clock = relay.clock
        self.phase = HEAD
        self.now = relay.clock()  # when the current read began
        self.since = self.now  # when the phase began; in BODY, when the last bytes came
        self.incoming: Incoming | None = None  # its head is there, its body is arriving
        self._target = b""
        self._headers: Headers | None = None  # of a head that is arriving
        self.queue: deque[Incoming] = deque()
        self._ahead = 0  # bytes received while BUSY
        self._deaf = False  # nothing that still comes can be a request
        self._head_bytes = 0  # received of the head that is arriving, in earlier reads
        self._read_bytes = 0  # of the current read
        self._read_body = 0  # bytes of bodies in it
        self._framing_bytes = 0  # around the chunks of the body that is arriving
        self._begun = False  # whether that head began in the current read
        self._raw_body: ChunkedReader | int | None = None  # after an Upgrade, see `_upgraded`
        self._buffered = 0  # bytes of bodies counted in `relay.buffered`

    def data_received(self, data: bytes) -> None:
        """Feed the parser; its callbacks do the rest."""
        if self._deaf:
            return
        self.now = self.clock()
        if self.phase is BUSY:
            self._ahead += len(data)
            if self._ahead > MAX_AHEAD:
                self.transport.abort()
                return
        elif self.phase is BODY:
            self.since = self.now
        if self._raw_body is not None:
            self._feed_raw_body(data)
            return
        self._read_bytes = len(data)
        self._read_body = 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgraded(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._deaf:
                self._refuse(errors.BAD_REQUEST)
        incoming = self.incoming
        if incoming is not None and incoming.facts.chunked and not self._deaf:
            # Trailers, and what frames the chunks: more than 16 bytes for each of the body's.
            self._framing_bytes += len(data) - self._read_body
            if self._framing_bytes > self.relay.head_limits.total + 16 * incoming.size:
                self._refuse(errors.HEADERS_TOO_LARGE)
        if self._headers is not None and not self._deaf:
            # The parser keeps an unfinished header to itself, however long it grows. Of the read
            # in which the head begins, at most what follows the last empty line belongs to it.
            if self._begun:
                after = data.rfind(b"\r\n\r\n") + 4
                self._head_bytes = min(len(data) - after, len(data) - self._read_body)
                self._begun = False
            else:
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
        self._target = b""
        self._headers = []
        self._head_bytes = self._framing_bytes = 0
        self._begun = True
        if self.phase is IDLE:
            self._enter(HEAD, self.now)

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer, which is dropped."""
        if self._headers is not None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is there: refuse it now, or let the body come."""
        headers, self._headers = self._headers, None
        if headers is None or self._deaf:
            return
        try:
            parser = self.parser
            self.incoming = incoming = Incoming(
                parser.get_method(),
                self._target,
                headers,
                parser.get_http_version(),
                keep_alive=parser.should_keep_alive(),
            )
            at_most = self._head_bytes + self._read_bytes
            incoming.check(self.relay.head_limits, self.table, at_most)
            error = incoming.error or self.relay.admission_error(incoming)
            if error is not None:
                self._refuse(error)
                return
            if incoming.facts.upgrade:
                # Only with the Connection header that belongs to it is it one to the parser.
                incoming.facts.upgrade = bool(parser.should_upgrade())
                incoming.keep_alive = False
            if incoming.facts.expects:
                incoming.waits_for_continue = True
                self._say_continue()
            if self.phase is HEAD:
                self._enter(BODY, self.now)
        except Exception:  # noqa: BLE001 (see above)
            _log.exception("request head")
            self._refuse(errors.INTERNAL)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        incoming = self.incoming
        if incoming is None or self._deaf:
            return
        if incoming.waits_for_continue:
            incoming.waits_for_continue = False
        relay = self.relay
        length = len(body)
        self._read_body += length
        size = incoming.size + length
        if size > (relay.max_body if incoming.route is not None else MAX_OWN_BODY):
            self._refuse(errors.BODY_TOO_LARGE)
        elif relay.buffered + length > relay.max_buffered:
            self._refuse(errors.OVERLOADED)
        else:
            incoming.size = size
            self._buffered += length
            relay.buffered += length
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
        if self.queue or self.phase is BUSY:
            self.queue.append(incoming)
            self._advance()
        else:
            self._begin(incoming)

    # ------------------------------------------------------------------ shared with the subclass

    def _advance(self) -> None:
        """Start the next request if nothing is being answered."""
        raise NotImplementedError  # the subclass's

    def _begin(self, incoming: Incoming) -> None:
        """Start this request: nothing is being answered and none is before it."""
        raise NotImplementedError  # the subclass's

    def _refuse(self, error: ErrorAnswer) -> None:
        """Answer the request being received in its turn, and read no further ones."""
        incoming = self.incoming or Incoming.failed(error)
        self.incoming = self._headers = None
        self._deaf = True
        incoming.error = error
        self.queue.append(incoming)
        self._advance()

    def _say_continue(self) -> None:
        """Let a client that waits for it send its body, unless an answer is under way."""
        incoming = self.incoming
        if (
            incoming is not None
            and incoming.waits_for_continue
            and self.phase is not BUSY
            and not self.queue
        ):
            incoming.waits_for_continue = False
            self.write(CONTINUE)

    def write(self, data: bytes) -> None:
        """Write to the client, unless it is being closed."""
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase = phase
        self.since = now

    def _release_all_but_waiting(self) -> None:
        """Give back the bytes of bodies that are no longer held."""
        if not self._buffered:
            return
        held = sum(waiting.size for waiting in self.queue) if self.queue else 0
        if self.incoming is not None:
            held += self.incoming.size
        self.relay.buffered -= self._buffered - held
        self._buffered = held
