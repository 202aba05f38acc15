"""The document `compare.json`, schema `crossover.compare/1`: what a live comparison asked and measured.

A JSON object (times are seconds unless a name ends in `_ms`; what is not known is null, never zero):

    schema, created, command, version    when (ISO 8601, UTC), with what, and by which Crossover
    conditions  the router's address, model, prompts and lengths, pace, and the line that `frontier`
                decides by (see `Conditions`); a comparison goes on only with the same
    policies    in the order in which they were named
    loads       requests kept in flight, or a rate, or a trace and its scale (see `Offered`)
    passes      how often each policy meets each load
    cells       one for each policy, load and pass: what was measured (see `Cell`)
    outcomes    one for each load and policy: all passes together (see `Outcome`)
    advice      one for each load, then one over all of them: {"load": name or null, "text"}

A figure with an interval is {"value", "low", "high"}, at 95 % confidence; `low` or `high` is null
where the data gives no bound. `live_summary` says how the figures are made.

Fields that this version does not know are ignored, so that a later minor addition can be read here.
This module is pure; `live_files` keeps the document and the records beside it on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from loadtest.compare import Kind
from loadtest.sweep_schema import Figure, Pace, Workload

SCHEMA: Final = "crossover.compare/1"
# The policies that a router can be told while it runs, and what each is in a comparison.
KINDS: Final[Mapping[str, Kind]] = {
    "baseline": "single",
    "speculative": "single",
    "frontier": "rule",
    "least-in-flight": "plain",
    "round-robin": "plain",
}

# The body of the router's POST /policy.
Change = dict[str, str | float]


class LiveError(ValueError):
    """Something asked for that cannot be done; the message says why and how to mend it."""


class LiveFailedError(LiveError):
    """A server or the router failed; what is measured is kept."""


class Offered(msgspec.Struct, frozen=True):
    """A load: one of requests in flight, requests a second, times as many arrivals as a trace."""

    in_flight: int | None = None
    rate: float | None = None
    scale: float | None = None

    @property
    def name(self) -> str:
        """Short, and usable in a file's name."""
        if self.in_flight is not None:
            return str(self.in_flight)
        return f"r{self.rate:g}" if self.rate is not None else f"x{self.scale:g}"

    @property
    def size(self) -> float:
        """Where it is on an axis of loads of its kind."""
        return float(self.in_flight or self.rate or self.scale or 0.0)

    def __str__(self) -> str:
        """For people."""
        if self.in_flight is not None:
            return f"{self.in_flight} in flight"
        return f"{self.rate:g} requests a second" if self.rate is not None else f"trace {self.name}"


class Turn(NamedTuple):
    """One policy under one load in one pass."""

    number: int  # of the pass, from 1
    load: Offered
    policy: str

    @property
    def run(self) -> str:
        """The name in its records, and of their file."""
        return f"{self.policy}-{self.number}-{self.load.name}"

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.policy}, pass {self.number}, {self.load}"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What one turn gave."""

    policy: str
    number: int = msgspec.field(name="pass")  # from 1
    load: str  # the name of one of `loads`
    run: str  # of its records
    decided_by: str  # what the router called the policy: a rule by curves answers to `frontier`
    measured_at: str  # ISO 8601, UTC
    records: int  # lines in the file, warm-up included
    window_start_s: float  # from the start of the run
    window_s: float
    requests: int  # complete answers that ended in the window
    errors: int  # of the whole run, warm-up included
    error: str | None = None  # the first of them
    unwarmed: int = 0  # slots without an answer when the window began
    gave_up: bool = False  # far behind an open loop's rate: the load was too much


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One policy under one load, all passes together."""

    policy: str
    kind: Kind
    load: str
    passes: int
    interval: Literal["passes", "batches", "none"]  # what those of the two means are over
    ms_per_token: Figure  # of a request: its whole time by its output tokens; the mean
    p95_ms_per_token: Figure
    tok_s: Figure
    ttft_p50_ms: Figure | None  # to the first byte of the answer's body
    speculative_share: float  # of the requests
    switches: int  # times that a request went elsewhere than the one before it
    requests: int
    errors: int
    gave_up: bool


class Advice(msgspec.Struct, frozen=True):
    """What to run."""

    load: str | None  # None: over all loads
    text: str


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What must be the same for a comparison to go on."""

    url: str  # the router's, without user and password
    model: str
    workload: Workload
    pace: Pace
    line: Change  # what `frontier` stands for


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    schema: str = SCHEMA
    created: str
    command: str
    version: str
    conditions: Conditions
    servers: str = ""  # GPU and engine, in words, as far as they are told; for every picture
    policies: tuple[str, ...]
    loads: tuple[Offered, ...]
    passes: int
    cells: tuple[Cell, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    advice: tuple[Advice, ...] = ()


def order(policies: Sequence[str], loads: Sequence[Offered], passes: int) -> Iterator[Turn]:
    """What is measured after what.

    The policies of a load follow each other, so that a slow hour is one for all, and take turns in
    being first; passes go up and down the loads.
    """
    for number in range(1, passes + 1):
        for at, load in enumerate(loads if number % 2 else loads[::-1]):
            first = (number - 1 + at) % len(policies)
            for policy in (*policies[first:], *policies[:first]):
                yield Turn(number, load, policy)


def resumed(before: Comparison | None, wanted: Comparison) -> Comparison:
    """The comparison to go on with: the cells of before; policies, loads and passes may be others.

    Raises LiveError when a condition differs, naming the first that does.
    """
    if before is None:
        return wanted
    then, now = _flat(before.conditions), _flat(wanted.conditions)
    for name, value in now.items():
        if then[name] != value:
            raise LiveError(
                f"--out holds a comparison with another {name} ({then[name]}, now {value}): give the"
                " same again, or another --out"
            )
    turns = {turn.run for turn in order(wanted.policies, wanted.loads, wanted.passes)}
    kept = tuple(cell for cell in before.cells if cell.run in turns)
    return msgspec.structs.replace(wanted, created=before.created, cells=kept)


def _flat(conditions: Conditions) -> dict[str, object]:
    return {
        "address": conditions.url,
        "model": conditions.model,
        "line": conditions.line,
        **msgspec.structs.asdict(conditions.workload),
        **msgspec.structs.asdict(conditions.pace),
    }


def decode_comparison(data: bytes, name: str = "compare.json") -> Comparison:
    """Read the bytes of a `compare.json`. Raises LiveError that names the place."""
    try:
        found = msgspec.json.decode(data, type=Comparison)
    except msgspec.MsgspecError as error:
        raise LiveError(f"{name} is no comparison: {error}") from error
    if found.schema != SCHEMA:
        raise LiveError(f"{name}: schema {found.schema!r} is not {SCHEMA!r}")
    return found
