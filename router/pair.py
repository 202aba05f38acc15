"""The public app beside the relay: what the pair says of itself, so that clients see one server.

Here are models, health, what the servers are, and load. Requests for tokens never come here: the
relay takes them off before ASGI. Everything else of a backend (flush, abort, weights, profiles,
sessions) is answered with 404 here and reaches no backend, since nothing in this file forwards a
path that a client wrote.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import httpx
import msgspec
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from router import __version__, errors, loads, own_headers, routes, server_info
from router.auth import OPEN_PATHS, load_keys
from router.errors import ErrorAnswer
from router.exposition import threshold_of
from router.frontier import Frontier
from router.load import Role
from router.pair_client import PairClient, create_client
from router.policies import policy_name
from router.view import RelayView
from router.web import AnswerError, KeyGuard, error_response, handle_errors

KEEP_MODELS: Final = 3.0  # seconds; the list changes when an adapter is loaded
KEEP_INFO: Final = 2.0  # seconds; costs a backend a round trip through its scheduler
KEEP_LOADS: Final = 0.1  # seconds; costs a backend a memory read
LOADS_TIMEOUT: Final = 1.0  # seconds, then our own count has to do

EXPOSED: Final = tuple(own_headers.RESPONSE)

Endpoint = Callable[[Request], Awaitable[Response]]


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


class _Model(msgspec.Struct):
    id: str


class PairEndpoints:
    """The endpoints, each a short coroutine."""

    def __init__(self, relay: RelayView, wall: Callable[[], float] = time.time) -> None:
        """`wall` gives unix seconds."""
        self._relay = relay
        self._wall = wall
        self._client: PairClient | None = None

    def use(self, client: httpx.AsyncClient) -> None:
        """Ask the backends with this client."""
        self._client = PairClient(self._relay, client)

    def table(self) -> Iterator[Route]:
        """All routes; each is served with one trailing slash too."""
        get: tuple[tuple[Endpoint, tuple[str, ...]], ...] = (
            (self.models, ("/v1/models", "/models")),
            (self.health, tuple(sorted(OPEN_PATHS))),
            (self.model_info, ("/model_info", "/get_model_info")),
            (self.server_info, ("/server_info", "/get_server_info")),
            (self.v1_loads, ("/v1/loads",)),
            (self.get_load, ("/get_load",)),
        )
        for endpoint, paths in get:
            for path in paths:
                yield Route(path, endpoint, methods=["GET"])
                yield Route(path + "/", endpoint, methods=["GET"])
        for prefix in ("/v1", ""):
            yield Route(prefix + "/models/{id:path}", self.model, methods=["GET"])
            stored = prefix + "/responses/{id}"
            yield Route(stored, self.stored, methods=["GET", "DELETE"])
            yield Route(stored + "/input_items", self.stored, methods=["GET"])
            yield Route(stored + "/cancel", self.stored, methods=["POST"])
        yield Route("/", self.root, methods=["HEAD"])

    async def models(self, _: Request) -> Response:
        """The list of models as a backend gives it."""
        return _json(await self._models())

    async def model(self, request: Request) -> Response:
        """One model out of that list; its id may hold slashes and colons."""
        wanted: str = request.path_params["id"]
        try:
            found = msgspec.json.decode(await self._models(), type=_Models).data
            by_id = {msgspec.json.decode(raw, type=_Model).id: raw for raw in found}
        except msgspec.ValidationError:
            by_id = {}
        raw = by_id.get(wanted, by_id.get(wanted.removesuffix("/")))
        if raw is None:
            text = f"The model '{wanted[:200]}' does not exist"
            raise AnswerError(errors.MODEL_NOT_FOUND.with_message(text, "model"))
        return _json(bytes(raw))

    async def health(self, _: Request) -> Response:
        """200 when a backend is ready and the router takes requests; at once, from memory."""
        if self._relay.draining:
            raise AnswerError(errors.DRAINING)
        if not self._relay.health.ready():
            raise AnswerError(errors.NOT_READY)
        return Response(status_code=200)

    async def root(self, request: Request) -> Response:
        """What Ollama's clients ask first, to see whether anybody is there."""
        return await self.health(request)

    async def model_info(self, _: Request) -> Response:
        """The model's facts as a backend gives them; both serve the same model."""
        paths = ("/model_info", "/get_model_info")
        client = self._asked()
        return _json(
            await client.remembered("model_info", KEEP_MODELS, lambda: client.first(paths))
        )

    async def server_info(self, _: Request) -> Response:
        """The pair's facts, redacted and merged."""
        return _json(await self._asked().remembered("server_info", KEEP_INFO, self._server_info))

    async def v1_loads(self, request: Request) -> Response:
        """The pair's load in the shape of SGLang's `/v1/loads`."""
        query = request.query_params
        try:
            include = loads.read_include(query.get("include"))
        except loads.LoadsError as error:
            raise AnswerError(_bad("include", str(error))) from error
        form = query.get("format", "json")
        if form not in {"json", "prometheus"}:
            raise AnswerError(_bad("format", "format: json or prometheus"))
        body = await self._loads(include)
        if query.get("dp_rank", "0") != "0":
            body["loads"] = []
        if form == "prometheus":
            return PlainTextResponse(
                loads.as_prometheus(body), media_type="text/plain; version=0.0.4"
            )
        return _json(msgspec.json.encode(body))

    async def get_load(self, _: Request) -> Response:
        """The pair's load in the older shape."""
        return _json(msgspec.json.encode(loads.get_load(await self._loads(loads.SECTIONS))))

    async def stored(self, _: Request) -> Response:
        """Says why a stored response cannot be had."""
        raise AnswerError(errors.STORED)

    def _asked(self) -> PairClient:
        if self._client is None:
            raise AnswerError(errors.NO_BACKEND)
        return self._client

    async def _models(self) -> bytes:
        client = self._asked()
        return await client.remembered("models", KEEP_MODELS, lambda: client.first(("/v1/models",)))

    async def _server_info(self) -> bytes:
        found = await self._asked().both(("/server_info", "/get_server_info"))
        if not found:
            raise AnswerError(errors.NO_BACKEND)
        merged = server_info.merge([found[role] for role in Role if role in found])
        return msgspec.json.encode(merged | {"crossover": self._self()})

    def _self(self) -> dict[str, Any]:
        """What stands behind a benchmark's numbers: it keeps this body in its results."""
        relay = self._relay
        frontier = getattr(relay.policy, "frontier", None)
        threshold: float | Literal["infinity"] | None = None
        if isinstance(frontier, Frontier):
            number = threshold_of(frontier, relay.tracker.snapshot(relay.clock()))
            threshold = number if number != math.inf else "infinity"
        return {
            "version": __version__,
            "policy": policy_name(relay.policy),
            "threshold": threshold,
        }

    async def _loads(self, include: frozenset[str] | tuple[str, ...]) -> loads.Entry:
        client, relay = self._asked(), self._relay
        answers = await client.remembered(
            "loads", KEEP_LOADS, lambda: client.both(("/v1/loads",), LOADS_TIMEOUT)
        )
        snapshot = relay.tracker.snapshot(relay.clock())
        spec, base = (
            loads.BackendLoads(relay.tracker.of(role), snapshot.of(role).fresh, answers.get(role))
            for role in Role
        )
        return loads.merge(spec, base, waiting=relay.waiting, include=include, unix=self._wall())


