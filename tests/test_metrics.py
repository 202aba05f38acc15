"""What is counted, and how Prometheus sees it."""

from __future__ import annotations

import math
import shutil
import subprocess
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router import __version__, errors
from router.breaker import Verdict
from router.errors import ErrorAnswer
from router.exposition import create_registry
from router.frontier import Frontier
from router.load import Role
from router.metrics import (
    CHUNK_GAP_BOUNDS,
    FIRST_CHUNK_BOUNDS,
    OVERHEAD_BOUNDS,
    QUEUE_WAIT_BOUNDS,
    TOTAL_BOUNDS,
    Finished,
    Histogram,
    Outcome,
    Rejection,
    RelayMetrics,
    Retry,
)
from router.policy import FixedPolicy, FrontierPolicy, Reason
from tests.fake_relay import START, FakeRelay

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE


def finished(**changed: object) -> Finished:
    """A streamed request of 20 chunks that the speculative server answered in two seconds."""
    fields: dict[str, object] = {
        "request_id": "r-1", "route": "chat_completions", "backend": SPEC,
        "reason": Reason.BELOW_THRESHOLD, "n": 3, "m": 1, "threshold": 8.0, "status": 200,
        "outcome": Outcome.OK, "stream": True, "received_at": 10.0, "decided_at": 10.00001,
        "sent_at": 10.00004, "first_byte_at": 10.25, "ended_at": 12.0, "queue_wait": 0.0,
        "bytes_in": 300, "bytes_out": 5000, "chunks": 20, "prompt_tokens": 12,
        "output_tokens": 44, "replay": None, "error": None,
    }  # fmt: skip
    return Finished(**(fields | changed))  # type: ignore[arg-type]


