"""A TCP relay that writes down which HTTP passes through it, each way. It changes nothing.

Between a gateway and a pair it shows what the gateway makes of a request before the pair sees it,
what it asks by itself, and what it makes of an answer. What is not HTTP/1.1 passes all the same,
and stands in `strange`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import httptools

READ: Final = 65_536


class Message:
    """One request or answer that passed."""

    def __init__(self) -> None:
        self.method = ""
        self.target = ""
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.body = b""  # without the framing
        self.whole = False

    def header(self, name: str) -> str | None:
        """The last value of a header."""
        return dict(self.headers).get(name)


class _Reader:
    """Takes one direction of one connection apart."""

    def __init__(self, into: list[Message], *, answers: bool) -> None:
        self._into = into
        self._now = Message()
        self._answers = answers
        self.parser: Any = (
            httptools.HttpResponseParser(self) if answers else httptools.HttpRequestParser(self)
        )

    def on_message_begin(self) -> None:
        self._now = Message()

    def on_url(self, url: bytes) -> None:
        self._now.target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._now.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if self._answers:
            self._now.status = self.parser.get_status_code()
        else:
            self._now.method = self.parser.get_method().decode()
        self._into.append(self._now)

    def on_body(self, body: bytes) -> None:
        self._now.body += body

    def on_message_complete(self) -> None:
        self._now.whole = True


class Tap:
    """One relay, and what it heard."""

    def __init__(self, port: int) -> None:
        """`port` is that of the pair behind it."""
        self.requests: list[Message] = []
        self.answers: list[Message] = []
        self.strange: list[bytes] = []  # the first bytes of what was not HTTP/1.1
        self.port = 0
        self._behind = port
        self._links: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def posts(self) -> list[Message]:
        """The requests that are work, oldest first."""
        return [heard for heard in self.requests if heard.method == "POST"]

    async def link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        ends = [writer]
        ways: list[asyncio.Task[None]] = []
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._behind)
            ends.append(back_writer)
            ways += [
                asyncio.create_task(self._pass(reader, back_writer, self.requests, answers=False)),
                asyncio.create_task(self._pass(back_reader, writer, self.answers, answers=True)),
            ]
            # The end of either side is the end of the connection: a client that leaves is passed
            # on at once.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            writer.transport.abort()
        finally:
            # Before anything is waited for, since a second cancellation would end that.
            for end in ends:
                end.close()
            for way in ways:
                way.cancel()
            try:
                await asyncio.gather(*ways, return_exceptions=True)
            finally:
                self._links.discard(task)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        into: list[Message],
        *,
        answers: bool,
    ) -> None:
        heard: _Reader | None = _Reader(into, answers=answers)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ):
                if heard is not None:
                    try:
                        heard.parser.feed_data(data)
                    except httptools.HttpParserError:
                        self.strange.append(data[:24])
                        heard = None
                writer.write(data)
                await writer.drain()

    async def close(self) -> None:
        """Cut what is open."""
        for task in list(self._links):
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)


@contextlib.asynccontextmanager
async def tap(port: int) -> AsyncIterator[Tap]:
    """A relay to a port, for as long as the block runs."""
    made = Tap(port)
    server = await asyncio.start_server(made.link, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await made.close()
