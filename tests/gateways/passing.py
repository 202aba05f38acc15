"""What passes through a gateway: bytes, headers, its own questions. Two taps watch, one a pair.

The gateway stands in front of the taps and these in front of the pairs, so that what a client sent
and got can be held against what a pair got and sent.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any, Final

from tests.gateways.findings import CHAT, Finding, client, events, streamed, text_of
from tests.gateways.fronts import Front
from tests.gateways.site import Site, chat, until
from tests.gateways.tap import Message, Tap

# What a client may send that a pair or an engine reads, or that a tracer wants to see again.
SENT: Final = {
    "x-request-id": "an-id-of-the-client",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "x-crossover-backend": "baseline",
    "x-smg-routing-key": "someone",
    "x-custom-labels": "a=b",
    "user-agent": "client/1.0",
}
# About one connection and not about the request.
OWN: Final = {"host", "connection", "accept-encoding", "accept", "content-length", "authorization"}


class Heard:
    """One request as a client and a pair saw it."""

    def __init__(self, sent: bytes, request: Message, answer: Message, got: bytes) -> None:
        self.sent = sent
        self.request = request
        self.answer = answer
        self.got = got


async def ask(front: Front, taps: list[Tap], body: dict[str, Any]) -> tuple[Heard, dict[str, str]]:
    """One request through everything, and the headers of its answer."""
    for tap in taps:
        tap.requests.clear()
        tap.answers.clear()
    sent = json.dumps(body, indent=1).encode()  # as nobody who re-writes it would write it
    headers = {"content-type": "application/json"}
    async with (
        client(front.url, **SENT) as asking,
        asking.stream("POST", CHAT, content=sent, headers=headers) as answer,
    ):
        got = b"".join([piece async for piece in answer.aiter_raw()])
    assert answer.status_code == 200, got
    (request,) = [post for tap in taps for post in tap.posts()]
    told = [heard for tap in taps for heard in tap.answers if heard.header("x-crossover-backend")]
    assert len(told) == 1
    assert await until(lambda: told[0].whole, 2) is not None
    return Heard(sent, request, told[0], got), dict(answer.headers)


def _names(found: set[str]) -> str:
    return ", ".join(sorted(found)) or "none"


def body_finding(sent: bytes, reached: bytes) -> Finding:
    """What became of a request's body."""
    if sent == reached:
        return Finding("request body", "the same bytes", ok=True)
    before, after = json.loads(sent), json.loads(reached)
    added = {f"{name}={json.dumps(after[name])}" for name in after.keys() - before.keys()}
    changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    figure = (
        f"written anew: adds {_names(added)}; drops {_names(before.keys() - after.keys())};"
        f" changes {_names(changed)}"
    )
    # A changed value would be another request; an added default is not.
    return Finding("request body", figure, ok=not (before.keys() - after.keys()) and not changed)


def request_headers(request: Message) -> Finding:
    """Which headers of a client reach a pair, and which are new."""
    reached = dict(request.headers)
    dropped = {name for name, value in SENT.items() if reached.get(name) != value}
    added = reached.keys() - SENT.keys() - OWN - {"content-type"}
    figure = f"drops {_names(dropped)}; adds {_names(added)}"
    return Finding("request headers", figure, ok="x-request-id" not in dropped)


def answer_headers(answer: Message, got: dict[str, str]) -> Finding:
    """Which headers of a pair reach a client, and which are new."""
    told = dict(answer.headers)
    framing = {"transfer-encoding", "content-length", "connection", "keep-alive", "date"}
    dropped = {name for name in told if name not in got and name not in framing}
    changed = {name for name in told.keys() & got.keys() - framing if told[name] != got[name]}
    added = got.keys() - told.keys() - framing
    figure = f"drops {_names(dropped)}; adds {_names(set(added))}; changes {_names(changed)}"
    kept = {name for name in told if name.startswith("x-crossover-")} | {"x-request-id"}
    return Finding("answer headers", figure, ok=not kept & (dropped | changed))


