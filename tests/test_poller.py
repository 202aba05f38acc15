"""Pollers and probes: what is asked, when, and what a broken backend cannot do to us."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from router.asking import BODY_LIMIT, Ask, asking, probe_client
from router.config import BackendUrl
from router.health import Answer, Health, PairHealth, Probe
from router.load import LoadTracker, Role, Telemetry
from router.poller import (
    BYTES_A_SECOND,
    LESSER_INTERVAL,
    LOOK_AGAIN,
    LOST_AFTER,
    LOST_INTERVAL,
    AcceptPoller,
    TelemetryPoller,
    pause,
    spread,
)
from router.pool import BackendPool
from router.pool_client import PoolClient
from router.probes import HealthProber
from router.telemetry import LIMITS, Source, Unreadable, parse
from tests.scripted_backend import response, scripted_backend
from tests.stack import running_router

DATA = Path(__file__).parent / "data" / "telemetry"
SPEC = Role.SPECULATIVE
LOADS = (DATA / "spec-32.loads.json").read_bytes()
GET_LOAD = (DATA / "spec-32.get_load.json").read_bytes()
METRICS = (DATA / "spec-32.metrics.txt").read_bytes()

Handler = Callable[[httpx.Request], httpx.Response]


def run(main: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 10.0))


class Clock:
    """Time that moves only when somebody sleeps; after `naps` sleeps the sleeper is cancelled."""

    def __init__(self, naps: int = 0) -> None:
        self.now = 1000.0
        self.naps = naps
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds
        if len(self.slept) >= self.naps:
            raise asyncio.CancelledError
        await asyncio.sleep(0)


class Backend:
    """Answers by path; what is not there is 404. Remembers what was asked."""

    def __init__(self, **answers: httpx.Response | bytes | int | Exception) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.took = 0.0
        self.clock: Clock | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.rsplit("/", 1)[-1]
        self.asked.append(name)
        if self.clock is not None:
            self.clock.now += self.took
        answer = self.answers.get(name, 404)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            return httpx.Response(answer)
        return httpx.Response(200, content=answer) if isinstance(answer, bytes) else answer


def ask_of(backend: Handler, clock: Callable[[], float] = time.monotonic) -> Ask:
    transport = httpx.MockTransport(backend)
    return asking(probe_client("http://backend:30000", transport=transport), clock)


def client_of(url: str) -> PoolClient:
    """What a serving router asks with."""
    address = BackendUrl.parse(url)
    pool = BackendPool(
        SPEC, address, key=None, keep_alive=4.0, connect_timeout=1.0, clock=time.monotonic
    )
    return PoolClient(pool)


class Bench:
    """A telemetry poller with everything injected."""

    def __init__(self, backend: Backend, naps: int = 1) -> None:
        self.backend = backend
        self.clock = Clock(naps)
        self.tracker = LoadTracker()
        self.poller = TelemetryPoller(
            SPEC,
            ask_of(backend, self.clock),
            self.tracker,
            clock=self.clock,
            sleep=self.clock.sleep,
            jitter=float,
        )

    def poll(self, times: int = 1) -> None:
        async def main() -> None:
            for _ in range(times):
                await self.poller.poll()

        run(main())

    @property
    def running(self) -> int | None:
        told = self.tracker.speculative.telemetry
        return told.running if told else None


@pytest.mark.parametrize(
    ("answers", "source", "asked"),
    [
        ({"loads": LOADS, "get_load": GET_LOAD}, Source.LOADS, ["loads"]),
        ({"get_load": GET_LOAD, "metrics": METRICS}, Source.GET_LOAD, ["loads", "get_load"]),
        ({"metrics": METRICS}, Source.METRICS, ["loads", "get_load", "metrics"]),
        ({}, None, ["loads", "get_load", "metrics"]),
        ({"loads": b"<html>", "get_load": 405, "metrics": METRICS}, Source.METRICS, None),
        ({"loads": httpx.ReadTimeout("slow"), "metrics": METRICS}, Source.METRICS, None),
        ({"loads": httpx.ConnectError("refused")}, None, ["loads"]),
    ],
)
def test_sources_are_detected(
    answers: dict[str, bytes | int | Exception], source: Source | None, asked: list[str] | None
) -> None:
    """The best source that can be read is used, and nobody is asked twice who is not there."""
    bench = Bench(Backend(**answers))
    bench.poll()
    assert bench.poller.source is source
    assert bench.running == (32 if source else None)
    assert asked is None or bench.backend.asked == asked


def test_known_source_is_asked_alone() -> None:
    """After detection one request is one poll."""
    bench = Bench(Backend(metrics=METRICS))
    bench.poll(5)
    assert bench.backend.asked == ["loads", "get_load", "metrics", *["metrics"] * 4]


def test_detected_again_after_a_restart() -> None:
    """A backend that comes back as another version is read by what it has now."""
    bench = Bench(Backend(loads=LOADS))
    bench.poll()
    bench.backend.answers = {"get_load": GET_LOAD}
    bench.poll(2)
    assert bench.poller.source is Source.GET_LOAD
    assert bench.backend.asked == ["loads", "loads", "loads", "get_load"]


def test_better_source_is_looked_for() -> None:
    """A lesser source is given up for a better one when half a minute is over."""
    bench = Bench(Backend(metrics=METRICS))
    bench.poll()
    bench.backend.answers["loads"] = LOADS
    bench.poll()
    bench.clock.now += LOOK_AGAIN
    bench.poll(2)
    assert bench.backend.asked[3:] == ["metrics", "loads", "loads"]


BROKEN: dict[str, httpx.Response | bytes | int | Exception] = {
    "404": 404,
    "500": 500,
    "401": 401,
    "redirect": httpx.Response(307, headers={"location": "http://elsewhere/"}),
    "html": b"<html>Service Unavailable</html>",
    "renamed": LOADS.replace(b"num_running_reqs", b"running"),
    "negative": LOADS.replace(b'"num_running_reqs":32', b'"num_running_reqs":-32'),
    "NaN": LOADS.replace(b'"num_running_reqs":32', b'"num_running_reqs":NaN'),
    "truncated": LOADS[:-1],
    "5 MB": LOADS + b" " * (5 * 1024 * 1024),
    "30 s": httpx.ReadTimeout("slow"),
    "cut": httpx.RemoteProtocolError("peer closed connection"),
    "refused": httpx.ConnectError("refused"),
    "a fault of the library": RuntimeError("broken"),
    "gzip": httpx.Response(200, content=gzip.compress(LOADS), headers={"content-encoding": "gzip"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_answers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever comes: one warning, the last value grows old, own counts decide, polling goes on."""
    caplog.set_level(logging.INFO, logger="crossover")
    bench = Bench(Backend(loads=LOADS))
    bench.poll()
    bench.backend.answers["loads"] = BROKEN[name]
    bench.poll(LOST_AFTER - 1)
    assert bench.poller.known, "one slow answer is not a change of state"
    bench.poll(10)
    assert bench.poller.known is False
    assert bench.poller.source is None
    assert bench.running == 32
    bench.clock.now += 2.1
    load = bench.tracker.snapshot(bench.clock.now).speculative
    assert (load.fresh, load.concurrency, load.queued) == (False, 0, None)
    bench.backend.answers["loads"] = LOADS
    bench.poll(3)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
    assert "v1_loads" in caplog.records[1].message
    assert caplog.records[1].__dict__["backend"] == "speculative"
    assert bench.poller.failures == LOST_AFTER + 9
    assert bench.poller.polls == LOST_AFTER + 13


