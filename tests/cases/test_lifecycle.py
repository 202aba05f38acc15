"""Cases of the life of a request: disconnects, pools, timeouts, retries, drain and addresses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import socket
import time
from typing import Any

import pytest

from router.app import raise_file_limit
from router.breaker import BreakerState
from router.config import SettingsError, load_settings
from router.config_fields import Timeouts
from router.load import Role
from router.metrics import Outcome, Retry
from router.policy import FixedPolicy
from tests.cases.common import (
    DONE,
    END,
    TOKEN,
    Pair,
    body,
    defaults,
    every,
    fails,
    open_files,
    pair,
    settles,
    silent,
)
from tests.cases.process import serving
from tests.raw_client import CHAT, Client, Reply, ask, chunked, get, post
from tests.scripted_backend import (
    STREAM_HEAD,
    Answer,
    Call,
    ScriptedBackend,
    answer_ok,
    chunk,
    event,
    full_backlog,
    response,
    scripted_backend,
)
from tests.stack import run, running_router, until


async def endless(call: Call) -> None:
    """A token each 5 ms, until the peer leaves."""
    await call.send(STREAM_HEAD)
    while not call.peer_closed.is_set():
        await call.send(event("t"))
        await asyncio.sleep(0.005)


async def leaves(both: Pair, fields: dict[str, Any], path: str, *, rst: bool, tokens: int) -> None:
    """A client that leaves after so many tokens."""
    client = await Client.open(both.port)
    await client.send(post(fields, path))
    if tokens:
        await client.saw(b"\r\n\r\n")
        while client.raw.count(b'"t"') < tokens:
            await client._more()
    client.abort() if rst else client.close()


def test_D7_connects_that_are_given_up_cost_no_slot() -> None:
    """Clients that leave while a backend answers no SYN cost no place and no file, in 8 rounds.

    120 requests in each: more than any client library's pool has places.
    """

    async def work() -> None:
        with full_backlog() as port:
            async with pair(speculative=f"http://127.0.0.1:{port}") as both:
                both.relay.policy = FixedPolicy(Role.SPECULATIVE)
                before = open_files()
                for n in range(8):
                    clients = [await Client.open(both.port) for _ in range(120)]
                    for i, client in enumerate(clients):
                        await client.send(post(body(stream=i % 2 == 0)))
                    await until(lambda: both.relay.tracker.speculative.in_flight == 120)
                    for client in clients:
                        client.abort() if n % 2 else client.close()
                    await until(lambda: both.stack.in_flight() == (0, 0))
                both.relay.policy = FixedPolicy(Role.BASELINE)
                began = time.monotonic()
                assert (await both.ask(body())).status == 200
                assert time.monotonic() - began < 5.0
                assert both.count(Outcome.CLIENT_GONE) == 960
                await until(lambda: not both.relay.connections)
                await settles(open_files, before + 8)
                assert both.relay.pools[Role.SPECULATIVE].open == set()

    run(work, 30)


def test_D2_a_client_that_leaves_ends_the_generation() -> None:
    """RST or FIN after ten tokens of an endless stream closes the backend's connection within 1 s.

    A token each 5 ms for 20 ms.
    """

    async def work() -> None:
        async with pair(endless) as both:
            for (role, path, _), rst in itertools.product(
                [v for v in every() if v[2]], (True, False)
            ):
                chosen, _ = both.on(role, endless)
                gone = both.count(Outcome.CLIENT_GONE)
                await leaves(both, body(stream=True), path, rst=rst, tokens=10)
                left = time.monotonic()
                await asyncio.wait_for(chosen.calls[0].peer_closed.wait(), 1)
                assert (chosen.calls[0].closed_at or 0.0) - left < 1.0
                await both.quiet()
                assert both.count(Outcome.CLIENT_GONE) == gone + 1
            assert both.count(Outcome.BACKEND_ERROR) == 0 == both.count(Outcome.BACKEND_LOST)

    run(work, 30)


def test_D10_no_default_cuts_a_long_generation() -> None:
    """First byte after 20 s, a stream of 440 s and an answer after 70 s complete with the defaults.

    The whole times, on a clock of the router's that runs 400 times as fast.
    """
    times = {name for name in Timeouts.model_fields if name.endswith(("timeout", "window"))}
    assert {name: getattr(defaults(), name) for name in times} == {
        "header_timeout": 10.0,
        "body_timeout": 30.0,
        "connect_timeout": 3.0,
        "first_byte_timeout": 900.0,
        "idle_timeout": 300.0,
        "write_timeout": 60.0,
        "replay_window": 0.25,
        "peek_timeout": 0.05,
        "drain_timeout": 60.0,
    }  # fmt: skip (none of them bounds a whole answer)
    began = time.monotonic()

    def fast() -> float:
        return began + 400 * (time.monotonic() - began)

    async def answer(call: Call) -> None:
        start = fast()

        async def at(seconds: float) -> None:
            while fast() - start < seconds:
                await asyncio.sleep(0.002)

        if b'"stream": false' in call.body:
            await at(70)
            await call.send(response())
            return
        await at(20)
        await call.send(STREAM_HEAD + event("first"))
        for n in range(30, 450, 10):
            await at(n)
            await call.send(event("t"))
        await call.send(chunk(DONE) + END)

    async def work() -> None:
        async with pair(answer, policy="round-robin") as both:
            both.relay.clock = fast
            for pool in both.relay.pools.values():
                pool.clock = fast
            start = fast()
            asked = [both.ask(body(stream=stream), path) for _, path, stream in every()]
            for reply in await asyncio.gather(*asked):
                assert (reply.status, reply.whole) == (200, True)
            assert fast() - start >= 440

    run(work, 20)


async def storm(port: int, count: int) -> list[Client]:
    """So many streams that are open at once, some perhaps turned away."""

    async def one() -> Client:
        client = await Client.open(port)
        await client.send(post(body(stream=True)))
        with contextlib.suppress(AssertionError):
            await client.saw(b"\r\n\r\n", 10)
        return client

    return list(await asyncio.gather(*(one() for _ in range(count))))


@pytest.mark.parametrize("files", [1024, 4096])
def test_D8_500_streams_at_once_are_served_or_told(files: int) -> None:
    """500 streams at once with few and with enough file descriptors: each is whole or a 503.

    With 1,024 there is room for 448 pairs of connections, and 128 descriptors are kept free.

    They last as long as it takes to open the last one, for 5 s.
    """
    raise_file_limit()
    free = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + event("a"))
        await free.wait()
        await call.send(chunk(DONE) + END)

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            serving(spec, base, "--policy", "least-in-flight", files=files) as router,
        ):
            spec.watch_s = base.watch_s = 0.2
            clients = await storm(router.port, 500)
            if files > 2000:
                assert spec.in_flight + base.in_flight == 500
            free.set()
            statuses = []
            for client in clients:
                reply = await client.reply(10)
                client.close()
                assert reply.status in {200, 503}, (reply.reset, reply.timed_out)
                assert reply.whole
                told = {"overloaded", "too_many_connections"}
                assert reply.status == 200 or reply.error["code"] in told
                statuses.append(reply.status)
            assert statuses.count(200) >= (500 if files > 2000 else 350)
            again = await ask(router.port, post(body(stream=True)))
            assert (again.status, again.whole) == (200, True)
            assert router.process.returncode is None
            assert "Traceback" not in router.output

    run(work, 40)


def test_D14_sigterm_lets_streams_end() -> None:
    """Ten streams end whole after SIGTERM, a new request is refused, and the exit is 0 within 1 s.

    Streams last until the new request was refused, for 8 s. As PID 1 of a container only signals
    with a handler arrive: SIGTERM has one.
    """
    free = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + event("a"))
        await free.wait()
        await call.send(event("b") + chunk(DONE) + END)

    async def refused(port: int) -> bool:
        try:
            reply = await ask(port, post(body(stream=True)), 0.1)
        except ConnectionRefusedError:
            return True
        return reply.status == 503

    async def work() -> None:
        assert defaults().drain_timeout == 60.0
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            serving(spec, base, "--policy", "round-robin", "--drain-delay", "100ms") as router,
        ):
            assert int(router.fact("SigCgt"), 16) >> (signal.SIGTERM - 1) & 1
            clients = await storm(router.port, 10)
            await until(lambda: (spec.in_flight, base.in_flight) == (5, 5))
            router.terminate()
            async with asyncio.timeout(10):
                while not await refused(router.port):
                    free.clear()
                    await asyncio.sleep(0.05)
                    assert spec.in_flight + base.in_flight >= 10
            free.set()
            for client in clients:
                reply = await client.reply()
                assert (reply.whole, reply.body[-len(DONE) :]) == (True, DONE)
                client.close()
            last = time.monotonic()
            assert await router.ended() == 0
            assert time.monotonic() - last < 5.0

    run(work, 30)


def test_D9_a_connection_that_the_backend_closed_costs_nothing() -> None:
    """Requests at the moment when an idle connection is closed succeed, each with one POST or two.

    Closed after 10 ms for 1 s, requests 8 to 12 ms apart for 0.9 to 1.1 s, 150 of them for 1,000.
    """

    async def work() -> None:
        assert defaults().backend_keep_alive == 4.0  # so the backend's own limit comes first here
        for role in Role:
            async with pair() as both:
                chosen, spare = both.on(role, answer_ok)
                chosen.keep_alive_s = 0.01
                client = await Client.open(both.port)
                for n in range(75):
                    await client.send(post(body(stream=n % 2 == 0)))
                    reply = await client.reply()
                    assert (reply.status, reply.whole) == (200, True)
                    await asyncio.sleep(0.008 + n % 5 / 1000)
                client.close()
                assert len(chosen.calls) == 75
                assert spare.calls == []

                # It reads the second request and closes: once more, on a fresh connection.
                chosen.keep_alive_s = None

                async def closes(call: Call) -> None:
                    if call.reused:
                        call.close()
                    else:
                        await call.send(response())

                await asyncio.sleep(0.02)
                both.on(role, closes)
                for n in range(2):
                    assert (await both.ask(body(stream=n == 1))).status == 200
                assert [call.reused for call in chosen.calls] == [0, 1, 0]
                assert both.retries(Retry.STALE) >= 1

                # And no more than once: the fresh one is closed, too.
                async def always(call: Call) -> None:
                    call.close()

                both.on(role, always)
                reply = await both.ask(body())
                assert (reply.status, reply.error["code"]) == (502, "backend_lost")
                assert [call.reused > 0 for call in chosen.calls] == [True, False]
                assert spare.calls == []

                # A byte of an answer was read: never again.
                both.on(role, answer_ok)
                assert (await both.ask(body())).status == 200

                async def one_byte(call: Call) -> None:
                    await call.send(b"H")
                    call.close()

                both.on(role, one_byte)
                assert (await both.ask(body())).status == 502
                assert len(chosen.calls) == 1

    run(work, 30)


def test_D3_requests_without_a_stream_are_cancelled_too() -> None:
    """A client that leaves while nothing has come closes the backend's connection within 1 s."""

    async def work() -> None:
        settings: dict[str, Any] = {"api_keys": "k", "cors_origin": "*"}  # all that is shipped
        async with pair(silent, **settings) as both:
            for (role, path, stream), rst in itertools.product(every(), (True, False)):
                chosen, _ = both.on(role, silent)
                client = await Client.open(both.port)
                await client.send(post(body(stream=stream), path, ("authorization: Bearer k",)))
                await until(lambda: chosen.in_flight == 1)  # noqa: B023
                client.abort() if rst else client.close()
                await asyncio.wait_for(chosen.calls[0].peer_closed.wait(), 1)
                await both.quiet()
            assert both.count(Outcome.CLIENT_GONE) == 16

    run(work, 20)


