"""What `loadtest scale` runs on: the servers, a router for each part, and a core for each side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec

from loadtest.bench_cost import Session, this_machine
from loadtest.bench_load import NoAnswerError
from loadtest.bench_stage import PORTS, pin
from loadtest.children import Child, Children
from loadtest.scale_backend import Sent
from loadtest.scale_load import get
from loadtest.scale_table import Scale

START_S: Final = 20.0
BOTH_PORTS: Final = r"listening on port (\d+), admin on port (\d+)"
POLL_S: Final = 0.01
SETTLE_S: Final = 5.0
MAX: Final = "20000"  # requests in flight and connections: the defaults are below our crowds
MB: Final = 2**20


class Router:
    """One running router."""

    def __init__(self, child: Child, port: int, admin_port: int) -> None:
        self.port = port
        self.admin_port = admin_port
        self.session = Session(child.pid)
        self.rest_mb = self.session.memory_mb()
        self._statm = Path(f"/proc/{child.pid}/statm")
        self._page = os.sysconf("SC_PAGE_SIZE")

    def resident_mb(self) -> float:
        """RSS now: cheaper to read than PSS, so it can be looked at often."""
        return int(self._statm.read_text().split()[1]) * self._page / MB

    @contextlib.asynccontextmanager
    async def peak(self) -> AsyncIterator[list[float]]:
        """Look at the memory all the time; at the end the list holds the most above the start."""
        before = most = self.resident_mb()
        found: list[float] = []

        async def look() -> None:
            nonlocal most
            while True:
                most = max(most, self.resident_mb())
                await asyncio.sleep(POLL_S)

        task = asyncio.create_task(look())
        try:
            yield found
        finally:
            task.cancel()
            found.append(max(most, self.resident_mb()) - before)


class Stage:
    """All that was started, and the cores that it runs on."""

    def __init__(self, children: Children, cores: list[int]) -> None:
        pinned = len(cores) > 1
        self.machine = this_machine(pinned=pinned)
        self.note: Scale
        self.servers: Session
        self.ports: list[int] = []
        self._children = children
        self._load_cores, self._router_cores = (cores[:1], cores[1:2]) if pinned else (cores, cores)
        self._server_cores = cores[2:3] or self._load_cores
        self._routers = 0

    def start_servers(self) -> None:
        """Start them, and take a core ourselves. Raises ChildError."""
        pin(0, self._load_cores)
        child = self._children.start("servers", "loadtest.scale_backend")
        pin(child.pid, self._server_cores)
        self.ports = [int(port) for port in child.wait_for(PORTS, START_S).groups()]
        self.servers = Session(child.pid)

    async def sent(self) -> Sent:
        """What the servers have seen and sent."""
        _, body, _ = await get_kept(self.ports[0], "/bench")
        return msgspec.json.decode(body, type=Sent)

    @contextlib.asynccontextmanager
    async def router(self) -> AsyncIterator[Router]:
        """A router for one part, until its streams have ended. Raises ChildError, NoAnswerError."""
        one, other = (f"http://127.0.0.1:{port}" for port in self.ports)
        self._routers += 1
        began = time.monotonic()
        child = self._children.start(
            *(f"router {self._routers}", "router", "serve"),
            *("--speculative", one, "--baseline", other, "--threshold", "32"),
            *("--port", "0", "--admin-port", "0", "--drain-delay", "0", "--drain-timeout", "1s"),
            *("--max-in-flight", MAX, "--max-connections", MAX),
        )
        pin(child.pid, self._router_cores)
        found = await asyncio.to_thread(child.wait_for, BOTH_PORTS, START_S)
        port, admin_port = int(found[1]), int(found[2])
        await _until_ok(admin_port, "/healthz")
        self.note.start_ms.append(round((time.monotonic() - began) * 1e3, 1))
        await _until_ok(port, "/ready")
        self.note.ready_ms.append(round((time.monotonic() - began) * 1e3, 1))
        yield Router(child, port, admin_port)
        self.count("stream left open", await self._left())
        child.process.terminate()
        await asyncio.to_thread(child.process.wait, START_S)

    async def _left(self) -> int:
        """Streams that are still open behind the router a moment after their clients have gone."""
        left = 0
        for _ in range(int(SETTLE_S / POLL_S)):
            left = (await self.sent()).streaming
            if not left:
                break
            await asyncio.sleep(POLL_S)
        return left

    def count(self, why: str, number: int) -> None:
        """Add to the errors."""
        self.note.errors[why] = self.note.errors.get(why, 0) + number


async def get_kept(port: int, path: str) -> tuple[int, bytes, float]:
    """As `get`, from a server that does not close: read as far as its content-length says."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: scale\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        body = await reader.readexactly(size)
    finally:
        writer.close()
    return int(head.split(b" ", 2)[1]), body, time.monotonic() - began


async def _until_ok(port: int, path: str) -> None:
    """Wait for a 200. Raises NoAnswerError."""
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        with contextlib.suppress(OSError):
            if (await get(port, path))[0] == 200:
                return
        await asyncio.sleep(POLL_S)
    raise NoAnswerError(f"no 200 from {path} on port {port} within {START_S:g} s")
