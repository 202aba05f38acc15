"""What the demo shows while it runs: an introduction, then one panel or one line per second.

It looks at a run that goes on, and changes nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadtest.arrivals import Closed
from loadtest.closed_loop import ClosedRun
from loadtest.demo_stage import LINE, Stage
from loadtest.verdict import by_reason
from router.load import Role

WIDTH: Final = 100
COLOUR: Final = {Role.SPECULATIVE: "cyan", Role.BASELINE: "magenta"}
BLOCKS: Final = "▁▂▃▄▅▆▇█"
RECENT_S: Final = 2.0

INTRO: Final = """\
Speculative decoding makes an LLM server faster while few requests run and slower when many do. \
Crossover puts one OpenAI-compatible address in front of a speculative and a baseline server and \
sends each request to the one that serves it better at that moment.

Here both servers are [b]simulated[/b]: real HTTP, real batching, no GPU and no model. Their \
speeds are [b]planted[/b]: made up so that the two curves cross at 12 requests in flight, measured \
nowhere. They share one simulated GPU, so while both have work each runs at half its speed. The \
router is the real one."""


def make_console() -> Console:
    """As wide as the terminal, but not wider than is comfortable to read."""
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def introduce(console: Console, load: Closed, names: Iterable[str]) -> None:
    """Say what will be seen."""
    console.print()
    console.rule("[b]Crossover, a demonstration[/b]", align="left")
    console.print(INTRO)
    console.print()
    levels = [level.concurrency for level in load.levels]
    console.print(
        f"The same load runs three times, {load.seconds:.0f} s each, from [b]{levels[0]}[/b] to"
        f" [b]{max(levels)}[/b] requests in flight and back: {_skyline(levels)}"
    )
    for number, name in enumerate(names, start=1):
        console.print(f"  {number}  {name}")
    console.print(
        "All three go through the router, which POST /policy switches, so that its cost is in each."
    )
    console.print()


def show_stage(console: Console, stage: Stage) -> None:
    """Say what runs, and where."""
    for role, what in ((Role.SPECULATIVE, "2 tokens a step"), (Role.BASELINE, "1 token a step")):
        console.print(
            f"  [{COLOUR[role]}]{role.value:<12}[/] {stage.engines[role]}  loadtest engine,"
            f" simulated, {what}",
            soft_wrap=True,
        )
    console.print(
        f"  {'router':<12} {stage.public}  crossover serve, threshold {LINE.threshold:g} in"
        f" total, band {LINE.band:.0%}, dwell {LINE.dwell:g} s",
        soft_wrap=True,
    )
    console.print()


class Board:
    """One run as it goes."""

    def __init__(self, title: str, run: ClosedRun, *, has_line: bool) -> None:
        self._title = title
        self._run = run
        self._has_line = has_line
        self.status: dict[str, Any] | None = None  # the router's /status

    def panel(self) -> RenderableType:
        """The live view."""
        run, elapsed = self._run, min(self._run.elapsed, self._run.load.seconds)
        flight, peak = self._in_flight(), self._peak()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", width=10)
        grid.add_column()
        grid.add_row("load", self._skyline())
        for role in Role:
            bar = Text(f"{role.value:<12}{flight[role]:>3} ")
            bar.append("█" * min(flight[role], peak), COLOUR[role])
            grid.add_row("in flight" if role is Role.SPECULATIVE else "", bar)
        grid.add_row("", self._sum(flight))
        grid.add_row("output", f"{self._recent():.0f} tok/s over the last {RECENT_S:g} s")
        for at, role in enumerate(Role):
            grid.add_row("decisions" if not at else "", self._decisions(role))
        errors = Text(str(run.failures), "bold red" if run.failures else "green")
        grid.add_row("errors", errors)
        progress = ProgressBar(total=run.load.seconds, completed=elapsed)
        clock = f"{elapsed:.1f} of {run.load.seconds:.1f} s"
        return Panel(
            Group(grid, progress),
            title=f"[b]{self._title}[/b]",
            title_align="left",
            subtitle=clock,
            subtitle_align="right",
            width=WIDTH,
        )

    def line(self) -> str:
        """The same in one line, for where no terminal is."""
        run, flight = self._run, self._in_flight()
        level = run.load.level_at(run.elapsed)
        wanted = f"{level.concurrency:>2}" if level else " -"
        counts = by_reason(run.records)
        reasons = ", ".join(f"{reason} {count}" for (_, reason), count in sorted(_named(counts)))
        return (
            f"  {run.elapsed:5.1f} s  level {wanted}  n {flight[Role.SPECULATIVE]:>2}"
            f"  m {flight[Role.BASELINE]:>2}  side {self._side():<11}  {self._recent():4.0f} tok/s"
            f"  errors {run.failures}  {reasons}"
        )

    def summary(self, seconds: float) -> str:
        """What is left on the screen when the run is over."""
        run = self._run
        tokens = sum(record.tokens_between(0.0, run.load.seconds) for record in run.records)
        mark = "[red]✗[/]" if run.failures else "[green]✓[/]"
        return (
            f"{mark} {self._title:<40} {len(run.records):>5} requests"
            f"  {tokens / run.load.seconds:>5.0f} tok/s"
            f"  {run.failures} errors  {seconds:.1f} s"
        )

    def _in_flight(self) -> dict[Role, int]:
        backends = (self.status or {}).get("backends", [])
        return dict.fromkeys(Role, 0) | {Role(each["role"]): each["in_flight"] for each in backends}

    def _side(self) -> str:
        if not self._has_line:
            return "fixed"
        return str((self.status or {}).get("policy", {}).get("side", "unknown"))

    def _sum(self, flight: dict[Role, int]) -> Text:
        text = Text(f"{'in all':<12}{sum(flight.values()):>3} ")
        if not self._has_line:
            return text
        side = self._side()
        text.append(f"threshold {LINE.threshold:g}: new requests go to ")
        text.append(side, COLOUR.get(Role(side), "") if side in set(Role) else "")
        return text

    def _peak(self) -> int:
        return max(level.concurrency for level in self._run.load.levels)

    def _skyline(self) -> Text:
        load, elapsed = self._run.load, self._run.elapsed
        text = _skyline([level.concurrency for level in load.levels])
        level = load.level_at(elapsed)
        if level is None:
            return text.append("  waiting for the last answers")
        at = load.levels.index(level)
        text.stylize("bold reverse", at, at + 1)
        return text.append(f"  {level.concurrency} in flight wanted")

    def _recent(self) -> float:
        """Output tokens per second of what has ended lately, since a record is made at the end."""
        now = self._run.elapsed
        lately = [record for record in self._run.records if record.ended > now - RECENT_S]
        tokens = sum(record.output_tokens or 0 for record in lately)
        return tokens / min(RECENT_S, now) if now > 0 else 0.0

    def _decisions(self, role: Role) -> Text:
        counts = by_reason(self._run.records)
        text = Text(f"{role.value:<12}", COLOUR[role])
        mine = [(count, reason) for (to, reason), count in counts.items() if to is role]
        said = ", ".join(f"{reason} {count}" for count, reason in sorted(mine, reverse=True))
        return text.append(f"{sum(count for count, _ in mine):>3} {said}", "default")


def _named(counts: Counter[tuple[Role | None, str | None]]) -> list[tuple[tuple[str, str], int]]:
    return [((str(role), str(reason)), count) for (role, reason), count in counts.items()]


def _skyline(levels: list[int]) -> Text:
    """The levels as a row of blocks."""
    top = max(levels)
    return Text("".join(BLOCKS[round((len(BLOCKS) - 1) * level / top)] for level in levels))
