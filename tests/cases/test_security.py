"""Cases of security and abuse: keys stay where they belong, and nobody can hold the router up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from typing import Any

from router.load import Role
from router.routes import ROUTES
from tests.cases.common import body, defaults, every, pair, says
from tests.cases.process import serving
from tests.raw_client import CHAT, Client, ask, get, post
from tests.scripted_backend import (
    STREAM_HEAD,
    Call,
    ScriptedBackend,
    answer_ok,
    chunk,
    response,
    scripted_backend,
)
from tests.stack import run, until

MIB = 1024 * 1024


def test_X1_the_clients_key_reaches_no_backend() -> None:
    """However a client spells its key, the backend sees its own key or none."""
    spellings = (
        ("authorization: Bearer sk-client",),
        ("AUTHORIZATION: bearer sk-client",),
        ("Authorization: BEARER   sk-client",),
    )
    twice = ("authorization: Bearer sk-client", "Authorization: Bearer sk-client")
    others = ("x-api-key: sk-client", "api-key: sk-client", "cookie: k=sk-client")

    async def work() -> None:
        for own in (None, "sk-backend"):
            for keys in (None, "sk-client"):
                settings = {"api_keys": keys, "backend_api_key": own}
                given: dict[str, Any] = {k: v for k, v in settings.items() if v is not None}
                async with pair(**given) as both:
                    for (role, path, stream), lines in itertools.product(every(), spellings):
                        chosen, _ = both.on(role, answer_ok)
                        reply = await both.ask(body(stream=stream), path, *lines, *others)
                        assert reply.status == 200
                        head = chosen.calls[0].head
                        assert b"sk-client" not in head
                        wanted = [b"authorization: Bearer sk-backend"] if own else []
                        lines_sent = head.split(b"\r\n")
                        found = [x for x in lines_sent if x.lower().startswith(b"authorization")]
                        assert found == wanted
                    chosen, _ = both.on(Role.SPECULATIVE, answer_ok)
                    reply = await both.ask(body(), CHAT, *twice)
                    assert reply.status == (401 if keys else 200)
                    assert all(b"sk-client" not in call.head for call in chosen.calls)

    run(work, 30)


def deaf_client(port: int) -> socket.socket:
    """A client that asks for a stream and never reads; its kernel takes next to nothing for it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(post(body(stream=True)))
    return sock


def test_X5_slow_readers_cost_no_memory() -> None:
    """Ten floods of 200 MB to clients that never read: the backends are stopped, memory is not spent.

    The write timeout is 0.8 s for 60 s. A normal client is served meanwhile.
    """
    piece = chunk(b"data: " + b"x" * 65_520 + b"\n\n")

    async def answer(call: Call) -> None:
        if b'"stream": false' in call.body:
            await call.send(response())
            return
        with contextlib.suppress(OSError):
            await call.send(STREAM_HEAD)
            await call.flood(200 * MIB, piece)

    async def stalled(backends: tuple[ScriptedBackend, ...]) -> list[int]:
        while True:
            before = [call.taken for one in backends for call in one.calls]
            await asyncio.sleep(0.2)
            if [call.taken for one in backends for call in one.calls] == before:
                return before

    async def work() -> None:
        assert defaults().write_timeout == 60.0
        flags = ("--policy", "round-robin", "--write-timeout", "800ms")
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            serving(spec, base, *flags) as router,
        ):
            spec.watch_s = base.watch_s = 0.05
            assert (await ask(router.port, post(body()))).status == 200
            spec.calls.clear()
            base.calls.clear()
            before = router.memory("VmRSS")
            clients = [await asyncio.to_thread(deaf_client, router.port) for _ in range(10)]
            await until(lambda: len(spec.calls) + len(base.calls) == 10)
            taken = await stalled((spec, base))
            assert len(taken) == 10
            assert max(taken) < 20 * MIB  # most of it in the kernels' buffers
            assert router.memory("VmHWM") - before < 50 * MIB
            assert (await ask(router.port, post(body()))).status == 200
            # All of them are given up, and the backends are told.
            await until(lambda: spec.in_flight + base.in_flight == 0, 10)
            for sock in clients:
                sock.close()
            await until(lambda: '"write_timeout"' in router.output)  # written a little later

    run(work, 40)


def test_X6_slow_heads_and_silence_are_closed() -> None:
    """500 connections that say nothing, half a head or half a body are closed; others are served.

    The header and the body may take 500 ms for 10 and 30 s.
    """
    beginnings = (b"", b"POST /v1/chat", post(b"{}")[:-4], post(b"{}")[:-1])

    async def work() -> None:
        assert (defaults().header_timeout, defaults().body_timeout) == (10.0, 30.0)
        settings: dict[str, Any] = {"header_timeout": "500ms", "body_timeout": "500ms"}
        async with pair(**settings) as both:
            clients = []
            for n in range(500):
                client = await Client.open(both.port)
                await client.send(beginnings[n % 4])
                clients.append(client)

            async def drip(client: Client) -> None:
                """A byte now and then does not buy time."""
                for byte in b"x-slow: aaaaaaaaaaaaaaaaaaaaaaaaaaaa":
                    await client.send(bytes([byte]))
                    await asyncio.sleep(0.1)

            dripping = asyncio.ensure_future(drip(clients[2]))
            began = time.monotonic()
            assert (await both.ask(body(stream=True))).status == 200
            assert time.monotonic() - began < 5.0
            for n, client in enumerate(clients):
                assert await client.closed(5), n
                if n % 4 == 0:
                    assert client.raw == b""
                elif not client.reset:
                    assert client.raw.startswith(b"HTTP/1.1 408 "), n
                client.close()
            dripping.cancel()
            await until(lambda: not both.relay.connections)
            assert both.spec.calls[1:] + both.base.calls == []

    run(work, 30)


