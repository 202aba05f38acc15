"""`Settings`: everything that can be configured, checked as a whole and then frozen.

    settings = load_settings({"speculative": "http://...", "baseline": "http://...", "threshold": 8})

The loader reads flags, environment and file (`config_sources`), parses each value by its kind
(`config_types`, `config_fields`) and checks what only makes sense together (`config_checks`).
Everything that is wrong is reported at once: a `SettingsError` has one line for each problem, with
key, value and source. Secrets are in no message, no `repr` and no dump.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import SecretStr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from router.config_checks import (
    ONE_PROCESS,
    check_amounts,
    check_backends,
    check_line,
    check_listeners,
)
from router.config_fields import (
    GROUPS,
    Backends,
    Limits,
    Listeners,
    Logging,
    LogLevel,
    PolicyName,
    Routing,
    Scope,
    Timeouts,
    Watching,
)
from router.config_sources import HIDDEN, Given, Problem, gather, show
from router.config_types import BackendUrl, read_keys

__all__ = [
    "GROUPS",
    "BackendUrl",
    "LogLevel",
    "PolicyName",
    "Scope",
    "Settings",
    "SettingsError",
    "load_settings",
    "load_settings_and_sources",
]

Plain = str | int | float | bool | list[str] | None

_TOGETHER = "together"
# Let the checks between settings run although a backend's URL is missing or bad.
_STAND_INS = {"speculative": "http://speculative.invalid", "baseline": "http://baseline.invalid"}


class SettingsError(ValueError):
    """The configuration is refused. One line for each problem; never a secret."""

    def __init__(self, lines: tuple[str, ...]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class Settings(Logging, Watching, Timeouts, Limits, Listeners, Routing, Backends):
    """Everything that can be configured. Made by `load_settings`, never changed."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        problems = [
            *check_backends(self, self),
            *check_line(self),
            *check_listeners(self),
            *check_amounts(self, self, self),
        ]
        if problems:
            text = "; ".join(f"{', '.join(problem.keys)}: {problem.text}" for problem in problems)
            raise PydanticCustomError(_TOGETHER, "{text}", {"text": text, "problems": problems})
        return self

    def client_keys(self) -> tuple[SecretStr, ...]:
        """Return the keys that a client may use, also those in the file; none means no auth."""
        return self.api_keys + (read_keys(self.api_keys_file) if self.api_keys_file else ())

    def backend_key(self, role: Literal["speculative", "baseline"]) -> SecretStr | None:
        """Return the key that is sent to the backend of this role: its own, else the common one."""
        own = self.speculative_api_key if role == "speculative" else self.baseline_api_key
        return own or self.backend_api_key

    def redacted(self) -> dict[str, Plain]:
        """Return all settings as JSON can hold them, with the secrets hidden."""
        return {
            name: _plain(getattr(self, name)) for group in GROUPS for name in group.model_fields
        }


def _plain(value: Any) -> Plain:
    match value:
        case SecretStr():
            return HIDDEN
        case tuple():
            return [str(_plain(item)) for item in value]
        case BackendUrl() | Path():
            return str(value)
        case math.inf:
            return "always"  # JSON has no infinity, and this is what a user would write
    plain: Plain = value
    return plain


def parts(name: str) -> Iterator[object]:
    """Yield what the kind of the setting `name` is made of: types, literals, units."""

    def within(annotation: object) -> Iterator[object]:
        yield annotation
        for part in get_args(annotation):
            yield from within(part)

    field = Settings.model_fields[name]
    yield from within(field.annotation)
    yield from field.metadata


def is_secret(name: str) -> bool:
    """Whether no one may see the value of this setting."""
    return SecretStr in parts(name)


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings in force, or raise a SettingsError that says all that is wrong.

    `flags` maps a setting's name to its value, None for one that was not given; `config` is the
    TOML file; `environ` is the process's own environment unless a test passes another.
    """
    return load_settings_and_sources(flags, config=config, environ=environ)[0]


def load_settings_and_sources(
    flags: Mapping[str, object] | None = None,
    *,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Settings, dict[str, str]]:
    """Do as `load_settings`, and say for each setting where it came from."""
    environ = os.environ if environ is None else environ
    names = tuple(Settings.model_fields)
    gathered = gather(
        names,
        paths=[name for name in names if Path in parts(name)],
        flags=flags or {},
        environ=environ,
        config=config,
    )
    lines = gathered.problems
    given = gathered.given
    workers = environ.get("WEB_CONCURRENCY", "").strip()
    if workers.isdecimal() and int(workers) > 1:
        lines.append(f"WEB_CONCURRENCY = {show(workers)} (environment): {ONE_PROCESS}")
    try:
        settings = Settings.model_validate({name: item.value for name, item in given.items()})
    except ValidationError as error:
        lines.extend(
            _line(problem, given)
            for problem in _problems(error, given)
            # What is not set may well stand in the file that could not be read.
            if not gathered.unread or any(key in given for key in problem.keys)
        )
    else:
        if not lines:
            sources = {name: given[name].source if name in given else "default" for name in names}
            return settings, sources
    # Not `from` anything: pydantic's own error holds the rejected values.
    raise SettingsError(tuple(lines)) from None


def _problems(error: ValidationError, given: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield what is wrong with single settings, then what the others are together."""
    bad: set[str] = set()
    for detail in error.errors(include_url=False):
        if detail["type"] == _TOGETHER:
            yield from detail["ctx"]["problems"]
            return
        name, *item = detail["loc"]
        if name not in bad:
            bad.add(str(name))
            where = f"item {int(item[0]) + 1}: " if item else ""
            yield Problem((str(name),), where + _text(detail["type"], detail["msg"], str(name)))
    rest = {name: item.value for name, item in given.items() if name not in bad}
    try:
        Settings.model_validate(_STAND_INS | rest)
    except ValidationError as again:
        for problem in _problems(again, {}):
            if not bad.intersection(problem.keys):
                yield problem


def _text(kind: str, message: str, name: str) -> str:
    if kind == "missing":
        flag = name.replace("_", "-")
        return f"required: give --{flag} URL, CROSSOVER_{name.upper()} or {name} in the file"
    message = message.removeprefix("Value error, ").removeprefix("Input ")
    return message[:1].lower() + message[1:]


def _line(problem: Problem, given: Mapping[str, Given]) -> str:
    return ", ".join(_shown(name, given) for name in problem.keys) + f": {problem.text}"


def _shown(name: str, given: Mapping[str, Given]) -> str:
    if name in given:
        item = given[name]
        return f"{name} = {show(item.value, secret=is_secret(name))} ({item.source})"
    default = Settings.model_fields[name].get_default()
    if default is None or Settings.model_fields[name].is_required():
        return f"{name} (not set)"
    return f"{name} = {show(default, secret=is_secret(name))} (default)"
