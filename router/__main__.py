"""The command `crossover`. Each subcommand imports what it runs when it runs it.

Nothing is decided here: `config` reads settings, `app` serves, `exit_codes` says how each may end.
"""

import json
import platform
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from router import __version__
from router.config import GROUPS, Settings, SettingsError, is_secret, load_settings_and_sources
from router.config_flags import reference, with_flags
from router.doctor_cli import doctor
from router.exit_codes import EXIT_CONFIGURATION, EXIT_FAILURE
from router.launch_cli import launch

app = typer.Typer(
    name="crossover",
    help="One OpenAI-compatible address in front of a speculative and a baseline SGLang server.",
    no_args_is_help=True,
    add_completion=False,
    # A traceback of typer's shows local variables, and secrets are among them.
    pretty_exceptions_enable=False,
)


app.command("doctor")(doctor)
app.command("launch")(launch)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"crossover {__version__} (Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_say_version, is_eager=True),
    ] = False,
) -> None:
    """What belongs to no command."""


def _settings(config: Path | None, flags: Mapping[str, Any]) -> tuple[Settings, dict[str, str]]:
    try:
        return load_settings_and_sources(flags, config=config)
    except SettingsError as error:
        print("crossover: the configuration is refused:", file=sys.stderr)
        for line in error.lines:
            print(f"  {line}", file=sys.stderr)
        raise typer.Exit(EXIT_CONFIGURATION) from None


@app.command()
@with_flags
def serve(config: Path | None, flags: dict[str, Any]) -> None:
    """Route requests until told to stop.

    For example: crossover serve --speculative http://127.0.0.1:31000 --baseline http://127.0.0.1:30000 --threshold 32

    Every flag may stand in the file given with --config and in the environment, as in
    CROSSOVER_THRESHOLD=32; a flag wins over the environment, and that over the file.

    Exit codes: 0 a clean stop, 2 refused configuration, 3 an address cannot be bound, 4 a failure.
    """
    settings, _ = _settings(config, flags)
    from router.app import serve as run

    try:
        code = run(settings)
    except Exception:  # noqa: BLE001 (the last stop: the documented code instead of Python's 1)
        traceback.print_exc()
        code = EXIT_FAILURE
    raise typer.Exit(code)


@app.command("config")
@with_flags
def show_config(config: Path | None, flags: dict[str, Any]) -> None:
    """Print the settings that serve would use, and where each came from.

    The output is a TOML file; secrets are hidden.
    """
    settings, sources = _settings(config, flags)
    from router.wiring import CalibrationError, read_line

    values = settings.redacted()
    try:
        _, band, dwell = read_line(settings)
    except CalibrationError as error:
        print(f"crossover: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_CONFIGURATION) from None
    for name, value in (("band", band), ("dwell", dwell)):
        if value is not None:
            values[name], sources[name] = value, "calibration"
    for group in GROUPS:
        print(f"# {group.title}")
        for name in group.model_fields:
            hidden = values[name] is None or is_secret(name)
            line = f"{name} = {json.dumps(values[name])}  # {sources[name]}"
            print(f"# {line}" if hidden else line)
        print()


@app.command("settings")
def show_reference() -> None:
    """Print the reference of all settings, in Markdown."""
    print(reference())


@app.command()
def version() -> None:
    """Print the version."""
    _say_version(asked=True)


def main() -> None:
    """Run the command line; this is what the installed `crossover` calls."""
    app(prog_name="crossover")


if __name__ == "__main__":
    main()
