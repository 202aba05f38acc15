"""Ollama's dialect, as SGLang serves it: lines of JSON, and a stream unless told otherwise.

Bytes are made here and sent elsewhere.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from loadtest.engine_config import EngineConfig
from loadtest.engine_errors import QUEUE_FULL
from loadtest.engine_generation import Event, Generation
from loadtest.engine_http import NDJSON
from loadtest.engine_request import Wanted, chat, completion
from loadtest.engine_validation import Fields
from loadtest.engine_wire import encode

OVERLOADED: Final = (encode({"error": QUEUE_FULL}) + b"\n",)


def ollama_request(fields: Fields, config: EngineConfig) -> Wanted:
    """What `/api/chat` or `/api/generate` asks for."""
    values, options = fields.values, fields.mapping("options")
    fields.check()
    body: dict[str, Any] = {
        "model": config.model,
        "stream": values.get("stream", True),
        "max_tokens": options.get("num_predict", 128),
        **{name: options[name] for name in ("temperature", "top_p") if name in options},
    }
    if fields.path == "/api/chat":
        return chat(Fields(fields.path, body | {"messages": values.get("messages", [])}), config)
    prompt = " ".join(str(values.get(name) or "") for name in ("system", "prompt"))
    return completion(Fields(fields.path, body | {"prompt": prompt.strip()}), config)


class OllamaStream:
    """The stream of `/api/chat` and `/api/generate`: `key` is where the text goes."""

    content_type = NDJSON
    chat = True

    def __init__(self, wanted: Wanted, _generation: Generation, _rid: str, created: float) -> None:
        self._wanted = wanted
        self._created = created

    def events(self, event: Event) -> list[bytes]:
        """The line that this news makes."""
        text = self._wanted.choices[0].answer.text(event.first, event.tokens)
        return [self._line(text, done=False)]

    def ending(self) -> list[bytes]:
        """The line that says so."""
        return [self._line("", done=True)]

    def _line(self, text: str, *, done: bool) -> bytes:
        line: dict[str, Any] = {"model": self._wanted.model, "created_at": stamp(self._created)}
        line |= _content(text, chat=self.chat) | {"done": done}
        if done:
            line["done_reason"] = "stop"
        return encode(line) + b"\n"


class OllamaGenerateStream(OllamaStream):
    """The stream of `/api/generate`."""

    chat = False


def ollama_chat_body(wanted: Wanted, generation: Generation, _rid: str, created: float) -> bytes:
    """An answer of `/api/chat` in one piece."""
    return _body(wanted, generation, created, chat=True)


def ollama_generate_body(
    wanted: Wanted, generation: Generation, _rid: str, created: float
) -> bytes:
    """An answer of `/api/generate` in one piece."""
    return _body(wanted, generation, created, chat=False)


def tags(config: EngineConfig, now: float) -> dict[str, Any]:
    """The answer of `/api/tags`."""
    details = {"format": "sglang", "family": config.model, "parameter_size": "unknown"}
    model = {"name": config.model, "model": config.model, "modified_at": stamp(now), "size": 0}
    return {"models": [model | {"digest": "sha256:sglang" + "0" * 58, "details": details}]}


def show(config: EngineConfig, now: float) -> dict[str, Any]:
    """The answer of `/api/show`."""
    name, context = config.model, config.context_length
    return {
        "license": "",
        "modelfile": f"FROM {name}\nPARAMETER num_ctx {context}\n",
        "parameters": f"num_ctx {context}",
        "template": "",
        "modified_at": stamp(now),
        "details": {"parent_model": "", "format": "sglang", "family": name, "families": [name]},
        "model_info": {"general.architecture": name, f"{name}.context_length": context},
        "capabilities": ["completion"],
    }


def stamp(at: float) -> str:
    """A time as Ollama writes it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _content(text: str, *, chat: bool) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}} if chat else {"response": text}


def _body(wanted: Wanted, generation: Generation, created: float, *, chat: bool) -> bytes:
    text = wanted.choices[0].answer.text(0, generation.produced)
    took_s = generation.finished_at - generation.queued_at
    return encode(
        {
            "model": wanted.model,
            "created_at": stamp(created),
            **_content(text, chat=chat),
            "done": True,
            "done_reason": "stop",
            "total_duration": int(took_s * 1e9),
            "prompt_eval_count": wanted.prompt_tokens,
            "eval_count": generation.produced,
        }
    )
