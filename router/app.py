"""One router process: both listeners, the watchers, the sweep, and how it ends.

uvicorn's `Server` listens; its signal handling is not used, since two of them would fight over one
handler and each re-raises SIGTERM at the end (exit 143). The end goes in this order:

    SIGTERM   `/ready` and `/health` say 503 at once, new requests are still served for
              `drain_delay`, so that what is in front sees it first
              the public listener closes, running requests finish for up to `drain_timeout`
              what is left gets an explicit break
              the admin listener closes; exit 0

A second signal goes straight to the break.

Nothing about a request is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import resource
import signal
import socket
import ssl
import sys
from typing import TYPE_CHECKING, Final

import uvicorn
import uvloop

from router import __version__
from router.admin import create_admin_app
from router.calibration import CalibrationError
from router.exit_codes import EXIT_CANNOT_BIND, EXIT_CONFIGURATION, EXIT_OK
from router.frontend import OrdinaryProtocol, RelayProtocol
from router.listener import Listener
from router.logs import LineWriter, configure_logging
from router.pair import create_public_app
from router.relay import SWEEP_SECONDS
from router.status_live import Live
from router.status_view import policy_item
from router.wiring import Watchers, build_relay

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from fastapi import FastAPI

    from router.config import Settings

BACKLOG: Final = 4096  # asyncio's default of 100 loses SYNs when hundreds connect at once
BREAK_SECONDS: Final = 1.0  # how long a break may take to reach a client that reads
ADMIN_SECONDS: Final = 2.0  # for a scrape that runs at the very end

_log = logging.getLogger("crossover")


class BindError(OSError):
    """An address cannot be listened on."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises BindError with one line that says which address and why."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        msg = f"cannot listen on {host} port {port}: {error.strerror or error}"
        raise BindError(msg) from error
    sock.setblocking(False)
    return sock


