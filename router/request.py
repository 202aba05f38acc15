"""What a decision needs to know of a request, read from its body without touching it.

The body is forwarded byte for byte whatever is found here. Unknown fields are skipped and known
ones are read leniently: whether `"stream": 1` is an error is for the engine to say. Only a body
that is no JSON object is refused: the engine refuses it too, and nothing can be decided on it.
"""

from __future__ import annotations

import msgspec

from router.load import Role


class RequestInfo(msgspec.Struct, frozen=True, gc=False):
    """The facts that a policy or a fence looks at."""

    stream: bool = False  # the JSON value true; anything else is not a stream
    structured_output: bool = False
    logprobs: bool = False
    choices: int = 1
    prompt_bytes: int = 0  # length of the whole body: a bound on the prompt's length
    stateful: str | None = None  # a field that ties the request to one server, see `STATEFUL`
    pinned: Role | None = None


NOTHING_KNOWN = RequestInfo()

# Fields of /v1/responses that name state kept in one server's memory only.
STATEFUL = ("previous_response_id", "background")


class BodyError(ValueError):
    """The body is not a JSON object."""


class _Body(msgspec.Struct, gc=False):
    """Raw values: no type of a known field can make decoding fail."""

    stream: msgspec.Raw = msgspec.Raw()
    response_format: msgspec.Raw = msgspec.Raw()
    regex: msgspec.Raw = msgspec.Raw()
    ebnf: msgspec.Raw = msgspec.Raw()
    json_schema: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Body)
_EMPTY = (b"", b"null", b"false")


def read_info(body: bytes | bytearray, pinned: Role | None = None) -> RequestInfo:
    """Read what matters of a JSON body. Raises BodyError when it is no JSON object."""
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyError(_why(body)) from error
    stateful = None
    if bytes(found.previous_response_id) not in _EMPTY:
        stateful = "previous_response_id"
    elif bytes(found.background) not in _EMPTY:
        stateful = "background"
    return RequestInfo(
        bytes(found.stream) == b"true",
        _structured(found),
        bytes(found.logprobs) not in _EMPTY,
        _count(bytes(found.n)),
        len(body),
        stateful,
        pinned,
    )


def _structured(found: _Body) -> bool:
    """Whether the output is constrained by a grammar of any kind."""
    wanted = bytes(found.response_format)
    if wanted not in _EMPTY and b'"text"' not in wanted:
        return True
    return any(bytes(raw) not in _EMPTY for raw in (found.regex, found.ebnf, found.json_schema))


def _count(raw: bytes) -> int:
    return int(raw) if raw.isdigit() and len(raw) < 10 else 1


def _why(body: bytes | bytearray) -> str:
    """One line without any of the body's text."""
    if not body:
        return "the request has no body; a JSON object is needed"
    if bytes(body[:64]).lstrip()[:1] == b"{":
        return "the body is not valid JSON"
    return "the body is not a JSON object"
