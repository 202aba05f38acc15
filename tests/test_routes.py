"""What is relayed, under which spelling, and what never is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.incoming import HeadLimits, Incoming
from router.routes import GET_ROUTES, OPENAI_ROUTES, OTHER_ROUTES, ROUTES, TABLE, Route

# By name, what each route is asked for as at a backend.
POSTS = {
    "chat_completions": b"/v1/chat/completions",
    "completions": b"/v1/completions",
    "responses": b"/v1/responses",
    "messages": b"/v1/messages",
    "messages_count_tokens": b"/v1/messages/count_tokens",
    "embeddings": b"/v1/embeddings",
    "rerank": b"/v1/rerank",
    "score": b"/v1/score",
    "tokenize": b"/v1/tokenize",
    "detokenize": b"/v1/detokenize",
    "generate": b"/generate",
    "invocations": b"/invocations",
    "api_chat": b"/api/chat",
    "api_generate": b"/api/generate",
    "api_show": b"/api/show",
}
GETS = {"api_tags": b"/api/tags", "root": b"/"}
ADMIN = [
    "/abort_request", "/flush_cache", "/clear_hicache_storage_backend", "/start_profile",
    "/stop_profile", "/update_weights", "/update_weights_from_disk",
    "/update_weights_from_tensor", "/update_weights_from_distributed",
    "/update_weights_from_ipc", "/init_weights_update_group", "/destroy_weights_update_group",
    "/get_weights_by_name", "/update_weight_version", "/release_memory_occupation",
    "/resume_memory_occupation", "/weights_checker", "/slow_down", "/load_lora_adapter",
    "/unload_lora_adapter", "/open_session", "/close_session", "/configure_logging",
    "/set_internal_state", "/pause_generation", "/continue_generation", "/encode", "/classify",
    "/parse_function_call", "/separate_reasoning", "/freeze_gc", "/dumper", "/get_server_info",
    "/server_info", "/get_internal_state", "/metrics", "/docs", "/openapi.json", "/v1/realtime",
    "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/audio/transcriptions",
    "/v1/files", "/v1/batches", "/vertex_generate", "/health_generate", "/v1/loads",
    "/v1/models", "/start_expert_distribution_record", "/stop_expert_distribution_record",
    "/dump_expert_distribution_record", "/hicache/storage-backend", "/api/pull", "/api/delete",
    "/api/create", "/api/push", "/api/embed",
]  # fmt: skip


def find(target: bytes) -> Route | None:
    """The route that a request for this is relayed by, as it is found when one comes."""
    found = []
    for method in (b"POST", b"GET"):
        incoming = Incoming(method, target, [(b"host", b"x")])
        incoming.check(HeadLimits(32_768, 100, 8192), TABLE)
        found.append(incoming.route)
    assert None in found
    return found[0] or found[1]


def test_the_table_is_closed() -> None:
    """The routes are exactly these, each with its own name, path and method."""
    assert {r.name: r.path for r in ROUTES if r.method == b"POST"} == POSTS
    assert {r.name: r.path for r in ROUTES if r.method == b"GET"} == GETS
    assert len(ROUTES) == len(POSTS) + len(GETS)
    assert set(ROUTES) == {*OPENAI_ROUTES, *OTHER_ROUTES, *GET_ROUTES}


def test_what_is_asked_of_a_body() -> None:
    """Every POST has a JSON object for a body, and only responses can name stored state."""
    assert {route.name for route in ROUTES if not route.json} == set(GETS)
    assert {route.name for route in ROUTES if route.stateful} == {"responses"}


@pytest.mark.parametrize("route", OPENAI_ROUTES, ids=lambda route: route.name)
@pytest.mark.parametrize("slash", [b"", b"/"])
def test_an_openai_path_has_four_spellings(route: Route, slash: bytes) -> None:
    """With or without /v1, with or without one slash at the end, it is the same route."""
    path = POSTS[route.name]
    assert find(path + slash) is route
    assert find(path.removeprefix(b"/v1") + slash) is route
    assert find(path + slash + b"?api-version=1&a=/v1/models") is route


@pytest.mark.parametrize("route", [*OTHER_ROUTES, *GET_ROUTES], ids=lambda route: route.name)
def test_other_paths_have_no_v1(route: Route) -> None:
    """Engine and Ollama paths are relayed as they are, and not below /v1."""
    path = route.path
    assert find(path) is route
    assert find(path.rstrip(b"/") + b"/") is route
    assert find(b"/v1" + path) is None
    assert find(b"/v1" + path.rstrip(b"/")) is None


@pytest.mark.parametrize("path", ADMIN)
@pytest.mark.parametrize("spelling", ["{}", "{}/", "/v1{}", "{}?x=1", "/generate/..{}"])
def test_an_engines_own_paths_are_never_relayed(path: str, spelling: str) -> None:
    """Nothing that changes or shows the inside of an engine is in the table."""
    assert find(spelling.format(path).encode()) is None


@pytest.mark.parametrize(
    "target",
    [
        b"",
        b"*",
        b"?",
        b"v1/completions",
        b"//v1/completions",
        b"//evil/v1/completions",
        b"/v1//completions",
        b"/v1/completions//",
        b"/V1/completions",
        b"/v1/Completions",
        b"/v1/completions/x",
        b"/v1/completions;x",
        b"/v1/completions#x",
        b"/v1/completions%20",
        b"/v1/completions%3fx",
        b"/v1/completions%00",
        b"/v1/completions ",
        b"/v1/completions\t",
        b"/v1\\completions",
        b"/v1/./completions",
        b"/v1/x/../completions",
        b"/v1/../flush_cache",
        b"/v1/%2e%2e/update_weights_from_disk",
        b"/v1/completions/../../flush_cache",
        b"/v1/%63ompletions",
        b"/v1%2fcompletions",
        b"/v1/v1/completions",
        b"/v1",
        b"/v1/",
        b"/api",
        b"http://evil/v1/files",
        b"evil/v1/completions",
    ],
)
def test_a_path_is_looked_up_as_it_came(target: bytes) -> None:
    """Nothing is decoded, normalised or guessed: other spellings are no route."""
    assert find(target) is None


def test_an_authority_in_the_target_is_dropped() -> None:
    """The absolute form leads to the same route, whomever it names."""
    assert find(b"http://evil/v1/completions?x=1") is TABLE[b"/v1/completions"]


@given(target=st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
@settings(deadline=None)
def test_a_backend_is_only_asked_for_a_constant(target: bytes) -> None:
    """Whatever the target, what a backend is asked for is one of the constants above."""
    route = find(target)
    assert route is None or route.path in {*POSTS.values(), *GETS.values()}


def test_no_path_of_the_table_leads_elsewhere() -> None:
    """Every spelling in the table is its own route's path, give or take /v1 and one slash."""
    for spelling, route in TABLE.items():
        bare = route.path.rstrip(b"/")
        assert spelling.rstrip(b"/") in {bare, bare.removeprefix(b"/v1")}
        assert spelling.count(b"//") == 0
