"""Telemetry: what real answers mean, and that broken ones mean nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.acceptance import AcceptMeter, AcceptSample, parse_accept
from router.load import Telemetry
from router.telemetry import HUNG_AFTER, METRICS_LAG, Source, Unreadable, parse

DATA = Path(__file__).parent / "data" / "telemetry"
STAMP = "2026-11-29T17:47:40+00:00"
UNIX = 1795974460.0


def read(name: str) -> bytes:
    return (DATA / name).read_bytes()


def known(source: Source, body: bytes, sent_at: float = 100.0, read_at: float = 100.1) -> Telemetry:
    told = parse(source, body, sent_at, read_at)
    assert isinstance(told, Telemetry), told
    return told


def loads(*ranks: dict[str, Any], **top: Any) -> bytes:
    return json.dumps({"timestamp": STAMP, "version": "0.5.17", "loads": ranks, **top}).encode()


def rank(running: Any = 3, waiting: Any = 1, **more: Any) -> dict[str, Any]:
    return {
        "timestamp": UNIX,
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        **more,
    }


@pytest.mark.parametrize(
    ("source", "name", "running", "queued"),
    [
        (Source.LOADS, "base-idle.loads.json", 0, 0),
        (Source.LOADS, "base-32.loads.json", 32, 0),
        (Source.LOADS, "spec-32.loads.json", 32, 0),
        (Source.LOADS, "queue-full.loads.json", 2, 2),
        (Source.GET_LOAD, "base-32.get_load.json", 32, 0),
        (Source.GET_LOAD, "spec-32.get_load.json", 32, 0),
        (Source.METRICS, "base-32.metrics.txt", 32, 0),
        (Source.METRICS, "spec-32.metrics.txt", 32, 0),
        (Source.METRICS, "spec-idle-after.metrics.txt", 0, 0),
    ],
)
def test_captures(source: Source, name: str, running: int, queued: int) -> None:
    """Every source of a real server gives the load it was under."""
    told = known(source, read(name))
    assert (told.running, told.queued, told.source) == (running, queued, source.value)
    assert told.read_at == 100.1


def test_capture_of_loads_in_full() -> None:
    """The snapshot's age is the difference of the backend's own two stamps."""
    told = known(Source.LOADS, read("spec-32.loads.json"))
    assert told.taken_at == pytest.approx(100.0 - (1795974477.281741 - 1795974477.2566245))
    assert told.token_usage == 0.144
    assert told.max_running == 256
    assert told.gen_throughput == 12107.18
    assert told.lifetime_accept_length == pytest.approx(2.828, abs=0.001)


def test_lifetime_mean_is_not_live() -> None:
    """No source alone gives a live acceptance."""
    for source, name in (
        (Source.LOADS, "spec-32.loads.json"),
        (Source.GET_LOAD, "spec-32.get_load.json"),
        (Source.METRICS, "spec-32.metrics.txt"),
    ):
        assert known(source, read(name)).accept_length is None


def test_capture_of_metrics_in_full() -> None:
    """Gauges on /metrics may be as old as 40 decode steps."""
    told = known(Source.METRICS, read("spec-32.metrics.txt"))
    assert told.taken_at == 100.0 - METRICS_LAG
    assert told.token_usage == 0.12
    assert told.gen_throughput == pytest.approx(12107.18, abs=0.01)
    assert told.max_running is None


def test_shape_of_0_5_9() -> None:
    """An aggregate and a rank count beside the loads change nothing."""
    entry = rank(
        5, 2, num_total_reqs=7, token_usage=0.05, gen_throughput=0.0, max_running_requests=48
    )
    told = known(Source.LOADS, loads(entry, dp_rank_count=1, aggregate={"total_reqs": 7}))
    assert (told.running, told.queued, told.max_running) == (5, 2, 48)
    assert told.gen_throughput is None, "0 while requests run is a server without metrics"
    assert told.taken_at == 100.0


def test_shape_of_0_5_12_with_speculation() -> None:
    """The speculative section's acceptance is kept as a lifetime mean."""
    entry = rank(1, 0, speculative={"accept_length": 2.5, "accept_rate": 0.0})
    assert known(Source.LOADS, loads(entry)).lifetime_accept_length == 2.5


