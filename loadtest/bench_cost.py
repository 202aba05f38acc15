"""The figures of `loadtest bench`: read from /proc, kept in rows, shown as a table."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from rich.table import Table

PROC: Final = Path("/proc")
NONE: Final = "–"  # noqa: RUF001 (a dash, for what was not measured)
ROUTER: Final = "crossover"
BARE: Final = "bare relay"
DIRECT: Final = "direct"
BEHIND: Final = 0.95  # of the chunks that were due; below that the load was not the intended one


class Usage(msgspec.Struct, frozen=True):
    """Seconds of processor time."""

    user: float = 0.0
    system: float = 0.0

    @property
    def total(self) -> float:
        """Both together."""
        return self.user + self.system

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.user + other.user, self.system + other.system)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.user - other.user, self.system - other.system)


class Cost(msgspec.Struct, frozen=True):
    """Microseconds of processor time for one thing."""

    total_us: float
    user_us: float

    @classmethod
    def of(cls, used: Usage, things: int) -> Cost | None:
        """The cost of each of so many things; None when there were none."""
        if not things:
            return None
        return cls(_round(used.total / things * 1e6), _round(used.user / things * 1e6))


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured with so many streams at once. First chunks: microseconds."""

    streams: int
    interval_ms: int
    chunk: Cost | None
    chunks_s: float
    answers: int
    first_p50_us: float | None
    first_p99_us: float | None
    added_p50_us: float | None = None  # through the proxy minus direct
    added_p99_us: float | None = None

    @property
    def behind(self) -> bool:
        """Whether fewer chunks came than were due."""
        return self.chunks_s < BEHIND * self.streams * 1000 / self.interval_ms


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured."""

    cpu: str
    cores: int
    kernel: str
    python: str
    uvloop: str
    pinned: bool  # the proxy has a core, load and servers share another
    load_average: float  # over the minute before

    def __str__(self) -> str:
        pinned = "a core for the proxy, one for the rest" if self.pinned else "not pinned"
        return (
            f"{self.cpu}, {self.cores} cores ({pinned}), Linux {self.kernel}, "
            f"Python {self.python}, uvloop {self.uvloop}, load before: {self.load_average:.2f}"
        )


class Row(msgspec.Struct, kw_only=True):
    """One proxy, or none: `direct` is the same load without one. What is not known is None."""

    name: str
    version: str
    machine: Machine
    idle_ms_s: float | None = None  # processor time a second, when nothing is asked
    idle_mb: float | None = None
    connections: int = 0
    request: Cost | None = None
    requests_s: float | None = None
    levels: list[Level] = []
    crowd: int = 0
    crowd_mb: float | None = None
    hang_up_ms: float | None = None  # median
    hang_up_max_ms: float | None = None
    errors: dict[str, int] = {}


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value that this share of them does not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def parse_stat(text: str, ticks: int) -> tuple[int, Usage]:
    """Session, and processor time with that of ended children, from /proc/PID/stat."""
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    user, system, child_user, child_system = (int(field) for field in fields[11:15])
    return int(fields[3]), Usage((user + child_user) / ticks, (system + child_system) / ticks)


def parse_pss(text: str) -> int:
    """Bytes of a process's own memory and its share of what it shares, from smaps_rollup."""
    found = re.search(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def parse_cpu(text: str) -> str:
    """The processor's name from /proc/cpuinfo, where it has one."""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


class Session:
    """The processes of one session, which is what a child and its children are."""

    def __init__(self, leader: int) -> None:
        """`leader`: the process that was started with a session of its own."""
        self._ticks = os.sysconf("SC_CLK_TCK")
        names = [path.name for path in PROC.iterdir() if path.name.isdecimal()]
        self._paths = [PROC / name for name in names if self._session(PROC / name) == leader]

    def usage(self) -> Usage:
        """What they have used so far."""
        texts = (_read(path / "stat") for path in self._paths)
        return sum((parse_stat(text, self._ticks)[1] for text in texts if text), Usage())

    def memory_mb(self) -> float:
        """What they hold now."""
        return sum(parse_pss(_read(path / "smaps_rollup")) for path in self._paths) / 2**20

    def _session(self, path: Path) -> int:
        text = _read(path / "stat")
        return parse_stat(text, self._ticks)[0] if text else -1


def this_machine(*, pinned: bool) -> Machine:
    """What can be said of this one."""
    return Machine(
        cpu=parse_cpu(_read(PROC / "cpuinfo")),
        cores=os.cpu_count() or 1,
        kernel=platform.release(),
        python=platform.python_version(),
        uvloop=metadata.version("uvloop"),
        pinned=pinned,
        load_average=_round(os.getloadavg()[0]),
    )


def pin(process: int, cores: Iterable[int]) -> None:
    """Keep a process (0: this one) on these cores."""
    if sys.platform == "linux":
        os.sched_setaffinity(process, cores)


def own_cores() -> list[int]:
    """The cores that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    else:  # noqa: RET505 (mypy calls it unreachable otherwise)
        return []


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """The table: a measure a line, a row's figure a column, and router over bare relay last."""
    measures = _measures(rows[0]) if rows else []
    by_name = {row.name: row for row in rows}
    found = []
    for label, pick in measures:
        values = [pick(row) for row in rows]
        pair = [pick(by_name[name]) if name in by_name else None for name in (ROUTER, BARE)]
        found.append([label, *map(_show, values), _ratio(*map(_number, pair))])
    errors = [str(sum(row.errors.values())) for row in rows]
    return [*found, ["errors", *errors, ""]]


def table(rows: Sequence[Row]) -> Table:
    """The same for a terminal."""
    from rich.table import Table

    shown = Table(title=f"What a proxy costs\n{rows[0].machine}", title_justify="left")
    shown.add_column("")
    for row in rows:
        shown.add_column(f"{row.name}\n{row.version}", justify="right")
    shown.add_column(f"{ROUTER} /\n{BARE}", justify="right")
    for line in lines(rows):
        shown.add_row(*line)
    return shown


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know besides."""
    found = [
        f"{row.name}, {level.streams} streams: only {level.chunks_s:,.0f} chunks a second came, so "
        "this machine was too slow or too busy for the load."
        for row in rows
        for level in row.levels
        if level.behind
    ]
    return found + [
        f"{row.name}: {number} x {why}" for row in rows for why, number in row.errors.items()
    ]


Value = Cost | float | None
Pick = Callable[[Row], Value]


def _measures(sample: Row) -> list[tuple[str, Pick]]:
    """What is shown of a row; all rows have the levels of this one."""
    measures: list[tuple[str, Pick]] = [
        (f"CPU per request, {sample.connections} at once, µs", lambda row: row.request)
    ]
    at = range(len(sample.levels))
    measures += [_measure(sample, i, "CPU per chunk, {}, µs", "chunk") for i in reversed(at)]
    for i in at:
        measures.append(_measure(sample, i, "first chunk, {}, added p50, µs", "added_p50_us"))
        measures.append(_measure(sample, i, "first chunk, {}, added p99, µs", "added_p99_us"))
    return [
        *measures,
        ("CPU when idle, ms a second", lambda row: row.idle_ms_s),
        ("memory when idle, MB", lambda row: row.idle_mb),
        (f"memory with {sample.crowd} streams, MB", lambda row: row.crowd_mb),
        ("hang-up seen by the server, p50, ms", lambda row: row.hang_up_ms),
        ("hang-up seen by the server, max, ms", lambda row: row.hang_up_max_ms),
    ]


def _measure(sample: Row, at: int, label: str, field: str) -> tuple[str, Pick]:
    level = sample.levels[at]

    def pick(row: Row) -> Value:
        value: Value = getattr(row.levels[at], field)
        return value

    return label.format(f"{level.streams} x {level.interval_ms} ms"), pick


def _number(value: Value) -> float | None:
    return value.total_us if isinstance(value, Cost) else value


def _show(value: Value) -> str:
    match value:
        case None:
            return NONE
        case Cost():
            return f"{value.total_us:.1f} ({value.user_us:.1f} user)"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f}" if one and other and one > 0 and other > 0 else NONE


def _round(value: float) -> float:
    return round(value, 3)


def _read(path: Path) -> str:
    """A file of /proc; nothing when its process has ended."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
