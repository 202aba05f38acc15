"""Large steps: one in each turn of the loop, whatever becomes whole at once."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from router.backend import BackendConnection
from router.parsing import LARGE_BODY
from router.policy import Decision, Policy
from router.room import Room
from router.turns import LARGE, Turns
from tests.engines import looped
from tests.fake_backend import StrictTransport, Taker, connected
from tests.raw_client import chunked, post
from tests.scripted_backend import STREAM_HEAD, Call, chunk, response, scripted_backend
from tests.stack import running_router, until
from tests.test_frontend import POST, statuses, talk


class Ticks:
    """Counts the turns of the running loop."""

    def __init__(self) -> None:
        self.now = 0
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self.now += 1
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def stop(self) -> None:
        self._handle.cancel()


async def some_turns() -> None:
    """Let the loop turn a few times."""
    ticks = Ticks()
    await until(lambda: ticks.now > 5)
    ticks.stop()


@looped
async def test_steps_are_done_in_order_and_each_in_a_turn_of_its_own() -> None:
    """What is asked for within a step waits behind what had been asked for before it."""
    turns, ticks = Turns(), Ticks()
    done: list[tuple[str, int]] = []

    def step(name: str, *then: Callable[[], None]) -> Callable[[], None]:
        def go() -> None:
            done.append((name, ticks.now))
            for each in then:
                turns.ask(each)

        return go

    turns.ask(step("a", step("c")))
    turns.ask(step("b"))
    assert done == []
    await until(lambda: len(done) == 3)
    turns.ask(step("d"))
    await until(lambda: len(done) == 4)
    ticks.stop()
    assert [name for name, _ in done] == ["a", "b", "c", "d"]
    assert len({at for _, at in done}) == 4


def test_a_step_that_fails_takes_none_with_it() -> None:
    """The loop hears of it, and the next ones are done."""
    told: list[str] = []

    async def work() -> list[str]:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: told.append(str(context["exception"]))
        )
        turns, done = Turns(), list[str]()

        def bad() -> None:
            raise ValueError("bad")

        turns.ask(bad)
        turns.ask(lambda: done.append("after"))
        await until(lambda: done == ["after"])
        return done

    assert asyncio.run(work()) == ["after"]
    assert told == ["bad"]


def answering() -> tuple[BackendConnection, StrictTransport, Taker]:
    """A connection whose answer has begun."""
    (connection, transport), driver = connected(), Taker()
    connection.send(cast(Any, driver), b"", b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    return connection, transport, driver


@looped
async def test_after_a_large_read_the_backend_waits_for_its_turn() -> None:
    """A read below the limit does not; what the client's slowness stopped stays stopped."""
    connection, transport, driver = answering()
    connection.data_received(chunk(b"x" * (LARGE - 100)))
    assert transport.reading
    connection.data_received(chunk(b"x" * LARGE))
    assert not transport.reading
    assert driver.taken == 2 * LARGE - 100
    await until(lambda: transport.reading)
    connection.data_received(chunk(b"x" * LARGE))
    connection.pause()
    await some_turns()
    assert not transport.reading
    connection.resume()
    assert not transport.reading, "that it reads again waits for a turn too"
    await until(lambda: transport.reading)


@looped
async def test_a_connection_that_is_dropped_is_not_read_again() -> None:
    """Its turn comes and nothing is done with it."""
    connection, transport, _ = answering()
    connection.data_received(chunk(b"x" * LARGE))
    connection.drop()
    await some_turns()
    assert not transport.reading


class Noting:
    """The policy in force, noting in which turn each decision was made."""

    def __init__(self, policy: Policy, ticks: Ticks) -> None:
        self.at: list[int] = []
        self._policy = policy
        self._ticks = ticks

    def decide(self, *told: Any) -> Decision:
        self.at.append(self._ticks.now)
        return self._policy.decide(*told)


