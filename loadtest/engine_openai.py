"""Chat completions and text completions as SGLang 0.5.17 writes them, byte for byte.

Order of a chat stream: for each choice a chunk with the role and no content, then content; when all
choices have ended a chunk for each with only its finish reason; then usage, if it was asked for;
then `[DONE]`. A completions stream has no role chunk, carries the finish reason on the last text
chunk, and a `"usage":null` on every one.

Bytes are made here and sent elsewhere.
"""

from __future__ import annotations

from typing import Any

from loadtest.engine_generation import Event, Generation
from loadtest.engine_http import DONE, SSE
from loadtest.engine_request import Wanted
from loadtest.engine_wire import (
    arguments_piece,
    chat_logprobs,
    encode,
    new_id,
    quoted,
    spec_details,
    speculated,
    text_logprobs,
    usage,
)

METADATA = {"weight_version": "default"}


class ChatStream:
    """The stream of a chat completion."""

    content_type = SSE

    def __init__(self, wanted: Wanted, generation: Generation, rid: str, created: float) -> None:
        count = len(wanted.choices)
        ids = [rid] if count == 1 else [f"{rid}_{new_id()}" for _ in range(count)]
        self._wanted = wanted
        self._generation = generation
        self._heads = [
            b'data: {"id":%s,"object":"chat.completion.chunk","created":%d,"model":%s,"choices":['
            % (encode(one), created, encode(wanted.model))
            for one in ids
        ]
        self._deltas = [
            head + b'{"index":%d,"delta":{"reasoning_content":null' % index
            for index, head in enumerate(self._heads)
        ]
        self._contents = [delta + b',"content":"' for delta in self._deltas]
        self._seen = [False] * count
        self._finished: list[tuple[int, str]] = []
        self._produced = 0
        self._last = 0
        self._plain = not (
            wanted.continuous_usage or wanted.tool or wanted.top_logprobs is not None
        )

    def events(self, event: Event) -> list[bytes]:
        """The chunks that this news makes."""
        index, first, tokens, finish = event
        chunks = []
        if not self._seen[index]:
            self._seen[index] = True
            chunks.append(self._deltas[index] + b',"role":"assistant","content":""' + _OPEN + _END)
        if finish is not None:
            self._finished.append((index, finish))
        if tokens:
            self._last = index
            self._produced += tokens
            if self._plain:
                text = self._wanted.choices[index].answer.text(first, tokens)
                chunks.append(self._contents[index] + text.encode() + b'"' + _OPEN + _END)
            else:
                chunks += self._rich(index, first, tokens)
        return chunks

    def ending(self) -> list[bytes]:
        """Finish reasons, usage and the end mark. As in SGLang, finish chunks share one id."""
        last, wanted, generation = self._last, self._wanted, self._generation
        head = self._heads[last]
        chunks = [
            head
            + b'{"index":%d,"delta":{"reasoning_content":null},"logprobs":null,"finish_reason":"%s"'
            b',"matched_stop":null}]}\n\n' % (index, reason.encode())
            for index, reason in self._finished
        ]
        if speculated(wanted, generation):
            details = encode({"spec_tokens_details": spec_details(generation)})
            chunks.append(self._heads[0] + b'],"sglext":' + details + b"}\n\n")
        if wanted.include_usage:
            chunks.append(self._heads[0] + b'],"usage":' + self._usage() + b"}\n\n")
        return [*chunks, DONE]

    def _rich(self, index: int, first: int, tokens: int) -> list[bytes]:
        """Content with logprobs, usage or a tool call: rare, so made the slow way."""
        wanted = self._wanted
        choice = wanted.choices[index]
        tail = b"}]"
        if wanted.continuous_usage:
            tail += b',"usage":' + self._usage()
        tail += b"}\n\n"
        logprobs = b"null"
        if wanted.top_logprobs is not None:
            logprobs = encode(chat_logprobs(choice, first, tokens, wanted.top_logprobs))
        state = b',"logprobs":' + logprobs + b',"finish_reason":null,"matched_stop":null'
        if wanted.tool is None:
            content = quoted(choice.answer.text(first, tokens))
            return [self._contents[index] + content + b'"}' + state + tail]
        chunks = []
        if first == 0:
            call = {
                "id": f"call_{new_id()[:24]}",
                "index": 0,
                "type": "function",
                "function": {"name": wanted.tool.name, "arguments": ""},
            }
            chunks.append(self._call(index, call) + state + tail)
        piece = arguments_piece(wanted.tool, first, tokens)
        if piece:
            call = {
                "id": None,
                "index": 0,
                "type": "function",
                "function": {"name": None, "arguments": piece},
            }
            chunks.append(self._call(index, call) + state + tail)
        return chunks

    def _call(self, index: int, call: dict[str, Any]) -> bytes:
        return self._deltas[index] + b',"tool_calls":[' + encode(call) + b"]}"

    def _usage(self) -> bytes:
        return encode(usage(self._wanted.prompt_tokens, self._produced, self._generation.cached))


