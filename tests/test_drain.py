"""The router as a process: how it ends, and with which code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.scripted_backend import (
    STREAM_HEAD,
    Call,
    ScriptedBackend,
    chunk,
    event,
    scripted_backend,
)
from tests.stack import run, running_router, until

STREAM = {"model": "m", "messages": [], "stream": True}


class Process:
    """A running `crossover serve`."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, admin_port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self.client = httpx.AsyncClient(trust_env=False, timeout=20)

    async def status(self, url: str) -> int:
        """The status of a GET; 0 when nothing listens."""
        with contextlib.suppress(httpx.HTTPError):
            return (await self.client.get(url)).status_code
        return 0

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)


@contextlib.asynccontextmanager
async def serving(backends: list[ScriptedBackend], *flags: str) -> AsyncIterator[Process]:
    """`crossover serve` on free ports, as a process of its own."""
    urls = [backend.url for backend in backends]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "serve",
        "--speculative", urls[0], "--baseline", urls[1], "--threshold", "8",
        "--port", "0", "--admin-port", "0", *flags,
        stderr=asyncio.subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("CROSSOVER_")},
    )  # fmt: skip
    assert process.stderr is not None
    while True:
        line = json.loads(await asyncio.wait_for(process.stderr.readline(), 20))
        if "admin_port" in line:
            break
    drain = asyncio.ensure_future(process.stderr.read())
    running = Process(process, line["port"], line["admin_port"])
    try:
        yield running
    finally:
        await running.client.aclose()
        if process.returncode is None:
            process.kill()
        await process.wait()
        await drain


def test_sigterm_lets_running_streams_finish_and_exits_with_0() -> None:
    """Not ready at once, serving during the delay, streams whole, admin to the end, exit 0."""
    release = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + event("a"))
        await release.wait()
        await call.send(event("b") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            serving([spec, base], "--drain-delay", "1s") as router,
        ):
            while await router.status(router.url + "/ready") != 200:
                await asyncio.sleep(0.02)
            chat = router.url + "/v1/chat/completions"
            streams = [
                asyncio.ensure_future(router.client.post(chat, json=STREAM)) for _ in range(10)
            ]
            await until(lambda: spec.in_flight + base.in_flight == 10)
            router.terminate()
            while await router.status(router.url + "/ready") != 503:
                await asyncio.sleep(0.005)
            assert await router.status(router.url + "/health") == 503
            late = asyncio.ensure_future(router.client.post(chat, json=STREAM))
            await until(lambda: spec.in_flight + base.in_flight == 11)
            while await router.status(router.url + "/ready") != 0:
                await asyncio.sleep(0.02)
            assert await router.status(router.admin_url + "/metrics") == 200
            release.set()
            for answered in [*await asyncio.gather(*streams), await late]:
                assert answered.status_code == 200
                assert answered.text.endswith("data: [DONE]\n\n")
            assert await asyncio.wait_for(router.process.wait(), 5) == 0

    run(work)


def test_what_is_left_at_the_drain_limit_is_broken_explicitly() -> None:
    """A stream that outlives the limit gets an error event and no proper end; the exit is 0."""

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + event("a"))
        await call.peer_closed.wait()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            serving([spec, base], "--drain-delay", "0", "--drain-timeout", "300ms") as router,
        ):
            got = bytearray()
            with pytest.raises(httpx.RemoteProtocolError):
                async with router.client.stream(
                    "POST", router.url + "/v1/chat/completions", json=STREAM
                ) as stream:
                    async for piece in stream.aiter_raw():
                        if not got:
                            router.terminate()
                        got += piece
            assert b'"code":"drain_limit"' in got
            assert await asyncio.wait_for(router.process.wait(), 5) == 0
            await until(lambda: spec.in_flight + base.in_flight == 0)

    run(work)


