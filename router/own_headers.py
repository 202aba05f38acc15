"""The headers that mean something to us, each way, with what they say.

Pure. REFERENCE.md is made of this. `router.guard` and `router.auth` read the first kind,
`router.answer`, `router.headers` and `router.web` write the second.
"""

from __future__ import annotations

from typing import Final

# Of a request. None of these but x-request-id reaches a backend.
REQUEST: Final = {
    "x-crossover-backend": (
        "`speculative` or `baseline`: decide so. Obeyed with `--allow-pinning`, else ignored"
    ),
    "x-request-id": "1 to 128 of `A-Z a-z 0-9 . _ : -`: kept, sent on and logged; else we make one",
    "authorization": "`Bearer KEY`: the client's key, on the admin listener the admin key",
    "x-api-key": "the client's key, on `/v1/messages` and below it",
    "last-event-id": "on `/events` of the admin listener: go on after this event",
}
# Of an answer. A browser of an allowed origin may read them all.
RESPONSE: Final = {
    "x-crossover-backend": "`speculative`, `baseline`, or `none` when no backend could be chosen",
    "x-crossover-reason": "one of the reasons below",
    "x-crossover-concurrency": "n/m, as it was compared",
    "x-crossover-threshold": "K, or F(m) where the line is a table; absent without a line",
    "x-request-id": "the client's, or one of ours; the backend got the same",
    "retry-after": "whole seconds; on every 429 and 503 of ours",
    "www-authenticate": "`Bearer`, on a 401 of ours",
    "x-accel-buffering": "`no` on event streams, so that nginx in front does not collect them",
}
