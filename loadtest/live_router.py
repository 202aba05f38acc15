"""A router's admin listener, as a live comparison uses it: how it does, and another policy for it.

Every refusal is an error that says what to mend; nothing is decided here (`live_borrow` does).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, TypeVar

import httpx
import msgspec

from loadtest.live_schema import Change, LiveError, LiveFailedError
from loadtest.sweep_probe import public_url
from loadtest.sweep_schema import SweepError
from loadtest.sweep_seen import Page
from router.load import Role, Telemetry

T = TypeVar("T")
_CPU: Final = re.compile(rb"^process_cpu_seconds_total ([0-9.e+-]{1,40})$", re.MULTILINE)
ADMIN_KEY_ENV: Final = "LOADTEST_ADMIN_KEY"
WITHIN_S: Final = 5.0


class Line(msgspec.Struct, frozen=True):
    """The line in force."""

    scope: str
    band: float
    dwell: float
    threshold: float | str | None = None  # None for a table


class Policy(msgspec.Struct, frozen=True):
    """What decides."""

    name: str
    frontier: Line | None = None
    configured: bool = False  # what its settings ask for, kept up to date with a calibration

    @property
    def back(self) -> Change:
        """What makes the router decide like this again, and follow new calibrations if it did."""
        return {"policy": "frontier"} if self.configured else self.change

    @property
    def change(self) -> Change:
        """What makes the router decide by these figures."""
        if self.frontier is None:
            # A rule by curves cannot be named while the router runs: it is what `frontier` means
            # to a router that was started with it.
            rule = self.name.startswith(("forecast", "join-"))
            return {"policy": "frontier" if rule else self.name}
        found: Change = {
            "policy": "frontier",
            "band": self.frontier.band,
            "dwell": self.frontier.dwell,
        }
        if self.frontier.threshold is not None:
            threshold = self.frontier.threshold
            found["threshold"] = "always" if isinstance(threshold, str) else threshold
            found["scope"] = self.frontier.scope
        return found


class Backend(msgspec.Struct, frozen=True):
    """One server, as the router sees it."""

    role: Role
    url: str
    usable: bool
    in_flight: int
    concurrency: int  # with other clients' requests


class Queue(msgspec.Struct, frozen=True):
    """The router's own."""

    waiting: int
    in_flight: int


class InForce(msgspec.Struct, frozen=True):
    """The calibration in force."""

    path: str  # on the router's host
    created: str | None
    problem: str | None  # why what the file holds now is not in force
    alarm: str | None  # why its line is not trusted


class Status(msgspec.Struct, frozen=True):
    """What is needed of /status."""

    uptime: float  # seconds
    policy: Policy
    backends: tuple[Backend, ...]
    queue: Queue
    calibration: InForce | None = None

    @property
    def busy(self) -> dict[str, int]:
        """Who has how many requests, if not none."""
        found = {
            f"{each.role.value}": max(each.in_flight, each.concurrency) for each in self.backends
        }
        found["the router's queue"] = self.queue.waiting
        return {name: count for name, count in found.items() if count}

    @property
    def unusable(self) -> str | None:
        """Which server gets no work, and what to do; None when both may."""
        lost = [f"the {b.role.value} server at {b.url}" for b in self.backends if not b.usable]
        if not lost:
            return None
        return (
            f"the router does not use {' and '.join(lost)}: it is down or drained; start or enable it"
            " and give the same command again: what is measured is kept"
        )


class RouterAdmin:
    """Asks one router. Close it with `async with`."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`url` is that of the admin listener. Raises LiveError for one that is none."""
        try:
            self.url = public_url(url)
        except SweepError:
            raise LiveError(f"--admin-url looks like http://127.0.0.1:9400, got {url!r}") from None
        self._clock = clock
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=WITHIN_S,
            trust_env=False,
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def status(self) -> Status:
        """The router at this moment. Raises LiveError."""
        return self._read(await self._call("GET", "/status"), Status)

    async def set_policy(self, change: Mapping[str, str | float]) -> Policy:
        """Decide so from the next request on; what the router made of it. Raises LiveError."""
        return self._read(await self._call("POST", "/policy", dict(change)), Policy)

    async def decided(self, request_id: str) -> bool:
        """Whether one of the last decisions was about this request. Raises LiveError."""
        found = self._read(await self._call("GET", "/decisions?limit=100"), dict[str, Any])
        return any(item.get("request_id") == request_id for item in found.get("items", ()))

    async def look(self) -> Telemetry | None:
        """How loaded the router is; None when it does not say."""
        try:
            queue = (await self.status()).queue
        except LiveError:
            return None
        now = self._clock()
        return Telemetry(queue.in_flight, queue.waiting, now, now, "router")

    async def page(self) -> Page | None:
        """Its counters are not those of a server."""
        return None

    async def cpu_seconds(self) -> float | None:
        """Processor time of the router's process since its start; None where it does not say."""
        try:
            found = _CPU.search(await self._call("GET", "/metrics"))
        except LiveError:
            return None
        return float(found[1]) if found else None

    async def _call(self, method: str, path: str, body: object = None) -> bytes:
        try:
            answer = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
            raise LiveFailedError(
                f"no router's admin listener answers at {self.url} ({said}): start the router, or"
                " mend --admin-url"
            ) from error
        if answer.status_code == 200:
            return answer.content
        said = _message(answer.content)
        if answer.status_code == 401:
            raise LiveError(f"{self.url} wants the router's admin key: put it into {ADMIN_KEY_ENV}")
        if answer.status_code == 403:
            raise LiveError(
                "the router has no admin key, so that nobody can change its policy: start it with"
                f" CROSSOVER_ADMIN_KEY set, and put the same key into {ADMIN_KEY_ENV}"
            )
        if answer.status_code in {400, 422} and isinstance(body, dict):
            raise LiveError(
                f"the router refuses the policy {body.get('policy')}: {said}; leave it out of"
                " --policies, or start the router with what it needs"
            )
        if answer.status_code == 404:
            raise LiveError(f"{self.url}{path} is not there: --admin-url is not the admin listener")
        raise LiveFailedError(f"{method} {self.url}{path}: status {answer.status_code}: {said}")

    def _read(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise LiveError(
                f"{self.url} is no router's admin listener ({error}): mend --admin-url"
            ) from error


def _message(body: bytes) -> str:
    """The message of an error of the admin listener."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace").strip() or "(no body)"