def test_D13_nothing_is_tried_again_once_bytes_went_out() -> None:
    """A backend that dies after the role event, or five tokens: the other gets nothing."""
    first = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'

    async def work() -> None:
        async with pair(retry_budget=1) as both:
            for role, path, _ in [v for v in every() if v[2]]:
                for events, rst in itertools.product(
                    ([first], [first, *[TOKEN % b"t"] * 5]), (True, False)
                ):

                    async def dies(
                        call: Call, events: list[bytes] = events, rst: bool = rst
                    ) -> None:
                        await call.send(STREAM_HEAD + b"".join(map(chunk, events)))
                        await asyncio.sleep(0.01)
                        call.reset() if rst else call.close()

                    chosen, spare = both.on(role, dies)
                    reply = await both.ask(body(stream=True), path)
                    assert (reply.status, reply.whole) == (200, False)
                    assert reply.body.startswith(b"".join(events))
                    assert reply.body.count(first) == 1
                    assert (len(chosen.calls), spare.calls) == (1, [])

    run(work, 20)


async def headless(call: Call) -> None:
    """Headers, then silence."""
    await call.send(STREAM_HEAD if b'"stream": true' in call.body else response()[:60])
    await call.peer_closed.wait()


async def one_byte(call: Call) -> None:
    """Headers and one byte, then silence."""
    head = response(b"{}")
    await call.send(STREAM_HEAD + b"1\r\nd\r\n" if b'"stream": true' in call.body else head[:-1])
    await call.peer_closed.wait()


