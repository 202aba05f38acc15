"""The watch over the pair: lost and back, said once, in the log, on /status and in the metrics."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from prometheus_client import generate_latest

from loadtest.engine import EngineConfig, running_engine
from router.admin_models import PairItem, Status
from router.doctor import CannotLookError, KeyRefusedError, Target
from router.doctor_reading import Bodies
from router.exposition import create_registry
from router.load import Role
from router.pair_exposition import PairCollector
from router.pair_watch import RETRY, PairState, PairWatch
from router.status_view import status_body
from tests.doctor_cases import info
from tests.engines import looped
from tests.fake_relay import FakeRelay
from tests.stack import Stack, run, running_router

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
TARGETS = (Target(SPEC, "http://spec:1"), Target(BASE, "http://base:1"))
DEAD = "cannot reach it"
REFUSED = "it refuses a request without a key"


class FakePair:
    """Both servers as the watch asks them: a variant of /server_info, or nobody there."""

    def __init__(self) -> None:
        self.variants: dict[Role, str | None] = {}
        self.pages: dict[Role, bytes] = {SPEC: b"sglang:x 1\n", BASE: b"sglang:x 1\n"}
        self.asked: list[Role] = []
        self.refusing: set[Role] = set()
        self.now = 0.0
        self.comebacks = 0
        self.sound()

    def sound(self) -> None:
        self.variants = {SPEC: "written-0.5.23-eagle3", BASE: "written-0.5.23-baseline"}

    async def ask(self, target: Target) -> Bodies:
        self.asked.append(target.role)
        variant = self.variants[target.role]
        if target.role in self.refusing:
            raise KeyRefusedError(REFUSED)
        if variant is None:
            raise CannotLookError(DEAD)
        return Bodies(server_info=info(variant), metrics=self.pages[target.role])

    def watch(self, **more: Any) -> PairWatch:
        return PairWatch(
            TARGETS, self.ask, clock=lambda: self.now, comebacks=lambda: self.comebacks, **more
        )


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The watch's lines: what they are about, and their level."""
    return [
        (str(record.__dict__["pair"]), record.levelname)
        for record in caplog.records
        if "pair" in record.__dict__
    ]


@looped
async def looks(pair: FakePair, watch: PairWatch, times: int = 1) -> None:
    for _ in range(times):
        await watch.look()
        pair.now += 60


def verdicts(state: PairState) -> tuple[bool | None, bool | None]:
    return state.speculation, state.parity


def test_lost_and_back_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often a loss is seen, the log has one line for it and one when it is over."""
    caplog.set_level(logging.INFO, "crossover")
    pair = FakePair()
    watch = pair.watch()
    state = watch.state
    assert verdicts(state) == (None, None)
    looks(pair, watch, 2)
    assert verdicts(state) == (True, True)
    assert (state.alarm, said(caplog)) == (None, [])
    pair.variants[SPEC] = "written-0.5.23-eagle3-lost"
    looks(pair, watch, 3)
    assert verdicts(state) == (False, True)
    assert state.alarm is not None
    assert state.alarm.startswith("speculation-off: speculative_algorithm is null")
    assert said(caplog) == [("speculation_lost", "WARNING")]
    pair.sound()
    looks(pair, watch, 2)
    assert verdicts(state) == (True, True)
    assert state.alarm is None
    assert said(caplog) == [("speculation_lost", "WARNING"), ("speculation_back", "INFO")]


def test_a_pair_that_is_lost_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """The first look alarms already, and it is the trap of the first pair that it names."""
    pair = FakePair()
    pair.variants = {SPEC: "written-0.5.12-eagle3-topk4", BASE: "written-0.5.12-baseline"}
    watch = pair.watch()
    looks(pair, watch)
    assert verdicts(watch.state) == (False, False)
    assert watch.state.alarm is not None
    assert "topk-old" in watch.state.alarm
    assert said(caplog) == [("speculation_lost", "WARNING"), ("parity_lost", "WARNING")]


def test_a_refused_key_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A server that is away comes back; one that refuses the router's key needs somebody, once."""
    caplog.set_level(logging.INFO, "crossover")
    pair = FakePair()
    pair.variants[SPEC] = None
    watch = pair.watch()
    looks(pair, watch)
    pair.refusing.add(SPEC)
    looks(pair, watch, 2)
    assert said(caplog) == [("unknown", "INFO"), ("unknown", "WARNING")]
    assert REFUSED in caplog.text
    pair.refusing.clear()
    pair.sound()
    looks(pair, watch)
    assert verdicts(watch.state) == (True, True)


