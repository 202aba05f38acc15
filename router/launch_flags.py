"""The flags of an SGLang server as values: read, overruled, written.

The law of this file: it knows how flags are spelled and nothing of what they do. A flag is its name
without dashes and the texts behind it, none for a switch; of two spellings of one flag the later
wins, so that what a user adds replaces what we would have said, and no flag is there twice.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

Flags = dict[str, tuple[str, ...]]

# Other names of a flag -> the one that is used here.
ALIASES: Final = {
    "model": "model-path",
    "tp": "tensor-parallel-size",
    "tp-size": "tensor-parallel-size",
    "speculative-draft-model": "speculative-draft-model-path",
    "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
    "cuda-graph-bs": "cuda-graph-bs-decode",
}
# What these two were called before this release (read in 0.5.9 and 0.5.12; 0.5.14 has the new ones).
RENAMED_IN: Final = (0, 5, 14)
OLD_NAMES: Final = {
    "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
    "cuda-graph-bs-decode": "cuda-graph-bs",
}


class FlagError(ValueError):
    """Something is not a flag; the message says what."""


def name_of(flag: str) -> str:
    """Return the one name of a flag, however it is spelled."""
    name = flag.removeprefix("--").replace("_", "-")
    return ALIASES.get(name, name)


def from_args(args: Iterable[str]) -> Flags:
    """Read what follows a command: `--name value ...`, `--name=value` or `--name`.

    Raises FlagError for a value that no flag stands before.
    """
    flags: Flags = {}
    name: str | None = None
    for text in args:
        if text.startswith("--") and len(text) > 2:
            flag, equals, value = text.partition("=")
            name = name_of(flag)
            flags[name] = (value,) if equals else ()
        elif name is None:
            raise FlagError(f"{text!r} is not a flag: write '--name', 'value'")
        else:
            flags[name] = (*flags[name], text)
    return flags


def from_yaml(document: object) -> Flags:
    """Read SGLang's `--config` format: true is a switch, false is nothing, a list is many values.

    Raises FlagError for what that format cannot hold.
    """
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise FlagError("not a mapping of flags to values")
    flags: Flags = {}
    for key, value in document.items():
        name = name_of(str(key))
        match value:
            case False:
                flags.pop(name, None)
            case True:
                flags[name] = ()
            case list():
                flags[name] = tuple(str(item) for item in value)
            case str() | int() | float():
                flags[name] = (str(value),)
            case _:
                raise FlagError(f"{key}: a text, a number, true, false or a list is wanted")
    return flags


def merged(*layers: Flags, without: Sequence[str] = ()) -> Flags:
    """Return all layers in one, the later ones winning, less the flags in `without`."""
    result: Flags = {}
    for layer in layers:
        result.update(layer)
    for flag in without:
        result.pop(name_of(flag), None)
    return result


def to_args(flags: Flags, release: tuple[int, int, int] | None = None) -> tuple[str, ...]:
    """Write flags for a command line, under the names that this release of SGLang has."""
    old = OLD_NAMES if release is not None and release < RENAMED_IN else {}
    return tuple(
        text for name, values in flags.items() for text in (f"--{old.get(name, name)}", *values)
    )


def filled(
    command: Iterable[str], values: Mapping[str, str], args: Sequence[str]
) -> tuple[str, ...]:
    """Return a command with placeholders filled in, and `{args}` as words or within one."""
    words: list[str] = []
    for word in command:
        if word == "{args}":
            words += args
            continue
        text = word.replace("{args}", shlex.join(args))
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        words.append(text)
    return tuple(words)


def value_of(flags: Flags, name: str) -> str | None:
    """Return the single value of a flag; None if it is not given or has none."""
    values = flags.get(name, ())
    return values[0] if values else None