def test_D11_every_silence_ends_and_is_named() -> None:
    """No connect, no head, a head only, one byte only: each ends by its own timer, named in the error."""
    kinds: dict[bytes, Answer] = {b"silent": silent, b"headless": headless, b"one_byte": one_byte}

    async def answer(call: Call) -> None:
        await next(kinds[kind] for kind in kinds if kind in call.body)(call)

    async def check(both: Pair, role: Role, path: str, kind: str, *, stream: bool) -> None:
        pin = f"x-crossover-backend: {role.value}"
        reply = await both.ask(body(stream=stream, user=kind), path, pin)
        assert not reply.timed_out
        if stream and kind != "silent":
            assert (reply.status, reply.whole) == (200, False)
            assert (b'"code":"idle_timeout"' in reply.body) is (kind == "headless")
            return
        # Half a head is no answer yet.
        code = "idle_timeout" if kind == "one_byte" else "first_byte_timeout"
        assert (reply.status, reply.error["code"]) == (504, code)

    async def work() -> None:
        settings: dict[str, Any] = {
            "first_byte_timeout": "300ms", "idle_timeout": "300ms", "connect_timeout": "200ms",
        }  # fmt: skip
        async with pair(answer, allow_pinning=True, **settings) as both:
            await asyncio.gather(
                *(
                    check(both, role, path, kind.decode(), stream=stream)
                    for (role, path, stream), kind in itertools.product(every(), kinds)
                )
            )
        with full_backlog() as one, full_backlog() as two:
            urls: dict[str, Any] = {
                "speculative": f"http://127.0.0.1:{one}", "baseline": f"http://127.0.0.1:{two}",
            }  # fmt: skip
            async with pair(**settings, **urls) as both:
                replies = await asyncio.gather(
                    *(both.ask(body(stream=s), p) for _, p, s in every())
                )
                for reply in replies:
                    assert (reply.status, reply.error["code"]) == (502, "backend_connect_timeout")

    run(work, 30)


