"""Room is kept for clients that are refused when open files run out."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest

from router.backend import BackendConnection
from router.config import BackendUrl
from router.files import SPARE_TO_ACCEPT, SPARE_TO_CONNECT, FileBudget
from router.load import Role
from router.pool import BackendPool
from router.relay import Relay
from tests.stack import run


class Pool:
    """What is counted of a pool."""

    def __init__(self, open_: int, connecting: int) -> None:
        self.open = set(range(open_))
        self.connecting = connecting


class Counts:
    """What is counted of a relay."""

    def __init__(self, clients: int, admins: int, *pools: Pool) -> None:
        self.connections = set(range(clients))
        self.admin_connections = set(range(admins))
        self.pools = dict(enumerate(pools))


def budget(limit: int, *counts: int) -> FileBudget:
    """A budget with so many clients, operators, backend connections and connects under way."""
    clients, admins, opened, connecting = counts
    found = FileBudget(cast(Relay, Counts(clients, admins, Pool(opened, connecting), Pool(0, 0))))
    found.limit = limit
    return found


@pytest.mark.parametrize(
    ("taken", "accept", "connect"),
    [
        (1024 - SPARE_TO_CONNECT, True, True),
        (1024 - SPARE_TO_CONNECT + 1, True, False),
        (1024 - SPARE_TO_ACCEPT, True, False),
        (1024 - SPARE_TO_ACCEPT + 1, False, False),
    ],
)
def test_connecting_is_given_up_before_accepting(taken: int, accept: bool, connect: bool) -> None:
    """With 128 files left no backend is connected to, with 64 no client stays."""
    for counts in ((taken, 0, 0, 0), (taken - 30, 10, 10, 10)):
        found = budget(1024, *counts)
        assert (found.may_accept(), found.may_connect()) == (accept, connect)


def test_without_a_limit_there_is_always_room() -> None:
    """-1 is how the system says that there is none."""
    found = budget(-1, 100_000, 0, 100_000, 0)
    assert found.may_accept()
    assert found.may_connect()


class WatchedPool(BackendPool):
    """Notes what it is counted as whenever a connection is made."""

    def __init__(self, port: int) -> None:
        super().__init__(
            Role.BASELINE,
            BackendUrl.parse(f"http://127.0.0.1:{port}"),
            key=None,
            keep_alive=4.0,
            connect_timeout=5.0,
            clock=time.monotonic,
        )
        self.counted: list[int] = []

    def made(self, connection: BackendConnection) -> None:
        """As ever, with a note."""
        super().made(connection)
        self.counted.append(len(self.open) + self.connecting)


def test_a_connection_is_counted_once() -> None:
    """A connection that is made, and of which its request has not heard yet, takes one file."""

    async def work() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            pool = WatchedPool(server.sockets[0].getsockname()[1])
            await asyncio.gather(*(pool.connect() for _ in range(8)))
            assert max(pool.counted) == 8
            assert pool.connecting == 0
            pool.close()

    run(work)
