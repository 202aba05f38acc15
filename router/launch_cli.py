"""The command `crossover launch`: its flags and its exit codes.

It starts nothing itself: `launch_prepare` says what to start, `launch` does it. What it runs it
imports when it runs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from router.config import SettingsError
from router.config_flags import Command, parameter_of, with_flags
from router.config_launch import LaunchTableError
from router.config_sources import ENV_PREFIX
from router.exit_codes import EXIT_CONFIGURATION, EXIT_FAILURE, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from router.launch import Job


def _own(flag: str, metavar: str, text: str, kind: object = str | None) -> Any:
    shared: dict[str, Any] = {"rich_help_panel": "Launch", "show_default": False, "help": text}
    if metavar:
        shared["metavar"] = metavar
    return parameter_of(flag[2:].replace("-", "_"), kind, typer.Option(flag, **shared))


OWN: Final = (
    _own("--model", "MODEL", "The model: a folder on this host, or a name on the hub."),
    _own("--draft", "MODEL", "The draft model of the speculative server, likewise."),
    _own("--gpus", "shared|split", "Both servers on the same GPUs, or each on its own."),
    _own("--tensor-parallel-size", "NUMBER", "GPUs per server.", int | None),
    _own("--python", "FILE", "The Python that has SGLang, if it is not the router's own."),
    _own("--server-command", "TEXT", "A command in SGLang's place; see router/LAUNCH.md."),
    _own("--dry-run", "", "Print what would be started, and end.", bool | None),
)


def _launch(config: Path | None, flags: dict[str, Any], **own: Any) -> None:
    """Start both SGLang servers and the router on this host, and keep them running.

    For example: crossover launch --model M --draft D --threshold 32

    All flags of serve are passed on. The file may have a table named launch: router/LAUNCH.md has
    an example. Without a threshold and a calibration everything goes to the baseline server.

    Exit codes: 0 a clean stop, 2 refused configuration, 3 a port is taken, 4 a failure, 5 no GPU,
    6 SGLang is not installed, 7 a model is missing or does not fit its draft, 8 out of GPU memory,
    9 a server did not start, 130 ended at once by a second signal.
    """
    from router.launch_checks import LaunchError
    from router.launch_prepare import prepare

    dry_run = own.pop("dry_run")
    try:
        job = prepare(config, flags, own, dry_run=bool(dry_run))
    except (SettingsError, LaunchTableError) as error:
        sys.stderr.write("crossover: the configuration is refused:\n")
        for line in error.lines:
            sys.stderr.write(f"  {line}\n")
        raise typer.Exit(EXIT_CONFIGURATION) from None
    except LaunchError as error:
        sys.stderr.write(f"crossover launch: {error}\n")
        raise typer.Exit(error.code) from None
    except KeyboardInterrupt:  # while the GPUs are looked at
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if dry_run:
        sys.stdout.write(described(job))
        return
    raise typer.Exit(_run(job))


launch: Command = with_flags(_launch, OWN)


def described(job: Job) -> str:
    """Return what would be started, as a shell would take it: comments and commands."""
    from router.launch_view import shown

    lines = [f"# {word}" for word in job.words]
    for server in job.plan.servers:
        file = job.secret_files.get(server.role)
        told = (
            "" if file is None else f"; its key is in {file.path}, which is written for its start"
        )
        lines += [f"# the {server.role} server{told}", shown(server.command, server.env)]
        if server.beside != server.command:
            lines += ["# ... and while the other one runs", shown(server.beside, server.env)]
    order = "at once" if job.plan.at_once else "one after the other, in this order"
    lines.append(f"# both servers {order}; when they are ready, the router")
    own = {name: value for name, value in job.router.env.items() if name.startswith(ENV_PREFIX)}
    return "\n".join([*lines, shown(job.router.argv, own)]) + "\n"


def _run(job: Job) -> int:
    import asyncio
    import signal
    import traceback

    from router.launch import launch
    from router.launch_keeper import become_subreaper
    from router.launch_secrets import SECRET
    from router.launch_view import View

    async def run() -> int:
        try:
            return await launch(job, view)
        finally:
            # All has ended, and how is known: one signal more must not make it another end.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                asyncio.get_running_loop().remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    # SGLang writes all its arguments into its log when it starts, its key among them.
    keys = [key for key in job.keys.values() if key is not None]
    told = [
        value
        for server in job.plan.servers
        for name, values in (server.secret or {}).items()
        if name in SECRET
        for value in values
    ]
    view = View(secrets=[*keys, *told])
    try:
        become_subreaper()  # what a lost keeper leaves behind becomes ours, and is ended
        return asyncio.run(run())
    except Exception:  # noqa: BLE001 (the last stop: the documented code instead of Python's 1)
        traceback.print_exc()
        return EXIT_FAILURE
    finally:
        view.close()