def test_D12_what_may_be_running_is_never_sent_twice() -> None:
    """Silence, 502, 504 and RST after reading: one POST in all; a replay carries the same id."""

    async def resets(call: Call) -> None:
        call.reset()

    async def resets_late(call: Call) -> None:
        await asyncio.sleep(0.3)  # beyond the default window for a stale connection
        call.reset()

    async def work() -> None:
        settings: dict[str, Any] = {"first_byte_timeout": "400ms"}
        async with pair(**settings) as both:
            for role in Role:
                for answer, status in (
                    (fails("502 Bad Gateway"), 502),
                    (fails("504 Gateway Timeout"), 504),
                    (resets_late, 502),
                    (silent, 504),
                    (resets, 502),
                ):
                    for pool in both.relay.pools.values():
                        pool.close()  # each on a fresh connection
                    if answer is resets_late:
                        both.on(role, answer_ok)  # but these two
                        await asyncio.gather(both.ask(body()), both.ask(body()))
                    chosen, spare = both.on(role, answer)
                    for reply in await asyncio.gather(
                        both.ask(body(stream=True)), both.ask(body(stream=False))
                    ):
                        assert reply.status == status
                    assert (len(chosen.calls), len(spare.calls)) == (2, 0)
                    if answer is resets_late:
                        assert max(call.reused for call in chosen.calls) == 1

                chosen, spare = both.on(role, fails("503 Service Unavailable"))
                reply = await both.ask(body(), CHAT, "x-request-id: same")
                assert reply.status == 200
                for call in (*chosen.calls, *spare.calls):
                    assert call.headers[b"x-request-id"] == b"same"
                assert (len(chosen.calls), len(spare.calls)) == (1, 1)
            assert both.retries(Retry.STALE) == 0

    run(work, 20)


