"""`make policy-table`: every rule against both single servers, by arm and load, as RULES.md shows it.

A cell is one arrangement under one load of one arm: up to fifteen minutes of virtual time, about half
a second. What is done is in a cache file, one line a cell, with a digest of the code and data that
it was made with, so that an interrupted run goes on where it was and a change starts over.

How the cells are shown, and what they are compared with, is in `policy_table_text`.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import track

from loadtest.affinity_tried import KeepingPolicy
from loadtest.arms import ARMS, arm_curves, shipped_trace
from loadtest.clairvoyant import best_schedule
from loadtest.compare import (
    Arrangement,
    Load,
    Outcome,
    Pair,
    Playable,
    controls,
    plain,
    play,
    rules,
    singles,
    staying,
)
from loadtest.own_prompts import Talks, own_prompts_pair
from loadtest.policy_table_text import table_text
from loadtest.rules_tried import OfferedLoadPolicy, RegretPolicy
from loadtest.simulator_contention import H200, SEPARATE
from loadtest.simulator_load import Row, day, steps
from router.policies import make_policy
from router.rules import read_parameters

SCALES: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5)
TWO_SCALES: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.5, 9.0)
OWN_SCALES: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
TALK_SCALES: Final = (1.0, 2.0, 3.0, 4.0, 5.0)
STAY_SCALES: Final = (2.0, 3.0, 4.0, 6.0)
CAP_SCALES: Final = (2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
# Requests that SGLang runs at once when it speculates, unless it is told another number.
CAP: Final = 48
STEADY_S: Final = 300.0
CACHE: Final = Path("runs/policy-table.jsonl")
# What a cell depends on.
MADE_OF: Final = {
    "loadtest": (
        "affinity_tried.py", "arms.py", "clairvoyant.py", "compare.py", "own_prompts.py", "rules_tried.py", "service.py",
        "simulator.py", "simulator_contention.py", "simulator_load.py", "simulator_server.py", "smooth.py",
        "policy_table.py",
    ),
    "router": (
        "affinity.py", "frontier.py", "load.py", "offered.py", "policies.py", "policy.py", "rules.py", "speeds.py",
    ),
}  # fmt: skip


class Cell(msgspec.Struct, frozen=True):
    """One line of the cache."""

    digest: str
    part: str  # one, two, own, talk, stay, shared, cap
    arm: str
    outcome: Outcome


Job = tuple[str, str, str, str, Callable[[], Outcome]]  # part, arm, load, name


def steady(scales: Iterable[float]) -> list[Load]:
    """The loads that do not change, judged after the first minute."""
    return [Load(f"{scale:g}", scale, STEADY_S) for scale in scales]


def changing() -> list[Load]:
    """The loads that do, judged from the start."""
    return [
        Load("steps", steps((1.5, 6.5), 120.0), 960.0, 0.0),
        Load("day", day(1.0, 7.0, 900.0), 900.0, 0.0),
    ]


def measured_pair(arm: str, *, two: bool = False) -> Pair:
    """An arm, with the sweep's prefill in its step times."""
    speculative, baseline = arm_curves(arm)
    return Pair(
        speculative=speculative,
        baseline=baseline,
        contention=SEPARATE if two else H200,
        gpus=2 if two else 1,
        prompt_tokens=0,
    )


def tried(pair: Pair) -> list[Arrangement]:
    """Everything on one GPU."""
    given = read_parameters(pair.parameters)
    return [
        *singles(pair),
        *plain(pair)[1:],
        *rules(pair)[:3],
        Arrangement("offered load", "rule", pair.model, OfferedLoadPolicy(pair.levels, given)),
        Arrangement("regret", "rule", pair.model, RegretPolicy(pair.levels, given)),
    ]


def jobs(rows: Sequence[Row]) -> Iterator[Job]:
    """All cells, in the order of the text."""
    for arm in ARMS:
        pair = measured_pair(arm)
        found = tried(pair)
        for load in (*steady(SCALES), *changing()):
            for each in found:
                yield "one", arm, load.name, each.name, _playing(each, load, rows)
        for load in changing():
            yield "one", arm, load.name, "clairvoyant", _knowing(pair, load, rows)
    for arm in ARMS:
        pair = measured_pair(arm, two=True)
        found = [*singles(pair), *controls(pair), *plain(pair)[:2], *rules(pair)[-2:]]
        for load in steady(TWO_SCALES):
            for each in found:
                yield "two", arm, load.name, each.name, _playing(each, load, rows)
    for arm in ARMS:
        pair = own_prompts_pair(arm, rows)
        found = [*singles(pair), rules(pair)[2]]
        for load in steady(OWN_SCALES):
            for each in found:
                yield "own", arm, load.name, each.name, _playing(each, load, rows)
    for arm in ARMS:
        pair = own_prompts_pair(arm, rows, talks=True)
        found = [*singles(pair), *plain(pair)[1:2], rules(pair)[2]]
        for scale in TALK_SCALES:
            talks = Talks(f"{scale:g}", scale, STEADY_S)
            for each in found:
                yield "talk", arm, talks.name, each.name, _playing(each, talks, rows)

    yield from _staying_jobs(rows)


