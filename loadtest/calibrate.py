"""From two live servers to a calibration: both swept in turns, both at once, then the fit.

`loadtest calibrate` in one function. Everything measured is kept in a directory, one sweep for each
class of prompts, so a calibration that was stopped goes on with the same command. The line comes
from the first class; the others say how far it moves with longer prompts. How the line follows from
the curves is `fit`'s to say.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from loadtest.both_at_once import BothAtOnce, Overlapped, as_runs, pairs_of
from loadtest.conditions import FitError
from loadtest.contention import Both
from loadtest.fit import Gpus, fit
from loadtest.import_own import sweeps_of
from loadtest.objectives import Objective, Slo
from loadtest.points import Sweep as Measured
from loadtest.progress import Lines
from loadtest.ruled import with_rule
from loadtest.sweep_level import Instruments
from loadtest.sweep_run import Options, prepared
from loadtest.sweep_schema import Pace, Plan, Sweep
from router.calibration import Calibration
from router.load import Role

SWEEP_NAME: Final = "sweep.json"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What to calibrate, and how. Times are seconds."""

    speculative: str  # base URLs
    baseline: str
    work: Path  # what is measured is kept here
    plan: Plan
    pace: Pace = Pace()
    input_tokens: tuple[int, ...] = (128, 1024)  # one class of prompts for each
    output_tokens: int = 128
    prompts: Path | None = None  # in place of the classes
    overlaps: bool = True  # whether both servers are measured at once
    gpus: Gpus | None = None  # None: as the overlaps say
    objective: Objective = "throughput"
    slo: Slo | None = None
    model: str | None = None
    key: str | None = None
    seed: int = 0
    timeout: float = 600.0
    command: str = ""


class Class(msgspec.Struct, frozen=True):
    """One class of prompts, measured."""

    input_tokens: int | None  # None: as the prompts of the user are
    sweep: Sweep
    overlaps: tuple[Overlapped, ...]


async def calibrate(
    wanted: Wanted,
    show: Lines,
    *,
    instruments: Instruments | None = None,
) -> Calibration:
    """Measure what is not measured yet, and fit. Raises SweepError, PromptError, FitError."""
    sizes: Sequence[int | None] = wanted.input_tokens if wanted.prompts is None else (None,)
    classes = []
    for at, size in enumerate(sizes):
        show.say(f"prompts of about {size} tokens" if size is not None else "the prompts given")
        classes.append(await _measure(wanted, size, show, instruments, overlaps=at == 0))
    show.say("fitting, and trying the rules on the curves")
    return fitted(wanted, classes)


async def _measure(
    wanted: Wanted,
    size: int | None,
    show: Lines,
    instruments: Instruments | None,
    *,
    overlaps: bool,
) -> Class:
    """One class: the sweep, and where it is asked for the overlaps."""
    options = Options(
        targets=((Role.SPECULATIVE, wanted.speculative), (Role.BASELINE, wanted.baseline)),
        out=wanted.work / ("prompts" if size is None else f"in-{size}"),
        plan=wanted.plan,
        pace=wanted.pace,
        prompts=wanted.prompts,
        input_tokens=size,
        output_tokens=wanted.output_tokens,
        seed=wanted.seed,
        model=wanted.model,
        key=wanted.key,
        timeout=wanted.timeout,
        command=wanted.command,
    )
    async with prepared(options, instruments=instruments) as ready:
        sweep = await ready.run(show)
        found: tuple[Overlapped, ...] = ()
        if overlaps and wanted.overlaps:
            both = BothAtOnce(options.out, ready.targets, ready.asker, wanted.pace, ready.tools)
            found = await both.run(pairs_of(wanted.plan.levels), show.say)
    return Class(size, sweep, found)


def fitted(wanted: Wanted, classes: Sequence[Class]) -> Calibration:
    """The calibration of what was measured; the first class decides. Raises FitError."""
    first, *others = classes
    runs = as_runs(first.overlaps, first.sweep)
    made = with_rule(_fit(wanted, first, runs))
    notes = [*made.notes]
    for other in others:
        try:
            found = _fit(wanted, other, runs)
        except FitError as error:
            notes.append(f"prompts of about {other.input_tokens} tokens: {error}")
            continue
        notes.append(
            f"prompts of about {other.input_tokens} tokens: {_said(found)};"
            f" the line is for about {first.input_tokens} tokens: {_said(made)}"
        )
    return msgspec.structs.replace(made, notes=tuple(notes))


def _fit(wanted: Wanted, measured: Class, runs: Sequence[Both]) -> Calibration:
    name = f"in-{measured.input_tokens}" if measured.input_tokens is not None else "prompts"
    sweeps = sweeps_of(measured.sweep, f"{name}/{SWEEP_NAME}")
    return fit(
        _of(sweeps, Role.BASELINE),
        _of(sweeps, Role.SPECULATIVE),
        both=runs,
        gpus=wanted.gpus,
        objective=wanted.objective,
        slo=wanted.slo,
        created=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=wanted.command,
    )


def _of(sweeps: Sequence[Measured], role: Role) -> list[Measured]:
    return [sweep for sweep in sweeps if sweep.role is role]


def _said(found: Calibration) -> str:
    """A verdict in a few words."""
    if found.verdict in {"never", "always"}:
        return str(found.verdict)
    line = found.frontier.threshold
    low, high = found.interval or ("?", "?")
    return f"{'about' if found.verdict == 'unsure' else 'at'} {line} [{low}, {high}]"
