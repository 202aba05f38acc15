"""Which headers pass, each way, and the heads that they make up; also of errors of our own.

Towards a backend everything passes except what belongs to this connection (hop by hop), what says
who the client is (keys, tokens and cookies, by whatever name: the client's key never reaches a
backend), what only the router may say (`x-crossover-*`) and names with an underscore, which
CGI-like peers read as dashes. Towards the client everything passes except hop-by-hop headers,
`date` and `server`, of which each answer has one, ours, and what the backend says of CORS. Repeated
headers stay repeated, and `content-encoding` stays, since bodies are never decoded.

It may not change the value of a header that passes, nor decide anything by one.
"""

from __future__ import annotations

import functools
import re
from email.utils import formatdate
from typing import Final

from router.errors import ErrorAnswer, phrase
from router.framing import MEMORABLE, REMEMBERED, ResponseHead

# RFC 9110 section 7.6.1 and RFC 2616 section 13.5.1, with the two spellings seen in the wild.
HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key", b"cookie"})
# Every gateway has a name of its own for a key (x-goog-api-key, ocp-apim-subscription-key,
# x-auth-token, x-amzn-oidc-accesstoken): a header with such a word in its name is one. An
# idempotency-key or a routing-key is not, nor are max-tokens.
_CREDENTIAL = re.compile(
    rb"(?:^|-)(?:auth|authorization|authentication|[a-z]*token|cookie2?|jwt|secret|passw(?:or)?d"
    rb"|passphrase|credentials?|(?:api|access|secret|private|subscription)-?key)(?:-|$)"
)
# What our own client states afresh on the way to a backend.
RESTATED: Final = frozenset({b"host", b"content-length", b"expect", b"x-request-id"})
NOT_TO_BACKEND: Final = HOP_BY_HOP | CREDENTIALS | RESTATED
# SGLang lets every origin read its answers; which may read ours is for our own settings to say.
CORS: Final = frozenset(
    b"access-control-" + name
    for name in (b"allow-origin", b"allow-credentials", b"allow-methods", b"allow-headers",
                 b"allow-private-network", b"expose-headers", b"max-age")
)  # fmt: skip
NOT_TO_CLIENT: Final = HOP_BY_HOP | CORS | {b"content-length", b"date", b"server", b"x-request-id"}
OWN_PREFIX: Final = b"x-crossover-"


def named_in_connection(value: bytes) -> frozenset[bytes]:
    """The header names that a Connection header makes hop-by-hop."""
    tokens = (token.strip().lower() for token in value.split(b","))
    return frozenset(token for token in tokens if token and token not in {b"close", b"keep-alive"})


# The lines of headers seen before, empty for one that does not pass. See `framing` for the why.
_out: dict[tuple[bytes, bytes], bytes] = {}

# Whether a header of this name goes to a backend, for the names seen before.
_forwarded: dict[bytes, bool] = {}


def to_backend(name: bytes) -> bool:
    """Whether a header of this name, in lower case, goes to a backend."""
    passes = _forwarded.get(name)
    if passes is None:
        passes = not (
            name in NOT_TO_BACKEND
            or b"_" in name
            or name.startswith(OWN_PREFIX)
            or _CREDENTIAL.search(name)
        )
        if len(name) <= MEMORABLE:
            if len(_forwarded) >= REMEMBERED:
                _forwarded.clear()
            _forwarded[name] = passes
    return passes


def _passes(name: bytes) -> bool:
    return name not in NOT_TO_CLIENT and not name.startswith(OWN_PREFIX)


def _outgoing(header: tuple[bytes, bytes]) -> bytes:
    """A header as it goes to the client."""
    line = b"%b: %b\r\n" % header if _passes(header[0]) else b""
    if len(header[0]) + len(header[1]) <= MEMORABLE:
        if len(_out) >= REMEMBERED:
            _out.clear()
        _out[header] = line
    return line


def passing_lines(head: ResponseHead) -> bytes:
    """The status line and the header lines that pass, each ending in CRLF."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)]
    dropped = head.connection
    for header in head.headers:
        line = _out.get(header)
        if line is None:
            line = _outgoing(header)
        if not dropped or header[0] not in dropped:
            lines.append(line)
    if head.event_stream and not head.has(b"x-accel-buffering"):
        # nginx in front would hold events back otherwise.
        lines.append(b"x-accel-buffering: no\r\n")
    return b"".join(lines)


def answer_head(
    head: ResponseHead, own: bytes, framing: bytes, common: bytes, *, close: bool
) -> bytes:
    """The head of a relayed answer.

    `own` are the router's header lines, `framing` the line that says how the body ends (empty for
    none), `common` date and server; each line ends in CRLF.
    """
    end = b"connection: close\r\n\r\n" if close else b"\r\n"
    return (head.lines or passing_lines(head)) + common + own + framing + end


def error_answer(
    error: ErrorAnswer, own: bytes, common: bytes, *, close: bool, head_only: bool = False
) -> bytes:
    """A whole answer of the router's own, head and body."""
    body = error.body
    lines = [
        b"HTTP/1.1 %d %b\r\n" % (error.status, phrase(error.status)),
        common,
        b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body),
        own,
    ]
    if error.retry_after is not None:
        lines.append(b"retry-after: %d\r\n" % error.retry_after)
    if error.status == 401:
        lines.append(b"www-authenticate: Bearer\r\n")
    lines.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    if not head_only:
        lines.append(body)
    return b"".join(lines)


@functools.lru_cache(maxsize=1)
def common_lines(second: int) -> bytes:
    """The lines of every answer in this unix second; to make them takes longer than to send them."""
    return b"date: %b\r\nserver: crossover\r\n" % formatdate(second, usegmt=True).encode()


def cors_lines(allowed: frozenset[bytes], origin: bytes | None) -> bytes:
    """Header lines that let a browser of an allowed origin (or of any, `*`) read the answer."""
    if not allowed or origin is None:
        return b""
    if b"*" in allowed:
        named, vary = b"*", b""
    elif origin in allowed:
        named, vary = origin, b"vary: origin\r\n"
    else:
        return b"vary: origin\r\n"
    return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\n%b" % (
        named,
        vary,
    )
