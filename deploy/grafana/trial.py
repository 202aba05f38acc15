"""A simulated stack on loopback: two servers, a calibration of them, the router, and load.

What the dashboard's test looks at. Everything runs in this process; the servers are simulated, and
nothing here measures anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx

from loadtest.arrivals import Ramp
from loadtest.client import ChatClient, chat_body
from loadtest.closed_loop import ClosedRun
from loadtest.curve_files import shipped_curve
from loadtest.engine import EngineConfig, RunningEngine, running_engine
from loadtest.record import RequestRecord
from loadtest.service import ServiceCurve
from router.app import Router
from router.calibration import SCHEMA, Calibration, Line, Switch, format_calibration
from router.config import load_settings
from router.curves import Curve, Curves, Point
from router.fingerprint import read_fingerprint, together
from router.load import Role
from router.logs import LineWriter

PAIR: Final = "planted-12"
CROSSOVER: Final = 12
LEVELS: Final = (1, 2, 4, 8, 12, 16, 24, 32)
MOST: Final = 64  # at once, on either: two servers that differ in this are no fair pair
MODEL: Final = "sim-llama-8b"
# Tokens of an answer: short, so that they turn over several times a level.
TOKENS: Final = (16, 40)
PROMPT_TOKENS: Final = 20
SEED: Final = 12
# Every interval short, so that a minute shows what takes hours.
QUICK: Final[dict[str, object]] = {
    "pair_interval": 0.5,
    "calibration_interval": 0.2,
    "acceptance_smoothing": 3,
    "telemetry_interval": 0.1,
    "health_interval": 1,
    "drain_delay": 0,
    "drain_timeout": 1,
}


class Trial:
    """The running stack."""

    def __init__(
        self, router: Router, engines: dict[Role, RunningEngine], calibration: Path
    ) -> None:
        self.router = router
        self.engines = engines
        self.calibration = calibration
        self.url = f"http://127.0.0.1:{router.port}"
        self.admin = f"http://127.0.0.1:{router.admin_port}"

    @property
    def servers(self) -> dict[str, str]:
        """Addresses of the servers by role."""
        return {role.value: engine.url for role, engine in self.engines.items()}


async def load(url: str, levels: Sequence[int], seconds_each: float) -> list[RequestRecord]:
    """Keep so many requests in flight, level after level; the requests' records."""
    async with ChatClient(url) as client:

        async def send(number: int, _level: int) -> RequestRecord:
            tokens = random.Random(SEED * 1_000_003 + number).randint(*TOKENS)  # noqa: S311
            return await client.chat(chat_body(MODEL, f"Question {number}: why?", tokens))

        return await ClosedRun(Ramp(levels, seconds_each), send, time.monotonic).run()


@contextlib.asynccontextmanager
async def running_trial(
    directory: Path, *, time_scale: float = 1.0, dwell: float = 2.0, **settings: Any
) -> AsyncIterator[Trial]:
    """The stack for as long as the block runs. `time_scale`: 0.1 makes the servers 10 times as fast."""
    speculative, baseline = (
        EngineConfig(
            role=role,
            gpu_lock=directory / "gpu",
            max_running_requests=MOST,
            time_scale=time_scale,
            health_s=0.05,
            shutdown_poll_s=0.05,
        )
        for role in Role
    )
    async with running_engine(speculative) as one, running_engine(baseline) as other:
        engines = {Role.SPECULATIVE: one, Role.BASELINE: other}
        path = directory / "calibration.json"
        urls = {role: engine.url for role, engine in engines.items()}
        document = await calibration_of(urls, time_scale=time_scale, dwell=dwell)
        await asyncio.to_thread(path.write_bytes, document)
        values: dict[str, object] = {
            "speculative": one.url,
            "baseline": other.url,
            "port": 0,
            "admin_port": 0,
            "calibration": path,
            **QUICK,
            **settings,
        }
        writer = LineWriter(lambda _line: None)
        router = Router(load_settings(values, environ={}), writer=writer)
        await router.start()
        try:
            yield Trial(router, engines, path)
        finally:
            await router.stop()
            await asyncio.to_thread(writer.close)


async def calibration_of(
    urls: Mapping[Role, str], *, time_scale: float = 1.0, dwell: float = 2.0
) -> bytes:
    """What a calibrator would write of this pair, from the curves that it is planted with."""
    facts = {}
    async with httpx.AsyncClient(trust_env=False) as client:
        for role, url in urls.items():
            answer = await client.get(url + "/server_info")
            facts[role] = read_fingerprint(role, answer.content)
    speculative, baseline = (_curve(shipped_curve(PAIR, role), time_scale) for role in Role)
    found = Calibration(
        SCHEMA,
        Line("total", CROSSOVER),
        verdict="at",
        switch=Switch(band=0.2, dwell=dwell),
        fingerprint=together(facts[Role.SPECULATIVE], facts[Role.BASELINE]),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        note="planted: made up for a picture and a test",
        curves=Curves(speculative, baseline),
    )
    return format_calibration(found)


def _curve(curve: ServiceCurve, time_scale: float) -> Curve:
    tokens = sum(TOKENS) // 2
    speculates = curve.tokens_per_step > 1
    return Curve(
        tuple(
            Point(
                float(level),
                curve.closed_loop_tok_s(level, PROMPT_TOKENS, tokens) / time_scale,
                accept_length=curve.tokens_per_step if speculates else None,
            )
            for level in LEVELS
        )
    )
