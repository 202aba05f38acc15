"""The name, type, help and labels of everything that we export, in one place.

The collector reads plain integers and lists (`router.metrics`) and the live objects (tracker,
policy, health) at the moment of a scrape; nothing is counted here. All series exist from the first
scrape, so that a rate is right from the first event on, with these exceptions:

* `crossover_requests_total` would have hundreds of cells that never move: those of the main routes
  on the two backends are always there, and the others from their first request on;
* what is unknown is absent, never zero: telemetry that is stale or that a backend does not report,
  and the threshold under a policy that has none.

Labels are closed sets: a client cannot make a new series.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router import __version__
from router.breaker import BreakerState
from router.frontier import Frontier
from router.health import Health
from router.load import ROLES, LoadSnapshot, Role
from router.metrics import Histogram, Outcome, RelayMetrics
from router.view import RelayView

MAIN_ROUTES = ("chat_completions", "completions", "responses", "messages", "generate")
UP = {Health.DOWN: 0, Health.UP: 1, Health.UNKNOWN: None}
STATES = (
    *(("health", state.name.lower()) for state in Health),
    *(("breaker", state.name.lower()) for state in BreakerState),
    ("drain", "drained"),
    ("drain", "enabled"),
)
PREFIX = "crossover_"


def create_registry(metrics: RelayMetrics, relay: RelayView) -> CollectorRegistry:
    """A registry with everything of ours and of this process (CPU, memory, file descriptors)."""
    registry = CollectorRegistry()
    registry.register(RelayCollector(metrics, relay))
    ProcessCollector(registry=registry)
    return registry


def frontier_in_force(frontier: Frontier, snapshot: LoadSnapshot) -> float:
    """F(m) at this load, in requests, and never above the speculative server's own cap."""
    limit = frontier.at(snapshot.baseline.concurrency)
    cap = snapshot.speculative.cap
    return limit if cap is None or cap > limit else float(cap)


def threshold_of(frontier: Frontier, snapshot: LoadSnapshot) -> float:
    """K, in requests; of a line that has no K, F(m) at this load."""
    if frontier.scope == "table":
        return frontier.at(snapshot.baseline.concurrency)
    return frontier.threshold


