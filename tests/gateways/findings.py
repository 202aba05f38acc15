"""What a check says, and the client that the checks share."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import httpx

from tests.gateways.site import KEY

CHAT = "/v1/chat/completions"


class Finding(NamedTuple):
    """One line of the table."""

    name: str
    figure: str
    ok: bool | None = None  # None: nothing that can be wrong, only how it is


def client(url: str, **headers: str) -> httpx.AsyncClient:
    """A client with the right key."""
    return httpx.AsyncClient(
        base_url=url,
        trust_env=False,
        timeout=30.0,
        headers={"authorization": f"Bearer {KEY}", **headers},
        limits=httpx.Limits(max_connections=100),
    )


def events(raw: bytes) -> list[Any]:
    """The data of the events of a stream; `[DONE]` as it is."""
    data = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def text_of(found: list[Any]) -> str:
    """The words of a stream of a chat, put together."""
    deltas = [
        choice["delta"].get("content") or ""
        for event in found
        if isinstance(event, dict)
        for choice in event.get("choices", [])
    ]
    return "".join(deltas)


async def streamed(asking: httpx.AsyncClient, body: dict[str, Any]) -> tuple[httpx.Response, bytes]:
    """A stream read to its end: the answer's head and its body as it came."""
    async with asking.stream("POST", CHAT, json=body) as answer:
        return answer, b"".join([piece async for piece in answer.aiter_raw()])
