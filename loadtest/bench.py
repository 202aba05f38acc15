"""`loadtest bench`: what the router costs on this machine, beside a proxy that does nothing.

    load (this process) -> proxy -> two light servers (one process)
    core 0                 core 1   core 0

The same load goes in turn through each proxy: a bare relay of bytes in this Python, the router, and
nginx where there is one; and to the servers directly. Figures move with the machine and with what
else it does; what holds is the router's figure over the bare relay's, from one run.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from loadtest.bench_cost import Cost, Level, Row, Usage, percentile
from loadtest.bench_load import (
    Load,
    NoAnswerError,
    Window,
    request,
    run_load,
    time_hang_up,
)
from loadtest.bench_stage import Control, Stage, Target, enough_files, own_cores, pin
from loadtest.bench_table import notes, table
from loadtest.children import ChildError, Children
from loadtest.exit_codes import FAILED, INTERRUPTED, OK, TERMINATED

if TYPE_CHECKING:
    from rich.console import Console

LONG: Final = 10_000  # tokens of a stream that outlasts its measurement
WIDTH: Final = 120  # of the table when it goes into a file


Show = Callable[[int, int, str], None]  # this step, of so many, and what it is


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. Times are seconds."""

    seconds: float = 5.0  # for each figure
    warm_seconds: float = 0.3  # before each
    tokens: int = 64  # of each streamed answer
    interval_ms: int = 20  # between two of them
    requests: int = 32  # at once, not streamed
    levels: tuple[int, ...] = (64, 250)  # streams at once
    crowd: int = 1000  # streams at once when memory is read
    crowd_interval_ms: int = 200
    crowd_seconds: float = 2.0
    idle_seconds: float = 3.0
    hang_ups: int = 20


QUICK: Final = Plan(seconds=1.5, tokens=32, crowd_seconds=0.5, idle_seconds=1.5, hang_ups=5)


class Bench:
    """Measures; the targets take turns, so that a slower minute is one for all."""

    def __init__(self, plan: Plan, targets: list[Target], control: Control, show: Show) -> None:
        """`show` is told what comes next."""
        self._plan = plan
        self._targets = targets
        self._proxies = [target for target in targets if target.session]
        self._control = control
        self._tell = show
        self._step = 0
        self._steps = 1 + len(plan.levels) * len(targets) + 3 * len(self._proxies)

    async def run(self) -> list[Row]:
        """Measure everything."""
        plan = self._plan
        for target in self._targets:
            target.row.connections, target.row.crowd = plan.requests, plan.crowd
        await self._idle()
        for target in self._proxies:
            self._show(f"{plan.requests} requests at once: {target.row.name}")
            await self._requests(target)
        for streams in plan.levels:
            for target in self._targets:
                self._show(f"{streams} streams at once: {target.row.name}")
                await self._streams(target, streams)
        for target in self._proxies:
            self._show(f"{plan.crowd} streams at once: {target.row.name}")
            await self._crowd(target)
        for target in self._proxies:
            self._show(f"{plan.hang_ups} hang-ups: {target.row.name}")
            await self._hang_ups(target)
        return [target.row for target in self._targets]

    async def _idle(self) -> None:
        """All at once, since they do nothing."""
        self._show("nothing to do")
        before = [target.usage() for target in self._proxies]
        began = time.monotonic()
        await asyncio.sleep(self._plan.idle_seconds)
        took = time.monotonic() - began
        for target, used in zip(self._proxies, before, strict=True):
            target.row.idle_ms_s = round((target.usage() - used).total / took * 1e3, 1)
            target.row.idle_mb = target.memory_mb()

    async def _requests(self, target: Target) -> None:
        load = Load(request(16, stream=False))
        window = await self._load(target, load, self._plan.requests, 0.1, self._plan.seconds)
        target.row.request = Cost.of(window.used, window.answers)
        target.row.requests_s = round(window.answers / window.seconds, 1)

    async def _streams(self, target: Target, streams: int) -> None:
        plan = self._plan
        interval = plan.interval_ms / 1000
        load = Load(request(plan.tokens, plan.interval_ms), plan.tokens, interval)
        ramp = (plan.tokens + 1) * interval
        window = await self._load(target, load, streams, ramp, plan.seconds)
        p50, p99 = (percentile(window.first, share) for share in (0.5, 0.99))
        level = Level(
            streams=streams,
            interval_ms=plan.interval_ms,
            chunk=Cost.of(window.used, window.chunks) if target.session else None,
            chunks_s=round(window.chunks / window.seconds, 1),
            answers=window.answers,
            waited=round(window.used.waited / window.seconds, 3),
            first_p50_us=_us(p50),
            first_p99_us=_us(p99),
        )
        if target.session:
            direct = self._targets[0].row.levels[len(target.row.levels)]
            level = msgspec.structs.replace(
                level,
                added_p50_us=_added(level.first_p50_us, direct.first_p50_us),
                added_p99_us=_added(level.first_p99_us, direct.first_p99_us),
            )
        target.row.levels = [*target.row.levels, level]

    async def _crowd(self, target: Target) -> None:
        """Long streams, so that all are open when memory is read, which is at the end."""
        plan, row = self._plan, target.row

        def look() -> Usage:
            row.crowd_mb = target.memory_mb()
            return Usage()

        load = Load(request(LONG, plan.crowd_interval_ms), LONG)
        await self._load(target, load, plan.crowd, plan.crowd / 1000, plan.crowd_seconds, look)

    async def _hang_ups(self, target: Target) -> None:
        port = target.ports[0]
        times = [await time_hang_up(port, self._control.counts) for _ in range(self._plan.hang_ups)]
        seen = [round(seconds * 1e3, 2) for seconds in times if seconds is not None]
        target.row.hang_up_ms = percentile(seen, 0.5)
        target.row.hang_up_max_ms = percentile(seen, 1.0)
        target.count({"hang-up not seen": len(times) - len(seen)})

    def _show(self, text: str) -> None:
        self._tell(self._step, self._steps, text)
        self._step += 1

    async def _load(
        self,
        target: Target,
        load: Load,
        connections: int,
        ramp: float,
        seconds: float,
        usage: Callable[[], Usage] | None = None,
    ) -> Window:
        window = await run_load(
            load,
            target.ports,
            connections=connections,
            ramp=ramp,
            warm=self._plan.warm_seconds,
            seconds=seconds,
            usage=usage or target.usage,
        )
        target.count(window.errors)
        target.count({"stream left open": await self._control.left()})
        return window


