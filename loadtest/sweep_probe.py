"""What a server says of itself to a load test: what it is, how loaded it is, how it counts tokens.

Small requests through httpx, beside the load and never part of it. What a server does not say, or
says wrongly, is None; only a server that does not answer at all is an error. Its secrets stay where
they are: of `/server_info` only the names that the router passes on are kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, Self
from urllib.parse import urlsplit, urlunsplit

import httpx
import msgspec

from loadtest.prompts import TEXTS, Place, Tokenizer, corpus_lines, mark
from loadtest.sweep_schema import Server, ServerFailedError, SweepError
from loadtest.sweep_seen import Page, parse_page
from router import readings
from router.asking import NoReply, Reply, fetch, probe_client
from router.load import Role, Telemetry
from router.server_info import ALLOWED
from router.telemetry import Source, Unreadable, parse

# Seconds for one answer. A busy server's front end is slow, and nothing waits for these.
WITHIN_S: Final = 5.0
INFO: Final = ("server_info", "get_server_info")
TOKENIZE: Final = ("v1/tokenize", "tokenize")
# They say how a server does, and not what it is: another start has others.
VOLATILE: Final = frozenset({"status", "startup_time", "random_seed", "version", "frontend"})
SAMPLE_LINES: Final = 25  # of each shipped text
KEY_ENV: Final = "LOADTEST_API_KEY"


def public_url(url: str) -> str:
    """A server's base URL, without `/v1`, user and password. Raises SweepError."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise SweepError(f"a server's URL looks like http://127.0.0.1:30000, got {url!r}")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, "", ""))


class ServerProbe:
    """Asks one server. Close it with `async with`."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = public_url(url)
        self._clock = clock
        self._source: Source | None = None
        self._client = probe_client(
            self.url, key=key, timeout=WITHIN_S, connect_timeout=0.8 * WITHIN_S, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def facts(self, role: Role, model: str | None) -> Server:
        """What the server is; `model` leads over what it serves. Raises SweepError."""
        served = await self._served() if model is None else model
        info = await self._info()
        loads = await self._json("v1/loads?include=core")
        told = await self.look()
        tokenizer = await self.tokenizer(served)
        state = _dict((info.get("internal_states") or [None])[0])
        algorithm = "speculative_algorithm"
        return Server(
            role=role,
            url=self.url,
            model=served,
            model_path=_text(info.get("model_path")),
            draft=_text(info.get("speculative_draft_model_path")),
            engine_version=_text(info.get("version")) or _text(loads.get("version")),
            gpu=_text(loads.get("accelerator")),
            gpus=readings.whole(loads.get("num_accelerators")) or None,
            cap=(told.max_running if told else None) or _cap(info, state),
            context_length=readings.whole(info.get("context_length")) or None,
            speculates=info[algorithm] is not None if algorithm in info else None,
            tokens_per_word=None if tokenizer is None else tokenizer.per_word,
            tokens_per_mark=None if tokenizer is None else tokenizer.mark,
            flags={
                name: info[name]
                for name in sorted(ALLOWED - VOLATILE)
                if info.get(name) is not None
            },
        )

    async def look(self) -> Telemetry | None:
        """How loaded the server is, from the best source that it has."""
        sources = list(Source) if self._source is None else [self._source]
        for source in sources:
            reply = await fetch(self._client, source.path, clock=self._clock, within=WITHIN_S)
            if isinstance(reply, NoReply) or reply.status != 200:
                continue
            told = parse(source, reply.body, reply.sent_at, reply.read_at)
            if not isinstance(told, Unreadable):
                self._source = source
                return told
        return None

    async def page(self) -> Page | None:
        """What `/metrics` says now."""
        reply = await fetch(self._client, Source.METRICS.path, clock=self._clock, within=WITHIN_S)
        if isinstance(reply, NoReply) or reply.status != 200:
            return None
        return parse_page(reply.body, (reply.sent_at + reply.read_at) / 2)

    async def tokenizer(self, model: str) -> Tokenizer | None:
        """How the server counts: the shipped texts by its `/tokenize`; None without one."""
        text = "\n".join(line for name in TEXTS for line in corpus_lines(name)[:SAMPLE_LINES])
        sign = mark("", Place(2, "128", 57), "3fa9c1")
        counts = [await self._count(model, prompt) for prompt in (text, sign)]
        if counts[0] is None or counts[1] is None:
            return None
        return Tokenizer(counts[0] / len(text.split()), float(counts[1]))

    async def _count(self, model: str, prompt: str) -> int | None:
        for path in TOKENIZE:
            try:
                async with asyncio.timeout(WITHIN_S):
                    response = await self._client.post(
                        path, json={"model": model, "prompt": prompt}
                    )
            except (httpx.HTTPError, TimeoutError):
                return None
            if response.status_code == 200:
                count = readings.whole(_object(response.content).get("count"))
                return count or None
        return None

    async def _served(self) -> str:
        reply = await fetch(self._client, "v1/models", clock=self._clock, within=WITHIN_S)
        if isinstance(reply, NoReply):
            raise ServerFailedError(
                f"no server answers at {self.url} ({reply.reason}): start it, or mend --url"
            )
        if reply.status in {401, 403}:
            raise ServerFailedError(f"{self.url} wants another API key: put it into {KEY_ENV}")
        listed = _object(reply.body).get("data")
        first = _dict(listed[0]) if isinstance(listed, list) and listed else {}
        name = _text(first.get("id"))
        if reply.status != 200 or name is None:
            raise ServerFailedError(
                f"{self.url}/v1/models names no model (status {reply.status}): give one by --model"
            )
        return name

    async def _info(self) -> dict[str, Any]:
        for path in INFO:
            if found := await self._json(path):
                return found
        return {}

    async def _json(self, path: str) -> dict[str, Any]:
        """A JSON object; an empty one when there is none."""
        reply = await fetch(self._client, path, clock=self._clock, within=WITHIN_S)
        return _object(reply.body) if isinstance(reply, Reply) and reply.status == 200 else {}


def _object(body: bytes) -> dict[str, Any]:
    try:
        return _dict(msgspec.json.decode(body))
    except (ValueError, RecursionError):
        return {}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _cap(info: dict[str, Any], state: dict[str, Any]) -> int | None:
    """The cap that is in force, over all data-parallel ranks, else the flag."""
    each = readings.whole(state.get("effective_max_running_requests_per_dp"))
    ranks = readings.whole(info.get("dp_size")) or 1
    return each * ranks if each else readings.whole(info.get("max_running_requests")) or None