def test_shape_of_0_5_23_with_two_ranks() -> None:
    """Ranks add up; the fullest cache and the oldest busy snapshot speak for the backend."""
    told = known(
        Source.LOADS,
        loads(
            rank(3, 1, token_usage=0.2, max_running_requests=24, gen_throughput=10.0),
            rank(
                4,
                0,
                dp_rank=1,
                timestamp=UNIX - 0.5,
                token_usage=0.7,
                max_running_requests=24,
                gen_throughput=20.0,
            ),
            accelerator="NVIDIA B200",
            num_accelerators=2,
        ),
    )
    assert (told.running, told.queued, told.max_running) == (7, 1, 48)
    assert (told.token_usage, told.gen_throughput) == (0.7, 30.0)
    assert told.taken_at == pytest.approx(99.5)


def test_get_load_counts_waiting_requests_in_num_reqs() -> None:
    """`num_reqs` is running plus waiting."""
    body = json.dumps(
        [
            {"dp_rank": 0, "num_reqs": 10, "num_waiting_reqs": 4, "num_tokens": 1, "ts_tic": 9.0},
            {"dp_rank": 1, "num_reqs": 2, "num_waiting_reqs": 0, "num_tokens": 1, "ts_tic": 9.0},
        ]
    ).encode()
    told = known(Source.GET_LOAD, body)
    assert (told.running, told.queued, told.taken_at) == (8, 4, 100.0)


@pytest.mark.parametrize(
    ("stamp", "snapshot", "age"),
    [
        (STAMP, UNIX - 0.25, 0.25),
        (STAMP, UNIX + 5.0, 0.0),  # a clock set back in between
        ("2026-11-29T17:47:40Z", UNIX - 0.25, 0.25),
        ("2026-11-29T17:47:40", UNIX - 0.25, 0.0),  # of no zone
        ("yesterday", UNIX, 0.0),
        (12, UNIX, 0.0),
        (STAMP, "now", 0.0),
        (STAMP, None, 0.0),
    ],
)
def test_age(stamp: Any, snapshot: Any, age: float) -> None:
    """Stamps that do not tell an age leave the moment of sending."""
    told = known(Source.LOADS, loads(rank(timestamp=snapshot), timestamp=stamp))
    assert told.taken_at == pytest.approx(100.0 - age)


def test_hung_scheduler() -> None:
    """A snapshot that claims work and does not move is not believed; an idle one is."""
    old = UNIX - HUNG_AFTER - 1
    assert isinstance(parse(Source.LOADS, loads(rank(timestamp=old)), 0.0, 0.0), Unreadable)
    told = known(Source.LOADS, loads(rank(0, 0, timestamp=old), rank(1, 0, dp_rank=1)))
    assert (told.running, told.taken_at) == (1, 100.0)


BROKEN_COUNTS: list[Any] = [None, True, -1, 1.5, "3", [], {}, 10**7, 10**400]


