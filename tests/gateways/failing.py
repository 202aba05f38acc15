"""What a gateway does about load, clients that leave, and pairs that are killed or drained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from typing import Any, Final, Literal, NamedTuple, Self

import httpx

from tests.gateways.findings import CHAT, Finding, client
from tests.gateways.fronts import Front
from tests.gateways.site import Pair, Site, chat, until

CLIENTS: Final = 12
# About a quarter of a second, so that a killed pair has work; of different lengths, or all clients
# would begin and end together.
TOKENS: Final = range(24, 48)
BACK_S: Final = 20.0  # until a pair that has come back must have got a request
BROKEN: Final = {500, 502, 503}  # what a client's library may try again
GONE_S: Final = 6.0  # until an engine must have noticed a client that left


class Outcome(NamedTuple):
    """What became of one request. Times are monotonic seconds."""

    prompt: str
    begun: float
    ended: float
    # broken: the answer had begun. refused: an HTTP error, or no answer at all.
    kind: Literal["whole", "broken", "refused"]
    detail: str


async def one(asking: httpx.AsyncClient, prompt: str, number: int) -> Outcome:
    """One stream to its end, whatever that is; its length follows from `number`."""
    begun = time.monotonic()
    kind: Literal["whole", "broken", "refused"] = "refused"
    try:
        body = chat(prompt, TOKENS[7 * number % len(TOKENS)], stream=True)
        async with asking.stream("POST", CHAT, json=body) as answer:
            if answer.status_code != 200:
                raw = await answer.aread()
                return Outcome(
                    prompt, begun, time.monotonic(), "refused", f"{answer.status_code} {raw[:80]!r}"
                )
            kind = "broken"
            raw = b"".join([piece async for piece in answer.aiter_raw()])
    except httpx.HTTPError as error:
        return Outcome(prompt, begun, time.monotonic(), kind, type(error).__name__)
    whole = raw.endswith(b"data: [DONE]\n\n") and b'"error"' not in raw
    return Outcome(prompt, begun, time.monotonic(), "whole" if whole else "broken", "")


class Load:
    """So many clients, each with one stream open at any time."""

    def __init__(self, front: Front, prefix: str) -> None:
        self.outcomes: list[Outcome] = []
        self._front = front
        self._prefix = prefix
        self._sent = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._serve()) for _ in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def _serve(self) -> None:
        async with client(self._front.url) as asking:
            while not self._ending:
                self._sent += 1
                outcome = await one(asking, f"{self._prefix} {self._sent}", self._sent)
                self.outcomes.append(outcome)
                if outcome.kind != "whole":
                    await asyncio.sleep(0.1)

    def failed(self) -> list[Outcome]:
        """Those that were not whole."""
        return [outcome for outcome in self.outcomes if outcome.kind != "whole"]


async def shares(front: Front, site: Site, count: int) -> Finding:
    """How requests of a steady load are divided between two pairs that are alike."""
    site.forget()
    async with client(front.url) as asking:
        gate = asyncio.Semaphore(CLIENTS)

        async def ask(number: int) -> Outcome:
            async with gate:
                return await one(asking, f"share {number}", number)

        outcomes = await asyncio.gather(*(ask(number) for number in range(count)))
    served = [pair.served() for pair in site.pairs]
    total = max(1, sum(served))
    figure = " : ".join(f"{100 * part / total:.0f} %" for part in served)
    whole = all(outcome.kind == "whole" for outcome in outcomes)
    return Finding("shares of the pairs", figure, ok=whole and min(served) >= 0.25 * total)


async def client_leaves(front: Front, site: Site) -> list[Finding]:
    """How long a server goes on after its client has left: within a stream, and waiting for one."""
    found = []
    async with client(front.url) as asking:
        body = chat("a long stream", 4000, stream=True)
        async with asking.stream("POST", CHAT, json=body) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            assert site.running == 1
        took = await until(lambda: site.running == 0, GONE_S)
        shown = "never" if took is None else f"{1000 * took:.0f} ms"
        found.append(
            Finding("client leaves a stream", f"aborted after {shown}", ok=took is not None)
        )

        task = asyncio.create_task(asking.post(CHAT, json=chat("a long answer", 4000)))
        assert await until(lambda: site.running == 1, 5) is not None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        took = await until(lambda: site.running == 0, GONE_S)
        shown = "never" if took is None else f"{1000 * took:.0f} ms"
        found.append(
            Finding("client leaves unanswered", f"aborted after {shown}", ok=took is not None)
        )
    return found


def _twice(site: Site) -> list[str]:
    """The prompts that reached more than one server, or one more than once."""
    seen: Counter[str] = Counter()
    for pair in site.pairs:
        seen += pair.prompts()
    return [prompt for prompt, count in seen.items() if count > 1]


async def pair_killed(front: Front, site: Site, steady_s: float) -> list[Finding]:
    """SIGKILL to one router under load, and back: who notices, for how long, and what is sent twice."""
    site.forget()
    pair = site.pairs[0]
    async with Load(front, "kill") as load:
        await asyncio.sleep(steady_s)
        assert await until(lambda: pair.running > 2, 5) is not None
        running = pair.running
        killed = time.monotonic()
        pair.kill()
        await pair.ended()
        await asyncio.sleep(steady_s)
        calm = max((o.ended - killed for o in load.failed() if o.begun >= killed), default=0.0)
        back = await _back(pair)
        await asyncio.sleep(steady_s / 2)
    failed = load.failed()
    before = [outcome for outcome in failed if outcome.begun < killed]
    after = [outcome for outcome in failed if outcome.begun >= killed]
    twice = _twice(site)
    late = ", ".join(sorted({outcome.detail or outcome.kind for outcome in after}))
    return [
        Finding(
            "pair killed",
            f"{len(before)} of the {running} that ran there were lost; {len(after)} new ones failed"
            + (f" over {calm:.1f} s ({late})" if after else ""),
            # A few more may be on their way between the gateway and the servers.
            ok=len(before) <= max(running, CLIENTS // 2) + 3
            and len(failed) < len(load.outcomes) / 4,
        ),
        Finding("sent to a pair twice", f"{len(twice)} of {len(load.outcomes)}", ok=not twice),
        Finding(
            "pair is back",
            "never" if back is None else f"used again after {back:.1f} s",
            ok=back is not None,
        ),
    ]


async def _back(pair: Pair) -> float | None:
    """Start a router again, and how long after it was ready its servers got a request."""
    before = pair.served()
    await pair.start()
    return await until(lambda: pair.served() > before, BACK_S)


async def pair_drained(front: Front, site: Site, steady_s: float) -> Finding:
    """SIGTERM to one router under load: whether anybody notices."""
    site.forget()
    pair = site.pairs[1]
    async with Load(front, "drain") as load:
        await asyncio.sleep(steady_s)
        pair.terminate()
        code = await pair.ended()
        await asyncio.sleep(steady_s / 2)
    await pair.start()
    failed = load.failed()
    kinds = Counter(f"{outcome.kind} {outcome.detail}".strip() for outcome in failed)
    figure = f"{len(failed)} of {len(load.outcomes)} failed"
    if failed:
        figure += " (" + ", ".join(f"{kind} x{count}" for kind, count in kinds.items()) + ")"
    return Finding("pair drained", figure, ok=not failed and code == 0)


async def nobody_left(front: Front, site: Site) -> Finding:
    """What a client gets when both pairs are gone: an error that its library can read."""
    for pair in site.pairs:
        pair.kill()
        await pair.ended()
    async with client(front.url) as asking:
        answer = await asking.post(CHAT, json=chat("nobody", 4))
    message: Any = None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        message = json.loads(answer.content)["error"]["message"]
    for pair in site.pairs:
        await pair.start()
    figure = f"{answer.status_code}, {message!r}"
    return Finding("no pair left", figure, ok=answer.status_code in BROKEN and bool(message))