def create_public_app(relay: RelayView, client: httpx.AsyncClient | None = None) -> FastAPI:
    """The public listener's app. Without a `client` it makes one and closes it at the end."""
    endpoints = PairEndpoints(relay)
    if client is not None:
        endpoints.use(client)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if client is not None:
            yield
            return
        async with create_client() as own:
            endpoints.use(own)
            yield

    app = FastAPI(
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        routes=list(endpoints.table()),
    )
    handle_errors(app, not_found)
    app.add_middleware(KeyGuard, ring=load_keys(relay.settings), needs_key=_needs_key)
    if relay.settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(relay.settings.cors_origin),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=list(EXPOSED),
        )
    return app


def not_found(request: Request) -> Response:
    """404, or 405 when the path is one that is served with another method."""
    scope = request.scope
    allowed: set[str] = set()
    for route in scope["app"].router.routes:
        if isinstance(route, Route) and route.path_regex.match(scope["path"]):
            allowed |= route.methods or set()
    relayed = routes.TABLE.get(scope.get("raw_path") or scope["path"].encode())
    if relayed is not None:
        allowed.add(relayed.method.decode())
    if allowed and scope["method"] not in allowed:
        headers = {"allow": ", ".join(sorted(allowed))}
        return error_response(errors.METHOD_NOT_ALLOWED, headers)
    return error_response(errors.NOT_FOUND)


def _needs_key(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.removesuffix("/") not in OPEN_PATHS


def _bad(param: str, text: str) -> ErrorAnswer:
    return errors.BAD_REQUEST.with_message(text, param)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