def scrape(relay: FakeRelay) -> dict[str, float]:
    text = generate_latest(create_registry(relay.metrics, relay)).decode()
    return {
        sample.name + "".join(f"|{v}" for v in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    """A bucket holds values up to and including its bound, as `le` says."""
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.10001, 1.0, 7.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.count == 5
    assert histogram.sum == pytest.approx(8.25001)


def test_bounds_that_do_not_rise_are_refused() -> None:
    """A histogram with equal or falling bounds cannot exist."""
    with pytest.raises(ValueError, match="must rise"):
        Histogram((0.1, 0.1))


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_every_value_is_in_exactly_one_bucket(values: list[float]) -> None:
    """The counts of a histogram add up to the number of values, and each is below its bound."""
    histogram = Histogram(TOTAL_BOUNDS)
    for value in values:
        histogram.observe(value)
    assert histogram.count == len(values)
    below = 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        below += count
        assert below == sum(value <= bound for value in values)


def test_bounds_reach_as_far_as_the_thing_they_measure() -> None:
    """A first chunk may take two minutes and a request half an hour; our overhead is tens of us."""
    assert max(FIRST_CHUNK_BOUNDS) >= 120
    assert max(TOTAL_BOUNDS) >= 1800
    assert min(OVERHEAD_BOUNDS) <= 0.00005
    assert min(CHUNK_GAP_BOUNDS) <= 0.005
    assert max(QUEUE_WAIT_BOUNDS) >= 300


def test_a_finished_stream_is_counted_once_everywhere() -> None:
    """One good streamed request moves its counter, three histograms, and the token counters."""
    metrics = RelayMetrics()
    metrics.finish(finished())
    assert metrics.requests[SPEC, "chat_completions", Outcome.OK] == 1
    assert sum(metrics.requests.values()) == 1
    spec = metrics.backends[SPEC]
    assert spec.first_chunk.sum == pytest.approx(0.25)
    assert (spec.first_chunk.count, spec.total.count, spec.total.sum) == (1, 1, 2.0)
    assert metrics.overhead.sum == pytest.approx(0.00004)
    assert (spec.chunks, spec.prompt_tokens, spec.output_tokens) == (20, 12, 44)
    assert (metrics.bytes_in, metrics.bytes_out) == (300, 5000)
    assert metrics.queue_wait.count == 0
    assert metrics.backends[BASE].total.count == 0


@pytest.mark.parametrize(
    ("changed", "first_chunk", "total"),
    [
        ({"outcome": Outcome.CLIENT_GONE}, 1, 0),
        ({"outcome": Outcome.CLIENT_ERROR, "status": 400}, 0, 0),
        ({"outcome": Outcome.BACKEND_LOST, "status": 502, "first_byte_at": None}, 0, 0),
        ({"stream": False}, 0, 1),
        ({}, 1, 1),
    ],
)
def test_times_are_of_answers_only(
    changed: dict[str, object], first_chunk: int, total: int
) -> None:
    """An error or a client that left does not make a backend look fast."""
    metrics = RelayMetrics()
    metrics.finish(finished(**changed))
    spec = metrics.backends[SPEC]
    assert (spec.first_chunk.count, spec.total.count) == (first_chunk, total)


def test_time_in_our_queue_is_not_overhead() -> None:
    """A request that waited a second and was sent at once has a second of wait and no overhead."""
    metrics = RelayMetrics()
    metrics.finish(finished(queue_wait=1.0, decided_at=11.0, sent_at=11.0001))
    assert metrics.queue_wait.sum == 1.0
    assert metrics.overhead.sum == pytest.approx(0.0001)


def test_a_rejected_request_belongs_to_no_backend() -> None:
    """What we answer ourselves is counted under backend none and in no backend's histogram."""
    metrics = RelayMetrics()
    metrics.finish(
        finished(backend=None, outcome=Outcome.REJECTED, status=429, sent_at=None, chunks=0)
    )
    assert metrics.requests[None, "chat_completions", Outcome.REJECTED] == 1
    assert metrics.overhead.count == 0


def test_a_route_that_is_not_listed_counts_as_other() -> None:
    """No request can make a new series: an unknown route is counted under other."""
    metrics = RelayMetrics()
    before = len(metrics.requests)
    metrics.finish(finished(route="made/up"))
    assert metrics.requests[SPEC, "other", Outcome.OK] == 1
    assert len(metrics.requests) == before


def test_retries_rejections_and_decisions_have_closed_labels() -> None:
    """Each kind has its own cell from the start; an unlisted rejection counts as other."""
    metrics = RelayMetrics()
    metrics.retry(Retry.STALE)
    metrics.reject("queue_full")
    metrics.reject("something new")
    metrics.decided(BASE, Reason.DWELL)
    metrics.decided(None, Reason.UNAVAILABLE)
    assert metrics.retries[Retry.STALE] == 1
    assert metrics.rejections[Rejection.QUEUE_FULL] == 1
    assert metrics.rejections[Rejection.OTHER] == 1
    assert metrics.decisions[BASE, Reason.DWELL] == 1
    assert metrics.decisions[None, Reason.UNAVAILABLE] == 1
    assert set(metrics.retries) == set(Retry)


def test_each_answer_of_our_own_has_its_reason() -> None:
    """Every row of the error table that answers a relayed request by itself is a reason of its own."""
    rows = [row for row in vars(errors).values() if isinstance(row, ErrorAnswer)]
    own = {row.code for row in rows if row.status not in {502, 504}}
    own -= {"not_found", "method_not_allowed", "drain_limit"}
    # Of the ordinary endpoints:
    own -= {
        "no_admin_key",
        "foreign_host",
        "model_not_found",
        "invalid_value",
        "not_ready",
        "too_many_listeners",
    }
    assert own <= set(Rejection)


def test_gaps_are_shared_with_the_relay() -> None:
    """The histogram that the relay writes per chunk is the one that is exported."""
    relay = FakeRelay()
    relay.metrics.chunk_gap[SPEC].observe(0.012)
    seen = scrape(relay)
    assert seen["crossover_chunk_gap_seconds_count|speculative"] == 1
    assert seen["crossover_chunk_gap_seconds_bucket|speculative|0.01"] == 0
    assert seen["crossover_chunk_gap_seconds_bucket|speculative|0.015"] == 1
    assert seen["crossover_chunk_gap_seconds_bucket|speculative|+Inf"] == 1


def test_a_scrape_says_what_happened() -> None:
    """Counters, gauges and histograms carry the values that were counted and tracked."""
    relay = FakeRelay()
    relay.metrics.finish(finished())
    relay.metrics.decided(SPEC, Reason.BELOW_THRESHOLD)
    relay.metrics.retry(Retry.CONNECT)
    relay.metrics.reject("queue_full")
    relay.metrics.log_lines_dropped = 7
    relay.tracker.lease(BASE, START)
    relay.report(BASE, 4, 2, token_usage=0.5, accept_length=2.5, max_running=48)
    relay.waiting = 5
    relay.now += 0.5
    seen = scrape(relay)
    assert seen["crossover_requests_total|speculative|ok|chat_completions"] == 1
    assert seen["crossover_decisions_total|speculative|below_threshold"] == 1
    assert seen["crossover_retries_total|replay_connect"] == 1
    assert seen["crossover_rejected_total|queue_full"] == 1
    assert seen["crossover_log_lines_dropped_total"] == 7
    assert seen["crossover_in_flight|baseline"] == 1
    assert seen["crossover_concurrency|baseline"] == 6
    assert seen["crossover_queue_waiting"] == 5
    assert seen["crossover_telemetry_running|baseline"] == 4
    assert seen["crossover_telemetry_queued|baseline"] == 2
    assert seen["crossover_telemetry_token_usage|baseline"] == 0.5
    assert seen["crossover_telemetry_accept_length|baseline"] == 2.5
    assert seen["crossover_telemetry_max_running|baseline"] == 48
    assert seen["crossover_telemetry_age_seconds|baseline"] == 0.5
    assert seen["crossover_first_chunk_seconds_sum|speculative"] == pytest.approx(0.25)
    assert seen["crossover_request_seconds_count|speculative"] == 1
    assert seen["crossover_output_tokens_total|speculative"] == 44
    assert seen["crossover_prompt_tokens_total|speculative"] == 12
    assert seen["crossover_stream_chunks_total|speculative"] == 20
    assert seen["crossover_client_connections"] == 3
    assert seen["crossover_backend_connections|speculative|busy"] == 2
    assert seen["crossover_backend_connections|baseline|idle"] == 1
    assert seen["crossover_side|speculative"] == 1
    assert seen["crossover_draining"] == 0
    assert any(k.startswith("crossover_build_info|3.") and k.endswith(__version__) for k in seen)
    assert seen["process_resident_memory_bytes"] > 0


def test_the_frontier_moves_with_the_load() -> None:
    """With total < 8 and 3 on the baseline F(m) is 5, and K is 8."""
    relay = FakeRelay()
    for _ in range(3):
        relay.tracker.lease(BASE, START)
    seen = scrape(relay)
    assert seen["crossover_frontier"] == 5
    assert seen["crossover_threshold"] == 8
    assert seen["crossover_threshold_configured"] == 8


def test_the_frontier_is_never_above_the_cap() -> None:
    """A speculative server that runs 4 at most is full at 4."""
    relay = FakeRelay()
    relay.report(SPEC, 0, max_running=4)
    assert scrape(relay)["crossover_frontier"] == 4


def test_a_table_has_no_k() -> None:
    """Of a line that is a table the threshold is F(m) at this load, and the configured one too."""
    relay = FakeRelay()
    relay.frontier = Frontier.from_table((9.0, 6.0, 3.0))
    relay.policy = FrontierPolicy(Frontier.from_table((8.0, 5.0)))
    relay.tracker.lease(BASE, START)
    seen = scrape(relay)
    assert (seen["crossover_frontier"], seen["crossover_threshold"]) == (5, 5)
    assert seen["crossover_threshold_configured"] == 6


def test_an_infinite_threshold_is_infinity() -> None:
    """Always is exported as +Inf, which Prometheus compares as one expects."""
    relay = FakeRelay()
    relay.frontier = Frontier.total(math.inf)
    assert scrape(relay)["crossover_threshold_configured"] == math.inf


def test_what_is_unknown_is_absent() -> None:
    """No telemetry, stale telemetry and a policy without a line give no sample, not a zero."""
    relay = FakeRelay()
    relay.policy = FixedPolicy(BASE)
    relay.report(BASE, 4)
    relay.now += 10
    seen = scrape(relay)
    assert "crossover_threshold" not in seen
    assert "crossover_frontier" not in seen
    assert "crossover_telemetry_running|baseline" not in seen
    assert seen["crossover_telemetry_age_seconds|baseline"] == 10
    assert "crossover_telemetry_age_seconds|speculative" not in seen
    assert "crossover_backend_up|speculative" not in seen


def test_health_breaker_and_drain_are_exported() -> None:
    """A backend's state is told as numbers, and each change is counted."""
    relay = FakeRelay()
    relay.make_ready()
    for _ in range(5):
        relay.health.record(SPEC, Verdict.FAILURE, START)
    relay.health.drain(BASE, drained=True, now=START)
    seen = scrape(relay)
    assert seen["crossover_backend_up|speculative"] == 1
    assert seen["crossover_breaker_state|speculative"] == 2
    assert seen["crossover_breaker_state|baseline"] == 0
    assert seen["crossover_backend_drained|baseline"] == 1
    assert seen["crossover_backend_ready|baseline"] == 0
    assert seen["crossover_backend_changes_total|speculative|breaker|open"] == 1
    assert seen["crossover_backend_changes_total|baseline|drain|drained"] == 1
    assert seen["crossover_backend_changes_total|baseline|drain|enabled"] == 0


def test_the_number_of_series_hardly_depends_on_the_traffic() -> None:
    """A thousand ids and every outcome add only the cells of routes seen for the first time."""
    relay = FakeRelay()
    before = scrape(relay)
    for number in range(1000):
        outcome = list(Outcome)[number % len(Outcome)]
        relay.metrics.finish(finished(request_id=f"id-{number}", outcome=outcome))
    assert set(scrape(relay)) == set(before)
    relay.metrics.finish(finished(route="embeddings"))
    new = set(scrape(relay)) - set(before)
    assert new == {"crossover_requests_total|speculative|ok|embeddings"}
    assert len(before) < 700


def test_every_metric_has_help_and_our_prefix() -> None:
    """Whatever we export is explained, and is ours or the process's."""
    relay = FakeRelay()
    for family in create_registry(relay.metrics, relay).collect():
        assert family.documentation.endswith("."), family.name
        assert family.name.startswith(("crossover_", "process_"))


def test_the_registry_is_its_own() -> None:
    """Two routers in one process do not share a registry, nor the global one."""
    one, other = FakeRelay(), FakeRelay()
    registries = [create_registry(relay.metrics, relay) for relay in (one, other)]
    assert isinstance(registries[0], CollectorRegistry)
    assert registries[0] is not registries[1]


def test_promtool_finds_nothing_to_say() -> None:
    """Prometheus' own linter is content with names, units, types and help."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian package prometheus) is not installed")
    relay = FakeRelay()
    relay.metrics.finish(finished())
    relay.report(SPEC, 1, token_usage=0.1, accept_length=2.0, max_running=48)
    text = generate_latest(create_registry(relay.metrics, relay))
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_counting_is_cheap() -> None:
    """A chunk costs under two microseconds and a request under twenty, even on a busy machine."""
    metrics = RelayMetrics()
    gap, done = metrics.chunk_gap[SPEC].observe, finished()
    assert min(timeit.repeat(lambda: gap(0.012), number=2000, repeat=5)) / 2000 < 2e-6
    assert min(timeit.repeat(lambda: metrics.finish(done), number=1000, repeat=5)) / 1000 < 2e-5