async def measure(plan: Plan, children: Children, directory: Path, show: Show) -> list[Row]:
    """Start all, measure, and leave this process as it was. Raises ChildError, NoAnswerError."""
    cores = own_cores()
    with enough_files(plan.crowd):
        stage = Stage(children, directory)
        try:
            targets = await stage.start()
            control = Control(targets[0].ports[0])
            try:
                return await Bench(plan, targets, control, show).run()
            finally:
                control.close()
        finally:
            pin(0, cores)


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Show]:
    """A bar in a terminal, otherwise lines; drawn between measurements and never during one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    if not console.is_terminal:
        yield lambda step, steps, text: console.print(f"{step + 1} of {steps}: {text}")
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting")

        def show(step: int, steps: int, text: str) -> None:
            progress.update(task, total=steps, completed=step, description=text, refresh=True)

        yield show


async def run(plan: Plan, show: Show) -> list[Row]:
    """Measure, and end all that was started, also on SIGTERM. Raises as `measure` does."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: task and task.cancel())
    try:
        with (
            tempfile.TemporaryDirectory(prefix="crossover-bench-") as directory,
            Children(Path(directory)) as children,
        ):
            return await measure(plan, children, Path(directory), show)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def check_platform(name: str) -> None:
    """Raise BadParameter where there is no /proc."""
    if name != "linux":
        raise typer.BadParameter("bench reads /proc and pins cores, so it runs on Linux only")


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="In half a minute, and less exact.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Append a line of JSON for each column to this file.")
    ] = None,
) -> None:
    """Measure what the router costs on this machine, beside a bare relay of bytes. Linux only.

    Read the ratio of the two: it holds between machines, the figures do not. Exit code 0: every
    answer was complete. Otherwise 1, with what failed.
    """
    import uvloop
    from rich.console import Console

    check_platform(sys.platform)
    if out is not None:
        try:
            out.open("ab").close()
        except OSError as error:
            raise typer.BadParameter(f"cannot write --out {out}: {error.strerror}") from None
    console = Console(stderr=True)
    try:
        with (
            shown(console) as show,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            rows = runner.run(run(QUICK if quick else Plan(), show))
    except (ChildError, NoAnswerError) as error:
        print(f"loadtest bench: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except asyncio.CancelledError:
        raise typer.Exit(TERMINATED) from None
    if out is not None:
        with out.open("ab") as file:
            file.write(msgspec.json.Encoder().encode_lines(rows))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table(rows))
    for note in notes(rows):
        print(note)
    raise typer.Exit(FAILED if any(row.errors for row in rows) else OK)


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 1)


def _added(through: float | None, direct: float | None) -> float | None:
    return None if through is None or direct is None else round(through - direct, 1)
