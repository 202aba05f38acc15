"""Requests that pages of other sites have a browser make: refused, unless wanted; others never."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.guard import HeadFacts
from router.incoming import Incoming
from router.metrics import Outcome, Rejection
from router.pages import Pages, from_elsewhere
from tests.raw_client import ask, get, post
from tests.scripted_backend import Call, ScriptedBackend, response, scripted_backend
from tests.stack import Stack, run, running_router

BODY: Final = {"model": "m", "messages": []}
OTHERS: Final = "https://evil.example"


@contextlib.asynccontextmanager
async def stage(**settings: Any) -> AsyncIterator[tuple[Stack, ScriptedBackend]]:
    """A router before two backends that answer; all that is asked goes to the one given."""

    async def answer(call: Call) -> None:
        await call.send(response())

    async with (
        scripted_backend(answer) as spec,
        scripted_backend() as base,
        running_router(spec.url, base.url, **settings) as stack,
    ):
        yield stack, spec


@pytest.mark.parametrize(
    ("site", "origin", "host", "elsewhere"),
    [
        (None, None, b"127.0.0.1:8000", False),  # no browser
        (b"same-origin", b"https://chat.example", b"127.0.0.1:8000", False),  # a proxy's Host
        (b"none", None, b"h", False),
        (b"same-site", b"http://localhost:3000", b"localhost:8000", True),
        (b"cross-site", None, b"h", True),
        (b"cross-site", b"http://h", b"h", True),
        (b" Same-Origin\t", b"http://x", b"h", False),
        (b"", None, b"h", True),  # what nobody knows is no permission
        (None, b"http://h:8000", b"h:8000", False),
        (None, b"http://H:8000", b"h:8000", False),
        (None, b"http://h", b"h:80", False),
        (None, b"https://h", b"h", False),
        (None, b"https://h:443", b"h", False),
        (None, b"http://[::1]:8000", b"[::1]:8000", False),
        (None, b"http://h:8001", b"h:8000", True),
        (None, b"http://evil", b"h", True),
        (None, b"http://h.evil", b"h", True),
        (None, b"http://h", b"", True),
        (None, b"null", b"h", True),
        (None, b"vscode-webview://x", b"h", False),
        (None, b"chrome-extension://x", b"h", False),
    ],
)
def test_who_is_elsewhere(
    site: bytes | None, origin: bytes | None, host: bytes, elsewhere: bool
) -> None:
    """Fetch Metadata decides where it is there, else an origin of the web that is not the Host's."""
    assert from_elsewhere(site, origin, host) is elsewhere


@given(st.binary(max_size=20), st.none() | st.binary(max_size=20), st.binary(max_size=20))
def test_any_bytes(site: bytes, origin: bytes | None, host: bytes) -> None:
    """Whatever the headers hold, only two words are permission where Fetch Metadata is there."""
    own = site.strip(b" \t").lower() in {b"same-origin", b"none"}
    assert from_elsewhere(site, origin, host) is not own
    web = origin is not None and origin.strip(b" \t").lower().startswith((b"http", b"null"))
    assert web or not from_elsewhere(None, origin, host)


@pytest.mark.parametrize(
    ("origins", "keyed", "origin", "refused"),
    [
        ((), False, OTHERS, True),
        ((), True, OTHERS, False),
        (("*",), False, OTHERS, False),
        ((OTHERS,), False, OTHERS, False),
        (("https://chat.example",), False, OTHERS, True),
        (("https://chat.example",), False, None, True),
    ],
)
def test_whose_pages_may(
    origins: tuple[str, ...], keyed: bool, origin: str | None, refused: bool
) -> None:
    """Pages of allowed origins may ask, and anybody's where a key is wanted, which they cannot know."""
    incoming = Incoming(b"POST", b"/v1/completions")
    incoming.facts = HeadFacts(origin=origin.encode() if origin else None, foreign=True)
    assert (Pages(origins, keyed=keyed).error(incoming) is not None) is refused
    incoming.method = b"GET"
    assert Pages(origins, keyed=keyed).error(incoming) is None


