"""The stage of the whole-router test: backends that follow a plan, and clients that leave at will.

A story is one request: what the client sends, what each backend is to answer, and what was seen of
it everywhere. Its id is the request id, by which the backends know their part.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any, Final

import msgspec

from router.load import Role
from tests.scripted_backend import Call, ScriptedBackend

KEY: Final = "sk-client"
TARGET: Final = b"/v1/chat/completions"
SSE: Final = "text/event-stream"
# Sent behind a whole answer: whoever takes it for the answer to the next request is deceived.
FORGED: Final = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged"
GARBAGE: Final = b"\x00\x01 no protocol of ours\r\n\r\n"
SMALL_BUFFER: Final = 4096  # bytes that a slow client's kernel takes for it
WHOLE: Final = 1 << 30  # as `cut`: never
# By name, so that a failing example can be read.
PIECES: Final = {
    "event": b'data: {"choices":[{"delta":{"content":"xyz"}}]}\n\n',
    "half": b'data: {"choices":[{"delta":',
    "other half": b'{"content":"xyz"}}]}\n\n',
    "ping": b": ping\n\n",
    "usage": b'data: {"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n',
    "done": b"data: [DONE]\n\n",
    "refused": b'data: {"error":{"message":"full","code":503}}\n\n',
    "failed": b'data: {"error":{"message":"odd","code":500}}\n\n',
    "big": b"y" * 300_000,
    "object": b"{}",
    "open": b'{"a":',
    "close": b"1}",
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one backend means to answer."""

    status: int = 200
    kind: str = "application/json"
    framing: str = "length"  # or chunked, or close
    names: tuple[str, ...] = ("object",)  # of its pieces
    wait: int | None = None  # pieces sent before it waits for the gate; -1: before the head
    cut: int = WHOLE  # pieces sent before it breaks; -1: before the head
    how: str = "fin"  # how it breaks: fin, rst or garbage
    forges: bool = False  # with the last piece it sends another answer, which nobody asked for

    @property
    def pieces(self) -> list[bytes]:
        """What is sent, one after the other."""
        return [PIECES[name] for name in self.names]

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(self.pieces)

    @property
    def refuses(self) -> bool:
        """Whether it says that it did not begin to work."""
        if self.status in {429, 503}:
            return True
        said = [name for name in self.names if name != "ping"]
        return self.kind == SSE and said[:1] == ["refused"]

    def head(self, mark: str) -> bytes:
        """The head, with a mark that names this answer."""
        lines = f"HTTP/1.1 {self.status} X\r\ncontent-type: {self.kind}\r\nx-mark: {mark}\r\n"
        if self.framing == "length":
            lines += f"content-length: {len(self.body)}\r\n"
        elif self.framing == "chunked":
            lines += "transfer-encoding: chunked\r\n"
        return f"{lines}\r\n".encode()


class Sighting:
    """One arrival of a request at a backend."""

    def __init__(self, role: Role, plan: Plan, call: Call, mark: str) -> None:
        self.role = role
        self.plan = plan
        self.mark = mark
        self.head = call.head
        self.body = call.body
        self.reused = call.reused > 0
        self.at = time.monotonic()
        self.began = False  # it sent a byte
        self.given = b""  # of its body
        self.whole = False  # it sent all, or what nobody can tell from all
        self.peer_left = False

    def __repr__(self) -> str:
        return f"{self.mark} {self.plan} whole={self.whole} left={self.peer_left}"


class Story:
    """One request, and all that became of it."""

    def __init__(
        self, number: int, plans: dict[Role, list[Plan]], *, stream: bool, size: int
    ) -> None:
        self.id = f"story-{number}"
        self.plans = plans
        fields = {"messages": [{"role": "user", "content": "x" * size}], "stream": stream}
        self.body = json.dumps(fields).encode()
        self.sightings: list[Sighting] = []
        self.gate = asyncio.Event()


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """How a client comes and goes."""

    http10: bool = False
    chunked: bool = False  # its body
    key: str | None = KEY
    pin: str | None = None
    leaves: str = "no"  # or upload, sent, answer, half, reset: where, and the last one how
    slow: bool = False  # it reads nothing until its gate opens