def test_D15_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every proxy variable pointing to a dead port the router works as without."""
    for name in (
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
    ):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    probed: set[bytes] = set()

    async def probe(path: bytes) -> bytes:
        probed.add(path)
        return response(b"{}")

    async def work() -> None:
        async with pair() as both:
            both.spec.probe = both.base.probe = probe
            for role, path, stream in every():
                both.on(role, answer_ok)
                assert (await both.ask(body(stream=stream), path)).status == 200
            both.on(Role.SPECULATIVE, answer_ok)
            assert (await ask(both.port, get("/v1/models"))).status == 200
            await until(lambda: probed >= {b"/ready", b"/v1/loads", b"/metrics"})

    run(work, 20)


def test_D4_clients_that_leave_as_the_head_comes_leak_nothing() -> None:
    """500 times a client closes within 5 ms of the head's coming: no count and no file stays."""
    dice = random.Random(404)

    async def answer(call: Call) -> None:
        await asyncio.sleep(dice.random() * 0.005)
        with contextlib.suppress(ConnectionError):
            await call.send(STREAM_HEAD if dice.random() < 0.5 else STREAM_HEAD + event("a"))
            await call.peer_closed.wait()

    async def one(both: Pair) -> None:
        client = await Client.open(both.port)
        await client.send(post(body(stream=dice.random() < 0.5)))
        await asyncio.sleep(dice.random() * 0.005)
        client.abort() if dice.random() < 0.5 else client.close()

    async def work() -> None:
        async with pair(answer, policy="round-robin") as both:
            before = open_files()
            for _ in range(20):
                await asyncio.gather(*(one(both) for _ in range(25)))
            await both.quiet()
            await until(lambda: not both.relay.connections)
            assert both.count(Outcome.CLIENT_GONE) + both.count(Outcome.BACKEND_LOST) > 100
            await settles(open_files, before + 8)

    run(work, 30)


def test_D5_cleaning_up_hangs_on_no_task_of_the_answer() -> None:
    """150 streams whose client leaves and 150 whose backend breaks leave no count and no file."""

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + event("t"))
        if b'"breaks"' in call.body:
            call.reset()
        else:
            await call.peer_closed.wait()

    async def work() -> None:
        async with pair(answer, policy="round-robin") as both:
            before = open_files()

            async def breaks() -> None:
                assert not (await both.ask(body(stream=True, user="breaks"))).whole

            for n in range(15):
                leaving = (leaves(both, body(stream=True), CHAT, rst=n % 2 == 0, tokens=1),)
                await asyncio.gather(
                    *itertools.chain.from_iterable(
                        (leaves(both, body(stream=True), CHAT, rst=n % 2 == 0, tokens=1), breaks())
                        for _ in range(9)
                    ),
                    *leaving,
                    breaks(),
                )
            await both.quiet()
            gone, lost = both.count(Outcome.CLIENT_GONE), both.count(Outcome.BACKEND_LOST)
            assert (gone, lost) == (150, 150)
            await settles(open_files, before + 8)

    run(work, 30)


