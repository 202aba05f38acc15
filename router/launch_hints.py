"""What the end of a server's log says about why it ended, in one line with a way out.

The law of this file: text in, words out. The texts are those of SGLang 0.5.9 to 0.5.23, torch, and
Python; an end that nobody has a hint for is shown as it is.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Final, NamedTuple


class Cause(enum.Enum):
    """Why a server ended."""

    NO_MEMORY = enum.auto()
    NO_SGLANG = enum.auto()
    PORT_TAKEN = enum.auto()
    BAD_FLAG = enum.auto()
    NO_MODEL = enum.auto()
    CANNOT_RUN = enum.auto()
    UNKNOWN = enum.auto()


class Hint(NamedTuple):
    """A cause, the line that shows it, and how to mend it."""

    cause: Cause
    line: str
    mend: str


_RULES: Final = (
    (
        # Before plain out-of-memory, because the fraction must go up here and down there.
        re.compile(
            r"leave no GPU memory for the KV cache|Not enough memory\. Please try to increase"
        ),
        Cause.NO_MEMORY,
        (
            "raise --mem-fraction-static of this server and lower it for the other one, or "
            "take a smaller model or more GPUs (--tensor-parallel-size)"
        ),
    ),
    (
        re.compile(r"CUDA out of memory|OutOfMemoryError|cudaErrorMemoryAllocation", re.IGNORECASE),
        Cause.NO_MEMORY,
        (
            "lower --mem-fraction-static (or --max-total-tokens) of this server, or of the other one if "
            "they share the GPU; --cuda-graph-max-bs-decode takes memory too, and a "
            "model that is too large wants more GPUs (--gpus shared, --tensor-parallel-size)"
        ),
    ),
    (
        re.compile(r"No module named '?sglang'?"),
        Cause.NO_SGLANG,
        'pip install ".[gpu]" in a clone of Crossover, or name the Python that has it with --python',
    ),
    (
        re.compile(r"address already in use", re.IGNORECASE),
        Cause.PORT_TAKEN,
        "give the server another port with --speculative or --baseline http://127.0.0.1:PORT",
    ),
    (
        re.compile(r"unrecognized arguments:|ambiguous option:|invalid choice:"),
        Cause.BAD_FLAG,
        (
            "this SGLang does not know the flag: take it out of `args`, or out of deploy/sglang/ with "
            "`without`"
        ),
    ),
    (
        re.compile(
            r"does not appear to have a file named|is not a local folder and is not a valid model "
            r"identifier|Repository Not Found|LocalEntryNotFoundError"
        ),
        Cause.NO_MODEL,
        "check --model and --draft: a folder on this host, or a name on the Hugging Face hub",
    ),
    (
        re.compile(r"set the env var SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"),
        Cause.NO_MODEL,
        (
            "give both servers a --context-length that model and draft take, or the speculative one "
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1: a draft only proposes"
        ),
    ),
    (
        re.compile(r"^cannot run it: the file for its key cannot be written"),
        Cause.CANNOT_RUN,
        "set TMPDIR to a directory of this host that can be written",
    ),
    (
        re.compile(r"^cannot run .*: "),
        Cause.CANNOT_RUN,
        "check the command (--server-command, --python)",
    ),
)


def hint_in(lines: Iterable[str]) -> Hint | None:
    """Return the last known cause in these log lines; None if there is none."""
    found: Hint | None = None
    for line in lines:
        for pattern, cause, mend in _RULES:
            if pattern.search(line):
                found = Hint(cause, line.strip(), mend)
                break
    return found