@pytest.mark.parametrize(
    "headers",
    [
        ("sec-fetch-site: cross-site", "sec-fetch-mode: no-cors", "content-type: text/plain"),
        ("Sec-Fetch-Site: same-site", "Origin: http://localhost:3000"),
        ("origin: https://evil.example", "content-type: text/plain;charset=UTF-8"),
        ("Origin: null", "content-type: application/x-www-form-urlencoded"),
    ],
)
def test_simple_requests_of_pages(headers: tuple[str, ...]) -> None:
    """A cross-site POST is a 403 in OpenAI's shape, is counted and logged, and reaches no backend."""

    async def work() -> None:
        async with stage() as (stack, spec):
            for path in ("/v1/chat/completions", "/generate", "/v1/tokenize", "/nope"):
                reply = await ask(stack.router.port, post(BODY, path, headers))
                assert reply.status == 403
                assert reply.error["code"] == "cross_site"
                assert reply.error["type"] == "invalid_request_error"
                assert "--cors-origin" in reply.error["message"]
                assert not [name for name, _ in reply.headers if name.startswith(b"access-control")]
            assert spec.calls == []
            metrics = stack.relay.metrics
            assert metrics.rejections[Rejection.CROSS_SITE] == 4
            assert stack.in_flight() == (0, 0)
            page = await stack.client.get(f"{stack.admin_url}/metrics")
            assert 'crossover_rejected_total{reason="cross_site"} 4.0' in page.text
        lines = [json.loads(line) for line in b"".join(stack.lines).splitlines()]
        line = next(line for line in lines if line.get("route") == "chat_completions")
        assert (line["status"], line["error"]) == (403, "cross_site")
        assert line["outcome"] == Outcome.REJECTED

    run(work, 20)


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("user-agent: curl/8", "content-type: text/plain"),
        ("sec-fetch-site: same-origin", "origin: https://chat.example"),
        ("sec-fetch-site: none",),
        ("origin: http://proxy",),  # what the raw client says as Host
        ("origin: http://PROXY:80",),
        ("origin: vscode-webview://1x",),
    ],
)
def test_other_clients_do_not_notice(headers: tuple[str, ...]) -> None:
    """Without these headers, or with those of the listener's own pages, all is relayed."""

    async def work() -> None:
        async with stage() as (stack, spec):
            for _ in range(3):  # also when the head is known
                assert (await ask(stack.router.port, post(BODY, headers=headers))).status == 200
            assert len(spec.calls) == 3

    run(work, 20)


def test_pages_of_others_may_look() -> None:
    """What costs nothing is answered: health, models, a preflight, which allows nothing."""
    headers = ("sec-fetch-site: cross-site", f"origin: {OTHERS}")

    async def work() -> None:
        async with stage() as (stack, _):
            for path in ("/health", "/", "/ready"):
                assert (await ask(stack.router.port, get(path, *headers))).status != 403
            reply = await ask(stack.router.port, get("/v1/completions", *headers, method="OPTIONS"))
            assert not [name for name, _ in reply.headers if name.startswith(b"access-control")]

    run(work, 20)


def test_the_known_head_of_a_page() -> None:
    """On one connection a page's request is refused between others, whose heads stay known."""

    async def work() -> None:
        async with stage() as (stack, spec):
            own, theirs = post(BODY), post(BODY, headers=("sec-fetch-site: cross-site",))
            for raw, status in ((own, 200), (own, 200), (theirs, 403), (theirs, 403), (own, 200)):
                assert (await ask(stack.router.port, raw)).status == status
            assert len(stack.relay.known_requests) == 1
            assert len(spec.calls) == 3
            both = await ask(stack.router.port, own + theirs)
            assert both.status == 200
            assert both.rest.startswith(b"HTTP/1.1 403 ")
            early = theirs[: theirs.index(b"\r\n\r\n") + 4].replace(b": 29", b": 2900")
            assert (await ask(stack.router.port, early)).status == 403  # before there is a body

    run(work, 20)


@pytest.mark.parametrize("settings", [{"cors_origin": OTHERS}, {"cors_origin": "*"}])
def test_pages_that_are_wanted(settings: dict[str, str]) -> None:
    """A page of an allowed origin is served and may read the answer."""

    async def work() -> None:
        async with stage(**settings) as (stack, spec):
            headers = ("sec-fetch-site: cross-site", f"origin: {OTHERS}")
            for _ in range(2):
                reply = await ask(stack.router.port, post(BODY, headers=headers))
                assert reply.status == 200
                assert reply.header("access-control-allow-origin") in {OTHERS, "*"}
            assert len(spec.calls) == 2
            other = ("sec-fetch-site: cross-site", "origin: https://other.example")
            status = (await ask(stack.router.port, post(BODY, headers=other))).status
            assert status == (200 if settings["cors_origin"] == "*" else 403)

    run(work, 20)