def test_D18_a_spell_of_timeouts_poisons_nothing() -> None:
    """50 requests a second meet a backend that answers no SYN, then it is back: all succeed again.

    1 s for 10 s; the connect takes 100 ms for 3 s, and the breaker opens for 200 ms for 5 s.
    """

    async def work() -> None:
        settings: dict[str, Any] = {
            "policy": "least-in-flight", "connect_timeout": "100ms", "breaker_open": "200ms",
            "breaker_failures": 5,
        }  # fmt: skip
        async with pair(**settings) as both:

            async def load(seconds: float) -> list[int]:
                asked = []
                for n in range(int(50 * seconds)):
                    asked.append(asyncio.ensure_future(both.ask(body(stream=n % 2 == 0))))
                    await asyncio.sleep(0.02)
                return [reply.status for reply in await asyncio.gather(*asked)]

            assert set(await load(0.2)) == {200}
            await both.spec.leave()
            with full_backlog(both.spec.port):
                # The other one takes them all, at the price of a connect that is waited for.
                assert set(await load(1)) == {200}
                assert both.retries(Retry.CONNECT) >= 5
            await both.spec.come_back()
            await until(lambda: both.relay.health.status(Role.SPECULATIVE).usable)
            assert (await both.ask(body())).status == 200
            await until(
                lambda: both.relay.health.status(Role.SPECULATIVE).breaker is BreakerState.CLOSED
            )
            both.spec.calls.clear()
            found = await load(0.5)
            assert found.count(200) >= 0.99 * len(found)
            assert len(both.spec.calls) > 10
            assert len(both.relay.pools[Role.SPECULATIVE].open) <= 10

    run(work, 30)


def test_D6_nothing_is_started_for_a_client_that_left() -> None:
    """A refusal that comes after the client left is not tried on the other backend."""

    async def work() -> None:
        async with pair(retry_budget=1) as both:
            for role, path, stream in every():
                left = asyncio.Event()

                async def refuses(call: Call, left: asyncio.Event = left) -> None:
                    await left.wait()
                    with contextlib.suppress(ConnectionError):
                        await call.send(response(b"{}", "503 Service Unavailable"))

                chosen, spare = both.on(role, refuses)
                client = await Client.open(both.port)
                await client.send(post(body(stream=stream), path))
                await until(lambda: chosen.in_flight == 1)  # noqa: B023
                client.close()
                await until(lambda: both.stack.in_flight() == (0, 0))
                left.set()
                await both.quiet()
                await asyncio.sleep(0.02)
                assert spare.calls == []
            assert both.count(Outcome.CLIENT_GONE) == 8

    run(work, 20)


class Resolver(asyncio.SelectorEventLoop):
    """A loop whose names are looked up in a table."""

    names: dict[str, list[str]]

    async def getaddrinfo(  # type: ignore[override]
        self, host: str, port: int, **_: object
    ) -> list[tuple[int, int, int, str, tuple[Any, ...]]]:
        found: list[tuple[int, int, int, str, tuple[Any, ...]]] = []
        for address in self.names.get(host, [host]):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            where = (address, port, 0, 0) if ":" in address else (address, port)
            found.append((family, socket.SOCK_STREAM, 6, "", where))
        return found


def run_with_names(work: Any, names: dict[str, list[str]]) -> None:
    """Run a test on a loop with these names; the table may change meanwhile."""
    loop = Resolver()
    loop.names = names
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(asyncio.wait_for(work(), 20))


async def on_address(backend: ScriptedBackend, host: str, port: int) -> None:
    """Move a backend to this address."""
    await backend.leave()
    await backend.listen(host, port)


