"""Records become points, points become levels: by tables and against naive computations."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.record import RequestRecord
from loadtest.summary import (
    Measured,
    Window,
    batches,
    combine,
    ended_within,
    first_token_s,
    in_flight,
    make_point,
    per_token_s,
    spread,
)
from loadtest.sweep_schema import Figure, Point, Spread
from loadtest.sweep_seen import Seen, parse_page
from router.load import Telemetry
from router.telemetry import Source
from tests.sweeps import SPEC, point, record

WINDOW = Window(10.0, 20.0)
WHERE: dict[str, Any] = {
    "role": SPEC, "number": 1, "run": "r", "level": 4, "measured_at": "now", "unwarmed": 0,
}  # fmt: skip


def steady(slots: int = 4, seconds: float = 1.0, until: float = 30.0) -> list[RequestRecord]:
    """So many slots, each with one request after the other, from 0 on."""
    count = math.ceil(until / seconds)
    return [
        record(at * seconds + slot * 0.01, (at + 1) * seconds + slot * 0.01)
        for at in range(count)
        for slot in range(slots)
    ]


def made(records: list[RequestRecord], window: Window = WINDOW, seen: Seen | None = None) -> Point:
    return make_point(records, window, seen or Seen(), **WHERE)


def test_a_steady_level() -> None:
    """Four slots of 100 tokens a second are 400 tok/s, and each time is what it was made to be."""
    found = made(steady())
    # First chunks come after half a request, and tokens from then on: a window of whole requests.
    assert found.output_tok_s.value == pytest.approx(400, rel=0.01)
    assert found.requests == 40
    assert found.requests_s == pytest.approx(4.0)
    assert found.concurrency == pytest.approx(4.0)
    assert (found.input_tokens, found.output_tokens) == (20, 100)
    for times, seconds in ((found.ttft_s, 0.5), (found.tpot_s, 0.5 / 99), (found.latency_s, 1.0)):
        assert times.mean == pytest.approx(seconds)
        assert times.p50 is not None
        assert times.p99 is not None
        assert times.p50.value == pytest.approx(seconds)
        assert times.p99.value == pytest.approx(seconds)
        assert times.p99.high is None  # forty values do not bound it


def test_only_what_ended_in_the_window_has_times() -> None:
    """A request counts with its times where it ended, and with its tokens where they came."""
    slow = record(0.0, 12.0, first_chunk=2.0)  # 20 of its 100 tokens come in the window
    late = record(19.0, 21.0, first_chunk=19.5)  # a third of them
    found = made([slow, late])
    assert found.requests == 1
    assert found.latency_s.mean == pytest.approx(12.0)
    assert found.output_tok_s.value == pytest.approx((20 + 100 / 3) / 10)


def test_failures_are_counted_and_nothing_else() -> None:
    """A failed request is an error with its words, and adds neither tokens nor times."""
    failed = record(11.0, 12.0, error="status 503: full", status=503)
    found = made([*steady(), record(12.0, 13.0, error="later"), failed])
    assert found.errors == 2
    assert found.error == "status 503: full"
    assert found.requests == 40
    assert found.output_tok_s.value == pytest.approx(400, rel=0.01)


def test_an_answer_without_usage_is_uncounted() -> None:
    """Tokens that the server did not count are unknown, and the answers are named."""
    found = made([record(11.0, 12.0, output_tokens=None), record(12.0, 13.0)])
    assert found.uncounted == 1
    assert found.output_tok_s.value == pytest.approx(10.0)
    assert found.output_tokens == 100


def test_a_level_without_answers() -> None:
    """Nothing measured is nothing: no tokens, no times, and no interval."""
    found = made([])
    assert found.output_tok_s == Figure(0.0)
    assert (found.ttft_s, found.latency_s) == (Spread(), Spread())
    assert (found.input_tokens, found.accept_length, found.running) == (None, None, None)


def test_one_token_has_no_time_per_token() -> None:
    """The first token's time is no decode step's, so an answer of one token has none."""
    assert per_token_s(record(0.0, 1.0, output_tokens=1)) is None
    assert per_token_s(record(0.0, 1.0, first_chunk=None)) is None
    assert first_token_s(record(0.0, 1.0, first_chunk=None)) is None
    assert per_token_s(record(0.0, 1.49, output_tokens=100)) == pytest.approx(0.01)


def test_batches_last_as_long_as_a_request() -> None:
    """A window is cut in at most ten parts, none shorter than a median request."""
    assert len(batches(steady(seconds=0.6), WINDOW)) == 10
    assert len(batches(steady(seconds=2.5), WINDOW)) == 4
    assert len(batches(steady(seconds=3.0), WINDOW)) == 3
    assert batches(steady(seconds=3.5), WINDOW) == []
    assert batches([], WINDOW) == []


def test_batches_add_up() -> None:
    """The parts' mean is the window's figure, and the point's interval is around it."""
    chance = random.Random(3)
    records = [
        record(start, start + chance.uniform(0.6, 2.0), output_tokens=chance.randint(10, 200))
        for start in (chance.uniform(0, 25) for _ in range(200))
    ]
    found = made(records)
    parts = batches(records, WINDOW)
    assert statistics.fmean(parts) == pytest.approx(found.output_tok_s.value)
    assert found.output_tok_s.low is not None
    assert found.output_tok_s.high is not None
    assert found.output_tok_s.low < found.output_tok_s.value < found.output_tok_s.high


