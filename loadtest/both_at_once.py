"""Both servers under load at once: what each still does, to learn whether they share a GPU.

Measured like a level of a sweep, on both servers at the same time: the windows open when both are
warm. Only the time in which both were open counts, since a server whose partner has stopped is alone
again. What is measured is kept in `both.json` beside the sweep, so a run that was stopped goes on.
What the figures mean for the line is not asked here (`contention`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from loadtest.contention import Both
from loadtest.import_own import sweeps_of
from loadtest.on_disk import replace_document
from loadtest.points import Measured
from loadtest.points import Sweep as Level
from loadtest.sweep import Asker, Target
from loadtest.sweep_level import Instruments, LevelRun, Outcome
from loadtest.sweep_phases import Meeting
from loadtest.sweep_schema import Pace, Sweep, SweepError
from loadtest.sweep_seen import accept_length
from loadtest.sweep_turns import Step, Turn
from router.load import Role

BOTH: Final = "both.json"
APART: Final = 1000  # beyond the passes of any sweep, so that no prompt is sent twice
SHORTEST: Final = 0.5  # of the window: an overlap below it says too little


class TooShortError(SweepError):
    """Two servers that were not measured at the same time for long enough."""


class Overlapped(msgspec.Struct, frozen=True):
    """One pair of levels, n on the speculative server and m on the baseline."""

    n: int
    m: int
    seconds: float  # in which both were measured
    speculative: float  # output tokens per second of each
    baseline: float
    accept_length: float | None = None  # of the speculative server meanwhile


def pairs_of(levels: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """A small grid: low, middle and high levels on both, and one lopsided pair."""
    rising = sorted(set(levels))
    low, middle, high = (rising[round(share * (len(rising) - 1))] for share in (0.25, 0.5, 0.75))
    return tuple(dict.fromkeys([(low, low), (middle, middle), (high, high), (low, high)]))


class BothAtOnce:
    """Measures pairs of levels on two targets."""

    def __init__(
        self,
        directory: Path,
        targets: Sequence[Target],
        asker: Asker,
        pace: Pace,
        tools: Instruments,
    ) -> None:
        """Raises SweepError when what is in the directory cannot be read."""
        self._path = directory / BOTH
        self._targets = {target.role: target for target in targets}
        self._asker = asker
        self._pace = msgspec.structs.replace(pace, most_window_s=pace.window_s, per_slot=0.0)
        self._tools = tools
        self.found = self._read()

    async def run(
        self, pairs: Sequence[tuple[int, int]], tell: Callable[[str], None]
    ) -> tuple[Overlapped, ...]:
        """Measure the pairs that are not there yet."""
        known = {(each.n, each.m) for each in self.found}
        for number, (n, m) in enumerate(pairs):
            if (n, m) in known:
                continue
            tell(f"both at once, {n} : {m}")
            try:
                measured = await self._pair(number, n, m)
            except TooShortError as error:
                tell(f"left out: {error}")  # hours of sweeps do not hang on one pair of levels
                continue
            self.found = (*self.found, measured)
            replace_document(self._path, self.found)
        return self.found

    async def _pair(self, number: int, n: int, m: int) -> Overlapped:
        meeting = Meeting(2)
        one, other = await asyncio.gather(
            self._level(Role.SPECULATIVE, number, n, meeting),
            self._level(Role.BASELINE, number, m, meeting),
        )
        start = max(one.window.start, other.window.start)
        end = min(one.window.end, other.window.end)
        if end - start < SHORTEST * self._pace.window_s:
            raise TooShortError(
                f"both at once, {n} : {m}: the windows overlapped for only {end - start:.1f} s;"
                " give longer ones by --seconds"
            )
        return Overlapped(
            n, m, end - start, _speed(one, start, end), _speed(other, start, end),
            accept_length(one.seen),
        )  # fmt: skip

    async def _level(self, role: Role, number: int, level: int, meeting: Meeting) -> Outcome:
        target = self._targets[role]
        turn = Turn(APART + number, Step(level=level), role)
        run = LevelRun(
            target.client, target.probe, self._pace, self._tools, seed=number, meeting=meeting
        )
        return await run.run(
            turn.step, f"both-{turn.run}", lambda at: self._asker.ask(target.server, turn, at)
        )

    def _read(self) -> tuple[Overlapped, ...]:
        return read_overlaps(self._path) if self._path.exists() else ()


def read_overlaps(path: Path) -> tuple[Overlapped, ...]:
    """What such a file holds. Raises SweepError, OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Overlapped, ...])
    except msgspec.MsgspecError as error:
        raise SweepError(f"{path} cannot be read: {error}; remove it") from error


def _speed(outcome: Outcome, start: float, end: float) -> float:
    tokens = sum(r.tokens_between(start, end) for r in outcome.records if r.ok)
    return tokens / (end - start)


def as_runs(found: Sequence[Overlapped], sweep: Sweep) -> list[Both]:
    """In the form that the fit reads; `sweep` says what the servers are."""
    facts = {each.role: each.facts for each in sweeps_of(sweep, "sweep.json")}

    def level(role: Role, concurrency: int, speed: float, accept: float | None) -> Level:
        point = Measured(concurrency=concurrency, tokens_per_second=speed, accept_length=accept)
        return Level(
            name=f"both at once, {role}", kind="both at once", points=(point,),
            facts=facts.get(role, {}), role=role,
        )  # fmt: skip

    return [
        Both(
            each.n,
            each.m,
            level(Role.SPECULATIVE, each.n, each.speculative, each.accept_length),
            level(Role.BASELINE, each.m, each.baseline, None),
        )
        for each in found
    ]
