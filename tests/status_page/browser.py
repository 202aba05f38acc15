"""A real, headless Chromium, and a page that notes all that must not happen on it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any, Final

from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NARROW: Final = {"width": 360, "height": 740}
WIDE: Final = {"width": 1280, "height": 900}


def find_chromium() -> str | None:
    """The browser that is installed here; `CHROMIUM` names another one."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Chromium for as long as the block runs."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=find_chromium(),
            # As root, and in a container with a small /dev/shm, its own sandbox cannot start.
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )
        try:
            yield browser
        finally:
            await browser.close()


class Watched:
    """A page of one origin; `faults` holds console errors, exceptions and requests elsewhere."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        self.asked: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", self._request)

    async def open(self) -> None:
        """Load the page."""
        await self.page.goto(self.url + "/")

    async def shown(self) -> None:
        """Wait for the first data."""
        await self.page.wait_for_selector("html[data-status-time]")

    async def text(self, selector: str) -> str:
        """What stands there."""
        return (await self.page.inner_text(selector)).strip()

    async def field(self, role: str, name: str) -> str:
        """One value of a server's card."""
        return await self.text(f'#{role} [data-field="{name}"]')

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        self.asked.append(request.url)
        if not request.url.startswith((self.url + "/", "data:", "blob:")):
            self.faults.append(f"outside: {request.url}")


@contextlib.asynccontextmanager
async def watched(browser: Browser, url: str, **options: Any) -> AsyncIterator[Watched]:
    """A fresh tab on this origin, not yet loaded; `options` as for a browser context."""
    context = await browser.new_context(**({"viewport": WIDE} | options))
    try:
        yield Watched(await context.new_page(), url)
    finally:
        await context.close()
