"""From flags and file to a `Job`: everything that `crossover launch` checks before it starts a thing.

It reads files, tries ports and asks a Python for its GPUs; it starts nothing that stays. Raises
SettingsError and LaunchTableError for what is configured, LaunchError for what is found.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from router import launch_checks as checks
from router.calibration import CalibrationError
from router.config import Settings, load_settings
from router.config_launch import LaunchTable, read_launch
from router.config_sources import ENV_CONFIG, ENV_PREFIX, gather
from router.config_types import BackendUrl, is_loopback
from router.doctor_facts import threshold_in
from router.exit_codes import EXIT_CONFIGURATION, EXIT_NO_GPU
from router.launch import Job
from router.launch_checks import LaunchError
from router.launch_flags import FlagError, from_args, merged, value_of
from router.launch_gpu_facts import Machine
from router.launch_gpus import ProbeError, interpreter_environment, look
from router.launch_kept import Command
from router.launch_model import LONGER, ModelFacts
from router.launch_plan import (
    Address,
    Extra,
    NoGpuError,
    Plan,
    PlanError,
    Share,
    Wanted,
    needs_gpus,
    plan,
)
from router.launch_secret_file import SecretFile, places, secret_file
from router.load import Role
from router.wiring import read_line

DEFAULTS: Final = {
    "speculative": "http://127.0.0.1:31000",
    "baseline": "http://127.0.0.1:30000",
}
YES: Final = {"1", "true", "yes", "y"}  # as SGLang reads a variable
# Where `router` is imported from, also when it is not installed.
SOURCE: Final = Path(__file__).resolve().parent.parent


def prepare(
    config: Path | None, flags: dict[str, Any], own: Mapping[str, object], *, dry_run: bool
) -> Job:
    """Return what is to be started.

    `flags` are the router's as they were given, `own` those of the launch itself. A dry run may be
    made beside a running pair: a port that is taken is then no more than a word.
    """
    if config is None and os.environ.get(ENV_CONFIG):
        config = Path(os.environ[ENV_CONFIG])
    table = read_launch(config, own)
    flags, names, words = _router_flags(config, flags)
    settings = load_settings(flags, config=config)
    try:
        line = read_line(settings)[0]
    except CalibrationError as error:
        raise LaunchError(EXIT_CONFIGURATION, str(error)) from None
    files = places()
    todo, more = _planned(table, settings, files, dry_run=dry_run)
    secret_files = _secret_files(todo, files)
    one_number = settings.policy == "frontier" and settings.threshold is not None
    if todo.share is Share.SPLIT and one_number and "scope" not in names:
        # Servers with GPUs of their own: what is beyond the threshold runs beside it.
        flags["scope"] = "speculative"
    keys = _keys(table, settings)
    for role, key in keys.items():
        if key is not None and settings.backend_key(role.value) is None:
            flags[f"{role}_api_key"] = key
    return Job(
        plan=todo,
        router=_router(config, flags),
        router_address=(_reachable(settings.host), settings.port),
        router_url=where_to_find(settings),
        base_env={"PYTHONUNBUFFERED": "1", **interpreter_environment()},
        drain=settings.drain_delay + settings.drain_timeout,
        start_timeout=table.start_timeout,
        stop_timeout=table.stop_timeout,
        restart_delay=table.restart_delay,
        restart_delay_max=table.restart_delay_max,
        keys=keys,
        secret_files=secret_files,
        threshold=threshold_in(line),
        words=(*words, *more, *todo.words),
    )


def _router_flags(
    config: Path | None, flags: dict[str, Any]
) -> tuple[dict[str, Any], set[str], list[str]]:
    """The router's flags with what a launch adds, the names that were given, words for the user."""
    given = gather(
        tuple(Settings.model_fields), flags=flags, environ=os.environ, config=config
    ).given
    names = set(given)
    flags = {**{name: url for name, url in DEFAULTS.items() if name not in names}, **flags}
    words = []
    if not {"threshold", "calibration", "policy"} & names:
        flags["policy"] = "baseline"
        words.append(
            "no threshold and no calibration: every request goes to the baseline server; "
            "loadtest calibrate measures the line of this pair"
        )
    for port, host in (("port", "host"), ("admin_port", "admin_host")):
        if port in names and str(given[port].value) == "0":
            at = str(given[host].value) if host in names else "127.0.0.1"
            flags[port] = str(checks.free_port(at))
    return flags, names, words


def _keys(table: LaunchTable, settings: Settings) -> dict[Role, str | None]:
    """The key of each server: the router's, else the one that the server itself is started with."""
    keys: dict[Role, str | None] = {}
    for role, own in ((Role.SPECULATIVE, table.speculative), (Role.BASELINE, table.baseline)):
        key = settings.backend_key(role.value)
        try:
            said = value_of(merged(from_args(table.args), from_args(own.args)), "api-key")
        except FlagError as error:
            raise LaunchError(EXIT_CONFIGURATION, str(error)) from None
        keys[role] = said if key is None else key.get_secret_value()
    return keys