def test_unknown_from_the_start_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """A backend without any telemetry is one warning that names what was tried."""
    bench = Bench(Backend(get_load=500))
    bench.poll(3)
    tried = "v1_loads: status 404; get_load: status 500; metrics: status 404"
    assert [record.message for record in caplog.records] == [
        f"telemetry of speculative is unknown: {tried}"
    ]


@pytest.mark.parametrize(
    ("answers", "pauses"),
    [
        ({"loads": LOADS}, [0.2, 0.2, 0.2]),
        ({"get_load": GET_LOAD}, [LESSER_INTERVAL] * 3),
        ({}, [0.4, 0.8, 1.6, LOST_INTERVAL, LOST_INTERVAL]),
    ],
)
def test_pace(answers: dict[str, bytes], pauses: list[float]) -> None:
    """A cheap source is read often, a dear one less so, and none at all ever more rarely."""
    bench = Bench(Backend(**answers), naps=len(pauses))
    with pytest.raises(asyncio.CancelledError):
        run(bench.poller.run())
    assert bench.clock.slept == pauses


def test_slow_polls_do_not_pile_up() -> None:
    """The next poll starts after the last has ended, and after a breath."""
    bench = Bench(Backend(loads=LOADS), naps=2)
    bench.backend.clock = bench.clock
    bench.backend.took = 0.15
    with pytest.raises(asyncio.CancelledError):
        run(bench.poller.run())
    assert bench.clock.slept == [0.1, 0.1]
    assert bench.backend.asked == ["loads", "loads"]
    assert pause(0.2, 0.05) == pytest.approx(0.15)
    assert pause(0.2, 9.0) == 0.1


