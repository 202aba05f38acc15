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


_ABSENT = msgspec.Raw()


class _Body(msgspec.Struct, gc=False):
    """Raw values: no type of a known field can make decoding fail."""

    stream: msgspec.Raw = _ABSENT
    response_format: msgspec.Raw = _ABSENT
    regex: msgspec.Raw = _ABSENT
    ebnf: msgspec.Raw = _ABSENT
    json_schema: msgspec.Raw = _ABSENT
    structural_tag: msgspec.Raw = _ABSENT
    logprobs: msgspec.Raw = _ABSENT
    return_logprob: msgspec.Raw = _ABSENT
    n: msgspec.Raw = _ABSENT
    sampling_params: msgspec.Raw = _ABSENT  # of /generate: `n` and the grammars are in it
    previous_response_id: msgspec.Raw = _ABSENT
    background: msgspec.Raw = _ABSENT


class _Format(msgspec.Struct, gc=False):
    """A `response_format`."""

    type: msgspec.Raw = _ABSENT


_decoder = msgspec.json.Decoder(_Body)
_format_decoder = msgspec.json.Decoder(_Format)
_EMPTY = (b"", b"null", b"false")
_MANY = 1_000_000  # choices, where the number written is larger than any engine takes


def read_info(body: bytes | bytearray, pinned: Role | None = None) -> RequestInfo:
    """Read what matters of a JSON body. Raises BodyError when it is no JSON object."""
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyError(_why(body, error)) from error
    if (
        found.response_format is _ABSENT
        and found.regex is _ABSENT
        and found.ebnf is _ABSENT
        and found.json_schema is _ABSENT
        and found.structural_tag is _ABSENT
        and found.logprobs is _ABSENT
        and found.return_logprob is _ABSENT
        and found.n is _ABSENT
        and found.sampling_params is _ABSENT
        and found.previous_response_id is _ABSENT
        and found.background is _ABSENT
    ):  # nearly all requests
        stream = bytes(found.stream) == b"true"
        return RequestInfo(stream, False, False, 1, len(body), None, pinned)
    return _read_all(found, len(body), pinned)


def _read_all(found: _Body, length: int, pinned: Role | None) -> RequestInfo:
    stateful = None
    if _given(found.previous_response_id):
        stateful = "previous_response_id"
    elif _given(found.background):
        stateful = "background"
    structured, choices = _structured(found), _count(found.n)
    if bytes(found.sampling_params)[:1] == b"{":
        native = _decoder.decode(found.sampling_params)
        structured, choices = structured or _structured(native), max(choices, _count(native.n))
    return RequestInfo(
        bytes(found.stream) == b"true",
        structured,
        _given(found.logprobs) or _given(found.return_logprob),
        choices,
        length,
        stateful,
        pinned,
    )


def _given(raw: msgspec.Raw) -> bool:
    return raw is not _ABSENT and bytes(raw) not in _EMPTY


def _structured(found: _Body) -> bool:
    """Whether the output is constrained by a grammar of any kind."""
    if _given(found.response_format):
        wanted = bytes(found.response_format)
        if wanted[:1] != b"{" or bytes(_format_decoder.decode(wanted).type) != b'"text"':
            return True
    return (
        _given(found.regex)
        or _given(found.ebnf)
        or _given(found.json_schema)
        or _given(found.structural_tag)
    )


def _count(raw: msgspec.Raw) -> int:
    """Choices asked for. The engine reads "3" and 3.0 as 3; what is no number is for it to refuse."""
    if raw is _ABSENT:
        return 1
    written = bytes(raw).strip(b'"')
    if written.isdigit():
        return int(written) if len(written) < 7 else _MANY
    try:
        value = float(written) if len(written) < 32 else 1.0
    except ValueError:
        return 1
    return int(min(value, _MANY)) if value >= 1 else 1


def _why(body: bytes | bytearray, error: Exception) -> str:
    """One line without any of the body's text."""
    if not body:
        return "the request has no body; a JSON object is needed"
    if isinstance(error, RecursionError):
        return "the body is nested too deeply"
    if bytes(body[:64]).lstrip()[:1] == b"{":
        return "the body is not valid JSON"
    return "the body is not a JSON object"