def _secret_files(todo: Plan, files: Mapping[Role, str]) -> dict[Role, SecretFile]:
    """The files in which the servers are told their keys."""
    made = {}
    for server in todo.servers:
        if server.secret is None:
            continue
        try:
            made[server.role] = secret_file(files[server.role], server.secret)
        except (OSError, ValueError, yaml.YAMLError) as error:
            text = f"the --config among the args of the {server.role} server cannot be used: "
            raise LaunchError(EXIT_CONFIGURATION, text + " ".join(str(error).split())) from None
    return made


def _planned(
    table: LaunchTable, settings: Settings, files: Mapping[Role, str], *, dry_run: bool
) -> tuple[Plan, list[str]]:
    urls = {Role.SPECULATIVE: settings.speculative, Role.BASELINE: settings.baseline}
    for role, url in urls.items():
        if url.scheme != "http" or url.prefix or not is_loopback(url.host):
            text = f"{role} = {url}: launch starts it on this host: http://127.0.0.1:PORT is wanted"
            raise LaunchError(EXIT_CONFIGURATION, text)
    try:
        wanted = _wanted(table, urls, files)
        facts: ModelFacts | None = None
        words: list[str] = []
        if needs_gpus(wanted.server_command):
            facts, words = _models(table, wanted)
        try:
            _ports(settings, urls)
        except LaunchError as error:
            if not dry_run:
                raise
            words.append(str(error))
        machine = Machine()
        if needs_gpus(wanted.server_command):
            machine = look(wanted.python, {**interpreter_environment(), **table.env})
            checks.check_machine(machine, wanted.python, sglang=wanted.server_command is None)
        return plan(wanted, machine, facts), words
    except NoGpuError as error:
        raise LaunchError(EXIT_NO_GPU, str(error)) from None
    except ProbeError as error:
        raise LaunchError(EXIT_CONFIGURATION, f"{error}: check --python") from None
    except (PlanError, FlagError) as error:
        raise LaunchError(EXIT_CONFIGURATION, str(error)) from None


def _wanted(
    table: LaunchTable, urls: Mapping[Role, BackendUrl], files: Mapping[Role, str]
) -> Wanted:
    own = {Role.SPECULATIVE: table.speculative, Role.BASELINE: table.baseline}
    return Wanted(
        model=table.model or "",
        draft=table.draft,
        addresses={role: Address(url.host, url.port) for role, url in urls.items()},
        base=checks.base_flags(),
        share=Share(table.gpus) if table.gpus else None,
        tensor_parallel=table.tensor_parallel_size,
        python=table.python or sys.executable,
        server_command=_split(table.server_command),
        both=Extra(table.args, table.env, table.without),
        each={role: Extra(each.args, each.env, each.without) for role, each in own.items()},
        secret_files=files,
    )


def _models(table: LaunchTable, wanted: Wanted) -> tuple[ModelFacts | None, list[str]]:
    """What the models' own files say, as far as they are here."""
    if table.model is None:
        raise LaunchError(EXIT_CONFIGURATION, "what to serve is not said: give --model")
    added = merged(from_args(table.args), from_args(table.speculative.args))
    flags = {**wanted.base[Role.SPECULATIVE], **added}
    draft = value_of(flags, "speculative-draft-model-path") or table.draft
    algorithm = (value_of(flags, "speculative-algorithm") or "").upper()
    given = value_of(flags, "context-length")
    context = int(given) if given is not None and given.isdecimal() else None
    if {**os.environ, **table.env, **table.speculative.env}.get(LONGER, "").lower() in YES:
        context = 0
    return checks.check_fit(table.model, draft, algorithm, context)


def _ports(settings: Settings, urls: Mapping[Role, BackendUrl]) -> None:
    servers = [
        (f"--{role} http://{url.host}:PORT", url.host, url.port) for role, url in urls.items()
    ]
    checks.check_ports(
        [
            *servers,
            ("--port", settings.host, settings.port),
            ("--admin-port", settings.admin_host, settings.admin_port),
        ]
    )


def _split(command: str | None) -> tuple[str, ...] | None:
    if command is None:
        return None
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        text = f"--server-command cannot be taken apart: {error}"
        raise LaunchError(EXIT_CONFIGURATION, text) from None
    if not words:
        raise LaunchError(EXIT_CONFIGURATION, "--server-command is empty")
    return words


def _router(config: Path | None, flags: Mapping[str, Any]) -> Command:
    """How the router is started: flags become variables, because a command line is seen by all."""
    argv = [sys.executable, "-P", "-m", "router", "serve"]
    if config is not None:
        argv += ["--config", str(config)]
    env = dict(os.environ)
    for name, value in flags.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        env[ENV_PREFIX + name.upper()] = text
    env["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *filter(None, [env.get("PYTHONPATH")])])
    return Command(tuple(argv), env)


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (compared with)


def where_to_find(settings: Settings) -> str:
    """Return where clients find the router, and operators, in words."""
    scheme = "https" if settings.ssl_certfile else "http"
    host = _reachable(settings.host)
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{settings.port}/v1 (admin on port {settings.admin_port})"
