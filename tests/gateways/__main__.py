"""Runs real gateways in front of two pairs and prints what was seen, as a table in Markdown.

    python -m tests.gateways --only smg,haproxy,nginx

Each runs with its configuration in `deploy/gateways/`. One that is not installed is said so and
left out. Nothing is downloaded. Programs are looked for on PATH, or named by SMG, HAPROXY and NGINX
in the environment.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.gateways.findings import Finding
from tests.gateways.fronts import Gateway
from tests.gateways.play import tried, watched
from tests.gateways.site import site

NAMES: Final = ("smg", "haproxy", "nginx")


async def play(gateway: Gateway, seconds: float, progress: Progress) -> list[Finding]:
    """Every check of one gateway, in front of two fresh pairs."""
    task = progress.add_task(gateway.name)

    def say(what: str) -> None:
        progress.update(task, description=f"{gateway.name}: {what}")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with site(folder) as pairs:
            say("what passes")
            found = await watched(gateway, pairs, folder, listen_s=4 * seconds)
            found += await tried(
                gateway, pairs, folder, streams=32, requests=200, steady_s=seconds, say=say
            )
    say("done")
    return found


def table(columns: dict[str, list[Finding]]) -> str:
    """The findings of each gateway beside each other, as Markdown."""
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    names = list(dict.fromkeys(each.name for found in columns.values() for each in found))
    for name in names:
        cells = []
        for found in columns.values():
            each = {finding.name: finding for finding in found}[name]
            mark = "" if each.ok is not False else "**no**: "
            cells.append(mark + each.figure.replace("|", "/"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    only: Annotated[str, typer.Option(help="Which, with commas between.")] = ",".join(NAMES),
    seconds: Annotated[float, typer.Option(help="How long each load is steady.")] = 2.0,
) -> None:
    """Print what each gateway does in front of two pairs.

    For example: python -m tests.gateways --only haproxy

    Exit codes: 0 all was as it should be, 1 something was not, 2 a name is not known, 3 none of the
    gateways is installed.
    """
    names = [name.strip() for name in only.split(",")]
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        typer.echo(
            f"gateways: not known: {', '.join(unknown)}; there are {', '.join(NAMES)}", err=True
        )
        raise typer.Exit(2)
    found = [Gateway(name) for name in names]
    for gateway in found:
        if gateway.program is None:
            typer.echo(f"gateways: {gateway.name} is not installed and left out", err=True)
    found = [gateway for gateway in found if gateway.program is not None]
    if not found:
        raise typer.Exit(3)
    columns = {}
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        for gateway in found:
            columns[gateway.version()] = asyncio.run(play(gateway, seconds, progress))
    typer.echo(table(columns))
    if any(each.ok is False for findings in columns.values() for each in findings):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
