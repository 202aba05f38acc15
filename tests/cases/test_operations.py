"""Cases of metrics and the running process: what is exported stays small, and true."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import sys

import httpx
from prometheus_client.parser import text_string_to_metric_families

from router.load import Role
from router.policy import FixedPolicy
from tests.cases.common import DONE, END, Pair, body, pair
from tests.raw_client import CHAT, COMPLETIONS, Client, ask, get, post
from tests.scripted_backend import STREAM_HEAD, Call, chunk, event
from tests.stack import run, until


async def metrics(both: Pair) -> str:
    """The exposition."""
    reply = await ask(both.stack.router.admin_port, get("/metrics").replace(b"proxy", b"localhost"))
    assert reply.status == 200
    return reply.body.decode()


def series(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every series that a real parser finds."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_M1_no_name_of_a_client_becomes_a_series() -> None:
    """Random models, huge, with quotes and line ends, or no strings: the number of series is constant.

    1,000 requests for 10,000.
    """
    odd = ["a" * 10_000, 'a"b', "a\nb", "a\\", "", "é", 5, None, [1], {"a": 1}, True, 1e300]

    async def work() -> None:
        async with pair(policy="round-robin") as both:
            client = await Client.open(both.port)

            async def ask_for(model: object, n: int) -> None:
                raw = json.dumps(body(stream=n % 2 == 0) | {"model": model, "user": f"u{n}"})
                path = (CHAT, COMPLETIONS)[n // 2 % 2]
                await client.send(post(raw.encode(), path, (f"x-request-id: id-{n}",)))
                assert (await client.reply()).status == 200

            for n in range(8):
                await ask_for("m", n)
            before = series(await metrics(both))
            for n in range(1000):
                await ask_for(odd[n] if n < len(odd) else f"model-{n}", n)
            client.close()
            text = await metrics(both)
            after = series(text)
            assert set(after) == set(before)
            assert "model-" not in text
            total = sum(v for (name, _), v in after.items() if name == "crossover_requests_total")
            assert total == 1008

    run(work, 30)


def test_M4_nothing_is_kept_of_a_request_that_is_over() -> None:
    """After a warm-up, thousands of requests with ids and users of their own leave no object behind.

    3,000 requests for 200,000, counted in blocks of memory: one for each request would be 800.
    """

    async def work() -> None:
        async with pair(policy="round-robin") as both:
            numbers = itertools.count()

            async def some(count: int) -> None:
                client = await Client.open(both.port)
                for _ in range(count):
                    n = next(numbers)
                    fields = body(stream=n % 2 == 0, user=f"user-{n}", prefix=f"{n} " * 5)
                    await client.send(
                        post(fields, CHAT, (f"x-request-id: id-{n}", f"x-odd-{n % 300}: {n}"))
                    )
                    assert (await client.reply()).status == 200
                client.close()

            async def blocks(count: int) -> int:
                await asyncio.gather(*(some(count // 4) for _ in range(4)))
                await both.quiet()
                await until(lambda: not both.relay.connections)
                for backend in (both.spec, both.base):
                    backend.calls.clear()
                both.relay.access_log.flush()
                await asyncio.sleep(0.05)
                both.stack.lines.clear()
                gc.collect()
                return sys.getallocatedblocks()

            assert both.relay.decisions.view(limit=1) == []
            await blocks(1400)  # the last 1,000 decisions are kept, and headers seen before
            before = await blocks(800)
            after = await blocks(800)
            assert after - before < 300

    run(work, 40)


def test_M3_a_gauge_falls_where_it_rose() -> None:
    """Streams that outlive a change of policy, of the line and a drain leave every gauge at 0."""
    free = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + event("a"))
        await free.wait()
        await call.send(chunk(DONE) + END)

    async def work() -> None:
        admin = {"authorization": "Bearer k"}
        async with (
            pair(answer, admin_key="k") as both,
            httpx.AsyncClient(
                base_url=both.stack.admin_url, headers=admin, trust_env=False
            ) as operator,
        ):

            async def gauges() -> dict[str, float]:
                text = (await operator.get("/metrics")).text
                return {
                    str(dict(labels).get("backend")): value
                    for (name, labels), value in series(text).items()
                    if name == "crossover_in_flight"
                }

            clients = []
            for role in Role:
                both.relay.policy = FixedPolicy(role)
                for n in range(3):
                    client = await Client.open(both.port)
                    await client.send(post(body(stream=True, model=f"m{n}")))
                    await client.saw(b'"a"')
                    clients.append(client)
            assert await gauges() == {"speculative": 3, "baseline": 3}
            for change in ({"policy": "baseline"}, {"policy": "frontier", "threshold": 1}):
                assert (await operator.post("/policy", json=change)).status_code == 200
            for role in Role:
                for what in ("drain", "enable"):
                    done = await operator.post(f"/backends/{role.value}/{what}")
                    assert done.status_code == 200
            assert await gauges() == {"speculative": 3, "baseline": 3}
            free.set()
            for client in clients:
                assert (await client.reply()).whole
                client.close()
            await both.quiet()
            assert await gauges() == {"speculative": 0, "baseline": 0}

    run(work, 20)
