"""Requests whose framing two servers could read differently, with the answer that each must get.

One entry is one request as bytes. `CORPUS` groups them by the mistake that they try; the groups
that other servers were caught with come first, in the order of the table in the security notes.
Nothing here sends anything: `test_corpus` does, with a second request pipelined behind each.
"""

from __future__ import annotations

from dataclasses import dataclass

BODY = b'{"messages":[]}'  # 15 bytes, f in hexadecimal
CHAT_PATH = b"/v1/chat/completions"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
INNER = b"GET /flush_cache HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKS = b"f\r\n" + BODY + b"\r\n0\r\n\r\n"
SIZED = b"content-length: 15\r\n"


@dataclass(frozen=True)
class Entry:
    """One request: the status it must get, whether the connection ends, what a backend gets."""

    raw: bytes
    status: int
    closes: bool = True
    body: bytes | None = None  # with which the request reaches a backend; None: it does not
    path: bytes = CHAT_PATH  # what a backend is asked for


def refused(raw: bytes, status: int = 400) -> Entry:
    """Answered by the router, which then closes: nothing behind it can be trusted."""
    return Entry(raw, status)


def relayed(
    raw: bytes, body: bytes = BODY, path: bytes = CHAT_PATH, *, closes: bool = False
) -> Entry:
    """One sound request."""
    return Entry(raw, 200, closes, body, path)


def ordinary(raw: bytes, status: int = 404) -> Entry:
    """Sound, answered by the router itself, and the connection goes on."""
    return Entry(raw, status, closes=False)


def framed(lines: bytes, body: bytes = BODY) -> bytes:
    """A chat request with these header lines, each ending in CRLF."""
    return CHAT + lines + b"\r\n" + body


def sized(lines: bytes) -> bytes:
    """A chat request of the right length with these header lines as well."""
    return framed(lines + SIZED)


def chunked(body: bytes) -> bytes:
    """A chat request with this chunked body."""
    return framed(b"transfer-encoding: chunked\r\n", body)


def get(target: bytes, version: bytes = b"HTTP/1.1", method: bytes = b"GET") -> bytes:
    """A request without a body."""
    return method + b" " + target + b" " + version + b"\r\nhost: x\r\n\r\n"


def length(value: bytes) -> Entry:
    """A length that is none."""
    return refused(framed(b"content-length:" + value + b"\r\n"))


def coding(value: bytes, status: int = 501) -> Entry:
    """A transfer coding that is not exactly chunked."""
    return refused(framed(b"transfer-encoding: " + value + b"\r\n", CHUNKS), status)


def size_line(line: bytes) -> Entry:
    """A chunk whose size line is none."""
    return refused(chunked(line + BODY + b"\r\n0\r\n\r\n"))


