"""What chaos is made on: a router, two servers that keep journals, and a load, each a process.

All times are monotonic seconds, which every process of a machine shares.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import httpx

from loadtest.children import Child, ChildError, Children
from router.load import Role
from tests.chaos.load import request_body
from tests.ports import free_port

START_S: Final = 30.0
POLL_S: Final = 0.05
PROMPTS: Final = 40
LISTENING: Final = r"listening on (\d+)"
ROUTER_LISTENING: Final = r'"port":\s*(\d+).*?"admin_port":\s*(\d+)'
KEY: Final = "sk-chaos-admin"


class Entry:
    """One line of a journal."""

    def __init__(self, line: str, role: Role) -> None:
        at, self.id, self.orders = line.split()
        self.at = float(at)
        self.role = role


class Backend:
    """One server, through all its lives."""

    def __init__(self, role: Role, children: Children, directory: Path, time_scale: float) -> None:
        self.role = role
        self.port = free_port()
        self.lives = 0
        self.child: Child
        self._children = children
        self._time_scale = time_scale
        self._journal = directory / f"{role}.journal"
        self._orders = directory / f"{role}.orders"
        self._journal.write_bytes(b"")  # not that of an earlier play

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> float:
        """Begin a life; when it listens. Raises ChildError."""
        self.lives += 1
        self.order("")
        self.child = self._children.start(
            f"{self.role} server {self.lives}",
            "tests.chaos.backend",
            *("--role", self.role, "--port", str(self.port), "--journal", str(self._journal)),
            *("--orders", str(self._orders), "--time-scale", f"{self._time_scale:g}"),
        )
        await asyncio.to_thread(self.child.wait_for, LISTENING, START_S)
        return time.monotonic()

    def send(self, number: signal.Signals) -> float:
        """Send a signal; when."""
        self.child.process.send_signal(number)
        return time.monotonic()

    async def ended(self, seconds: float) -> int | None:
        """The exit code, None if it has not ended in so many seconds."""
        limit = time.monotonic() + seconds
        while self.child.process.poll() is None and time.monotonic() < limit:
            await asyncio.sleep(POLL_S)
        return self.child.process.returncode

    def order(self, words: str) -> float:
        """Order a misbehaviour, or with no words its end; when."""
        aside = self._orders.with_suffix(".new")
        aside.write_text(words, encoding="ascii")
        aside.replace(self._orders)
        return time.monotonic()

    def journal(self) -> list[Entry]:
        """Every request that any of its lives has read."""
        lines = self._journal.read_text(encoding="ascii").splitlines()
        return [Entry(line, self.role) for line in lines]

    async def used_after(self, at: float, seconds: float) -> float | None:
        """How long after a moment it read a request; None if it did not for so many seconds."""
        while True:
            later = [entry.at for entry in self.journal() if entry.at >= at]
            if later:
                return min(later) - at
            if time.monotonic() > at + seconds:
                return None
            await asyncio.sleep(POLL_S)


class Stage:
    """All processes, and what can be asked of them."""

    def __init__(self, children: Children, directory: Path, *, clients: int) -> None:
        scale = max(0.3, clients / 200)
        self.directory = directory
        self.clients = clients
        self.backends = {role: Backend(role, children, directory, scale) for role in Role}
        self.router: Child
        self.port = self.admin_port = 0
        self._children = children
        self._expected = directory / "expected.json"
        self._client = httpx.AsyncClient(
            trust_env=False, timeout=10.0, headers={"authorization": f"Bearer {KEY}"}
        )

    async def start(self) -> None:
        """Start the servers and the router, and wait until it may use both. Raises ChildError."""
        await asyncio.gather(*(backend.start() for backend in self.backends.values()))
        await self._learn()
        urls = [backend.url for backend in self.backends.values()]
        self.router = self._children.start(
            "router", "router", "serve",
            *("--speculative", urls[0], "--baseline", urls[1], "--port", "0", "--admin-port", "0"),
            *("--threshold", "48", "--scope", "speculative", "--dwell", "500ms"),
            *("--drain-delay", "500ms", "--drain-timeout", "10s"),
            env={"CROSSOVER_ADMIN_KEY": KEY},
        )  # fmt: skip
        found = await asyncio.to_thread(self.router.wait_for, ROUTER_LISTENING, START_S)
        self.port, self.admin_port = int(found[1]), int(found[2])
        limit = time.monotonic() + START_S
        while not all(each["usable"] for each in (await self.ask("/status"))["backends"]):
            if time.monotonic() > limit:
                raise self.router.error(f"was not ready within {START_S:g} s")
            await asyncio.sleep(POLL_S)

    async def _learn(self) -> None:
        """Ask each server for the answer to each prompt; both must say the same."""
        prompts = [f"question {number} of the test" for number in range(PROMPTS)]
        told = [
            await asyncio.gather(*(self._answer(backend, prompt) for prompt in prompts))
            for backend in self.backends.values()
        ]
        if told[0] != told[1]:
            raise ChildError("the two servers do not give the same answers")
        expected = dict(zip(prompts, told[0], strict=True))
        self._expected.write_text(json.dumps(expected), encoding="utf-8")

    async def _answer(self, backend: Backend, prompt: str) -> str:
        answer = await self._client.post(
            f"{backend.url}/v1/chat/completions",
            content=request_body(prompt, "-", stream=False),
            headers={"content-type": "application/json"},
        )
        return str(answer.json()["choices"][0]["message"]["content"])

    def start_load(self, prefix: str) -> Child:
        """Begin a load whose request ids begin like this."""
        return self._children.start(
            f"load {prefix}", "tests.chaos.load",
            *("--port", str(self.port), "--clients", str(self.clients), "--prefix", prefix),
            *("--expected", str(self._expected), "--out", str(self.results(prefix))),
        )  # fmt: skip

    def results(self, prefix: str) -> Path:
        """Where a load writes what became of its requests."""
        return self.directory / f"{prefix}.results"

    async def end_load(self, load: Child) -> None:
        """Let it send nothing more and wait for what runs. Raises ChildError."""
        load.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(load.process.wait, 90)
        if code != 0:
            raise load.error(f"ended with exit code {code}")

    async def ask(self, path: str) -> Any:
        """A page of the admin listener."""
        answer = await self._client.get(f"http://127.0.0.1:{self.admin_port}{path}")
        answer.raise_for_status()
        return answer.json()

    async def last_decision(self, role: Role) -> float | None:
        """When the last request was sent to a backend, as monotonic seconds."""
        page = await self.ask(f"/decisions?backend={role}&limit=1")
        offset = time.monotonic() - time.time()
        times = [item["time"] + offset for item in page["items"] if item["kind"] == "decision"]
        return times[0] if times else None

    async def counts(self) -> dict[str, int]:
        """What is counted as in flight, by the router and by each server itself."""
        status = await self.ask("/status")
        found = {f"router: {each['role']}": each["in_flight"] for each in status["backends"]}
        for role, backend in self.backends.items():
            answer = await self._client.get(f"{backend.url}/v1/loads")
            load = answer.json()["loads"][0]
            found[f"{role} server"] = load["num_running_reqs"] + load["num_waiting_reqs"]
        return found

    async def counts_at_rest(self, seconds: float = 8.0) -> dict[str, int]:
        """The same, after they had a moment to come to zero."""
        limit = time.monotonic() + seconds
        while any((counts := await self.counts()).values()) and time.monotonic() < limit:
            await asyncio.sleep(POLL_S)
        return counts

    async def close(self) -> None:
        """Let go of what would keep a stopped process from ending."""
        await self._client.aclose()
        self.wake(self.backends.values())

    def wake(self, backends: Iterable[Backend]) -> None:
        """SIGCONT to each that runs."""
        for backend in backends:
            if backend.lives and backend.child.process.poll() is None:
                backend.send(signal.SIGCONT)
