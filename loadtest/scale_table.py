"""What `loadtest scale` measures, and its table: each figure beside its target, if it has one.

Times are milliseconds, memory is MB (2**20 bytes) unless a name says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from loadtest.bench_cost import Machine

if TYPE_CHECKING:
    from rich.table import Table

FULL: Final = 0.95  # of a core: from there on more load only waits
BUSY: Final = 0.05  # of the time without a core; above that other programs are measured too
BODY_RATIO: Final = 1.5
BODY_PAUSE_MS: Final = 15.0
ADMIN_MS: Final = 20.0
START_MS: Final = 1000.0
DECISION_US: Final = 3.0


class Gaps(msgspec.Struct, frozen=True):
    """Between two reads of a stream."""

    p50: float | None
    p99: float | None
    longest: float | None


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """So many streams at once."""

    streams: int
    interval_ms: int
    asked_s: float  # chunks a second
    sent_s: float  # by the servers: less than asked when their core is full
    delivered_s: float
    core: float  # share of a core that the router used
    load_core: float  # that the clients and the servers used, which share one where there are two
    waited: float  # share of the time that the router was ready and had no core
    gaps: Gaps
    memory_mb: float  # PSS
    per_stream_kb: float  # above the router at rest
    broken: int  # ended, or never begun
    stalled: int  # had no chunk for long at the end

    @property
    def full(self) -> bool:
        """Whether the router had no processor time left."""
        return self.core >= FULL


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """Slow readers of long answers, with ordinary streams beside them."""

    readers: int
    total_mb: float
    seconds: float
    lost: int  # readers whose answer was not the one that was sent, byte for byte
    above_rest_mb: float  # at the peak
    alone: Gaps
    beside: Gaps
    direct: Gaps  # beside the same readers without the router: what this machine adds by itself


class Bodies(msgspec.Struct, frozen=True, kw_only=True):
    """Large request bodies at once, with ordinary streams beside them."""

    bodies: int
    total_mb: float
    seconds: float
    answered: int
    above_rest_mb: float
    ratio: float  # of that to their sum
    beside: Gaps
    direct: Gaps


class Admin(msgspec.Struct, frozen=True, kw_only=True):
    """The admin listener while many streams are open."""

    streams: int
    interval_ms: int
    core: float  # without scrapes
    metrics_p50: float | None
    metrics_max: float | None
    status_p50: float | None
    status_max: float | None
    quiet: Gaps
    scraped: Gaps  # with /metrics ten times a second


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of a look at the load and a decision, the least of several rounds."""

    few: int
    few_us: float
    many: int
    many_us: float

    @property
    def ratio(self) -> float:
        """Many in flight over few."""
        return self.many_us / self.few_us


class Scale(msgspec.Struct, kw_only=True):
    """One run."""

    machine: Machine
    version: str
    start_ms: list[float]  # from the process to the first answer of /healthz, of each start
    ready_ms: list[float]  # to the first 200 of /ready, which asks the servers too
    crowds: list[Crowd] = []
    slow: Slow | None = None
    bodies: Bodies | None = None
    admin: Admin | None = None
    decided: Decided | None = None
    errors: dict[str, int] = {}


Line = tuple[str, str, str]  # what, measured, target


def lines(scale: Scale) -> list[Line]:
    """All of the table."""
    found = [line for crowd in scale.crowds for line in _crowd(crowd)]
    if scale.slow is not None:
        found += _slow(scale.slow)
    if scale.bodies is not None:
        found += _bodies(scale.bodies)
    if scale.admin is not None:
        found += _admin(scale.admin)
    found.append(("start to /healthz, ms", _each(scale.start_ms), _target(START_MS)))
    found.append(("start to /ready, ms", _each(scale.ready_ms), ""))
    if scale.decided is not None:
        one = scale.decided
        found += [
            (f"a decision, {one.few} in flight, us", f"{one.few_us:.2f}", _target(DECISION_US)),
            (f"a decision, {one.many} in flight, us", f"{one.many_us:.2f}", _target(DECISION_US)),
            ("  ratio of the two", f"{one.ratio:.2f}", ""),
        ]
    found.append(("errors", str(sum(scale.errors.values())), "0"))
    return found