def test_a_backend_that_cannot_be_asked_is_neither(caplog: pytest.LogCaptureFixture) -> None:
    """While a server is away nothing is known, nothing is said twice, and an alarm stays."""
    caplog.set_level(logging.INFO, "crossover")
    pair = FakePair()
    watch = pair.watch()
    state = watch.state
    pair.variants[SPEC] = "written-0.5.23-eagle3-lost"
    looks(pair, watch)
    pair.variants[SPEC] = None
    looks(pair, watch, 2)
    assert verdicts(state) == (None, None)
    assert state.unknown == (DEAD,)
    assert state.alarm is not None
    pair.variants[SPEC] = "written-0.5.23-eagle3-lost"
    looks(pair, watch)
    assert said(caplog) == [("speculation_lost", "WARNING"), ("unknown", "INFO")]
    pair.sound()
    pair.variants[BASE] = None
    looks(pair, watch)
    assert verdicts(state) == (True, None)
    assert said(caplog)[2:] == [("unknown", "INFO"), ("speculation_back", "INFO")]


def test_parity_lost_and_back(caplog: pytest.LogCaptureFixture) -> None:
    """A baseline that is not like the other is said once, and that it is again once."""
    caplog.set_level(logging.INFO, "crossover")
    pair = FakePair()
    watch = pair.watch()
    pair.variants[BASE] = "written-0.5.23-b200-baseline"
    looks(pair, watch, 2)
    assert verdicts(watch.state) == (True, False)
    pair.sound()
    looks(pair, watch, 2)
    assert verdicts(watch.state) == (True, True)
    assert said(caplog) == [("parity_lost", "WARNING"), ("parity_back", "INFO")]


def test_speculation_that_stops_while_the_arguments_stay() -> None:
    """Tokens served without a verify step, or with none accepted, are a loss between two looks."""
    pair = FakePair()
    watch = pair.watch()
    page = "sglang:generation_tokens_total {}\nsglang:spec_verify_calls_total {}\n"
    wanted = [(0, 0, True), (2800, 1000, True), (3800, 1000, False), (4800, 1990, False),
              (6000, 2400, True), (10, 4, True)]  # fmt: skip
    for tokens, verify, active in wanted:
        pair.pages[SPEC] = page.format(tokens, verify).encode()
        looks(pair, watch)
        assert watch.state.speculation is active, (tokens, verify)


def test_when_it_looks() -> None:
    """At once, after the interval, at once when a backend came back, soon when one was away."""
    pair = FakePair()
    looked: list[float] = []

    async def sleep(seconds: float) -> None:
        while pair.asked:
            pair.asked.clear()
            looked.append(pair.now)
        pair.now += seconds
        if pair.now == 250:
            pair.comebacks += 1
        if pair.now == 500:
            pair.variants[BASE] = None
        if pair.now == 700:
            raise asyncio.CancelledError

    async def work() -> None:
        with pytest.raises(asyncio.CancelledError):
            await pair.watch(interval=200.0, sleep=sleep).run()

    run(work, 5)
    away = [650 + RETRY * n for n in range(5)]
    assert looked == [0, 200, 250, 450, *away]


def test_whatever_goes_wrong_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """An error that nobody expected is logged, and the next look comes."""
    pair = FakePair()
    calls = 0

    async def ask(target: Target) -> Bodies:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise RuntimeError("odd")
        return await pair.ask(target)

    async def sleep(seconds: float) -> None:
        pair.now += seconds
        if pair.now > 15:
            raise asyncio.CancelledError

    watch = PairWatch(TARGETS, ask, interval=10.0, clock=lambda: pair.now, sleep=sleep)

    async def work() -> None:
        with pytest.raises(asyncio.CancelledError):
            await watch.run()

    run(work, 5)
    assert verdicts(watch.state) == (True, True)
    assert "odd" in caplog.text


