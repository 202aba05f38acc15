"""A backend that hangs: suspected by all signs together, soon and softly; a busy one never."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.health import PairHealth
from router.load import BackendLoad, LoadTracker, Role
from router.poller import TelemetryPoller
from router.silence import AFTER, HOLD, QUIET, Silence, came, silence_of
from tests.scripted_backend import (
    STREAM_HEAD,
    Call,
    event,
    response,
    scripted_backend,
)
from tests.stack import Stack, run, running_router, until
from tests.test_poller import LOADS, Backend, Clock, ask_of

SPEC = Role.SPECULATIVE
DATA = Path(__file__).parent / "data" / "telemetry"


class Watch:
    """A silence with what it was told and what it said."""

    def __init__(self) -> None:
        self.last = float("-inf")  # when the last byte came
        self.avoided: list[float] = []
        self.silence = Silence(lambda since: self.last > since, self.avoided.append)


def test_two_polls_without_an_answer() -> None:
    """One late poll is nothing; from the second on the other backend is preferred, for a while each."""
    watch = Watch()
    watch.silence.missed(101.5, known=True)
    assert watch.avoided == []
    watch.silence.missed(103.2, known=False)
    watch.silence.missed(104.7, known=False)
    assert watch.avoided == [103.2 + HOLD, 104.7 + HOLD]
    watch.silence.answered()
    watch.silence.missed(110.0, known=True)
    assert len(watch.avoided) == 2


def test_bytes_are_a_sign_of_life() -> None:
    """While bytes come nothing is suspected, and no more until the load was known again."""
    watch = Watch()
    watch.last = 103.2 - QUIET + 0.1
    watch.silence.missed(101.5, known=True)
    for at in (103.2, 110.0, 120.0, 130.0):
        watch.silence.missed(at, known=False)
    assert watch.avoided == []
    watch.silence.missed(140.0, known=True)
    watch.silence.missed(141.7, known=False)
    assert watch.avoided == [141.7 + HOLD]


def test_a_load_that_was_never_known() -> None:
    """A backend that does not tell its load, or from elsewhere, is not suspected for that."""
    watch = Watch()
    for at in range(20):
        watch.silence.missed(float(at), known=False)
    assert watch.avoided == []


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.1, 5.0))))
def test_never_without_silence(steps: list[tuple[bool, bool, float]]) -> None:
    """Whatever comes, nothing is avoided but after two misses in a row without a byte of late."""
    watch, now, row = Watch(), 0.0, 0
    for missed, byte, pause in steps:
        now += pause
        watch.last = now if byte else watch.last
        before = len(watch.avoided)
        row = row + 1 if missed else 0
        if missed:
            watch.silence.missed(now, known=True)
        else:
            watch.silence.answered()
        if len(watch.avoided) > before:
            assert row >= AFTER
            assert now - watch.last >= QUIET


class Has:
    """Something with these fields."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


class Relayed:
    """As much of a relay as is looked at."""

    def __init__(self) -> None:
        self.tracker = LoadTracker()
        self.health = PairHealth(self.tracker)
        self.connections: set[Any] = set()

    def stream(self, role: Role, first: float | None, last: float | None = None) -> None:
        flow = None if last is None else Has(last_at=last)
        decision = Has(backend=role)
        exchange = Has(decision=decision, flow=flow, first_byte_at=first)
        self.connections.add(Has(driver=Has(exchange=exchange)))


def test_what_counts_as_heard() -> None:
    """The bytes of answers under way at this backend, and answers that are complete."""
    relay = Relayed()
    assert not came(relay, SPEC, 10.0)
    relay.connections.add(Has(driver=None))
    relay.stream(Role.BASELINE, 20.0, 21.0)
    relay.stream(SPEC, None)
    relay.stream(SPEC, 9.0, 9.5)
    assert not came(relay, SPEC, 10.0)
    relay.stream(SPEC, 9.0, 10.5)
    assert came(relay, SPEC, 10.0)
    assert not came(relay, SPEC, 10.5)
    assert not relay.health.lived_since(SPEC, 10.0)
    relay.health.alive(SPEC, 11.0)
    assert relay.health.lived_since(SPEC, 10.0)
    assert not relay.health.lived_since(Role.BASELINE, 10.0)


