"""Cases of load counters, routing, breaker and health: counted exactly, and routed by what is true."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from router.breaker import BreakerState
from router.config import SettingsError, load_settings
from router.health import Health
from router.load import Role
from router.metrics import Outcome
from router.policies import make_frontier
from router.policy import (
    FixedPolicy,
    FrontierPolicy,
    LeastInFlightPolicy,
    Policy,
    Reason,
    RoundRobinPolicy,
)
from tests.cases.common import DONE, END, Pair, body, defaults, fails, pair, silent
from tests.raw_client import CHAT, COMPLETIONS, Client, ask, get, post
from tests.scripted_backend import STREAM_HEAD, Call, chunk, event, response
from tests.stack import run, until


class Held:
    """A backend whose streams begin at once and end when the test says so."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def answer(self, call: Call) -> None:
        await call.send(STREAM_HEAD + event("a"))
        await self.free.wait()
        await call.send(chunk(DONE) + END)


async def streams_open(both: Pair, count: int) -> list[Client]:
    """So many clients, each with a stream that has begun."""

    async def one() -> Client:
        client = await Client.open(both.port)
        await client.send(post(body(stream=True)))
        await client.saw(b'"a"')
        return client

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def end_all(clients: list[Client], held: Held) -> None:
    """Let all of them end; each must have come whole."""
    held.free.set()
    for client in clients:
        assert (await client.reply()).whole
        client.close()


