"""What comes in on one client connection, read by read.

The base of `router.frontend.RelayProtocol`. A read goes to the parser (`router.parsing`), except
where that is spared: a request whose head is known is taken as it is, and so is its body; the body
after the head of an upgrade is read here because the parser stops before it. The limits that the
parser cannot keep are kept here.

It may not answer, nor stop reading, but for the turns of the loop in which other large steps are due
(`turns`): it says `_begin` or `_refuse` and reads on.
"""

from __future__ import annotations

from typing import Final

import httptools

from router import errors
from router.framing import ChunkedReader, FramingError
from router.parsing import BODY, BUSY, ParsingProtocol
from router.turns import LARGE

# Bytes that a client may send while its last request is being answered. uvicorn pauses reading
# beyond as many; here that would hide that the client left, so one that sends more is cut off.
MAX_AHEAD: Final = 65_536
# Bytes around the chunks of a body for each byte in them. The smallest chunk, of one byte, has 5;
# the rest is for zeros before a size and for extensions. More than that is sent to keep us busy.
FRAMING_PER_BYTE: Final = 16
_EMPTY_LINE: Final = b"\r\n\r\n"


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
        if self._unparsed is not None:
            data = self._read_unparsed(data)
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
        self._begun = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._deaf:
                self._refuse(errors.BAD_REQUEST)
        incoming = self.incoming
        if incoming is not None and incoming.facts.chunked and not (self._begun or self._deaf):
            # What frames the chunks, and trailers, which may be as long as a head. The read in which
            # the request begins does not count: it may be full of the one before.
            self._framing_bytes += len(data) - self._read_body
            most = self.relay.head_limits.total + FRAMING_PER_BYTE * incoming.size
            if self._framing_bytes > most:
                self._refuse(errors.HEADERS_TOO_LARGE)
        if self._headers is not None and not self._deaf:
            # The parser keeps an unfinished header to itself, however long it grows. Of the read
            # in which the head begins, at most what follows the last empty line belongs to it.
            if self._begun:
                last = data.rfind(_EMPTY_LINE)
                before = 0 if last < 0 else last + len(_EMPTY_LINE)
                self._head_bytes = len(data) - max(before, self._read_body)
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
        known, start, length = found
        incoming = known.again(length)
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
        self._unparsed = length
        self._enter(BODY, self.now)
        return self._read_unparsed(data[start:])

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Serve a request to upgrade as the HTTP/1.1 that it also is; `rest` follows its head.

        To the parser that is another protocol, and it reads no further.
        """
        incoming = self.incoming
        if incoming is None or self._deaf:
            self._deaf = True
            return
        self._unparsed = ChunkedReader() if incoming.facts.chunked else incoming.length or 0
        self._read_unparsed(rest)

    def _read_unparsed(self, data: bytes) -> bytes:
        """Read more of a body without the parser, and give what follows it.

        Nothing may follow the body of an upgrade, and only such a body comes here in chunks.
        """
        reader, rest = self._unparsed, b""
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
                self._unparsed = left - min(left, len(data))
                whole = self._unparsed == 0
        except FramingError:
            self._refuse(errors.BAD_REQUEST)
            return b""
        if not whole or self._deaf:
            return b""
        upgraded = self.incoming is not None and self.incoming.facts.upgrade
        self._unparsed = None
        self._whole()
        if upgraded:
            self._deaf = True
        return rest
