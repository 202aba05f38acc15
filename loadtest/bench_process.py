"""Runs `loadtest bench` and `loadtest scale` as a process: shows it, ends what was started, tells the end.

What is measured, and what it gives, is the caller's. A measurement that is ended early keeps nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import typer

from loadtest.bench_load import NoAnswerError
from loadtest.bench_measure import Show
from loadtest.children import ChildError, Children
from loadtest.exit_codes import FAILED, INTERRUPTED, TERMINATED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Given = TypeVar("Given")
WIDTH: Final = 400  # the most that a table takes when it goes into a file: no cell is cut


def run_measuring(command: str, work: Callable[[Show], Coroutine[Any, Any, Given]]) -> Given:
    """What the work of this command gives. Raises typer.Exit, with its code, for any other end."""
    import uvloop
    from rich.console import Console

    try:
        with (
            shown(Console(stderr=True)) as show,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(work(show))
    except (ChildError, NoAnswerError) as error:
        print(f"loadtest {command}: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except asyncio.CancelledError:
        raise typer.Exit(TERMINATED) from None


async def with_children(command: str, work: Callable[[Children, Path], Awaitable[Given]]) -> Given:
    """What the work gives; all that it started is ended, also on SIGTERM."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: task and task.cancel())
    try:
        with (
            tempfile.TemporaryDirectory(prefix=f"crossover-{command}-") as directory,
            Children(Path(directory)) as children,
        ):
            return await work(children, Path(directory))
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


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


def check_platform(name: str) -> None:
    """Raise BadParameter where there is no /proc."""
    if name != "linux":
        raise typer.BadParameter("it reads /proc and pins cores, so it runs on Linux only")


def check_file(option: str, file: Path | None) -> None:
    """Raise BadParameter, before anything is measured, for a file that cannot be written."""
    if file is not None:
        try:
            file.open("ab").close()
        except OSError as error:
            raise typer.BadParameter(f"cannot write {option} {file}: {error.strerror}") from None


def print_table(table: Table, notes: Iterable[str]) -> None:
    """Print the result: a table, and what its reader must know besides."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    for note in notes:
        print(note)
