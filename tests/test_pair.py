"""What the pair says of itself, through the app and with backends that a test plays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from router import __version__
from router.health import Answer, Probe
from router.load import Role
from router.pair import EXPOSED, create_public_app
from router.pair_client import KEEP_FAILURE, create_client
from router.policy import FixedPolicy
from tests.fake_relay import START, FakeRelay, make_settings
from tests.test_loads import BASE_INFO, SPEC_INFO, answer, entry

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
MODELS = (
    b'{"object":"list","data":[{"id":"org/model:tag","object":"model","created":1,'
    b'"owned_by":"sglang","root":"r","parent":null,"max_model_len":8192},'
    b'{"id":"lora","object":"model"}]}'
)
Request = Callable[..., Coroutine[Any, Any, httpx.Response]]


class Backends:
    """Both servers at once; a test changes what a path answers, or takes one down."""

    def __init__(self) -> None:
        self.seen: list[httpx.Request] = []
        self.down: set[Role] = set()
        self.answers: dict[tuple[Role, str], tuple[int, bytes]] = {}
        for role, info in ((SPEC, SPEC_INFO), (BASE, BASE_INFO)):
            self.answers[role, "/v1/models"] = (200, MODELS)
            self.answers[role, "/model_info"] = (200, f'{{"model_path":"{role}"}}'.encode())
            self.answers[role, "/server_info"] = (200, json.dumps(info).encode())
            self.answers[role, "/v1/loads"] = (200, json.dumps(answer(entry(5))).encode())

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        role = SPEC if request.url.host == "speculative.test" else BASE
        if role in self.down:
            raise httpx.ConnectError(f"cannot reach {request.url}", request=request)
        status, body = self.answers.get((role, request.url.path), (404, b'{"detail":"Not Found"}'))
        return httpx.Response(status, content=body)

    @property
    def asked(self) -> list[str]:
        return [f"{request.url.host.split('.')[0]} {request.url.path}" for request in self.seen]


class Pair:
    """The app with a fake relay behind it and played backends behind that."""

    def __init__(self, **settings: object) -> None:
        self.backends = Backends()
        self.relay = FakeRelay(make_settings(**settings))
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self.backends))
        self.app = create_public_app(self.relay, self.client)

    async def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            return await client.request(method, path, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return asyncio.run(self.send("GET", path, **more))


@pytest.fixture
def pair() -> Pair:
    return Pair()


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = body["error"]
    return error


# --------------------------------------------------------------------------- models


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/", "/models/"])
def test_the_list_of_models_is_a_backends_own(pair: Pair, path: str) -> None:
    """The bytes of the list are those that a backend gave, with and without /v1 and slash."""
    response = pair.get(path)
    assert response.status_code == 200
    assert response.content == MODELS
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/org/model:tag",
        "/v1/models/org%2Fmodel%3Atag",
        "/models/org/model:tag",
        "/v1/models/org/model:tag/",
    ],
)
def test_a_model_is_found_by_its_id(pair: Pair, path: str) -> None:
    """An id may hold slashes and colons, escaped or not."""
    response = pair.get(path)
    assert response.status_code == 200
    assert response.json()["id"] == "org/model:tag"
    assert response.content in MODELS


def test_an_unknown_model_is_404_as_openai_says_it(pair: Pair) -> None:
    """A model that is not in the list is model_not_found, which clients know."""
    response = pair.get("/v1/models/nope")
    assert response.status_code == 404
    assert error_of(response) == {
        "message": "The model 'nope' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_a_list_of_another_shape_holds_no_model(pair: Pair) -> None:
    """A backend whose list cannot be read has no models, and nothing breaks."""
    pair.backends.answers[SPEC, "/v1/models"] = (200, b'{"data":[{"name":"x"}]}')
    assert error_of(pair.get("/v1/models/x"))["code"] == "model_not_found"


def test_answers_are_remembered_for_a_moment(pair: Pair) -> None:
    """Many askers within three seconds cost a backend one request."""

    async def ask_often() -> None:
        await asyncio.gather(*(pair.send("GET", "/v1/models") for _ in range(20)))
        await pair.send("GET", "/v1/models/lora")
        pair.relay.now += 3.1
        await pair.send("GET", "/v1/models")

    asyncio.run(ask_often())
    assert pair.backends.asked == ["speculative /v1/models"] * 2


def test_the_usable_backend_is_asked_first(pair: Pair) -> None:
    """A drained server is not asked while the other answers."""
    pair.relay.health.drain(SPEC, drained=True, now=START)
    pair.get("/v1/models")
    assert pair.backends.asked == ["baseline /v1/models"]


def test_the_other_backend_answers_for_one_that_is_away(pair: Pair) -> None:
    """One server is enough to know the models."""
    pair.backends.down = {SPEC}
    assert pair.get("/v1/models").content == MODELS
    assert pair.backends.asked == ["speculative /v1/models", "baseline /v1/models"]


def test_no_backend_is_503_without_an_address(pair: Pair) -> None:
    """Nobody reachable is a 503 with Retry-After that names no host."""
    pair.backends.down = {SPEC, BASE}
    response = pair.get("/v1/models")
    assert response.status_code == 503
    assert error_of(response)["code"] == "no_backend"
    assert int(response.headers["retry-after"]) >= 1
    assert "speculative.test" not in response.text


def test_a_failure_is_remembered_too(pair: Pair) -> None:
    """A pair that is away is asked once a second, however many ask us; then it is asked anew."""
    pair.backends.down = {SPEC, BASE}

    async def ask_often() -> httpx.Response:
        for _ in range(5):
            await pair.send("GET", "/v1/models")
        assert len(pair.backends.seen) == 2
        pair.backends.down = set()
        pair.relay.now += KEEP_FAILURE
        return await pair.send("GET", "/v1/models")

    assert asyncio.run(ask_often()).status_code == 200


@pytest.mark.parametrize(
    "bad", [(401, b'{"error":"Unauthorized"}'), (500, b"{}"), (200, b"<html>"), (302, b"")]
)
def test_a_bad_answer_is_502_and_stays_inside(pair: Pair, bad: tuple[int, bytes]) -> None:
    """A backend's own 401 or broken body is no business of the client's."""
    for role in Role:
        pair.backends.answers[role, "/v1/models"] = bad
    response = pair.get("/v1/models")
    assert response.status_code == 502
    assert error_of(response)["code"] == "backend_bad_answer"


def test_the_backends_key_is_sent_and_the_clients_is_not() -> None:
    """A backend sees its own key as Bearer, never the client's."""
    pair = Pair(api_keys="sk-client-key", backend_api_key="sk-backend", baseline_api_key="sk-base")
    headers = {"authorization": "Bearer sk-client-key"}
    assert pair.get("/server_info", headers=headers).status_code == 200
    sent = {request.url.host: request.headers["authorization"] for request in pair.backends.seen}
    assert sent == {
        "speculative.test": "Bearer sk-backend",
        "baseline.test": "Bearer sk-base",
    }


