"""What a request head may look like, and what it says.

uvicorn's parser (llhttp) is strict about bytes and lenient about meaning: it takes two Hosts, none,
`Transfer-Encoding: gzip, chunked`, chunked in HTTP/1.0 and HTTP/2.0 in the request line
(`tests/wire/` has each). What two servers could read differently is refused here, before anything
is routed on it. The body is framed afresh towards a backend, so no framing of a client's ever
reaches one.

It may not look at a body, a key or a route, and it mends nothing: a head is sound or refused.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from router import errors
from router.errors import ErrorAnswer
from router.framing import MEMORABLE, REMEMBERED
from router.headers import NOT_TO_BACKEND, named_in_connection, to_backend
from router.load import Role
from router.pages import from_elsewhere

PIN_HEADER: Final = b"x-crossover-backend"
# A client's request id is used when it can do no harm in a header, a log line or a URL.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
# Looked at and forwarded all the same.
_NOTED: Final = frozenset({b"origin", b"sec-fetch-site", b"content-encoding"})
_SPECIAL: Final = NOT_TO_BACKEND | _NOTED | {PIN_HEADER}
_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
# RFC 3986 section 3.2.2 without the comma, by which two Hosts become one on their way here.
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%]+\]|[\w.~!$&'()*+;=%-]*)(?::\d*)?", re.ASCII)
_hosts: set[bytes] = set()  # those found sound before; they are few, or all are forgotten


class HeadFacts(msgspec.Struct, gc=False):
    """What a request head says, apart from its route."""

    forwarded: bytes = b""  # the header lines for the backend, each ending in CRLF
    request_id: str | None = None
    length: int | None = None  # of the body; None when it is chunked or there is none
    chunked: bool = False
    expects: bool = False  # Expect: 100-continue
    upgrade: bool = False
    origin: bytes | None = None
    site: bytes | None = None  # Sec-Fetch-Site
    foreign: bool = False  # a browser says that a page of another site made it
    encoded: bool = False  # the body is compressed: nothing can be read of it
    pinned: bytes | None = None


def path_of(target: bytes) -> bytes | None:
    """The path of a request target without its query, or None when it is not one.

    An authority in the target (absolute form) is dropped, never followed.
    """
    if not target.startswith(b"/"):
        match = _ABSOLUTE.match(target)
        if match is None:
            return target if target == b"*" else None
        target = target[match.end() :] or b"/"
        if target[:1] not in b"/?":  # a fragment, which no request target has
            return None
    if not target.isascii():
        return None
    path, _, _ = target.partition(b"?")
    return path or b"/"


def read_head(version: str, headers: list[tuple[bytes, bytes]]) -> HeadFacts | ErrorAnswer:
    """Check one head and take from it what is needed; names are lower case."""
    if version not in {"1.1", "1.0"}:
        return errors.BAD_VERSION
    lines: list[bytes] = []
    special: list[
        tuple[bytes, bytes]
    ] = []  # to be looked at when all are seen, as Connection names
    facts = HeadFacts()
    hosts, host = 0, b""
    for header in headers:
        name = header[0]
        if name == b"host":
            hosts, host = hosts + 1, header[1]
            continue
        if name == b"content-length":
            length = header[1]
            if facts.length is not None or not length.isdigit() or len(length) > 18:
                return errors.BAD_REQUEST.with_message("bad or repeated Content-Length")
            facts.length = int(length)
            continue
        if name in _SPECIAL:
            special.append(header)
            if name not in _NOTED:
                continue
        if to_backend(name):
            lines.append(b"%b: %b\r\n" % header)
    for name, value in special:
        if name == b"connection":
            named = named_in_connection(value)
            if named:
                lines = [line for line in lines if line.partition(b":")[0] not in named]
        else:
            error = _take(facts, name, value, version)
            if error is not None:
                return error
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return errors.BAD_REQUEST.with_message("exactly one Host header is needed")
    if host not in _hosts and not _is_host(host):
        return errors.BAD_REQUEST.with_message("the Host header is not a host")
    if facts.chunked and facts.length is not None:
        return errors.BAD_REQUEST.with_message("Content-Length beside Transfer-Encoding")
    if facts.site is not None or facts.origin is not None:
        facts.foreign = from_elsewhere(facts.site, facts.origin, host)
    facts.forwarded = b"".join(lines)
    return facts


def _is_host(value: bytes) -> bool:
    """Whether this can be a Host. It is never used; RFC 9112 section 3.2 wants others refused."""
    if _HOST.fullmatch(value.strip(b" \t")) is None:
        return False
    if len(value) <= MEMORABLE:
        if len(_hosts) >= REMEMBERED:
            _hosts.clear()
        _hosts.add(value)
    return True


def _take(facts: HeadFacts, name: bytes, value: bytes, version: str) -> ErrorAnswer | None:
    """Note one special header."""
    error: ErrorAnswer | None = None
    if name == b"transfer-encoding":
        if value.strip(b" \t").lower() != b"chunked" or facts.chunked:
            error = errors.BAD_TRANSFER_CODING
        elif version == "1.0":
            error = errors.BAD_REQUEST.with_message("Transfer-Encoding in HTTP/1.0")
        facts.chunked = True
    elif name == b"expect":
        if value.strip(b" \t").lower() != b"100-continue":
            error = errors.EXPECTATION_FAILED
        facts.expects = version == "1.1"  # RFC 9110 section 10.1.1: ignored in HTTP/1.0
    elif name == b"x-request-id":
        if facts.request_id is None and _REQUEST_ID.fullmatch(value):
            facts.request_id = value.decode()
    elif name == b"upgrade":
        facts.upgrade = True
    elif name == b"origin":
        facts.origin = value
    elif name == b"sec-fetch-site":
        facts.site = value
    elif name == b"content-encoding":
        facts.encoded |= value.strip().lower() not in {b"", b"identity"}
    elif name == PIN_HEADER:
        # Given twice, it is no role.
        facts.pinned = value.strip().lower() if facts.pinned is None else b"repeated"
    return error


def pinned_role(value: bytes) -> Role | None:
    """The role that a pin header names, or None when it names none."""
    try:
        return Role(value.decode("latin-1"))
    except ValueError:
        return None
