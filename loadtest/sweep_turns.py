"""What a sweep measures after what, and whether it may go on from what it finds on disk.

Pure. The order is made so that slow changes of the machine (heat, clocks, neighbours) fall on all
alike: the servers of a level are measured one after the other, never at once, and take turns in
being first; passes go up and down the levels in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from loadtest.sweep_schema import Plan, Server, Sweep, SweepError
from router.load import Role


class Step(NamedTuple):
    """One level of a closed loop, or one rate of an open one."""

    level: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        """Short, and usable in a run's name."""
        return str(self.level) if self.rate is None else f"r{self.rate:g}"

    @property
    def title(self) -> str:
        """For people."""
        return f"level {self.level}" if self.rate is None else f"{self.rate:g} requests a second"


class Turn(NamedTuple):
    """One level on one server in one pass."""

    number: int  # of the pass, from 1
    step: Step
    role: Role

    @property
    def run(self) -> str:
        """The name in its records."""
        return f"{self.role.value}-{self.number}-{self.step.name}"

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.role.value}, pass {self.number}, {self.step.title}"


def order(plan: Plan, roles: Sequence[Role]) -> Iterator[Turn]:
    """What is measured after what."""
    steps = [Step(level=level) for level in plan.levels] + [Step(rate=rate) for rate in plan.rates]
    for number in range(1, plan.passes + 1):
        for at, step in enumerate(steps if number % 2 else steps[::-1]):
            first = (number + at + 1) % len(roles)
            for role in (*roles[first:], *roles[:first]):
                yield Turn(number, step, role)


def resumed(before: Sweep | None, wanted: Sweep) -> Sweep:
    """The sweep to go on with: the points of before under the conditions of now.

    Raises SweepError when the conditions differ, naming the first that does.
    """
    if before is None:
        return wanted
    pairs: list[tuple[str, object, object]] = []
    for part in ("workload", "pace"):
        then = msgspec.structs.asdict(getattr(before, part))
        now = msgspec.structs.asdict(getattr(wanted, part))
        pairs += [(name, then[name], now[name]) for name in then]
    for server in wanted.servers:
        for known in before.servers:
            if known.role is server.role:
                pairs += [
                    (f"the {server.role.value} server's {name}", old, new)
                    for name, old, new in _identity(known, server)
                ]
    for name, old, new in pairs:
        if old != new:
            raise SweepError(
                f"--out holds a sweep with another {name} ({old}, now {new}): give the same again,"
                " or another --out"
            )
    others = [s for s in before.servers if s.role not in {server.role for server in wanted.servers}]
    return msgspec.structs.replace(
        wanted, created=before.created, points=before.points, servers=(*wanted.servers, *others)
    )


def _identity(old: Server, new: Server) -> Iterator[tuple[str, object, object]]:
    """What a server must still be, as far as both times were told."""
    for name in ("model", "model_path", "draft", "engine_version", "gpu", "gpus", "cap"):
        pair = getattr(old, name), getattr(new, name)
        if None not in pair:
            yield name, *pair
    for flag in sorted(old.flags.keys() & new.flags.keys()):
        if flag.startswith("speculative_"):
            yield flag, old.flags[flag], new.flags[flag]
