"""What a server says when it refuses: pure functions from a problem to status and body.

The texts are those of SGLang 0.5.17, captured; its validation errors are Python's `repr` of
pydantic's list, with the path of the handler's source file in them, and flat, not OpenAI's shape.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

# Where the captured server says that its handlers are; the directory is a usual one.
SOURCE: Final = "/usr/local/lib/python3.12/dist-packages/sglang/srt/entrypoints/http_server.py"
HANDLERS: Final = {
    "/v1/chat/completions": (1702, "openai_v1_chat_completions"),
    "/v1/completions": (1694, "openai_v1_completions"),
    "/v1/embeddings": (1711, "openai_v1_embeddings"),
    "/v1/messages": (1994, "anthropic_v1_messages"),
    "/v1/messages/count_tokens": (2005, "anthropic_v1_count_tokens"),
    "/generate": (805, "generate_request"),
}
QUEUE_FULL: Final = "The request queue is full."
NOT_FOUND: Final = b'{"detail":"Not Found"}'
NOT_ALLOWED: Final = b'{"detail":"Method Not Allowed"}'
UNAUTHORIZED: Final = b'{"error":"Unauthorized"}'


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault of ours
    """An answer that is not what was asked for."""

    def __init__(self, status: int, message: str, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind

    def body(self) -> bytes:
        """The flat body of the OpenAI routes."""
        return msgspec.json.encode(
            {
                "object": "error",
                "message": self.message,
                "type": self.kind,
                "param": None,
                "code": self.status,
            }
        )


class BadToken(Exception):  # noqa: N818 - it is what kills the server
    """A token id outside the vocabulary: the GPU asserts and the server dies."""


class Literal(str):
    """A string that stands for itself in a `repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def bad_request(message: str, kind: str = "BadRequestError") -> Refusal:
    """A 400 that the handler itself raised."""
    return Refusal(400, message, kind)


def queue_full() -> Refusal:
    """The 503 of a request that does not stream."""
    return Refusal(503, QUEUE_FULL, "503")


def queue_full_event() -> bytes:
    """The same for one that streams: an event inside a 200 (with spaces, as Python's json has)."""
    return (
        b'data: {"error": {"object": "error", "message": "%s", "type": "SERVICE_UNAVAILABLE",'
        b' "param": null, "code": 503}}\n\n' % QUEUE_FULL.encode()
    )


def invalid(path: str, problems: list[dict[str, Any]]) -> Refusal:
    """The 400 of a body that does not fit the route's schema."""
    line, function = HANDLERS.get(path, (1, "handler"))
    count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''}"
    listed = "".join(f"\n  {problem!r}" for problem in problems)
    return bad_request(
        f'{count}:{listed}\n\n  File "{SOURCE}", line {line}, in {function}\n'
        f"    POST {path} {problems!r}",
        "Bad Request",
    )


def wrong_content_type() -> Refusal:
    """The 400 of a body that does not call itself JSON."""
    problem = {
        "loc": ["header", "content-type"],
        "msg": "Unsupported Media Type: Only 'application/json' is allowed",
        "type": "value_error",
    }
    return bad_request(f"1 validation error:\n  {problem!r} [{problem!r}]", "Bad Request")


def missing(where: tuple[str | int, ...], given: Any) -> dict[str, Any]:
    """Pydantic's problem with a field that is not there."""
    return {"type": "missing", "loc": where, "msg": "Field required", "input": given}


def value_error(where: tuple[str | int, ...], message: str, given: Any) -> dict[str, Any]:
    """Pydantic's problem with a value that a validator refused."""
    return {
        "type": "value_error",
        "loc": where,
        "msg": f"Value error, {message}",
        "input": given,
        "ctx": {"error": Literal(f"ValueError({message!r})")},
    }


def bad_json(body: bytes) -> dict[str, Any]:
    """Pydantic's problem with a body that is not JSON, in the words of the parser in use there."""
    at, message = _json_error(body)
    return {
        "type": "json_invalid",
        "loc": ("body", at),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": message},
    }


def _json_error(body: bytes) -> tuple[int, str]:
    """Where the body stops being JSON and what is wrong there, for the usual kinds of mistake."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return error.start, "invalid utf-8"
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        at = error.pos
        if at >= len(text.rstrip()):
            return len(text), "unexpected end of data"
        if error.msg == "Extra data":
            return at, "unexpected content after document"
        for literal in ("null", "true", "false"):
            if text[at] == literal[0]:
                return at, f"invalid literal, expected '{literal}'"
        return at, "unexpected character"
    return 0, "unexpected number"  # Python's json takes NaN, the real parser does not
