"""Asks the backends what they say of themselves, now and then and with a short memory.

Not the relay: these are small GETs of ours, through httpx. Answers are kept for a moment, failures
too, and askers of the same thing wait for one answer together, so that a client that polls us does
not poll the backends. Only a 200 counts; whatever else a backend says (its own 401 when our key is
wrong) is not for the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import httpx
import msgspec

from router import errors
from router.health import Health
from router.load import ROLES, Role
from router.view import RelayView
from router.web import AnswerError

T = TypeVar("T")

_log = logging.getLogger("crossover")

TIMEOUT: Final = 5.0  # seconds for a whole answer
MAX_ANSWER: Final = 4 * 1024 * 1024  # bytes; SGLang's /server_info is 31 KB
KEEP_FAILURE: Final = 1.0  # seconds


def create_client() -> httpx.AsyncClient:
    """The client for these requests: no proxies of the environment, no redirects, no keep-alive.

    An idle connection would be closed by the backend after 5 s, at the wrong moment for the next.
    """
    return httpx.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        timeout=httpx.Timeout(TIMEOUT),
        limits=httpx.Limits(max_connections=32, max_keepalive_connections=0),
    )


class PairClient:
    """GETs to the pair, remembered for a moment."""

    def __init__(self, relay: RelayView, client: httpx.AsyncClient) -> None:
        """`client` is not closed here."""
        self._relay = relay
        self._client = client
        self._kept: dict[str, tuple[float, object]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def remembered(self, key: str, seconds: float, make: Callable[[], Awaitable[T]]) -> T:
        """What `make` gave at most so many seconds ago. Raises AnswerError as `make` does.

        `key` comes from a closed set: nothing is ever forgotten.
        """
        async with self._locks.setdefault(key, asyncio.Lock()):
            until, found = self._kept.get(key, (float("-inf"), None))
            if self._relay.clock() >= until:
                try:
                    found = await make()
                except AnswerError as error:
                    found, seconds = error, KEEP_FAILURE
                self._kept[key] = (self._relay.clock() + seconds, found)
        if isinstance(found, AnswerError):
            raise AnswerError(found.answer, found.headers)
        made: T = found  # type: ignore[assignment]
        return made

    async def first(self, paths: Sequence[str]) -> bytes:
        """The JSON that one backend answers: a usable one if there is one, else the other.

        `paths` are spellings of one endpoint, tried in turn on a backend that does not know one.
        Raises AnswerError: 503 when no backend could be reached, 502 when none gave a 200.
        """
        reached = False
        tracker = self._relay.tracker
        for role in sorted(ROLES, key=lambda role: not tracker.of(role).usable):
            status, body = await self.ask(role, paths)
            if body is not None:
                return body
            reached = reached or status is not None
        raise AnswerError(errors.BAD_ANSWER if reached else errors.NO_BACKEND)

    async def both(self, paths: Sequence[str], timeout: float = TIMEOUT) -> dict[Role, Any]:
        """What each backend answers, as objects; one that gives no JSON object is left out.

        A backend that is known to be down is not asked.
        """
        health = self._relay.health
        roles = [role for role in ROLES if health.status(role).health is not Health.DOWN]
        answers = await asyncio.gather(*(self.ask(role, paths, timeout) for role in roles))
        found: dict[Role, Any] = {}
        for role, (_, body) in zip(roles, answers, strict=True):
            value = msgspec.json.decode(body) if body is not None else None
            if isinstance(value, dict):
                found[role] = value
        return found

    async def ask(
        self, role: Role, paths: Sequence[str], timeout: float = TIMEOUT
    ) -> tuple[int | None, bytes | None]:
        """The status of one backend's answer, and the body if it is a 200 with JSON."""
        status = None
        for path in paths:
            try:
                status, body = await self._get(role, path, timeout)
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                _log.debug("%s of %s: %s", path, role.value, type(error).__name__)
                return status, None
            if status == 200:
                return status, body
            if status not in {404, 405}:
                break
        return status, None

    async def _get(self, role: Role, path: str, timeout: float) -> tuple[int, bytes | None]:
        # The client's own limit for connecting must come first: a connect that is cancelled costs
        # httpx a place in its pool.
        limits = httpx.Timeout(timeout, connect=0.8 * timeout, pool=0.8 * timeout)
        settings = self._relay.settings
        url = settings.speculative if role is Role.SPECULATIVE else settings.baseline
        key = settings.backend_key(role.value)
        headers = {"authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        async with (
            asyncio.timeout(timeout),
            self._client.stream("GET", f"{url}{path}", headers=headers, timeout=limits) as response,
        ):
            if response.status_code != 200:
                return response.status_code, None
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_ANSWER:
                    return 502, None
        try:
            msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return 502, None
        return 200, bytes(body)
