"""The command `loadtest calibrate`: flags in, words and an exit code out.

It measures nothing, and imports what it runs when it runs it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadtest.exit_codes import BAD_VALUE, FAILED, INTERRUPTED, OK, TERMINATED
from loadtest.fit_cli import Aim, Gpus
from loadtest.sweep_cli import (
    LEVELS,
    WarmUp,
    command_given,
    levels_in,
    pace_of,
    say_stopped,
    until_told,
)

if TYPE_CHECKING:
    from loadtest.calibrate import Wanted


Url = Annotated[str, typer.Option(help="Base URL of this server.")]
Out = Annotated[Path, typer.Option(help="The calibration to write, for crossover serve.")]
Work = Annotated[
    Path | None,
    typer.Option(help="Keeps what is measured (default: --out with .sweeps); gone on with."),
]
Levels = Annotated[str, typer.Option(help="Requests kept in flight, one level after the other.")]
Passes = Annotated[int, typer.Option(help="How often each level is measured.", min=1, max=100)]
Seconds = Annotated[float, typer.Option(help="Least length of a window.", min=0.05, max=3600)]
MostSeconds = Annotated[
    float | None, typer.Option(help="Its most, if answers are few (default: 6 times --seconds).")
]
InputTokens = Annotated[
    str, typer.Option(help="Classes of prompts, in tokens; the line is for the first.")
]
OutputTokens = Annotated[int, typer.Option(help="Tokens of each answer.", min=2)]
Prompts = Annotated[
    Path | None, typer.Option(help="Your own prompts, one a line, in place of the classes.")
]
Model = Annotated[str | None, typer.Option(help="Model to name (default: the one served).")]
GpusOption = Annotated[
    Gpus | None, typer.Option(help="Where the servers run (default: as both at once tells).")
]
NoOverlap = Annotated[bool, typer.Option("--no-overlap", help="Do not measure both at once.")]
Anyway = Annotated[bool, typer.Option("--anyway", help="Measure although the doctor objects.")]
NoDoctor = Annotated[bool, typer.Option("--no-doctor", help="Do not ask crossover doctor first.")]
Limit = Annotated[float | None, typer.Option(help="For --objective slo.", min=0.001)]
Seed = Annotated[int, typer.Option(help="Of prompts and lengths.")]
Timeout = Annotated[float, typer.Option(help="Seconds for a whole request.", min=0.1)]


def calibrate(
    speculative: Url,
    baseline: Url,
    out: Out,
    work: Work = None,
    levels: Levels = LEVELS,
    passes: Passes = 3,
    seconds: Seconds = 10.0,
    most_seconds: MostSeconds = None,
    warm_up: WarmUp = 2.0,
    input_tokens: InputTokens = "128,1024",
    output_tokens: OutputTokens = 128,
    prompts: Prompts = None,
    model: Model = None,
    gpus: GpusOption = None,
    objective: Annotated[Aim, typer.Option(help="What the line is for.")] = Aim.THROUGHPUT,
    slo_ttft_ms: Limit = None,
    slo_token_ms: Limit = None,
    no_overlap: NoOverlap = False,
    no_doctor: NoDoctor = False,
    anyway: Anyway = False,
    seed: Seed = 0,
    timeout: Timeout = 600.0,
) -> None:
    """Measure both servers and write the line that crossover serve follows. Resumable.

    Asks crossover doctor first, sweeps both servers in turns for each class of prompts, then both
    at once, fits the curves and tries the rules on them. An API key is taken from LOADTEST_API_KEY.
    The last line printed is the verdict: never, always, at or unsure. Exit code 0: written; 1: the
    doctor objects, or a server failed (what is measured is kept); 2: a bad value.
    """
    from loadtest.calibrate import Wanted
    from loadtest.objectives import Slo
    from loadtest.sweep_probe import KEY_ENV
    from loadtest.sweep_schema import Plan

    _check(speculative, baseline, out)
    limits = [None if ms is None else ms / 1e3 for ms in (slo_ttft_ms, slo_token_ms)]
    wanted = Wanted(
        speculative=speculative,
        baseline=baseline,
        work=work or out.with_name(f"{out.name}.sweeps"),
        plan=Plan(levels=levels_in(levels), passes=passes),
        pace=pace_of(seconds, most_seconds, warm_up),
        input_tokens=_sizes(input_tokens),
        output_tokens=output_tokens,
        prompts=prompts,
        overlaps=not no_overlap,
        gpus=None if gpus is None else gpus.value,
        objective=objective.value,
        slo=Slo(*limits),
        model=model,
        key=os.environ.get(KEY_ENV) or None,
        seed=seed,
        timeout=timeout,
        command=command_given(),
    )
    if not no_doctor:
        _examine(wanted, anyway=anyway)
    raise typer.Exit(_run(wanted, out))


def _check(speculative: str, baseline: str, out: Path) -> None:
    """Refuse at once what would be found out only when all is measured."""
    if speculative.rstrip("/") == baseline.rstrip("/"):
        msg = f"--speculative and --baseline are the same server, {baseline}"
        raise typer.BadParameter(msg)
    if out.is_dir():
        msg = f"--out {out} is a directory: name a file, as in {out / 'calibration.json'}"
        raise typer.BadParameter(msg)


def _examine(wanted: Wanted, *, anyway: bool) -> None:
    """Ask the doctor and show what it found. Exit 1 when that spoils a calibration."""
    from rich.console import Console

    from loadtest.sweep_probe import KEY_ENV
    from loadtest.sweep_view import WIDTH
    from router.doctor import CannotLookError, diagnose, targets_of
    from router.doctor_report import show
    from router.load import Role

    urls = {Role.SPECULATIVE: wanted.speculative, Role.BASELINE: wanted.baseline}
    try:
        targets = targets_of(urls, dict.fromkeys(Role, wanted.key), key_setting=KEY_ENV)
        looked = asyncio.run(diagnose(targets))
    except CannotLookError as error:
        print(f"loadtest calibrate: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    show(looked, Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH))
    if not looked.examination.sound and not anyway:
        print(
            "loadtest calibrate: nothing was measured, since it would be of something else than it"
            " says; mend what is found, or give --anyway",
            file=sys.stderr,
        )
        raise typer.Exit(FAILED)


def _run(wanted: Wanted, out: Path) -> int:
    import uvloop
    from rich.console import Console

    from loadtest.calibrate import calibrate as measure
    from loadtest.conditions import FitError
    from loadtest.fit_words import describe
    from loadtest.progress import shown
    from loadtest.prompts import PromptError
    from loadtest.service import CurveError
    from loadtest.sweep_schema import ServerFailedError, SweepError
    from router.calibration import format_calibration

    try:
        with (
            shown(Console(stderr=True)) as show,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            found = runner.run(until_told(measure(wanted, show)))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(format_calibration(found))
    except (ServerFailedError, FitError, CurveError) as error:
        print(f"loadtest calibrate: {error}", file=sys.stderr)
        return FAILED
    except (PromptError, SweepError) as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        print(f"loadtest calibrate: {error.filename}: {error.strerror}", file=sys.stderr)
        return BAD_VALUE
    except KeyboardInterrupt:
        return say_stopped(INTERRUPTED)
    except asyncio.CancelledError:
        return say_stopped(TERMINATED)
    *said, verdict = describe(found)
    for line in [*said, f"written: {out}", verdict]:
        print(line)
    return OK


def _sizes(text: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise typer.BadParameter(f"--input-tokens are whole numbers, as in 128,1024; got {text!r}")
    return found
