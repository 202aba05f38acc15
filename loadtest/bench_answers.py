"""What the servers of `loadtest bench` answer: bytes that are ready, about as large as SGLang's.

Pure. When which is sent is for `bench_backend`.
"""

from __future__ import annotations

import functools
from typing import Final

DATE: Final = b"date: Sun, 29 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
EVENT: Final = (
    '{"id":"5f0c5a0c6f6b4f0f9a6d3c0b8f1c2d3e","object":"chat.completion.chunk","created":1764374400,'
    '"model":"bench",%s}'
)
ONE_MORE: Final = (
    '"choices":[{"index":0,"delta":{"content":" a token"},"logprobs":null,"finish_reason":null,'
    '"matched_stop":null}],"usage":null'
)
FINISH: Final = '"choices":[{"index":0,"delta":{},"finish_reason":"stop","matched_stop":151645}]'
USAGE: Final = '"choices":[],"usage":{"prompt_tokens":200,"total_tokens":%d,"completion_tokens":%d}'
ANSWER: Final = (
    b'{"id":"5f0c5a0c6f6b4f0f9a6d3c0b8f1c2d3e","object":"chat.completion","created":1764374400,'
    b'"model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":"The quick brown'
    b" fox jumps over the lazy dog, and then it sits down by the river to consider what it has done,"
    b' which is not very much at all, and yet enough for one day.","reasoning_content":null,'
    b'"tool_calls":null},"logprobs":null,"finish_reason":"stop","matched_stop":151645}],"usage":'
    b'{"prompt_tokens":200,"total_tokens":240,"completion_tokens":40,"prompt_tokens_details":null},'
    b'"metadata":{"weight_version":"default"}}'
)
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\n"
    + DATE
    + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST_EVENTS: Final = 3  # finish, usage and [DONE], in one write
MODEL: Final = b'{"model_path":"bench","tokenizer_path":"","is_generation":true,"version":"0.5.17"}'
MODELS: Final = (
    b'{"object":"list","data":[{"id":"bench","object":"model","created":1764374400,'
    b'"owned_by":"sglang","root":"bench","max_model_len":32768}]}'
)
SERVER: Final = b'{"model_path":"bench","served_model_name":"bench","dp_size":1,"tp_size":1}'
# What proxies ask a server before and while they send requests to it.
TOLD: Final = {
    b"/health": b"",
    b"/health_generate": b"",
    b"/ready": b"",
    b"/v1/models": MODELS,
    b"/model_info": MODEL,
    b"/get_model_info": MODEL,
    b"/server_info": SERVER,
    b"/get_server_info": SERVER,
    b"/version": b'{"version":"0.5.17"}',
}


def as_chunk(data: str) -> bytes:
    """One event in one chunk of HTTP."""
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


CHUNK: Final = as_chunk(EVENT % ONE_MORE)
STAMP: Final = b'"@'  # in a token's text: the time of the clock that all processes share follows
STAMP_SIZE: Final = 18  # its digits, seconds
STAMPED: Final = 8  # every such token of a stream says when it was sent


def stamped(now: float) -> bytes:
    """A chunk as the others are, that says when it was sent."""
    return as_chunk(EVENT % ONE_MORE.replace(" a token", f"@{now:0{STAMP_SIZE}.6f}"))


@functools.lru_cache
def ending(tokens: int) -> bytes:
    """The last events of a stream, and its end."""
    usage = USAGE % (200 + tokens, tokens)
    return (
        b"".join(as_chunk(data) for data in (EVENT % FINISH, EVENT % usage, "[DONE]"))
        + b"0\r\n\r\n"
    )
