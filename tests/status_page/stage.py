"""A simulated pair with a calibration, the router before it, and a load that can be turned up.

The two servers share one simulated GPU, as on one host; their curves cross at 12 requests. What the
calibration holds is what the servers really do, so the page's curves and the traffic agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx

from loadtest.curve_files import shipped_curve
from loadtest.engine import RunningEngine, running_engine
from loadtest.engine_config import EngineConfig
from router.load import ROLES, Role
from tests.stack import Stack, running_router, until

PAIR: Final = "planted-12"
CROSSOVER: Final = 12


def calibration(time_scale: float = 1.0, **fields: Any) -> dict[str, Any]:
    """The calibration of the planted pair, so many times as slow, as a calibrator writes it."""
    return {
        "schema": "crossover.calibration/1",
        "verdict": "at",
        "frontier": {"scope": "total", "threshold": CROSSOVER},
        "interval": [10, 14],
        "switch": {"band": 0.2, "dwell": 1},
        "fingerprint": {"model": "/models/target", "speculative.page_size": 1},
        "created": "2026-11-28T09:12:44+00:00",
        "curves": {role.value: {"points": _points(role, time_scale)} for role in ROLES},
        **fields,
    }


def _points(role: Role, time_scale: float) -> list[dict[str, float]]:
    curve = shipped_curve(PAIR, role)
    tokens = curve.tokens_per_step
    return [
        {
            "concurrency": n,
            "tokens_per_second": round(n * tokens / step_s / time_scale, 1),
            "accept_length": tokens,
        }
        for n, step_s in curve.points
    ]


class Load:
    """Clients that ask again as soon as they are answered; `turn` says how many."""

    def __init__(self, url: str, *, tokens: int) -> None:
        """`tokens` per answer."""
        self._client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0)
        self._tokens = tokens
        self._clients: list[asyncio.Task[None]] = []
        self.answers = 0

    async def turn(self, clients: int) -> None:
        """So many clients from now on; those that are sent away leave in the middle."""
        while len(self._clients) < clients:
            self._clients.append(asyncio.create_task(self._ask_on(len(self._clients))))
        gone, self._clients = self._clients[clients:], self._clients[:clients]
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)

    async def close(self) -> None:
        """All clients leave."""
        await self.turn(0)
        await self._client.aclose()

    async def _ask_on(self, number: int) -> None:
        body = {
            "model": "sim-llama-8b",
            "messages": [{"role": "user", "content": f"client {number}: tell me of a river"}],
            "max_tokens": self._tokens + number % 7,
            "ignore_eos": True,
        }
        while True:
            with contextlib.suppress(httpx.HTTPError):
                await self._client.post("/v1/chat/completions", json=body)
                self.answers += 1
            await asyncio.sleep(0.01)


class Played:
    """Everything that runs."""

    def __init__(self, stack: Stack, engines: dict[Role, RunningEngine], load: Load) -> None:
        self.stack = stack
        self.engines = engines
        self.load = load


@contextlib.asynccontextmanager
async def stage(
    folder: Path,
    *,
    calibrated: bool = True,
    tokens: int = 24,
    time_scale: float = 0.5,
    **settings: Any,
) -> AsyncIterator[Played]:
    """Play for as long as the block runs. `folder` is for the calibration and the shared GPU."""
    if calibrated:
        path = folder / "calibration.json"
        path.write_text(json.dumps(calibration(time_scale)), encoding="utf-8")
        settings["calibration"] = str(path)
    else:
        settings.setdefault("threshold", CROSSOVER)
    configs = {
        role: EngineConfig.quick(
            role, time_scale=time_scale, gpu_lock=folder / "gpu", max_running_requests=48
        )
        for role in ROLES
    }
    async with (
        running_engine(configs[Role.SPECULATIVE]) as spec,
        running_engine(configs[Role.BASELINE]) as base,
        running_router(
            spec.url, base.url, ready_interval=0.2, health_interval=0.2, **settings
        ) as stack,
    ):
        health = stack.relay.health
        await until(lambda: health.status(Role.SPECULATIVE).health == 1)
        await until(lambda: health.status(Role.BASELINE).health == 1)
        load = Load(stack.url, tokens=tokens)
        try:
            yield Played(stack, {Role.SPECULATIVE: spec, Role.BASELINE: base}, load)
        finally:
            await load.close()