class Client:
    """One connection with a few requests, sent at once."""

    def __init__(self, visit: Visit, stories: list[Story], port: int) -> None:
        self.visit = visit
        self.stories = stories
        self.got = bytearray()
        self.end = "open"  # then eof or reset: by the router; or left: by itself
        self.local = 0
        self._port = port

    async def run(self) -> None:
        """From the connect to the end."""
        sock = socket.socket()
        if self.visit.slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            await self._talk(reader, writer)
        except ConnectionError:
            self.end = "reset" if self.end == "open" else self.end
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b"".join(
            self._request(story, last=story is self.stories[-1]) for story in self.stories
        )
        leaves = self.visit.leaves
        if leaves == "upload":
            data = data[: len(data) - 9]
        writer.write(data)
        await writer.drain()
        if leaves in {"upload", "sent"}:
            self.end = "left"
            return
        if leaves == "half":
            self.end = "left"
            writer.write_eof()
        if self.visit.slow:
            await self.stories[0].gate.wait()
        while piece := await reader.read(65_536):
            self.got += piece
            if leaves in {"answer", "reset"}:
                self.end = "left"
                if leaves == "reset":
                    writer.transport.abort()
                return
        if self.end == "open":
            self.end = "eof"

    def _request(self, story: Story, *, last: bool) -> bytes:
        visit = self.visit
        lines = [b"POST %b HTTP/1.%d" % (TARGET, 0 if visit.http10 else 1), b"host: router"]
        lines.append(b"x-request-id: " + story.id.encode())
        if visit.key is not None:
            lines.append(b"authorization: Bearer " + visit.key.encode())
        if visit.pin is not None:
            lines.append(b"x-crossover-backend: " + visit.pin.encode())
        if last:
            lines.append(b"connection: close")
        body = story.body
        if visit.chunked and not visit.http10:
            lines.append(b"transfer-encoding: chunked")
            half = len(body) // 2
            parts = [b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:half], body[half:])]
            body = b"".join(parts) + b"0\r\n\r\n"
        else:
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join([*lines, b"", b""]) + body


class PlannedBackend(ScriptedBackend):
    """Follows the plans of the stories, and tells of its load what it is told to."""

    def __init__(self, role: Role, stories: dict[str, Story]) -> None:
        super().__init__(self._follow)
        self.role = role
        self.stories = stories
        self.telemetry = "none"
        self.opened = False  # no gate holds any more
        self._marks: defaultdict[str, Any] = defaultdict(itertools.count)

    def _probe(self, path: bytes) -> bytes:
        if path.startswith((b"/ready", b"/health")) or self.telemetry == "none":
            return super()._probe(path)
        if self.telemetry == "silent":
            return b""
        if self.telemetry == "garbage":
            return b'HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"loads":'
        running = self.in_flight if self.telemetry == "true" else 10**9
        rank = {"num_running_reqs": running, "num_waiting_reqs": running // 2, "token_usage": 0.5}
        if self.telemetry == "lies":
            rank |= {"token_usage": -7.0, "timestamp": 1e300}
        body = json.dumps({"loads": [rank | {"dp_rank": 0}]}).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def _follow(self, call: Call) -> None:
        if call.path == b"/v1/models":  # asked by the watch over the pair, never relayed
            await call.send(self._probe(call.path))
            return
        story = self.stories[call.headers[b"x-request-id"].decode()]
        number = next(self._marks[story.id])
        plans = story.plans[self.role]
        plan = plans[min(number, len(plans) - 1)]
        sighting = Sighting(self.role, plan, call, f"{story.id}.{self.role}.{number}")
        story.sightings.append(sighting)
        try:
            await self._play(story, sighting, call)
        except (ConnectionError, RuntimeError):  # uvloop's word for a transport that is closed
            sighting.peer_left = True
            call.close()

    async def _play(self, story: Story, sighting: Sighting, call: Call) -> None:
        plan = sighting.plan
        steps = [plan.head(sighting.mark), *plan.pieces]
        last = len(plan.pieces) - 1
        for at, data in enumerate(steps, -1):
            if plan.wait == at and not await self._gate(story, call):
                sighting.peer_left = True
                call.close()
                return
            if plan.cut == at:
                await self._break(sighting, call)
                return
            sighting.began = True
            if at < 0 or plan.framing != "chunked":
                await call.send(data + FORGED if plan.forges and at == last else data)
            else:
                await call.send(b"%x\r\n%b\r\n" % (len(data), data))
            if at >= 0:
                sighting.given += data
        if plan.cut == len(plan.pieces) and plan.framing == "chunked":
            await self._break(sighting, call)
            return
        sighting.whole = True
        if plan.framing == "chunked":
            await call.send(b"0\r\n\r\n")
        elif plan.framing == "close":
            call.close()

    async def _break(self, sighting: Sighting, call: Call) -> None:
        plan = sighting.plan
        if plan.how == "rst":
            call.reset()
            return
        if plan.how == "garbage" and (not sighting.began or plan.framing == "chunked"):
            sighting.began = True
            await call.send(GARBAGE)
        elif sighting.began and plan.framing == "close":
            sighting.whole = True  # nobody can tell
        call.close()

    async def _gate(self, story: Story, call: Call) -> bool:
        """Wait for the gate; whether the peer is still there."""
        if self.opened:
            return True
        waits: list[Coroutine[Any, Any, Any]] = [story.gate.wait(), call.peer_closed.wait()]
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        return not call.peer_closed.is_set()
