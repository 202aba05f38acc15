"""`loadtest demo`: the whole product on loopback, without a GPU, in about a minute.

The order of things and the exit code are here; what runs is in `demo_stage`, what it proves in
`verdict` and `demo_speed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import uvloop
from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadtest.arrivals import ClosedLoop, Ramp, up_and_down
from loadtest.children import ChildError, Children
from loadtest.client import ChatClient, chat_body
from loadtest.closed_loop import ClosedRun
from loadtest.demo_report import Finished, check_all, invite, report
from loadtest.demo_speed import Speed, judge, summed, virtual
from loadtest.demo_stage import MODEL, Operator, Stage, set_up
from loadtest.demo_view import Board, introduce, make_console, show_stage
from loadtest.exit_codes import FAILED, INTERRUPTED, OK, TERMINATED
from loadtest.record import RequestRecord, write_records
from loadtest.verdict import Check, Decided
from router.load import Role

# One twelfth of the crossover to twice the crossover, and back.
LEVELS: Final = up_and_down((1, 2, 4, 8, 12, 16, 24))
# Short enough to turn over several times a level, and of different lengths, as real answers are.
TOKENS: Final = (16, 40)
SEED: Final = 12
WARM_UP: Final = ClosedLoop(4, 0.5)
RUNS: Final[tuple[tuple[str, str, Role | None], ...]] = (
    ("the pair", "frontier", None),
    ("speculative only", "speculative", Role.SPECULATIVE),
    ("baseline only", "baseline", Role.BASELINE),
)
EXPLAINED: Final = {
    "the pair": "the router decides for each request",
    "speculative only": "the router sends everything to that server",
    "baseline only": "likewise",
}
LIVE_S: Final = 0.25
LINE_S: Final = 1.0
DECISIONS_S: Final = 1.0
KEEP_CHECK_S: Final = 1.0


class Options(msgspec.Struct, frozen=True):
    """What was asked for."""

    keep: bool  # leave it running until Ctrl-C
    seconds_per_level: float
    live: bool  # a panel, if there is a terminal; otherwise a line a second
    records: Path | None  # file for every request's record


class Ending:
    """SIGTERM ends the demo as Ctrl-C does, in the event loop and outside of it."""

    def __init__(self) -> None:
        self.asked = False
        self.cancel: Callable[[], object] | None = None  # while an event loop runs

    def __call__(self, *_: object) -> None:
        """Handle the signal."""
        self.asked = True
        if self.cancel is None:
            raise KeyboardInterrupt
        self.cancel()


def run_demo(options: Options) -> int:
    """Run it; the exit code. Whatever happens, no process is left."""
    console = make_console()
    ending = Ending()
    before = signal.signal(signal.SIGTERM, ending)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="crossover-demo-") as directory,
            Children(Path(directory)) as children,
        ):
            return _demonstrate(console, options, children, Path(directory), ending)
    except ChildError as error:
        console.print(Text(f"✗ {error}", "red"), soft_wrap=True)
        return FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("\nStopped.")
        return TERMINATED if ending.asked else INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _demonstrate(
    console: Console, options: Options, children: Children, directory: Path, ending: Ending
) -> int:
    load = Ramp(LEVELS, options.seconds_per_level)
    introduce(console, load, [f"{name}: {EXPLAINED[name]}" for name, _, _ in RUNS])
    console.print("Starting two servers and the router ...")
    stage = set_up(children, directory)
    show_stage(console, stage)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        passed = runner.run(_measure(console, options, children, stage, load, ending))
    if not options.keep:
        return OK if passed else FAILED
    try:
        invite(console, stage)
        while True:
            time.sleep(KEEP_CHECK_S)
            children.check()
    except KeyboardInterrupt:
        console.print("\nStopped.")
    return OK if passed else FAILED


async def _measure(
    console: Console,
    options: Options,
    children: Children,
    stage: Stage,
    load: Ramp,
    ending: Ending,
) -> bool:
    """Make the three runs and print the verdict; whether all checks passed."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    ending.cancel = lambda: task and loop.call_soon_threadsafe(task.cancel)
    try:
        async with Operator(stage, children) as operator, ChatClient(stage.public) as client:
            await operator.until_ready()
            await _warm_up(operator, client)
            runs: list[Finished] = []
            for number, (name, policy, only) in enumerate(RUNS, start=1):
                await operator.set_policy(policy)
                driver = Driver(console, options, operator, client)
                title = f"Run {number} of {len(RUNS)}: {name}"
                runs.append(await driver.run(name, title, load, only))
                children.check()
            await operator.set_policy(RUNS[0][1])
            checks = check_all(runs, await operator.counts_at_rest())
    finally:
        ending.cancel = None
    speed = speed_of(load, runs)
    if options.records is not None:
        write_records(options.records, (record for run in runs for record in run.records))
    report(console, load, runs, checks, speed)
    return _conclude(console, checks, speed)