class Router:
    """A router in this event loop. `start`, then `stop`; `serve` adds the process around it."""

    def __init__(
        self,
        settings: Settings,
        *,
        writer: LineWriter | None = None,
        sockets: tuple[socket.socket, socket.socket] | None = None,
    ) -> None:
        """`sockets` are bound ones for the public and the admin listener.

        Raises BindError, and what `build_relay` raises.
        """
        self.settings = settings
        self.writer = writer or LineWriter()
        loop = asyncio.get_running_loop()
        self.relay = build_relay(settings, self.writer, call_later=loop.call_later)
        if sockets is None:
            sockets = bind_both(settings)
        self._sockets = sockets
        self._public = self._listener(
            create_public_app(self.relay), RelayProtocol, tls=settings.ssl_certfile is not None
        )
        self._watchers = Watchers(self.relay)
        self.live = Live(self.relay)
        admin = create_admin_app(self.relay, pair=self._watchers.pair.state, live=self.live)
        self._admin = self._listener(admin, OrdinaryProtocol, tls=False)
        self.relay.connections = self._public.server_state.connections  # type: ignore[assignment]
        self.relay.files.limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.relay.admin_connections = self._admin.server_state.connections  # type: ignore[assignment]
        self._tasks: list[asyncio.Task[None]] = []
        self._public_task: asyncio.Task[None] | None = None
        self._admin_task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port of the public listener."""
        port: int = self._sockets[0].getsockname()[1]
        return port

    @property
    def admin_port(self) -> int:
        """The port of the admin listener."""
        port: int = self._sockets[1].getsockname()[1]
        return port

    def _listener(self, app: FastAPI, protocol: type[RelayProtocol], *, tls: bool) -> Listener:
        settings = self.settings
        config = uvicorn.Config(
            app,
            http=functools.partial(protocol, self.relay),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=[("server", "crossover")],
            backlog=BACKLOG,
            ssl_certfile=settings.ssl_certfile if tls else None,
            ssl_keyfile=settings.ssl_keyfile if tls else None,
        )
        config.load()
        return Listener(config)

    async def start(self) -> None:
        """Listen, and begin to watch the backends.

        Raises CalibrationError when the calibration is seen to be of another pair.
        """
        try:
            await self._watchers.vet()
        except CalibrationError:
            await self._close()
            raise
        self._admin_task = self._spawn(self._admin.serve([self._sockets[1]]))
        self._public_task = self._spawn(self._public.serve([self._sockets[0]]))
        for run in self._watchers.runs:
            self._tasks.append(self._spawn(run.run()))
        self._tasks.append(self._spawn(self._sweep()))
        while not (self._public.started and self._admin.started):
            for task in (self._public_task, self._admin_task):
                if task.done():
                    await task
            await asyncio.sleep(0.005)
        fields = {
            "version": __version__,
            "host": self.settings.host,
            "port": self.port,
            "admin_host": self.settings.admin_host,
            "admin_port": self.admin_port,
            "speculative": str(self.settings.speculative),
            "baseline": str(self.settings.baseline),
            "policy": policy_item(self.relay).model_dump(
                mode="json", exclude={"configured", "side", "side_for"}
            ),
        }
        _log.info(
            "listening on port %d, admin on port %d", self.port, self.admin_port, extra=fields
        )

    async def stop(self, *, now: asyncio.Event | None = None) -> None:
        """Drain and close, as the head of this file says; `now` cuts the waiting short."""
        hurry = now or asyncio.Event()
        self.relay.shared.draining = True
        _log.info("draining", extra={"in_flight": self.relay.tracker.in_flight})
        await _within(hurry.wait(), self.settings.drain_delay)
        self._public.leave()
        if self._public_task is not None:
            limit = asyncio.create_task(_within(hurry.wait(), self.settings.drain_timeout))
            await asyncio.wait({self._public_task, limit}, return_when=asyncio.FIRST_COMPLETED)
            limit.cancel()
            if not self._public_task.done():
                await self._break_what_is_left()
        await self._close()

    async def _break_what_is_left(self) -> None:
        left = self.relay.tracker.in_flight
        _log.warning("drain limit reached", extra={"in_flight": left})
        self.relay.abort_all()
        if self._public_task is not None:
            await asyncio.wait({self._public_task}, timeout=BREAK_SECONDS)
        for connection in list(self.relay.connections):
            connection.transport.abort()
        self._public.force_exit = True
        if self._public_task is not None:
            await asyncio.wait({self._public_task}, timeout=BREAK_SECONDS)

    async def _close(self) -> None:
        self.live.feed.close()
        self._admin.leave()
        if self._admin_task is not None:
            await asyncio.wait({self._admin_task}, timeout=ADMIN_SECONDS)
        every = [t for t in (self._public_task, self._admin_task) if t is not None] + self._tasks
        for task in every:
            task.cancel()
        await asyncio.gather(*every, return_exceptions=True)
        for client in self._watchers.clients:
            client.close()
        for pool in self.relay.pools.values():
            pool.close()
        for sock in self._sockets:
            sock.close()
        _log.info("stopped")
        self.relay.access_log.flush()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                self.relay.metrics.log_lines_dropped = self.writer.dropped
                self.relay.sweep(self.relay.clock())
                self.live.tick()
            except Exception:  # noqa: BLE001 (time must go on)
                _log.exception("sweep")


async def _within(work: Coroutine[Any, Any, object], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(work, seconds)


def bind_both(settings: Settings) -> tuple[socket.socket, socket.socket]:
    """The sockets of both listeners. Raises BindError."""
    public = bind(settings.host, settings.port)
    try:
        return public, bind(settings.admin_host, settings.admin_port)
    except BindError:
        public.close()
        raise


def raise_file_limit() -> None:
    """As many open files as the system lets this process have: each stream needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(settings: Settings, writer: LineWriter) -> int:
    router = Router(settings, writer=writer)
    asked, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if asked.is_set() else asked).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await router.start()
    gc.collect()
    gc.freeze()  # what lives as long as the process is not looked at again
    await asked.wait()
    await router.stop(now=hurry)
    return EXIT_OK


def serve(settings: Settings) -> int:
    """Run a router until SIGTERM or SIGINT; the exit code of the process."""
    raise_file_limit()
    writer = LineWriter()
    configure_logging(settings.log_level, writer)
    try:
        return uvloop.run(_serve(settings, writer))
    except BindError as error:
        sys.stderr.write(f"crossover: {error}: see --host, --port, --admin-host, --admin-port\n")
        return EXIT_CANNOT_BIND
    except CalibrationError as error:
        sys.stderr.write(f"crossover: {error}\n")
        return EXIT_CONFIGURATION
    except ssl.SSLError as error:
        sys.stderr.write(f"crossover: ssl_certfile, ssl_keyfile: {error.strerror or error}\n")
        return EXIT_CONFIGURATION
    finally:
        writer.close()
