"""Where settings come from, which source wins, and how a value is shown in a report.

Flags win over the environment, the environment over the file, the file over the defaults. Nothing
here knows what a setting means: the result is one raw value per name, with the place it came from,
and a problem for everything that has no place at all.
"""

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from router.config_types import at_home

ENV_PREFIX = "CROSSOVER_"
# Which file to read, where --config does not say.
ENV_CONFIG = ENV_PREFIX + "CONFIG"
HIDDEN = "***"
# The table of the file that is another command's: `crossover launch` has the rest of the file in
# common with `crossover serve` (router/config_launch.py reads it).
LAUNCH_TABLE = "launch"

# Kubernetes puts these into every pod of a namespace that has a Service called crossover (or
# crossover-admin): nobody wrote them, and refusing them would keep the router from starting.
_KUBERNETES_NAME = re.compile(
    r"CROSSOVER_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?"
    r"|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)",
)
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://")
_SECRET_NAME = re.compile(r"key|token|secret|passw|auth|credential", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and the settings that it is about."""

    keys: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written, and where."""

    value: object
    source: str


@dataclass(slots=True)
class Gathered:
    """What all sources together say."""

    given: dict[str, Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unread: bool = False  # there is a file, and what it says is not known


def gather(
    names: Collection[str],
    *,
    paths: Collection[str] = (),
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config: Path | None,
) -> Gathered:
    """Read all sources, the weakest first. `paths` are the settings that name a file."""
    gathered = Gathered()
    if config is not None:
        _take_file(gathered, names, paths, Given(config, "flag --config"))
    elif ENV_CONFIG in environ:
        given = Given(Path(environ[ENV_CONFIG]), f"environment {ENV_CONFIG}")
        _take_file(gathered, names, paths, given)
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX) and not _foreign(variable, value):
            _take(
                gathered,
                names,
                variable.removeprefix(ENV_PREFIX).lower(),
                Given(value, f"environment {variable}"),
            )
    for name, flag_value in flags.items():
        if flag_value is not None:
            _take(gathered, names, name, Given(flag_value, f"flag --{name.replace('_', '-')}"))
    return gathered


def _take(gathered: Gathered, names: Collection[str], name: str, given: Given) -> None:
    if name in names:
        gathered.given[name] = given
        return
    close = difflib.get_close_matches(name.lower().replace("-", "_"), names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    # Where it should have gone decides whether its value may be seen, and so does its own name.
    secret = any(_SECRET_NAME.search(word) for word in (name, *close))
    gathered.problems.append(
        f"{name} = {show(given.value, secret=secret)} ({given.source}): no such setting{hint}",
    )


def _take_file(
    gathered: Gathered, names: Collection[str], paths: Collection[str], config: Given
) -> None:
    path = at_home(str(config.value))
    what = f"config = {show(config.value)} ({config.source})"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        gathered.unread = True
        gathered.problems.append(f"{what}: {error.strerror or 'cannot be read'}")
    except ValueError as error:
        gathered.unread = True
        gathered.problems.append(f"{what}: not a TOML file: {error}")
    else:
        for name, value in table.items():
            if name == LAUNCH_TABLE:
                continue
            if name in paths and isinstance(value, str):
                # A file that names another one means: beside me, wherever the router is started.
                value = path.parent / at_home(value)  # noqa: PLW2901
            _take(gathered, names, name, Given(value, f"file {path}"))


def _foreign(variable: str, value: str) -> bool:
    if variable == ENV_CONFIG or _KUBERNETES_NAME.fullmatch(variable):
        return True
    return variable.endswith("_PORT") and bool(_KUBERNETES_PORT.match(value))


def show(value: object, *, secret: bool = False) -> str:
    """Return `value` for a report: bounded, and without what may be secret in it."""
    if secret:
        return HIDDEN
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    text = str(value)
    if "://" in text:
        text = re.sub(r"://.*@", f"://{HIDDEN}@", text, flags=re.DOTALL)
        text = re.sub(r"[?#].*", "?" + HIDDEN, text, flags=re.DOTALL)
    text = text if len(text) <= 80 else text[:77] + "..."
    return "'" + text.encode("unicode_escape").decode("ascii") + "'"
