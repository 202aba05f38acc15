"""Cases of the API's surface: base URLs, slashes, browsers and other methods."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from router.config import SettingsError, load_settings
from router.load import Role
from tests.cases.common import body, pair
from tests.raw_client import CHAT, COMPLETIONS, ask, get, post
from tests.scripted_backend import answer_ok, scripted_backend
from tests.stack import run


def test_A1_every_form_of_a_base_url_leads_to_one_path() -> None:
    """With or without a slash, /v1 or a prefix, and clients with and without /v1: the exact path."""

    async def work() -> None:
        for suffix, prefix in (
            ("", ""), ("/", ""), ("/v1", ""), ("/v1/", ""), ("/api/v3", "/api/v3"),
        ):  # fmt: skip
            async with scripted_backend() as spec, scripted_backend() as base:
                urls: dict[str, Any] = {
                    "speculative": spec.url + suffix, "baseline": base.url + suffix,
                }  # fmt: skip
                async with pair(**urls) as both:
                    both.spec, both.base = spec, base
                    for role, path in itertools.product(Role, (CHAT, COMPLETIONS)):
                        for asked in (path, path.removeprefix("/v1")):
                            for stream in (True, False):
                                chosen, _ = both.on(role, answer_ok)
                                reply = await both.ask(body(stream=stream), asked)
                                assert reply.status == 200
                                # Probes of a backend with a prefix are recorded, too.
                                posts = [c for c in chosen.calls if c.head.startswith(b"POST")]
                                assert [c.path for c in posts] == [(prefix + path).encode()]

    run(work, 20)
    for bad in ("http://h/a//b", "http://h/../x", "http://h?x=1", "ftp://h"):
        with pytest.raises(SettingsError, match="speculative = "):
            load_settings(
                {"speculative": bad, "baseline": "http://h:1", "threshold": 1}, environ={}
            )


def test_A2_a_trailing_slash_is_served_and_never_redirected() -> None:
    """`/v1/chat/completions/` is the route itself, `/v1/models/` too; two slashes are a 404."""

    async def work() -> None:
        async with pair(api_keys="k") as both:
            lines = ("authorization: Bearer k", "x-forwarded-proto: https")
            for role, path in itertools.product(Role, (CHAT, COMPLETIONS)):
                for stream in (True, False):
                    chosen, _ = both.on(role, answer_ok)
                    reply = await both.ask(body(stream=stream), path + "/", *lines)
                    assert (reply.status, reply.header("location")) == (200, None)
                    assert [call.path for call in chosen.calls] == [path.encode()]
                    assert b'"messages"' in chosen.calls[0].body
            reply = await ask(both.port, get("/v1/models/", *lines))
            assert (reply.status, reply.header("location")) == (200, None)
            for path in ("/v1/chat/completions//", "/health//", "/v1/nothing/"):
                reply = await both.ask(body(), path, *lines)
                assert (reply.status, reply.error["code"]) == (404, "not_found")

    run(work, 10)


PREFLIGHT = (
    "origin: https://chat.example", "access-control-request-method: POST",
    "access-control-request-headers: authorization, content-type, x-stainless-os",
)  # fmt: skip


def cors(reply: Any) -> dict[str, str]:
    """The headers that browsers look for."""
    return {
        name.decode(): value.decode()
        for name, value in reply.headers
        if name.startswith(b"access-control-")
    }


def test_A4_browsers_are_answered_or_not_at_all() -> None:
    """With CORS on, a preflight needs no key and errors can be read; off, no such header is sent."""

    async def work() -> None:
        async with pair(api_keys="k", cors_origin="https://chat.example") as both:
            for role, path in itertools.product(Role, (CHAT, COMPLETIONS)):
                both.on(role, answer_ok)
                reply = await ask(both.port, get(path, *PREFLIGHT, method="OPTIONS"))
                assert reply.status in {200, 204}
                told = cors(reply)
                assert told["access-control-allow-origin"] == "https://chat.example"
                assert "POST" in told["access-control-allow-methods"]
                allowed = told["access-control-allow-headers"].lower()
                assert all(name in allowed for name in ("authorization", "x-stainless-os"))
                for key, status in (("wrong", 401), ("k", 200)):
                    for stream in (True, False):
                        line = f"authorization: Bearer {key}"
                        reply = await both.ask(body(stream=stream), path, line, PREFLIGHT[0])
                        assert reply.status == status
                        origin = cors(reply)["access-control-allow-origin"]
                        assert origin == "https://chat.example"
                reply = await both.ask(body(), path, "authorization: Bearer k", "origin: https://x")
                assert "access-control-allow-origin" not in cors(reply)
        async with pair(api_keys="k") as both:
            for raw in (
                get(CHAT, *PREFLIGHT, method="OPTIONS"),
                post(body(), CHAT, (PREFLIGHT[0], "authorization: Bearer wrong")),
                post(body(), CHAT, (PREFLIGHT[0], "authorization: Bearer k")),
            ):
                assert cors(await ask(both.port, raw)) == {}

    run(work, 10)


def test_A5_other_methods_and_paths_are_answered_in_shape() -> None:
    """HEAD has no body, a wrong method is 405 with Allow, an unknown path 404 in JSON."""

    async def work() -> None:
        async with pair() as both:
            for role in Role:
                both.on(role, answer_ok)
                assert (await both.ask(body())).status == 200  # it is known to live
                for path in ("/health", "/v1/models"):
                    reply = await ask(both.port, get(path, method="HEAD"), head_only=True)
                    assert (reply.status, reply.body, reply.rest) == (200, b"", b"")
                for path in (CHAT, COMPLETIONS):
                    for method in ("PUT", "GET", "DELETE", "PATCH"):
                        reply = await ask(both.port, get(path, method=method))
                        assert (reply.status, reply.header("allow")) == (405, "POST")
                        assert reply.error["code"] == "method_not_allowed"
                reply = await ask(both.port, get("/favicon.ico"))
                assert (reply.status, reply.error["code"]) == (404, "not_found")
                assert reply.header("content-type") == "application/json"

    run(work, 10)
