"""One table of live comparisons that ran in turns through several routers (`measure.sh controls`).

    python together.py results/controls

Reads DIR/ARM-LOAD/compare.json; the standard library alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def rows(folder: Path) -> list[tuple[float, str, dict[str, Any]]]:
    """Load, arm and outcome, the lowest load first."""
    found: list[tuple[float, str, dict[str, Any]]] = []
    for path in folder.glob("*/compare.json"):
        arm, _, load = path.parent.name.rpartition("-")  # its policy is in the arm's name
        told = json.loads(path.read_bytes())["outcomes"]
        found += [(float(load), arm, outcome) for outcome in told]
    return sorted(found, key=lambda row: row[:2])


def figure(told: dict[str, Any], digits: int) -> str:
    """A value, and half its interval where there is one."""
    text = f"{told['value']:.{digits}f}"
    if told.get("low") is None or told.get("high") is None:
        return text
    return f"{text} ±{(told['high'] - told['low']) / 2:.{digits}f}"


def table(folder: Path) -> list[str]:
    """The lines of the table."""
    lines = [
        "| in flight | servers | tok/s | ms/token | speculative | failed |",
        "| --- " * 6 + "|",
    ]
    for load, arm, told in rows(folder):
        share = f"{told['speculative_share']:.0%}"
        speed, time = figure(told["tok_s"], 0), figure(told["ms_per_token"], 2)
        lines.append(f"| {load:g} | {arm} | {speed} | {time} | {share} | {told['errors']} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]))))
