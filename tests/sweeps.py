"""What the tests of the sweep share: records, points, and a server and a client in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.progress import Lines
from loadtest.prompts import Corpus, Lengths, Prompts, Tokenizer
from loadtest.record import RequestRecord
from loadtest.sweep import Asker, ConcurrencySweep, Target
from loadtest.sweep_files import SweepDirectory
from loadtest.sweep_level import Instruments, Progress
from loadtest.sweep_schema import Figure, Pace, Plan, Point, Server, Spread, Sweep, Workload
from loadtest.sweep_seen import Page
from router.acceptance import AcceptSample
from router.load import Role, Telemetry
from router.telemetry import Source
from tests.virtual_time import now

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
PACE = Pace(warm_up_s=1.0, window_s=10.0, most_window_s=40.0, most_warm_up_s=20.0)


def record(started: float, ended: float, **fields: Any) -> RequestRecord:
    """A complete answer of 100 tokens, half a second to the first."""
    usual: dict[str, Any] = {"id": "a", "run": "r", "level": 4, "status": 200}
    usual |= {"first_chunk": started + 0.5, "output_tokens": 100, "prompt_tokens": 20}
    return RequestRecord(**(usual | {"started": started, "ended": ended} | fields))


def point(**fields: Any) -> Point:
    """A point about which nothing is to be said."""
    some = Spread(1.0, Figure(1.0, 0.9, 1.1), Figure(2.0), Figure(3.0))
    usual: dict[str, Any] = {
        "role": SPEC, "number": 1, "run": "speculative-1-8", "level": 8, "measured_at": "then",
        "records": 60, "concurrency": 8.0, "window_start_s": 1.0, "window_s": 10.0,
        "requests": 50, "errors": 0, "output_tok_s": Figure(640.0, 600.0, 680.0),
        "requests_s": 5.0, "input_tokens": 100.0, "output_tokens": 128.0, "asked_tokens": 128.0,
        "ttft_s": some, "tpot_s": some, "latency_s": some, "accept_length": 2.5,
        "verify_steps": 2000.0, "cap": 48, "running": 7.9, "queued": 0.0, "most_running": 8,
        "most_queued": 0, "polls": 20, "cached_share": 0.02, "client_cpu": 0.2,
        "client_lag_s": 0.002,
    }  # fmt: skip
    return Point(**(usual | fields))


@dataclass
class FakeServer:
    """A server whose tokens take longer the more requests it runs; also its client and probe."""

    token_s: Callable[[int], float] = lambda _running: 0.02
    cap: int | None = 48
    accept: float | None = 2.0
    fails: Callable[[int], str | None] = lambda _number: None
    speaks: bool = True  # whether it tells anything of its load
    chats: list[dict[str, Any]] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0
    tokens: float = 0.0
    cut: int = 0

    async def chat(
        self, body: bytes, *, run: str = "", level: int | None = None, began: float = 0.0
    ) -> RequestRecord:
        wanted = json.loads(body)
        self.chats.append(wanted)
        self.runs.append(run)
        started, tokens = now(), wanted["max_tokens"]
        error = self.fails(len(self.chats))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.05)
            first = now()
            if error is None:
                await asyncio.sleep(tokens * self.token_s(self.running))
        except asyncio.CancelledError:
            self.cut += 1
            raise
        finally:
            self.running -= 1
        self.tokens += 0 if error else tokens
        return RequestRecord(
            id=f"{run}-{len(self.chats)}",
            run=run,
            level=level,
            started=started - began,
            first_chunk=first - began,
            ended=now() - began,
            status=503 if error else 200,
            prompt_tokens=10,
            output_tokens=None if error else tokens,
            error=error,
        )

    async def facts(self, role: Role, model: str | None) -> Server:
        return server(role, model=model or "m")

    async def look(self) -> Telemetry | None:
        if not self.speaks:
            return None
        return Telemetry(self.running, 0, now(), now(), Source.LOADS, max_running=self.cap)

    async def page(self) -> Page | None:
        if not self.speaks:
            return None
        steps = None if self.accept is None else self.tokens / self.accept
        accept = AcceptSample(None, self.running, self.tokens, steps)
        return Page(now(), accept, 1000.0, None)


def server(role: Role, **fields: Any) -> Server:
    usual: dict[str, Any] = {"model": "m", "url": f"http://{role.value}", "cap": 48}
    return Server(role=role, **(usual | {"speculates": role is SPEC} | fields))


class Notes(Lines):
    """Keeps what a measurement says of itself, and does something when a part goes on or has ended."""

    def __init__(
        self,
        ended: Callable[[str], None] = lambda _: None,
        goes: Callable[[], None] = lambda: None,
    ) -> None:
        self.begun: list[tuple[str, int, int]] = []
        self.progress: list[Progress] = []
        self.over: list[str] = []
        self.said: list[str] = []
        self._ended, self._goes = ended, goes

    def begins(self, title: str, done: int, of: int) -> None:
        self.begun.append((title, done, of))

    def goes(self, progress: Progress) -> None:
        self.progress.append(progress)
        self._goes()

    def ended(self, title: str, outcome: str) -> None:
        self.over.append(title)
        self._ended(title)

    def say(self, text: str) -> None:
        self.said.append(text)


def make_sweep(
    path: Path,
    servers: dict[Role, FakeServer],
    plan: Plan,
    *,
    pace: Pace = PACE,
    workload: Workload | None = None,
    prompts: Prompts | None = None,
    lengths: Lengths | None = None,
    notes: Notes | None = None,
    known: tuple[Server, ...] | None = None,
    cpu: Callable[[], float] = lambda: 0.0,
    salt: str = "abc",
) -> ConcurrencySweep:
    """A sweep of fake servers, to be run in virtual time."""
    path.mkdir(parents=True, exist_ok=True)
    workload = workload or Workload(prompts="corpus", output_tokens=50)
    facts = known or tuple(server(role) for role in servers)
    targets = [Target(fact, fake, fake) for fact, fake in zip(facts, servers.values(), strict=True)]
    asker = Asker(
        prompts or Corpus(workload.seed, Tokenizer(), marked=workload.unique),
        lengths or Lengths(workload.output_tokens),
        workload,
        salt=salt,
    )
    wanted = Sweep(
        created="2026-01-01T00:00:00+00:00", command="loadtest sweep", version="1",
        workload=workload, pace=pace, plan=plan, servers=facts,
    )  # fmt: skip
    return ConcurrencySweep(
        SweepDirectory(path),
        targets,
        asker,
        wanted,
        Instruments(now, asyncio.sleep, cpu),
        lambda: "2026-01-01T00:00:01+00:00",
        notes or Notes(),
    )
