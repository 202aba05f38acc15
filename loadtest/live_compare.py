"""`LiveComparison`: each policy in turn under each load, through a running router.

Every policy is asked the same: prompts and lengths are a function of the seed, the pass, the load and
the request's number, and an open loop's times of the seed and the pass. Only the mark in front of a
prompt is another for each policy, since a server would remember what the policy before has asked.

Each cell is on disk before the next begins.

What the figures are is `live_summary`'s to say; the router is changed by `live_borrow` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from loadtest.client import chat_body
from loadtest.closed_loop import MOST_FAILURES
from loadtest.live_borrow import Borrowed, until_idle
from loadtest.live_files import LiveDirectory
from loadtest.live_schema import (
    Cell,
    Change,
    Comparison,
    LiveError,
    LiveFailedError,
    Offered,
    Turn,
    order,
    resumed,
)
from loadtest.live_summary import Passed, advise, ms_per_token, outcome
from loadtest.live_view import line, summary_text
from loadtest.progress import Lines
from loadtest.prompts import Place, mark
from loadtest.record import RequestRecord
from loadtest.sweep import Asker
from loadtest.sweep_level import Client, Instruments, LevelRun
from loadtest.sweep_level import Outcome as Measured
from loadtest.sweep_schema import Server
from loadtest.sweep_turns import Step
from loadtest.sweep_turns import Turn as Asking

# Tokens of the requests that only see whether all is well.
CHECK_TOKENS: Final = 4


class Load(NamedTuple):
    """How a load is made."""

    offered: Offered
    step: Step
    arrivals: Callable[[], Iterator[float]] | None = None  # endless; None: Poisson or a closed loop


class Tools(NamedTuple):
    """What a comparison works with."""

    client: Client
    server: Server  # the router, as a client sees it
    askers: Mapping[str, Asker]  # one for each policy: their marks differ
    instruments: Instruments
    now: Callable[[], str]  # the time of day (ISO 8601, UTC)
    settle_s: float  # that the servers have to become idle
    idle_s: float  # between the two looks that find them so
    salt: str


class LiveComparison:
    """One comparison, in one directory, with a router that was borrowed for it."""

    def __init__(
        self,
        directory: LiveDirectory,
        borrowed: Borrowed,
        comparison: Comparison,
        loads: Mapping[str, Load],
        tools: Tools,
        show: Lines,
    ) -> None:
        """`comparison` holds the conditions; its cells are read from the directory.

        Raises LiveError when the directory holds a comparison under other conditions.
        """
        self._directory = directory
        self._borrowed = borrowed
        self._loads = loads
        self._tools = tools
        self._show = show
        self._comparison = resumed(directory.read(), comparison)
        self._keep(self._comparison.cells)

    async def run(self) -> Comparison:
        """Measure what is left. Raises LiveError; what is done is kept."""
        wanted = self._comparison
        done = {cell.run for cell in wanted.cells}
        turns = list(order(wanted.policies, wanted.loads, wanted.passes))
        left = [turn for turn in turns if turn.run not in done]
        if left:
            await self._check()
        for at, turn in enumerate(left):
            self._show.begins(turn.title, len(turns) - len(left) + at, len(turns))
            cell = await self._measure(turn)
            self._keep((*self._comparison.cells, cell))
            self._show.ended(turn.title, line(turn, self._comparison))
        return self._comparison

    def _change(self, policy: str) -> Change:
        return self._comparison.conditions.line if policy == "frontier" else {"policy": policy}

    async def _idle(self) -> None:
        tools = self._tools.instruments
        await until_idle(
            self._borrowed.admin,
            self._tools.settle_s,
            apart_s=self._tools.idle_s,
            clock=tools.clock,
            sleep=tools.sleep,
        )

    async def _check(self) -> None:
        """See that each policy can be had, and that both addresses are of one router."""
        await self._idle()
        for number, policy in enumerate(self._comparison.policies):
            await self._borrowed.decide(self._change(policy))
            prompt = mark("Say hello.", Place(0, "check", number), self._tools.salt)
            body = chat_body(self._tools.server.model, prompt, CHECK_TOKENS)
            record = await self._tools.client.chat(body, run="check")
            if not record.ok:
                raise LiveFailedError(
                    f"the first request under {policy} failed: {record.error}; mend the servers, the"
                    " router or --model"
                )
            if record.backend is None or not await self._borrowed.admin.decided(record.id):
                raise LiveError(
                    f"the router at {self._borrowed.admin.url} did not decide about a request to"
                    f" {self._tools.server.url}: --url and --admin-url are those of one router"
                )

    async def _measure(self, turn: Turn) -> Cell:
        await self._idle()
        decided_by = await self._borrowed.decide(self._change(turn.policy))
        load, tools = self._loads[turn.load.name], self._tools
        conditions = self._comparison.conditions
        level = LevelRun(
            tools.client,
            self._borrowed.admin,
            conditions.pace,
            tools.instruments,
            seed=conditions.workload.seed * 1_000_003 + turn.number,
            tell=self._show.goes,
        )
        # An asker knows a server by its role: here it is the router.
        asking = Asking(turn.number, load.step, tools.server.role)
        asker = tools.askers[turn.policy]
        found = await level.run(
            load.step,
            turn.run,
            lambda at: asker.ask(tools.server, asking, at),
            None if load.arrivals is None else load.arrivals(),
        )
        _refuse(turn, found)
        await self._borrowed.still_ours()
        self._directory.add(turn.run, found.records)
        return self._cell(turn, found, decided_by)

    def _cell(self, turn: Turn, found: Measured, decided_by: str) -> Cell:
        failed = _failed(found.records)
        return Cell(
            policy=turn.policy,
            number=turn.number,
            load=turn.load.name,
            run=turn.run,
            decided_by=decided_by,
            measured_at=self._tools.now(),
            records=len(found.records),
            window_start_s=found.window.start,
            window_s=found.window.seconds,
            requests=len(ms_per_token(found.records, found.window)),
            errors=len(failed),
            error=failed[0].error if failed else None,
            unwarmed=found.unwarmed,
            gave_up=found.seen.gave_up,
        )

    def _keep(self, cells: tuple[Cell, ...]) -> None:
        """Sum up and put on disk."""
        wanted = self._comparison
        outcomes = []
        for load in wanted.loads:
            for policy in wanted.policies:
                passes = [
                    Passed(cell, self._directory.records(cell.run))
                    for cell in cells
                    if (cell.policy, cell.load) == (policy, load.name)
                ]
                if passes:
                    outcomes.append(outcome(policy, load.name, passes))
        found = msgspec.structs.replace(wanted, cells=cells, outcomes=tuple(outcomes))
        self._comparison = msgspec.structs.replace(found, advice=advise(found))
        self._directory.write(self._comparison, summary_text(self._comparison))


def _failed(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return sorted((each for each in records if not each.ok), key=lambda record: record.ended)


def _refuse(turn: Turn, found: Measured) -> None:
    """Raise LiveError for a cell that says nothing."""
    failed = _failed(found.records)
    what = turn.title
    if len(failed) >= MOST_FAILURES or (failed and len(failed) == len(found.records)):
        raise LiveFailedError(
            f"{len(failed)} requests failed ({what}), the first with: {failed[0].error}. Mend it and"
            " give the same command again: what is measured is kept"
        )
    if not ms_per_token(found.records, found.window):
        raise LiveError(
            f"no answer that counts its tokens ended within {found.window.seconds:.1f} s ({what}):"
            " give more --seconds, or a server that sends usage"
        )
