"""What a running pair has to show, one function each: asked from outside, as a client would.

Each gives a `Finding`; none raises for what a server did.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import openai

from router.load import Role
from tests.real_pair.pair import Pair, port_of, processes_of

STREAMS: Final = 8
LONG: Final = 4000  # tokens: longer than any trial waits


class Finding(msgspec.Struct, frozen=True):
    """What one trial saw. `ok` is None when it could not be tried."""

    trial: str
    ok: bool | None
    seen: dict[str, Any]


async def client_of_openai(pair: Pair) -> Finding:
    """The official client: models, chat, streams with usage, completions, errors by their class."""
    seen: dict[str, Any] = {}
    async with openai.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as ai:
        seen["models"] = [model.id async for model in ai.models.list()]
        raw = await ai.chat.completions.with_raw_response.create(
            model=pair.model,
            messages=[{"role": "user", "content": "One word, please."}],
            max_tokens=8,
            extra_body={"ignore_eos": True},
        )
        whole = raw.parse()
        seen["headers"] = {
            name: raw.headers.get(name)
            for name in ("x-crossover-backend", "x-crossover-reason", "x-request-id")
        }
        seen["chat"] = whole.usage.completion_tokens if whole.usage else None
        usage = None
        chunks = 0
        stream = await ai.chat.completions.create(
            model=pair.model,
            messages=[{"role": "user", "content": "Count, please."}],
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            chunks += bool(chunk.choices)
            usage = chunk.usage or usage
        seen["stream"] = {"chunks": chunks, "tokens": usage.completion_tokens if usage else None}
        text = await ai.completions.create(
            model=pair.model, prompt="Once", max_tokens=8, extra_body={"ignore_eos": True}
        )
        seen["completions"] = text.usage.completion_tokens if text.usage else None
        seen["bad request"] = await _class_of(
            lambda: ai.chat.completions.create(model=pair.model, messages=[], max_tokens=-1)
        )
        seen["unknown path"] = await _class_of(lambda: ai.files.retrieve("nothing"))
    ok = (
        seen["models"] == [pair.model]
        and (seen["chat"], seen["stream"]["tokens"], seen["completions"]) == (8, 32, 8)
        and all(seen["headers"].values())
        and (seen["bad request"], seen["unknown path"]) == ("BadRequestError", "NotFoundError")
    )
    return Finding("openai client", ok, seen)


async def _class_of(call: Callable[[], Awaitable[object]]) -> str:
    try:
        await call()
    except openai.APIError as error:
        return type(error).__name__
    return "no error"


async def hang_up(pair: Pair, role: Role, *, stream: bool, within: float) -> Finding:
    """Clients leave in the middle: how long the server itself still counts them as running."""
    name = f"hang-up of {STREAMS} {'streams' if stream else 'unary requests'}, {role.value}"
    async with pair.only(role):
        asking = [asyncio.create_task(_held_open(pair, stream=stream)) for _ in range(STREAMS)]
        running = await pair.until(role, lambda count: count >= STREAMS, 30)
        await asyncio.sleep(0.5)
        for task in asking:
            task.cancel()
        gone = await pair.until(role, lambda count: count == 0, max(10.0, 2 * within))
        await asyncio.gather(*asking, return_exceptions=True)
        counted = (await pair.backend(role))["in_flight"]
    seen = {"all running after": running, "none running after": gone, "limit": within}
    ok = running is not None and gone is not None and gone <= within and counted == 0
    return Finding(name, ok, seen | {"in flight in the router afterwards": counted})


async def _held_open(pair: Pair, *, stream: bool) -> None:
    url = f"{pair.url}/v1/chat/completions"
    async with (
        httpx.AsyncClient(timeout=None, trust_env=False) as client,
        client.stream("POST", url, json=pair.body(LONG, stream=stream)) as answer,
    ):
        async for _ in answer.aiter_raw():
            pass


async def queue_full(pair: Pair, role: Role, requests: int) -> Finding:
    """More streams at once than a server runs and queues: none is lost, refusals are told."""
    async with pair.only(role):
        records = await pair.burst(requests, 96)
    outcomes = Counter(
        record.error or ("whole" if record.output_tokens == 96 else "short") for record in records
    )
    by = Counter(str(record.backend) for record in records if record.ok)
    lost = [
        record.error
        for record in records
        if record.error and not record.error.startswith(("status 429", "status 503", "error event"))
    ]
    seen = {"requests": requests, "outcomes": outcomes, "whole by": by}
    ok = not lost and outcomes["short"] == 0 and outcomes["whole"] > 0
    refused = any(error.startswith("status") for error in outcomes)
    if not refused and by.keys() == {role.value}:
        return Finding("queue full", None if ok else False, seen | {"note": "it never was full"})
    return Finding("queue full", ok, seen)


async def killed(pair: Pair, role: Role, concurrency: int, within: float) -> Finding:
    """SIGKILL to one server under load: the other serves on, breaks are told, it is used again."""
    port = port_of(pair.backends[role])
    victims = processes_of(port)
    name = f"{role.value} killed under load"
    if not victims:
        return Finding(name, None, {"note": f"no process with --port {port} is to be seen here"})
    stop = asyncio.Event()
    began = time.monotonic()
    async with pair.only(role):
        load = asyncio.create_task(pair.load(concurrency, 64, stop, began))
        await asyncio.sleep(3)
        killed_at = time.monotonic() - began
        os.kill(victims[0], signal.SIGKILL)
        noticed = await pair.until_usable(role, 30, usable=False)
        back = await pair.until_usable(role, within, usable=True)
        back_at = time.monotonic() - began
        await asyncio.sleep(3)
        stop.set()
        records = await load
    after = [record for record in records if record.started > killed_at]
    errors = Counter(record.error for record in records if record.error)
    late = [r for r in after if r.error and r.started > killed_at + 5]
    again = back is not None and any(
        record.ok and record.backend is role and record.started > back_at for record in after
    )
    first = min((r.ended for r in after if r.ok), default=None)
    seen = {
        "requests": len(records),
        "whole": sum(record.ok for record in records),
        "broken, and told": errors,
        "failed later than 5 s after it": len(late),
        "next whole answer after": None if first is None else first - killed_at,
        "not used by the router after": noticed,
        "used by the router again after": None if back is None else back_at - killed_at,
        "and has answered since": again,
    }
    status = await pair.status()
    left = {each["role"]: each["in_flight"] for each in status["backends"]}
    ok = noticed is not None and again and not late and not any(left.values())
    return Finding(name, ok, seen | {"in flight afterwards": left})


async def drained(pair: Pair, launcher: int, streams: int) -> Finding:
    """SIGTERM to whoever started all of it: open streams end whole, nothing is left running."""
    ports = [*map(port_of, pair.backends.values())]
    tokens = 400
    before = {port: processes_of(port) for port in ports}
    asked = asyncio.create_task(pair.burst(streams, tokens))
    await asyncio.sleep(1)
    os.kill(launcher, signal.SIGTERM)
    began = time.monotonic()
    records = await asked
    answered = time.monotonic() - began
    while time.monotonic() - began < 90 and (
        _alive(launcher) or any(_alive(pid) for pids in before.values() for pid in pids)
    ):
        await asyncio.sleep(0.1)
    left = [pid for pids in before.values() for pid in pids if _alive(pid)]
    whole = sum(record.ok and record.output_tokens == tokens for record in records)
    seen = {
        "streams": streams,
        "whole": whole,
        "errors": Counter(record.error for record in records if record.error),
        "last stream ended after": answered,
        "everything ended after": time.monotonic() - began,
        "processes left": left,
    }
    return Finding("SIGTERM", whole == streams and not left and not _alive(launcher), seen)


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
