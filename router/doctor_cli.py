"""The command `crossover doctor`: its flags, and its exit codes.

It judges nothing and asks nobody: `doctor` does the latter, `doctor_rules` the former. What it runs
it imports when it runs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from router.config import Settings, SettingsError, load_settings
from router.config_sources import gather
from router.doctor_facts import threshold_in
from router.exit_codes import EXIT_CONFIGURATION, EXIT_OK, EXIT_SPOILED
from router.load import Role

if TYPE_CHECKING:
    from router.doctor import Looked
    from router.frontier import Frontier

PIPE_WIDTH: Final = 160  # columns

Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The TOML file that serve would use."),
]
Url = Annotated[str | None, typer.Option(metavar="URL", help="As for serve.")]
Key = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="As for serve; better in the environment, as CROSSOVER_..."),
]
Threshold = Annotated[
    str | None,
    typer.Option(metavar="NUMBER", help="The threshold that the servers' limits must allow."),
]
Canary = Annotated[
    bool, typer.Option("--canary/--no-canary", help="Send each server one request of 64 tokens.")
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="For each answer.", min=0.1)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Rules = Annotated[bool, typer.Option("--rules", help="Print all rules, in Markdown, and end.")]


def doctor(
    config: Config = None,
    speculative: Url = None,
    baseline: Url = None,
    backend_api_key: Key = None,
    speculative_api_key: Key = None,
    baseline_api_key: Key = None,
    threshold: Threshold = None,
    canary: Canary = True,
    timeout: Timeout = 30.0,
    json: Json = False,
    rules: Rules = False,
) -> None:
    """Say whether the pair is what its flags say, and whether comparing it is fair.

    For example: crossover doctor --speculative http://127.0.0.1:31000 --baseline http://127.0.0.1:30000

    The environment and the file count as for serve; a threshold is not needed.

    Exit codes: 0 sound, 1 a finding that spoils a calibration, 2 it could not look.
    """
    from router.doctor_rules import document

    if rules:
        sys.stdout.write(document())
        return
    flags: dict[str, object] = {
        "speculative": speculative,
        "baseline": baseline,
        "backend_api_key": backend_api_key,
        "speculative_api_key": speculative_api_key,
        "baseline_api_key": baseline_api_key,
        "threshold": threshold,
    }
    settings, line = _configured(flags, config)
    looked = _look(settings, threshold_in(line), canary=canary, timeout=timeout)
    if json:
        from router.doctor_report import as_json

        sys.stdout.write(as_json(looked).decode())
    else:
        from rich.console import Console

        from router.doctor_report import show

        # A pipe has no width; 80 columns would break what somebody greps for.
        show(looked, Console(width=None if sys.stdout.isatty() else PIPE_WIDTH))
    raise typer.Exit(EXIT_OK if looked.examination.sound else EXIT_SPOILED)


def _configured(flags: dict[str, object], config: Path | None) -> tuple[Settings, Frontier | None]:
    from router.wiring import CalibrationError, read_line

    given = gather(tuple(Settings.model_fields), flags=flags, environ=os.environ, config=config)
    if not {"threshold", "calibration", "policy"} & set(given.given):
        flags = {
            **flags,
            "policy": "baseline",
        }  # one that needs no line: the doctor decides nothing
    try:
        settings = load_settings(flags, config=config)
        return settings, read_line(settings)[0]
    except SettingsError as error:
        lines = error.lines
    except CalibrationError as error:
        lines = (str(error),)
    for text in lines:
        sys.stderr.write(f"crossover doctor: {text}\n")
    raise typer.Exit(EXIT_CONFIGURATION)


def _look(settings: Settings, threshold: float | None, *, canary: bool, timeout: float) -> Looked:
    import asyncio

    from router.doctor import CannotLookError, diagnose, targets_of

    keys = {}
    for role in Role:
        key = settings.backend_key(role.value)
        keys[role] = key.get_secret_value() if key is not None else None
    urls = {Role.SPECULATIVE: str(settings.speculative), Role.BASELINE: str(settings.baseline)}
    work = diagnose(targets_of(urls, keys), threshold=threshold, canary=canary, timeout=timeout)
    try:
        return asyncio.run(work)
    except CannotLookError as error:
        sys.stderr.write(f"crossover doctor: {error}\n")
        raise typer.Exit(EXIT_CONFIGURATION) from None
