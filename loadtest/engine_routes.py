"""The routes that take a body: one small handler for each dialect, around one way of serving.

How an answer is framed is the `Dialect`'s, and how it is served `SimulatedServer`'s.
"""

from __future__ import annotations

from typing import Any, Final

from loadtest import engine_anthropic, engine_native, engine_ollama
from loadtest.engine_anthropic import MessageStream, message_body
from loadtest.engine_errors import bad_request, invalid, missing
from loadtest.engine_http import NDJSON, Exchange
from loadtest.engine_native import NativeStream, native_body
from loadtest.engine_ollama import (
    OllamaGenerateStream,
    OllamaStream,
    ollama_chat_body,
    ollama_generate_body,
    ollama_request,
)
from loadtest.engine_openai import ChatStream, CompletionStream, chat_body, completion_body
from loadtest.engine_request import chat, completion, native
from loadtest.engine_server import Dialect, SimulatedServer
from loadtest.engine_text import decode, encode
from loadtest.engine_validation import Fields, parse_object

CHAT: Final = Dialect(ChatStream, chat_body)
COMPLETION: Final = Dialect(CompletionStream, completion_body)
MESSAGE: Final = Dialect(MessageStream, message_body, engine_anthropic.OVERLOADED)
NATIVE: Final = Dialect(NativeStream, native_body, engine_native.OVERLOADED)
OLLAMA_CHAT: Final = Dialect(OllamaStream, ollama_chat_body, engine_ollama.OVERLOADED, NDJSON)
OLLAMA_GENERATE: Final = Dialect(
    OllamaGenerateStream, ollama_generate_body, engine_ollama.OVERLOADED, NDJSON
)


def _fields(exchange: Exchange) -> Fields:
    return parse_object(exchange.path, exchange.body)


async def chat_completions(server: SimulatedServer, exchange: Exchange) -> None:
    """`/v1/chat/completions`."""
    await server.generate(exchange, chat(_fields(exchange), server.config), CHAT)


async def completions(server: SimulatedServer, exchange: Exchange) -> None:
    """`/v1/completions`."""
    await server.generate(exchange, completion(_fields(exchange), server.config), COMPLETION)


async def messages(server: SimulatedServer, exchange: Exchange) -> None:
    """`/v1/messages`."""
    wanted = engine_anthropic.messages(_fields(exchange), server.config)
    await server.generate(exchange, wanted, MESSAGE)


async def count_tokens(_: SimulatedServer, exchange: Exchange) -> None:
    """`/v1/messages/count_tokens`."""
    await exchange.reply_json(200, engine_anthropic.count(_fields(exchange)))


async def native_generate(server: SimulatedServer, exchange: Exchange) -> None:
    """`/generate`."""
    await server.generate(exchange, native(_fields(exchange), server.config), NATIVE)


async def ollama_chat(server: SimulatedServer, exchange: Exchange) -> None:
    """`/api/chat`."""
    await server.generate(exchange, ollama_request(_fields(exchange), server.config), OLLAMA_CHAT)


async def ollama_generate(server: SimulatedServer, exchange: Exchange) -> None:
    """`/api/generate`."""
    wanted = ollama_request(_fields(exchange), server.config)
    await server.generate(exchange, wanted, OLLAMA_GENERATE)


async def ollama_tags(server: SimulatedServer, exchange: Exchange) -> None:
    """`/api/tags`."""
    await exchange.reply_json(200, engine_ollama.tags(server.config, server.wall()))


async def ollama_show(server: SimulatedServer, exchange: Exchange) -> None:
    """`/api/show`."""
    await exchange.reply_json(200, engine_ollama.show(server.config, server.wall()))


async def embeddings(_: SimulatedServer, exchange: Exchange) -> None:
    """`/v1/embeddings`, which a generating model does not serve."""
    _fields(exchange)
    raise bad_request(
        "This model does not appear to be an embedding model by default. Please add"
        " `--is-embedding` when launching the server or try another model."
    )


async def tokenize(server: SimulatedServer, exchange: Exchange) -> None:
    """`/v1/tokenize`."""
    fields = _fields(exchange)
    prompts = _required(fields, "prompt")
    many = isinstance(prompts, list)
    tokens = [encode(str(prompt)) for prompt in (prompts if many else [prompts])]
    counts = [len(ids) for ids in tokens]
    await exchange.reply_json(
        200,
        {
            "tokens": tokens if many else tokens[0],
            "count": counts if many else counts[0],
            "max_model_len": server.config.context_length,
        },
    )


async def detokenize(_: SimulatedServer, exchange: Exchange) -> None:
    """`/v1/detokenize`."""
    fields = _fields(exchange)
    tokens = _required(fields, "tokens")
    many = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
    lists = tokens if many else [tokens]
    if not all(isinstance(ids, list) and all(type(i) is int for i in ids) for ids in lists):
        fields.problem("list_type", "tokens", "Input should be a valid list")
        raise fields.refusal()
    texts = [decode(ids) for ids in lists]
    await exchange.reply_json(200, {"text": texts if many else texts[0]})


def _required(fields: Fields, name: str) -> Any:
    if fields.values.get(name) is None:
        raise invalid(fields.path, [missing(("body", name), fields.values)])
    return fields.values[name]
