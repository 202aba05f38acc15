"""Measures one level on one server: sends its load, and watches server and client meanwhile.

Client, probe, clock and processor time are arguments. Records come back whole; nothing is summed
up here (`summary` does that) and nothing is written (`sweep_files`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from loadtest.closed_loop import ClosedRun
from loadtest.open_loop import OpenRun, poisson
from loadtest.record import RequestRecord
from loadtest.summary import Window
from loadtest.sweep_phases import TICK_S, Meeting, Phase, Phases
from loadtest.sweep_schema import Pace, Server
from loadtest.sweep_seen import Page, Seen
from loadtest.sweep_turns import Step
from router.load import Role, Telemetry

# Seconds that a sleep of the event loop is asked for, to see how late it comes back.
NAP_S: Final = 0.02
# Seconds between two words on how far it is.
TELL_S: Final = 0.5
# Seconds that a server has to become idle before a level begins.
SETTLE_S: Final = 5.0
SETTLE_POLL_S: Final = 0.1


class Client(Protocol):
    """Sends requests; `client.ChatClient` is one."""

    async def chat(
        self, body: bytes, *, run: str = "", level: int | None = None, began: float = 0.0
    ) -> RequestRecord:
        """Send one and follow its answer to the end."""
        ...


class Watched(Protocol):
    """Says how loaded a server is; `live_router.RouterAdmin` does of a router."""

    async def look(self) -> Telemetry | None:
        """How loaded it is."""
        ...

    async def page(self) -> Page | None:
        """What its `/metrics` says."""
        ...


class Probe(Watched, Protocol):
    """Asks a server about itself; `sweep_probe.ServerProbe` is one."""

    async def facts(self, role: Role, model: str | None) -> Server:
        """What it is."""
        ...


class Asked(NamedTuple):
    """One request to be sent."""

    body: bytes
    tokens: int  # of answer
    repeated: bool  # whether the same was sent before


class Progress(NamedTuple):
    """How far a level is."""

    phase: Phase
    share: float
    answers: int
    failures: int


class Instruments(NamedTuple):
    """Time and how to pass it; processor time of this process. All in seconds."""

    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    cpu: Callable[[], float]


class Outcome(NamedTuple):
    """What one level gave."""

    records: Sequence[RequestRecord]
    window: Window
    seen: Seen
    unwarmed: int


class LevelRun:
    """One run of one step against one server."""

    def __init__(
        self,
        client: Client,
        probe: Watched,
        pace: Pace,
        instruments: Instruments,
        *,
        seed: int = 0,
        meeting: Meeting | None = None,
        tell: Callable[[Progress], None] = lambda _progress: None,
    ) -> None:
        """`seed` is for the arrivals of an open loop; `meeting` is with runs at the same time."""
        self._client = client
        self._probe = probe
        self._pace = pace
        self._tools = instruments
        self._seed = seed
        self._meeting = meeting
        self._tell = tell

    async def run(
        self,
        step: Step,
        name: str,
        ask: Callable[[int], Asked],
        arrivals: Iterator[float] | None = None,
    ) -> Outcome:
        """Measure; `name` is the records' `run`, `ask` gives the request of a number from 0.

        `arrivals`: endless start times, in seconds, in place of an open loop's own.
        """
        await self._settle()
        phases = Phases(step.level, self._pace, self._meeting)
        watch = _Watch(self._probe, phases, self._pace, self._tools)
        repeated = 0

        async def send(number: int, _level: int = 0) -> RequestRecord:
            nonlocal repeated
            asked = ask(number)
            repeated += asked.repeated
            phases.sent(number)
            try:
                record = await self._client.chat(
                    asked.body, run=name, level=step.level, began=load.began or 0.0
                )
            finally:
                phases.ended(number)
            return msgspec.structs.replace(record, asked_tokens=asked.tokens)

        load: ClosedRun | OpenRun
        if step.rate is None:
            load = ClosedRun(phases, send, self._tools.clock)
        else:
            load = OpenRun(
                poisson(step.rate, self._seed) if arrivals is None else arrivals,
                send,
                lambda elapsed: phases.advance(elapsed) is not Phase.OVER,
                self._tools.clock,
                tick=TICK_S,
            )
        await self._drive(load, phases, watch)
        seen = await watch.seen(repeated=repeated, gave_up=load.gave_up)
        return Outcome(load.records, _window(phases, load.elapsed), seen, phases.unwarmed)

    async def _drive(self, load: ClosedRun | OpenRun, phases: Phases, watch: _Watch) -> None:
        """Run the load until its phases are over, and cut what is open then."""
        driving = asyncio.ensure_future(load.run())
        watching = asyncio.gather(watch.naps(), watch.polls(), self._report(load, phases))

        def changed(phase: Phase) -> None:
            if phase is not Phase.OVER:
                watch.changed(phase)
            elif isinstance(load, ClosedRun):  # it would wait for its last answers
                driving.cancel()

        phases.on_change = changed
        both: set[asyncio.Future[Any]] = {driving, watching}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # what went wrong there
            if not driving.cancelled():
                driving.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _report(self, load: ClosedRun | OpenRun, phases: Phases) -> None:
        while True:
            share = phases.share(load.elapsed)
            self._tell(Progress(phases.phase, share, len(load.records), load.failures))
            await self._tools.sleep(TELL_S)

    async def _settle(self) -> None:
        """Wait until the server has nothing to do, for a moment: the level before may linger."""
        limit = self._tools.clock() + SETTLE_S
        while self._tools.clock() < limit:
            told = await self._probe.look()
            if told is None or not told.running + told.queued:
                return
            await self._tools.sleep(SETTLE_POLL_S)


class _Watch:
    """Looks at server and client while the window lasts."""

    def __init__(
        self, probe: Watched, phases: Phases, pace: Pace, instruments: Instruments
    ) -> None:
        self._probe = probe
        self._phases = phases
        self._pace = pace
        self._tools = instruments
        self._pages: list[asyncio.Future[Page | None]] = []
        self._loads: list[Telemetry] = []
        self._lags: list[float] = []
        self._cpu: list[float] = []

    def changed(self, _phase: Phase) -> None:
        """The window begins or ends."""
        self._cpu.append(self._tools.cpu())
        self._pages.append(asyncio.ensure_future(self._probe.page()))

    async def naps(self) -> None:
        """See how late the event loop is, until cancelled."""
        while True:
            before = self._tools.clock()
            await self._tools.sleep(NAP_S)
            if self._phases.phase is Phase.WINDOW:
                self._lags.append(max(0.0, self._tools.clock() - before - NAP_S))

    async def polls(self) -> None:
        """See how loaded the server is, until cancelled."""
        while True:
            if self._phases.phase is not Phase.WINDOW:
                await self._tools.sleep(TICK_S)
                continue
            told = await self._probe.look()
            if told is not None and self._phases.phase is Phase.WINDOW:
                self._loads.append(told)
            await self._tools.sleep(self._pace.poll_s)

    async def seen(self, *, repeated: int, gave_up: bool) -> Seen:
        """All of it."""
        pages = [await page for page in self._pages]
        with contextlib.suppress(IndexError):
            return Seen(
                tuple(self._loads),
                pages[0],
                pages[1],
                self._cpu[1] - self._cpu[0],
                tuple(self._lags),
                repeated,
                gave_up,
            )
        return Seen(tuple(self._loads), lags=tuple(self._lags), repeated=repeated, gave_up=gave_up)


def _window(phases: Phases, elapsed: float) -> Window:
    """The window; what there was of it when the run gave up."""
    start = phases.window_start if phases.phase is not Phase.WARM_UP else 0.0
    end = phases.window_end if phases.phase in {Phase.TAIL, Phase.OVER} else elapsed
    return Window(start, max(end, start + 1e-9))