def test_a_backends_prefix_is_kept() -> None:
    """A backend behind a path is asked under that path."""
    pair = Pair(speculative="http://speculative.test/api/v3/v1/")
    pair.get("/v1/models")
    assert pair.backends.asked[0] == "speculative /api/v3/v1/models"


# --------------------------------------------------------------------------- health


OPEN = ["/health", "/health_generate", "/ping", "/ready", "/health/"]


@pytest.mark.parametrize("path", OPEN)
def test_health_is_503_until_a_backend_is_ready(pair: Pair, path: str) -> None:
    """At a cold start we are not ready; with one backend up we are, at once and from memory."""
    response = pair.get(path)
    assert response.status_code == 503
    assert error_of(response)["code"] == "not_ready"
    pair.relay.health.probed(BASE, Probe.READY, Answer.PASS, START, "200")
    response = pair.get(path)
    assert (response.status_code, response.content) == (200, b"")
    assert pair.backends.seen == []


def test_health_is_503_while_draining(pair: Pair) -> None:
    """From the moment of SIGTERM what is in front of us is told to stop sending."""
    pair.relay.make_ready()
    pair.relay.draining = True
    response = pair.get("/ready")
    assert response.status_code == 503
    assert error_of(response)["code"] == "draining"


def test_head_says_the_same(pair: Pair) -> None:
    """HEAD works on the root, on health and on models."""
    pair.relay.make_ready()
    for path in ("/", "/ready", "/v1/models", "/v1/models/lora"):
        assert asyncio.run(pair.send("HEAD", path)).status_code == 200
    pair.relay.draining = True
    assert asyncio.run(pair.send("HEAD", "/")).status_code == 503


