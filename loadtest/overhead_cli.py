"""The command `loadtest overhead`: flags in, words and an exit code out.

It measures nothing, and imports what it runs when it runs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadtest.exit_codes import OK
from loadtest.sweep_cli import POLL_S, command_given
from router.load import Role

if TYPE_CHECKING:
    from loadtest.overhead_window import Options
    from loadtest.sweep_schema import Pace

Direct = Annotated[str, typer.Option(help="The server's own base URL.")]
RoleOption = Annotated[Role, typer.Option("--role", help="Which server of the pair that is.")]
Url = Annotated[str, typer.Option(help="The router's base URL.")]
AdminUrl = Annotated[str, typer.Option(help="The router's admin listener.")]
Out = Annotated[Path, typer.Option(help="Directory; what is measured in it is gone on with.")]
Level = Annotated[int, typer.Option(help="Requests kept in flight.", min=1)]
Rounds = Annotated[
    int, typer.Option(help="Of four windows each: direct, router, router, direct.", min=1, max=100)
]
Seconds = Annotated[float, typer.Option(help="Length of a window.", min=0.05, max=3600)]
WarmUp = Annotated[float, typer.Option(help="Least warm-up of a window, seconds.", min=0)]
Margin = Annotated[float, typer.Option(help="Per cent that do not matter.", min=0.1, max=50)]
OutputTokens = Annotated[
    str, typer.Option(help="Tokens of each answer: one number, or the two that it is between.")
]
InputTokens = Annotated[
    int | None, typer.Option(help="Shipped texts, cut to about this many tokens.", min=1)
]
Prompts = Annotated[Path | None, typer.Option(help="Prompts, one a line, as text or JSON.")]
Model = Annotated[str | None, typer.Option(help="Model to name (default: the one served).")]
Settle = Annotated[
    float, typer.Option(help="Seconds for both servers to become idle in between.", min=0)
]
Seed = Annotated[int, typer.Option(help="Of prompts and lengths.")]
Timeout = Annotated[float, typer.Option(help="Seconds for a whole request.", min=0.1)]


def overhead(
    direct: Direct,
    role: RoleOption,
    url: Url,
    admin_url: AdminUrl,
    out: Out = Path("overhead"),
    level: Level = 64,
    rounds: Rounds = 2,
    seconds: Seconds = 30.0,
    warm_up: WarmUp = 5.0,
    margin: Margin = 3.0,
    output_tokens: OutputTokens = "64-192",
    input_tokens: InputTokens = None,
    prompts: Prompts = None,
    model: Model = None,
    settle: Settle = 30.0,
    seed: Seed = 0,
    timeout: Timeout = 600.0,
) -> None:
    """Measure what the router costs: one server directly and through it, in turns. Resumable.

    The router sends everything to that server meanwhile, and decides as before at the end; its
    admin key is taken from LOADTEST_ADMIN_KEY, a key for clients from LOADTEST_API_KEY. The last
    line is the verdict on output tokens per second: level, slower, faster or unsure. Exit code 0:
    measured, whatever the verdict; 1: a server or the router failed, and what is measured is kept;
    2: a bad value; 129, 130, 143: ended by SIGHUP, Ctrl-C, SIGTERM.
    """
    from loadtest.live_router import ADMIN_KEY_ENV
    from loadtest.overhead_window import Options
    from loadtest.sweep_probe import KEY_ENV

    shortest, longest = _lengths(output_tokens)
    options = Options(
        direct=direct,
        role=role,
        url=url,
        admin_url=admin_url,
        out=out,
        level=level,
        rounds=rounds,
        pace=_pace(seconds, warm_up),
        margin=margin / 100,
        shortest=shortest,
        longest=longest,
        input_tokens=input_tokens,
        prompts=prompts,
        model=model,
        admin_key=os.environ.get(ADMIN_KEY_ENV) or None,
        key=os.environ.get(KEY_ENV) or None,
        seed=seed,
        settle_s=settle,
        timeout=timeout,
        command=command_given(),
    )
    raise typer.Exit(_run(options))


def _pace(seconds: float, warm_up: float) -> Pace:
    """Windows of exactly this length, however few answers there are: pairs have to be alike."""
    from loadtest.sweep_schema import Pace

    return Pace(
        warm_up_s=warm_up,
        most_warm_up_s=max(warm_up, 120.0),
        window_s=seconds,
        most_window_s=seconds,
        per_slot=0.0,
        poll_s=min(POLL_S, seconds / 4),
    )


def _lengths(text: str) -> tuple[int, int]:
    try:
        found = [int(part) for part in text.split("-")]
    except ValueError:
        found = []
    if len(found) not in {1, 2} or min(found) < 2 or found != sorted(found):
        raise typer.BadParameter(f"--output-tokens is as in 128 or 64-192, from 2 up; got {text!r}")
    return found[0], found[-1]


def _run(options: Options) -> int:
    from rich.console import Console

    from loadtest.live_process import run_borrowing
    from loadtest.overhead_run import run_overhead
    from loadtest.overhead_view import report
    from loadtest.sweep_view import WIDTH

    found = run_borrowing("overhead", lambda show: run_overhead(options, show))
    Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False).print(report(found))
    print(f"Written to {options.out}")
    print(found.differences[0].verdict.value if found.differences else "unsure")
    return OK
