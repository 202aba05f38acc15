"""Writes a load that changes, for `loadtest compare --live --trace`: as heavy as a calibration allows.

    python changing.py calibration.json changing.csv --output-tokens 256

The rate steps between two values, each for --step seconds. They are what the better server answers
with a third of the line in flight, and nine tenths of what either can at twice the line (within the
levels that were measured): below and above the line, and never more than one server keeps up with.
The standard library alone, so that it runs wherever the servers do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

MOST: Final = 0.9  # of what a server can do
STEPS: Final = 10  # of both rates together, until the trace begins again


def speed(points: Sequence[dict[str, Any]], level: float) -> float:
    """Output tokens per second at a level: linear between the measured ones, flat beyond them."""
    known = sorted((p["concurrency"], p["tokens_per_second"]) for p in points)
    if level <= known[0][0]:
        return float(known[0][1] * level / known[0][0])
    for (left, low), (right, high) in itertools.pairwise(known):
        if level <= right:
            return float(low + (high - low) * (level - left) / (right - left))
    return float(known[-1][1])


def rates(calibration: dict[str, Any], output_tokens: float) -> tuple[float, float]:
    """Requests a second, below and above the line."""
    curves = [curve["points"] for curve in calibration["curves"].values() if curve]
    most = min(max(p["concurrency"] for p in points) for points in curves)
    line = calibration["frontier"].get("threshold")
    if not isinstance(line, int | float) or not 0 < line < most:
        line = most / 2
    low = max(speed(points, line / 3) for points in curves)
    high = MOST * max(speed(points, min(2 * line, most)) for points in curves)
    return min(low, high / 2) / output_tokens, high / output_tokens


def arrivals(
    low: float, high: float, step: float, prompt: int, output: int, seed: int
) -> Iterator[tuple[float, int, int]]:
    """When each request comes, and its lengths: Poisson, answers of half to one and a half times."""
    chance = random.Random(seed)
    at = 0.0
    while at < STEPS * step:
        rate = low if int(at / step) % 2 == 0 else high
        at += chance.expovariate(rate)
        yield at, prompt, chance.randint(math.ceil(output / 2), math.floor(1.5 * output))


def main() -> None:
    """Write the file and say what is in it."""
    parser = argparse.ArgumentParser(description="Write a load that changes.")
    parser.add_argument("calibration", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--step", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    low, high = rates(json.loads(asked.calibration.read_bytes()), asked.output_tokens)
    rows = arrivals(low, high, asked.step, asked.input_tokens, asked.output_tokens, asked.seed)
    lines = [f"{at:.4f},{prompt},{output}" for at, prompt, output in rows]
    asked.out.write_text("\n".join(["seconds,prompt,output", *lines]) + "\n", encoding="utf-8")
    print(f"{asked.out}: {low:.1f} and {high:.1f} requests a second, {asked.step:g} s each")


if __name__ == "__main__":
    main()
