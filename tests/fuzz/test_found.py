"""What fuzzing has found, each as a test of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from router.guard import path_of
from tests.scripted_backend import STREAM_HEAD, Call, event, scripted_backend
from tests.stack import run, running_router, until


@pytest.mark.parametrize("target", [b"http://host#", b"HTTPS://host#/v1/models", b"http://h#?x"])
def test_a_fragment_behind_an_authority_is_no_path(target: bytes) -> None:
    """A path begins with a slash, so `http://host#x` has none and is refused."""
    assert path_of(target) is None


@pytest.mark.parametrize(
    ("target", "path"),
    [(b"http://host", b"/"), (b"http://host?x=1", b"/"), (b"http://host/a?x#y", b"/a")],
)
def test_an_authority_is_dropped(target: bytes, path: bytes) -> None:
    """What is left of an absolute target without its authority and query is the path."""
    assert path_of(target) == path


def test_a_forced_end_leaves_no_task_behind() -> None:
    """At the drain limit with a client that does not read, uvicorn's lifespan ends in order too.

    Left running it is cancelled with the loop, and uvicorn logs that as an error with a traceback.
    """

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD)
        while not call.peer_closed.is_set():
            with contextlib.suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(call.send(event("x" * 60_000)), 0.05)

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url, drain_timeout="100ms") as stack,
        ):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", stack.router.port))
            try:
                client.send(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n"
                    b'{"stream":true}'
                )
                await until(lambda: stack.in_flight() == (1, 0))
                (connection,) = stack.relay.connections
                await until(lambda: connection.transport.get_write_buffer_size() > 0)
                await stack.router.stop()
            finally:
                client.close()
            left = [repr(task.get_coro()) for task in asyncio.all_tasks()]
            assert [name for name in left if "LifespanOn" in name] == []

    run(work, 15)
