"""What a decision needs to know of a request, read from its body without touching it.

The body is forwarded byte for byte whatever is found here. Unknown fields are skipped and known
ones are read leniently: whether `"stream": 1` is an error is for the engine to say. Only a body
that is no JSON object is refused: the engine refuses it too, and nothing can be decided on it. It
may not change a body, nor keep or quote any of its text.

A conversation is told by a hash, so that its turns can go where its prefix is (`affinity`):

1. of `prompt_cache_key` (OpenAI: requests with the same one share a prefix) or `routing_key`
   (SGLang's /generate), where there is one;
2. of the opening: the first message, and the second one if the first is from the system. Later turns
   repeat both to the byte. Only the first bytes of either are looked at, and their lengths;
3. of the first bytes of a prompt in one piece, if it has so many: what is shorter is prefilled in
   less time than the decision about it is worth.

Not `user` and `safety_identifier`, which tell a person and not a conversation, nor `session_params`,
whose sessions are opened at one server and cannot be moved. The hash is Python's own: 64 bits, keyed
anew in each process, of no use outside of it, and kept nowhere but in memory.
"""

from __future__ import annotations

import msgspec

from router.load import Role

Body = bytes | memoryview  # as it is held: a large one in pages of its own, see `router.room`


class RequestInfo(msgspec.Struct, frozen=True, gc=False):
    """The facts that a policy or a fence looks at."""

    stream: bool = False  # the JSON value true; anything else is not a stream
    structured_output: bool = False
    logprobs: bool = False
    choices: int = 1
    prompt_bytes: int = 0  # length of the whole body: a bound on the prompt's length
    stateful: str | None = None  # a field that ties the request to one server, see `STATEFUL`
    pinned: Role | None = None
    conversation: int | None = None  # a hash that all turns of a conversation have in common


NOTHING_KNOWN = RequestInfo()

# Fields of /v1/responses that name state kept in one server's memory only.
STATEFUL = ("previous_response_id", "background")


class BodyError(ValueError):
    """The body is not a JSON object."""


_ABSENT = msgspec.Raw()


class _Opening(msgspec.Struct, gc=False, array_like=True):
    """The first two messages; the others are skipped."""

    first: msgspec.Raw = _ABSENT
    second: msgspec.Raw = _ABSENT


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
    prompt_cache_key: msgspec.Raw = _ABSENT
    routing_key: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    text: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT


class _Chat(_Body, gc=False):
    """A body whose messages are a list, as they should be: all is read in one pass."""

    messages: _Opening | None = None


class _Format(msgspec.Struct, gc=False):
    """A `response_format`."""

    type: msgspec.Raw = _ABSENT


_chat_decoder = msgspec.json.Decoder(_Chat)
_decoder = msgspec.json.Decoder(_Body)
_format_decoder = msgspec.json.Decoder(_Format)
_EMPTY = (b"", b"null", b"false")
_MANY = 1_000_000  # choices, where the number written is larger than any engine takes
# Bytes of a message that tell conversations apart, together with its length.
_TOLD_BY = 256
# The same of a prompt in one piece: some 250 tokens, 6 ms of prefill.
_PROMPT_TOLD_BY = 1024
# Bytes at either end of a message that its role is looked for in: no serializer writes it elsewhere.
_ENDS = 48


def read_info(body: Body | bytearray, pinned: Role | None = None) -> RequestInfo:
    """Read what matters of a JSON body. Raises BodyError when it is no JSON object."""
    found: _Body
    try:
        found = chat = _chat_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        found = _without_messages(body)
        conversation = _conversation_of(found)
    else:
        opening = chat.messages
        # A null is what many clients send for what they leave out.
        if opening is None or (
            chat.prompt_cache_key is not _ABSENT and _given(chat.prompt_cache_key)
        ):
            conversation = _conversation_of(chat)
        else:
            first = memoryview(opening.first)  # not bytes: a message of 10 MB would be copied
            start = first[:_TOLD_BY].tobytes()
            if start.find(b'"user"', 0, _ENDS) > 0 or first[-_ENDS:].tobytes().find(b'"user"') > 0:
                conversation = hash((len(first), start))
            else:
                second = memoryview(opening.second)
                conversation = hash((len(first), start, len(second), second[:_TOLD_BY].tobytes()))
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
        return RequestInfo(stream, False, False, 1, len(body), None, pinned, conversation)
    return _read_all(found, len(body), pinned, conversation)


def _without_messages(body: Body | bytearray) -> _Body:
    """The known fields of a body that is no chat as it should be. Raises BodyError."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyError(_why(body, error)) from error


def _conversation_of(found: _Body) -> int | None:
    """The hash of a body without messages, or with a key of its own."""
    for key in (found.prompt_cache_key, found.routing_key):
        if _given(key):
            return hash(bytes(key))
    for prompt in (found.prompt, found.text, found.input):
        if prompt is not _ABSENT:
            text = memoryview(prompt)
            long_enough = len(text) > _PROMPT_TOLD_BY
            return hash(text[:_PROMPT_TOLD_BY].tobytes()) if long_enough else None
    return None


def _read_all(
    found: _Body, length: int, pinned: Role | None, conversation: int | None
) -> RequestInfo:
    """What `read_info` gives of a body with a field that few have."""
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
        conversation,
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


def _why(body: Body | bytearray, error: Exception) -> str:
    """One line without any of the body's text."""
    if not body:
        return "the request has no body; a JSON object is needed"
    if isinstance(error, RecursionError):
        return "the body is nested too deeply"
    if bytes(body[:64]).lstrip()[:1] == b"{":
        return "the body is not valid JSON"
    return "the body is not a JSON object"
