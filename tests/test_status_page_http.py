"""The status page and the stream of decisions over HTTP, without a browser."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.admin_page import StatusPage
from router.app import ADMIN_SECONDS
from router.decision_feed import MAX_LISTENERS
from router.policy import Reason
from tests.scripted_backend import scripted_backend
from tests.stack import Stack, run, running_router, until

LIMIT_S = 20.0
PICTURES = Path(__file__).resolve().parent.parent / "deploy" / "pictures"
KEY = {"authorization": "Bearer sk-operator"}


@contextlib.asynccontextmanager
async def stage(**settings: Any) -> AsyncIterator[Stack]:
    async with (
        scripted_backend() as spec,
        scripted_backend() as base,
        running_router(spec.url, base.url, **settings) as stack,
    ):
        yield stack


class Stream:
    """A listener: its events as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.id = ""
        self.comments: list[str] = []
        self.ended = False
        self._lines = response.aiter_lines()

    async def event(self) -> dict[str, Any]:
        """The next event's data."""
        data = ""
        async with asyncio.timeout(5):
            async for line in self._lines:
                if line.startswith("id: "):
                    self.id = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    data = line.removeprefix("data: ")
                elif not line and data:
                    found: dict[str, Any] = json.loads(data)
                    return found
        self.ended = True
        return {}

    async def requests(self, count: int) -> list[str]:
        """The next so many request ids, in as many events as they come in."""
        found: list[str] = []
        while len(found) < count:
            found += [item["request_id"] for item in (await self.event())["items"]]
        return found


@contextlib.asynccontextmanager
async def listening(stack: Stack, **headers: str) -> AsyncIterator[Stream]:
    timeout = httpx.Timeout(5.0)
    async with (
        httpx.AsyncClient(base_url=stack.admin_url, trust_env=False, timeout=timeout) as client,
        client.stream("GET", "/events", headers=headers) as response,
    ):
        yield Stream(response)


async def ask(stack: Stack, count: int, name: str) -> list[str]:
    """Make decisions; their request ids."""
    ids = [f"{name}-{number}" for number in range(count)]
    body = {"model": "m", "messages": []}
    for each in ids:
        await stack.client.post("/v1/chat/completions", json=body, headers={"x-request-id": each})
    return ids


async def get(stack: Stack, path: str, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=stack.admin_url, trust_env=False) as client:
        return await client.get(path, **more)


# --------------------------------------------------------------------------- the page


def test_the_page_is_open_and_tells_nothing() -> None:
    """Even where a key is configured the page itself comes without one, and holds no data."""

    async def work() -> None:
        async with stage(admin_key="sk-operator") as stack:
            response = await get(stack, "/")
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/html; charset=utf-8"
            for secret in ("sk-operator", "127.0.0.1", str(stack.router.port)):
                assert secret not in response.text
            assert (await get(stack, "/status")).status_code == 401
            assert (await get(stack, "/openapi.json")).status_code == 401

    run(work, LIMIT_S)


def test_the_page_may_do_nothing_but_ask_this_listener() -> None:
    """Its policy names the digests of its own script and style, and no other source of anything."""

    async def work() -> None:
        async with stage() as stack:
            response = await get(stack, "/")
            policy = dict(
                part.strip().split(" ", 1)
                for part in response.headers["content-security-policy"].split(";")
            )
            for kind in ("script", "style"):
                (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", response.text, re.DOTALL)
                digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
                assert policy.pop(f"{kind}-src") == f"'sha256-{digest}'"
            assert policy == {
                "default-src": "'none'", "connect-src": "'self'", "img-src": "data:",
                "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
                "require-trusted-types-for": "'script'", "trusted-types": "'none'",
            }  # fmt: skip
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
            assert response.headers["x-frame-options"] == "DENY"

    run(work, LIMIT_S)


def test_the_page_is_one_file_without_inline_handlers() -> None:
    """No address of another place, no style or handler in a tag, no way from text to markup."""

    async def work() -> None:
        async with stage() as stack:
            text = (await get(stack, "/")).text
            places = set(re.findall(r"https?://[^\s'\"`<]+", text))
            assert places == {"http://www.w3.org/2000/svg"}
            markup = re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL)
            assert re.findall(r"<[^>]*\s(?:on\w+|style|src)\s*=", markup) == []
            for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
                assert way not in text
            assert "localStorage" not in text

    run(work, LIMIT_S)


