"""REFERENCE.md, made from the code: commands, settings, endpoints, headers, names, errors, metrics.

    python -m tests.reference            exit code 1 if REFERENCE.md is not what the code says
    python -m tests.reference --write    write it (make reference)

Nothing here says what a thing means: each section reads that where the thing is. It stands beside
the tests because it looks at both packages and at what the listeners really serve.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final, Union, get_args, get_origin

import typer
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute, Route
from typer.main import get_command

import loadtest.__main__
import loadtest.exit_codes
import router.__main__
import router.exit_codes
from router import errors, own_headers, routes
from router.access_log import line_of
from router.admin import create_admin_app
from router.config import Settings, load_settings
from router.config_flags import reference as settings_reference
from router.config_launch import LaunchTable
from router.errors import ErrorAnswer
from router.explained import Explained
from router.exposition import create_registry
from router.logs import LineWriter
from router.metrics import Finished, Outcome, Rejection, Retry
from router.pair import create_public_app
from router.pair_watch import PairState
from router.policy import Reason
from router.relay import Relay
from router.wiring import build_relay

ROOT: Final = Path(__file__).resolve().parent.parent
FILE: Final = ROOT / "REFERENCE.md"
MEND: Final = "make reference (python -m tests.reference --write)"
# Any calibration will do: it brings the metrics that are there only with one.
CALIBRATION: Final = ROOT / "deploy/compose/simulated-calibration.json"
COMMANDS: Final = {
    "crossover": (router.__main__.app, router.exit_codes.MEANINGS),
    "loadtest": (loadtest.__main__.app, loadtest.exit_codes.MEANINGS),
}
OPENAPI: Final = "A description of this listener for programs, in OpenAPI's form"
HEAD: Final = f"""\
# Reference

Written by `{MEND.partition(" (")[2].rstrip(")")}` from the code, so change it there.
[README.md](README.md) says what all of this is for, [ARCHITECTURE.md](ARCHITECTURE.md) where it is made.
"""


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring, without its full stop."""
    line = " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?= [A-Z]|$)", line)[0]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """A Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
    yield ""


# ------------------------------------------------------------------ commands


def kind_word(annotation: Any, metavar: str | None) -> str:
    """What is to be written as the value of a flag, in one word; empty for a switch."""
    if metavar:
        return metavar
    while get_origin(annotation) in {Annotated, Union, types.UnionType, list}:
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    if annotation is bool:
        return ""
    if issubclass(annotation, enum.StrEnum):
        return "|".join(annotation)
    words = {int: "NUMBER", float: "NUMBER", Path: "FILE"}
    return words.get(annotation, "TEXT")


def flags(command: Any) -> Iterator[tuple[str, str, str, str]]:
    """Name, value, default and meaning of each flag that is not a setting's."""
    parameters = inspect.signature(command.callback, eval_str=True).parameters
    for param in command.params:
        if getattr(param, "hidden", False) or (takes_settings(command) and is_setting(param.name)):
            continue
        names = " / ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
        value = kind_word(parameters[param.name].annotation, param.metavar)
        default = param.default.value if isinstance(param.default, enum.Enum) else param.default
        if param.required:
            shown = "required"
        elif default is None or isinstance(default, bool):
            shown = "on" if default else ""
        else:
            shown = str(default)
        yield names, f"`{value}`" if value else "", shown, param.help or ""


def is_setting(name: str) -> bool:
    """Whether a flag is that of a setting, or its opposite."""
    return name.removeprefix("no__") in Settings.model_fields


def takes_settings(command: Any) -> bool:
    """Whether a command has a flag for every setting."""
    return Settings.model_fields.keys() <= {param.name for param in command.params}


def commands() -> Iterator[str]:
    """Every command, its flags and its exit codes."""
    yield "## Commands\n"
    for program, (app, meanings) in COMMANDS.items():
        for name, command in of(app).items():
            yield f"### `{program} {name}`\n"
            yield f"{first_sentence(command.help)}.\n"
            if takes_settings(command):
                yield "It has a flag for every [setting](#settings)."
            own = list(flags(command))
            if own:
                yield from ("", *table(("flag", "value", "default", "meaning"), own))
            codes = (f"{code} {meaning}" for code, meaning in meanings.get(name, {}).items())
            yield f"Exit codes: {'; '.join(codes)}.\n"


