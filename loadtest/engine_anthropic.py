"""Anthropic's Messages dialect, as SGLang translates it from chat (read in its source, not captured).

Order of a stream: `message_start`, then per content block a start, deltas and a stop, then
`message_delta` with the stop reason and all usage, then `message_stop`; there is no `[DONE]`.

Bytes are made here and sent elsewhere.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from loadtest.engine_config import EngineConfig
from loadtest.engine_errors import Refusal, bad_request
from loadtest.engine_generation import Event, Generation
from loadtest.engine_http import SSE
from loadtest.engine_messages import message_tokens
from loadtest.engine_request import Wanted, chat
from loadtest.engine_validation import Fields
from loadtest.engine_wire import arguments_piece, encode, new_id

STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages(fields: Fields, config: EngineConfig) -> Wanted:
    """What `/v1/messages` asks for, by way of the chat request that SGLang makes of it."""
    values = fields.values
    for name in ("messages", "max_tokens", "model"):
        if name not in values:
            raise bad_request(f"{name}: Field required", "invalid_request_error")
    wanted = chat(Fields(fields.path, as_chat(values)), config)
    return msgspec.structs.replace(wanted, include_usage=True)


def as_chat(values: dict[str, Any]) -> dict[str, Any]:
    """The same request in OpenAI's words, as far as the answer depends on it."""
    known = ("model", "max_tokens", "stream", "temperature", "top_p", "messages", "ignore_eos")
    body = {name: values[name] for name in known if name in values}
    system = values.get("system")
    if system and isinstance(body.get("messages"), list):
        body["messages"] = [{"role": "system", "content": system}, *body["messages"]]
    tools, choice = values.get("tools"), values.get("tool_choice") or {}
    if isinstance(tools, list) and choice.get("type") in ("any", "tool"):
        body["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.get("name"), "parameters": tool.get("input_schema")},
            }
            for tool in tools
        ]
        body["tool_choice"] = (
            "required" if choice["type"] == "any" else {"function": {"name": choice.get("name")}}
        )
    return body


def count(fields: Fields) -> dict[str, int]:
    """The answer of `/v1/messages/count_tokens`."""
    body = as_chat(fields.values)
    if not isinstance(body.get("messages"), list):
        raise bad_request("messages: Field required", "invalid_request_error")
    return {"input_tokens": message_tokens(body["messages"])}


def error_body(refusal: Refusal) -> bytes:
    """Anthropic's error shape; what is no fault of the request is an internal error to SGLang."""
    kind, message = "invalid_request_error", refusal.message
    if refusal.status >= 500:
        kind, message = "internal_error", "Internal processing error"
    return encode({"type": "error", "error": {"type": kind, "message": message}})


def sse(kind: str, **fields: Any) -> bytes:
    """One event, whose type is in it twice."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **fields}))


OVERLOADED: Final = (
    sse("error", error={"type": "api_error", "message": "Stream processing error"}),
)


class MessageStream:
    """The stream of a message."""

    content_type = SSE

    def __init__(self, wanted: Wanted, generation: Generation, _rid: str, _created: float) -> None:
        self._wanted = wanted
        self._generation = generation
        self._started = False
        self._finish = "stop"

    def events(self, event: Event) -> list[bytes]:
        """The events that this news makes."""
        chunks = []
        if not self._started:
            self._started = True
            chunks += self._opening()
        if event.finish is not None:
            self._finish = event.finish
        tool = self._wanted.tool
        if tool is not None:
            piece = arguments_piece(tool, event.first, event.tokens)
            delta = {"type": "input_json_delta", "partial_json": piece}
        else:
            piece = self._wanted.choices[0].answer.text(event.first, event.tokens)
            delta = {"type": "text_delta", "text": piece}
        if piece:
            chunks.append(sse("content_block_delta", index=0, delta=delta))
        return chunks

    def ending(self) -> list[bytes]:
        """The end of the block and of the message."""
        counts = {
            "input_tokens": self._wanted.prompt_tokens,
            "output_tokens": self._generation.produced,
            "cache_read_input_tokens": 0,
        }
        reason = STOP_REASONS.get(self._finish, "end_turn")
        return [
            sse("content_block_stop", index=0),
            sse("message_delta", delta={"stop_reason": reason}, usage=counts),
            sse("message_stop"),
        ]

    def _opening(self) -> list[bytes]:
        message = {
            "id": f"msg_{new_id()}",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._wanted.model,
            "usage": {"input_tokens": 0, "output_tokens": 0, "cache_read_input_tokens": 0},
        }
        tool = self._wanted.tool
        block: dict[str, Any] = {"type": "text", "text": ""}
        if tool is not None:
            call_id = f"call_{new_id()[:24]}"
            block = {"type": "tool_use", "id": call_id, "name": tool.name, "input": {}}
        return [
            sse("message_start", message=message),
            sse("content_block_start", index=0, content_block=block),
        ]


def message_body(wanted: Wanted, generation: Generation, _rid: str, _created: float) -> bytes:
    """A message in one piece."""
    text = wanted.choices[0].answer.text(0, generation.produced)
    block: dict[str, Any] = {"type": "text", "text": text}
    if wanted.tool is not None:
        block = {
            "type": "tool_use",
            "id": f"call_{new_id()[:24]}",
            "name": wanted.tool.name,
            "input": msgspec.json.decode(wanted.tool.arguments),
        }
    return encode(
        {
            "id": f"msg_{new_id()}",
            "type": "message",
            "role": "assistant",
            "content": [block] if wanted.tool or text else [],
            "model": wanted.model,
            "stop_reason": STOP_REASONS.get(generation.finish_reasons[0], "end_turn"),
            "usage": {
                "input_tokens": wanted.prompt_tokens,
                "output_tokens": generation.produced,
                "cache_read_input_tokens": 0,
            },
        }
    )
