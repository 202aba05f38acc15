"""How far a measurement is, for people: lines, and in a terminal a bar that moves below them.

Shared by what measures one thing after another. It knows nothing of what is measured: titles and
outcomes come as text. The event loop draws the bar, twice a second, since a thread of its own would
cost what is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from loadtest.sweep_level import Progress


class Lines:
    """A line when a part begins and one when it has ended, for where no terminal is."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begins(self, title: str, done: int, of: int) -> None:
        """This part is next; so many of so many are done."""
        self.say(f"{done + 1} of {of}: {title}")

    def goes(self, progress: Progress) -> None:
        """Say nothing of how far the part is: a log is read afterwards."""

    def ended(self, title: str, outcome: str) -> None:
        """The part is done: say what came out."""
        del title  # it is in the line above
        self.say(f"  {outcome}")

    def say(self, text: str) -> None:
        """Say something, in a line of its own."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bars(Lines):
    """A bar over all parts, which moves within each of them too, and a line for each that is done."""

    def __init__(self, console: Console, bar: Bar) -> None:
        super().__init__(console)
        self._bar = bar
        self._task: TaskID | None = None
        self._done = 0
        self._title = ""

    def begins(self, title: str, done: int, of: int) -> None:
        """Move the bar."""
        if self._task is None:
            self._task = self._bar.add_task("", total=of)
        self._title, self._done = title, done
        self._bar.update(self._task, completed=done, description=title, refresh=True)

    def goes(self, progress: Progress) -> None:
        """Move the bar within the part."""
        if self._task is not None:
            text = f"{self._title}: {progress.phase}, {progress.answers} answers"
            if progress.failures:
                text += f", {progress.failures} failed"
            share = self._done + progress.share
            self._bar.update(self._task, completed=share, description=text, refresh=True)

    def ended(self, title: str, outcome: str) -> None:
        """Leave a line above the bar, and move it."""
        self.say(f"{title}: {outcome}")
        if self._task is not None:
            self._bar.update(self._task, completed=self._done + 1, refresh=True)


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Lines]:
    """A bar for as long as the block runs in a terminal, otherwise lines."""
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=console, auto_refresh=False, transient=True) as bar:
        yield Bars(console, bar)
