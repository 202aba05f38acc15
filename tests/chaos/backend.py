"""A simulated SGLang server that keeps a journal and misbehaves on order.

    python -m tests.chaos.backend --role speculative --port 0 --journal FILE --orders FILE

It is `loadtest engine` and three things more. Each request that was read whole is one line of the
journal, written before anything else is done with it, so that SIGKILL takes none away: monotonic
seconds, request id, orders in force. And the words in the file of orders are obeyed, as soon as
they are there and until they are gone:

    failing    a 500 for every request, at once: the server that attracts load by failing fast
    refusing   the queue is full: 503, which a stream wraps in a 200
    lying      telemetry that no sum holds for: a million requests, or none, in turn
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

import uvloop

from loadtest.clock import RealClock
from loadtest.engine import RunningEngine
from loadtest.engine_config import EngineConfig
from loadtest.engine_core import EngineCore, LoadReport
from loadtest.engine_server import Seen, SimulatedServer
from loadtest.gpu_share import OwnGpu
from router.load import Role

LOOK_S: Final = 0.02  # between two looks at the orders
NONE: Final = "none"


class LyingCore(EngineCore):
    """Tells of its load what is not so, while it is ordered to."""

    lies = 0
    lying = False

    def load(self) -> LoadReport:
        """The last report, or a lie."""
        if not self.lying:
            return super().load()
        self.lies += 1
        many = 1_000_000 * (self.lies % 2)
        return LoadReport(at=time.monotonic(), running=many, waiting=many)


class Journal(deque[Seen]):
    """In place of the memory of a simulated server: writes down what it is told to remember."""

    def __init__(self, path: Path) -> None:
        super().__init__(maxlen=1)
        self.orders = NONE
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, seen: Seen, /) -> None:
        """One request was read whole."""
        if seen.method == "POST":
            name = seen.headers.get("x-request-id", "-")
            os.write(self._file, f"{time.monotonic():.6f} {name} {self.orders}\n".encode())


async def obey(engine: RunningEngine, core: LyingCore, journal: Journal, path: Path) -> None:
    """Do what the file of orders says."""
    told = ""
    limit = core.batch.max_queued
    while True:
        words = path.read_text(encoding="ascii").strip() if path.exists() else ""  # noqa: ASYNC240 (a few bytes)
        if words != told:
            told = words
            engine.failing = "failing" in words
            # Fewer than none may wait: the queue is full even for a server with nothing to do.
            core.batch.max_queued = -1_000_000 if "refusing" in words else limit
            core.lying = "lying" in words
            journal.orders = ",".join(words.split()) or NONE
        await asyncio.sleep(LOOK_S)


async def serve(told: argparse.Namespace) -> None:
    """One server, until it is told to end."""
    config = EngineConfig(
        role=Role(told.role), time_scale=told.time_scale, health_s=0.05, shutdown_poll_s=0.2
    )
    clock = RealClock()
    core = LyingCore(config, clock, OwnGpu())
    server = SimulatedServer(config, clock, core)
    server.seen = journal = Journal(told.journal)
    with socket.create_server(("127.0.0.1", told.port), backlog=2048) as listener:
        engine = RunningEngine(server, listener)
        await engine.start()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, engine.terminate)
        obedience = loop.create_task(obey(engine, core, journal, told.orders))
        sys.stdout.write(f"listening on {engine.port}\n")
        sys.stdout.flush()
        await engine.stopped.wait()
        obedience.cancel()
        await asyncio.gather(obedience, return_exceptions=True)
        await engine.close()


def main(arguments: list[str]) -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.backend")
    parser.add_argument("--role", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--orders", type=Path, required=True)
    parser.add_argument("--time-scale", type=float, default=1.0)
    uvloop.run(serve(parser.parse_args(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