@looped
async def test_large_bodies_that_end_together_are_decided_on_in_turns_of_their_own() -> None:
    """Six requests whose last bytes come in one turn of the loop: six turns, all bytes as sent."""
    dice = random.Random(5)
    texts = [dice.randbytes(LARGE_BODY // 2 + 9).hex().encode() for _ in range(6)]
    bodies = [b'{"messages":[],"blob":"%b"}' % text for text in texts]
    async with (
        scripted_backend() as spec,
        scripted_backend() as base,
        running_router(spec.url, base.url) as stack,
    ):
        ticks = Ticks()
        stack.relay.policy = noting = cast(Any, Noting(stack.relay.policy, ticks))
        made = [await asyncio.open_connection("127.0.0.1", stack.router.port) for _ in bodies]
        for (_, writer), body in zip(made, bodies, strict=True):
            writer.write(post(body)[:-1])
        await until(lambda: stack.relay.buffered == sum(map(len, bodies)) - len(bodies))
        assert noting.at == []
        for _, writer in made:
            writer.write(b"}")
        for reader, writer in made:
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            writer.close()
        ticks.stop()
        assert len(set(noting.at)) == len(bodies)
        got = [call.body for call in (*spec.calls, *base.calls)]
        assert sorted(map(digest, got)) == sorted(map(digest, bodies))
        await until(lambda: stack.relay.buffered == 0)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("framed", ["length", "chunked"])
@looped
async def test_what_follows_a_large_body_is_answered_after_it(framed: str) -> None:
    """Requests in the same read as its end, of a known head too, wait for their turn behind it."""
    body = b'{"messages":[],"blob":"%b"}' % (b"y" * LARGE_BODY)
    large = post(body)
    if framed == "chunked":
        pieces = [body[at : at + 70_000] for at in range(0, len(body), 70_000)]
        large = post(chunked(*pieces), framing=b"transfer-encoding: chunked")

    async def answer(call: Call) -> None:
        await call.send(response(b'{"n":%d}' % len(call.body)))

    async with (
        scripted_backend(answer) as spec,
        scripted_backend(answer) as base,
        running_router(spec.url, base.url) as stack,
    ):
        assert statuses(await talk(stack, POST, end=True))[:1] in ([200], [])  # its head is known
        last = POST.replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n")
        got = await talk(stack, large + POST + b"GET /nope HTTP/1.1\r\nhost: x\r\n\r\n" + last)
        assert statuses(got) == [200, 200, 404, 200]
        sizes = [int(piece.partition(b"}")[0]) for piece in got.split(b'{"n":')[1:]]
        assert sizes == [len(body), 15, 15]


@looped
async def test_a_client_that_leaves_while_its_body_waits_leaves_nothing() -> None:
    """Nothing is started for it, and its bytes are no longer counted."""
    body = b'{"messages":[],"blob":"%b"}' % (b"z" * LARGE_BODY)
    async with (
        scripted_backend() as spec,
        scripted_backend() as base,
        running_router(spec.url, base.url) as stack,
    ):
        held: list[int] = []
        _, writer = await asyncio.open_connection("127.0.0.1", stack.router.port)
        writer.write(post(body)[:-1])
        await until(lambda: stack.relay.buffered == len(body) - 1)
        (connection,) = stack.relay.connections

        def step() -> None:  # the whole body stands behind this one
            connection.data_received(b"}")
            held.append(stack.relay.buffered)
            connection.transport.abort()

        stack.relay.turns.ask(step)
        await until(lambda: bool(held) and not stack.relay.connections)
        assert held == [len(body)]
        await until(lambda: stack.relay.buffered == 0)
        assert spec.calls == base.calls == []
        assert stack.in_flight() == (0, 0)
        writer.close()


@looped
async def test_a_flood_beside_a_stream_comes_whole() -> None:
    """Eight answers of 4 MB in large reads, byte for byte, while short requests are answered."""
    event = b"data: " + b"f" * 50_000 + b"\n\n"
    total = 80 * len(event)

    async def answer(call: Call) -> None:
        if b"flood" in call.body:
            await call.send(STREAM_HEAD)
            for _ in range(80):
                await call.send(chunk(event))
            await call.send(b"0\r\n\r\n")
        else:
            await call.send(response())

    async with (
        scripted_backend(answer) as spec,
        scripted_backend(answer) as base,
        running_router(spec.url, base.url) as stack,
    ):

        async def flood() -> int:
            got = await stack.client.post(
                "/v1/completions", json={"prompt": "flood", "stream": True}
            )
            assert got.content == event * 80
            return len(got.content)

        floods = asyncio.gather(*(flood() for _ in range(8)))
        answered = 0
        while not floods.done():
            assert (await stack.chat()).status_code == 200
            answered += 1
        assert await floods == [total] * 8
        assert answered > 0
        await until(lambda: stack.in_flight() == (0, 0))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")
def test_a_room_takes_no_more_memory_than_was_written() -> None:
    """Forty rooms of 64 MiB with 64 KiB in each take 2.5 MiB, not the 80 MiB of 40 huge pages."""

    def resident() -> int:
        text = Path("/proc/self/smaps_rollup").read_text()
        return int(text.partition("Rss:")[2].split(maxsplit=1)[0]) * 1024

    before = resident()
    rooms = [Room(2**26) for _ in range(40)]
    for room in rooms:
        room.write(b"x" * 65_536)
    assert resident() - before < 16 * 2**20


def test_a_room_holds_what_was_written_and_no_more() -> None:
    """The bytes in order; beyond its length it refuses."""
    room = Room(10)
    for piece in (b"0123", b"", b"456789"):
        room.write(piece)
    assert bytes(room.whole()) == b"0123456789"
    with pytest.raises(ValueError, match="out of range"):
        room.write(b"x")
