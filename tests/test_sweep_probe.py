"""What a probe makes of servers: real ones as simulated, old ones, silent ones, broken ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from loadtest.engine import EngineConfig, running_engine
from loadtest.prompts import Tokenizer
from loadtest.sweep_probe import ServerProbe, public_url
from loadtest.sweep_schema import Server, ServerFailedError, SweepError
from router.telemetry import Source
from tests.engines import looped
from tests.sweeps import BASE, SPEC

SECRET = "sk-secret"


@looped
async def test_facts_of_a_speculative_server() -> None:
    """Model, draft, version, GPU, cap and flags are what the server says, without its secrets."""
    config = EngineConfig.quick(SPEC, api_key=SECRET, max_running_requests=40)
    async with running_engine(config) as engine, ServerProbe(engine.url, key=SECRET) as probe:
        found = await probe.facts(SPEC, None)
    assert (found.model, found.model_path, found.draft) == (
        "sim-llama-8b", "/models/target", "/models/draft",
    )  # fmt: skip
    assert (found.engine_version, found.gpu, found.gpus) == ("0.5.17", "NVIDIA H200", 1)
    assert (found.cap, found.context_length, found.speculates) == (40, 8192, True)
    assert (found.tokens_per_word, found.tokens_per_mark) == (1.0, 2.0)  # a word is its token
    assert found.flags["speculative_eagle_topk"] == 1
    assert "api_key" not in found.flags
    assert SECRET not in repr(found)


@looped
async def test_facts_of_a_baseline_server() -> None:
    """A baseline has no draft and does not speculate; a given model leads."""
    async with (
        running_engine(EngineConfig.quick(BASE)) as engine,
        ServerProbe(engine.url + "/v1/") as probe,
    ):
        found = await probe.facts(BASE, "mine")
        told = await probe.look()
        page = await probe.page()
    assert (found.model, found.draft, found.speculates, found.cap) == ("mine", None, False, 4096)
    assert found.url == engine.url
    assert told is not None
    assert (told.running, told.queued, told.source) == (0, 0, Source.LOADS)
    assert page is not None
    assert page.accept.verify_calls is None
    assert page.prompt_tokens == 0


@looped
async def test_the_wrong_key() -> None:
    """A server that wants another key is a one-line error that says where to put it."""
    async with (
        running_engine(EngineConfig.quick(BASE, api_key=SECRET)) as engine,
        ServerProbe(engine.url, key="other") as probe,
    ):
        with pytest.raises(ServerFailedError, match="put it into LOADTEST_API_KEY"):
            await probe.facts(BASE, None)


@looped
async def test_nobody_there() -> None:
    """Where nothing listens the address is named."""
    async with running_engine(EngineConfig.quick(BASE)) as engine:
        url = engine.url
    async with ServerProbe(url) as probe:
        with pytest.raises(ServerFailedError, match=f"no server answers at {url}"):
            await probe.facts(BASE, None)


def asked(work: Callable[[ServerProbe], Any], routes: dict[str, Any]) -> Any:
    """Do this against a server that has only these routes, as path: JSON, bytes or status."""

    def answer(request: httpx.Request) -> httpx.Response:
        found = routes.get(request.url.path, 404)
        if isinstance(found, int):
            return httpx.Response(found)
        if isinstance(found, Exception):
            raise found
        return httpx.Response(200, content=found if isinstance(found, bytes) else json.dumps(found))

    async def run() -> Any:
        transport = httpx.MockTransport(answer)
        async with ServerProbe("http://server", transport=transport) as probe:
            return await work(probe)

    return asyncio.run(run())


def facts(routes: dict[str, Any]) -> Server:
    found = asked(lambda probe: probe.facts(SPEC, None), routes)
    assert isinstance(found, Server)
    return found


MODELS = {"/v1/models": {"data": [{"id": "m"}]}}


def test_a_server_that_has_only_models() -> None:
    """What is not said is unknown, and no zero."""
    found = facts(MODELS)
    assert found == Server(role=SPEC, url="http://server", model="m")


@pytest.mark.parametrize(
    "models", [404, {"data": []}, {"data": [{}]}, {"data": [3]}, {}, b"[1]", b"\xff", 500]
)
def test_a_server_without_a_model(models: Any) -> None:
    """Without a model's name there is nothing to ask for, and the way out is named."""
    with pytest.raises(ServerFailedError, match="give one by --model"):
        facts({"/v1/models": models})


def test_an_old_server() -> None:
    """Older spellings are found: /get_server_info, /get_load, /tokenize; the cap is the ranks' sum."""
    info = {
        "version": "0.5.9", "dp_size": 2, "max_running_requests": 100, "speculative_algorithm": None,
        "internal_states": [{"effective_max_running_requests_per_dp": 48}],
    }  # fmt: skip
    routes = MODELS | {
        "/get_server_info": info,
        "/get_load": [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2}],
        "/tokenize": {"count": 30},
    }
    found = facts(routes)
    assert (found.engine_version, found.cap, found.speculates) == ("0.5.9", 96, False)
    assert found.tokens_per_mark == 30.0
    assert found.tokens_per_word is not None

    async def twice(probe: ServerProbe) -> list[Any]:
        return [await probe.look(), await probe.look()]

    first, second = asked(twice, routes)
    assert (first.running, first.queued, first.source) == (3, 2, Source.GET_LOAD)
    assert second.source is Source.GET_LOAD


@pytest.mark.parametrize("broken", [b"{", b"[]", 500, {"count": "many"}, {"count": 0}])
def test_broken_answers_are_unknown(broken: Any) -> None:
    """An answer that makes no sense is no answer, wherever it comes from."""
    paths = ("/server_info", "/get_server_info", "/v1/loads", "/get_load", "/metrics",
             "/v1/tokenize", "/tokenize")  # fmt: skip
    found = facts(MODELS | dict.fromkeys(paths, broken))
    assert (found.cap, found.gpu, found.engine_version, found.tokens_per_word) == (None,) * 4
    assert asked(lambda probe: probe.look(), dict.fromkeys(paths, broken)) is None


def test_a_tokenizer_that_hangs_up() -> None:
    """A connection that breaks while counting leaves the count unknown."""
    routes = MODELS | {"/v1/tokenize": httpx.ReadError("gone")}
    assert asked(lambda probe: probe.tokenizer("m"), routes) is None
    assert asked(lambda probe: probe.page(), routes) is None
    good = asked(lambda probe: probe.tokenizer("m"), {"/v1/tokenize": {"count": 8}})
    assert isinstance(good, Tokenizer)
    assert good.mark == 8.0


def test_urls() -> None:
    """A URL is kept without /v1 and without a password; what is none is refused."""
    assert public_url("http://user:pw@host:1/v1/") == "http://host:1"
    assert public_url("https://host/base/v1") == "https://host/base"
    for bad in ("host:1", "ftp://host", "http://"):
        with pytest.raises(SweepError, match="looks like http"):
            public_url(bad)