def test_what_a_server_is_outlives_its_absence() -> None:
    """A fingerprint is of the last look that saw the server, and of no answer that it did not give."""
    pair = FakePair()
    watch = pair.watch()
    assert watch.state.fingerprints == {}
    pair.variants[BASE] = None
    looks(pair, watch)
    assert set(watch.state.fingerprints) == {SPEC}
    pair.sound()
    pair.variants[SPEC] = None
    looks(pair, watch)
    known = watch.state.fingerprints
    assert known[SPEC]["speculative.speculative_algorithm"] == "EAGLE3"
    assert known[BASE]["baseline.speculative_algorithm"] is None


def gauges(state: PairState) -> dict[str, float]:
    """The two metrics as a scrape has them."""
    relay = FakeRelay()
    registry = create_registry(relay.metrics, relay)
    registry.register(PairCollector(state))
    names = ("crossover_speculation_active", "crossover_pair_parity")
    rows = [line.split() for line in generate_latest(registry).decode().splitlines()]
    return {row[0]: float(row[1]) for row in rows if row[0] in names}


def test_metrics_and_status() -> None:
    """What is not known is absent; a verdict is 1 or 0, and /status says it in words."""
    pair = FakePair()
    relay = FakeRelay()
    watch = pair.watch()
    assert gauges(watch.state) == {}
    assert status_body(relay).pair is None
    item = status_body(relay, watch.state).pair
    assert item is not None
    assert (item.age, item.speculation, item.parity) == (None, "unknown", "unknown")
    pair.now = relay.now - 7
    looks(pair, watch)
    assert gauges(watch.state) == {
        "crossover_speculation_active": 1.0,
        "crossover_pair_parity": 1.0,
    }
    pair.variants[SPEC] = "written-0.5.23-eagle3-lost"
    pair.now = relay.now - 5
    looks(pair, watch)
    assert gauges(watch.state)["crossover_speculation_active"] == 0.0
    item = status_body(relay, watch.state).pair
    assert item is not None
    assert (item.age, item.speculation, item.parity) == (5.0, "lost", "fair")
    assert item.alarm == watch.state.alarm
    (finding,) = item.findings
    assert (finding.rule, finding.severity, finding.backend) == ("speculation-off", "spoils", SPEC)


async def seen(stack: Stack, word: str) -> PairItem:
    """The pair on /status as soon as it says this of speculation."""
    async with asyncio.timeout(20):
        while True:
            got = await stack.client.get(stack.admin_url + "/status")
            item = Status.model_validate_json(got.content).pair
            if item is not None and item.age is not None and item.speculation == word:
                return item
            await asyncio.sleep(0.02)


async def metric(stack: Stack) -> float | None:
    """What a scrape of the running router says of speculation."""
    text = (await stack.client.get(stack.admin_url + "/metrics")).text
    rows = [line.split() for line in text.splitlines()]
    return next((float(row[1]) for row in rows if row[0] == "crossover_speculation_active"), None)


def test_in_a_router_over_http(caplog: pytest.LogCaptureFixture) -> None:
    """A server that comes back without speculation is noticed, named on /status, and so is the end."""
    caplog.set_level(logging.INFO, "crossover")
    settings: dict[str, Any] = {"time_scale": 0.002, "max_running_requests": 256}

    async def work() -> None:
        base = EngineConfig.quick(BASE, **settings)
        spec = EngineConfig.quick(SPEC, **settings)
        plain = EngineConfig.quick(BASE, **settings)
        async with running_engine(spec) as first:
            port = first.port  # nobody listens there any more when the router starts
        url = f"http://127.0.0.1:{port}"
        async with (
            running_engine(base) as baseline,
            running_router(url, baseline.url, pair_interval=0.05) as stack,
        ):
            item = await seen(stack, "unknown")
            assert await metric(stack) is None
            async with running_engine(spec, port=port):
                item = await seen(stack, "active")
                assert (item.parity, item.alarm) == ("fair", None)
                assert await metric(stack) == 1.0
            async with running_engine(plain, port=port):
                item = await seen(stack, "lost")
                assert item.alarm is not None
                assert "speculation-off" in item.alarm
                assert await metric(stack) == 0.0
            async with running_engine(spec, port=port):
                assert (await seen(stack, "active")).alarm is None

    run(work, 40)
    lines = [each for each in said(caplog) if each[0].startswith("speculation")]
    assert lines == [("speculation_lost", "WARNING"), ("speculation_back", "INFO")]
