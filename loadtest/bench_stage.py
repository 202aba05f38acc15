"""What `loadtest bench` runs on: the servers, the proxies before them, and a core for each side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from loadtest.bench_backend import Counts
from loadtest.bench_cost import (
    BARE,
    DIRECT,
    ROUTER,
    Machine,
    Row,
    Session,
    Usage,
    this_machine,
)
from loadtest.bench_load import LENGTH, NoAnswerError, until_ready
from loadtest.bench_peers import PEERS, Peer, Place, failed, find, free_ports, missing, version
from loadtest.children import Child, Children
from router import __version__

START_S: Final = 20.0
PORTS: Final = r"listening on (\d+)(?: (\d+))?"
ROUTER_PORT: Final = r"listening on port (\d+), admin"
QUIET_S: Final = 2.0
QUIET_POLL_S: Final = 0.02
SPARE_FILES: Final = 128  # open ones, besides the connections
SELF: Final = "loadtest.bench_backend"


def pin(process: int, cores: Iterable[int]) -> None:
    """Keep a process (0: this one) on these cores."""
    if sys.platform == "linux":
        os.sched_setaffinity(process, cores)


def own_cores() -> list[int]:
    """The cores that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    else:  # noqa: RET505 (mypy calls it unreachable otherwise)
        return []


class Target(msgspec.Struct):
    """Where the load goes, and what came of it."""

    row: Row
    ports: list[int]
    session: Session | None = None  # None: there is no proxy

    def usage(self) -> Usage:
        """What the proxy has used so far."""
        return self.session.usage() if self.session else Usage()

    def memory_mb(self) -> float | None:
        """What it holds now."""
        return round(self.session.memory_mb(), 1) if self.session else None

    def count(self, errors: Mapping[str, int]) -> None:
        """Add to the row's errors."""
        for why, number in errors.items():
            if number:
                self.row.errors[why] = self.row.errors.get(why, 0) + number


class Stage:
    """All that was started, and the cores that it runs on."""

    def __init__(self, children: Children, directory: Path) -> None:
        cores = own_cores()
        pinned = len(cores) > 1
        self.machine: Machine = this_machine(pinned=pinned)
        self._load_cores, self._proxy_cores = (cores[:1], cores[1:2]) if pinned else (cores, cores)
        self._children = children
        self._directory = directory
        self.left_out: list[str] = []  # which peers, and why

    async def start(self, without: Collection[str] = ()) -> list[Target]:
        """Start everything but the peers named, and wait until it answers.

        Raises ChildError and NoAnswerError, for a peer neither.
        """
        pin(0, self._load_cores)
        servers = self._children.start("servers", SELF, "servers").wait_for(PORTS, START_S)
        direct = Target(Row(name=DIRECT, version="", machine=self.machine), [])
        direct.ports = [int(port) for port in servers.groups()]
        relay = self._children.start("bare relay", SELF, "relay", *servers.groups())
        targets = [direct, await self._proxy(BARE, "in this Python", relay, PORTS)]
        one, other = (f"http://127.0.0.1:{port}" for port in direct.ports)
        router = self._children.start(
            *("router", "router", "serve", "--speculative", one, "--baseline", other),
            *("--threshold", "32", "--port", "0", "--admin-port", "0"),
            *("--drain-delay", "0", "--drain-timeout", "1s"),
        )
        targets.append(await self._proxy(ROUTER, __version__, router, ROUTER_PORT))
        for peer in PEERS:
            target = None if peer.name in without else await self._peer(peer, direct.ports)
            targets += [target] if target else []
        return targets

    async def _peer(self, peer: Peer, ports: list[int]) -> Target | None:
        """A peer that answers; None, and a line in `left_out`, where it is missing or fails."""
        program = find(peer, os.environ)
        if program is None:
            self.left_out.append(missing(peer, os.environ))
            return None
        directory = self._directory / peer.name
        directory.mkdir()
        port, spare = free_ports(2)
        place = Place(port=port, servers=(ports[0], ports[1]), directory=directory, spare=spare)
        for name, text in peer.files(place).items():
            (directory / name).write_text(text, encoding="utf-8")
        arguments = peer.arguments(place)
        child = self._children.start(peer.name, SELF, "become", program, *arguments)
        pin(child.pid, self._proxy_cores)
        try:
            await until_ready(port, lambda: child.process.poll() is None)
        except NoAnswerError as error:
            self.left_out.append(failed(peer, program, str(error), child.printed()))
            # It must not go on trying on the core of the others. The group is its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.process.wait()
            return None
        row = Row(name=peer.name, version=version(peer, program), machine=self.machine)
        return Target(row, [port], Session(child.pid))

    async def _proxy(self, name: str, version: str, child: Child, pattern: str) -> Target:
        pin(child.pid, self._proxy_cores)
        port = int(child.wait_for(pattern, START_S)[1])
        await until_ready(port)
        row = Row(name=name, version=version, machine=self.machine)
        return Target(row, [port], Session(child.pid))


class Control:
    """Asks the servers, which are one process, what they have seen."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def counts(self) -> Counts:
        """What they have seen so far."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(b"GET /bench HTTP/1.1\r\nhost: bench\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        found = LENGTH.search(head)
        body = await reader.readexactly(int(found[1]) if found else 0)
        return msgspec.json.decode(body, type=Counts)

    async def left(self) -> int:
        """How many streams are still open a moment after their clients have gone."""
        streaming = 0
        for _ in range(int(QUIET_S / QUIET_POLL_S)):
            streaming = (await self.counts()).streaming
            if not streaming:
                break
            await asyncio.sleep(QUIET_POLL_S)
        return streaming

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()


@contextlib.contextmanager
def enough_files(connections: int) -> Iterator[None]:
    """Let this process and its children have two open files for each connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(soft, 2 * connections + SPARE_FILES)
    if soft != resource.RLIM_INFINITY and needed > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        except ValueError:
            raise NoAnswerError(
                f"{needed} open files are needed and {hard} allowed: raise it with ulimit -Hn"
            ) from None
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
