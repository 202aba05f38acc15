"""What the parser says of one client connection: requests, whole, checked and in order.

The base of `router.receiving.ReceivingProtocol`. It replaces uvicorn's parser callbacks: each
request is collected as an `Incoming` and refused as early as its head allows. When it is whole it
begins at once, or waits in the connection's one queue behind those that came before it.

It may not read the socket, keep time or answer: those are the subclasses'. Nor may a callback let
an exception out, which the parser would take for an error of the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router import errors
from router.framing import ChunkedReader
from router.incoming import MAX_OWN_BODY, Headers, Incoming
from router.room import Room
from router.routes import TABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from router.errors import ErrorAnswer
    from router.relay import Relay
    from router.routes import Route

LARGE_BODY: Final = 2**20  # bytes; a longer one has a room and a turn of its own
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


class ParsingProtocol(HttpToolsProtocol):
    """Collects requests, for `_begin` of a subclass to answer and `_advance` to take from `queue`."""

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
        self.quiet_until = 0.0  # no limit in time can be reached before; see `tick`
        self.incoming: Incoming | None = None  # its head is there, its body is arriving
        self._target = b""
        self._headers: Headers | None = None  # of a head that is arriving
        self.queue: list[Incoming] = []  # whole, or refused; a deque takes 600 bytes when empty
        self._ahead = 0  # bytes received while BUSY
        self._deaf = False  # nothing that still comes can be a request
        self._head_bytes = 0  # received of the head that is arriving, in earlier reads
        self._read_bytes = 0  # of the current read
        self._read_body = 0  # bytes of bodies in it
        self._framing_bytes = 0  # around the chunks of the body that is arriving
        self._begun = False  # whether the request that is arriving began in the current read
        # What is to come of a body that the parser does not see: so many bytes, or chunks. None: it
        # sees them all.
        self._unparsed: ChunkedReader | int | None = None
        self._unknown: bytes | None = None  # a read that begins with a head that is not known yet
        self._buffered = 0  # bytes of bodies counted in `relay.buffered`

    # ------------------------------------------------------------------ parser callbacks

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
            relay = self.relay
            error = incoming.error or relay.admission_error(incoming)
            if error is None and self.table:  # on what relays; of a known head it is known
                error = relay.pages.error(incoming)
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
            if self._unknown is not None:
                relay.known_requests.learn(self._unknown, incoming)
                self._unknown = None
        except Exception:  # noqa: BLE001 (to the parser it would be an error of the client's)
            _log.exception("request head")
            self._refuse(errors.INTERNAL)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        incoming = self.incoming
        if incoming is None or self._deaf:
            return
        incoming.waits_for_continue = False
        relay = self.relay
        length = len(body)
        self._read_body += length
        most = relay.max_body if incoming.route is not None else MAX_OWN_BODY
        if incoming.size + length > most:
            self._refuse(errors.BODY_TOO_LARGE)
        elif relay.buffered + length > relay.max_buffered:
            self._refuse(errors.OVERLOADED)
        else:
            self._buffered += length
            relay.buffered += length
            if not incoming.size and (incoming.length or 0) > LARGE_BODY:
                with contextlib.suppress(OSError):  # then in pieces, while there is memory for them
                    incoming.room = Room(incoming.length or 0)
            incoming.add(body)

    def on_message_complete(self) -> None:
        """The request is whole, or the head of an upgrade is, whose body the parser does not see."""
        if self.incoming is not None and not self.incoming.facts.upgrade:
            self._whole()

    def _whole(self) -> None:
        """The request is whole: its turn has come, or it waits for that."""
        incoming, self.incoming = self.incoming, None
        if incoming is None or self._deaf:
            return
        incoming.complete = True
        if incoming.size > LARGE_BODY:
            self.queue.append(incoming)  # to decide on it and send it takes milliseconds
            self.relay.turns.ask(self._advance)
        elif self.queue or self.phase is BUSY:
            self.queue.append(incoming)
            self._advance()
        else:
            self._begin(incoming)

    # ------------------------------------------------------------------ shared with the subclass

    def _advance(self) -> None:
        """Begin what is in the queue, one after another, unless an answer is under way."""
        raise NotImplementedError  # the subclass's

    def _begin(self, incoming: Incoming) -> None:
        """Answer this request now: no answer is under way, and none before it is waiting."""
        raise NotImplementedError  # the subclass's

    def _refuse(self, error: ErrorAnswer) -> None:
        """Answer the request that is arriving with this in its turn, and read no further ones."""
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
        """Begin a phase, and with it its time."""
        self.phase = phase
        self.since = now
        self.quiet_until = 0.0

    def release_bodies(self) -> None:
        """Stop counting bodies that are not held any more: all but those arriving or waiting here."""
        held = sum(waiting.size for waiting in self.queue) if self.queue else 0
        if self.incoming is not None:
            held += self.incoming.size
        self.relay.buffered -= self._buffered - held
        self._buffered = held
