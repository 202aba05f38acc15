"""What a fuzzer begins with: recorded requests and answers, and the words of their languages."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from router.framing import ChunkedReader, FramingError

DATA: Final = Path(__file__).parent.parent / "data"
MAX_SEED: Final = 2048  # bytes
CUT: Final = frozenset({"request", "answer", "sse"})  # targets for which the end says where to cut

WORDS: Final[dict[str, tuple[bytes, ...]]] = {
    "guard": (
        b"/v1/chat/completions", b"http://h/x", b"*", b"\nhost: a", b"\nhost:", b"\nconnection: ",
        b"close", b"keep-alive", b", x-a", b"\nx-a: 1", b"\nupgrade: h2c", b"\nexpect: 100-continue",
        b"\ncontent-length: 3", b"\ntransfer-encoding: chunked", b"gzip, ", b"\nx_a: 1", b"\t",
        b"\nx-crossover-backend: baseline", b"\nx-crossover-reason: x", b"\nx-request-id: a",
        b"\nauthorization: Bearer k", b"\norigin: http://o", b"\ncontent-encoding: gzip", b"\xff",
    ),
    "request": (
        b"POST /v1/chat/completions HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n", b"POST /x HTTP/1.0\r\n",
        b"HEAD /api/tags HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n", b"\r\n",
        b"\n", b"\r", b"Host: a\r\n", b"Content-Length: 2\r\n", b"content-length: 0\r\n",
        b"Content-Length: +2\r\n", b"Transfer-Encoding: chunked\r\n", b"transfer-encoding:\tchunked\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n",
        b"Connection: upgrade, x-a\r\nUpgrade: websocket\r\n", b"X-A: 1\r\n", b" folded\r\n", b"{}",
        b"2\r\n{}\r\n", b"0\r\n\r\n", b"0\r\nX: 1\r\n\r\n", b"2;a=b\r\n", b"02\r\n", b"0x2\r\n", b"\x00",
    ),
    "answer": (
        b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.0 200 OK\r\n", b"\r\n",
        b"HTTP/1.1 204 No Content\r\n", b"HTTP/1.1 304\r\n", b"HTTP/1.1 101 X\r\n", b"HTTP/1.1 503 \r\n",
        b"content-length: 2\r\n", b"Content-Length: 02\r\n", b"content-length: 2, 2\r\n",
        b"transfer-encoding: chunked\r\n", b"Transfer-Encoding: Chunked\r\n",
        b"transfer-encoding: identity\r\n", b"connection: close\r\n", b"connection: keep-alive\r\n",
        b"content-type: text/event-stream\r\n", b"content-encoding: gzip\r\n", b"x:\r\n", b" x\r\n",
        b"2\r\n{}\r\n", b"0\r\n\r\n", b"0\r\nX: 1\r\n\r\n", b"2;a=b\r\n", b"2 \r\n", b"ffffffffffffffff\r\n",
        b"{}", b"\n", b"\r", b"\x00",
    ),
    "sse": (
        b"data: ", b"data:", b"data", b"event: x", b": ping", b"id: 1", b"\n\n", b"\r\n\r\n", b"\r\r",
        b"\r\n", b"\n", b"\r", b"[DONE]", b'{"error":{"code":503}}', b'{"error":{"code":"x"}}',
        b'{"error":null}', b'{"usage":{"prompt_tokens":3,"completion_tokens":5}}',
        b'{"usage":{"input_tokens":1}}', b'{"meta_info":{"prompt_tokens":1,"completion_tokens":2}}',
        b'{"response":{"usage":{"output_tokens":9}}}', b'{"choices":[]}', b'"_tokens":', b"\xef\xbb\xbf",
    ),
    "info": (
        b"{", b"}", b"[", b"]", b":", b",", b'"stream"', b"true", b"null", b"1e400", b"-", b'"\\u',
        b'"messages"', b'"response_format"', b'{"type":"json_object"}', b'"tools"', b'"tool_choice"',
        b'"logprobs"', b'"n"', b'"store"', b'"previous_response_id"', b'"x"', b"\xff", b"[" * 64,
    ),
}  # fmt: skip


def _recorded(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(DATA.glob(pattern))]


def _body(answer: bytes) -> bytes:
    """The body of a recorded answer."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return rest
    try:
        return b"".join(ChunkedReader().feed(rest))
    except FramingError:
        return rest


def seeds(target: str) -> list[bytes]:
    """Where to begin; for a target that cuts, whole ones and ones byte by byte."""
    requests, answers = _recorded("**/*.req.http"), _recorded("**/*.resp.http")
    match target:
        case "guard":
            found = [b"/v1/x\nhost: a\nconnection: close, x-a\nx-a: 1\ncontent-length: 3"]
            heads = [request.partition(b"\r\n\r\n")[0].split(b"\r\n") for request in requests]
            found += [b"\n".join([b"/", *head[1:]]) for head in heads]
        case "info":
            found = [request.partition(b"\r\n\r\n")[2] for request in requests]
            found += [b'{"stream":true,"n":"2","sampling_params":{"n":3,"regex":"a"}}']
            found += [b'{"response_format":{"type":"text"},"previous_response_id":null}']
        case "request":
            found = requests
        case "answer":
            found = answers
        case _:
            found = [_body(answer) for answer in answers]
    found = sorted({seed[:MAX_SEED] for seed in found if seed})
    ends = (b"\x00", b"\x07") if target in CUT else (b"",)
    return [seed + end for seed in found for end in ends]