def test_snapshot_is_dated_by_the_moment_of_sending() -> None:
    """An answer that took long to come is not younger for it."""
    bench = Bench(Backend(get_load=GET_LOAD))
    bench.backend.clock = bench.clock
    bench.backend.took = 0.5
    bench.poll()
    told = bench.tracker.speculative.telemetry
    assert told is not None
    assert (told.taken_at, told.read_at) == (1000.5, 1001.0)


def test_telemetry_carries_live_acceptance() -> None:
    """The meter's value joins the load; without one the field is None."""
    bench = Bench(Backend(loads=LOADS))
    bench.poll()
    told = bench.tracker.speculative.telemetry
    assert told is not None
    assert told.accept_length is None
    bench.poller._accept = lambda now: 2.5
    bench.poll()
    told = bench.tracker.speculative.telemetry
    assert told is not None
    assert told.accept_length == 2.5


def test_acceptance_grows_old() -> None:
    """A value lasts three polls; failures and broken pages leave it to age."""
    clock, backend = Clock(naps=4), Backend(metrics=METRICS)
    poller = AcceptPoller(ask_of(backend, clock), clock=clock, sleep=clock.sleep, jitter=float)
    assert poller.value(clock.now) is None

    async def main() -> None:
        await poller.poll()
        for broken in (404, b"sglang:token_usage 1\n" * 2000, httpx.ReadTimeout("slow")):
            backend.answers["metrics"] = broken
            await poller.poll()

    run(main())
    assert poller.value(1000.0) == 2.8
    assert poller.value(1015.0) == 2.8
    assert poller.value(1015.1) is None
    with pytest.raises(asyncio.CancelledError):
        run(poller.run())
    assert clock.slept == [5.0] * 4


def test_spread_stays_within_a_tenth() -> None:
    """Jitter changes a pause by a tenth at most."""
    assert all(0.9 <= spread(1.0) <= 1.1 for _ in range(100))


class Probes:
    """A prober with everything injected."""

    def __init__(self, backend: Backend, naps: int = 1) -> None:
        self.backend = backend
        self.clock = Clock(naps)
        self.pair = PairHealth(LoadTracker())
        self.prober = HealthProber(
            SPEC,
            self.pair,
            ready=ask_of(backend, self.clock),
            health=ask_of(backend, self.clock),
            clock=self.clock,
            sleep=self.clock.sleep,
            jitter=float,
        )

    def health(self) -> Health:
        return self.pair.status(SPEC).health

    def probe(self, *probes: Probe) -> list[Answer]:
        async def main() -> list[Answer]:
            return [await self.prober.probe(probe) for probe in probes]

        return asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "heard", "after_one", "after_three"),
    [
        (200, Answer.PASS, Health.UP, Health.UP),
        (503, Answer.REFUSED, Health.DOWN, Health.DOWN),
        (500, Answer.MISS, Health.UNKNOWN, Health.DOWN),
        (404, Answer.ABSENT, Health.UNKNOWN, Health.UNKNOWN),
        (httpx.ConnectError("refused"), Answer.UNREACHABLE, Health.UNKNOWN, Health.DOWN),
        (httpx.ReadTimeout("slow"), Answer.MISS, Health.UNKNOWN, Health.DOWN),
    ],
)
@pytest.mark.parametrize("probe", list(Probe))
def test_probe_answers(
    probe: Probe,
    answer: int | Exception,
    heard: Answer,
    after_one: Health,
    after_three: Health,
) -> None:
    """A 503 is believed at once; silence has to happen three times."""
    probes = Probes(Backend(ready=answer, health=answer))
    assert probes.probe(probe) == [heard]
    assert probes.health() is after_one
    probes.probe(probe, probe)
    assert probes.health() is after_three


