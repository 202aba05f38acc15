"""The measured pairs that rules are tried on, and the trace that they are tried under.

Reads the files in `data/`; everything that is made of them is a value. An arm is a speculative server
against the same baseline server, both on one H200 (`data/README.md` says how they were measured).

A curve made by `curve_from_levels` has the sweep's prefill in its step times: it says what a server
does under the sweep's own mix of prompt and output tokens (two to one), whatever the prompts of the
load that it is then given. `loadtest.service.from_sweep` keeps prefill apart, so that each request
pays for its own prompt.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from loadtest.service import CurveError, ServiceCurve, Sweep
from loadtest.simulator_load import Row
from loadtest.smooth import rising

TRACE: Final = "azure-llm-2023/conv-10min.csv"
_BASELINE: Final = "h200-topk4/baseline.json"


class Arm(NamedTuple):
    """One speculative server: its file, and the acceptance that it is taken to have."""

    file: str
    acceptance: float | None = None  # None: as measured


ARMS: Final = {
    "topk1-2.8": Arm("h200-topk1/acceptance-2.8.json"),
    "topk1-2.0": Arm("h200-topk1/acceptance-2.0.json"),
    # The same step times with fewer tokens each: nobody measured it.
    "topk1-1.6": Arm("h200-topk1/acceptance-2.0.json", 1.6),
    "topk4-2.8": Arm("h200-topk4/speculative.json"),
}


class Level(NamedTuple):
    """One point of a measured curve."""

    concurrency: float
    tokens_per_second: float
    seconds_per_token: float | None = None  # of one request; not needed where the other two are
    accept_length: float | None = None


def curve_from_levels(
    levels: Iterable[Level], label: str, *, output_tokens: float = 128.0
) -> ServiceCurve:
    """A curve whose closed loop at each level gives the tokens/s of that level.

    A level that was measured more than once counts with its mean; noise that would make a step with
    more requests shorter is pooled away. `output_tokens`: of a mean request, of which the first comes
    with the prompt. Raises CurveError.
    """
    found: dict[float, list[float]] = {}
    accepted: list[float] = []
    for level in levels:
        if not (level.concurrency >= 1 and level.tokens_per_second > 0):
            raise CurveError(f"curve {label!r}: not a level of a server: {tuple(level)}")
        found.setdefault(level.concurrency, []).append(level.tokens_per_second)
        if level.accept_length is not None:
            accepted.append(level.accept_length)
    if output_tokens <= 1:
        raise CurveError(f"curve {label!r}: one output token has no decode step")
    per_step = max(1.0, sum(accepted) / len(accepted)) if accepted else 1.0
    at = sorted(found)
    seconds = rising(
        [
            c * output_tokens / (sum(found[c]) / len(found[c])) * per_step / (output_tokens - 1)
            for c in at
        ]
    )
    return ServiceCurve(
        label=label,
        source="levels of a sweep, its prefill in the step times",
        points=tuple(zip(at, seconds, strict=True)),
        tokens_per_step=per_step,
        prefill_s_per_token=0.0,
    )


def levels_of(curve: ServiceCurve, prompt_tokens: int, output_tokens: int) -> list[Level]:
    """What a sweep of this server with such requests would say: what a calibration holds."""
    return [
        Level(n, curve.closed_loop_tok_s(int(n), prompt_tokens, output_tokens))
        for n, _ in curve.points
    ]


def sweep_curve(name: str) -> ServiceCurve:
    """The curve of a shipped sweep, its prefill in the step times."""
    sweep = raw_sweep(name)
    return curve_from_levels(
        (Level(p.C, p.out_tok_s, None, p.tokens_per_chunk) for p in sweep.points), sweep.label
    )


def arm_curves(name: str) -> tuple[ServiceCurve, ServiceCurve]:
    """The speculative and the baseline server of an arm. Raises CurveError for an unknown one."""
    if name not in ARMS:
        raise CurveError(f"no arm is called {name!r}; there are {', '.join(ARMS)}")
    arm = ARMS[name]
    speculative = sweep_curve(arm.file)
    if arm.acceptance is not None:
        speculative = speculative.accepting(arm.acceptance)
    return speculative, sweep_curve(_BASELINE)


def shipped_trace() -> list[Row]:
    """The first ten minutes of the Azure chat trace of 2023."""
    text = resources.files("loadtest").joinpath("data", *TRACE.split("/")).read_text("ascii")
    return read_trace(text.splitlines(), TRACE)


def read_trace_file(path: Path) -> list[Row]:
    """A trace file. Raises CurveError, also if it cannot be read."""
    try:
        return read_trace(path.read_text("utf-8").splitlines(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CurveError(f"{path} cannot be read: {error}") from error


def read_trace(lines: Sequence[str], name: str) -> list[Row]:
    """Arrivals, from `seconds,prompt,output` or as the Azure trace has them. Raises CurveError."""
    rows: list[Row] = []
    reader = csv.reader(lines)
    columns = next(reader, None)
    azure = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    if columns not in (azure, ["seconds", "prompt", "output"]):
        raise CurveError(
            f"{name}: a trace has the columns {','.join(azure)} or seconds,prompt,output"
        )
    start = None
    for number, row in enumerate(reader, start=2):
        try:
            when, prompt, output = row
            at = _azure_seconds(when) if columns == azure else float(when)
            start = at if start is None else start
            rows.append(Row(at - start, max(1, int(prompt)), max(1, int(output))))
        except ValueError as error:
            raise CurveError(f"{name}, line {number}: no arrival: {error}") from error
        if len(rows) > 1 and rows[-1].at < rows[-2].at:
            raise CurveError(f"{name}, line {number}: earlier than the line before")
    return rows


def _azure_seconds(when: str) -> float:
    """Seconds of a time of day like `2023-11-16 18:15:46.6805900`, days counted in."""
    date, _, clock = when.partition(" ")
    hours, minutes, seconds = clock.split(":")
    day = int(date.rpartition("-")[2])
    return day * 86400.0 + int(hours) * 3600.0 + int(minutes) * 60.0 + float(seconds)


def raw_sweep(name: str = _BASELINE) -> Sweep:
    """A shipped sweep as it was written; without a name the baseline's."""
    data = resources.files("loadtest").joinpath("data", *name.split("/")).read_bytes()
    return msgspec.json.decode(data, type=Sweep)