def of(app: typer.Typer) -> dict[str, Any]:
    """The commands of a program by name, in the order of its help."""
    found: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return found


def exit_codes() -> Iterator[str]:
    """One table of all exit codes."""
    yield "## Exit codes\n"
    for program, (_, meanings) in COMMANDS.items():
        codes = sorted({code for found in meanings.values() for code in found})
        rows = (
            (f"`{program} {name}`", *("x" if code in found else "" for code in codes))
            for name, found in meanings.items()
        )
        yield from table(("command", *map(str, codes)), rows)
    yield "What each means stands with its [command](#commands)."
    yield "130 and 143 are Ctrl-C and SIGTERM, as a shell has them.\n"


# ------------------------------------------------------------------ settings


def settings() -> Iterator[str]:
    """Every setting, as `crossover settings` prints them, and the table of a launch."""
    yield settings_reference().replace("\n## ", "\n### ").replace("# Settings", "## Settings", 1)
    yield "\n### The table `[launch]` of the file\n"
    yield "Read by `crossover launch` ([how](router/LAUNCH.md)). `args`, `env` and `without` may"
    yield "also stand in `[launch.speculative]` and `[launch.baseline]`, for that server only.\n"
    fields = LaunchTable.model_fields.items()
    yield from table(
        ("key", "meaning"),
        ((f"`{name}`", field.description) for name, field in fields if field.description),
    )


# ------------------------------------------------------------------ what is served


def relay() -> Relay:
    """A whole relay that listens nowhere, with everything that can be configured to be seen."""
    given = {"speculative": "http://a", "baseline": "http://b", "calibration": str(CALIBRATION)}
    return build_relay(
        load_settings(given, environ={}), LineWriter(), call_later=lambda _seconds, _call: None
    )


def registry(running: Relay) -> tuple[CollectorRegistry, FastAPI]:
    """What `/metrics` is made of, and the admin app that serves it."""
    metrics = create_registry(running.metrics, running)
    return metrics, create_admin_app(running, metrics, pair=PairState())


def endpoints() -> Iterator[str]:
    """What both listeners answer."""
    running = relay()
    yield "## Endpoints\n\n### Relayed, on the public listener\n"
    rows = (
        (f"`{route.method.decode()} {route.path.decode()}`", f"`{route.name}`", spellings(route))
        for route in routes.ROUTES
    )
    yield from table(("endpoint", "`route` in metrics and logs", "also as"), rows)
    yield "Each may end with a slash. Query strings are not forwarded.\n"
    yield "### Answered by the router, on the public listener\n"
    yield from table(("endpoint", "meaning"), served(create_public_app(running)))
    yield "### The admin listener\n"
    yield from table(("endpoint", "meaning"), served(registry(running)[1]))


def spellings(route: routes.Route) -> str:
    """The other paths of a relayed route, but for those with a slash at the end."""
    found = (path.decode() for path, known in routes.TABLE.items() if known is route)
    return ", ".join(
        f"`{path}`" for path in found if path != route.path.decode() and not path.endswith("/")
    )