def luminance(colour: str) -> float:
    """Relative luminance, by WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_text_has_enough_contrast(theme: int) -> None:
    """Each colour of text is at 4.5 or more on every ground it stands on, the focus ring at 3."""

    async def work() -> None:
        async with stage() as stack:
            text = (await get(stack, "/")).text
            roots = re.findall(r":root\{(.*?)\}", text, re.DOTALL)
            assert len(roots) == 2
            found = dict(re.findall(r"--([\w-]+):(#[0-9a-f]{6})", roots[theme]))
            inks = ("ink", "soft", "spec", "base", "good", "warn", "bad")
            pairs = [(ink, ground) for ink in inks for ground in ("page", "card")]
            pairs += [("ink", "well"), ("spec", "well"), ("base", "well"), ("bad", "well")]
            pairs += [("on-button", "button")]
            low = {
                pair: round(contrast(found[pair[0]], found[pair[1]]), 2)
                for pair in pairs
                if contrast(found[pair[0]], found[pair[1]]) < 4.5
            }
            assert low == {}
            assert min(contrast(found["focus"], found[g]) for g in ("page", "card")) >= 3

    run(work, LIMIT_S)


def test_contrast_is_that_of_wcag() -> None:
    """Black on white is 21, and #767676 on white the well-known 4.54."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


def test_every_reason_has_words() -> None:
    """The page says each of the closed set of reasons in words, and knows no other."""
    text = StatusPage().html
    (words,) = re.findall(r"const WORDS = \{(.*?)\};", text, re.DOTALL)
    assert set(re.findall(r"(\w+): \"", words)) == {reason.value for reason in Reason}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pictures_are_small(scheme: str) -> None:
    """Both pictures are there, and neither makes the repository heavy."""
    picture = PICTURES / f"status-{scheme}.png"
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    assert len(content) < 200_000


# --------------------------------------------------------------------------- the stream


def test_decisions_are_told_as_they_happen() -> None:
    """A listener hears of every decision and every change, with the words of /decisions."""

    async def work() -> None:
        async with stage(admin_key="sk-operator") as stack, listening(stack, **KEY) as stream:
            assert stream.response.headers["content-type"] == "text/event-stream"
            assert stream.response.headers["cache-control"] == "no-store"
            assert await stream.event() == {"items": [], "skipped": 0}
            ids = await ask(stack, 3, "live")
            assert await stream.requests(3) == ids
            async with httpx.AsyncClient(base_url=stack.admin_url, trust_env=False) as client:
                await client.post("/backends/baseline/drain", headers=KEY)
                (change,) = (await stream.event())["items"]
                listed = (await client.get("/decisions", headers=KEY)).json()["items"]
            # Unix time is worked out at each look, from two clocks that are read one after the other.
            assert change == listed[0] | {"time": pytest.approx(listed[0]["time"], abs=1.0)}
            assert (change["kind"], change["event"], change["detail"]) == (
                "event", "drain", "baseline",
            )  # fmt: skip

    run(work, LIMIT_S)


def test_many_decisions_are_few_events() -> None:
    """The number of events follows the clock and not the traffic."""

    async def work() -> None:
        async with stage() as stack, listening(stack) as stream:
            await stream.event()
            start = asyncio.get_running_loop().time()
            ids = await ask(stack, 60, "many")
            found: list[str] = []
            events = 0
            while len(found) < len(ids):
                found += [item["request_id"] for item in (await stream.event())["items"]]
                events += 1
            took = asyncio.get_running_loop().time() - start
            assert found == ids
            assert events <= took / 0.25 + 1

    run(work, LIMIT_S)