HOSTILE = (
    "//evil/v1/chat/completions", "/v1/../flush_cache", "/v1/%2e%2e/update_weights_from_disk",
    "/start_profile", "/abort_request", "/flush_cache", "/update_weights_from_disk",
    "/v1/chat/completions/../../flush_cache", "/v1/chat/completions%00", "/v1//chat/completions",
    "/V1/chat/completions", "/v1/chat/completions;x", "/v1/chat/completions\\..\\flush_cache",
    "/%76%31/chat/completions", "/release_memory_occupation", "/set_internal_state",
)  # fmt: skip


def test_X4_only_listed_routes_reach_a_backend() -> None:
    """No path, host, header or redirect leads anywhere but to a listed route of a configured backend."""

    async def work() -> None:
        async with scripted_backend() as elsewhere, pair() as both:
            for path in HOSTILE:
                for raw in (post(body(), path), get(path)):
                    reply = await ask(both.port, raw)
                    assert reply.status in {400, 404}, path
            assert both.spec.calls + both.base.calls == []
            assert (await ask(both.port, get("/get_server_info"))).status in {200, 502, 503}

            evil = f"127.0.0.1:{elsewhere.port}"
            lines = (
                f"x-forwarded-host: {evil}", f"x-base-url: http://{evil}", f"forwarded: host={evil}",
                "x-crossover-backend: baseline", f"x-original-url: http://{evil}/flush_cache",
                "x-rewrite-url: /flush_cache", f"x-upstream: {evil}",
            )  # fmt: skip
            for role, path, stream in every():
                for target in (path, f"http://{evil}{path}"):
                    chosen, spare = both.on(role, answer_ok)
                    raw = post(body(stream=stream), target, lines)
                    raw = raw.replace(b"host: proxy", f"host: {evil}".encode())
                    assert (await ask(both.port, raw)).status == 200
                    assert [call.path for call in chosen.calls] == [path.encode()]
                    host = chosen.calls[0].headers[b"host"]
                    assert host == f"127.0.0.1:{chosen.port}".encode()
                    assert spare.calls == []  # pinning is off unless it is allowed

                location = b"location: http://" + evil.encode() + b"/v1/chat/completions\r\n"
                both.on(role, says(response(b"", "307 Temporary Redirect", location)))
                reply = await both.ask(body(stream=stream), path)
                assert (reply.status, reply.header("location")) == (307, location[10:-2].decode())
            assert elsewhere.calls == []
            assert {route.path for route in ROUTES if b"flush" in route.path} == set()

    run(work, 20)


def test_X3_no_key_is_written_anywhere() -> None:
    """A key in good, bad and broken requests, in the query too, is nowhere in what is written."""
    canary = "sk-canary-51423"

    async def fault(call: Call) -> None:
        call.reset()

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend(fault) as base,
            serving(
                spec, base, "--policy", "round-robin", "--log-level", "debug",
                "--api-keys", f"{canary}-good", "--backend-api-key", f"{canary}-backend",
                "--admin-key", f"{canary}-admin", "--drain-delay", "0",
            ) as router,
        ):  # fmt: skip
            key = f"authorization: Bearer {canary}-good"
            for stream in (True, False, True, False):
                assert (await ask(router.port, post(body(stream=stream), CHAT, (key,)))).status in {
                    200, 502,
                }  # fmt: skip
            raws = [
                post(body(), CHAT, (f"authorization: Bearer {canary}-bad",)),
                post(body(), f"{CHAT}?api_key={canary}", (key,)),
                post(b"{", CHAT, (key,)),
                post(body(), f"/nothing/{canary}", (key, f"x-api-key: {canary}")),
                get(f"/v1/models?key={canary}", key),
                get(f"/v1/models/{canary}", f"cookie: {canary}"),
                f"GET / HTTP/1.1\r\nauthorization: {canary}\r\nbad header\r\n\r\n".encode(),
                post(body(), CHAT, (key, key)),
                post(body(), CHAT, (key, f"x-request-id: {canary} with space")),
            ]
            for raw in raws:
                await ask(router.port, raw)
            for raw in (
                get("/status", f"authorization: Bearer {canary}-admin"),
                get("/metrics", f"authorization: Bearer {canary}-wrong"),
                get(f"/decisions?key={canary}"),
                post(b"{", "/policy", (f"authorization: Bearer {canary}-admin",)),
            ):
                await ask(router.admin_port, raw)
            told = await ask(
                router.admin_port, get("/status", f"authorization: Bearer {canary}-admin")
            )
            router.terminate()
            assert await router.ended(10) == 0
            assert '"request"' in router.output
            assert canary not in router.output
            assert canary.encode() not in told.body

    run(work, 30)