def served(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Method and paths of each thing an app answers, with the first sentence of what answers there."""
    found: dict[tuple[str, str], list[str]] = {}
    for route in routes_of(app.routes):
        methods = route.methods or set()
        shown = " ".join(sorted(methods - {"HEAD"} if "GET" in methods else methods))
        text = first_sentence(route.endpoint.__doc__) if route.name != "openapi" else OPENAPI
        if route.path == "/" or not route.path.endswith("/"):
            found.setdefault((shown, text), []).append(f"`{route.path}`")
    for (shown, text), paths in found.items():
        yield f"{shown} {', '.join(paths)}", text


def routes_of(given: Iterable[BaseRoute]) -> Iterator[Route]:
    """The routes of an app, those of the routers in it too: newer FastAPI keeps them apart."""
    for route in given:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from routes_of(inner.routes)
        elif isinstance(route, Route):
            yield route


def headers() -> Iterator[str]:
    """Our own headers, each way."""
    for title, found in (("request", own_headers.REQUEST), ("answer", own_headers.RESPONSE)):
        yield f"### Headers of {'an answer' if title == 'answer' else 'a request'}\n"
        yield from table(
            ("header", "meaning"), ((f"`{name}`", text) for name, text in found.items())
        )


# ------------------------------------------------------------------ names and errors


def names() -> Iterator[str]:
    """The closed sets of names."""
    sets: dict[str, type[Explained]] = {"Reasons": Reason, "Outcomes": Outcome, "Retries": Retry}
    where = {
        "Reasons": "Why a backend was chosen: header, log, `/decisions`, `crossover_decisions_total`.",
        "Outcomes": "How a request ended: log and `crossover_requests_total`.",
        "Retries": "Why a request was sent twice, or not: `crossover_retries_total`.",
    }
    for title, members in sets.items():
        yield f"## {title}\n\n{where[title]}\n"
        yield from table(("name", "meaning"), ((f"`{m}`", m.meaning) for m in members))


def error_rows() -> dict[str, ErrorAnswer]:
    """The rows of the table of errors by name."""
    return {name: row for name, row in vars(errors).items() if isinstance(row, ErrorAnswer)}


def error_table() -> Iterator[str]:
    """Every error of ours."""
    yield "## Errors\n"
    yield "What the router answers itself, as `{error: {message, type, param, code}}`; a backend's"
    yield "own errors pass through. What is counted is so under its code in `crossover_rejected_total`;"
    yield f"of a relayed request, whatever else reached no backend is `{Rejection.OTHER}` there.\n"
    rows = sorted(error_rows().values(), key=lambda row: (row.status, row.code))
    counted = set(Rejection)
    yield from table(
        ("status", "type", "code", "message", "`Retry-After`", "counted"),
        (
            (row.status, f"`{row.type}`", f"`{row.code}`", row.message, row.retry_after or "",
             "yes" if row.code in counted else "")
            for row in rows
        ),
    )  # fmt: skip


# ------------------------------------------------------------------ metrics and logs


def metrics() -> Iterator[str]:
    """Every metric, from the collectors that the admin listener registers."""
    yield "## Metrics\n"
    yield "What is unknown is absent, never zero. Those of the calibration are there with one.\n"
    rows = []
    for family in registry(relay())[0].collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = getattr(family, "_labelnames", ())
        rows.append(
            (f"`{name}`", family.type, " ".join(f"`{x}`" for x in labels), family.documentation)
        )
    yield from table(("metric", "type", "labels", "meaning"), rows)


def logs() -> Iterator[str]:
    """The fields of a request's line, and the text of every other line."""
    yield "## Log\n"
    yield "One JSON object a line on standard error. A request's line has the fields"
    yield f"{', '.join(f'`{name}`' for name in request_fields())}. The other lines:\n"
    yield from table(("level", "event", "module"), sorted(set(log_lines()), key=itemgetter(2, 1)))


def request_fields() -> list[str]:
    """The names of the fields, from a line as it is written."""
    done = Finished(
        "id", "generate", None, None, 0, 0, None, 200, Outcome.OK, False, 0.0, None, None, None, 0.0,
        0.0, 0, 0, 0, None, None, None, None,
    )  # fmt: skip
    return re.findall(r'"(\w+)":', line_of(done, "-").decode())


def log_lines() -> Iterator[tuple[str, str, str]]:
    """Level, text and module of each call of a module's `_log`."""
    for path in sorted((ROOT / "router").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_log."):
                level, words = ast.unparse(node.func).partition(".")[2], node.args
                if level == "log":
                    level, words = "any", node.args[1:]
                text = ast.literal_eval(words[0])
                yield {"exception": "error"}.get(level, level), f"`{text}`", f"`{path.stem}`"


def document() -> str:
    """The whole reference in Markdown."""
    sections = (
        commands, exit_codes, settings, endpoints, headers, names, error_table, metrics, logs,
    )  # fmt: skip
    lines = [HEAD, *(line for section in sections for line in section())]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main(
    write: Annotated[bool, typer.Option("--write", help="Write REFERENCE.md.")] = False,
) -> None:
    """Say whether REFERENCE.md is what the code says, or write it."""
    made = document()
    if write:
        FILE.write_text(made, encoding="utf-8")
    elif not FILE.exists() or FILE.read_text(encoding="utf-8") != made:
        typer.echo(f"REFERENCE.md is not what the code says: {MEND}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
