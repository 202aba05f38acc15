"""What comes in on one client connection, read by read.

The base of `router.frontend.RelayProtocol`. A read goes to the parser (`router.parsing`), except
where that is spared: a request whose head is known is taken as it is, and a body after the head of
an upgrade is read by hand. The limits that the parser cannot keep are kept here.
"""

from __future__ import annotations

from typing import Final

import httptools

from router import errors
from router.framing import ChunkedReader, FramingError
from router.parsing import BODY, BUSY, ParsingProtocol
from router.turns import LARGE

MAX_AHEAD: Final = 65_536  # bytes that a client may send while its last request is being answered


class ReceivingProtocol(ParsingProtocol):
    """Reads requests; `_begin` of the subclass answers them."""

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
        if len(data) >= LARGE:
            self.transport.pause_reading()
            self.relay.turns.ask(self._read_on)
        if self._raw_body is not None:
            data = self._feed_raw_body(data)
        elif (
            self._headers is None
            and self.incoming is None
            and self.phase is not BUSY
            and not self.queue
            and self.table  # what is known is known of the listener that relays
        ):
            data = self._recall(data)
        if data:
            self._parse(data)

    def _read_on(self) -> None:
        """The next large read may come."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        """Have the parser read what comes, however it is cut."""
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

    # ------------------------------------------------------------------ what the parser is spared

    def _recall(self, data: bytes) -> bytes:
        """Take the request that this read begins with, if its head is known; what is left of it.

        The parser stands before a request, and does not see this one.
        """
        relay = self.relay
        found = relay.known_requests.find(data)
        if found is None:
            self._unknown = data
            return data
        model, start, length = found
        incoming = model.again(length)
        if relay.admission_error(incoming) is not None:
            return data  # to be refused in the ordinary way
        end = start + length
        if end <= len(data) and relay.buffered + length <= relay.max_buffered:
            incoming.body = [data[start:end]]  # it is all there
            incoming.size = length
            incoming.complete = True
            self._buffered += length
            relay.buffered += length
            self._begin(incoming)
            return data[end:]
        self.incoming = incoming
        self._raw_body = length
        self._enter(BODY, self.now)
        return self._feed_raw_body(data[start:])

    def _upgraded(self, rest: bytes) -> None:
        """The parser takes what follows the head of an upgrade for another protocol: it is HTTP/1.1."""
        incoming = self.incoming
        if incoming is None or self._deaf:
            self._deaf = True
            return
        self._raw_body = ChunkedReader() if incoming.facts.chunked else incoming.length or 0
        self._feed_raw_body(rest)

    def _feed_raw_body(self, data: bytes) -> bytes:
        """Read a body by hand; what follows it. Nothing may follow the body of an upgrade."""
        reader, rest = self._raw_body, b""
        try:
            if isinstance(reader, ChunkedReader):
                for payload in reader.feed(data):
                    self.on_body(payload)
                whole = reader.done
            else:
                left = reader or 0
                if left:
                    self.on_body(data[:left])
                    rest = data[left:]
                self._raw_body = left - min(left, len(data))
                whole = self._raw_body == 0
        except FramingError:
            self._refuse(errors.BAD_REQUEST)
            return b""
        if not whole or self._deaf:
            return b""
        upgraded = self.incoming is not None and self.incoming.facts.upgrade
        self._raw_body = None
        self._whole()
        if upgraded:
            self._deaf = True
        return rest