def test_backend_without_health_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """No /ready is an older server; no /health is worth one warning."""
    probes = Probes(Backend())
    probes.probe(*[Probe.READY, Probe.HEALTH] * 3)
    assert [record.message for record in caplog.records] == [
        "speculative has no /health (status 404): only its traffic tells"
    ]


def loop(probes: Probes, which: str) -> None:
    with pytest.raises(asyncio.CancelledError):
        run(getattr(probes.prober, f"_{which}_loop")())


def test_ready_is_asked_every_second() -> None:
    """The cheap probe is quick where it exists and rare where it does not."""
    probes = Probes(Backend(ready=200), naps=3)
    loop(probes, "ready")
    assert probes.clock.slept == [1.0, 1.0, 1.0]
    older = Probes(Backend(), naps=2)
    loop(older, "ready")
    assert older.clock.slept == [15.0, 15.0]


def test_health_is_slow_beside_ready() -> None:
    """With /ready up, /health runs the engine every 15 s only."""
    probes = Probes(Backend(ready=200, health=200), naps=31)
    probes.probe(Probe.READY)
    loop(probes, "health")
    assert probes.backend.asked == ["ready", *["health"] * 3]


@pytest.mark.parametrize("ready", [404, 503])
def test_health_is_quick_without_ready(ready: int) -> None:
    """Without /ready, or while it says no, the next /health starts a second after the last."""
    probes = Probes(Backend(ready=ready, health=200), naps=4)
    probes.probe(Probe.READY)
    loop(probes, "health")
    assert probes.backend.asked == ["ready", *["health"] * 4]


def test_absent_health_is_asked_rarely() -> None:
    """A backend without /health may wait: there is nothing to notice there."""
    probes = Probes(Backend(), naps=31)
    loop(probes, "health")
    assert probes.backend.asked == ["health"] * 3


def test_long_wait_ends_when_ready_says_no() -> None:
    """A drain seen by /ready has /health asked within a second."""
    probes = Probes(Backend(ready=200, health=200), naps=6)
    probes.probe(Probe.READY)
    sleep = probes.clock.sleep

    async def sleeping(seconds: float) -> None:
        await sleep(seconds)
        if len(probes.clock.slept) == 3:
            probes.pair.probed(SPEC, Probe.READY, Answer.REFUSED, probes.clock.now, "status 503")

    probes.prober._sleep = sleeping
    loop(probes, "health")
    assert probes.backend.asked == ["ready", *["health"] * 4]


