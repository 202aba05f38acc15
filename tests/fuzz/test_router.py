"""The whole router over real sockets against a model, in whatever order hypothesis finds.

Clients come, leave and read slowly; backends refuse, break, fall silent and talk nonsense, in their
answers and in their telemetry; the network between does worse; the operator changes his mind. When
all is quiet again the oracle reads every answer, and every count must be 0.

`make fuzz` runs more of it (FUZZ_EXAMPLES).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import traceback
from typing import Any

import msgspec
import uvloop
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.load import Role
from router.metrics import Retry
from tests.chaos.fault_proxy import NO_FAULTS, FaultProxy, Faults, fault_proxy
from tests.fuzz.oracle import Ground, check_client
from tests.fuzz.stage import KEY, SSE, WHOLE, Client, Plan, PlannedBackend, Story, Visit
from tests.stack import Stack, running_router, until

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
STEPS = 25
SETTLE_S = 12.0  # every limit in time below, one after another
RESERVE = 10  # replays after a refusal that the budget has from the start
# What is 0 at rest.
GAUGES = (
    'crossover_in_flight{backend="speculative"}',
    'crossover_in_flight{backend="baseline"}',
    "crossover_queue_waiting",
)
ADMIN = {"authorization": "Bearer sk-admin"}

WAITS = st.sampled_from([None, None, None, -1, 0, 1])
CUTS = st.sampled_from([*[WHOLE] * 8, -1, 0, 1, 2])
HOWS = st.sampled_from(["fin", "rst", "garbage"])
FRAMINGS = st.sampled_from(["length", "chunked", "close"])
JSONS = st.builds(
    Plan,
    status=st.sampled_from([200, 200, 200, 400, 404, 429, 500, 503]),
    framing=FRAMINGS,
    names=st.sampled_from([("object",), ("open", "close"), ("big", "close"), ()]),
    wait=WAITS,
    cut=CUTS,
    how=HOWS,
)
STREAMS = st.builds(
    Plan,
    kind=st.just(SSE),
    framing=st.sampled_from(["chunked", "chunked", "close"]),
    names=st.sampled_from(
        [
            ("event", "event", "usage", "done"), ("half", "other half", "done"), ("refused", "done"),
            ("failed", "done"), ("event", "failed"), ("ping", "event", "done"), ("refused",), (),
            ("event", "big", "other half"), ("ping", "ping", "refused"),
        ]
    ),
    wait=WAITS,
    cut=CUTS,
    how=HOWS,
)  # fmt: skip
FORGING = st.just(Plan(forges=True))
PLANS = st.lists(
    st.one_of(JSONS, JSONS, STREAMS, STREAMS, STREAMS, FORGING), min_size=1, max_size=2
)
VISITS = st.builds(
    Visit,
    http10=st.sampled_from([False, False, False, True]),
    chunked=st.booleans(),
    key=st.sampled_from([*[KEY] * 9, "wrong", None]),
    pin=st.sampled_from([*[None] * 8, "speculative", "baseline", "nobody"]),
    leaves=st.sampled_from([*["no"] * 10, "upload", "sent", "answer", "half", "reset"]),
    slow=st.sampled_from([False, False, False, True]),
)
BOTH = st.tuples(PLANS, PLANS)


class Arrival(msgspec.Struct, frozen=True):
    """A client that comes with a few requests on one connection."""

    visit: Visit
    plans: list[tuple[list[Plan], list[Plan]]]
    stream: bool
    size: int


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    """Only who stays, and speaks HTTP/1.1, sends a second request."""
    visit = draw(VISITS)
    most = 1 if visit.http10 or visit.leaves != "no" else 3
    return Arrival(
        visit,
        draw(st.lists(BOTH, min_size=1, max_size=most)),
        draw(st.booleans()),
        draw(st.sampled_from([0, 10, 5000])),
    )


ARRIVALS = arrivals()
SOUND = Arrival(Visit(), [([Plan()], [Plan()])], stream=False, size=10)
FAULTS = st.sampled_from(
    [
        NO_FAULTS, NO_FAULTS, Faults(latency=0.02), Faults(bandwidth=400_000), Faults(reset_after=0),
        Faults(reset_after=150), Faults(half_close_after=0), Faults(half_close_after=200),
        Faults(blackhole=True), Faults(refuse=True),
    ]
)  # fmt: skip
CONFIGURATIONS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(
            ["frontier", "frontier", "speculative", "baseline", "least-in-flight", "round-robin"]
        ),
        "threshold": st.sampled_from(["never", "1", "3", "always"]),
        "scope": st.sampled_from(["total", "speculative"]),
        "max_in_flight": st.sampled_from([1, 2, 100, 100]),
        "queue_size": st.sampled_from([0, 2, 100, 100]),
        "queue_timeout": st.sampled_from(["0", "300ms", "5s"]),
        "api_keys": st.sampled_from([None, None, KEY]),
        "allow_pinning": st.booleans(),
        "retry_budget": st.sampled_from([0, 0.2, 1]),
        "peek_timeout": st.sampled_from(["0", "50ms"]),
        "replay_window": st.sampled_from(["0", "250ms"]),
        "fence_n": st.booleans(),
        "cool_down": st.sampled_from(["0", "100ms"]),
        "breaker_failures": st.sampled_from([2, 1000, 1000]),
    }
)
FIXED: dict[str, object] = {
    "band": 0, "dwell": 0, "admin_key": "sk-admin", "drain_timeout": "300ms",
    "first_byte_timeout": "900ms", "idle_timeout": "900ms", "write_timeout": "900ms",
    "connect_timeout": "300ms", "telemetry_interval": "50ms", "telemetry_stale": "200ms",
    "ready_interval": "100ms", "health_interval": "1s", "health_timeout": "300ms",
    "health_up_after": 1, "breaker_open": "200ms",
}  # fmt: skip


class Listener(logging.Handler):
    """Keeps what should not be in a log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{record.name}: {record.getMessage()} {record.exc_info}")