def test_only_what_is_awaited_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    """An idle backend is asked all the same; a busy one is avoided, which is said once."""
    relay = Relayed()
    silence = silence_of(relay, SPEC)

    def polls(*moments: float) -> bool:
        for now in moments:
            silence.missed(now, known=True)
        return relay.tracker.snapshot(moments[-1]).speculative.contended

    assert not polls(1.5, 3.2, 4.7)
    lease = relay.tracker.lease(SPEC, 5.0)
    assert polls(6.2)
    assert polls(7.7, 9.2)
    said = [each.getMessage() for each in caplog.records]
    assert said == ["speculative says nothing: the other one is preferred"]
    assert not relay.tracker.snapshot(9.2 + HOLD).speculative.contended
    lease.release(10.0)
    assert not relay.tracker.snapshot(9.2 + HOLD).baseline.contended


def test_what_a_poller_tells() -> None:
    """Only what has no answer in time is a miss: errors, refusals and other sources are none."""
    clock, told = Clock(), Watch()
    backend = Backend(loads=LOADS)
    backend.clock = clock
    poller = TelemetryPoller(
        SPEC, ask_of(backend, clock), LoadTracker(), silence=told.silence,
        clock=clock, sleep=clock.sleep, jitter=float,
    )  # fmt: skip

    def poll(took: float, answer: Any) -> None:
        backend.took, backend.answers = took, {"loads": answer}
        asyncio.run(poller.poll())

    poll(0.0, LOADS)
    slow = httpx.ReadTimeout("")
    poll(1.5, slow)
    assert told.avoided == []
    poll(1.5, slow)  # and so for each source that is tried
    assert told.avoided != []
    told.avoided.clear()
    for answer in (500, httpx.ConnectError(""), LOADS, httpx.ReadError("")):
        poll(0.0, LOADS)
        poll(1.5, slow)
        poll(0.0, answer)
        poll(1.5, slow) if answer is LOADS else None
    assert told.avoided == []


class Hanging:
    """A router before a backend that tells its load and streams until it is frozen."""

    def __init__(self, stack: Stack, frozen: asyncio.Event, asked: list[bytes]) -> None:
        self.stack = stack
        self.frozen = frozen
        self.asked = asked  # for the load, since it is frozen

    def load(self) -> BackendLoad:
        """What a decision would find of it now."""
        return self.stack.relay.tracker.snapshot(self.stack.relay.clock()).speculative


@contextlib.asynccontextmanager
async def hanging(*, flowing: bool) -> AsyncIterator[Hanging]:
    """It, with streams that flow on though the load is not told any more, or without."""
    frozen, asked = asyncio.Event(), list[bytes]()

    async def probe(path: bytes) -> bytes:
        if frozen.is_set() and not path.startswith((b"/ready", b"/health")):
            asked.append(path)
            await asyncio.sleep(60)
        return response(LOADS if path.startswith(b"/v1/loads") else b"{}")

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD)
        while flowing or not frozen.is_set():
            await call.send(event("a"))
            await asyncio.sleep(0.1)
        await asyncio.sleep(60)

    async with scripted_backend(answer) as spec, scripted_backend() as base:
        spec.probe = probe
        async with running_router(spec.url, base.url) as stack:
            found = Hanging(stack, frozen, asked)
            await until(lambda: found.load().fresh)
            yield found


@pytest.mark.slow
@pytest.mark.parametrize("flowing", [False, True])
def test_a_backend_that_hangs(flowing: bool) -> None:
    """With nothing coming new work goes elsewhere though no probe has failed; while tokens flow it
    stays, though the load is not told.
    """
    path, body = "/v1/completions", {"stream": True}

    async def work() -> None:
        async with (
            hanging(flowing=flowing) as found,
            found.stack.client.stream("POST", path, json=body) as held,
        ):
            assert held.headers["x-crossover-backend"] == "speculative"
            chunks = held.aiter_bytes()
            await anext(chunks)
            found.frozen.set()
            # It is asked for another source of its load when two polls have had no answer.
            await until(lambda: b"/get_load" in found.asked, 15)
            assert found.stack.relay.health.status(SPEC).usable
            assert found.load().in_flight == 1
            assert found.load().contended is not flowing
            async with found.stack.client.stream("POST", path, json=body) as other:
                chosen = [other.headers[f"x-crossover-{name}"] for name in ("backend", "reason")]
            assert chosen == (
                ["speculative", "below_threshold"] if flowing else ["baseline", "contended"]
            )

    run(work, 40)
