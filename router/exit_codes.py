"""The exit codes of `crossover`, in one place: the commands end with them, REFERENCE.md lists them.

Pure. One number means one thing wherever it can, so that a supervisor needs no table per command.
"""

from __future__ import annotations

from typing import Final

EXIT_OK: Final = 0
EXIT_SPOILED: Final = 1
EXIT_CONFIGURATION: Final = 2
EXIT_CANNOT_BIND: Final = 3
EXIT_FAILURE: Final = 4
EXIT_NO_GPU: Final = 5
EXIT_NO_SGLANG: Final = 6
EXIT_NO_MODEL: Final = 7
EXIT_NO_MEMORY: Final = 8
EXIT_SERVER_ENDED: Final = 9
EXIT_INTERRUPTED: Final = 130

_REFUSED: Final = {EXIT_CONFIGURATION: "the configuration or the command line is refused"}
_PRINTS: Final = {EXIT_OK: "printed"} | _REFUSED

# By command, what each of its codes means.
MEANINGS: Final[dict[str, dict[int, str]]] = {
    "serve": {
        EXIT_OK: "a clean stop",
        **_REFUSED,
        EXIT_CANNOT_BIND: "an address cannot be bound",
        EXIT_FAILURE: "anything else that ends the router",
    },
    "doctor": {
        EXIT_OK: "the pair is sound",
        EXIT_SPOILED: "a finding that spoils a calibration",
        EXIT_CONFIGURATION: "it could not look: refused configuration, or no server answers",
    },
    "launch": {
        EXIT_OK: "a clean stop",
        **_REFUSED,
        EXIT_CANNOT_BIND: "a port is taken",
        EXIT_FAILURE: "anything else",
        EXIT_NO_GPU: "no GPU, or too few",
        EXIT_NO_SGLANG: "SGLang is not installed",
        EXIT_NO_MODEL: "a model is missing, or model and draft do not fit",
        EXIT_NO_MEMORY: "a server ran out of GPU memory at its start",
        EXIT_SERVER_ENDED: "a server ended, or was not ready in time, for another reason",
        EXIT_INTERRUPTED: "a second signal ended all at once",
    },
    "config": _PRINTS,
    "settings": _PRINTS,
    "version": _PRINTS,
}
