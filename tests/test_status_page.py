"""The status page in a real Chromium, in front of a running simulated pair."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import uvloop

from router.load import Role

if importlib.util.find_spec("playwright") is None:
    pytest.skip("playwright is not installed", allow_module_level=True)

from playwright.async_api import (
    Browser,
    Page,
    Response,
    Route,
)  # (after the look whether it is there)

from tests.status_page.browser import NARROW, WIDE, Watched, find_chromium, running_browser, watched
from tests.status_page.stage import Played, stage

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.slow,
]

LIMIT_S: Final = 50.0
KEY: Final = "sk-operator"
NOTHING: Final = "\N{EN DASH}"
UNAUTHORIZED: Final = (
    "console: Failed to load resource: the server responded with a status of 401 (Unauthorized)"
)
# What stands on the page at one moment, read in one go.
READ: Final = """() => {
  const text = (where) => document.querySelector(where)?.textContent ?? "";
  const field = (role, name) => text(`#${role} [data-field="${name}"]`);
  const server = (role) => Object.fromEntries(
    ["pill", "in_flight", "running", "queued", "Accept length", "Telemetry", "Address"].map((name) => [name, field(role, name)]));
  const dot = document.querySelector("#plane .dot");
  return {
    time: document.documentElement.dataset.statusTime,
    speculative: server("speculative"), baseline: server("baseline"),
    policy: text("#policy-now"), queue: text("#queue-now"),
    reasons: Object.fromEntries([...document.querySelectorAll("#reasons tr")].map((row) => [row.dataset.reason, [...row.cells].slice(1).map((cell) => Number(cell.textContent))])),
    rows: [...document.querySelectorAll("#rows tr")].map((row) => row.dataset.request),
    plane: text("#plane-text"), dot: dot ? [dot.getAttribute("cx"), dot.getAttribute("cy")] : null,
    dots: document.querySelectorAll("#plane .now-dot").length,
    curves: text("#curves-text"), marks: document.querySelectorAll("#curves .dot").length,
  };
}"""


class World:
    """One event loop and one browser for all tests here: a start of either takes a second."""

    def __init__(self, runner: asyncio.Runner, browser: Browser) -> None:
        self.browser = browser
        self._runner = runner

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                await work()

        self._runner.run(limited())


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        chromium = running_browser()
        browser = runner.run(_entered(chromium))
        yield World(runner, browser)
        runner.run(_left(chromium))


async def _entered(chromium: AbstractAsyncContextManager[Browser]) -> Browser:
    return await chromium.__aenter__()


async def _left(chromium: AbstractAsyncContextManager[Browser]) -> None:
    await chromium.__aexit__(None, None, None)


async def until_page(page: Page, condition: str) -> None:
    """Wait until something holds on the page; by polling, since its policy forbids `eval`."""
    for _ in range(400):
        if await page.evaluate(condition):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it never came to hold: {condition}")


async def log_in(tab: Watched) -> None:
    await tab.page.fill("#key", KEY)
    await tab.page.keyboard.press("Enter")
    await tab.shown()


class Heard:
    """Every /status that the page got, by its time."""

    def __init__(self, tab: Watched) -> None:
        self.by_time: dict[str, dict[str, Any]] = {}
        self._reading: set[asyncio.Task[None]] = set()
        tab.page.on("response", self._response)

    def _response(self, response: Response) -> None:
        if response.url.endswith("/status") and response.status == 200:
            task = asyncio.create_task(self._read(response))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)

    async def _read(self, response: Response) -> None:
        found = await response.json()
        self.by_time[f"{found['time']:.3f}"] = found

    async def at(self, shown: str) -> dict[str, Any]:
        """The one that the page showed; its body may come here a moment later than there."""
        time = f"{float(shown):.3f}"
        while time not in self.by_time:
            await asyncio.sleep(0.01)
        return self.by_time[time]


def in_flight(found: dict[str, Any]) -> int:
    return int(found["speculative"]["in_flight"]) + int(found["baseline"]["in_flight"])


async def read_when(page: Page, least: int, most: int) -> dict[str, Any]:
    """What stands on the page at the first moment that shows so many requests in flight."""
    for _ in range(400):
        found: dict[str, Any] = await page.evaluate(READ)
        if least <= in_flight(found) <= most:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("the page never showed it")


def check_equal(seen: dict[str, Any], told: dict[str, Any]) -> None:
    """What stands on the page is what /status said at that moment."""
    for backend in told["backends"]:
        card, telemetry = seen[backend["role"]], backend["telemetry"]
        assert card["pill"] == backend["health"]
        assert card["in_flight"] == str(backend["in_flight"])
        assert card["running"] == (str(telemetry["running"]) if telemetry["fresh"] else NOTHING)
        assert card["queued"] == (str(telemetry["queued"]) if telemetry["fresh"] else NOTHING)
        assert telemetry["source"] in card["Telemetry"]
        assert card["Address"] == backend["url"]
    spec, base = told["backends"]
    assert f"n = {spec['concurrency']} " in seen["plane"]
    assert f"m = {base['concurrency']} " in seen["plane"]
    assert f"K = {told['policy']['frontier']['threshold']:g};" in seen["policy"]
    assert seen["queue"].startswith(f"{told['queue']['in_flight']} of ")
    counts: dict[str, list[int]] = {}
    places = ["speculative", "baseline", None]
    for each in told["reasons"]:
        counts.setdefault(each["reason"], [0, 0, 0])[places.index(each["backend"])] = each["count"]
    assert seen["reasons"] == counts
    assert seen["marks"] == sum(1 for each in (spec, base) if each["concurrency"] > 0)


def test_values_move_and_equal_status_during_a_ramp(world: World, tmp_path: Path) -> None:
    """Through a ramp across the crossover the page shows what /status says, and nothing goes wrong."""

    async def work() -> None:
        async with (
            stage(tmp_path) as played,
            watched(world.browser, played.stack.admin_url) as tab,
        ):
            heard = Heard(tab)
            await tab.open()
            await tab.shown()
            seen = []
            before = 0
            for clients in (3, 9, 18):
                await played.load.turn(clients)
                found = await read_when(tab.page, before + 1, clients)
                check_equal(found, await heard.at(found["time"]))
                seen.append(found)
                before = clients
            assert len({(*f["dot"], f["plane"]) for f in seen}) == 3
            assert seen[0]["dots"] < seen[2]["dots"]
            assert "below_threshold" in seen[0]["reasons"]
            assert "at_threshold" not in seen[0]["reasons"]
            assert seen[2]["reasons"]["at_threshold"][1] > 0
            assert seen[0]["rows"][0] != seen[2]["rows"][0]
            known = {
                e.request_id for e in played.stack.relay.decisions.view() if e.kind == "decision"
            }
            assert set(seen[2]["rows"]) <= known
            assert "2.00 calibrated" in seen[2]["speculative"]["Accept length"]
            assert "tokens/s" in seen[2]["curves"]
            assert tab.faults == []
            assert {url.removeprefix(tab.url) for url in tab.asked} - {
                "/", "/status", "/events",
            } == {url for url in tab.asked if url.startswith("data:")}  # fmt: skip

    world.run(work)


def test_a_killed_server_is_down_with_its_advice(world: World, tmp_path: Path) -> None:
    """The page says so within seconds, what to do about it, and that it is over when it is."""

    async def work() -> None:
        async with (
            stage(tmp_path, calibrated=False) as played,
            watched(world.browser, played.stack.admin_url) as tab,
        ):
            await tab.open()
            await tab.shown()
            assert await tab.field("speculative", "pill") == "up"
            assert "loadtest calibrate --speculative http://" in await tab.text(
                "#calibrate-command"
            )
            played.engines[Role.SPECULATIVE].kill()
            await tab.page.wait_for_selector('#findings li[data-code="down"]', timeout=10_000)
            assert await tab.field("speculative", "pill") == "down"
            advice = await tab.text('#findings li[data-code="down"]')
            url = played.engines[Role.SPECULATIVE].url
            assert f"does not answer at {url}" in advice
            assert f"curl {url}/health" in advice
            assert (await tab.page.title()).startswith("(!)")
            await until_page(
                tab.page,
                "document.getElementById('announce').textContent.includes('does not answer')",
            )
            assert tab.faults == []

    world.run(work)


def test_an_operator_logs_in_and_changes_things_with_the_keyboard(
    world: World, tmp_path: Path
) -> None:
    """A wrong key is refused, a right one shows all; a change is asked for twice, and can be left."""

    async def work() -> None:
        async with (
            stage(tmp_path, admin_key=KEY) as played,
            watched(world.browser, played.stack.admin_url) as tab,
        ):
            page, health = tab.page, played.stack.relay.health
            await tab.open()
            await page.wait_for_selector("#login:not([hidden])")
            assert await page.evaluate("document.activeElement.id") == "key"
            await page.keyboard.type("wrong")
            await page.keyboard.press("Enter")
            await until_page(page, "document.getElementById('login-error').textContent !== ''")
            await log_in(tab)
            drain = page.locator('#baseline [data-field="button"]')
            await drain.focus()
            await page.keyboard.press("Enter")
            await page.keyboard.press("Escape")
            assert not health.status(Role.BASELINE).drained
            assert await page.evaluate("document.activeElement.dataset.field") == "button"
            await page.keyboard.press("Enter")
            assert "no new work" in await tab.text("#confirm-text")
            await page.keyboard.press("Tab")
            await page.keyboard.press("Enter")
            await page.wait_for_selector('#findings li[data-code="drained"]')
            assert health.status(Role.BASELINE).drained
            assert (await drain.inner_text()) == "Enable baseline…"
            assert "drained" in await tab.text("#told")
            await until_page(
                page, "document.querySelector('#rows td.wide')?.textContent === 'drain: baseline'"
            )
            await page.select_option("#policy-name", "frontier")
            await page.fill("#policy-k", "7")
            await page.keyboard.press("Enter")
            await page.click("#confirm-yes")
            await until_page(
                page, "document.getElementById('policy-now').textContent.includes('K = 7;')"
            )
            assert played.stack.relay.policy.frontier.threshold == 7  # type: ignore[attr-defined]
            assert [url for url in tab.asked if KEY in url or "wrong" in url] == []
            assert await page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
            await page.click("#forget")
            assert await page.is_hidden("#all")
            assert await page.evaluate("sessionStorage.length") == 0
            assert set(tab.faults) == {UNAUTHORIZED}

    world.run(work)


# The elements that a person can use, and those that the Tab key came by.
CONTROLS: Final = """() => [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")]
  .filter((e) => e.checkVisibility() && !e.disabled)
  .map((e, i) => (e.dataset.tried = String(i)))"""
FOCUSED: Final = """() => {
  const e = document.activeElement, style = getComputedStyle(e);
  return [e.dataset.tried ?? null, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
}"""


async def check_tab_order(page: Page) -> None:
    """Tab comes by every control, in the order of the page, and each shows that it has the focus."""
    await page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
    controls = await page.evaluate(CONTROLS)
    await page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    came_by = []
    for _ in controls:
        await page.keyboard.press("Tab")
        came_by.append(await page.evaluate(FOCUSED))
    assert [tried for tried, _ in came_by] == controls
    assert all(ringed for _, ringed in came_by)


async def violations(page: Page) -> list[str]:
    """What axe-core finds, of WCAG 2.2 A and AA and its best practices."""
    await page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text("utf-8"))
    found = await page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [f"{each['id']}: {each['nodes'][0]['html'][:120]}" for each in found["violations"]]


LOOKS: Final[list[tuple[Literal["light", "dark"], dict[str, int]]]] = [
    ("light", WIDE),
    ("dark", NARROW),
    ("light", NARROW),
    ("dark", WIDE),
]


def test_everybody_can_use_it(world: World, tmp_path: Path) -> None:
    """Light and dark, wide and narrow: no fault of axe-core's, nothing cut off, every control by Tab."""

    async def look(played: Played) -> None:
        grounds = set()
        for scheme, viewport in LOOKS:
            async with watched(
                world.browser, played.stack.admin_url, viewport=viewport, color_scheme=scheme,
                reduced_motion="reduce",
            ) as tab:  # fmt: skip
                await tab.open()
                await tab.page.wait_for_selector("#login:not([hidden])")
                await log_in(tab)
                await until_page(tab.page, "document.querySelector('#rows tr') !== null")
                widths = await tab.page.evaluate("[document.body.scrollWidth, innerWidth]")
                assert widths[0] <= widths[1]
                grounds.add(
                    await tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
                )
                moving = "document.getAnimations().filter((a) => a.playState === 'running').length"
                assert await tab.page.evaluate(moving) == 0
                if (scheme, viewport) in LOOKS[:2]:
                    assert await violations(tab.page) == []
                    await check_tab_order(tab.page)
                    await tab.page.click("#forget")
                    assert await violations(tab.page) == []
                assert set(tab.faults) == {UNAUTHORIZED}
        assert grounds == {"rgb(246, 245, 242)", "rgb(22, 22, 21)"}

    async def work() -> None:
        async with stage(tmp_path, admin_key=KEY) as played:
            await played.load.turn(1)
            await asyncio.sleep(0.2)
            await played.load.turn(0)  # what is looked at by axe must not change meanwhile
            await look(played)

    world.run(work)


def test_a_screen_reader_finds_its_way(world: World, tmp_path: Path) -> None:
    """Landmarks, headings, captions and the words of both pictures are in the accessibility tree."""

    async def work() -> None:
        async with (
            stage(tmp_path) as played,
            watched(world.browser, played.stack.admin_url) as tab,
        ):
            await tab.open()
            await tab.shown()
            page = tab.page
            for role in ("banner", "main", "navigation", "contentinfo"):
                assert await page.get_by_role(role).count() == 1
            for title in ("Is all well?", "Decisions", "Calibration", "The measured curves"):
                assert await page.get_by_role("heading", name=title, exact=True).count() == 1
            for picture, says in (("plane", "n = 0 on the speculative"), ("curves", "tokens/s")):
                image = page.locator(f"#{picture}")
                assert await image.get_attribute("role") == "img"
                assert says in (await image.locator("desc").text_content() or "")
                assert says in await tab.text(f"#{picture}-text")
            assert "are those that it was made on" in await tab.text("#calibration")
            await page.click("summary")
            assert await page.locator("#levels tr").count() == 8
            captions = await page.locator("caption").all_inner_texts()
            assert len(captions) == await page.locator("table").count() == 3
            assert await page.get_attribute("#announce", "aria-live") == "polite"
            await played.load.turn(2)
            await until_page(page, "document.querySelector('#rows tr') !== null")
            await page.click("#pause")
            assert await page.get_attribute("#pause", "aria-pressed") == "true"
            before, counts = await tab.text("#rows"), await tab.text("#reasons")
            await until_page(
                page, f"document.querySelector('#reasons').innerText.trim() !== {counts!r}"
            )
            assert await tab.text("#rows") == before
            await page.click("#pause")
            await until_page(
                page, f"document.querySelector('#rows').innerText.trim() !== {before!r}"
            )
            assert tab.faults == []

    world.run(work)


# --------------------------------------------------------------------------- text stays text

EVIL: Final = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"


def poisoned(value: Any, keep: Callable[[str], bool], name: str = "") -> Any:
    """Every text in it with markup planted, but those by which the page tells things apart."""
    if isinstance(value, dict):
        return {key: poisoned(found, keep, key) for key, found in value.items()}
    if isinstance(value, list):
        return [poisoned(found, keep, name) for found in value]
    return value + EVIL if isinstance(value, str) and not keep(name) else value


@pytest.mark.parametrize("bare", [False, True], ids=["with-its-policy", "without-its-policy"])
def test_markup_from_outside_stays_text(world: World, tmp_path: Path, bare: bool) -> None:
    """A script in model names, reasons, backends, addresses, findings and requests is only read.

    Without the policy's help too: the page itself makes no markup of anything.
    """

    async def work() -> None:
        async with (
            stage(tmp_path) as played,
            watched(world.browser, played.stack.admin_url) as tab,
        ):
            await played.load.turn(2)
            page = tab.page

            async def page_route(route: Route) -> None:
                answer = await route.fetch()
                await route.fulfill(status=200, content_type="text/html", body=await answer.text())

            async def status_route(route: Route) -> None:
                told = await (await route.fetch()).json()
                told["pair"]["findings"] += [
                    {
                        "rule": "r",
                        "severity": "spoils",
                        "backend": None,
                        "seen": "model",
                        "why": "w",
                        "mend": "m",
                    }
                ]
                told["findings"] += [
                    {
                        "code": "c",
                        "severity": "wrong",
                        "backend": None,
                        "seen": "model",
                        "mend": "m",
                    }
                ]
                told["calibration"]["mismatches"] = ["model: other"]
                told["calibration"]["matches"] = False
                told["calibration"]["advice"] = "recalibrate: "
                # Its own cards are found by their role; a backend of another name is added.
                evil = poisoned(told, lambda name: name in {"role", "scope"})
                evil["backends"].append({**evil["backends"][0], "role": f"third{EVIL}"})
                await route.fulfill(status=200, json=evil)

            async def events_route(route: Route) -> None:
                relay = played.stack.relay
                item = {
                    "kind": "decision", "time": 1.0, "request_id": "r", "route": "m", "backend": "b",
                    "reason": "why", "n": 1, "m": 2, "frontier": 3, "status": 200,
                }  # fmt: skip
                change = {"kind": "event", "time": 1.0, "event": "policy", "detail": "model"}
                data = poisoned(
                    {"items": [item, change], "skipped": 0}, lambda name: name == "kind"
                )
                body = f"id: {len(relay.decisions)}\nevent: decisions\ndata: {json.dumps(data)}\n\n"
                await route.fulfill(status=200, content_type="text/event-stream", body=body)

            if bare:
                await page.route(tab.url + "/", page_route)
            await page.route("**/status", status_route)
            await page.route("**/events", events_route)
            await tab.open()
            await tab.shown()
            await until_page(page, "document.querySelectorAll('#rows tr').length >= 2")
            await asyncio.sleep(0.3)
            assert await page.evaluate("window.pwned") is None
            assert await page.evaluate("document.scripts.length") == 1
            assert await page.locator("img, iframe, object, embed").count() == 0
            for place in (
                "#findings",
                "#rows",
                "#reasons",
                "#calibration",
                "#speculative",
                "#policy-now",
            ):
                assert EVIL in await page.locator(place).text_content()  # type: ignore[operator]
            assert [
                fault for fault in tab.faults if "exception" in fault or "outside" in fault
            ] == []

    world.run(work)


def test_the_policy_holds_in_the_browser(world: World, tmp_path: Path) -> None:
    """A script that is not the page's own is not run, nothing is asked of another place."""

    async def work() -> None:
        calls: list[object] = []

        def called(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            calls.append(writer)
            writer.close()

        async with (
            await asyncio.start_server(called, "127.0.0.1", 0) as elsewhere,
            stage(tmp_path) as played,
            watched(world.browser, played.stack.admin_url) as tab,
        ):
            await tab.open()
            await tab.shown()
            page = tab.page
            tried = await page.evaluate(
                """async (elsewhere) => {
                  const found = {};
                  const attempt = async (name, work) => {
                    try { await work(); found[name] = "done"; } catch (error) { found[name] = error.name; }
                  };
                  await attempt("markup", () => { document.body.innerHTML += "<b>x</b>"; });
                  await attempt("script", () => {
                    const script = document.createElement("script");
                    script.textContent = "window.pwned = 1";
                    document.body.append(script);
                  });
                  await attempt("handler", () => { document.body.setAttribute("onclick", "window.pwned = 1"); document.body.click(); });
                  await attempt("fetch", () => fetch(elsewhere));
                  // Later: what is run for the debugger itself may use eval.
                  await attempt("eval", () => new Promise((done, failed) => setTimeout(() => { try { done(eval("window.pwned = 1")); } catch (error) { failed(error); } })));
                  const image = new Image();
                  const loaded = new Promise((done) => { image.onerror = () => done("refused"); image.onload = () => done("loaded"); });
                  image.src = elsewhere;
                  found.image = await loaded;
                  return found;
                }""",
                f"http://127.0.0.1:{elsewhere.sockets[0].getsockname()[1]}/",
            )
            assert tried["markup"] == "TypeError"
            assert tried["fetch"] == "TypeError"
            assert tried["image"] == "refused"
            assert tried["eval"] == "EvalError"
            assert await page.evaluate("window.pwned") is None
            assert calls == []

    world.run(work)
