"""A simulated pair with a real router, and what the live measurements are asked to do with it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.engine import EngineConfig, RunningEngine, running_engine
from loadtest.live_load import Wanted
from loadtest.live_run import Options
from loadtest.live_schema import Offered
from loadtest.sweep_schema import Pace
from router.policy import FixedPolicy, FrontierPolicy
from tests.stack import Stack, running_router
from tests.sweeps import BASE, SPEC

KEY = "an-admin-key"
NOBODY = ("http://127.0.0.1:9", "http://127.0.0.1:10")
QUICK = Pace(warm_up_s=0.1, window_s=0.3, most_window_s=1.0, per_slot=1, poll_s=0.05)
THREE = ("baseline", "speculative", "frontier")


class Pair(NamedTuple):
    spec: RunningEngine
    base: RunningEngine
    stack: Stack


@contextlib.asynccontextmanager
async def pair(tmp_path: Path, *, time_scale: float = 0.05, **settings: Any) -> AsyncIterator[Pair]:
    """Two servers that share a GPU, with a router that has an admin key."""
    lock = tmp_path / "gpu"
    quick = {"time_scale": time_scale, "gpu_lock": lock}
    async with (
        running_engine(EngineConfig.quick(SPEC, **quick)) as spec,
        running_engine(EngineConfig.quick(BASE, **quick)) as base,
        running_router(spec.url, base.url, **({"admin_key": KEY, "threshold": 12} | settings)) as s,
    ):
        yield Pair(spec, base, s)


def options(stack: Stack, out: Path, **fields: Any) -> Options:
    usual: dict[str, Any] = {
        "url": stack.url, "admin_url": stack.admin_url, "admin_key": KEY, "policies": THREE,
        "wanted": Wanted(loads=(Offered(in_flight=2),), output_tokens=24, input_tokens=40),
        "out": out, "pace": QUICK, "settle_s": 3.0, "idle_s": 0.05,
    }  # fmt: skip
    return Options(**(usual | fields))


def policy_of(stack: Stack) -> tuple[Any, ...]:
    """What the router decides by, in full."""
    policy = stack.relay.policy
    if isinstance(policy, FrontierPolicy):
        line = policy.frontier
        return "frontier", line.scope, line.threshold, policy.band, policy.dwell
    return (policy.role.value,) if isinstance(policy, FixedPolicy) else (type(policy).__name__,)
