"""The command line's flags and the reference, both made from the settings themselves.

A flag takes its text as it comes: `load_settings` parses all sources alike and reports all that is
wrong at once, so the command line does not check a value before.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import SecretStr

from router.config import GROUPS, BackendUrl, Settings, parts
from router.config_sources import ENV_PREFIX
from router.config_types import BYTES, KIB, SECONDS, Unit

Command = Callable[..., None]

# Before the name of the parameter behind a `--no-...` flag; no setting's name starts like this.
_NO = "no__"
_CONFIG: dict[str, Any] = {
    "metavar": "FILE",
    "help": "A TOML file with settings, under the names of the flags (with underscores).",
    "show_default": False,
}


def with_flags(command: Callable[..., None], own: Sequence[inspect.Parameter] = ()) -> Command:
    """Give `command` a flag for each setting; it is called with the file and what was given.

    `own` are parameters of the command itself, which it is called with by name.
    """

    def called(config: Path | None, **given: Any) -> None:
        flags: dict[str, Any] = {}
        mine = {parameter.name: given.pop(parameter.name) for parameter in own}
        for name, value in given.items():
            if isinstance(value, list):
                if value:  # typer's word for a repeated flag that was not given is []
                    flags[name] = ",".join(value)
            elif value is not None:
                flags[name.removeprefix(_NO)] = value is not True if name.startswith(_NO) else value
        command(config, flags, **mine)

    parameters = [parameter_of("config", Path | None, typer.Option("--config", **_CONFIG)), *own]
    for group in GROUPS:
        for name in group.model_fields:
            parameters += _parameters(group.title, name)
    called.__name__ = command.__name__
    called.__doc__ = command.__doc__
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def parameter_of(name: str, kind: object, option: object) -> inspect.Parameter:
    """Return a flag: typer's option for a value of this kind, None where it is not given."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _parameters(panel: str, name: str) -> Iterator[inspect.Parameter]:
    field = Settings.model_fields[name]
    flag = "--" + name.replace("_", "-")
    text = (field.description or "").removesuffix(".")
    if choices := choices_of(name):
        text += f". One of: {', '.join(choices)}"
    if default := default_of(name):
        text += f". Default: {default}"
    shared: dict[str, Any] = {
        "help": text + ".",
        "rich_help_panel": panel,
        "show_default": False,
    }
    if field.annotation is not bool:
        kind = list[str] | None if get_origin(field.annotation) is tuple else str | None
        yield parameter_of(name, kind, typer.Option(flag, metavar=kind_of(name), **shared))
    elif field.default:
        yield parameter_of(name, bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", **shared))
    else:
        # What is off by default is switched off only to overrule the file: not worth a column.
        yield parameter_of(name, bool | None, typer.Option(flag, **shared))
        hidden = typer.Option(f"--no-{flag[2:]}", hidden=True)
        yield parameter_of(_NO + name, bool | None, hidden)


def kind_of(name: str) -> str:
    """Return what is to be written as the value, in one word."""
    found = list(parts(name))
    if found[0] is bool:
        return "true|false"
    if choices_of(name):
        return "NAME"
    for part in found:
        if isinstance(part, Unit):
            return part.name
    words = {BackendUrl: "URL", Path: "FILE", SecretStr: "KEY", str: "TEXT"}
    return next((word for kind, word in words.items() if kind in found), "NUMBER")


def choices_of(name: str) -> tuple[str, ...]:
    """Return the names that the setting can have, where it has names."""
    annotation = Settings.model_fields[name].annotation
    for kind in (annotation, *get_args(annotation)):  # the latter for one that may be absent
        if get_origin(kind) is Literal:
            return get_args(kind)
    return ()


def default_of(name: str) -> str | None:
    """Return the default as a user would write it; None where there is none."""
    field = Settings.model_fields[name]
    value = field.get_default()
    if field.is_required() or value is None or value == ():
        return None
    if isinstance(value, bool):
        return str(value).lower()
    found = list(parts(name))
    if BYTES in found:
        return _size(value)
    return f"{value:g}s" if SECONDS in found else str(value)


def _size(value: int) -> str:
    for unit in ("", "KiB", "MiB"):
        if value % KIB:
            return f"{value}{unit}"
        value //= KIB
    return f"{value}GiB"


def reference() -> str:
    """Return all settings as a Markdown document."""
    lines = ["# Settings", ""]
    for group in GROUPS:
        lines += [f"## {group.title}", "", "| setting | value | default | meaning |"]
        lines.append("|---|---|---|---|")
        for name, field in group.model_fields.items():
            kind = (" ".join(choices_of(name)) or kind_of(name)).replace("|", " ")
            default = "required" if field.is_required() else default_of(name) or "none"
            lines.append(f"| `{name}` | {kind} | {default} | {field.description} |")
        lines.append("")
    lines.append(
        "A setting's flag is its name with dashes, its environment variable its name in capitals "
        f"after `{ENV_PREFIX}`, its key in the file the name itself."
    )
    return "\n".join(lines)
