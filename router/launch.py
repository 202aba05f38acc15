"""Starts both SGLang servers and the router on this host, keeps them running, and ends them.

    start     both servers (one after the other where they share a GPU without fixed pools), and
              the router when both are ready; the doctor then looks once
    a death   the router routes around it; the server is started again, later and later, for ever
    SIGTERM   (or SIGINT, SIGHUP) the router drains, then the servers get SIGTERM, then SIGKILL
    again     a second signal ends all at once

The router is a process of its own: it has its own signals, event loop and drain, so that stopping
it is one SIGTERM and a wait, and the chatter of two servers takes nothing from the relay's loop.
What to start was decided before (`launch_plan`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

import httpx

from router.asking import NoReply, fetch, probe_client
from router.doctor import Target
from router.exit_codes import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SERVER_ENDED,
)
from router.launch_backoff import Backoff
from router.launch_codes import CODE_OF
from router.launch_doctor import look
from router.launch_hints import hint_in
from router.launch_kept import Command, Keepers
from router.launch_plan import Address, Plan, ServerPlan
from router.launch_process import Name, State, Watched, meaning
from router.launch_secret_file import SecretFile
from router.launch_view import View, shown
from router.load import ROLES, Role

SHOWN_LINES: Final = 15
HEALTH_SECONDS: Final = 25.0  # SGLang's own check answers within 20 s, by design
PROGRESS_SECONDS: Final = 10.0  # between two plain lines of progress
MOVE_SECONDS: Final = 0.5  # between two moves of the line on a terminal
ROUTER_START: Final = 60.0
ROUTER_SLACK: Final = 10.0  # beyond its drain, for the break of what is left and its exit


class Job(NamedTuple):
    """All that a launch needs to know. Times in seconds."""

    plan: Plan
    router: Command
    router_address: tuple[str, int]
    router_url: str
    base_env: Mapping[str, str]
    drain: float  # the router's own: delay and limit together
    start_timeout: float
    stop_timeout: float
    restart_delay: float
    restart_delay_max: float
    keys: Mapping[Role, str | None]
    threshold: float | None
    secret_files: Mapping[Role, SecretFile] = {}
    words: Sequence[str] = ()


class Launch:
    """One launch, in this event loop."""

    def __init__(self, job: Job, view: View) -> None:
        self._job = job
        self._view = view
        self._asked = asyncio.Event()
        self._hurry = False
        self._broken = False
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: list[httpx.AsyncClient] = []
        self._keepers = Keepers()
        shared = None if job.plan.at_once else asyncio.Lock()
        self._servers = {
            server.role: self._server(server, shared or asyncio.Lock())
            for server in job.plan.servers
        }
        self._router = Watched(
            Name("router", "router"),
            lambda: job.router,
            self._listens,
            view.say,
            keepers=self._keepers,
            backoff=self._backoff(),
            start_seconds=ROUTER_START,
        )

    def _server(self, server: ServerPlan, gate: asyncio.Lock) -> Watched:
        client = probe_client(url_of(server.address), timeout=HEALTH_SECONDS)
        self._clients.append(client)

        async def healthy() -> bool:
            reply = await fetch(client, "health", clock=time.monotonic, within=HEALTH_SECONDS + 1)
            return not isinstance(reply, NoReply) and reply.status == 200

        def command() -> Command:
            other = next(each for role, each in self._servers.items() if role is not server.role)
            argv = server.beside if other.alive else server.command
            self._view.own(f"starting the {server.role} server: {shown(argv, server.env)}")
            file = self._job.secret_files.get(server.role)
            if file is not None:
                file.write()
            env = {**self._job.base_env, **server.env}
            return Command(argv, env, None if file is None else file.path)

        return Watched(
            Name(server.role.value, f"{server.role} server"),
            command,
            healthy,
            self._view.say,
            keepers=self._keepers,
            backoff=self._backoff(),
            start_seconds=self._job.start_timeout,
            gate=gate,
        )

    def _backoff(self) -> Backoff:
        return Backoff(self._job.restart_delay, self._job.restart_delay_max)

    async def _listens(self) -> bool:
        try:
            async with asyncio.timeout(1.0):
                _, writer = await asyncio.open_connection(*self._job.router_address)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    async def run(self) -> int:
        """Start, serve until told to stop, and stop. The exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal)
        for word in self._job.words:
            self._view.own(word)
        asked = loop.create_task(self._asked.wait())
        try:
            code = await self._up(asked)
            if code is None:
                await asked
                code = EXIT_OK
        finally:
            asked.cancel()
            await self._down()
        if self._broken:
            return EXIT_FAILURE
        return EXIT_INTERRUPTED if self._hurry else code

    def _on_signal(self) -> None:
        if self._asked.is_set():
            self._hurry = True
            for each in (self._router, *self._servers.values()):
                each.kill()
        self._asked.set()

    async def _up(self, asked: asyncio.Task[bool]) -> int | None:
        """None when all is up, or the exit code."""
        begun = time.monotonic()
        progress = self._spawn(self._progress())
        for each in self._servers.values():
            self._spawn(each.run())
        try:
            code = await self._first_of(list(self._servers.values()), asked)
        finally:
            progress.cancel()
            self._view.progress(None)
        if code is not None or self._asked.is_set():
            return code or EXIT_OK
        self._spawn(self._router.run())
        code = await self._first_of([self._router], asked)
        if code is not None or self._asked.is_set():
            return code or EXIT_OK
        took = time.monotonic() - begun
        self._view.own(f"ready after {took:.0f} s: {self._job.router_url}")
        self._spawn(self._look())
        return None

    async def _first_of(self, watched: list[Watched], asked: asyncio.Task[bool]) -> int | None:
        """Wait for the first start of each: None, or the exit code of the first that failed."""
        waiting = {each.first: each for each in watched}
        while waiting:
            all_of: set[asyncio.Future[Any]] = {asked, *waiting}
            done, _ = await asyncio.wait(all_of, return_when=asyncio.FIRST_COMPLETED)
            if asked in done:
                return None
            for first in [first for first in waiting if first.done()]:
                each, code = waiting.pop(first), first.result()
                if code is not None:
                    return self._failed(each, code)
        return None

    def _failed(self, each: Watched, code: int) -> int:
        say = self._view.own
        say(f"the {each.name.title} ended before it was ready ({meaning(code)})")
        if each is self._router:
            return code or EXIT_SERVER_ENDED
        hint = hint_in(each.tail)
        if hint is None:
            say("the end of its log:" if each.tail else "it printed nothing")
            for line in list(each.tail)[-SHOWN_LINES:]:
                say(f"  {line}")
            return EXIT_SERVER_ENDED
        say(f"  {hint.line}")
        say(f"to mend it: {hint.mend}")
        return CODE_OF.get(hint.cause, EXIT_SERVER_ENDED)

    async def _progress(self) -> None:
        pause = MOVE_SECONDS if self._view.moving else PROGRESS_SECONDS
        while True:
            await asyncio.sleep(pause)
            states = [
                f"{role} {each.state} {time.monotonic() - each.since:.0f} s"
                if each.state is State.STARTING
                else f"{role} {each.state}"
                for role, each in self._servers.items()
            ]
            self._view.progress("waiting for the servers: " + ", ".join(states))

    async def _look(self) -> None:
        job = self._job
        speculative, baseline = (
            Target(server.role, url_of(server.address), job.keys.get(server.role))
            for server in sorted(job.plan.servers, key=lambda server: ROLES.index(server.role))
        )
        environments = {each.role: {**job.base_env, **each.env} for each in job.plan.servers}
        for line in await look((speculative, baseline), environments, job.threshold):
            self._view.own(line)

    async def _down(self) -> None:
        job = self._job
        if any(each.alive for each in (self._router, *self._servers.values())):
            self._view.own("stopping: the router drains, then the servers end")
        await self._router.stop(job.drain + ROUTER_SLACK)
        await asyncio.gather(*(each.stop(job.stop_timeout) for each in self._servers.values()))
        runs, self._tasks = self._tasks, []
        for task in runs:
            if not task.done():
                await asyncio.wait({task}, timeout=1.0)
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        for client in self._clients:
            await client.aclose()
        for file in job.secret_files.values():
            file.remove()
        self._view.own("stopped")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An error of ours in one of the tasks ends the launch, in order."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._view.own(f"an error in the launcher itself: {error!r}")
            self._broken = True
            self._asked.set()


def url_of(address: Address) -> str:
    """Return the root of a server's routes."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"http://{host}:{address.port}"


async def launch(job: Job, view: View) -> int:
    """Run a launch to its end. The exit code."""
    return await Launch(job, view).run()