def test_a_second_signal_does_not_wait() -> None:
    """SIGTERM twice goes straight to the break."""

    async def answer(call: Call) -> None:
        await call.peer_closed.wait()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            serving([spec, base], "--drain-delay", "60s") as router,
        ):
            request = asyncio.ensure_future(
                router.client.post(router.url + "/v1/chat/completions", json={"messages": []})
            )
            await until(lambda: spec.in_flight == 1)
            router.terminate()
            while await router.status(router.url + "/ready") != 503:
                await asyncio.sleep(0.005)
            router.terminate()
            answered = await request
            assert answered.status_code == 503
            assert answered.json()["error"]["code"] == "drain_limit"
            assert await asyncio.wait_for(router.process.wait(), 5) == 0

    run(work)


ASK = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
ASK += b"content-length: 16\r\n\r\n" + b'{"messages": []}'


def test_whoever_waits_to_be_accepted_is_served_when_the_listener_closes() -> None:
    """A connection that only the system knows of yet gets its answer, and none is reset."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            address = ("127.0.0.1", stack.router.port)
            # Blocking, so that the loop cannot accept them before it closes the listener.
            waiting = [socket.create_connection(address) for _ in range(20)]
            for sock in waiting:
                sock.sendall(ASK)
            await stack.router._public.shutdown([stack.router._sockets[0]])
            for sock in waiting:
                with sock:
                    sock.settimeout(5)
                    assert sock.recv(65_536).startswith(b"HTTP/1.1 200 OK")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)

    run(work)


@pytest.mark.slow
def test_a_request_may_come_just_after_the_listener_has_closed() -> None:
    """A connection that was there is served its first request; a silent one holds nothing up."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            serving([spec, base], "--drain-delay", "200ms") as router,
        ):
            while await router.status(router.url + "/ready") != 200:
                await asyncio.sleep(0.02)
            port = int(router.url.rpartition(":")[2])
            router.terminate()
            connections = []
            with contextlib.suppress(ConnectionRefusedError):
                while True:
                    connections.append(await asyncio.open_connection("127.0.0.1", port))
                    await asyncio.sleep(0.01)
            reader, writer = connections.pop()
            writer.write(ASK)
            answered = await reader.read()
            assert answered.startswith(b"HTTP/1.1 200 OK")
            assert b"connection: close" in answered
            assert [await other.read() for other, _ in connections] == [b""] * len(connections)
            assert await asyncio.wait_for(router.process.wait(), 5) == 0
            for _, each in [*connections, (reader, writer)]:
                each.close()

    run(work)


def test_a_taken_port_is_one_line_and_code_3() -> None:
    """An address that cannot be bound is said in one line, with the documented exit code."""

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "router", "serve", "--threshold", "1",
                "--speculative", "http://127.0.0.1:1", "--baseline", "http://127.0.0.1:2",
                "--port", str(port), "--admin-port", "0",
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, said = await process.communicate()
            assert process.returncode == 3
            (line,) = said.decode().splitlines()
            assert line == (
                f"crossover: cannot listen on 127.0.0.1 port {port}: Address already in use: "
                "see --host, --port, --admin-host, --admin-port"
            )

    run(work)


def test_files_that_cannot_be_used_are_one_line_and_code_2(tmp_path: Path) -> None:
    """A calibration or a certificate that is none is said in one line that names it."""
    (tmp_path / "calibration.json").write_text('{"schema": "crossover.calibration/1"}')
    (tmp_path / "cert.pem").write_text("no certificate")
    (tmp_path / "key.pem").write_text("no key")
    bad = {
        "calibration": ["--calibration", str(tmp_path / "calibration.json")],
        "ssl_certfile, ssl_keyfile": [
            "--threshold", "1",
            "--ssl-certfile", str(tmp_path / "cert.pem"),
            "--ssl-keyfile", str(tmp_path / "key.pem"),
        ],
    }  # fmt: skip

    async def work() -> None:
        for name, flags in bad.items():
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "router", "serve", *flags,
                "--speculative", "http://127.0.0.1:1", "--baseline", "http://127.0.0.1:2",
                "--port", "0", "--admin-port", "0",
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, said = await process.communicate()
            assert process.returncode == 2
            (line,) = said.decode().splitlines()
            assert line.startswith(f"crossover: {name}")

    run(work)