CORPUS: dict[str, dict[str, Entry]] = {
    "length beside coding": {
        "CL TE": refused(framed(SIZED + b"transfer-encoding: chunked\r\n", CHUNKS)),
        "TE CL": refused(framed(b"transfer-encoding: chunked\r\n" + SIZED, CHUNKS)),
        "CL.TE": refused(framed(b"content-length: 5\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n")),
        "CL TE, no chunk": refused(framed(SIZED + b"transfer-encoding: identity\r\n")),
    },
    "two lengths that differ": {
        "longer second": refused(framed(SIZED + b"content-length: 16\r\n")),
        "shorter second": refused(framed(b"content-length: 16\r\n" + SIZED)),
        "zero first": refused(framed(b"content-length: 0\r\n" + SIZED)),
        "apart": refused(framed(SIZED + b"x: y\r\nContent-Length: 3\r\n")),
    },
    "two lengths that agree": {
        "two lines": refused(framed(SIZED + SIZED)),
        "a list": length(b" 15, 15"),
        "a list without space": length(b" 15,15"),
    },
    "a length that is none": {
        "plus": length(b" +15"),
        "minus": length(b" -1"),
        "hexadecimal": length(b" 0xf"),
        "underscore": length(b" 1_5"),
        "empty": length(b""),
        "blank": length(b" "),
        "two numbers": length(b" 1 5"),
        "point": length(b" 15.0"),
        "exponent": length(b" 15e0"),
        "letters behind": length(b" 15x"),
        "other digits": length(" \u0661\u0665".encode()),
        "superscript": length(b" 1\xb2"),
        "vertical tab": length(b" \x0b15"),
        "quoted": length(b' "15"'),
    },
    "a length without measure": {
        "2^64 + 1": length(b" 18446744073709551617"),
        "2^64 + 15": length(b" 18446744073709551631"),
        "2^63": length(b" 9223372036854775808"),
        "2^32 + 15": refused(framed(b"content-length: 4294967311\r\n"), 413),
        "a thousand digits": length(b" " + b"9" * 1000),
    },
    "a coding that is not chunked": {
        "xchunked": coding(b"xchunked"),
        "chunkedx": coding(b"chunkedx"),
        "identity": coding(b"identity"),
        "identity and length": refused(framed(b"transfer-encoding: identity\r\n" + SIZED)),
        "chunked, chunked": coding(b"chunked, chunked", 400),
        "two lines": refused(
            framed(b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", CHUNKS)
        ),
        "chunked, identity": coding(b"chunked, identity", 400),
        "vertical tab": coding(b"\x0bchunked", 400),
        "form feed": coding(b"\x0cchunked", 400),
        "quoted": coding(b'"chunked"'),
        "parameter": coding(b"chunked;q=1"),
        "other letters": coding("chun\u212aed".encode()),
        "empty": coding(b"", 400),
    },
    "a coding before chunked": {
        "gzip, chunked": coding(b"gzip, chunked"),
        "comma first": coding(b",chunked"),
        "comma last": coding(b"chunked,", 400),
        "gzip on a line of its own": refused(
            framed(b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", CHUNKS), 501
        ),
    },
    "chunked in HTTP/1.0": {
        "alone": refused(chunked(CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0")),
        "keep-alive": refused(
            framed(b"connection: keep-alive\r\ntransfer-encoding: chunked\r\n", CHUNKS).replace(
                b"HTTP/1.1", b"HTTP/1.0"
            )
        ),
    },
    "a chunk that is none": {
        "hexadecimal prefix": size_line(b"0xf\r\n"),
        "plus": size_line(b"+f\r\n"),
        "minus": size_line(b"-f\r\n"),
        "underscore": size_line(b"0_f\r\n"),
        "bare LF": size_line(b"f\n"),
        "bare CR": size_line(b"f\r"),
        "no size": size_line(b"\r\n"),
        "space before": size_line(b" f\r\n"),
        "space behind": size_line(b"f \r\n"),
        "LF in an extension": size_line(b"f;a\nb\r\n"),
        "CR in an extension": size_line(b"f;a\rb\r\n"),
        "NUL in an extension": size_line(b"f;\0\r\n"),
        "bad end": refused(chunked(b"f\r\n" + BODY + b"XX0\r\n\r\n")),
        "end by LF": refused(chunked(b"f\r\n" + BODY + b"\n0\r\n\r\n")),
        "longer than it says": refused(chunked(b"e\r\n" + BODY + b"\r\n0\r\n\r\n")),
        "last chunk by LF": refused(chunked(b"f\r\n" + BODY + b"\r\n0\n\n")),
    },
    "a chunk without measure": {
        "17 digits": refused(chunked(b"1" * 17 + b"\r\n" + BODY)),
        "2^64 + f": refused(chunked(b"1000000000000000f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    },
    "a chunk extension": {
        "a=b": relayed(chunked(b"f;a=b\r\n" + BODY + b"\r\n0\r\n\r\n")),
        "quoted": relayed(chunked(b'f;a="b;c"\r\n' + BODY + b"\r\n0;x\r\n\r\n")),
        "zeros before": relayed(chunked(b"0000f\r\n" + BODY + b"\r\n000\r\n\r\n")),
        "capital": relayed(chunked(b"F\r\n" + BODY + b"\r\n0\r\n\r\n")),
    },
    "trailers": {
        "role": relayed(chunked(CHUNKS[:-2] + b"X-Role: admin\r\n\r\n")),
        "crossover": relayed(chunked(CHUNKS[:-2] + b"x-crossover-backend: baseline\r\n\r\n")),
        "host": relayed(chunked(CHUNKS[:-2] + b"host: evil\r\n\r\n")),
        # RFC 9110 section 6.5.1 forbids these in a trailer: the parser refuses them outright.
        "length": refused(chunked(CHUNKS[:-2] + b"Content-Length: 50\r\nX-Role: admin\r\n\r\n")),
        "coding": refused(chunked(CHUNKS[:-2] + b"transfer-encoding: chunked\r\n\r\n")),
        "bare LF": refused(chunked(CHUNKS[:-2] + b"a: b\n\n")),
    },
    "lines ended by LF": {
        "all": refused(framed(SIZED).replace(b"\r\n", b"\n")),
        "request line": refused(framed(SIZED).replace(b"\r\n", b"\n", 1)),
        "one header": refused(framed(b"x: y\n" + SIZED)),
        "empty line": refused(CHAT + SIZED + b"\n" + BODY),
        "empty line after CRLF": refused(CHAT + SIZED[:-2] + b"\n\r\n" + BODY),
        "CR instead": refused(framed(b"x: y\r" + SIZED)),
    },
    "control characters in a value": {
        "CR": refused(sized(b"x: a\rb\r\n")),
        "CR and a name": refused(sized(b"x: a\rcontent-length: 3\r\n")),
        "NUL": refused(sized(b"x: a\0b\r\n")),
        "NUL in a length": length(b" 15\0"),
        "DEL": refused(sized(b"x: a\x7fb\r\n")),
        "bell": refused(sized(b"x: a\x07b\r\n")),
    },
    "a folded line": {
        "space": refused(sized(b"x: a\r\n b\r\n")),
        "tab": refused(sized(b"x: a\r\n\tb\r\n")),
        "coding": refused(framed(b"transfer-encoding:\r\n chunked\r\n", CHUNKS)),
        "length": refused(framed(b"content-length:\r\n 15\r\n")),
    },
    "a name that is none": {
        "space before the colon": refused(framed(b"content-length : 15\r\n")),
        "tab before the colon": refused(framed(b"transfer-encoding\t: chunked\r\n", CHUNKS)),
        "space before the first": refused(CHAT.replace(b"host", b" host") + SIZED + b"\r\n" + BODY),
        "no colon": refused(sized(b"content-length\r\n")),
        "empty": refused(sized(b": 15\r\n")),
        "not ASCII": refused(sized(b"x-\xfc: 1\r\n")),
        "NUL": refused(sized(b"x\0y: 1\r\n")),
        "bracket": refused(sized(b"x(y): 1\r\n")),
    },
    "an underscore in a name": {
        "length": relayed(framed(b"Content_Length: 3\r\n" + SIZED)),
        "coding": relayed(framed(b"transfer_encoding: chunked\r\n" + SIZED)),
    },
    "not one Host": {
        "none": refused(framed(SIZED).replace(b"host: x\r\n", b"")),
        "two": refused(sized(b"host: y\r\n")),
        "the same twice": refused(sized(b"host: x\r\n")),
        "in the target and none": refused(
            b"POST http://x/v1/chat/completions HTTP/1.1\r\n" + SIZED + b"\r\n" + BODY
        ),
    },
    "a Host that is none": {
        "two in one": refused(framed(SIZED).replace(b"host: x", b"host: x, evil")),
        "space": refused(framed(SIZED).replace(b"host: x", b"host: x evil")),
        "path": refused(framed(SIZED).replace(b"host: x", b"host: x/../evil")),
        "user": refused(framed(SIZED).replace(b"host: x", b"host: x@evil")),
        "query": refused(framed(SIZED).replace(b"host: x", b"host: x?evil")),
        "scheme": refused(framed(SIZED).replace(b"host: x", b"host: http://evil")),
        "not ASCII": refused(framed(SIZED).replace(b"host: x", b"host: \xfc")),
        "port of letters": refused(framed(SIZED).replace(b"host: x", b"host: x:y")),
        "open bracket": refused(framed(SIZED).replace(b"host: x", b"host: [::1")),
    },
    "a Host that is one": {
        "empty": relayed(framed(SIZED).replace(b"host: x", b"host:")),
        "IPv6": relayed(framed(SIZED).replace(b"host: x", b"host: [::1]:8000")),
        "underscore": relayed(framed(SIZED).replace(b"host: x", b"host: my_service.local:80")),
    },
    "an absolute target": {
        "other host": relayed(framed(SIZED).replace(b" /v1", b" http://evil/v1")),
        "user": relayed(framed(SIZED).replace(b" /v1", b" http://a:b@evil/v1")),
        "metrics": ordinary(get(b"http://127.0.0.1:9400/metrics")),
        "other scheme": refused(get(b"ftp://evil/v1/models")),
        "file": refused(get(b"file:///etc/passwd")),
        "authority": refused(get(b"evil:443")),
        "no slash": refused(get(b"v1/models")),
    },
    "a path by a detour": {
        "two slashes": ordinary(get(b"//evil/v1/models")),
        "dots": ordinary(get(b"/v1/../admin")),
        "escaped dots": ordinary(get(b"/v1/%2e%2e/admin")),
        "CRLF": ordinary(get(b"/v1/models%0d%0aX-Role:%20admin")),
        "dots to the engine": ordinary(
            framed(SIZED).replace(b"/v1/chat/completions", b"/v1/../flush_cache")
        ),
        "query": relayed(framed(SIZED).replace(b"completions ", b"completions?a=/../b ")),
    },
    "bytes in the path": {
        "UTF-8": refused(get("/v1/mod\u00e8les".encode())),
        "Latin-1": refused(get(b"/v1/mod\xe8les")),
        "NUL": refused(get(b"/v1/\0models")),
        "tab": refused(get(b"/v1/\tmodels")),
        "space": refused(get(b"/v1/mod els")),
    },
    "another version": {
        "0.9": refused(b"GET /\r\n"),
        "0.9 in words": refused(get(b"/", b"HTTP/0.9"), 505),
        "2.0": refused(get(b"/", b"HTTP/2.0"), 505),
        "1.2": refused(get(b"/", b"HTTP/1.2")),
        "1.10": refused(get(b"/", b"HTTP/1.10")),
        "lower case": refused(get(b"/", b"http/1.1")),
        # The parser reads RTSP/1.x as HTTP/1.x and does not tell. One request all the same.
        "RTSP": relayed(get(b"/", b"RTSP/1.0"), b"", b"/", closes=True),
        "ICE": refused(get(b"/", b"ICE/1.0")),
        "HTTP/2 preface": refused(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        "TLS": refused(b"\x16\x03\x01\x02\x00\x01"),
    },
    "a tunnel or an echo": {
        "CONNECT": refused(get(b"evil:443", method=b"CONNECT"), 405),
        "CONNECT to a path": refused(get(b"/v1/chat/completions", method=b"CONNECT"), 405),
        "TRACE": refused(get(b"/", method=b"TRACE"), 405),
        "no method": refused(get(b"/", method=b"FOO")),
        "lower case": refused(get(b"/", method=b"get")),
    },
    "an upgrade": {
        "h2c": relayed(
            sized(b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAM\r\n"),
            closes=True,
        ),
        "websocket": relayed(
            sized(b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"),
            closes=True,
        ),
        "chunked": relayed(
            framed(b"connection: upgrade\r\nupgrade: x\r\ntransfer-encoding: chunked\r\n", CHUNKS),
            closes=True,
        ),
        "bad chunk": refused(
            framed(
                b"connection: upgrade\r\nupgrade: x\r\ntransfer-encoding: chunked\r\n",
                b"0x" + CHUNKS,
            )
        ),
        "without Connection": relayed(sized(b"upgrade: h2c\r\n"), closes=True),
    },
    "an expectation": {
        "100-continue": relayed(sized(b"expect: 100-continue\r\n")),
        "other": refused(sized(b"expect: 200-ok\r\n"), 417),
        "two": refused(sized(b"expect: 100-continue, x\r\n"), 417),
    },
    "a large head": {
        "64 KB": refused(sized(b"x: " + b"a" * 65_536 + b"\r\n"), 431),
        "200 KB": refused(sized(b"x: " + b"a" * 200_000 + b"\r\n"), 431),
        "4 MB": refused(sized(b"x: " + b"a" * 4_000_000 + b"\r\n"), 431),
        "a long name": refused(sized(b"a" * 65_536 + b": x\r\n"), 431),
        "no end": refused(CHAT + b"x: " + b"a" * 65_536, 431),
    },
    "many headers": {
        "5,000": refused(sized(b"a: b\r\n" * 5000), 431),
        "101": refused(sized(b"a: b\r\n" * 99), 431),
        "100": relayed(sized(b"a: b\r\n" * 98)),
    },
    "a long target": {
        "100 KB": refused(framed(SIZED).replace(b"/v1/chat", b"/" + b"a" * 100_000), 414),
        "a long query": refused(get(b"/?" + b"q" * 8_192), 414),
    },
    # ------------------------------------------------------------------ beyond the table
    "a request inside a request": {
        "in a chunk": relayed(
            chunked(b"3d\r\n" + b'{"messages":["GET /flush_cache HTTP/1.1 host: x content"]}   '
                    + b"\r\n0\r\n\r\n"),
            b'{"messages":["GET /flush_cache HTTP/1.1 host: x content"]}   ',
        ),
        "in a compressed body": relayed(
            framed(b"content-encoding: gzip\r\ncontent-length: %d\r\n" % len(INNER), INNER), INNER
        ),
        "in a GET's body": relayed(
            b"GET /api/tags HTTP/1.1\r\nhost: x\r\n" + SIZED + b"\r\n" + BODY,
            b"", b"/api/tags",
        ),
        "in a GET's chunks": relayed(
            b"GET / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS,
            b"", b"/",
        ),
        "in an ordinary body": ordinary(
            b"GET /nope HTTP/1.1\r\nhost: x\r\n" + SIZED + b"\r\n" + BODY
        ),
    },
    "lines before the request": {
        "CRLF": relayed(b"\r\n" + framed(SIZED)),  # RFC 9112 section 2.2: to be skipped
        "a space": refused(b" " + framed(SIZED)),
        "a header": refused(b"x: y\r\n" + framed(SIZED)),
        "PROXY": refused(b"PROXY TCP4 1.1.1.1 1.1.1.1 1 1\r\n" + framed(SIZED)),
    },
    "a length taken away": {
        "by Connection": relayed(sized(b"connection: content-length, host\r\n")),
        "coding by Connection": relayed(
            framed(b"connection: transfer-encoding\r\ntransfer-encoding: chunked\r\n", CHUNKS)
        ),
    },
}  # fmt: skip