@pytest.mark.parametrize("value", BROKEN_COUNTS)
@pytest.mark.parametrize("field", ["num_running_reqs", "num_waiting_reqs"])
def test_broken_count(field: str, value: Any) -> None:
    """A count that is not one makes the whole answer unreadable, in both JSON sources."""
    assert isinstance(parse(Source.LOADS, loads(rank(**{field: value})), 0.0, 0.0), Unreadable)
    entry = {"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 0}
    entry[{"num_running_reqs": "num_reqs"}.get(field, field)] = value
    body = json.dumps([entry]).encode()
    assert isinstance(parse(Source.GET_LOAD, body, 0.0, 0.0), Unreadable)


BROKEN_BODIES: dict[str, bytes] = {
    "empty": b"",
    "html": b"<html><body>502 Bad Gateway</body></html>",
    "truncated": read("base-32.loads.json")[:-7],
    "another shape": read("unauthorized.json"),
    "no loads": b'{"loads":[]}',
    "null loads": b'{"loads":null}',
    "text for a rank": b'{"loads":["busy"]}',
    "renamed": read("base-32.loads.json").replace(b"num_running_reqs", b"running_reqs"),
    "NaN": read("base-32.loads.json").replace(b'"num_running_reqs":32', b'"num_running_reqs":NaN'),
    "rank given twice": loads(rank(), rank()),
    "record never written": loads(rank(timestamp=0.0)),
    "too many ranks": loads(*(rank(dp_rank=number) for number in range(2000))),
    "deep": b"[" * 200_000,
    "not UTF-8": b'{"loads":"\xff"}',
    "waiting above all": b'[{"dp_rank":0,"num_reqs":1,"num_waiting_reqs":2}]',
}


@pytest.mark.parametrize("name", BROKEN_BODIES)
@pytest.mark.parametrize("source", list(Source))
def test_broken_body(name: str, source: Source) -> None:
    """A body of another kind is unknown to every parser, with a short reason."""
    told = parse(source, BROKEN_BODIES[name], 0.0, 0.0)
    assert isinstance(told, Unreadable)
    assert 0 < len(told.reason) < 80


@pytest.mark.parametrize("value", [None, True, -0.1, 1.1, "0.5", [], 10**400])
def test_broken_extra_is_none(value: Any) -> None:
    """A broken extra figure is unknown without taking the counts with it."""
    entry = rank(
        token_usage=value,
        gen_throughput="fast",
        max_running_requests=0,
        speculative={"accept_length": 0.0},
    )
    told = known(Source.LOADS, loads(entry))
    assert (told.running, told.queued) == (3, 1)
    assert told.token_usage is None
    assert told.gen_throughput is None
    assert told.max_running is None
    assert told.lifetime_accept_length is None


def test_absent_extra_is_none_when_idle_too() -> None:
    """What is not said is None, never zero."""
    told = known(Source.LOADS, loads(rank(0, 0)))
    assert told.gen_throughput is None
    assert (
        known(Source.METRICS, page("num_running_reqs 0", "num_queue_reqs 0")).gen_throughput is None
    )


def page(*rows: str) -> bytes:
    return "".join(f"sglang:{row}\n" for row in rows).encode()


@pytest.mark.parametrize(
    ("rows", "running"),
    [
        (['num_running_reqs{tp_rank="0"} 5', 'num_running_reqs{tp_rank="1"} 5'], 5),
        (['num_running_reqs{dp_rank="0"} 5', 'num_running_reqs{dp_rank="1"} 2'], 7),
        (['num_running_reqs{priority=""} 5', 'num_running_reqs{priority="3"} 5'], 5),
        (["num_running_reqs 5"], 5),
        (["num_running_reqs 5 1700000000"], 5),
        (['num_running_reqs{model_name="a}b,c"} 5'], 5),
        (["num_running_reqs 5", "num_running_reqs 5"], None),
        (["num_running_reqs NaN"], None),
        (['num_running_reqs{tp_rank="0"} 5', 'num_running_reqs{tp_rank="1"} NaN'], None),
        (["num_running_reqs -1"], None),
        (["num_running_reqs +Inf"], None),
        (["num_running_reqs five"], None),
        (["num_running_reqs"], None),
        (["running_reqs 5"], None),
        (["num_running_reqs_total 5"], None),
        ([f'num_running_reqs{{dp_rank="{number}"}} 1' for number in range(2000)], None),
    ],
)
def test_series(rows: list[str], running: int | None) -> None:
    """Ranks of one group report the same requests; a doubtful series is unknown."""
    told = parse(Source.METRICS, page("num_queue_reqs 0", *rows), 0.0, 0.0)
    assert (told.running if isinstance(told, Telemetry) else None) == running


def test_acceptance_of_captures() -> None:
    """Growth between two pages of a real run gives the simulated 2.8; the start has a gauge."""
    meter = AcceptMeter()
    samples = [
        parse_accept(read(f"spec-{name}.metrics.txt")) for name in ("C16", "C64", "idle-after")
    ]
    values = [meter.update(sample) for sample in samples if isinstance(sample, AcceptSample)]
    assert values[0] == pytest.approx(2.825, abs=0.001)
    assert values[1] == pytest.approx(2.8, abs=0.02)
    assert values[2] is None, "counters went back and nothing runs: the gauge sticks"


def test_acceptance_of_a_baseline() -> None:
    """A server that does not speculate has the gauge, at zero, and no acceptance."""
    sample = parse_accept(read("base-32.metrics.txt"))
    assert isinstance(sample, AcceptSample)
    assert (sample.gauge, sample.running, sample.verify_calls) == (None, 32, None)
    meter = AcceptMeter()
    assert [meter.update(sample), meter.update(sample)] == [None, None]


@pytest.mark.parametrize(
    ("tokens", "calls", "value"),
    [
        (300.0, 100.0, 3.0),
        (30.0, 10.0, 2.5),  # too few steps: the gauge
        (0.0, 0.0, 2.5),
        (-500.0, -100.0, 2.5),  # restarted
        (10.0, 100.0, None),  # below one token a step
        (1e6, 100.0, None),
    ],
)
def test_growth(tokens: float, calls: float, value: float | None) -> None:
    """Growth speaks when there is enough of it and it is possible."""
    meter = AcceptMeter()
    meter.update(AcceptSample(2.5, 1, 1000.0, 1000.0))
    gauge = 2.5 if value is not None else None
    assert meter.update(AcceptSample(gauge, 1, 1000.0 + tokens, 1000.0 + calls)) == value


def test_acceptance_of_too_many_series() -> None:
    """A flood of series is unreadable for the meter too."""
    assert isinstance(parse_accept(page(*["token_usage 1"] * 2000)), Unreadable)


KEYS = [
    *("loads", "timestamp", "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_reqs"),
    *("token_usage", "max_running_requests", "speculative", "accept_length", "gen_throughput"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=8,
        )
    ),
    max_leaves=20,
)
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput"]),
        st.sampled_from(["", "{}", '{dp_rank="1"}', '{priority="1"}', "{", '{a="b"}']),
        st.floats().map(str) | st.integers().map(str) | st.text(max_size=5),
    ).map(lambda row: f"sglang:{row[0]}{row[1]} {row[2]}"),
    max_size=6,
).map(lambda rows: "\n".join(rows).encode(errors="replace"))
BODIES = st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()) | ROWS


