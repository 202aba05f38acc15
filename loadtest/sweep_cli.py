"""The command `loadtest sweep`: flags in, words and an exit code out; what other commands read alike.

It measures nothing, and imports what it runs when it runs it.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from loadtest.exit_codes import FAILED, INTERRUPTED, OK, TERMINATED
from router.load import Role

if TYPE_CHECKING:
    from loadtest.sweep_run import Options
    from loadtest.sweep_schema import Pace, Plan

Given = TypeVar("Given")
LEVELS: Final = "1,2,4,8,16,32,48,64,96,128,192,256"
OUTPUT_TOKENS: Final = 128
MOST_TIMES: Final = 6  # --seconds, unless --most-seconds says otherwise
POLL_S: Final = 0.5  # between two looks at the server's load

Url = Annotated[list[str], typer.Option("--url", help="A server's base URL; once for each --role.")]
RoleOption = Annotated[
    list[Role], typer.Option("--role", help="Which server of the pair that is, in the same order.")
]
Out = Annotated[
    Path, typer.Option(help="Directory for what is measured; a sweep in it is gone on with.")
]
Levels = Annotated[str, typer.Option(help="Requests kept in flight, one level after the other.")]
Rate = Annotated[
    str | None,
    typer.Option(help="Open loop in place of --levels: so many requests a second, Poisson."),
]
Passes = Annotated[int, typer.Option(help="How often each level is measured.", min=1, max=100)]
Prompts = Annotated[
    Path | None, typer.Option(help="Prompts, one a line, as text or JSON (default: shipped texts).")
]
InputTokens = Annotated[
    int | None, typer.Option(help="Shipped texts, cut to about this many tokens.", min=1)
]
OutputTokens = Annotated[
    int | None, typer.Option(help=f"Tokens of each answer (default: {OUTPUT_TOKENS}).", min=1)
]
Trace = Annotated[
    Path | None, typer.Option(help="Lengths from a trace: CSV with ContextTokens, GeneratedTokens.")
]
Seconds = Annotated[float, typer.Option(help="Least length of the window.", min=0.05, max=3600)]
MostSeconds = Annotated[
    float | None, typer.Option(help="Its most, if answers are few (default: 6 times --seconds).")
]
WarmUp = Annotated[float, typer.Option(help="Least length of the warm-up.", min=0, max=3600)]
MostWarmUp = Annotated[float, typer.Option(help="Its most, if first answers are slow.", min=0)]
PerSlot = Annotated[float, typer.Option(help="Answers for each slot that a window needs.", min=0)]
Repeat = Annotated[
    bool, typer.Option("--repeat-prompts", help="Send prompts as they are, without a mark.")
]
NaturalEnds = Annotated[
    bool, typer.Option("--natural-ends", help="Let answers end by themselves (no ignore_eos).")
]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature (default: the server's).", min=0, max=2)
]
Model = Annotated[str | None, typer.Option(help="Model to name (default: the one served).")]
Seed = Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.")]
Timeout = Annotated[float, typer.Option(help="Seconds for a whole request.", min=0.1)]


def sweep(
    url: Url,
    role: RoleOption,
    out: Out,
    levels: Levels = LEVELS,
    rate: Rate = None,
    passes: Passes = 3,
    prompts: Prompts = None,
    input_tokens: InputTokens = None,
    output_tokens: OutputTokens = None,
    trace: Trace = None,
    seconds: Seconds = 10.0,
    most_seconds: MostSeconds = None,
    warm_up: WarmUp = 2.0,
    most_warm_up: MostWarmUp = 120.0,
    per_slot: PerSlot = 3.0,
    repeat_prompts: Repeat = False,
    natural_ends: NaturalEnds = False,
    temperature: Temperature = None,
    model: Model = None,
    seed: Seed = 0,
    timeout: Timeout = 600.0,
) -> None:
    """Measure how fast a server is with so many requests in flight. Resumable; see SWEEPS.md.

    A server's API key is taken from LOADTEST_API_KEY. Exit code 0: all levels are measured (read
    the notices); 1: a server failed, and what is measured is kept; 2: a bad value.
    """
    from loadtest.sweep_probe import KEY_ENV
    from loadtest.sweep_run import Options

    if len(url) != len(role) or len(set(role)) != len(role):
        raise typer.BadParameter("give one --role for each --url, and each role once")
    if output_tokens is None and trace is None:
        output_tokens = OUTPUT_TOKENS
    options = Options(
        targets=tuple(zip(role, url, strict=True)),
        out=out,
        plan=_plan(levels, rate, passes),
        pace=pace_of(seconds, most_seconds, warm_up, most_warm_up, per_slot),
        prompts=prompts,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        trace=trace,
        unique=not repeat_prompts,
        ignore_eos=not natural_ends,
        temperature=temperature,
        seed=seed,
        model=model,
        key=os.environ.get(KEY_ENV) or None,
        timeout=timeout,
        command=command_given(),
    )
    raise typer.Exit(_run(options))


def _run(options: Options) -> int:
    import uvloop
    from rich.console import Console

    from loadtest.progress import shown
    from loadtest.prompts import PromptError
    from loadtest.sweep_run import run_sweep
    from loadtest.sweep_schema import ServerFailedError, SweepError
    from loadtest.sweep_view import WIDTH, report

    try:
        with (
            shown(Console(stderr=True)) as show,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            found = runner.run(until_told(run_sweep(options, show)))
    except ServerFailedError as error:
        print(f"loadtest sweep: {error}", file=sys.stderr)
        return FAILED
    except (PromptError, SweepError) as error:
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        return say_stopped(INTERRUPTED)
    except asyncio.CancelledError:
        return say_stopped(TERMINATED)
    Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False).print(report(found))
    print(f"Written to {options.out}")
    return OK


async def until_told(work: Coroutine[Any, Any, Given]) -> Given:
    """What this work gives; SIGTERM ends it as Ctrl-C does."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: task and task.cancel())
    try:
        return await work
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def say_stopped(code: int) -> int:
    """Say how to go on; the exit code."""
    print("Stopped; the same command goes on from here.", file=sys.stderr)
    return code


