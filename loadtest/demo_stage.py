"""What the demo runs on: two simulated servers on one simulated GPU, and a real router before them.

Every port is one that the system picked: each process listens on port 0 and says what it got, so
nothing can be taken in between.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any, Final, Self

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from loadtest.children import Child, ChildError, Children
from loadtest.verdict import Decided, DecisionPage, Line
from router.load import Role

PAIR: Final = "planted-12"
MODEL: Final = "sim-llama-8b"
LINE: Final = Line(threshold=12, band=0.2, dwell=2.0)

START_S: Final = 20.0  # a busy machine imports slowly
SETTLE_S: Final = 2.0  # from the last byte to the last count
POLL_S: Final = 0.05
ENGINE_URL: Final = r"engine on (http://\S+?):? "
LISTENING: Final = r"listening on port (\d+), admin on port (\d+)"


class Stage(msgspec.Struct, frozen=True):
    """Where everything listens."""

    engines: dict[Role, str]
    public: str
    admin: str
    admin_key: str


def set_up(children: Children, directory: Path) -> Stage:
    """Start all three processes and wait until they listen. Raises ChildError."""
    lock = directory / "gpu"
    engines: dict[Role, Child] = {
        role: children.start(
            f"{role.value} server",
            "loadtest",
            "engine",
            *("--port", "0", "--role", role.value, "--curve", PAIR, "--model", MODEL),
            *("--gpu-lock", str(lock), "--health-seconds", "0.05", "--shutdown-poll", "0.05"),
        )
        for role in Role
    }
    urls = {role: child.wait_for(ENGINE_URL, START_S)[1] for role, child in engines.items()}
    key = secrets.token_urlsafe(16)
    router = children.start(
        "router",
        "router",
        "serve",
        *("--speculative", urls[Role.SPECULATIVE], "--baseline", urls[Role.BASELINE]),
        *("--threshold", f"{LINE.threshold:g}", "--scope", "total"),
        *("--band", f"{LINE.band:g}", "--dwell", f"{LINE.dwell:g}s"),
        *("--port", "0", "--admin-port", "0", "--no-access-log"),
        *("--drain-delay", "0", "--drain-timeout", "1s"),
        env={"CROSSOVER_ADMIN_KEY": key},
    )
    ports = router.wait_for(LISTENING, START_S)
    return Stage(urls, f"http://127.0.0.1:{ports[1]}", f"http://127.0.0.1:{ports[2]}", key)


class Operator:
    """Reads and changes the router by its admin listener, and asks the servers for their counts."""

    def __init__(self, stage: Stage, children: Children) -> None:
        self._stage = stage
        self._children = children
        self._client = httpx.AsyncClient(
            trust_env=False,  # a proxy for the world is none for loopback
            headers={"authorization": f"Bearer {stage.admin_key}"},
            timeout=10.0,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def until_ready(self) -> None:
        """Wait until both servers may get work. Raises ChildError."""
        for _ in range(int(START_S / POLL_S)):
            status = await self.status()
            if all(each["usable"] and each["health"] == "up" for each in status["backends"]):
                return
            await asyncio.sleep(POLL_S)
        raise ChildError(f"the router did not find both servers ready within {START_S:g} s")

    async def status(self) -> dict[str, Any]:
        """The router's /status."""
        return msgspec.json.decode(await self._get(self._stage.admin, "/status"), type=dict)

    async def set_policy(self, name: str) -> None:
        """Decide by this policy from now on."""
        await self._call("POST", self._stage.admin, "/policy", {"policy": name})

    async def take_decisions(self, limit: int = 1000) -> list[Decided]:
        """The newest decisions, oldest first."""
        data = await self._get(self._stage.admin, f"/decisions?limit={limit}")
        items = msgspec.json.decode(data, type=DecisionPage).items
        return [item for item in reversed(items) if isinstance(item, Decided)]

    async def counts(self) -> dict[str, int]:
        """What is counted as in flight now, by the router and by each server itself."""
        found: dict[str, int] = {}
        text = (await self._get(self._stage.admin, "/metrics")).decode()
        for family in text_string_to_metric_families(text):
            if family.name == "crossover_in_flight":
                for sample in family.samples:
                    found[f"router, {sample.labels['backend']}"] = int(sample.value)
        for role, url in self._stage.engines.items():
            load = msgspec.json.decode(await self._get(url, "/v1/loads"))["loads"][0]
            running = load["num_running_reqs"] + load["num_waiting_reqs"]
            found[f"{role.value} server"] = running
        return found

    async def counts_at_rest(self) -> dict[str, int]:
        """The same, after they had a moment to come to zero."""
        counts = await self.counts()
        for _ in range(int(SETTLE_S / POLL_S)):
            if not any(counts.values()):
                break
            await asyncio.sleep(POLL_S)
            counts = await self.counts()
        return counts

    async def _get(self, base: str, path: str) -> bytes:
        return await self._call("GET", base, path)

    async def _call(self, method: str, base: str, path: str, body: object = None) -> bytes:
        try:
            answer = await self._client.request(method, base + path, json=body)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            for _ in range(10):  # a process's connections are cut a moment before it has ended
                self._children.check()
                await asyncio.sleep(POLL_S)
            said = str(error) or type(error).__name__
            raise ChildError(f"{method} {base}{path}: {said}") from error
        return answer.content