# --------------------------------------------------------------------------- info and load


def test_model_info_is_a_backends_own(pair: Pair) -> None:
    """Both spellings give what the speculative server says."""
    for path in ("/model_info", "/get_model_info"):
        assert pair.get(path).json() == {"model_path": "speculative"}


def test_an_older_spelling_is_tried_on_the_backend(pair: Pair) -> None:
    """A server that does not know /model_info is asked for /get_model_info."""
    for role in Role:
        del pair.backends.answers[role, "/model_info"]
    pair.backends.answers[SPEC, "/get_model_info"] = (200, b'{"old":true}')
    assert pair.get("/model_info").json() == {"old": True}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_is_redacted_and_merged(pair: Pair, path: str) -> None:
    """No secret of either server is in it; what a benchmark reads is."""
    response = pair.get(path)
    assert "sk-secret" not in response.text
    body = response.json()
    assert body["max_running_requests"] == 2096
    assert body["internal_states"][0]["avg_spec_accept_length"] == 2.8
    assert body["crossover"] == {"version": __version__, "policy": "frontier", "threshold": 8}


def test_server_info_names_the_policy(pair: Pair) -> None:
    """A benchmark's result says which policy stood behind its numbers."""
    pair.relay.policy = FixedPolicy(BASE)
    assert pair.get("/server_info").json()["crossover"]["policy"] == "baseline"
    assert pair.get("/server_info").json()["crossover"]["threshold"] is None


def test_server_info_of_no_server_is_503(pair: Pair) -> None:
    """With nobody to describe there is no description."""
    pair.backends.down = {SPEC, BASE}
    assert error_of(pair.get("/server_info"))["code"] == "no_backend"


def test_loads_are_summed_over_the_pair(pair: Pair) -> None:
    """One entry for both servers, with our own queue and what they do not know of yet."""
    for _ in range(7):
        pair.relay.tracker.lease(BASE, START)
    pair.relay.waiting = 2
    body = pair.get("/v1/loads?include=core").json()
    (found,) = body["loads"]
    assert found["num_running_reqs"] == 5 + 7
    assert found["num_waiting_reqs"] == 2
    assert "memory" not in found
    (older,) = pair.get("/get_load").json()
    assert older["num_reqs"] == 14


def test_loads_need_no_backend(pair: Pair) -> None:
    """With both servers away our own count is the load, and one known to be down is not asked."""
    pair.backends.down = {SPEC, BASE}
    pair.relay.tracker.lease(SPEC, START)
    for _ in range(3):
        pair.relay.health.probed(BASE, Probe.READY, Answer.MISS, START, "refused")
    (found,) = pair.get("/v1/loads").json()["loads"]
    assert found["num_running_reqs"] == 1
    assert pair.backends.asked == ["speculative /v1/loads"]


def test_loads_follow_the_query(pair: Pair) -> None:
    """A rank that we do not have is empty, a bad section 400, and Prometheus gets its text."""
    assert pair.get("/v1/loads?dp_rank=1").json()["loads"] == []
    assert error_of(pair.get("/v1/loads?include=nope"))["param"] == "include"
    assert pair.get("/v1/loads?include=nope").status_code == 400
    assert pair.get("/v1/loads?format=xml").status_code == 400
    text = pair.get("/v1/loads?format=prometheus")
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'sglang_num_running_reqs{dp_rank="0"} 10\n' in text.text


