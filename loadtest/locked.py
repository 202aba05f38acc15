"""A directory for one run at a time; a killed run gives it free."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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
