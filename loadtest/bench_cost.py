"""The figures of `loadtest bench`: read from /proc and kept in rows."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

PROC: Final = Path("/proc")
ROUTER: Final = "crossover"
BARE: Final = "bare relay"
DIRECT: Final = "direct"
BEHIND: Final = 0.95  # of the chunks that were due; below that the load was not the intended one


class Usage(msgspec.Struct, frozen=True):
    """Seconds of processor time."""

    user: float = 0.0
    system: float = 0.0
    waited: float = 0.0  # for a core that another program had

    @property
    def total(self) -> float:
        """What was used."""
        return self.user + self.system

    def __add__(self, other: Usage) -> Usage:
        return self._with(other, 1)

    def __sub__(self, other: Usage) -> Usage:
        return self._with(other, -1)

    def _with(self, other: Usage, sign: int) -> Usage:
        return Usage(
            self.user + sign * other.user,
            self.system + sign * other.system,
            self.waited + sign * other.waited,
        )


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
    """What was measured with so many streams at once. First and later chunks: microseconds."""

    streams: int
    interval_ms: int
    chunk: Cost | None
    chunks_s: float
    answers: int
    waited: float  # the share of time that the proxy was ready and had no core
    first_p50_us: float | None
    first_p99_us: float | None
    later_p50_us: float | None = None  # from a chunk's sending to its coming
    added_p50_us: float | None = None  # through the proxy minus direct
    added_p99_us: float | None = None
    later_added_p50_us: float | None = None

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

    def fresh(self) -> Row:
        """A row of the same proxy with nothing measured yet."""
        return Row(name=self.name, version=self.version, machine=self.machine)


class Result(msgspec.Struct, kw_only=True):
    """All that one run found."""

    rounds: list[list[Row]]  # the same proxies in the same order in each
    left_out: list[str] = []  # peers, and why


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value that this share of them does not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def parse_stat(text: str, ticks: int) -> tuple[int, Usage]:
    """Session, and processor time with that of ended children, from /proc/PID/stat."""
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    user, system, child_user, child_system = (int(field) for field in fields[11:15])
    return int(fields[3]), Usage((user + child_user) / ticks, (system + child_system) / ticks)


def parse_waited(text: str) -> float:
    """Seconds that a process's first thread waited for a core, from schedstat."""
    fields = text.split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


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
        used = Usage()
        for path in self._paths:
            text = _read(path / "stat")
            if text:
                used += parse_stat(text, self._ticks)[1]
                used += Usage(waited=parse_waited(_read(path / "schedstat")))
        return used

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


def _round(value: float) -> float:
    return round(value, 3)


def _read(path: Path) -> str:
    """A file of /proc; nothing when its process has ended."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
