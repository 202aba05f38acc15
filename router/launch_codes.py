"""The exit codes of `crossover launch`; LAUNCH.md and the command's help list them."""

from __future__ import annotations

from typing import Final

from router.launch_hints import Cause

EXIT_OK: Final = 0  # a clean stop
EXIT_CONFIGURATION: Final = 2  # the configuration or the command line is refused
EXIT_CANNOT_BIND: Final = 3  # a port is taken
EXIT_FAILURE: Final = 4  # anything else
EXIT_NO_GPU: Final = 5  # no GPU, or too few
EXIT_NO_SGLANG: Final = 6  # SGLang is not installed
EXIT_NO_MODEL: Final = 7  # a model is missing, or model and draft do not fit
EXIT_NO_MEMORY: Final = 8  # a server ran out of GPU memory at its start
EXIT_SERVER_ENDED: Final = 9  # a server ended, or was not ready in time, for another reason
EXIT_INTERRUPTED: Final = 130  # a second signal ended all at once

CODE_OF: Final = {
    Cause.NO_MEMORY: EXIT_NO_MEMORY,
    Cause.NO_SGLANG: EXIT_NO_SGLANG,
    Cause.PORT_TAKEN: EXIT_CANNOT_BIND,
    Cause.BAD_FLAG: EXIT_CONFIGURATION,
    Cause.NO_MODEL: EXIT_NO_MODEL,
    Cause.CANNOT_RUN: EXIT_CONFIGURATION,
}