@given(source=st.sampled_from(Source), body=BODIES)
def test_any_bytes(source: Source, body: bytes) -> None:
    """Any bytes are telemetry within bounds or unreadable, and never an exception."""
    told = parse(source, body, 100.0, 100.1)
    assert isinstance(told, Telemetry | Unreadable)
    if isinstance(told, Telemetry):
        assert told.running >= 0
        assert told.queued >= 0
        assert told.taken_at <= 100.0
        assert told.token_usage is None or 0.0 <= told.token_usage <= 1.0
        assert told.max_running is None or told.max_running > 0
        assert told.gen_throughput is None or 0.0 <= told.gen_throughput < math.inf


@given(bodies=st.lists(BODIES, max_size=4))
def test_any_pages_of_metrics(bodies: list[bytes]) -> None:
    """Any row of pages gives an acceptance of one and up, or none."""
    meter = AcceptMeter()
    for body in bodies:
        sample = parse_accept(body)
        value = meter.update(sample) if isinstance(sample, AcceptSample) else None
        assert value is None or 1.0 <= value < math.inf


@given(running=st.integers(0, 999), waiting=st.integers(0, 999), cap=st.integers(1, 4096))
def test_counts_come_through(running: int, waiting: int, cap: int) -> None:
    """A sound answer is taken at its word."""
    told = known(Source.LOADS, loads(rank(running, waiting, max_running_requests=cap)))
    assert (told.running, told.queued, told.max_running) == (running, waiting, cap)