def test_keys_are_enough() -> None:
    """With keys a page is asked for one, as everybody is."""

    async def work() -> None:
        async with stage(api_keys="k") as (stack, spec):
            headers = ("sec-fetch-site: cross-site", f"origin: {OTHERS}")
            assert (await ask(stack.router.port, post(BODY, headers=headers))).status == 401
            keyed = (*headers, "authorization: Bearer k")
            assert (await ask(stack.router.port, post(BODY, headers=keyed))).status == 200
            assert len(spec.calls) == 1

    run(work, 20)


def test_the_admin_listener_has_its_own_rule() -> None:
    """There a change needs the admin key, and a page that has it is not asked where it is from."""

    async def work() -> None:
        async with stage(admin_key="a") as (stack, _):
            headers = ("sec-fetch-site: cross-site", f"origin: {OTHERS}")
            drain = "/backends/baseline/drain"
            port = stack.router.admin_port
            assert (await ask(port, post(b"", drain, headers))).status == 401
            keyed = (*headers, "authorization: Bearer a")
            assert (await ask(port, post(b"", drain, keyed))).status == 200

    run(work, 20)


# ---------------------------------------------------------------------- a real browser

_SEND: Final = """async ([url, mode, type]) => {
  const body = JSON.stringify({model: "m", messages: []});
  const headers = {"content-type": type};
  try {
    const answer = await fetch(url, {method: "POST", mode, headers, body});
    return [answer.type, answer.status];
  } catch (error) { return ["error", 0]; }
}"""
_FORM: Final = """async (url) => {
  const frame = document.createElement("iframe");
  frame.name = "sink";
  document.body.append(frame);
  const form = document.createElement("form");
  Object.assign(form, {method: "POST", action: url, enctype: "text/plain", target: "sink"});
  const field = document.createElement("input");
  Object.assign(field, {name: '{"model":"m","messages":[],"x":"', value: '"}'});
  form.append(field);
  document.body.append(form);
  await new Promise((done) => { frame.onload = done; form.submit(); });
}"""


@contextlib.asynccontextmanager
async def somebodys_page() -> AsyncIterator[int]:
    """The port of another server of this machine, with an empty page."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            page = b"<!doctype html><title>x</title><body>"
            writer.write(response(page).replace(b"application/json", b"text/html"))
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("playwright") is None, reason="playwright is not installed"
)
def test_a_real_browser() -> None:
    """Chromium's simple requests and forms of other sites take no GPU time; wanted pages are served."""
    from tests.status_page.browser import find_chromium, running_browser

    if find_chromium() is None:
        pytest.skip("no chromium: apt-get install chromium")

    async def work() -> None:
        async with running_browser() as browser, somebodys_page() as port:
            for host in ("localhost", "127.0.0.1"):  # of another site, and of the same
                origin = f"http://{host}:{port}"
                page = await browser.new_page()
                await page.goto(origin)
                async with stage() as (stack, spec):
                    url = f"{stack.url}/v1/chat/completions"
                    got = await page.evaluate(_SEND, [url, "no-cors", "text/plain"])
                    assert got == ["opaque", 0]  # it was sent, and nothing can be read of it
                    await page.evaluate(_FORM, url)
                    assert stack.relay.metrics.rejections[Rejection.CROSS_SITE] == 2
                    # A JSON body is asked for first, and refused there.
                    got = await page.evaluate(_SEND, [url, "cors", "application/json"])
                    assert got == ["error", 0]
                    assert spec.calls == []
                    own = await browser.new_page()
                    await own.goto(f"{stack.url}/health")
                    got = await own.evaluate(_SEND, [url, "cors", "application/json"])
                    assert got == ["basic", 200]
                    assert len(spec.calls) == 1
                async with stage(cors_origin=origin) as (stack, spec):
                    url = f"{stack.url}/v1/chat/completions"
                    got = await page.evaluate(_SEND, [url, "cors", "application/json"])
                    assert got == ["cors", 200]
                    assert len(spec.calls) == 1

    run(work, 55)
