"""What the two FastAPI apps, public and admin, have in common: errors in one shape, and the key.

Whatever goes wrong on an ordinary route, the client gets OpenAI's error body
`{"error": {"message", "type", "param", "code"}}`, because that is what its library can read.

No route is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router import errors
from router.auth import KeyRing
from router.errors import ErrorAnswer

CHALLENGE = {"www-authenticate": "Bearer"}


class AnswerError(Exception):
    """Ends a request with one row of the error table."""

    def __init__(self, answer: ErrorAnswer, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(answer.code)
        self.answer = answer
        self.headers = headers


def error_response(answer: ErrorAnswer, headers: Mapping[str, str] | None = None) -> Response:
    """A response from a row of the error table, with `Retry-After` where the row has one."""
    sent = dict(headers or {})
    if answer.retry_after is not None:
        sent["retry-after"] = str(answer.retry_after)
    return Response(answer.body, answer.status, sent, media_type="application/json")


def handle_errors(app: FastAPI, not_found: Callable[[Request], Response] | None = None) -> None:
    """Give all errors of an app the one shape. `not_found` may answer 404 and 405 itself."""

    async def known(_: Request, error: Exception) -> Response:
        assert isinstance(error, AnswerError)  # noqa: S101 (for the type)
        return error_response(error.answer, error.headers)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 (for the type)
        return error_response(_invalid(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 (for the type)
        if error.status_code in {404, 405} and not_found is not None:
            return not_found(request)
        row = {404: errors.NOT_FOUND, 405: errors.METHOD_NOT_ALLOWED}.get(error.status_code)
        return error_response(row or errors.BAD_BODY, error.headers)

    async def unexpected(_: Request, __: Exception) -> Response:
        return error_response(errors.INTERNAL)  # the server logs the traceback

    app.add_exception_handler(AnswerError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


def _invalid(error: RequestValidationError) -> ErrorAnswer:
    """The first thing that is wrong, without the value that was sent."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    text = f"{where}: {first['msg']}"
    return errors.INVALID_VALUE.with_message(text, where)


class KeyGuard:
    """Lets a request through when it carries a right key, or needs none."""

    def __init__(
        self, app: ASGIApp, ring: KeyRing, needs_key: Callable[[Scope], bool] = lambda _: True
    ) -> None:
        """`ring` without keys lets everything through."""
        self.app = app
        self.ring = ring
        self.needs_key = needs_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401."""
        if scope["type"] == "http" and self.needs_key(scope):
            path = scope["path"].encode("utf-8", "surrogateescape")
            if not self.ring.accepts(scope["headers"], path=path):
                await error_response(errors.UNAUTHORIZED, CHALLENGE)(scope, receive, send)
                return
        await self.app(scope, receive, send)
