"""`make fuzz`: every target for so long, each in a process of its own.

    python -m tests.fuzz --seconds 60 [TARGET...]

Inputs that reached new code stay in `.hypothesis/fuzz/TARGET`, which git ignores, and are where the next
run begins. One that breaks a promise is left in `.hypothesis/fuzz/crash-...`, and
`python -m tests.fuzz.worker TARGET FILE` replays it.
Exit code 0 when no target failed, else 1.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.fuzz.targets import TARGETS

SLACK_S = 60.0  # to begin and to end


def run_target(target: str, seconds: float, corpus: Path) -> tuple[int, str]:
    """The exit code of one target, and what it said."""
    command = [sys.executable, "-m", "tests.fuzz.worker", target]
    command += ["--seconds", f"{seconds:g}", "--corpus", str(corpus)]
    found = subprocess.run(
        command, capture_output=True, check=False, timeout=seconds + SLACK_S, text=True
    )
    return found.returncode, found.stdout + found.stderr


def main(
    targets: Annotated[list[str] | None, typer.Argument(help="Some of them only.")] = None,
    seconds: Annotated[float, typer.Option(help="For each target.", min=1)] = 60.0,
    corpus: Annotated[Path, typer.Option(help="Where inputs are kept.")] = Path(".hypothesis/fuzz"),
) -> None:
    """Fuzz what reads bytes of strangers."""
    console = Console()
    unknown = set(targets or ()) - set(TARGETS)
    if unknown:
        console.print(f"fuzz: no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
        raise typer.Exit(2)
    failed = False
    for target in targets or TARGETS:
        console.print(f"{target:8} for {seconds:g} s ...", highlight=False)
        code, said = run_target(target, seconds, corpus)
        done = re.search(r"Done (\d+) runs in (\d+) second.*", said)
        if code == 0 and done:
            console.print(f"{target:8} {int(done[1]):,} inputs, no promise broken", highlight=False)
            continue
        failed = True
        console.print(said[-6000:], markup=False, highlight=False)
        console.print(f"[bold red]{target} failed[/]: exit code {code}")
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
