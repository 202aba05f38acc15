"""THE table of what the router itself answers when a request cannot be served.

Each entry says the status, the OpenAI error type and code, the text and, for what may be tried
again later, the seconds of `Retry-After`. A backend's own errors are not here: they pass through
unchanged. Entries are named by the phase in which they happen, since the phase is what decides
whether a replay is safe; no text names an address.
"""

from __future__ import annotations

import http
from typing import Final

import msgspec


class ErrorAnswer(msgspec.Struct, frozen=True):
    """One row: what the client gets. `retry_after` in whole seconds."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None

    def with_message(self, message: str, param: str | None = None) -> ErrorAnswer:
        """The same row with a text that fits the case."""
        return msgspec.structs.replace(self, message=message, param=param)

    @property
    def body(self) -> bytes:
        """The JSON body in OpenAI's shape."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    @property
    def event(self) -> bytes:
        """The error as one server-sent event, for a stream that has begun."""
        return b"data: " + self.body + b"\n\n"


_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_LIMIT: Final = "rate_limit_error"

# --- the request itself: nothing was sent to a backend
BAD_REQUEST = ErrorAnswer(400, _INVALID, "bad_request", "the request is not valid HTTP/1.1")
BAD_BODY = ErrorAnswer(400, _INVALID, "invalid_body", "the body is not a JSON object")
STATEFUL = ErrorAnswer(
    400,
    _INVALID,
    "stateful_request",
    "stored responses live in one server only and this address stands for two; "
    "send the whole input instead",
)
BAD_PIN = ErrorAnswer(
    400,
    _INVALID,
    "invalid_backend",
    "x-crossover-backend must be speculative or baseline",
    "x-crossover-backend",
)
UNAUTHORIZED = ErrorAnswer(
    401, _INVALID, "invalid_api_key", "a valid API key is needed: Authorization: Bearer KEY"
)
CROSS_SITE = ErrorAnswer(
    403,
    _INVALID,
    "cross_site",
    "a browser says that a page of another site made this request: allow its origin with "
    "--cors-origin, or have clients send a key (--api-keys-file)",
)
NOT_FOUND = ErrorAnswer(404, _INVALID, "not_found", "no such endpoint")
METHOD_NOT_ALLOWED = ErrorAnswer(
    405, _INVALID, "method_not_allowed", "this endpoint does not take that method"
)
REQUEST_TIMEOUT = ErrorAnswer(
    408, _INVALID, "request_timeout", "the request did not arrive in time"
)
BODY_TOO_LARGE = ErrorAnswer(413, _INVALID, "body_too_large", "the body is larger than allowed")
URL_TOO_LONG = ErrorAnswer(414, _INVALID, "url_too_long", "the request target is too long")
EXPECTATION_FAILED = ErrorAnswer(
    417, _INVALID, "expectation_failed", "only Expect: 100-continue is understood"
)
HEADERS_TOO_LARGE = ErrorAnswer(
    431, _INVALID, "headers_too_large", "the request has too many or too large headers"
)
BAD_VERSION = ErrorAnswer(505, _INVALID, "http_version", "HTTP/1.1 or HTTP/1.0 is needed")
BAD_TRANSFER_CODING = ErrorAnswer(
    501, _INVALID, "transfer_encoding", "only Transfer-Encoding: chunked is understood"
)

# --- own limits: nothing was sent to a backend
QUEUE_FULL = ErrorAnswer(
    429, _LIMIT, "queue_full", "too many requests are in flight and waiting", retry_after=1
)
QUEUE_TIMEOUT = ErrorAnswer(
    429, _LIMIT, "queue_timeout", "no place became free while the request waited", retry_after=2
)
OVERLOADED = ErrorAnswer(
    503, _SERVER, "overloaded", "too many bytes of request bodies are held", retry_after=1
)
NO_FILES = ErrorAnswer(
    503, _SERVER, "overloaded", "the router is out of files or memory", retry_after=1
)
TOO_MANY_CONNECTIONS = ErrorAnswer(
    503, _SERVER, "too_many_connections", "too many client connections are open", retry_after=1
)
DRAINING = ErrorAnswer(503, _SERVER, "draining", "the router is shutting down", retry_after=1)
NO_BACKEND = ErrorAnswer(
    503, _SERVER, "no_backend", "no backend is ready to take the request", retry_after=2
)
PINNED_UNAVAILABLE = ErrorAnswer(
    503, _SERVER, "no_backend", "the pinned backend is not ready", retry_after=2
)

# --- a backend failed; the phase is in the code
CONNECT_FAILED = ErrorAnswer(
    502, _SERVER, "backend_connect_failed", "no connection to the backend could be made"
)
CONNECT_TIMEOUT = ErrorAnswer(
    502, _SERVER, "backend_connect_timeout", "the backend did not accept a connection in time"
)
BACKEND_LOST = ErrorAnswer(
    502, _SERVER, "backend_lost", "the backend closed the connection before its answer was complete"
)
BACKEND_PROTOCOL = ErrorAnswer(
    502, _SERVER, "backend_protocol", "the backend's answer is not valid HTTP/1.1"
)
FIRST_BYTE_TIMEOUT = ErrorAnswer(
    504, _SERVER, "first_byte_timeout", "the backend did not begin to answer in time"
)
IDLE_TIMEOUT = ErrorAnswer(
    504, _SERVER, "idle_timeout", "the backend stopped in the middle of its answer"
)
DRAIN_LIMIT = ErrorAnswer(
    503, _SERVER, "drain_limit", "the router stopped before the answer was complete", retry_after=1
)
INTERNAL = ErrorAnswer(500, _SERVER, "internal_error", "an error inside the router")

# --- what the ordinary endpoints of both listeners answer besides: never part of a relayed request
NO_ADMIN_KEY = ErrorAnswer(
    403,
    _INVALID,
    "no_admin_key",
    "nothing can be changed without an admin key: start the router with --admin-key or "
    "CROSSOVER_ADMIN_KEY and send it as Authorization: Bearer KEY",
)
FOREIGN_HOST = ErrorAnswer(
    421,
    _INVALID,
    "foreign_host",
    "without an admin key this listener answers to its address and to its own machine's name for "
    "itself only: ask for one of these, or start the router with --admin-key",
)
STORED = NOT_FOUND.with_message(
    "stored responses live in the memory of one server only and this address stands for two: "
    "they can be neither read nor cancelled here"
)
MODEL_NOT_FOUND = ErrorAnswer(404, _INVALID, "model_not_found", "the model does not exist", "model")
INVALID_VALUE = ErrorAnswer(
    422, _INVALID, "invalid_value", "a parameter or a field of the body is not valid"
)
NOT_READY = ErrorAnswer(503, _SERVER, "not_ready", "no backend is ready yet", retry_after=1)
TOO_MANY_LISTENERS = ErrorAnswer(
    503,
    _SERVER,
    "too_many_listeners",
    "too many listen to the decisions already: close another status page, or read /decisions",
    retry_after=5,
)
BAD_ANSWER = ErrorAnswer(
    502, _SERVER, "backend_bad_answer", "no backend gave an answer that can be used"
)


def phrase(status: int) -> bytes:
    """The reason phrase of a status, empty for one that has none."""
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