def described(context: dict[str, Any]) -> str:
    """What the event loop could not hand to anybody."""
    error = context.get("exception")
    return str(context["message"]) + "".join(traceback.format_exception(error) if error else ())


class Machine(RuleBasedStateMachine):
    """One router, two backends, and a network between."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.places = contextlib.AsyncExitStack()
        self.stories: dict[str, Story] = {}
        self.clients: list[tuple[Client, asyncio.Task[None]]] = []
        self.ground = Ground()
        self.abrupt = False
        self.stack: Stack
        self.backends: dict[Role, PlannedBackend] = {}
        self.proxies: dict[Role, FaultProxy] = {}
        self.unhandled: list[str] = []
        self.listener = Listener()
        logging.getLogger().addHandler(self.listener)

    def run(self, work: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(SETTLE_S + 5):
                return await work

        return self.runner.run(bounded())

    # ------------------------------------------------------------------ what happens

    @initialize(
        told=CONFIGURATIONS,
        abrupt=st.sampled_from([False, False, False, True]),
        first=st.lists(ARRIVALS, min_size=2, max_size=6),
    )
    def open(self, told: dict[str, Any], abrupt: bool, first: list[Arrival]) -> None:
        self.abrupt = abrupt
        values = {name: value for name, value in told.items() if value is not None}
        self.ground.keyed = "api_keys" in values
        if values["policy"] != "frontier":
            del values["threshold"], values["scope"]
        self.run(self._open(FIXED | values))
        self.arrive(first)

    async def _open(self, values: dict[str, object]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.unhandled.append(described(context)))
        for role in Role:
            backend = self.backends[role] = PlannedBackend(role, self.stories)
            server = await asyncio.start_server(backend.serve, "127.0.0.1", 0, backlog=100)
            self.places.push_async_callback(backend.close)
            self.places.callback(server.close)
            port = server.sockets[0].getsockname()[1]
            self.proxies[role] = await self.places.enter_async_context(fault_proxy(port))
        speculative, baseline = self.proxies[Role.SPECULATIVE].url, self.proxies[Role.BASELINE].url
        self.stack = await self.places.enter_async_context(
            running_router(speculative, baseline, **values)
        )
        # Without this, half of all examples would only see a router that knows no backend yet.
        await until(lambda: all(self.stack.relay.tracker.of(role).usable for role in Role))

    def arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.run(self._arrive(arrival))

    async def _arrive(self, arrival: Arrival) -> None:
        told = []
        for speculative, baseline in arrival.plans:
            both = {Role.SPECULATIVE: speculative, Role.BASELINE: baseline}
            story = Story(len(self.stories), both, stream=arrival.stream, size=arrival.size)
            self.stories[story.id] = story
            told.append(story)
        client = Client(arrival.visit, told, self.stack.router.port)
        self.clients.append((client, asyncio.ensure_future(client.run())))
        await asyncio.sleep(0.002)

    # Several rules, since hypothesis leaves some out of each example.
    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=4))
    def arrive_one_way(self, arrivals: list[Arrival]) -> None:
        self.arrive(arrivals)

    arrive_and_again = arrive_one_way
    arrive_once_more = arrive_one_way

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=3), seconds=st.sampled_from([0.0, 0.03]))
    def arrive_in_turn(self, arrivals: list[Arrival], seconds: float) -> None:
        """Behind a request that leaves its connection to be used again."""
        for arrival in arrivals:
            self.run(self._arrive(SOUND))
            self.run(asyncio.sleep(seconds))
            self.run(self._arrive(arrival))

    @precondition(lambda self: self.stories)
    @rule(pick=st.integers(0, 1000))
    def release(self, pick: int) -> None:
        stories = list(self.stories.values())
        stories[pick % len(stories)].gate.set()
        self.run(asyncio.sleep(0.002))

    @rule(seconds=st.sampled_from([0.005, 0.02, 0.02, 0.06, 0.06, 0.3, 1.2]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(role=st.sampled_from(Role), faults=st.one_of(FAULTS, st.none()))
    def network(self, role: Role, faults: Faults | None) -> None:
        """None: every open connection is reset."""
        self.ground.strict &= faults == NO_FAULTS
        self.run(self._network(self.proxies[role], faults))

    async def _network(self, proxy: FaultProxy, faults: Faults | None) -> None:
        if faults is None:
            proxy.reset_all()
        else:
            await proxy.switch(faults)
        await asyncio.sleep(0.002)

    @rule(
        role=st.sampled_from(Role),
        telemetry=st.sampled_from(["none", "true", "lies", "garbage", "silent"]),
        ready=st.sampled_from([True, True, True, True, False]),
    )
    def say(self, role: Role, telemetry: str, ready: bool) -> None:
        self.backends[role].telemetry = telemetry
        self.backends[role].ready = ready

    @rule(
        path=st.sampled_from(
            [
                "/policy", "/policy", "/metrics", "/status", "/decisions?limit=9", "/healthz",
                *(f"/backends/{role}/{what}" for role in Role for what in ("drain", "enable")),
            ]
        ),
        policy=st.sampled_from(["speculative", "baseline", "round-robin", "least-in-flight"]),
    )  # fmt: skip
    def operate(self, path: str, policy: str) -> None:
        method = "POST" if path.startswith(("/policy", "/backends")) else "GET"
        body = {"policy": policy} if path == "/policy" else None
        self.run(self._operate(method, self.stack.admin_url + path, body))

    async def _operate(self, method: str, url: str, body: object = None) -> None:
        answer = await self.stack.client.request(method, url, json=body, headers=ADMIN)
        assert answer.status_code == 200, answer.text

    # ------------------------------------------------------------------ what holds at any time

    @invariant()
    def counts_are_those_of_the_leases(self) -> None:
        if not self.backends:
            return
        relay = self.stack.relay
        drivers = [each.driver for each in relay.connections if each.driver is not None]
        leases = [each.exchange._lease for each in drivers]
        for role in Role:
            held = sum(lease is not None and lease.role is role for lease in leases)
            assert relay.tracker.of(role).in_flight == held
        assert relay.waiting == sum(each.exchange.decided_at is None for each in drivers)
        assert sum(self.stack.in_flight()) <= self.stack.router.settings.max_in_flight

    # ------------------------------------------------------------------ what holds at the end

    def teardown(self) -> None:
        try:
            if self.backends:
                self.run(self._quiet())
        finally:
            with contextlib.suppress(Exception):
                self.runner.run(self.places.aclose())
            self.runner.close()
            logging.getLogger().removeHandler(self.listener)
        gc.collect()
        assert not self.unhandled, "\n".join(self.unhandled)
        assert not self.listener.found, "\n".join(self.listener.found)
        lines: dict[str, list[dict[str, Any]]] = {}
        for line in b"".join(self.stack.lines).splitlines() if self.backends else ():
            told = json.loads(line)
            lines.setdefault(told["request_id"], []).append(told)
        for client, _ in self.clients:
            check_client(client, lines, self.ground)

    async def _quiet(self) -> None:
        stack, relay = self.stack, self.stack.relay
        if self.abrupt:
            self.ground.strict = False
            await stack.client.aclose()
            await stack.router.stop()
        for backend in self.backends.values():
            backend.opened = True
        for proxy in self.proxies.values():
            await proxy.switch(NO_FAULTS)
        for story in self.stories.values():
            story.gate.set()
        tasks = [task for _, task in self.clients]
        if tasks:
            _, hung = await asyncio.wait(tasks, timeout=SETTLE_S)
            assert not hung, f"{len(hung)} clients hang: a request was lost"
        for task in tasks:
            task.result()
        await until(lambda: stack.in_flight() == (0, 0))
        await until(lambda: relay.waiting == relay.buffered == 0)
        await until(lambda: sum(relay.connection_counts().backend_busy.values()) == 0)
        await until(lambda: all(backend.in_flight == 0 for backend in self.backends.values()))
        relay.access_log.flush()
        if not self.abrupt:
            page = await stack.client.get(stack.admin_url + "/metrics", headers=ADMIN)
            told = [line for line in page.text.splitlines() if line.startswith(GAUGES)]
            assert sorted(told) == sorted(f"{gauge} 0.0" for gauge in GAUGES)
        await self.places.aclose()
        counted = sum(relay.metrics.requests.values())
        logged = b"".join(stack.lines).count(b"\n")
        assert counted == logged
        retries = sum(relay.metrics.retries.values())
        again = sum(max(0, len(story.sightings) - 1) for story in self.stories.values())
        assert again <= retries
        share = stack.router.settings.retry_budget
        moved = relay.metrics.retries[Retry.REFUSED]
        assert moved <= (RESERVE + share * counted if share else 0)


Machine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    # Sockets and time are not to be had twice the same: the example that failed is shown as it is.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
TestRouter = Machine.TestCase
