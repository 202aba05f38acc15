"""One window of `loadtest overhead`: its load, the engine's and the router's own figures meanwhile.

The engine is asked on both ways, so that what happens inside it can be compared. Writes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from loadtest.client import ChatClient
from loadtest.live_borrow import IDLE_S, Borrowed, until_idle
from loadtest.live_router import RouterAdmin
from loadtest.live_schema import LiveFailedError
from loadtest.overhead import Measured, Turn, Way, mean_of, sent_together
from loadtest.progress import Lines
from loadtest.prompts import Lengths, Place
from loadtest.record import RequestRecord
from loadtest.summary import ended_within, make_point
from loadtest.sweep import Asker
from loadtest.sweep_level import Instruments, LevelRun, Outcome
from loadtest.sweep_probe import ServerProbe
from loadtest.sweep_run import now
from loadtest.sweep_schema import Pace, Server
from loadtest.sweep_seen import Page
from loadtest.sweep_turns import Step
from loadtest.sweep_turns import Turn as Asking
from router.load import Role, Telemetry

MOST_FAILED: Final = 0.02  # share of a window's requests: more would be a figure of something else


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. Times are seconds."""

    direct: str
    role: Role
    url: str
    admin_url: str
    out: Path
    level: int = 64
    rounds: int = 2
    pace: Pace = Pace()
    margin: float = 0.03
    shortest: int = 64  # tokens of an answer
    longest: int = 192
    input_tokens: int | None = None
    prompts: Path | None = None
    model: str | None = None
    admin_key: str | None = None
    key: str | None = None
    seed: int = 0
    settle_s: float = 30.0
    idle_s: float = IDLE_S
    timeout: float = 600.0
    command: str = ""


class Between(Lengths):
    """Answers of every length between two, each as likely."""

    def __init__(self, shortest: int, longest: int, input_tokens: int | None, seed: int) -> None:
        super().__init__(longest, (), input_tokens, seed)
        self._shortest, self._longest = shortest, longest

    def of(self, place: Place) -> tuple[int | None, int]:
        """A function of the place alone, so that both ways ask the same."""
        wanted, _ = super().of(place)
        return wanted, place.random(self._seed + 1).randint(self._shortest, self._longest)


class Beside:
    """Looks at the engine, and at both ends of a window at the router's processor time as well."""

    def __init__(self, probe: ServerProbe, admin: RouterAdmin, tools: Instruments) -> None:
        self._probe, self._admin, self._tools = probe, admin, tools
        self.cpu: list[tuple[float, float]] = []  # when, and processor seconds so far

    async def look(self) -> Telemetry | None:
        """How loaded the engine is."""
        return await self._probe.look()

    async def page(self) -> Page | None:
        """What the engine's `/metrics` says; the router's figure is kept."""
        page, used = await asyncio.gather(self._probe.page(), self._admin.cpu_seconds())
        if used is not None:
            self.cpu.append((self._tools.clock(), used))
        return page

    @property
    def cores(self) -> float | None:
        """Cores that the router used in between."""
        if len(self.cpu) < 2 or self.cpu[-1][0] <= self.cpu[0][0]:
            return None
        (start, before), (end, after) = self.cpu[0], self.cpu[-1]
        return (after - before) / (end - start)


class Parts(NamedTuple):
    """What the windows are measured with."""

    clients: dict[Way, ChatClient]
    askers: dict[Way, Asker]
    server: Server
    probe: ServerProbe
    hand: Borrowed
    tools: Instruments


async def measure(
    options: Options, turn: Turn, parts: Parts, show: Lines
) -> tuple[Measured, Sequence[RequestRecord]]:
    """One window. Raises LiveError for one that says nothing."""
    tools = parts.tools
    await until_idle(
        parts.hand.admin,
        options.settle_s,
        apart_s=options.idle_s,
        clock=tools.clock,
        sleep=tools.sleep,
    )
    beside = Beside(parts.probe, parts.hand.admin, tools)
    asked = Asking(turn.pair, Step(level=options.level), options.role)
    level = LevelRun(parts.clients[turn.way], beside, options.pace, tools, tell=show.goes)
    found = await level.run(
        asked.step, turn.run, lambda at: parts.askers[turn.way].ask(parts.server, asked, at)
    )
    await parts.hand.still_ours()
    _refuse(turn, found, options.role)
    point = make_point(
        found.records,
        found.window,
        found.seen,
        role=options.role,
        number=turn.pair,
        run=turn.run,
        level=options.level,
        measured_at=now(),
        unwarmed=found.unwarmed,
    )
    ended = [r for r in ended_within(found.records, found.window) if r.ok]
    per_token = mean_of([r.seconds_per_token for r in ended])
    window = Measured(
        pair=turn.pair,
        way=turn.way,
        point=point,
        ms_per_token=None if per_token is None else 1e3 * per_token,
        engine_tok_s=mean_of([load.gen_throughput for load in found.seen.loads]),
        counted_tok_s=_counted(found),
        router_cpu=beside.cores,
        together=sent_together(found.records, found.window),
    )
    return window, found.records


def _refuse(turn: Turn, found: Outcome, role: Role) -> None:
    failed = [record for record in found.records if not record.ok]
    if len(failed) > MOST_FAILED * len(found.records) or not found.records:
        said = failed[0].error if failed else "no request ended"
        raise LiveFailedError(
            f"{len(failed)} of {len(found.records)} requests failed ({turn.run}), the first with:"
            f" {said}. Mend it and give the same command again: what is measured is kept"
        )
    others = {record.backend for record in found.records if record.ok} - {role}
    if turn.way is Way.ROUTER and others:
        raise LiveFailedError(
            f"the router sent requests elsewhere than to the {role.value} server ({turn.run}):"
            " keep both servers up, and give the same command again"
        )


def _counted(found: Outcome) -> float | None:
    """Tokens per second by the engine's own counter of what it has finished."""
    first, last = found.seen.first, found.seen.last
    if first is None or last is None or last.at <= first.at:
        return None
    before, after = first.accept.tokens, last.accept.tokens
    return None if before is None or after is None else (after - before) / (last.at - first.at)
