"""Two pairs: four simulated servers in this process, and a router process in front of each two.

The routers are real `crossover serve` processes, because a pair is killed and drained here, by
signals to these processes and no others. The servers are in this process, so that a check can look
at what runs on them without asking over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx

from loadtest.engine import RunningEngine, running_engine
from loadtest.engine_config import EngineConfig
from tests.ports import free_port

KEY: Final = "sk-clients"
MODEL: Final = "sim-llama-8b"
START_S: Final = 20.0
POLL_S: Final = 0.02
# Half the speed of the planted pair: a stream of 64 tokens takes about half a second.
TIME_SCALE: Final = 0.5
DRAIN_DELAY: Final = "4s"  # above what any gateway here takes to see a 503 of /ready twice


def chat(prompt: str, tokens: int = 16, **fields: Any) -> dict[str, Any]:
    """The body of a chat request whose answer has so many tokens."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        **fields,
    }


class Pair:
    """One router and the two servers behind it."""

    def __init__(self, name: str, engines: list[RunningEngine], folder: Path) -> None:
        self.name = name
        self.engines = engines
        self.port = free_port()
        self.process: asyncio.subprocess.Process | None = None
        self._log = folder / f"{name}.log"

    @property
    def url(self) -> str:
        """The base URL of the router."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> int:
        """Requests inside the two servers whose answer is not complete."""
        return sum(engine.in_flight for engine in self.engines)

    def prompts(self) -> Counter[str]:
        """How often each prompt has reached one of the servers."""
        bodies = (json.loads(s.body) for e in self.engines for s in e.seen if s.method == "POST")
        return Counter(str(body["messages"][0]["content"]) for body in bodies)

    def served(self) -> int:
        """How many requests have reached the servers."""
        return self.prompts().total()

    async def start(self) -> None:
        """Start the router and wait until it says that it is ready."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("CROSSOVER_")}
        speculative, baseline = (engine.url for engine in self.engines)
        with self._log.open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "router", "serve",
                "--speculative", speculative, "--baseline", baseline,
                "--threshold", "8", "--port", str(self.port), "--admin-port", "0",
                "--drain-delay", DRAIN_DELAY, "--drain-timeout", "30s", "--ready-interval", "200ms",
                "--no-access-log",
                stdout=out, stderr=out, env=env | {"CROSSOVER_API_KEYS": KEY},
            )  # fmt: skip
        limit = time.monotonic() + START_S
        async with httpx.AsyncClient(trust_env=False, timeout=2) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/ready")).status_code == 200:
                        return
                assert time.monotonic() < limit, self._log.read_text(encoding="utf-8")
                await asyncio.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL to the router: its sockets are reset, and nobody listens."""
        assert self.process is not None
        self.process.kill()

    def terminate(self) -> None:
        """SIGTERM to the router: it drains."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Wait for the end of the router; its exit code."""
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), START_S)

    async def close(self) -> None:
        """End the router, however it is."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class Site:
    """Both pairs."""

    def __init__(self, pairs: list[Pair]) -> None:
        self.pairs = pairs

    @property
    def urls(self) -> list[str]:
        """Where the two routers listen."""
        return [pair.url for pair in self.pairs]

    @property
    def running(self) -> int:
        """Requests inside all four servers."""
        return sum(pair.running for pair in self.pairs)

    def forget(self) -> None:
        """Forget which requests were seen."""
        for pair in self.pairs:
            for engine in pair.engines:
                engine.server.seen.clear()

    async def expected(self, prompt: str, tokens: int) -> str:
        """What any of the servers answers to a prompt, as one says without anything in front."""
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            url = f"{self.pairs[0].engines[0].url}/v1/chat/completions"
            answer = await client.post(url, json=chat(prompt, tokens))
            return str(answer.json()["choices"][0]["message"]["content"])


@contextlib.asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    """Two pairs that serve, for as long as the block runs; logs go into `folder`."""
    async with contextlib.AsyncExitStack() as stack:
        pairs = []
        for name in ("pair1", "pair2"):
            engines = []
            for role in ("speculative", "baseline"):
                config = EngineConfig.quick(role, time_scale=TIME_SCALE, disconnect_poll_s=0.05)
                engine = await stack.enter_async_context(running_engine(config))
                engine.server.seen = deque(maxlen=100_000)
                engines.append(engine)
            pair = Pair(name, engines, folder)
            stack.push_async_callback(pair.close)
            pairs.append(pair)
        await asyncio.gather(*(pair.start() for pair in pairs))
        yield Site(pairs)


async def until(check: Any, seconds: float) -> float | None:
    """How many seconds until something held; None when it did not within the limit."""
    begun = time.monotonic()
    while not check():
        if time.monotonic() - begun > seconds:
            return None
        await asyncio.sleep(0.002)
    return time.monotonic() - begun
