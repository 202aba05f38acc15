"""A simulated SGLang server over real HTTP: start it in a test, or as a process of its own.

    async with running_engine(EngineConfig.quick("speculative")) as engine:
        httpx.post(engine.url + "/v1/completions", json={"prompt": "hello"})
        engine.core.running, engine.in_flight, engine.seen[-1].headers

uvicorn's protocol serves the connections, but not uvicorn's server: how SGLang ends is not how
uvicorn does, and a test wants to end a server in all the ways that there are (`terminate`, `kill`).
It runs no model: its speed is a curve's (`service`), its words are those of a list (`engine_text`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Final

import uvicorn
from uvicorn.server import ServerState

from loadtest.clock import Clock, RealClock
from loadtest.engine_app import EngineApp
from loadtest.engine_config import ConfigError, EngineConfig
from loadtest.engine_core import EngineCore
from loadtest.engine_http import EngineProtocol
from loadtest.engine_server import Seen, SimulatedServer
from loadtest.exit_codes import FAILED, OK
from loadtest.gpu_share import GpuShare, OwnGpu, SharedGpu

# As SGLang and uvicorn have it.
BACKLOG: Final = 2048
# How long the end of a server waits for its handlers, in seconds: they have nothing left to do.
FAREWELL_S: Final = 5.0


class RunningEngine:
    """A simulated server that listens."""

    def __init__(self, server: SimulatedServer, listener: socket.socket) -> None:
        self.server = server
        self.core = server.core
        self.config = server.config
        self.stopped = asyncio.Event()
        host, port = listener.getsockname()[:2]
        self.port: int = port
        self.url = f"http://{host}:{port}"
        server.port = port
        server.crash = self.kill
        self._listener = listener
        self._state = ServerState()
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: asyncio.Server | None = None

    @property
    def seen(self) -> list[Seen]:
        """The requests received, oldest first, of any route (the last thousand)."""
        return list(self.server.seen)

    @property
    def in_flight(self) -> int:
        """Generating requests whose answer is not complete."""
        return self.server.in_flight

    @property
    def aborted(self) -> int:
        """Choices that were dropped before their end."""
        return self.core.aborted

    @property
    def connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._state.connections)

    async def start(self) -> None:
        """Listen and serve."""
        config = uvicorn.Config(
            EngineApp(self.server),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        config.load()
        self._state.default_headers = _default_headers()
        loop = asyncio.get_running_loop()

        def connect() -> EngineProtocol:
            protocol = EngineProtocol(config, self._state, {})
            protocol.timeout_keep_alive = self.config.keep_alive_s  # type: ignore[assignment]
            return protocol

        self._sockets = await loop.create_server(connect, sock=self._listener, backlog=BACKLOG)
        self._tasks = [loop.create_task(self.core.run()), loop.create_task(self._keep_date())]

    @property
    def failing(self) -> bool:
        """Whether every generating request is answered with a 500; may be set."""
        return self.server.failing

    @failing.setter
    def failing(self, value: bool) -> None:
        self.server.failing = value

    def cut(self) -> None:
        """Cut every open connection where it is; new ones are welcome."""
        for connection in list(self._state.connections):
            connection.transport.abort()

    def terminate(self) -> None:
        """SIGTERM: not healthy at once, still serving, gone when a look finds nothing in flight."""
        if not self.server.draining:
            self.server.draining = True
            self._tasks.append(asyncio.get_running_loop().create_task(self._drain()))

    def kill(self) -> None:
        """SIGKILL: every connection is cut where it is, and nobody listens any more."""
        if self._sockets is not None:
            self._sockets.close()
        self.cut()
        self.core.close()
        self.stopped.set()

    async def close(self) -> None:
        """End it in whatever state it is, and leave nothing behind."""
        self.kill()
        for task in [*self._tasks, *self.server.tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self.server.tasks, return_exceptions=True)
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=FAREWELL_S)

    async def _drain(self) -> None:
        while True:
            await self.server.clock.sleep(self.server.scaled(self.config.shutdown_poll_s))
            if not self.in_flight:
                self.kill()
                return

    async def _keep_date(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._state.default_headers = _default_headers()


@contextlib.asynccontextmanager
async def running_engine(
    config: EngineConfig | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    clock: Clock | None = None,
    gpu: GpuShare | None = None,
) -> AsyncIterator[RunningEngine]:
    """A simulated server for as long as the block runs; port 0 takes a free one.

    Raises ConfigError if the settings do not fit each other, OSError if the port is taken.
    """
    config = EngineConfig() if config is None else config
    clock = RealClock() if clock is None else clock
    if gpu is None:
        gpu = OwnGpu() if config.gpu_lock is None else SharedGpu(config.gpu_lock)
    server = SimulatedServer(config, clock, EngineCore(config, clock, gpu))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    engine = RunningEngine(server, listener)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
        listener.close()


async def serve(config: EngineConfig, host: str, port: int) -> int:
    """Run one server until it is told to end; the exit code. Ctrl-C ends it at once."""
    async with running_engine(config, host=host, port=port) as engine:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, engine.terminate)
        loop.add_signal_handler(signal.SIGINT, engine.kill)
        print(
            f"{config.role.value} engine on {engine.url}: {engine.core.curve.label},"
            f" {engine.core.curve.tokens_per_step:g} tokens a step, at most {config.cap} running"
            f" (simulated SGLang {config.version})",
            flush=True,
        )
        await engine.stopped.wait()
        return FAILED if engine.server.crashed else OK


def _default_headers() -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(usegmt=True).encode()), (b"server", b"uvicorn")]


__all__ = ["ConfigError", "EngineConfig", "RunningEngine", "running_engine", "serve"]
