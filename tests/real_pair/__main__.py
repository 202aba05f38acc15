"""Tries a running pair of real servers behind the router, as `crossover launch` starts it.

    python -m tests.real_pair --launcher PID --json findings.json

`LOADTEST_ADMIN_KEY` is the router's admin key. Give it a pair that serves nobody else: one server is
killed, and at the end all of it is stopped (without `--launcher`, or with `--only`, it is not). Exit code 0: all held; 1: one
did not; 2: nothing could be asked.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Annotated, Final

import httpx
import msgspec
import typer
from rich.console import Console

from router.load import Role
from tests.real_pair import trials
from tests.real_pair.pair import Pair

TRIALS: Final = ("client", "hang-up", "queue", "kill", "stop")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How hard to try. Times are seconds."""

    launcher: int | None = None  # pid
    overload: int = 0  # streams at once to fill a queue; 0: left out
    stream_gone: float = 0.1
    unary_gone: float = 4.0
    restart: float = 240.0
    concurrency: int = 16
    only: frozenset[str] = frozenset(TRIALS)


async def tried(pair: Pair, options: Options, console: Console) -> list[trials.Finding]:
    """All trials, in the order of the harm that they do."""
    found: list[trials.Finding] = []

    def keep(finding: trials.Finding) -> None:
        word = {True: "held", False: "FAILED", None: "not tried"}[finding.ok]
        said = msgspec.json.encode(finding.seen).decode()
        console.print(f"{word:9}  {finding.trial}: {said}", highlight=False, soft_wrap=True)
        found.append(finding)

    async with pair:
        if "client" in options.only:
            keep(await trials.client_of_openai(pair))
        for role in Role if "hang-up" in options.only else ():
            for stream, within in ((True, options.stream_gone), (False, options.unary_gone)):
                keep(await trials.hang_up(pair, role, stream=stream, within=within))
        if "queue" in options.only and options.overload:
            keep(await trials.queue_full(pair, Role.SPECULATIVE, options.overload))
        if "kill" in options.only:
            keep(await trials.killed(pair, Role.SPECULATIVE, options.concurrency, options.restart))
        if "stop" in options.only and options.launcher is not None:
            keep(await trials.drained(pair, options.launcher, options.concurrency))
    return found


def main(
    *,
    url: str = "http://127.0.0.1:8000",
    admin_url: str = "http://127.0.0.1:9400",
    speculative: str = "http://127.0.0.1:31000",
    baseline: str = "http://127.0.0.1:30000",
    launcher: Annotated[int | None, typer.Option(help="Pid of crossover launch.")] = None,
    overload: Annotated[int, typer.Option(help="Streams at once that overfill a queue.")] = 0,
    stream_gone: Annotated[float, typer.Option(help="Seconds.")] = 0.1,
    unary_gone: Annotated[float, typer.Option(help="Seconds.")] = 4.0,
    restart: Annotated[float, typer.Option(help="Seconds for a killed server to return.")] = 240.0,
    concurrency: int = 16,
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TRIALS)}.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the findings here.")] = None,
) -> None:
    """Try a running pair."""
    console = Console()
    if unknown := set(only or ()) - set(TRIALS):
        console.print(f"real_pair: --only takes {', '.join(TRIALS)}, not {', '.join(unknown)}")
        raise typer.Exit(2)
    pair = Pair(
        url,
        admin_url,
        {Role.SPECULATIVE: speculative, Role.BASELINE: baseline},
        admin_key=os.environ.get("LOADTEST_ADMIN_KEY"),
    )
    options = Options(
        launcher=launcher,
        overload=overload,
        stream_gone=stream_gone,
        unary_gone=unary_gone,
        restart=restart,
        concurrency=concurrency,
        only=frozenset(only or TRIALS),
    )
    began = time.monotonic()
    try:
        found = asyncio.run(tried(pair, options, console))
    except httpx.HTTPError as error:
        console.print(f"real_pair: a listener does not answer: {error!r}")
        raise typer.Exit(2) from None
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    failed = sum(finding.ok is False for finding in found)
    console.print(f"{len(found)} trials, {failed} failed, {time.monotonic() - began:.0f} s")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
