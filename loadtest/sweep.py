"""`ConcurrencySweep`: every level on every server, several times over, and on disk after each.

Requests are the same for all servers of a level, and new for each pass (`prompts`). In a closed
loop the first request of each slot asks for a random part of its answer, so that slots do not stay
in step when all answers are of one length: in step, all would be in prefill at the same time, which
no user's requests are.

What the figures are is `summary`'s to say, and what makes them doubtful `notices`'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from loadtest import notices
from loadtest.client import chat_body
from loadtest.progress import Lines
from loadtest.prompts import Lengths, Place, Prompts, mark
from loadtest.summary import Measured, combine, make_point
from loadtest.sweep_files import SweepDirectory
from loadtest.sweep_level import (
    Asked,
    Client,
    Instruments,
    LevelRun,
    Outcome,
    Probe,
)
from loadtest.sweep_schema import (
    LevelSummary,
    Point,
    Server,
    ServerFailedError,
    Sweep,
    SweepError,
    Workload,
)
from loadtest.sweep_turns import Step, Turn, order, resumed
from loadtest.sweep_view import outcome, summary_text
from router.load import Role


class Target(NamedTuple):
    """One server to be measured."""

    server: Server
    client: Client
    probe: Probe

    @property
    def role(self) -> Role:
        """Its role."""
        return self.server.role


class Asker:
    """Makes the requests."""

    def __init__(
        self, prompts: Prompts, lengths: Lengths, workload: Workload, *, salt: str
    ) -> None:
        """`salt` makes the marks of this start different from those of any other."""
        self._prompts = prompts
        self._lengths = lengths
        self._workload = workload
        self._salt = salt
        self._sent: set[tuple[Role, int]] = set()
        self._more: dict[str, Any] = {}
        if workload.temperature is not None:
            self._more["temperature"] = workload.temperature

    def ask(self, server: Server, turn: Turn, at: int) -> Asked:
        """The request of this number, from 0."""
        place = Place(turn.number, turn.step.name, at)
        wanted, tokens = self._lengths.of(place)
        prompt = self._prompts.text(place, wanted)
        if self._workload.unique:
            prompt = mark(prompt, place, self._salt)
        key = (server.role, hash(prompt))
        repeated = key in self._sent
        self._sent.add(key)
        if at < (turn.step.level or 0):
            tokens = max(1, math.ceil(tokens * place.random(self._workload.seed).random()))
        body = chat_body(
            server.model, prompt, tokens, ignore_eos=self._workload.ignore_eos, **self._more
        )
        return Asked(body, tokens, repeated)


class ConcurrencySweep:
    """One sweep over one or more servers, in one directory."""

    def __init__(
        self,
        directory: SweepDirectory,
        targets: Sequence[Target],
        asker: Asker,
        sweep: Sweep,
        instruments: Instruments,
        now: Callable[[], str],
        show: Lines,
    ) -> None:
        """`sweep` holds the conditions; its points are read from the directory.

        `now` gives the time of day (ISO 8601, UTC). Raises SweepError when the directory holds a sweep under other conditions.
        """
        if len({target.role for target in targets}) != len(targets) or not targets:
            raise SweepError("each role is given to one server")
        self._directory = directory
        self._targets = {target.role: target for target in targets}
        self._asker = asker
        self._tools = instruments
        self._now = now
        self._show = show
        self._sweep = resumed(directory.read(), sweep)
        whole = directory.mend(self._sweep.points)
        self._sweep = msgspec.structs.replace(self._sweep, points=whole)
        self._levels: dict[tuple[Role, Step], LevelSummary] = {}
        for point in whole:
            self._sum_up(point.role, Step(point.level, point.rate))
        self._write()

    @property
    def left(self) -> list[Turn]:
        """What is not measured yet, in order."""
        done = {point.run for point in self._sweep.points}
        return [turn for turn in order(self._sweep.plan, self._roles) if turn.run not in done]

    async def run(self) -> Sweep:
        """Measure what is left. Raises SweepError when a server fails; what is done is kept."""
        left = self.left
        of = len(list(order(self._sweep.plan, self._roles)))
        for at, turn in enumerate(left):
            self._show.begins(turn.title, of - len(left) + at, of)
            self._keep(turn, await self._measure(turn))
        return self._sweep

    @property
    def _roles(self) -> list[Role]:
        return list(self._targets)

    async def _measure(self, turn: Turn) -> Outcome:
        target = self._targets[turn.role]
        seed = self._sweep.workload.seed * 1_000_003 + turn.number
        level = LevelRun(
            target.client,
            target.probe,
            self._sweep.pace,
            self._tools,
            seed=seed,
            tell=self._show.goes,
        )
        found = await level.run(
            turn.step, turn.run, lambda at: self._asker.ask(target.server, turn, at)
        )
        if found.seen.gave_up and not any(record.ok for record in found.records):
            first = next((r.error for r in found.records), "no request ended")
            raise ServerFailedError(
                f"the {turn.role.value} server at {target.server.url} answers nothing at"
                f" {turn.run}: {first}. Mend it and give the same command again: what is measured"
                " is kept"
            )
        return found

    def _keep(self, turn: Turn, found: Outcome) -> None:
        """Put a level on disk: its records first, then the sweep that knows of it."""
        point = make_point(
            found.records,
            found.window,
            found.seen,
            role=turn.role,
            number=turn.number,
            run=turn.run,
            level=turn.step.level,
            rate=turn.step.rate,
            measured_at=self._now(),
            unwarmed=found.unwarmed,
        )
        if point.cap is None:
            point = msgspec.structs.replace(point, cap=self._targets[turn.role].server.cap)
        said = notices.codes(notices.point_notices(point, self._sweep.pace))
        point = msgspec.structs.replace(point, notices=said)
        self._directory.add(turn.role, turn.number, found.records)
        points = sorted((*self._sweep.points, point), key=_place)
        self._sweep = msgspec.structs.replace(self._sweep, points=tuple(points))
        self._sum_up(turn.role, turn.step)
        self._write()
        self._show.ended(turn.title, outcome(point))

    def _sum_up(self, role: Role, step: Step) -> None:
        points = [p for p in self._sweep.points if (p.role, Step(p.level, p.rate)) == (role, step)]
        self._levels[role, step] = combine(
            [Measured(p, self._directory.records(p)) for p in points]
        )

    def _write(self) -> None:
        levels = tuple(sorted(self._levels.values(), key=_place))
        self._sweep = msgspec.structs.replace(self._sweep, levels=levels)
        said = notices.sweep_notices(self._sweep)
        self._sweep = msgspec.structs.replace(self._sweep, notices=said)
        self._directory.write(self._sweep, summary_text(self._sweep))


def _place(one: Point | LevelSummary) -> tuple[object, ...]:
    number = one.number if isinstance(one, Point) else 0
    return (one.role, one.level is None, one.level or 0, one.rate or 0.0, number)