class RelayCollector(Collector):
    """Turns plain numbers into families of metrics, once per scrape."""

    def __init__(
        self, metrics: RelayMetrics, relay: RelayView, *, wall: Callable[[], float] = time.time
    ) -> None:
        """`wall` gives unix seconds."""
        self._metrics = metrics
        self._relay = relay
        self._wall = wall

    def describe(self) -> Iterable[Metric]:
        """Nothing: there is no second collector whose names could collide with ours."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of a request's life."""
        snapshot = self._relay.tracker.snapshot(self._relay.clock())
        yield from self._traffic()
        yield from self._times()
        yield from self._load(snapshot)
        yield from self._line(snapshot)
        yield from self._telemetry(snapshot)
        yield from self._state()
        yield from self._program()

    def _traffic(self) -> Iterator[Metric]:
        metrics = self._metrics
        requests = _counter("requests", "Requests that ended.", "backend", "route", "outcome")
        for (role, route, outcome), value in metrics.requests.items():
            usual = route in MAIN_ROUTES and (role is not None or outcome is Outcome.REJECTED)
            if value or usual:
                requests.add_metric([_label(role), route, outcome], value)
        yield requests
        decisions = _counter("decisions", "Decisions, replays included.", "backend", "reason")
        for (role, reason), value in metrics.decisions.items():
            decisions.add_metric([_label(role), reason], value)
        yield decisions
        retries = _counter("retries", "Requests sent twice, or not for want of budget.", "kind")
        for kind, value in metrics.retries.items():
            retries.add_metric([kind], value)
        yield retries
        rejected = _counter("rejected", "Requests that the router answered itself.", "reason")
        for name, value in metrics.rejections.items():
            rejected.add_metric([name], value)
        yield rejected
        yield from self._volume()

    def _volume(self) -> Iterator[Metric]:
        backends = self._metrics.backends
        for name, text, of in (
            ("prompt_tokens", "Prompt tokens, from the usage that backends report.",
             {role: found.prompt_tokens for role, found in backends.items()}),
            ("output_tokens", "Output tokens, from the usage that backends report.",
             {role: found.output_tokens for role, found in backends.items()}),
            ("stream_chunks", "Chunks of streamed answers, counted when a request ends.",
             {role: found.chunks for role, found in backends.items()}),
        ):  # fmt: skip
            family = _counter(name, text, "backend")
            for role, value in of.items():
                family.add_metric([role], value)
            yield family
        yield _single(_counter("request_bytes", "Bytes of request bodies."), self._metrics.bytes_in)
        yield _single(_counter("response_bytes", "Bytes of answers."), self._metrics.bytes_out)

    def _times(self) -> Iterator[Metric]:
        backends = self._metrics.backends
        yield _histograms(
            "first_chunk_seconds",
            "From a streamed request's arrival to its first chunk, our queue included.",
            {role: found.first_chunk for role, found in backends.items()},
        )
        yield _histograms(
            "request_seconds",
            "From a request's arrival to the last byte of its complete answer.",
            {role: found.total for role, found in backends.items()},
        )
        yield _histograms(
            "chunk_gap_seconds",
            "Between two chunks of a streamed answer: the time per output chunk.",
            {role: found.chunk_gap for role, found in backends.items()},
        )
        yield _histogram(
            "queue_wait_seconds", "Time in the router's own queue.", self._metrics.queue_wait
        )
        yield _histogram(
            "overhead_seconds",
            "From a request's arrival until it is sent, without the time in our queue.",
            self._metrics.overhead,
        )

    def _load(self, snapshot: LoadSnapshot) -> Iterator[Metric]:
        yield _per_role("in_flight", "Requests that the router has open.",
                        lambda role: snapshot.of(role).in_flight)  # fmt: skip
        yield _per_role("concurrency", "In-flight plus other clients' share: what is compared.",
                        lambda role: snapshot.of(role).concurrency)  # fmt: skip
        yield _per_role("contended", "1 if the backend refused work a moment ago, or says nothing.",
                        lambda role: snapshot.of(role).contended)  # fmt: skip
        yield _single(
            _gauge("queue_waiting", "Requests in the router's own queue."), self._relay.waiting
        )

    def _line(self, snapshot: LoadSnapshot) -> Iterator[Metric]:
        now, configured = getattr(self._relay.policy, "frontier", None), self._relay.frontier
        force = _gauge("frontier", "F(m): the speculative concurrency that is too much now.")
        threshold = _gauge("threshold", "K in force; of a line without a K, F(m).")
        if isinstance(now, Frontier):
            _single(force, frontier_in_force(now, snapshot))
            _single(threshold, threshold_of(now, snapshot))
        line = _gauge("threshold_configured", "K as configured or calibrated.")
        if configured is not None:
            _single(line, threshold_of(configured, snapshot))
        yield from (force, threshold, line)
        side = self._relay.tracker.memory.side
        yield _per_role("side", "1 for the side of the line that the policy is on.",
                        lambda role: role is side)  # fmt: skip

    def _telemetry(self, snapshot: LoadSnapshot) -> Iterator[Metric]:
        def fresh(field: str, role: Role) -> float | None:
            told = self._relay.tracker.of(role).telemetry
            value: float | None = getattr(told, field) if snapshot.of(role).fresh else None
            return value

        for name, text, field in (
            ("telemetry_running", "Requests that the backend says it runs.", "running"),
            ("telemetry_queued", "Requests that the backend says it queues.", "queued"),
            ("telemetry_token_usage", "Share of its KV cache in use, 0 to 1.", "token_usage"),
            ("telemetry_accept_length", "Tokens per verify step.", "accept_length"),
        ):
            yield _per_role(name, text, partial(fresh, field))
        yield _per_role("telemetry_max_running", "Requests that the backend runs at once at most.",
                        lambda role: snapshot.of(role).cap)  # fmt: skip
        yield _per_role("telemetry_age_seconds", "Time since the backend last reported its load.",
                        self._age)  # fmt: skip

    def _age(self, role: Role) -> float | None:
        told = self._relay.tracker.of(role).telemetry
        return None if told is None else max(0.0, self._relay.clock() - told.read_at)

    def _state(self) -> Iterator[Metric]:
        health = self._relay.health
        status = {role: health.status(role) for role in ROLES}
        yield _per_role("backend_up", "1 if the backend answers; absent until that is known.",
                        lambda role: UP[status[role].health])  # fmt: skip
        yield _per_role("backend_ready", "1 if the backend may get new work.",
                        lambda role: status[role].usable)  # fmt: skip
        yield _per_role("backend_drained", "1 if an operator took it out.",
                        lambda role: status[role].drained)  # fmt: skip
        yield _per_role("breaker_state", "0 closed, 1 half open, 2 open.",
                        lambda role: status[role].breaker)  # fmt: skip
        changes = _counter("backend_changes", "How often a state was entered.",
                           "backend", "kind", "state")  # fmt: skip
        for role, (kind, state) in product(ROLES, STATES):
            changes.add_metric([role, kind, state], health.transitions[role, kind, state])
        yield changes
        counts = self._relay.connection_counts()
        yield _single(
            _gauge("client_connections", "Open client connections, idle ones included."),
            counts.client,
        )
        backend = _gauge("backend_connections", "Connections to a backend.", "backend", "state")
        for role in ROLES:
            backend.add_metric([role, "busy"], counts.backend_busy.get(role, 0))
            backend.add_metric([role, "idle"], counts.backend_idle.get(role, 0))
        yield backend

    def _program(self) -> Iterator[Metric]:
        relay = self._relay
        yield _single(_gauge("draining", "1 while the router shuts down."), relay.draining)
        yield _single(
            _counter("log_lines_dropped", "Log lines lost because their reader is stuck."),
            self._metrics.log_lines_dropped,
        )
        info = _gauge("build_info", "Always 1; what runs is in the labels.", "version", "python")
        info.add_metric([__version__, platform.python_version()], 1)
        yield info
        started = self._wall() - (relay.clock() - relay.started_at)
        yield _single(_gauge("start_time_seconds", "When it started, in unix time."), started)


def _label(role: Role | None) -> str:
    return role or "none"


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _single(family: CounterMetricFamily | GaugeMetricFamily, value: float) -> Metric:
    family.add_metric([], value)
    return family


def _per_role(name: str, text: str, read: Callable[[Role], float | None]) -> Metric:
    """A gauge with a series for each backend whose value is known."""
    family = _gauge(name, text, "backend")
    for role in ROLES:
        value = read(role)
        if value is not None:
            family.add_metric([role], value)
    return family


def _histograms(name: str, text: str, found: dict[Role, Histogram]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text, labels=["backend"])
    for role, histogram in found.items():
        family.add_metric([role], _buckets(histogram), histogram.sum)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text)
    family.add_metric([], _buckets(histogram), histogram.sum)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts with their upper bounds as text, infinity last."""
    total = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        total += count
        found.append(("+Inf" if bound == math.inf else str(bound), total))
    return found