@asynccontextmanager
async def server(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]],
) -> AsyncIterator[str]:
    """A raw TCP server on a free loopback port."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listening:
        host, port = listening.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"


def test_cancelled_while_waiting() -> None:
    """Cancelling a prober that hangs in both probes ends it at once and cleanly."""

    async def main() -> None:
        both_hang = asyncio.Barrier(3)

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await both_hang.wait()
            await reader.read()

        async with server(hang) as url:
            ready, health = client_of(url), client_of(url)
            pair = PairHealth(LoadTracker())
            prober = HealthProber(SPEC, pair, ready=ready.ask, health=health.ask)
            task = asyncio.create_task(prober.run())
            await both_hang.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            ready.close()
            health.close()

    run(main())


def test_hung_health_delays_no_telemetry() -> None:
    """Each purpose has its own connection."""
    body = json.dumps([{"dp_rank": 0, "num_reqs": 7, "num_waiting_reqs": 2}]).encode()

    async def main() -> None:
        waiting = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            waiting.set()
            await reader.read()

        async def quick(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\n" + length + body)
            await writer.drain()

        async with server(answer) as slow_url, server(quick) as quick_url:
            health, telemetry = client_of(slow_url), client_of(quick_url)
            task = asyncio.create_task(health.ask("health", 25.0))
            await waiting.wait()
            tracker = LoadTracker()
            poller = TelemetryPoller(SPEC, telemetry.ask, tracker)
            await poller.poll()
            assert not task.done()
            task.cancel()
            told = tracker.speculative.telemetry
            assert told is not None
            assert (told.running, told.queued) == (5, 2)

    run(main())


# ---------------------------------------------------------------------- what telemetry may cost


def padded(body: bytes, size: int) -> bytes:
    """An answer of the same meaning with so many bytes."""
    return body + b" " * (size - len(body))


def test_large_answers_are_asked_for_more_rarely() -> None:
    """The pace keeps to bytes a second: small answers do not change it, larger ones do."""
    for size, expected in ((1000, 0.2), (50_000, 0.2), (131_072, 0.5), (LIMITS[Source.LOADS], 1.0)):
        bench = Bench(Backend(loads=padded(LOADS, size)), naps=3)
        with contextlib.suppress(asyncio.CancelledError):
            run(bench.poller.run())
        assert bench.poller.known
        assert bench.clock.slept == [expected] * 3


def test_answers_that_are_too_large_are_not_looked_at() -> None:
    """Beyond its limit an answer is unknown, whatever is in it, and a better source is still taken."""
    limit = LIMITS[Source.LOADS]
    bench = Bench(Backend(loads=padded(LOADS, limit + 1), metrics=METRICS), naps=2)
    with contextlib.suppress(asyncio.CancelledError):
        run(bench.poller.run())
    assert bench.poller.source is Source.METRICS
    assert bench.clock.slept == [round((limit + 1 + len(METRICS)) / BYTES_A_SECOND, 6), 1.0]
    told = parse(Source.LOADS, padded(LOADS, limit + 1), 0.0, 0.0)
    assert told == Unreadable(f"longer than {limit} bytes")
    assert isinstance(parse(Source.LOADS, padded(LOADS, limit), 0.0, 0.0), Telemetry)


def test_a_large_page_of_metrics_is_asked_for_more_rarely() -> None:
    """So it is for acceptance, whether the page can be read or is an error's."""
    page = padded(METRICS, 786_432)
    for answer in (page, httpx.Response(404, content=page), httpx.Response(200, content=page * 6)):
        clock = Clock(naps=1)
        backend = Backend(metrics=answer)
        poller = AcceptPoller(
            ask_of(backend, clock), interval=1.0, clock=clock, sleep=clock.sleep, jitter=float
        )
        with contextlib.suppress(asyncio.CancelledError):
            run(poller.run())
        read = BODY_LIMIT if len(page) * 6 == len(getattr(answer, "content", page)) else len(page)
        assert clock.slept == [read / BYTES_A_SECOND]


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "503 Service Unavailable"])
def test_a_backend_that_says_far_too_much(status: str) -> None:
    """A router whose backends answer everything with 4 MiB reads each once, and serves meanwhile."""
    asked: list[bytes] = []

    async def probe(path: bytes) -> bytes:
        asked.append(path)
        if path in {b"/ready", b"/health"}:
            return response(b"{}")
        return response(b'{"loads":[' + b"{}," * (4 * 1024 * 1024 // 3) + b"{}]}", status)

    async def work() -> None:
        async with scripted_backend() as spec, scripted_backend() as base:
            spec.probe = base.probe = probe
            async with running_router(spec.url, base.url, telemetry_interval="50ms") as stack:
                for _ in range(30):
                    assert (await stack.chat()).status_code == 200
                    await asyncio.sleep(0.05)
        # 30 polls of each backend would be made of answers that fit: here one, of each source, and
        # the one for acceptance.
        counted = Counter(path.partition(b"?")[0] for path in asked)
        assert counted[b"/v1/loads"] == 2
        assert counted[b"/get_load"] == 2
        assert counted[b"/metrics"] <= 6  # the watch of the pair reads one too

    run(work())
