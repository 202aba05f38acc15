"""Which of SGLang's flags are secrets, and how a command line is kept free of them.

The law of this file: values in, values out. A command line is seen by every user of the machine, in
`ps` and in /proc, so a secret goes into a file that SGLang reads itself: `--config FILE`, which
every release since 0.5.9 has (its `server_args_config_parser.py`). One such file is allowed, so that
of a user becomes part of ours; what the command line says wins over it.
"""

from __future__ import annotations

from typing import Final

from router.launch_flags import FlagError, Flags

CONFIG: Final = "config"
# As a placeholder of a command in SGLang's place: the name of that file.
PLACEHOLDER: Final = "{config}"
SECRET: Final = frozenset({"api-key", "admin-api-key", "ssl-keyfile-password"})


def secrets_in(flags: Flags) -> Flags:
    """Return the flags that are secrets, with the user's own `--config` if there are any.

    Raises FlagError for one that has not exactly one value.
    """
    found = {name: values for name, values in flags.items() if name in SECRET}
    for name, values in found.items():
        if len(values) != 1:
            raise FlagError(f"--{name}: one value is wanted, and there are {len(values)}")
    if found and CONFIG in flags:
        found[CONFIG] = flags[CONFIG]
    return found


def hidden(flags: Flags, file: str) -> Flags:
    """Return the flags without secrets, and with the name of the file that holds them."""
    secrets = secrets_in(flags)
    if not secrets:
        return flags
    rest = {name: values for name, values in flags.items() if name not in secrets}
    return {**rest, CONFIG: (file,)}