PAGE = b"""
sglang:num_running_reqs{tp_rank="0"} 4.0
sglang:generation_tokens_total{is_streaming="true"} %d.0
sglang:spec_verify_calls_total{model_name="m"} %d.0
sglang:prompt_tokens_total{is_streaming="true"} %d.0
sglang:prompt_tokens_total{is_streaming="false"} 10.0
"""
CACHED = b'sglang:cached_tokens_total{cache_source="%s"} %d.0\n'


def test_what_was_seen_of_the_server() -> None:
    """Accept length, steps and cache share come from the growth of counters between two pages."""
    first = parse_page(PAGE % (1000, 500, 2000), 1.0)
    last = parse_page(
        PAGE % (2500, 1000, 3000) + CACHED % (b"host", 50) + CACHED % (b"gpu", 200), 6.0
    )
    loads = tuple(
        Telemetry(running, queued, 0.0, 0.0, Source.LOADS, max_running=cap)
        for running, queued, cap in ((4, 0, 48), (3, 2, None))
    )
    found = made(steady(), seen=Seen(loads, first, last, 2.5, (0.001,) * 19 + (0.5,), 3, True))
    assert found.accept_length == pytest.approx(3.0)
    assert (found.verify_steps, found.page_s) == (500.0, 5.0)
    assert found.cached_share == pytest.approx(0.25)
    assert (found.running, found.queued, found.most_running, found.most_queued) == (3.5, 1.0, 4, 2)
    assert (found.cap, found.polls) == (48, 2)
    assert found.client_cpu == pytest.approx(0.25)
    assert found.client_lag_s == 0.001  # 19 of 20
    assert (found.repeated, found.gave_up) == (3, True)


def test_counters_that_fell_say_nothing() -> None:
    """A server that was restarted between the pages leaves everything unknown."""
    first = parse_page(PAGE % (9000, 5000, 9000) + CACHED % (b"gpu", 900), 1.0)
    last = parse_page(PAGE % (100, 50, 100) + CACHED % (b"gpu", 5), 6.0)
    found = made([], seen=Seen((), first, last))
    assert (found.verify_steps, found.cached_share) == (None, None)
    assert found.accept_length is None


def test_a_page_that_is_none() -> None:
    """Bytes that are no page, or a counter that is no number, are no page."""
    assert parse_page(b'sglang:prompt_tokens_total{a="b"} many\n', 0.0) is None
    page = parse_page(b"\xff\x00", 0.0)
    assert page is not None
    assert (page.prompt_tokens, page.cached_tokens, page.accept.tokens) == (None, None, None)
    assert made([], seen=Seen((), page, page)).cached_share is None


def measured(tok_s: float, number: int, records: list[RequestRecord] | None = None) -> Measured:
    one = point(number=number, output_tok_s=Figure(tok_s), window_start_s=10.0)
    return Measured(one, steady() if records is None else records)


def test_three_passes_have_the_interval_of_their_means() -> None:
    """From three passes on the interval is Student's t over the passes, as by hand."""
    found = combine([measured(tok_s, at) for at, tok_s in enumerate((400.0, 420.0, 410.0), 1)])
    assert found.interval == "passes"
    assert found.output_tok_s.value == pytest.approx(410)
    assert found.output_tok_s.high == pytest.approx(410 + 4.303 * 10 / math.sqrt(3))
    assert (found.passes, found.requests, found.window_s) == (3, 150, 30.0)


def test_two_passes_have_the_interval_of_their_batches() -> None:
    """With two passes batches of both make the interval, so that their distance widens it."""
    near = combine([measured(400.0, 1), measured(400.0, 2)])
    slower = [record(r.started, r.ended, output_tokens=80) for r in steady()]
    far = combine([measured(400.0, 1), measured(320.0, 2, slower)])
    assert near.interval == far.interval == "batches"
    assert near.output_tok_s.high is not None
    assert far.output_tok_s.high is not None
    assert far.output_tok_s.value == 360.0
    assert far.output_tok_s.high - 360.0 > 10 * (near.output_tok_s.high - 400.0)