_OPEN = b'},"logprobs":null,"finish_reason":null,"matched_stop":null}]'
_END = b"}\n\n"


class CompletionStream:
    """The stream of a text completion."""

    content_type = SSE

    def __init__(self, wanted: Wanted, generation: Generation, rid: str, created: float) -> None:
        self._wanted = wanted
        self._generation = generation
        self._head = (
            b'data: {"id":%s,"object":"text_completion","created":%d,"model":%s,"choices":['
            % (encode(rid), created, encode(wanted.model))
        )
        self._texts = [
            self._head + b'{"index":%d,"text":"' % index for index in range(len(wanted.choices))
        ]
        self._produced = 0
        self._plain = not wanted.continuous_usage and wanted.top_logprobs is None

    def events(self, event: Event) -> list[bytes]:
        """The chunk that this news makes."""
        index, first, tokens, finish = event
        self._produced += tokens
        choice = self._wanted.choices[index]
        text = self._texts[index] + choice.answer.text(first, tokens).encode()
        if finish is None and self._plain:
            return [text + _TEXT_OPEN]
        logprobs = b"null"
        if self._wanted.top_logprobs is not None:
            logprobs = encode(text_logprobs(choice, first, tokens, self._wanted.top_logprobs))
        counts = self._usage() if self._wanted.continuous_usage else b"null"
        reason = b"null" if finish is None else b'"' + finish.encode() + b'"'
        return [
            text
            + b'","logprobs":'
            + logprobs
            + b',"finish_reason":'
            + reason
            + b',"matched_stop":null}],"usage":'
            + counts
            + _END
        ]

    def ending(self) -> list[bytes]:
        """Usage and the end mark."""
        chunks = []
        if speculated(self._wanted, self._generation):
            details = encode({"spec_tokens_details": spec_details(self._generation)})
            chunks.append(self._head + b'],"sglext":' + details + b"}\n\n")
        if self._wanted.include_usage:
            chunks.append(self._head + b'],"usage":' + self._usage() + _END)
        return [*chunks, DONE]

    def _usage(self) -> bytes:
        counts = usage(self._wanted.prompt_tokens, self._produced, self._generation.cached)
        if counts["prompt_tokens_details"] is None:
            del counts["prompt_tokens_details"]
        return encode(counts)


_TEXT_OPEN = b'","logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}\n\n'


def chat_body(wanted: Wanted, generation: Generation, rid: str, created: float) -> bytes:
    """A chat completion in one piece."""
    choices = []
    for index, choice in enumerate(wanted.choices):
        produced = generation.sequences[index].produced
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.answer.text(0, produced),
            "reasoning_content": None,
            "tool_calls": None,
        }
        if wanted.tool is not None:
            function = {"name": wanted.tool.name, "arguments": wanted.tool.arguments}
            call = {"id": f"call_{new_id()[:24]}", "index": 0, "type": "function"}
            message |= {"content": None, "tool_calls": [call | {"function": function}]}
        logprobs = None
        if wanted.top_logprobs is not None:
            logprobs = chat_logprobs(choice, 0, produced, wanted.top_logprobs)
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": generation.finish_reasons[index],
                "matched_stop": None,
            }
        )
    rid = rid if len(choices) == 1 else f"{rid}_{new_id()}"
    return _whole(wanted, generation, rid, "chat.completion", created, choices)


def completion_body(wanted: Wanted, generation: Generation, rid: str, created: float) -> bytes:
    """A text completion in one piece."""
    choices = []
    for index, choice in enumerate(wanted.choices):
        produced = generation.sequences[index].produced
        logprobs = None
        if wanted.top_logprobs is not None:
            logprobs = text_logprobs(choice, 0, produced, wanted.top_logprobs)
        choices.append(
            {
                "index": index,
                "text": choice.answer.text(0, produced),
                "logprobs": logprobs,
                "finish_reason": generation.finish_reasons[index],
                "matched_stop": None,
            }
        )
    return _whole(wanted, generation, rid, "text_completion", created, choices)


def _whole(
    wanted: Wanted,
    generation: Generation,
    rid: str,
    kind: str,
    created: float,
    choices: list[dict[str, Any]],
) -> bytes:
    body: dict[str, Any] = {
        "id": rid,
        "object": kind,
        "created": int(created),
        "model": wanted.model,
        "choices": choices,
        "usage": usage(wanted.prompt_tokens, generation.produced, generation.cached),
        "metadata": METADATA,
    }
    if speculated(wanted, generation):
        body["sglext"] = {"spec_tokens_details": spec_details(generation)}
    return encode(body)
