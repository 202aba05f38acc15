"""The closed table of what is relayed, and where to.

A request path is looked up as it came, byte for byte and without its query (`incoming`); what is
not in the table may not be relayed. A route's own constant path is sent to the backend, never the
client's, so no trick with dots, escapes or hosts can reach anything else of a backend (flush, abort,
weights, profile, sessions).

The rule for base URLs, on both sides:

* a client may write an OpenAI path with or without `/v1`, and any path with one trailing slash;
* a backend's URL loses a trailing slash and then one trailing `/v1`; what path is left is put
  before every route (`http://h/api/v3` is asked for `/api/v3/v1/chat/completions`).
"""

from __future__ import annotations

import msgspec


class Route(msgspec.Struct, frozen=True):
    """One relayed endpoint."""

    name: str  # metric label
    path: bytes  # sent to the backend behind its prefix
    method: bytes = b"POST"
    json: bool = True  # whether the body must be a JSON object
    stateful: bool = False  # whether a request may name state kept in one server


def _post(path: str, *, stateful: bool = False) -> Route:
    name = path.removeprefix("/v1/").strip("/").replace("/", "_")
    return Route(name, path.encode(), stateful=stateful)


OPENAI_ROUTES = (
    _post("/v1/chat/completions"),
    _post("/v1/completions"),
    _post("/v1/responses", stateful=True),
    _post("/v1/messages"),
    _post("/v1/messages/count_tokens"),
    _post("/v1/embeddings"),
    _post("/v1/rerank"),
    _post("/v1/score"),
    _post("/v1/tokenize"),
    _post("/v1/detokenize"),
)
OTHER_ROUTES = (
    _post("/generate"),
    _post("/invocations"),
    _post("/api/chat"),
    _post("/api/generate"),
    _post("/api/show"),
)
GET_ROUTES = (
    Route("api_tags", b"/api/tags", b"GET", json=False),
    Route("root", b"/", b"GET", json=False),
)
ROUTES = OPENAI_ROUTES + OTHER_ROUTES + GET_ROUTES


def _table() -> dict[bytes, Route]:
    table: dict[bytes, Route] = {}
    for route in ROUTES:
        spellings = [route.path]
        if route in OPENAI_ROUTES:
            spellings.append(route.path.removeprefix(b"/v1"))
        for spelling in spellings:
            table[spelling] = route
            if spelling != b"/":
                table[spelling + b"/"] = route
    return table


TABLE = _table()
