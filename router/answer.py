"""The client's side of an exchange as bytes: the head, the framing, the end.

Each answer is framed afresh for the client that asked: chunked towards HTTP/1.1 whatever the
backend did when the length is not known, and close-delimited towards HTTP/1.0 (nginx towards us,
by default). It may not write anything, nor change a byte of a body: it only frames.
"""

from __future__ import annotations

import functools
from typing import Final

from router.actions import Request
from router.errors import ErrorAnswer
from router.framing import ResponseHead
from router.headers import answer_head, error_answer
from router.load import ROLES
from router.policy import Decision, Reason

# Every beginning that there can be, made once.
_WHICH_AND_WHY: Final = {
    (role, reason): (
        f"x-crossover-backend: {role or 'none'}\r\n"
        f"x-crossover-reason: {reason}\r\n"
        "x-crossover-concurrency: "
    ).encode()
    for role in (*ROLES, None)
    for reason in Reason
}


@functools.lru_cache(maxsize=1024)
def _threshold_line(threshold: float | None) -> bytes:
    return b"" if threshold is None else f"x-crossover-threshold: {threshold:g}\r\n".encode()


class Answer:
    """What one client gets. `begun` once a head was made; `bytes_out` counts the body."""

    __slots__ = ("_own", "_request", "begun", "bytes_out", "chunked", "close", "status")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._own = request.extra + b"x-request-id: %b\r\n" % request.id.encode()
        self.begun = False
        self.chunked = False
        self.close = request.http10 or not request.keep_alive
        self.status = 0
        self.bytes_out = 0

    def explain(self, decision: Decision) -> None:
        """Say in the headers which backend answers, and why."""
        self._own = self._request.extra + b"%b%d/%d\r\n%bx-request-id: %b\r\n" % (
            _WHICH_AND_WHY[decision.backend, decision.reason],
            decision.n,
            decision.m,
            _threshold_line(decision.threshold),
            self._request.id.encode(),
        )

    def begin(self, head: ResponseHead, common: bytes, *, draining: bool) -> bytes:
        """The head of a relayed answer."""
        self.begun = True
        self.status = head.status
        self.close = self.close or draining
        framing = b""
        if head.framing == "length":
            framing = b"content-length: %d\r\n" % head.length
        elif head.framing != "none" and not self._request.http10:
            self.chunked = True
            framing = b"transfer-encoding: chunked\r\n"
        return answer_head(head, self._own, framing, common, close=self.close)

    def whole(self, head: ResponseHead, body: bytes, common: bytes, *, draining: bool) -> bytes:
        """A whole relayed answer of this length."""
        self.bytes_out += len(body)
        return self.begin(head, common, draining=draining) + body

    def frame(self, payload: bytes) -> bytes:
        """Body bytes as they go out."""
        if self.chunked:
            return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""
        return payload

    def ending(self) -> bytes:
        """What ends a complete body."""
        return b"0\r\n\r\n" if self.chunked else b""

    def error(self, error: ErrorAnswer, common: bytes, *, draining: bool) -> bytes:
        """A whole answer of our own in place of a backend's."""
        self.begun = True
        self.status = error.status
        self.close = self.close or draining
        self.bytes_out += len(error.body)
        return error_answer(error, self._own, common, close=self.close)
