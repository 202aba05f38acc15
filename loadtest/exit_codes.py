"""The exit codes of `loadtest`, in one place: the commands end with them, REFERENCE.md lists them.

Pure. A command that was ended by a signal says so as a shell does: 128 and the signal's number.
"""

from __future__ import annotations

from typing import Final

OK: Final = 0
FAILED: Final = 1
BAD_VALUE: Final = 2
HUNG_UP: Final = 129
INTERRUPTED: Final = 130
TERMINATED: Final = 143

_BAD: Final = {BAD_VALUE: "a value of the command line or an input cannot be used"}
_ENDED: Final = {INTERRUPTED: "ended by Ctrl-C", TERMINATED: "ended by SIGTERM"}

# By command, what each of its codes means.
MEANINGS: Final[dict[str, dict[int, str]]] = {
    "bench": {
        OK: "every answer was complete",
        FAILED: "one was not, or something could not be started",
        **_BAD,
        **_ENDED,
    },
    "calibrate": {
        OK: "the calibration was written",
        FAILED: "the doctor objects, or a server failed; what is measured is kept",
        **_BAD,
        **_ENDED,
    },
    "compare": {
        OK: "done",
        FAILED: "a server or the router failed; what is measured is kept",
        **_BAD,
        HUNG_UP: "ended by SIGHUP",
        **_ENDED,
    },
    "demo": {
        OK: "no error, no leaked count, both servers used, every reason agrees with its numbers",
        FAILED: "one of these does not hold, or something could not be started",
        **_BAD,
        **_ENDED,
    },
    "engine": {OK: "a clean stop", FAILED: "it died, as a server may", **_BAD},
    "overhead": {
        OK: "measured, whatever the verdict",
        FAILED: "a server or the router failed; what is measured is kept",
        **_BAD,
        HUNG_UP: "ended by SIGHUP",
        **_ENDED,
    },
    "scale": {
        OK: "no stream broke and every answer was complete, whatever the figures",
        FAILED: "one was not, or something could not be started",
        **_BAD,
        **_ENDED,
    },
    "sweep": {
        OK: "all levels are measured",
        FAILED: "a server failed; what is measured is kept",
        **_BAD,
        **_ENDED,
    },
    "fit": {OK: "the calibration was written, whatever its verdict", **_BAD},
    "report": {OK: "page and picture were written", **_BAD},
}
