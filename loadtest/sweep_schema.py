"""The document `sweep.json`, schema `crossover.sweep/1`: what a sweep asked and measured.

A JSON object (all times are seconds, all rates per second; what is not known is null, never zero):

    schema, created, command, version    when (ISO 8601, UTC), with what, and by which Crossover
    workload    what was asked: prompts, lengths, seed (see `Workload`)
    pace        how long: warm-up, window, bounds (see `Pace`)
    plan        levels, rates and passes wanted (see `Plan`)
    servers     one for each role: URL, model, draft, engine version, GPU, cap, flags
    points      one for each role, pass and level (or rate): what was measured (see `Point`)
    levels      one for each role and level: all passes together (see `LevelSummary`)
    notices     what makes a figure doubtful: code, text, and where (see `loadtest.notices`)

A figure with an interval is {"value", "low", "high"}, at 95 % confidence; `low` or `high` is null
where the data gives no bound. `summary` says which intervals these are and why. Times to first
token, per output token and of whole requests have "mean" and the figures "p50", "p90", "p99".

Fields that this version does not know are ignored, so that a later minor addition can be read here.
This module is pure; `sweep_files` keeps the document and the records beside it on disk.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from router.load import Role

SCHEMA: Final = "crossover.sweep/1"


class SweepError(ValueError):
    """Something asked for that cannot be done; the message says why and how to mend it."""


class ServerFailedError(SweepError):
    """A server that does not answer; what is measured is kept."""


class Figure(msgspec.Struct, frozen=True, gc=False):
    """A value and its interval of 95 % confidence."""

    value: float
    low: float | None = None
    high: float | None = None


class Spread(msgspec.Struct, frozen=True):
    """How a time is distributed over requests, in seconds."""

    mean: float | None = None
    p50: Figure | None = None
    p90: Figure | None = None
    p99: Figure | None = None


class Notice(msgspec.Struct, frozen=True):
    """One thing that makes a figure doubtful or that a reader must know."""

    code: str  # one of `notices.CODES`
    text: str
    role: Role | None = None  # None: the whole sweep
    level: int | None = None
    rate: float | None = None
    passes: tuple[int, ...] = ()


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the servers. A sweep goes on only with the same."""

    prompts: str  # "corpus", or the file's name and digest
    input_tokens: int | None = None  # wanted for each prompt; None: as the prompts come
    output_tokens: int | None = None  # of each answer; None: from the trace
    trace: str | None = None  # the file's name and digest
    unique: bool = True  # each prompt begins with something that no other has
    ignore_eos: bool = True
    temperature: float | None = None  # None: the server's own
    seed: int = 0
    tokens_from: str = "usage"  # output tokens are what the server counts, never chunks


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How long each level takes. A sweep goes on only with the same. Times are seconds."""

    warm_up_s: float = 2.0  # at least; until each slot has had an answer
    most_warm_up_s: float = 120.0
    window_s: float = 10.0  # at least; until `per_slot` answers for each slot
    most_window_s: float = 60.0
    per_slot: float = 3.0
    poll_s: float = 0.5  # from one look at the server's load to the next


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured; may grow from one start to the next."""

    levels: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()  # open loop: requests a second
    passes: int = 3


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """One server and what it said of itself, without its secrets."""

    role: Role
    url: str  # without user and password
    model: str
    model_path: str | None = None
    draft: str | None = None
    engine_version: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    cap: int | None = None  # requests that run at once, over all ranks
    context_length: int | None = None
    speculates: bool | None = None
    tokens_per_word: float | None = None  # with its own tokenizer; None: it did not say
    tokens_per_mark: float | None = None  # of what makes prompts unique
    flags: dict[str, Any] = {}  # of /server_info, only names that `router.server_info` allows


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One role, one pass, one level."""

    role: Role
    number: int = msgspec.field(name="pass")  # from 1
    run: str  # of its records
    level: int | None  # requests kept in flight; None in an open loop
    rate: float | None = None  # requests a second offered; None in a closed loop
    measured_at: str  # ISO 8601, UTC
    records: int  # lines in the file, warm-up included

    concurrency: float  # mean requests in flight during the window
    window_start_s: float  # from the start of the run
    window_s: float
    requests: int  # complete answers that ended in the window
    errors: int  # of the whole run, warm-up included
    error: str | None = None  # the first of them

    output_tok_s: Figure
    requests_s: float
    input_tokens: float | None  # mean of what the server counted
    output_tokens: float | None
    asked_tokens: float | None = None  # mean of what was asked for
    uncounted: int = 0  # complete answers of the window in which the server gave no usage
    ttft_s: Spread  # to the first byte of the answer's body
    tpot_s: Spread  # for each output token after the first
    latency_s: Spread

    accept_length: float | None = None  # tokens per verify step, from the growth of counters
    verify_steps: float | None = None  # steps of the requests that ended between the two pages
    page_s: float | None = None  # seconds between the two pages of /metrics
    cap: int | None = None
    running: float | None = None  # mean over the polls in the window
    queued: float | None = None
    most_running: int | None = None
    most_queued: int | None = None
    polls: int = 0
    cached_share: float | None = None  # of prompt tokens that came from the prefix cache

    client_cpu: float | None = None  # of one core, in the window
    client_lag_s: float | None = None  # 95th percentile of the event loop's lateness
    repeated: int = 0  # prompts sent before in this sweep
    unwarmed: int = 0  # slots without an answer when the window began
    gave_up: bool = False  # too many failures, or far behind an open loop's rate
    notices: tuple[str, ...] = ()  # codes


class LevelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One role, one level, all its passes."""

    role: Role
    level: int | None
    rate: float | None = None
    passes: int
    concurrency: float
    requests: int
    errors: int
    window_s: float
    output_tok_s: Figure
    interval: str  # what the interval of output_tok_s is over: "passes", "batches" or "none"
    ttft_s: Spread
    tpot_s: Spread
    latency_s: Spread
    accept_length: float | None = None
    verify_steps: float | None = None
    cap: int | None = None
    running: float | None = None
    queued: float | None = None
    notices: tuple[str, ...] = ()


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    schema: str = SCHEMA
    created: str
    command: str
    version: str
    workload: Workload
    pace: Pace
    plan: Plan
    servers: tuple[Server, ...]
    points: tuple[Point, ...] = ()
    levels: tuple[LevelSummary, ...] = ()
    notices: tuple[Notice, ...] = ()


def decode_sweep(data: bytes, name: str = "sweep.json") -> Sweep:
    """Read the bytes of a `sweep.json`. Raises SweepError that names the place."""
    try:
        found = msgspec.json.decode(data, type=Sweep)
    except msgspec.MsgspecError as error:
        raise SweepError(f"{name} is no sweep: {error}") from error
    if found.schema != SCHEMA:
        raise SweepError(f"{name}: schema {found.schema!r} is not {SCHEMA!r}")
    return found