def command_given(typed: Sequence[str] | None = None) -> str:
    """What was typed, after the command's own name; a password in a URL is left out."""
    words = ["loadtest", *(sys.argv if typed is None else typed)[1:]]
    return shlex.join(_without_user(word) for word in words)


def _without_user(word: str) -> str:
    scheme, sep, rest = word.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{sep}{authority.rpartition('@')[2]}{slash}{path}" if sep else word


def _plan(levels: str, rate: str | None, passes: int) -> Plan:
    """A rate takes the place of levels."""
    from loadtest.sweep_schema import Plan

    if rate is not None:
        return Plan(rates=_rates(rate), passes=passes)
    return Plan(levels=levels_in(levels), passes=passes)


def pace_of(
    seconds: float,
    most_seconds: float | None,
    warm_up: float,
    most_warm_up: float = 120.0,
    per_slot: float = 3.0,
) -> Pace:
    """Bounds are never below what they bound."""
    from loadtest.sweep_schema import Pace

    return Pace(
        warm_up_s=warm_up,
        most_warm_up_s=max(warm_up, most_warm_up),
        window_s=seconds,
        most_window_s=max(seconds, MOST_TIMES * seconds if most_seconds is None else most_seconds),
        per_slot=per_slot,
        poll_s=min(POLL_S, seconds / 4),
    )


def levels_in(text: str) -> tuple[int, ...]:
    """Levels as they are written."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise typer.BadParameter(f"--levels are whole numbers from 1 up, as in 1,2,4; got {text!r}")
    return found


def _rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < rate < 1e6 for rate in found):
        raise typer.BadParameter(f"--rate is above 0 requests a second, as in 0.5,2; got {text!r}")
    return found