async def _warm_up(operator: Operator, client: ChatClient) -> None:
    """A few requests to each server, so that the first run is not the one that meets cold ones."""
    await operator.set_policy("round-robin")
    warm_up = ClosedRun(WARM_UP, lambda number, _: client.chat(body_of(number)), time.monotonic)
    failed = [record.error for record in await warm_up.run() if not record.ok]
    if failed:
        raise ChildError(f"the first requests failed: {failed[0]}")


def body_of(number: int) -> bytes:
    """The same request each time for the same number, so that all runs serve the same ones."""
    question = f"Question {number}: when is guessing ahead worth it?"
    return chat_body(MODEL, question, tokens_of(number))


def tokens_of(number: int) -> int:
    """Output tokens of that request."""
    return random.Random(SEED * 1_000_003 + number).randint(*TOKENS)


def speed_of(load: Ramp, runs: Sequence[Finished]) -> Speed:
    """The verdict on speed: the runs against each other, and the machine against virtual time."""
    measured = {run.only: summed(run.records, load) for run in runs}
    known = {role: virtual(load, map(tokens_of, itertools.count()), role) for role in Role}
    return judge(load, measured, known)


class Driver:
    """Makes one run and shows it."""

    def __init__(
        self, console: Console, options: Options, operator: Operator, client: ChatClient
    ) -> None:
        self._console = console
        self._options = options
        self._operator = operator
        self._client = client
        self._decisions: dict[str, Decided] = {}

    async def run(self, name: str, title: str, load: Ramp, only: Role | None) -> Finished:
        """Run the load under the policy in force."""

        async def send(number: int, level: int) -> RequestRecord:
            return await self._client.chat(
                body_of(number), run=name, level=level, began=run.began or 0.0
            )

        run = ClosedRun(load, send, time.monotonic)
        board = Board(title, run, has_line=only is None)
        before = {decided.request_id for decided in await self._operator.take_decisions()}
        watching = asyncio.create_task(self._watch(board))
        try:
            records = await run.run()
            if watching.done():
                watching.result()  # what went wrong there
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self._keep_decisions()
        self._console.print(board.summary(run.elapsed))
        fresh = [one for one in self._decisions.values() if one.request_id not in before]
        return Finished(name, only, records, fresh)

    async def _watch(self, board: Board) -> None:
        """Show the run until cancelled, and fetch decisions before the router forgets them."""
        live = self._options.live and self._console.is_terminal
        period = LIVE_S if live else LINE_S
        turns = 0
        with _shown(self._console, board, live=live) as show:
            while True:
                await asyncio.sleep(period)
                board.status = await self._operator.status()
                show()
                turns += 1
                if turns % round(DECISIONS_S / period) == 0:
                    await self._keep_decisions()

    async def _keep_decisions(self) -> None:
        for decided in await self._operator.take_decisions():
            self._decisions[decided.request_id] = decided


@contextlib.contextmanager
def _shown(console: Console, board: Board, *, live: bool) -> Iterator[Callable[[], None]]:
    """A function that shows the board as it is now."""
    if not live:
        yield lambda: console.print(board.line(), markup=False, soft_wrap=True)
        return
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        yield lambda: screen.update(board.panel(), refresh=True)


def _conclude(console: Console, checks: list[Check], speed: Speed) -> bool:
    judged = [*(check.ok for check in checks), *([] if speed.ok is None else [speed.ok])]
    failed = judged.count(False)
    if failed:
        console.print(f"[bold red]FAILED[/]: {failed} of {len(judged)} checks")
    else:
        rest = "; speed was not judged" if speed.ok is None else ""
        console.print(f"[bold green]PASSED[/]: all {len(judged)} checks{rest}")
    return not failed
