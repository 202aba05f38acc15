"""How far a measurement is, as a bar that moves: shared by what measures one thing after another.

Drawn by the event loop, twice a second, since a thread of its own would cost what is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from loadtest.sweep_level import Progress


class MovingBar:
    """A bar over so many parts, which moves within each of them too."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._done = 0
        self._title = ""

    def begins(self, title: str, done: int, of: int) -> None:
        """This part is next; so many of so many are done."""
        if self._task is None:
            self._task = self._bar.add_task("", total=of)
        self._title, self._done = title, done
        self._bar.update(self._task, completed=done, description=title, refresh=True)

    def goes(self, progress: Progress) -> None:
        """How far the part is."""
        if self._task is not None:
            text = f"{self._title}: {progress.phase}, {progress.answers} answers"
            if progress.failures:
                text += f", {progress.failures} failed"
            share = self._done + progress.share
            self._bar.update(self._task, completed=share, description=text, refresh=True)

    def ended(self) -> None:
        """The part is done."""
        if self._task is not None:
            self._bar.update(self._task, completed=self._done + 1, refresh=True)


@contextlib.contextmanager
def moving_bar(console: Console) -> Iterator[MovingBar | None]:
    """A bar for as long as the block runs; None where no terminal is to draw it on."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=console, auto_refresh=False, transient=True) as bar:
        yield MovingBar(bar)