# --------------------------------------------------------------------------- all the rest


@pytest.mark.parametrize(
    "path",
    [
        "/flush_cache", "/abort_request", "/update_weights_from_disk", "/start_profile",
        "/open_session", "/v1/realtime", "/docs", "/openapi.json", "/metrics", "/nope",
        "/v1/loads/x", "/health/../flush_cache", "/v1/model",
    ],
)  # fmt: skip
def test_nothing_else_reaches_a_backend(pair: Pair, path: str) -> None:
    """The engine's other routes are a 404 of ours, by any method, and no backend hears of them."""
    for method in ("GET", "POST", "PUT", "DELETE"):
        response = asyncio.run(pair.send(method, path))
        assert response.status_code == 404
        assert error_of(response)["code"] == "not_found"
    assert pair.backends.seen == []


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("GET", "/chat/completions/", "POST"),
        ("PUT", "/generate", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/org/model:tag", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/api/tags", "GET"),
        ("POST", "/", "GET, HEAD"),
        ("GET", "/v1/responses", "POST"),
        ("GET", "/v1/responses/", "POST"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("OPTIONS", "/v1/completions", "POST"),
    ],
)
def test_a_wrong_method_is_405_with_allow(pair: Pair, method: str, path: str, allow: str) -> None:
    """A path that is served says by which methods, also one that the relay serves."""
    response = asyncio.run(pair.send(method, path))
    assert response.status_code == 405
    assert response.headers["allow"] == allow
    assert error_of(response)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
    ],
)
def test_stored_responses_are_404_that_says_why(pair: Pair, method: str, path: str) -> None:
    """A stored response lives in one server only; the error says so."""
    response = asyncio.run(pair.send(method, path))
    assert response.status_code == 404
    assert "one server only" in error_of(response)["message"]
    assert pair.backends.seen == []


def test_with_keys_everything_but_health_needs_one() -> None:
    """Health stays open; everything else, unknown paths too, is 401 without a key."""
    pair = Pair(api_keys="sk-client-key")
    pair.relay.make_ready()
    for path in OPEN:
        assert pair.get(path).status_code == 200
    for path in ("/v1/models", "/server_info", "/v1/loads", "/model_info", "/nope", "/healthy"):
        response = pair.get(path)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"
    headers = {"authorization": "Bearer sk-client-key"}
    assert pair.get("/v1/models", headers=headers).status_code == 200
    assert pair.get("/nope", headers=headers).status_code == 404
    assert pair.get("/v1/models", headers={"x-api-key": "sk-client-key"}).status_code == 401


def test_cors_is_off_by_default(pair: Pair) -> None:
    """Without an origin configured no browser header is sent."""
    response = pair.get("/v1/models", headers={"origin": "https://chat.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_cors_answers_configured_origins() -> None:
    """A preflight needs no key, on relayed paths too; an error can be read by the page."""
    pair = Pair(cors_origin="https://chat.example", api_keys="sk-client-key")
    preflight = asyncio.run(
        pair.send(
            "OPTIONS",
            "/v1/chat/completions",
            headers={
                "origin": "https://chat.example",
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization, content-type",
            },
        )
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = pair.get("/v1/models", headers={"origin": "https://chat.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    assert refused.headers["access-control-expose-headers"] == ", ".join(EXPOSED)
    other = pair.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_the_app_makes_and_closes_its_own_client() -> None:
    """Without a client given, one lives as long as the app; before that nobody can be asked."""
    relay = FakeRelay(
        make_settings(speculative="http://127.0.0.1:9", baseline="http://127.0.0.1:7")
    )
    app = create_public_app(relay)

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            before = await client.get("/v1/models")
            async with app.router.lifespan_context(app):
                during = await client.get("/v1/models")
        return [before.status_code, during.status_code]

    assert asyncio.run(run()) == [503, 503]


def test_our_client_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment is not used for a backend, and no redirect is followed."""
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.test:1")
    client = create_client()
    assert not client.trust_env
    assert not client.follow_redirects
    assert not client._mounts
    asyncio.run(client.aclose())
