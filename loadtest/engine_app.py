"""The routes of a simulated server: a table from path to method to handler, as an ASGI application.

Raw ASGI, since a framework would cost more per request than the simulated scheduler. Which version
has which route is decided here, and nothing of what they answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from loadtest import engine_anthropic, engine_native
from loadtest import engine_routes as generating
from loadtest.engine_errors import (
    NOT_ALLOWED,
    NOT_FOUND,
    UNAUTHORIZED,
    BadToken,
    Refusal,
    wrong_content_type,
)
from loadtest.engine_http import JSON, VARY, Exchange
from loadtest.engine_loads import get_load, v1_loads
from loadtest.engine_server import SimulatedServer
from loadtest.engine_status import (
    abort_request,
    flush_cache,
    health,
    metrics,
    model_info,
    models,
    one_model,
    preflight,
    ready,
    root,
    server_info,
)

Handler = Callable[[SimulatedServer, Exchange], Awaitable[None]]

OPEN_PATHS: Final = ("/health", "/ready", "/metrics")  # no key is needed for these
MODEL_PATH: Final = "/v1/models/{model:path}"


class Route(NamedTuple):
    """What to do for one path and method."""

    handler: Handler
    takes_json: bool = False  # and refuses anything that does not call itself JSON
    error_body: Callable[[Refusal], bytes] = Refusal.body


def routes(server: SimulatedServer) -> dict[str, dict[str, Route]]:
    """The table, by path and method; what a version does not have is not in it."""
    config = server.config
    get: dict[str, Handler] = {
        "/health": health,
        "/health_generate": health,
        "/ping": ready,
        "/": root,
        "/v1/models": models,
        MODEL_PATH: one_model,
        "/v1/loads": v1_loads,
        "/server_info": server_info,
        "/get_server_info": server_info,
        "/model_info": model_info,
        "/get_model_info": model_info,
        "/api/tags": generating.ollama_tags,
    }
    if config.has_ready:
        get["/ready"] = ready
    if config.has_get_load:
        get["/get_load"] = get_load
    if config.metrics:
        get["/metrics"] = metrics
    post: dict[str, tuple[Handler, Callable[[Refusal], bytes]]] = {
        "/v1/chat/completions": (generating.chat_completions, Refusal.body),
        "/invocations": (generating.chat_completions, Refusal.body),
        "/v1/completions": (generating.completions, Refusal.body),
        "/v1/embeddings": (generating.embeddings, Refusal.body),
        "/v1/messages": (generating.messages, engine_anthropic.error_body),
        "/v1/messages/count_tokens": (generating.count_tokens, engine_anthropic.error_body),
        "/generate": (generating.native_generate, engine_native.error_body),
        "/api/chat": (generating.ollama_chat, Refusal.body),
        "/api/generate": (generating.ollama_generate, Refusal.body),
        "/api/show": (generating.ollama_show, Refusal.body),
        "/v1/tokenize": (generating.tokenize, Refusal.body),
        "/tokenize": (generating.tokenize, Refusal.body),
        "/v1/detokenize": (generating.detokenize, Refusal.body),
        "/detokenize": (generating.detokenize, Refusal.body),
    }
    table = {path: {"GET": Route(handler)} for path, handler in get.items()}
    table["/"]["HEAD"] = Route(root)
    for path, (handler, error_body) in post.items():
        table[path] = {"POST": Route(handler, takes_json=True, error_body=error_body)}
    table["/generate"]["PUT"] = table["/generate"]["POST"]
    for path, handler in (("/flush_cache", flush_cache), ("/abort_request", abort_request)):
        table[path] = {"GET": Route(handler), "POST": Route(handler)}
    return table


class EngineApp:
    """The ASGI application of one simulated server."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._routes = routes(server)
        key = server.config.api_key
        self._authorization = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        server = self._server
        exchange = Exchange(scope, receive, send, server.clock)
        path = exchange.path
        try:
            await exchange.read_body()
            if exchange.gone:
                return
            server.remember(exchange)
            if self._refuses(exchange):
                await exchange.reply(401, UNAUTHORIZED, JSON, ())
                return
            if (
                exchange.method == "OPTIONS"
                and b"access-control-request-method" in exchange.headers
            ):
                await preflight(server, exchange)
                return
            if path.startswith("/v1/models/"):
                path = MODEL_PATH
            server.requests[path, exchange.method] += 1
            await self._answer(exchange, path)
        finally:
            exchange.finish()
            if exchange.status is not None:
                server.responses[path, exchange.method, exchange.status] += 1

    async def _answer(self, exchange: Exchange, path: str) -> None:
        methods = self._routes.get(path)
        if methods is None:
            await exchange.reply(404, NOT_FOUND)
            return
        route = methods.get(exchange.method)
        if route is None:
            allowed = next(iter(methods)).encode()
            await exchange.reply(405, NOT_ALLOWED, JSON, ((b"allow", allowed), VARY))
            return
        try:
            if route.takes_json and not _is_json(exchange):
                raise wrong_content_type()
            await route.handler(self._server, exchange)
        except Refusal as refusal:
            await exchange.reply(refusal.status, route.error_body(refusal))
        except BadToken:
            await self._server.die(exchange)

    def _refuses(self, exchange: Exchange) -> bool:
        return (
            self._authorization is not None
            and exchange.headers.get(b"authorization") != self._authorization
            and exchange.method != "OPTIONS"
            and not exchange.path.startswith(OPEN_PATHS)
        )


def _is_json(exchange: Exchange) -> bool:
    content_type = exchange.headers.get(b"content-type", b"")
    return content_type.partition(b";")[0].strip().lower() == b"application/json"
