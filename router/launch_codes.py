"""Which exit code a launch ends with for what ended a server at its start; LAUNCH.md lists them.

Pure.
"""

from __future__ import annotations

from typing import Final

from router.exit_codes import (
    EXIT_CANNOT_BIND,
    EXIT_CONFIGURATION,
    EXIT_NO_MEMORY,
    EXIT_NO_MODEL,
    EXIT_NO_SGLANG,
)
from router.launch_hints import Cause

CODE_OF: Final = {
    Cause.NO_MEMORY: EXIT_NO_MEMORY,
    Cause.NO_SGLANG: EXIT_NO_SGLANG,
    Cause.PORT_TAKEN: EXIT_CANNOT_BIND,
    Cause.BAD_FLAG: EXIT_CONFIGURATION,
    Cause.NO_MODEL: EXIT_NO_MODEL,
    Cause.CANNOT_RUN: EXIT_CONFIGURATION,
}
