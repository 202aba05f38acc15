"""The file in which a server is told its secrets: written for its start, removed at its end.

It is YAML as SGLang's `--config` reads it, of mode 0600, alone in a folder of mode 0700 that is made
for it. It is written anew for each start, so that a server comes back even if something has tidied
up; it is removed by the keeper of the server (`launch_keeper`), which outlives a launcher that is
killed, and once more by the launcher.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

import yaml

from router.launch_flags import FlagError, Flags, name_of
from router.launch_secrets import CONFIG
from router.load import ROLES, Role


class SecretFile(NamedTuple):
    """One file and what is in it."""

    path: str
    text: str

    def write(self) -> None:
        """Write it anew. Raises OSError with one line that says what is wrong."""
        folder = os.path.dirname(self.path)  # noqa: PTH120 (a text, as it stands in the command)
        try:
            _make_private(folder)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)  # noqa: PTH108 (beside os.open)
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as out:
                out.write(self.text)
        except OSError as error:
            why = error.strerror or error
            text = f"the file for its key cannot be written in {folder}: {why}"
            raise OSError(error.errno, text) from None

    def remove(self) -> None:
        """Take it and its folder away, if they are there."""
        path = Path(self.path)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _make_private(folder: str) -> None:
    """Make the folder, or see that it is ours alone. Raises OSError."""
    try:
        os.mkdir(folder, 0o700)  # noqa: PTH102 (beside os.lstat)
    except FileExistsError:
        found = os.lstat(folder)
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not ours or found.st_mode & 0o077:
            raise


def places() -> dict[Role, str]:
    """Return a name for the file of each server, new ones at each call. Nothing is made."""
    try:
        base = tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written anywhere: said when a file is wanted
        base = "/tmp"  # noqa: S108 (only a name)
    mark = secrets.token_hex(8)
    return {role: f"{base}/crossover-{mark}-{role}/sglang.yaml" for role in ROLES}


def secret_file(path: str, flags: Flags) -> SecretFile:
    """Return the file for these secrets, with what the user's own `--config` says besides.

    Raises OSError, yaml.YAMLError or ValueError where that one cannot be used.
    """
    document: dict[str, object] = {}
    for own in flags.get(CONFIG, ()):
        read = yaml.safe_load(Path(own).read_text(encoding="utf-8"))
        if not isinstance(read, dict | None):
            raise FlagError("not a mapping of flags to values")
        document |= {
            key: value for key, value in (read or {}).items() if name_of(str(key)) not in flags
        }
    document |= {name: values[0] for name, values in flags.items() if name != CONFIG}
    return SecretFile(path, yaml.safe_dump(document, sort_keys=False))