async def what_passes(front: Front, taps: list[Tap]) -> list[Finding]:
    """Bodies and headers, each way, of a whole answer and of a stream."""
    whole, _ = await ask(front, taps, chat("whole", 16, user="u", unknown_field={"b": 1, "a": 2}))
    usage = {"include_usage": True}
    stream, headers = await ask(
        front, taps, chat("stream", 64, stream=True, stream_options=usage, unknown_field=[1])
    )
    same = whole.answer.body == whole.got and stream.answer.body == stream.got
    told = events(stream.answer.body)
    alike = told == events(stream.got) and json.loads(whole.answer.body) == json.loads(whole.got)
    figure = "the same bytes" if same else "the same events" if alike else "other events"
    return [
        body_finding(stream.sent, stream.request.body),
        request_headers(stream.request),
        Finding("answers", f"{figure} ({len(told)} events)", ok=alike),
        answer_headers(stream.answer, headers),
    ]


async def arrives_at_once(front: Front) -> Finding:
    """Whether events come as they are made, and are not kept until some buffer is full."""
    body = chat("one by one", 48, stream=True)
    async with client(front.url) as asking, asking.stream("POST", CHAT, json=body) as answer:
        pieces = [piece async for piece in answer.aiter_raw()]
    count = len(events(b"".join(pieces)))
    figure = f"{count} events in {len(pieces)} reads"
    # A buffer of 4 KiB would give them in two or three; a busy machine reads several at once too.
    return Finding("events as they come", figure, ok=len(pieces) > count / 4)


async def ordinary(front: Front, site: Site) -> list[Finding]:
    """The model list, health and keys as a client of the gateway sees them."""
    async with client(front.url) as asking, client(site.urls[0]) as direct:
        models = (await asking.get("/v1/models")).json()
        true = (await direct.get("/v1/models")).json()
        health = {path: (await asking.get(path)).status_code for path in ("/health", "/ready")}
        del asking.headers["authorization"]
        refused = [
            await asking.post(CHAT, json=chat("-", 1), headers=headers)
            for headers in ({}, {"authorization": "Bearer wrong"})
        ]
    ids = [[model["id"] for model in each["data"]] for each in (models, true)]
    lost = true["data"][0].keys() - models["data"][0].keys()
    in_shape = all(each.json()["error"]["message"] for each in refused)
    codes = [each.status_code for each in refused]
    return [
        Finding(
            "model list",
            "as the pair gives it" if models == true else f"the same ids; drops {_names(lost)}",
            ok=ids[0] == ids[1],
        ),
        Finding("health", ", ".join(f"{p} {code}" for p, code in health.items()), ok=None),
        Finding(
            "keys",
            f"none: {codes[0]}, wrong: {codes[1]}, in OpenAI's shape: {'yes' if in_shape else 'no'}",
            ok=codes == [401, 401] and in_shape,
        ),
    ]


def asked_by_itself(taps: list[Tap], seconds: float) -> Finding:
    """What the gateway asked the pairs for by itself, and how the pairs answered."""
    counts: Counter[str] = Counter()
    for tap in taps:
        asked = [f"{r.method} {r.target.partition('?')[0]}" for r in tap.requests]
        counts.update(name for name in asked if not name.startswith("POST"))
    strange = sum(len(tap.strange) for tap in taps)
    told = ", ".join(f"{name} x{count}" for name, count in sorted(counts.items())) or "nothing"
    refused = Counter(a.status for tap in taps for a in tap.answers if a.status >= 400)
    figure = f"{told} in {seconds:.0f} s"
    if refused:
        figure += "; answered " + ", ".join(f"{s} x{n}" for s, n in sorted(refused.items()))
    if strange:
        figure += f"; {strange} times not HTTP/1.1"
    return Finding("asks the pairs for", figure)


async def streams_whole(front: Front, site: Site, count: int) -> Finding:
    """Many streams at once, each held against what a server says without anything in front."""

    async def one(number: int, asking: Any) -> bool:
        prompt = f"stream number {number}"
        body = chat(prompt, 48, stream=True, stream_options={"include_usage": True})
        _, raw = await streamed(asking, body)
        found = events(raw)
        usage = [
            event["usage"] for event in found if isinstance(event, dict) and event.get("usage")
        ]
        return (
            text_of(found) == await site.expected(prompt, 48)
            and found[-1] == "[DONE]"
            and [each["completion_tokens"] for each in usage] == [48]
        )

    async with client(front.url) as asking:
        right = await asyncio.gather(*(one(number, asking) for number in range(count)))
    return Finding("streams whole", f"{sum(right)} of {count}, word for word", ok=all(right))
