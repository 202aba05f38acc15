"""Sweeps that were never run: drawn from planted curves, with the noise that real ones have.

Two servers whose steps take a + b n seconds; the crossover of their curves is known exactly
(`loadtest.service.crossover`). A measurement is off by 4 % (passes on one H200 differed by 2 to
9 %), and one in fifty loses 25 to 60 % to a stall, as one of those did.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from loadtest.points import Measured, Sweep
from loadtest.robust import Sample
from loadtest.service import ServiceCurve, crossover

LEVELS = (1, 2, 3, 4, 6, 8, 16, 32, 48, 64, 96, 128, 192, 256)
ACCEPT = 2.5


def server(label: str, floor_ms: float, per_request_ms: float, tokens: float = 1.0) -> ServiceCurve:
    """A server whose step takes `floor_ms` and a bit for each running request."""
    return ServiceCurve(
        label=label,
        source="planted",
        points=tuple((n, (floor_ms + per_request_ms * n) / 1e3) for n in (1, *range(8, 520, 8))),
        tokens_per_step=tokens,
    )


class Planted(NamedTuple):
    """A pair of servers, and where their curves cross."""

    speculative: ServiceCurve
    baseline: ServiceCurve
    noise: float = 0.04
    passes: int = 3

    @property
    def crossover(self) -> float:
        """Requests; 0 never, infinity always."""
        found = crossover(self.speculative, self.baseline)
        return math.inf if found is None else found


BASE = server("base", 5.0, 0.05)
PLANTED = {
    "never": Planted(server("slow draft", 14.0, 0.2, ACCEPT), BASE),
    "always": Planted(server("cheap draft", 6.0, 0.1, ACCEPT), BASE),
    "early": Planted(server("heavy verify", 9.0, 0.708, ACCEPT), BASE),
    "middle": Planted(server("topk 4", 6.5, 0.25, ACCEPT), BASE),
    "late": Planted(server("topk 1", 6.0, 0.125, ACCEPT), server("base", 5.0, 0.03)),
    "noisy": Planted(server("topk 4", 6.5, 0.25, ACCEPT), BASE, noise=0.06, passes=6),
    "tie": Planted(BASE, BASE),
}


def draw(
    curve: ServiceCurve,
    rng: random.Random,
    *,
    passes: int = 3,
    noise: float = 0.04,
    accidents: float = 0.02,
    levels: Sequence[int] = LEVELS,
) -> list[Sample]:
    """Several passes over the levels, in logarithms."""
    return [
        Sample(
            math.log(level),
            math.log(curve.tok_s(level))
            + rng.gauss(0.0, noise)
            + (math.log(rng.uniform(0.4, 0.75)) if rng.random() < accidents else 0.0),
        )
        for _ in range(passes)
        for level in levels
    ]


def sweep(
    curve: ServiceCurve,
    levels: Sequence[int] = LEVELS,
    *,
    scale: float = 1.0,
    cap: int | None = None,
) -> Sweep:
    """One pass without noise, as an importer would give it."""
    return Sweep(
        name=f"{curve.label}.json",
        kind="planted",
        points=tuple(
            Measured(
                concurrency=level,
                tokens_per_second=curve.tok_s(level) * scale,
                time_per_token=curve.step_s(level) / curve.tokens_per_step,
                ttft=0.02 + 0.001 * level,
                accept_length=curve.tokens_per_step if curve.tokens_per_step > 1 else None,
            )
            for level in levels
        ),
        facts={"prompt_tokens": 256, "output_tokens": 128},
        cap=cap,
    )