def test_L1_no_fate_of_a_request_leaks_a_count() -> None:
    """A quarter each of resets, silence, clients that leave and answers: nothing is left counted.

    1,000 requests as reported, 50 at a time; the next ones are routed as on a fresh start.
    """
    dice = random.Random(1001)

    async def answer(call: Call) -> None:
        if b'"reset"' in call.body:
            await call.send(STREAM_HEAD + event("a"))
            call.reset()
        elif b'"silent"' in call.body:
            await call.peer_closed.wait()
        else:
            await asyncio.sleep(dice.random() * 0.01)
            await call.send(STREAM_HEAD + event("a"))
            await asyncio.sleep(dice.random() * 0.01)
            await call.send(chunk(DONE) + END)

    async def one(both: Pair, n: int, gate: asyncio.Semaphore) -> None:
        async with gate:
            what = ("reset", "silent", "leaves", "ok")[n % 4]
            client = await Client.open(both.port)
            path = (CHAT, COMPLETIONS)[n // 4 % 2]
            await client.send(post(body(stream=n // 8 % 2 == 0, user=what), path))
            if what == "leaves":
                await asyncio.sleep(dice.random() * 0.02)
                client.abort() if n // 16 % 2 else client.close()
                return
            reply = await client.reply()
            assert reply.whole is (what != "reset" or reply.status == 502)
            assert what != "silent" or reply.status == 504
            client.close()

    async def work() -> None:
        settings: dict[str, Any] = {"first_byte_timeout": "900ms", "replay_window": "50ms"}
        async with pair(answer, policy="least-in-flight", **settings) as both:
            gate = asyncio.Semaphore(50)
            await asyncio.gather(*(one(both, n, gate) for n in range(1000)))
            await both.quiet()
            assert both.relay.connection_counts().backend_busy == dict.fromkeys(Role, 0)
            fates = {o for (_, _, o), n in both.relay.metrics.requests.items() if n}
            assert fates >= {Outcome.OK, Outcome.BACKEND_LOST, Outcome.TIMEOUT, Outcome.CLIENT_GONE}
            both.spec.calls.clear()
            both.base.calls.clear()
            held = Held()
            both.spec.answer = both.base.answer = held.answer
            clients = await streams_open(both, 8)
            assert both.stack.in_flight() == (4, 4) == (both.spec.in_flight, both.base.in_flight)
            await end_all(clients, held)

    run(work, 40)


def test_L2_clients_that_leave_before_the_head_are_not_counted() -> None:
    """200 clients leave while no head has come, then a backend restarts: the split is as before.

    The backend answers only after the client has left, in place of 50 ms against 1 s.
    """

    async def late(call: Call) -> None:
        await call.peer_closed.wait()
        with contextlib.suppress(OSError):
            await call.send(response())

    async def work() -> None:
        async with pair(late, policy="least-in-flight") as both:
            for _ in range(4):
                clients = [await Client.open(both.port) for _ in range(50)]
                for n, client in enumerate(clients):
                    await client.send(post(body(stream=n % 2 == 0)))
                await until(lambda: both.stack.in_flight() == (25, 25))
                await until(lambda: both.spec.in_flight + both.base.in_flight == 50)
                for n, client in enumerate(clients):
                    client.abort() if n % 2 else client.close()
                await both.quiet()
            assert both.count(Outcome.CLIENT_GONE) == 200
            await both.spec.leave()
            await both.spec.come_back()
            both.spec.calls.clear()
            both.base.calls.clear()
            held = Held()
            both.spec.answer = both.base.answer = held.answer
            clients = await streams_open(both, 20)
            assert (len(both.spec.calls), len(both.base.calls)) == (10, 10)
            await end_all(clients, held)

    run(work, 20)


def frozen(telemetry: bool) -> bytes:
    """What `/v1/loads` says for ever: idle, or nothing."""
    if not telemetry:
        return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    return response(b'{"loads":[{"num_running_reqs":0,"num_waiting_reqs":0}]}')


def test_L4_a_burst_is_routed_by_our_own_count() -> None:
    """With telemetry frozen at 0, or none, a burst of 50 puts exactly 8 on the speculative server."""

    async def work() -> None:
        for telemetry in (True, False):
            held = Held()

            async def probe(path: bytes, told: bytes = frozen(telemetry)) -> bytes:
                return told if path == b"/v1/loads" else response(b"{}")

            async with pair(held.answer, threshold=8) as both:
                both.spec.probe = both.base.probe = probe
                told = both.relay.tracker.speculative
                if telemetry:
                    await until(lambda: told.telemetry is not None)  # noqa: B023
                clients = await streams_open(both, 50)
                assert both.stack.in_flight() == (8, 42)
                assert (both.spec.in_flight, both.base.in_flight) == (8, 42)
                await end_all(clients, held)

    run(work, 20)


def test_L11_errors_of_clients_do_not_open_the_breaker() -> None:
    """50 answers of 400, 401, 404 and 422 leave the breaker closed and the next request is served."""

    async def work() -> None:
        async with pair(breaker_failures=5) as both:
            for role in Role:
                for n in range(50):
                    status = ("400 X", "401 X", "404 X", "422 X")[n % 4]
                    both.on(role, fails(status))
                    path = (CHAT, COMPLETIONS)[n // 4 % 2]
                    reply = await both.ask(body(stream=n // 8 % 2 == 0), path)
                    assert reply.status == int(status[:3])
                found = both.relay.health.status(role)
                assert (found.breaker, found.failures) == (BreakerState.CLOSED, 0)
                chosen, _ = both.on(role, Held().answer)
                chosen.answer = fails("200 OK")
                assert (await both.ask(body())).status == 200
                assert len(chosen.calls) == 1

    run(work, 20)


def test_L7_look_and_count_are_one_step() -> None:
    """64 requests that start together are split exactly as 64 that come one after another."""

    async def work() -> None:
        for policy, split in (("least-in-flight", (32, 32)), ("frontier", (20, 44))):
            held = Held()
            async with pair(held.answer, policy=policy, threshold=20) as both:
                row = []
                for _ in range(64):
                    row += await streams_open(both, 1)
                assert both.stack.in_flight() == split
                await end_all(row, held)
                await both.quiet()
                held.free.clear()
                both.relay.tracker.memory = type(both.relay.tracker.memory)()  # without a dwell
                clients = [await Client.open(both.port) for _ in range(64)]
                barrier = asyncio.Event()

                async def go(client: Client, start: asyncio.Event = barrier) -> None:
                    await start.wait()
                    await client.send(post(body(stream=True)))
                    await client.saw(b'"a"')

                going = [asyncio.ensure_future(go(client)) for client in clients]
                barrier.set()
                await asyncio.gather(*going)
                assert both.stack.in_flight() == split
                assert (both.spec.in_flight, both.base.in_flight) == split
                await end_all(clients, held)

    run(work, 30)


def test_L14_one_slow_health_reply_changes_nothing() -> None:
    """Slow health checks, and one in four that is missed, flip nothing; ours answers at once under load.

    A check takes 20 ms of its 200 (1 to 2 s of 25), a missed one 300 ms (6 s); 200 streams run.
    """
    asked: Counter[str] = Counter()

    async def probe(path: bytes) -> bytes:
        if path == b"/health":
            asked["health"] += 1
            await asyncio.sleep(0.3 if asked["health"] % 4 == 3 else 0.02)
        return response(b"{}") if path == b"/health" else frozen(telemetry=False)

    async def work() -> None:
        held = Held()
        settings: dict[str, Any] = {"health_interval": "20ms", "health_timeout": "200ms"}
        async with pair(held.answer, policy="least-in-flight", **settings) as both:
            both.spec.watch_s = both.base.watch_s = 0.1
            assert defaults().health_down_after == 3
            both.spec.probe = both.base.probe = probe
            clients = await streams_open(both, 200)
            states = set()
            took = []
            end = time.monotonic() + 10
            while asked["health"] < 6:
                began = time.monotonic()
                reply = await ask(both.port, get("/health"))
                took.append(time.monotonic() - began)
                assert reply.status == 200
                states |= {both.relay.health.status(role).health for role in Role}
                await asyncio.sleep(0.02)
                assert time.monotonic() < end
            assert states <= {Health.UP, Health.UNKNOWN}
            assert both.stack.in_flight() == (100, 100)
            assert statistics.median(took) < 0.5
            await end_all(clients, held)
            assert both.relay.health.status(Role.SPECULATIVE).usable

    run(work, 20)


def test_L13_a_full_queue_is_no_fault() -> None:
    """30 refusals for a full queue open no breaker, and the engine is asked again within 2 s."""
    full = fails("503 Service Unavailable", b"", b'{"error":{"message":"queue full"}}')

    async def work() -> None:
        for role in Role:
            async with pair(breaker_failures=5) as both:
                chosen, _ = both.on(role, full, full)
                for n in range(30):
                    assert (await both.ask(body(stream=n % 2 == 0))).status == 503
                assert {both.relay.health.status(r).breaker for r in Role} == {BreakerState.CLOSED}
                assert defaults().cool_down <= 2.0
                both.relay.policy = RoundRobinPolicy()
                both.spec.answer = both.base.answer = fails("200 OK")
                chosen.calls.clear()
                drained = time.monotonic()
                while not chosen.calls:
                    assert (await both.ask(body())).status == 200
                    await asyncio.sleep(0.02)
                    assert time.monotonic() - drained < 10.0

    run(work, 20)


def test_L5_health_checks_never_touch_the_counts() -> None:
    """Many health intervals, and a backend that fails and recovers, leave the count at 20."""
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    state = {"ok": True, "asked": 0}

    async def probe(path: bytes) -> bytes:
        state["asked"] += 1
        return ok if state["ok"] else fails_probe

    fails_probe = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"

    async def work() -> None:
        held = Held()
        settings: dict[str, Any] = {"health_interval": "20ms", "ready_interval": "20ms"}
        async with pair(held.answer, **settings) as both:
            both.relay.policy = FixedPolicy(Role.SPECULATIVE)
            both.spec.probe = probe
            clients = await streams_open(both, 20)
            seen = set()

            async def look() -> None:
                while True:
                    seen.add(both.stack.in_flight())
                    await asyncio.sleep(0.002)

            watching = asyncio.ensure_future(look())
            health = both.relay.health
            for good, wanted in ((True, Health.UP), (False, Health.DOWN), (True, Health.UP)):
                state["ok"] = good
                await until(lambda: health.status(Role.SPECULATIVE).health is wanted)  # noqa: B023
                before = state["asked"]
                await until(lambda: state["asked"] > before + 6)  # noqa: B023
            watching.cancel()
            assert seen == {(20, 0)}
            await end_all(clients, held)

    run(work, 20)


def test_L6_changes_of_policy_neither_lose_nor_double_a_count() -> None:
    """Policy, line and drain change while requests run; no count goes below 0, and ties have a rule.

    The router reloads nothing else, and no operation sets a count: there is no reset to survive.
    """

    async def work() -> None:
        lows: list[int] = []

        async def quick(call: Call) -> None:
            await asyncio.sleep(0.002)
            await call.send(response())

        async with pair(quick, policy="least-in-flight") as both:
            relay = both.relay
            policies: Iterator[Policy] = itertools.cycle(
                [
                    LeastInFlightPolicy(),
                    FrontierPolicy(make_frontier(4)),
                    FixedPolicy(Role.BASELINE),
                ]
            )

            async def change() -> None:
                for role in itertools.cycle(Role):
                    relay.policy = next(policies)
                    relay.health.drain(role, drained=True, now=relay.clock())
                    lows.append(min(both.stack.in_flight()))
                    await asyncio.sleep(0.003)
                    relay.health.drain(role, drained=False, now=relay.clock())

            changing = asyncio.ensure_future(change())
            for _ in range(10):
                found = await asyncio.gather(
                    *(both.ask(body(stream=n % 2 == 0)) for n in range(30))
                )
                assert {reply.status for reply in found} == {200}
            changing.cancel()
            await both.quiet()
            assert min(lows) == 0

            # A tie goes to the speculative server: one after another, all 100 are ties.
            relay.policy = LeastInFlightPolicy()
            for role in Role:
                relay.health.drain(role, drained=False, now=relay.clock())
            both.spec.calls.clear()
            both.base.calls.clear()
            client = await Client.open(both.port)
            for _ in range(100):
                await client.send(post(body()))
                assert (await client.reply()).status == 200
            client.close()
            assert (len(both.spec.calls), len(both.base.calls)) == (100, 0)
            assert "a tie goes to the speculative one" in (LeastInFlightPolicy.__doc__ or "")

    run(work, 20)


@pytest.mark.parametrize("policy", ["least-in-flight", "frontier"])
def test_L9_failing_fast_does_not_attract_the_load(policy: str) -> None:
    """A backend that fails at once gets no more than ten of 200 requests, and is found again later.

    20 clients in closed loops; the other answers in 30 ms for 1 s, the breaker opens for 200 ms
    for 5 s.
    """

    async def slow(call: Call) -> None:
        await asyncio.sleep(0.03)
        await call.send(response())

    async def rounds(both: Pair) -> list[int]:
        found: list[int] = []

        async def loop() -> None:
            client = await Client.open(both.port)
            for n in range(10):
                await client.send(post(body(stream=n % 2 == 0)))
                found.append((await client.reply()).status)
            client.close()

        await asyncio.gather(*(loop() for _ in range(20)))
        assert len(found) == 200
        return found

    async def work() -> None:
        settings: dict[str, Any] = {
            "policy": policy,
            "breaker_failures": 5,
            "breaker_open": "200ms",
        }
        for status in ("500 Internal Server Error", "429 Too Many Requests"):
            async with pair(slow, threshold=30, band=0, dwell=0, **settings) as both:
                both.spec.answer = fails(status)
                found = await rounds(both)
                assert found.count(200) == 200 - found.count(int(status[:3]))
                # 20 arrive at once, before the first failure is known.
                assert found.count(200) >= (190 if policy == "least-in-flight" else 180)
                assert len(both.spec.calls) <= 40
                both.spec.answer = slow
                both.spec.calls.clear()
                healed = time.monotonic()
                while not both.spec.calls:
                    assert (await both.ask(body())).status == 200
                    assert time.monotonic() - healed < 10.0
                await until(
                    lambda: (
                        both.relay.health.status(Role.SPECULATIVE).breaker is BreakerState.CLOSED
                    )
                )

    run(work, 30)


def test_L15_a_backend_that_hangs_behind_a_good_health_check_is_left_alone() -> None:
    """Requests that are never answered end in 504 and open the breaker, whatever `/health` says.

    The time to a first byte is 300 ms for 900 s; the breaker opens for 200 ms for 5 s.
    """
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"

    async def healthy(path: bytes) -> bytes:
        return ok if path in {b"/health", b"/ready"} else frozen(telemetry=False)

    async def work() -> None:
        assert defaults().breaker_failures == 5
        assert defaults().first_byte_timeout == 900.0
        for role in Role:
            settings: dict[str, Any] = {
                "first_byte_timeout": "300ms",
                "breaker_open": "200ms",
                "breaker_failures": 5,
            }
            async with pair(**settings) as both:
                both.spec.probe = both.base.probe = healthy
                chosen, spare = both.on(role, silent)
                found = await asyncio.gather(*(both.ask(body(stream=n % 2 == 0)) for n in range(5)))
                assert {(r.status, r.error["code"]) for r in found} == {(504, "first_byte_timeout")}
                status = both.relay.health.status(role)
                assert (status.breaker, status.health) == (BreakerState.OPEN, Health.UP)
                for _ in range(10):
                    reply = await both.ask(body())
                    assert reply.status == 200
                    assert reply.header("x-crossover-reason") == Reason.UNAVAILABLE.value
                assert (len(chosen.calls), len(spare.calls)) == (5, 10)
                chosen.answer = fails("200 OK")
                await until(lambda: both.relay.health.status(role).usable)  # noqa: B023
                assert (await both.ask(body())).status == 200
                assert len(chosen.calls) == 6
                assert both.relay.health.status(role).breaker is BreakerState.CLOSED

    run(work, 20)


def test_L10_several_workers_are_refused_with_the_reason() -> None:
    """`--workers 4` and WEB_CONCURRENCY=4 end the start with one clear line, code 2."""

    async def work() -> None:
        for flags, environ in ((["--workers", "4"], {}), ([], {"WEB_CONCURRENCY": "4"})):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "router", "serve", "--threshold", "8", *flags,
                "--speculative", "http://127.0.0.1:1", "--baseline", "http://127.0.0.1:2",
                env={**os.environ, **environ}, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, said = await process.communicate()
            assert process.returncode == 2
            assert b"one process owns the counts" in said
            assert (b"workers = '4'" in said) or (b"WEB_CONCURRENCY = '4'" in said)
        with pytest.raises(SettingsError, match="one process"):
            load_settings({"workers": 2}, environ={})

    run(work, 20)


LOADS = b'{"loads":[{"num_running_reqs":%b,"num_waiting_reqs":0}]}'
BROKEN = {
    "renamed": response(b'{"loads":[{"running":3,"waiting":0}]}'),
    "not a number": response(LOADS % b"NaN"),
    "negative": response(LOADS % b"-1"),
    "text": response(LOADS % b'"3"'),
    "HTML": response(b"<html>busy</html>"),
    "404": frozen(telemetry=False),
    "5 MB": response(b"[" + b"0," * 2_500_000 + b"0]"),
    "duplicate series": response(b"sglang:num_running_reqs 1\nsglang:num_running_reqs 2\n"),
    "null": response(b'{"loads":null}'),
    "empty": response(b""),
}


def test_L8_telemetry_of_another_shape_is_unknown() -> None:
    """Renamed, NaN, negative, HTML, huge or slow: the signal is unknown, our own count decides.

    A reply that never comes is given up after 1.5 s; the report has 30 s.
    """
    told = {"now": response(LOADS % b"3")}

    async def probe(path: bytes) -> bytes:
        if path not in {b"/v1/loads", b"/get_load", b"/metrics"}:
            return frozen(telemetry=False)
        if not told["now"]:
            await asyncio.sleep(30)
        return told["now"]

    async def work() -> None:
        settings: dict[str, Any] = {"telemetry_interval": "10ms", "telemetry_stale": "100ms"}
        async with pair(policy="least-in-flight", **settings) as both:
            both.spec.probe = probe
            tracker, clock = both.relay.tracker, both.relay.clock

            def load() -> tuple[bool, int, int | None]:
                seen = tracker.snapshot(clock()).speculative
                return seen.fresh, seen.concurrency, seen.queued

            for name, broken in {**BROKEN, "silence": b""}.items():
                told["now"] = response(LOADS % b"3")
                await until(lambda: load() == (True, 3, 0))
                told["now"] = broken
                with contextlib.suppress(AssertionError):
                    await until(lambda: load() == (False, 0, None), 3)
                assert load() == (False, 0, None), name
                # Neither idle nor full: both are compared by what we count ourselves.
                reply = await both.ask(body())
                assert (reply.status, reply.header("x-crossover-concurrency")) == (200, "0/0"), name
            told["now"] = response(LOADS % b"2")
            await until(lambda: load() == (True, 2, 0))
            assert not any(task.done() for task in both.stack.router._tasks)

    run(work, 30)