def test_D16_a_backend_that_moved_is_found() -> None:
    """The address behind a name changes and the old one refuses: the new one is used at once."""
    names = {"engine": ["127.0.0.2"]}

    async def work() -> None:
        async with (
            scripted_backend(host="127.0.0.2") as old,
            scripted_backend(host="127.0.0.3", port=old.port) as new,
            scripted_backend() as base,
            running_router(
                f"http://engine:{old.port}", base.url, policy="speculative", threshold=1
            ) as stack,
        ):
            both = Pair(stack, old, base)
            for stream in (True, False):
                assert (await both.ask(body(stream=stream))).status == 200
            assert (len(old.calls), len(new.calls)) == (2, 0)
            await old.leave()
            names["engine"] = ["127.0.0.3"]
            for stream in (True, False):
                assert (await both.ask(body(stream=stream))).status == 200
            assert (len(new.calls), len(base.calls)) == (2, 0)
            # Several addresses, the first of which refuses: tried in turn.
            await new.leave()
            await new.come_back()
            names["engine"] = ["127.0.0.2", "127.0.0.3"]
            for stream in (True, False):
                assert (await both.ask(body(stream=stream))).status == 200
            assert (len(new.calls), len(base.calls)) == (4, 0)
            await both.over()

    run_with_names(work, names)


def test_D17_addresses_of_both_families_work() -> None:
    """`[::1]`, a name with one family listening, and `::` work; a bad URL is refused at the start."""
    names = {"localhost": ["::1", "127.0.0.1"]}

    async def work() -> None:
        for host in ("127.0.0.1", "::1", "::"):
            async with scripted_backend(host=host) as spec, scripted_backend() as base:
                urls = [f"http://localhost:{spec.port}"]
                urls += [f"http://[::1]:{spec.port}"] * (host != "127.0.0.1")
                for url in urls:
                    async with running_router(url, base.url, policy="speculative") as stack:
                        both = Pair(stack, spec, base)
                        began = time.monotonic()
                        for stream in (True, False):
                            assert (await both.ask(body(stream=stream))).status == 200
                        assert time.monotonic() - began < 2.0
                        assert base.calls == []
                        wanted = f"[::1]:{spec.port}" if "[" in url else f"localhost:{spec.port}"
                        assert spec.calls[-1].headers[b"host"] == wanted.encode()
                        await both.over()

    run_with_names(work, names)
    for bad in ("http://::1:30000", "http://[::1", "http://[fe80::1%eth0]:1", "localhost:30000"):
        with pytest.raises(SettingsError, match="speculative = "):
            load_settings(
                {"speculative": bad, "baseline": "http://h:1", "threshold": 1}, environ={}
            )


@pytest.mark.parametrize("chunks", [False, True])
def test_D19_an_early_refusal_is_read_during_an_upload(chunks: bool) -> None:
    """A bad key, a body over the limit and no backend are said to a client that uploads 5 MB."""
    piece = b'{"x":"' + b"x" * 99_992 + b'"}'
    data = piece + b" " * 4_900_000

    async def upload(port: int, key: str) -> Reply:
        client = await Client.open(port)
        sent = chunked(*(data[at : at + 100_000] for at in range(0, len(data), 100_000)))
        framing = b"transfer-encoding: chunked" if chunks else None
        whole = post(
            sent if chunks else data, CHAT, (f"authorization: Bearer {key}",), framing=framing
        )
        half = len(whole) // 2
        await client.send(whole[:half])
        await asyncio.sleep(0.4)  # longer than a sweep: what is refused may not be cut off yet
        await client.send(whole[half:])
        reply = await client.reply()
        client.close()
        assert not reply.reset
        return reply

    async def work() -> None:
        async with pair(api_keys="right") as both:
            reply = await upload(both.port, "wrong")
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
            assert (await upload(both.port, "right")).status == 200
            await both.spec.leave()
            await both.base.leave()
            reply = await upload(both.port, "right")
            assert (reply.status, reply.error["code"]) == (502, "backend_connect_failed")
        async with pair(max_body=1_000_000) as both:
            reply = await upload(both.port, "any")
            assert (reply.status, reply.error["code"]) == (413, "body_too_large")
            assert both.spec.calls + both.base.calls == []

    run(work, 20)
