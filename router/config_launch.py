"""The `[launch]` table of the settings file: what `crossover launch` starts, and how.

    [launch]
    model = "meta-llama/Llama-3.3-70B-Instruct"
    draft = "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge"
    args = ["--context-length", "8192"]        # both servers

    [launch.speculative]
    args = ["--speculative-num-steps", "2"]    # this one, after those of both
    env = { SGLANG_LOG_MS = "1" }
    without = ["sleep-on-idle"]                # flags of deploy/sglang/ that are not wanted

The rest of the file is the router's; `crossover serve` with the same file leaves this table alone.
As everywhere, an unknown key is refused, and all that is wrong is reported at once.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from router.config_sources import LAUNCH_TABLE, show
from router.config_types import Count, Seconds, at_home


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("a text with a zero byte in it")
    return value


def _texts(value: tuple[str, ...]) -> tuple[str, ...]:
    _text("".join(value))
    return value


def _variables(value: dict[str, str]) -> dict[str, str]:
    if any(not name or "=" in name or "\0" in name + text for name, text in value.items()):
        raise ValueError("not the name of a variable, or a zero byte in its value")
    return value


Text = Annotated[str, AfterValidator(_text)]
Texts = Annotated[tuple[str, ...], AfterValidator(_texts)]


class Table(BaseModel):
    """One table of the file."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,  # ["--context-length", 8192] is what people write
    )


class ServerTable(Table):
    """What is added to one server's start."""

    args: Texts = ()
    """Flags of SGLang; they replace those of deploy/sglang/ and of the recipe."""
    env: Annotated[dict[str, str], AfterValidator(_variables)] = Field(default_factory=dict)
    """Environment variables."""
    without: Texts = ()
    """Names of flags that are taken out again."""


class LaunchTable(ServerTable):
    """Everything that can be said about a launch. args, env and without are for both servers."""

    model: Text | None = None
    """The model: a folder on this host, or a name on the Hugging Face hub."""
    draft: Text | None = None
    """The draft model of the speculative server, likewise."""
    gpus: Literal["shared", "split"] | None = None
    """Both servers on the same GPUs, or each on its own. Without it: shared on one GPU, split on more."""
    tensor_parallel_size: Count | None = None
    """GPUs per server. Without it as many as there are and the model's attention heads allow."""
    python: Text | None = None
    """The Python that has SGLang, where it is not the router's own."""
    server_command: Text | None = None
    """A command in SGLang's place. {role}, {host}, {port}, {model}, {draft}, {gpus}, {tp}, {args} \
(the flags for SGLang) and {config} (the file that holds its key) are filled in. It must replace itself with the server (exec)."""
    start_timeout: Seconds = 1800.0
    """How long a server may take to be ready: loading a large model takes minutes."""
    stop_timeout: Seconds = 30.0
    """How long a server may take to end after SIGTERM before it is killed."""
    restart_delay: Seconds = 1.0
    """The wait before a server that died is started again; twice as long each time after."""
    restart_delay_max: Seconds = 60.0
    """The longest such wait."""
    speculative: ServerTable = ServerTable()
    """For the speculative server only, after what is for both."""
    baseline: ServerTable = ServerTable()
    """For the baseline server only."""


class LaunchTableError(ValueError):
    """The table is refused: one line for each problem."""

    def __init__(self, lines: tuple[str, ...]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def read_launch(config: Path | None, flags: Mapping[str, object]) -> LaunchTable:
    """Return the table of this file, with what the flags (None: not given) say instead.

    A `model` or `draft` that starts with a dot means: beside the file. Raises LaunchTableError.
    """
    table = _table(config)
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return LaunchTable.model_validate({**table, **given})
    except ValidationError as error:
        lines = tuple(_line(detail, config, given) for detail in error.errors(include_url=False))
        raise LaunchTableError(lines) from None


def _table(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    path = at_home(config)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        text = f"config = {show(str(config))} (flag --config): {error.strerror or 'cannot be read'}"
        raise LaunchTableError((text,)) from None
    except ValueError as error:
        text = f"config = {show(str(config))} (flag --config): not a TOML file: {error}"
        raise LaunchTableError((text,)) from None
    table = document.get(LAUNCH_TABLE, {})
    if not isinstance(table, dict):
        raise LaunchTableError((f"launch (file {path}): a table is wanted: [launch]",))
    for name in ("model", "draft"):
        value = table.get(name)
        if isinstance(value, str) and value.startswith((".", "~")):
            table[name] = str(path.parent / at_home(value))
    return table


def _line(detail: Any, config: Path | None, flags: Mapping[str, object]) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    source = f"file {config}"
    if detail["loc"] and detail["loc"][0] in flags:
        source = f"flag --{str(detail['loc'][0]).replace('_', '-')}"
    if detail["type"] == "extra_forbidden":
        names = ServerTable.model_fields if len(detail["loc"]) > 1 else LaunchTable.model_fields
        close = difflib.get_close_matches(str(detail["loc"][-1]), names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"launch.{where} ({source}): no such setting{hint}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    text = message[:1].lower() + message[1:]
    return f"launch.{where} = {show(detail['input'])} ({source}): {text}"