def _staying_jobs(rows: Sequence[Row]) -> Iterator[Job]:
    """Conversations that stay with their prefix: where it helps, and where it does not."""
    for arm in ARMS:
        pair = own_prompts_pair(arm, rows, talks=True, gpus=2)
        known = rules(pair)
        found = [*singles(pair), *controls(pair), known[0], *known[-2:], *staying(pair)]
        for scale in STAY_SCALES:
            talks = Talks(f"{scale:g}", scale, STEADY_S)
            for each in found:
                yield "stay", arm, talks.name, each.name, _playing(each, talks, rows)
    for arm in ARMS:
        pair = own_prompts_pair(arm, rows, talks=True)
        found = [*singles(pair), rules(pair)[2], *shared_tried(pair)]
        for talks in changing_talks():
            for each in found:
                yield "shared", arm, talks.name, each.name, _playing(each, talks, rows)
            yield "shared", arm, talks.name, "clairvoyant", _knowing(pair, talks, rows)
    for arm in ARMS:
        pair = capped(measured_pair(arm))
        found = [*singles(pair), *rules(pair)[:3]]
        for load in (*steady(CAP_SCALES), *changing()):
            for each in found:
                yield "cap", arm, load.name, each.name, _playing(each, load, rows)


def capped(pair: Pair) -> Pair:
    """The pair with a speculative server that runs `CAP` at most, measured up to there."""
    curve = pair.speculative
    kept = tuple(point for point in curve.points if point[0] <= CAP)
    return msgspec.structs.replace(
        pair, speculative=msgspec.structs.replace(curve, points=kept, max_running=CAP)
    )


def changing_talks() -> list[Talks]:
    """Conversations near the crossover, and of a load that changes."""
    return [
        Talks("3", 3.0, STEADY_S),
        Talks("4", 4.0, STEADY_S),
        Talks("steps", steps((1.0, 4.0), 120.0), 720.0, 0.0),
        Talks("day", day(1.0, 4.5, 600.0), 600.0, 0.0),
    ]


def shared_tried(pair: Pair) -> list[Arrangement]:
    """What keeping conversations on a shared GPU would come to."""
    found = []
    for seconds, name in ((3.0, "kept 3 s"), (math.inf, "kept always")):
        inner = make_policy("forecast", curves=pair.levels, parameters=pair.parameters)
        policy = KeepingPolicy(inner, seconds=seconds)
        found.append(Arrangement(f"forecast, {name}", "rule", pair.model, policy, remembers=True))
    return found


def _playing(each: Arrangement, load: Playable, rows: Sequence[Row]) -> Callable[[], Outcome]:
    return lambda: play(each, load, rows)


def _knowing(pair: Pair, load: Playable, rows: Sequence[Row]) -> Callable[[], Outcome]:
    return lambda: best_schedule(pair, load, rows)


def digest() -> str:
    """Of everything that a cell is made of."""
    found = hashlib.sha256()
    for package, names in MADE_OF.items():
        for name in names:
            found.update(resources.files(package).joinpath(name).read_bytes())
    for row in shipped_trace():
        found.update(repr(row).encode())
    for arm in ARMS:
        found.update(repr(arm_curves(arm)).encode())
    return found.hexdigest()[:16]


def read_cache(path: Path, made_of: str) -> dict[tuple[str, str, str, str], Outcome]:
    """The cells that were made with this code; a torn last line is left out."""
    found: dict[tuple[str, str, str, str], Outcome] = {}
    if not path.exists():
        return found
    for line in path.read_bytes().splitlines():
        try:
            cell = msgspec.json.decode(line, type=Cell)
        except msgspec.MsgspecError:
            continue
        if cell.digest == made_of:
            found[cell.part, cell.arm, cell.outcome.load, cell.outcome.name] = cell.outcome
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the cache and print the tables, in Markdown."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    path = Path(given[0]) if given else CACHE
    path.parent.mkdir(parents=True, exist_ok=True)
    made_of = digest()
    found = read_cache(path, made_of)
    rows = shipped_trace()
    missing = [job for job in jobs(rows) if job[:4] not in found]
    console = Console(stderr=True)
    with path.open("ab") as cache:
        for part, arm, load, name, work in track(missing, "Cells", console=console):
            outcome = work()
            found[part, arm, load, name] = outcome
            cell = Cell(made_of, part, arm, outcome)
            cache.write(msgspec.json.encode(cell) + b"\n")
            cache.flush()
    print(table_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