def table(scale: Scale) -> Table:
    """The same for a terminal."""
    from rich.table import Table

    shown = Table(title=f"Scale of one process\n{scale.machine}", title_justify="left")
    shown.add_column("")
    shown.add_column("measured", justify="right")
    shown.add_column("target", justify="right")
    for line in lines(scale):
        shown.add_row(*line)
    return shown


def notes(scale: Scale) -> list[str]:
    """What a reader of the table must know besides."""
    found = []
    for crowd in scale.crowds:
        name = f"{crowd.streams} streams at {crowd.interval_ms} ms"
        if crowd.full:
            found.append(f"{name}: the router's core is full: chunks come late.")
        elif crowd.sent_s < FULL * crowd.asked_s:
            found.append(f"{name}: the servers' core was full, so this says little of the router.")
        if crowd.waited > BUSY:
            found.append(
                f"{name}: the router waited {crowd.waited:.0%} of the time for a core that another "
                "program had."
            )
    return found + [f"{number} x {why}" for why, number in scale.errors.items()]


def _crowd(crowd: Crowd) -> list[Line]:
    name = f"{crowd.streams} streams at {crowd.interval_ms} ms"
    rates = f"{crowd.delivered_s:,.0f} of {crowd.asked_s:,.0f}"
    memory = f"{crowd.memory_mb:.0f} ({crowd.per_stream_kb:.0f} KB a stream)"
    return [
        (f"{name}: chunks/s delivered of asked", rates, ""),
        ("  core of the router, of clients and servers", _cores(crowd), ""),
        ("  gap of chunks p50, p99, ms", _gaps(crowd.gaps), ""),
        ("  memory, MB", memory, ""),
        ("  streams broken, stalled", f"{crowd.broken}, {crowd.stalled}", "0, 0"),
    ]


def _cores(crowd: Crowd) -> str:
    return f"{crowd.core:.0%}, {crowd.load_core:.0%}"


def _slow(slow: Slow) -> list[Line]:
    name = f"{slow.readers} slow readers of {slow.total_mb:.0f} MB, {slow.seconds:.1f} s"
    return [
        (f"{name}: answers not whole", str(slow.lost), "0"),
        ("  memory above rest at the peak, MB", f"{slow.above_rest_mb:.0f}", ""),
        ("  gap of a stream alone p50, p99, longest, ms", _gaps(slow.alone, longest=True), ""),
        ("  beside them", _gaps(slow.beside, longest=True), ""),
        ("  beside them, without the router", _gaps(slow.direct, longest=True), ""),
    ]


def _bodies(bodies: Bodies) -> list[Line]:
    name = f"{bodies.bodies} bodies of {bodies.total_mb:.0f} MB, {bodies.seconds:.1f} s"
    return [
        (f"{name}: answered", str(bodies.answered), str(bodies.bodies)),
        ("  memory above rest at the peak, of their sum", f"{bodies.ratio:.2f}", "<= 1.5"),
        ("  gap of a stream beside p50, p99, longest, ms", _gaps(bodies.beside, longest=True), ""),
        ("  the same without the router", _gaps(bodies.direct, longest=True), ""),
        ("  longest pause, above the longest without", _pause(bodies), _target(BODY_PAUSE_MS)),
    ]


def _pause(bodies: Bodies) -> str:
    if bodies.beside.longest is None or bodies.direct.longest is None:
        return "-"
    return f"{bodies.beside.longest - bodies.direct.longest:.0f}"


def _admin(admin: Admin) -> list[Line]:
    name = f"{admin.streams} streams at {admin.interval_ms} ms"
    return [
        (f"{name}: /metrics p50, max, ms", _two(admin.metrics_p50, admin.metrics_max), "< 20"),
        ("  /status p50, max, ms", _two(admin.status_p50, admin.status_max), "< 20"),
        ("  gap of chunks p50, p99, ms", _gaps(admin.quiet), ""),
        ("  with /metrics at 10 Hz", _gaps(admin.scraped), ""),
    ]


def _gaps(gaps: Gaps, *, longest: bool = False) -> str:
    return ", ".join(map(_show, [gaps.p50, gaps.p99, *([gaps.longest] if longest else [])]))


def _two(one: float | None, other: float | None) -> str:
    return f"{_show(one)}, {_show(other)}"


def _each(values: list[float]) -> str:
    return ", ".join(map(_show, values))


def _target(value: float) -> str:
    return f"<= {value:g}"


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