def test_a_window_too_short_for_batches_has_no_interval() -> None:
    """Where not even batches can be made the figure stands alone and says so."""
    found = combine([measured(400.0, 1, steady(seconds=8.0))])
    assert found.interval == "none"
    assert found.output_tok_s == Figure(400.0)


def test_passes_are_pooled() -> None:
    """Percentiles are of all passes' requests, accept lengths weigh by steps, notices add up."""
    slow = [record(r.started, r.ended, first_chunk=r.started + 0.9) for r in steady()]
    first = Measured(
        point(number=1, window_start_s=10.0, accept_length=2.0, verify_steps=300.0, cap=None,
              notices=("errors",), errors=2), steady()
    )  # fmt: skip
    second = Measured(
        point(number=2, window_start_s=10.0, accept_length=3.0, verify_steps=100.0, running=6.1,
              notices=("cache-hits", "errors")), slow
    )  # fmt: skip
    found = combine([second, first])
    assert found.accept_length == pytest.approx(2.25)
    assert found.verify_steps == 400.0
    assert found.ttft_s.mean == pytest.approx(0.7)
    assert found.ttft_s.p90 is not None
    assert found.ttft_s.p90.value == pytest.approx(0.9)
    assert found.running == pytest.approx(7.0)
    assert (found.cap, found.errors) == (48, 2)
    assert found.notices == ("cache-hits", "errors")


def test_accept_length_without_steps() -> None:
    """Where no page counted steps the accept lengths weigh alike."""
    parts = [point(number=at, accept_length=a, verify_steps=None) for at, a in ((1, 2.0), (2, 3.0))]
    found = combine([Measured(part, []) for part in parts])
    assert (found.accept_length, found.verify_steps) == (2.5, None)
    without = combine([Measured(point(accept_length=None), [])])
    assert without.accept_length is None


RECORDS = st.lists(
    st.tuples(st.floats(0, 25), st.floats(0.01, 8), st.integers(1, 300), st.booleans()).map(
        lambda t: record(
            t[0], t[0] + t[1], first_chunk=t[0] + t[1] / 3, output_tokens=t[2],
            error=None if t[3] else "no",
        )
    ),
    max_size=40,
)  # fmt: skip


@given(RECORDS, st.randoms(use_true_random=False))
def test_order_does_not_matter(records: list[RequestRecord], chance: random.Random) -> None:
    """Records may come in any order: the point is the same to the last digit."""
    shuffled = records.copy()
    chance.shuffle(shuffled)
    one, other = made(records), made(shuffled)
    for name in set(Point.__struct_fields__) - {"error"}:  # of two at once either is the first
        assert getattr(one, name) == getattr(other, name), name


@given(RECORDS)
def test_against_a_naive_computation(records: list[RequestRecord]) -> None:
    """Counts, tokens and percentiles are those of a plain loop over the records."""
    found = made(records)
    inside = sorted(r.ended - r.started for r in records if r.ok and 10 <= r.ended < 20)
    assert found.requests == len(inside)
    assert found.errors == sum(not r.ok for r in records)
    if inside:
        assert found.latency_s.p90 is not None
        naive = next(v for v in inside if sum(w <= v for w in inside) >= 0.9 * len(inside))
        assert found.latency_s.p90.value == naive
    tokens = 0.0
    for r in records:
        if r.ok and r.first_chunk is not None:
            part = max(0.0, min(r.ended, 20) - max(r.first_chunk, 10))
            tokens += (r.output_tokens or 0) * part / (r.ended - r.first_chunk)
    assert found.output_tok_s.value == pytest.approx(tokens / 10, abs=1e-6)


@given(RECORDS)
def test_the_figure_is_in_its_interval(records: list[RequestRecord]) -> None:
    """Whatever the records, output tok/s is between its bounds."""
    figure = made(records).output_tok_s
    assert figure.low is None or figure.low <= figure.value + 1e-6
    assert figure.high is None or figure.high >= figure.value - 1e-6


def test_in_flight_is_the_mean_over_the_window() -> None:
    """Requests count for the part of the window in which they were open, failed ones too."""
    records = [record(5.0, 15.0), record(10.0, 20.0, error="no"), record(30.0, 40.0)]
    assert in_flight(records, WINDOW) == pytest.approx(1.5)
    assert ended_within(records, WINDOW) == [records[0]]
    assert spread([], first_token_s) == Spread()