def test_a_listener_goes_on_where_it_was() -> None:
    """With Last-Event-ID it gets what it missed, and nothing twice."""

    async def work() -> None:
        async with stage() as stack:
            async with listening(stack) as stream:
                await stream.event()
                await ask(stack, 2, "before")
                assert len(await stream.requests(2)) == 2
                last = stream.id
            ids = await ask(stack, 4, "missed")
            async with listening(stack, **{"last-event-id": last}) as stream:
                assert await stream.requests(4) == ids
            async with listening(stack, **{"last-event-id": "other-1"}) as stream:
                assert len(await stream.requests(6)) == 6

    run(work, LIMIT_S)


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer no"}, {"x-api-key": "sk-operator"}]
)
def test_the_stream_needs_the_key(headers: dict[str, str]) -> None:
    """As everything that tells something does; a key in the address is none."""

    async def work() -> None:
        async with stage(admin_key="sk-operator") as stack:
            response = await get(stack, "/events?key=sk-operator", headers=headers)
            assert response.status_code == 401
            assert stack.router.live.feed.listening == 0

    run(work, LIMIT_S)


def test_listeners_are_bounded_and_their_places_come_back() -> None:
    """One too many is told to come back later; who leaves makes room."""

    async def work() -> None:
        async with stage() as stack, contextlib.AsyncExitStack() as others:
            for _ in range(MAX_LISTENERS - 1):
                await others.enter_async_context(listening(stack))
            async with listening(stack):
                refused = await get(stack, "/events")
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "5"
                assert refused.json()["error"]["code"] == "too_many_listeners"
            await until(lambda: stack.router.live.feed.listening == MAX_LISTENERS - 1)
            async with listening(stack) as stream:
                assert stream.response.status_code == 200

    run(work, LIMIT_S)


def test_a_listener_that_does_not_read_is_dropped() -> None:
    """What waits for it is let go at once, and its connection with the write timeout."""

    async def work() -> None:
        async with stage(write_timeout=0.3) as stack:
            host, port = "127.0.0.1", stack.router.admin_port
            reader, writer = await asyncio.open_connection(host, port, limit=1024)
            writer.write(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            feed = stack.router.live.feed
            await until(lambda: feed.listening == 1)
            (listener,) = feed._listeners
            for _ in range(400):
                stack.relay.decisions.event(stack.relay.clock(), "noise", "x" * 100_000)
                feed.tick(stack.relay.clock())
                await asyncio.sleep(0)
                if not listener.open:
                    break
            else:
                raise AssertionError("it was never dropped")
            assert not listener._pending
            await until(lambda: feed.listening == 0)
            assert (await ask(stack, 1, "after")) == ["after-0"]
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            del reader

    run(work, LIMIT_S)


def test_the_stream_ends_with_the_router() -> None:
    """At a stop the stream ends in order, and the router does not wait for listeners to leave."""

    async def work() -> None:
        async with contextlib.AsyncExitStack() as clients:
            async with stage() as stack:
                stream = await clients.enter_async_context(listening(stack))
                await stream.event()
                reading = asyncio.create_task(stream.event())
                start = asyncio.get_running_loop().time()
            assert asyncio.get_running_loop().time() - start < ADMIN_SECONDS
            assert await reading == {}
            assert stream.ended

    run(work, LIMIT_S)


def test_the_path_moves_with_the_sweep() -> None:
    """A running router keeps where it was, so that a page opened later can show it."""

    async def work() -> None:
        async with stage() as stack:
            await until(lambda: len(stack.router.live.path.samples()) >= 1)
            status = (await get(stack, "/status")).json()
            assert status["path"][0][1:] == [0, 0]
            assert abs(status["path"][0][0] - status["time"]) < 5

    run(work, LIMIT_S)
