"""The files of a run: a directory that is held by one run at a time, files replaced as a whole.

A kill at any moment leaves the directory free and each file either old or new. What is in the files
is for others to say.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

LOCK: Final = ".lock"


@contextlib.contextmanager
def locked(path: Path, what: str, error: type[Exception]) -> Iterator[None]:
    """Make the directory of `--out` and hold it. Raises `error` when that cannot be.

    `what` is what another run would be, for the message.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK).open("wb")
    except OSError as problem:
        raise error(f"--out {path} cannot be used: {problem.strerror}") from problem
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise error(f"another {what} is at work in --out {path}") from problem
        yield


def replace_document(path: Path, document: object) -> None:
    """Write a value as JSON for programs and people, in place of what the file held."""
    data = msgspec.json.format(msgspec.json.encode(document), indent=1)
    replace_file(path, data + b"\n")


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that there is the old one or the new one at any moment."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
