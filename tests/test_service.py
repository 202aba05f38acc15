"""Curves: what they say between and beyond their points, and what is made of a sweep."""

from __future__ import annotations

import itertools
import statistics
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.curve_files import PAIRS, read_curve, shipped_curve
from loadtest.service import (
    PREFILL_S_PER_TOKEN,
    CurveError,
    ServiceCurve,
    crossover,
    decode_curve,
    from_sweep,
)
from loadtest.service import Sweep as SweepFile
from loadtest.sweep_schema import decode_sweep
from router.load import Role


def curve(*points: tuple[float, float], **more: Any) -> ServiceCurve:
    return ServiceCurve(label="test", source="made up", points=points, **more)


def sweep(*points: tuple[int, float], tokens: float = 1.0, **more: Any) -> SweepFile:
    """A sweep of 100 prompt and 101 output tokens, with 10 ms to the first token."""
    levels = [
        {"C": c, "out_tok_s": r, "tokens_per_chunk": tokens, "ttft_ms": {"p50": 10.0}}
        for c, r in points
    ]
    body = {"label": "s", "input_tokens": 100, "output_tokens": [101, 101], "points": levels}
    return msgspec.convert(body | more, SweepFile)


@st.composite
def curves(draw: st.DrawFn) -> ServiceCurve:
    ns = draw(st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True))
    steps = draw(st.lists(st.floats(1e-4, 1.0), min_size=len(ns), max_size=len(ns)))
    tokens = draw(st.floats(1.0, 6.0))
    return curve(*zip(sorted(ns), sorted(steps), strict=True), tokens_per_step=tokens)


def test_step_time_between_points() -> None:
    """Between two points a step's time is on the line between them."""
    assert curve((1, 0.010), (11, 0.020)).step_s(6) == pytest.approx(0.015)


def test_step_time_below_the_first_point() -> None:
    """Fewer requests than were measured take as long as the fewest that were."""
    assert curve((4, 0.010), (8, 0.020)).step_s(1) == 0.010


def test_step_time_beyond_the_last_point() -> None:
    """Beyond the last point total throughput stays what it was there."""
    c = curve((1, 0.010), (8, 0.020), tokens_per_step=2.0)
    assert c.step_s(16) == pytest.approx(0.040)
    assert c.tok_s(16) == pytest.approx(c.tok_s(8)) == pytest.approx(800)


@given(curves(), st.lists(st.floats(1, 1000), min_size=2, max_size=8))
def test_step_time_never_falls(c: ServiceCurve, running: list[float]) -> None:
    """A step with more requests is never shorter, whatever the points."""
    steps = [c.step_s(n) for n in sorted(running)]
    assert all(later >= step * (1 - 1e-12) for step, later in itertools.pairwise(steps))


def test_tokens_and_chunks() -> None:
    """Tokens per second are chunks per second times the accept length."""
    c = curve((1, 0.010), (8, 0.020), tokens_per_step=2.5)
    assert c.chunks_s(8) == pytest.approx(400)
    assert c.tok_s(8) == pytest.approx(1000)


def test_prefill() -> None:
    """A prefill batch costs its tokens and its requests."""
    c = curve((1, 0.01), prefill_s_per_token=1e-5, prefill_s_per_request=1e-3)
    assert c.prefill_s(2, 300) == pytest.approx(0.005)


def test_slowdown() -> None:
    """A step is longer by what the server loses while the other one works, and only then."""
    c = curve((1, 0.01), kept_share=0.64)
    assert c.slowdown(0) == 1
    assert c.slowdown(1) == c.slowdown(200) == pytest.approx(1 / 0.64)


def test_accept_length() -> None:
    """Another accept length changes the tokens of a step, not its time."""
    c = curve((1, 0.01), tokens_per_step=2.0).accepting(1.0)
    assert (c.tokens_per_step, c.step_s(1)) == (1.0, 0.01)
    with pytest.raises(CurveError, match=r"at least 1, got 0\.5"):
        c.accepting(0.5)


@pytest.mark.parametrize(
    ("points", "more", "message"),
    [
        ((), {}, "no points"),
        (((0, 0.01),), {}, "running >= 1"),
        (((1, 0.0),), {}, "above 0"),
        (((1, float("inf")),), {}, "above 0"),
        (((1, 0.01), (1, 0.02)), {}, "running must rise"),
        (((1, 0.02), (2, 0.01)), {}, "must not fall"),
        (((1, 0.01),), {"tokens_per_step": 0.9}, "tokens_per_step"),
        (((1, 0.01),), {"kept_share": 0.0}, "kept_share"),
        (((1, 0.01),), {"kept_share": 1.1}, "kept_share"),
        (((1, 0.01),), {"max_running": 0}, "max_running"),
        (((1, 0.01),), {"dispatch_s": -1.0}, "negative"),
    ],
)
def test_impossible_curve(
    points: tuple[tuple[float, float], ...], more: dict[str, Any], message: str
) -> None:
    """A curve that no server can have is refused with the reason."""
    with pytest.raises(CurveError, match=message):
        curve(*points, **more)


def test_sweep_with_one_request() -> None:
    """With one request in flight its time is dispatch, prefill and its decode steps."""
    c = from_sweep(sweep((1, 101 / 1.01)))  # 1.01 s for each request
    assert c.dispatch_s == pytest.approx(0.010 - 100 * PREFILL_S_PER_TOKEN)
    assert c.step_s(1) == pytest.approx((1.01 - 0.010) / 100)


def test_sweep_when_speculating() -> None:
    """A server that emits two tokens a step takes half as many steps, each twice as long."""
    plain, double = from_sweep(sweep((1, 100.0))), from_sweep(sweep((1, 100.0), tokens=2.0))
    assert double.step_s(1) == pytest.approx(2 * plain.step_s(1))
    assert double.tok_s(1) == pytest.approx(plain.tok_s(1))


@pytest.mark.parametrize("tokens", [1.0, 2.7])
def test_sweep_comes_back(tokens: float) -> None:
    """The curve of a smooth sweep predicts what was measured."""
    levels = ((1, 100.0), (4, 390.0), (16, 1200.0), (64, 2000.0))
    c = from_sweep(sweep(*levels, tokens=tokens))
    for level, rate in levels:
        assert c.closed_loop_tok_s(level, 100, 101) == pytest.approx(rate)


def test_sweep_with_noise() -> None:
    """A level that was measured too fast shares its step time with its neighbour."""
    c = from_sweep(sweep((1, 100.0), (8, 500.0), (16, 1200.0)))
    (_, first), (_, middle), (_, last) = c.points
    assert first < middle == last


def test_sweep_measured_twice() -> None:
    """A level that was measured twice counts with the mean of both."""
    once = [from_sweep(sweep((1, 50.0), (8, rate))).step_s(8) for rate in (200.0, 300.0)]
    both = from_sweep(sweep((1, 50.0), (8, 200.0), (8, 300.0)))
    assert both.step_s(8) == pytest.approx(statistics.fmean(once))


def test_sweep_of_a_faster_machine() -> None:
    """Where prompts go through faster than on an H200, prefill is half of the time at most."""
    body = sweep((1, 1000.0), (64, 8000.0), input_tokens=4000)
    c = from_sweep(body)
    assert c.prefill_s_per_token == pytest.approx(0.5 * 101 / (8000 * 4000))
    assert c.step_s(64) > 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (sweep(), "no points"),
        (sweep((0, 10.0)), "at least 1"),
        (sweep((1, 0.0)), "above 0"),
        (sweep((1, 10.0), output_tokens=[1, 1]), "no decode step"),
        (sweep((1, 1e6)), "longer than"),
    ],
)
def test_impossible_sweep(body: SweepFile, message: str) -> None:
    """A sweep that cannot have been measured is refused with the reason."""
    with pytest.raises(CurveError, match=message):
        from_sweep(body)


def test_closed_loop_above_the_cap() -> None:
    """More requests than run at once wait, and get the server no further."""
    c = curve((1, 0.01), (64, 0.1), max_running=48)
    assert c.closed_loop_tok_s(200, 10, 100) == c.closed_loop_tok_s(48, 10, 100)


def test_planted_crossover() -> None:
    """The planted pair crosses at 12: there, and nowhere else, both decode 521.7 tokens/s."""
    speculative, baseline = (shipped_curve("planted-12", role) for role in Role)
    assert crossover(speculative, baseline) == pytest.approx(12)
    assert speculative.tok_s(12) == pytest.approx(baseline.tok_s(12)) == pytest.approx(521.74, 0.01)
    assert all(speculative.tok_s(n) > baseline.tok_s(n) for n in range(1, 12))
    assert all(speculative.tok_s(n) < baseline.tok_s(n) for n in range(13, 200))


@pytest.mark.parametrize(("prompt", "output"), [(16, 64), (256, 128), (64, 512)])
def test_planted_crossover_of_a_sweep(prompt: int, output: int) -> None:
    """A sweep of the planted pair meets there too: prefill and dispatch cost both the same."""
    speculative, baseline = (shipped_curve("planted-12", role) for role in Role)
    rates = [
        [c.closed_loop_tok_s(n, prompt, output) for n in (11, 12, 13)]
        for c in (speculative, baseline)
    ]
    assert rates[0][0] > rates[1][0]
    assert rates[0][1] == pytest.approx(rates[1][1])
    assert rates[0][2] < rates[1][2]


def test_planted_pair_is_cheap() -> None:
    """The planted pair emits fewer than 1,500 chunks/s up to 24 requests on each server."""
    pair = [shipped_curve("planted-12", role) for role in Role]
    assert all(sum(c.chunks_s(n) for c in pair) < 1500 for n in range(1, 25))
    assert all(0.020 <= c.step_s(n) <= 0.1 for c in pair for n in range(1, 25))


def test_measured_crossover() -> None:
    """The measured pair crosses between 48 and 64, where its second pass had it."""
    speculative, baseline = (shipped_curve("h200-topk4", role) for role in Role)
    assert crossover(speculative, baseline) == pytest.approx(55.4, abs=0.1)


@pytest.mark.parametrize("role", list(Role))
def test_measured_curve_fits_its_sweep(role: Role) -> None:
    """The fitted step time is the measured gap between chunks, up to 32 requests within a third."""
    name = f"data/h200-topk4/{role}.json"
    data = msgspec.json.decode(resources.files("loadtest").joinpath(name).read_bytes())
    c = shipped_curve("h200-topk4", role)
    ratios = [
        c.step_s(point["C"]) * 1e3 / point["itl_chunk_ms"]["p50"]
        for point in data["points"]
        if point["C"] <= 32
    ]
    assert min(ratios) > 0.75
    assert max(ratios) < 1.45
    assert 0.95 < statistics.median(ratios) < 1.25


@pytest.mark.parametrize("role", list(Role))
def test_measured_share(role: Role) -> None:
    """The share that a measured server keeps is the mean of the overlaps measured for it."""
    name = f"data/h200-topk4/{role}.json"
    data = msgspec.json.decode(resources.files("loadtest").joinpath(name).read_bytes())
    shares = [share for _, _, share in data["meta"]["contention"]["grid"]]
    assert len(shares) == 9
    assert data["kept_share"] == pytest.approx(statistics.fmean(shares), abs=0.005)
    assert shipped_curve("h200-topk4", role).kept_share == data["kept_share"]


def test_sources_are_named() -> None:
    """Each shipped curve says where it comes from, and the planted ones that they are made up."""
    sources = {pair: [shipped_curve(pair, role).source for role in Role] for pair in PAIRS}
    assert all("made up" in source for source in sources["planted-12"])
    assert all("one H200" in source for source in sources["h200-topk4"])
    assert "random weights, simulated acceptance" in sources["h200-topk4"][0]


@pytest.mark.parametrize(
    ("speculative", "expected"),
    [
        (curve((1, 0.01), (10, 0.10)), None),
        (curve((1, 0.03), (10, 0.12)), 0.0),
        (curve((1, 0.01), (10, 0.28)), pytest.approx(1.5)),
    ],
)
def test_crossover(speculative: ServiceCurve, expected: float | None) -> None:
    """A pair may cross once, never, or have no level at which speculation wins."""
    assert crossover(speculative, curve((1, 0.02), (10, 0.11))) == expected


def test_crossover_beyond_the_points() -> None:
    """Where one curve has ended and the other goes on, a crossing is still found."""
    speculative = curve((1, 0.01), (10, 0.012))
    baseline = curve((1, 0.015), (40, 0.03))
    at = crossover(speculative, baseline)
    assert at is not None
    assert 10 < at < 40
    assert speculative.step_s(at) == pytest.approx(baseline.step_s(at))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[", "neither a curve nor a sweep"),
        (b"[]", "neither a curve nor a sweep"),
        (b'{"points": [[1, 0.01]]}', "neither a curve nor a sweep"),
        (b'{"label": "x", "source": "y", "points": [[1, 0.01]], "cap": 3}', "unknown field `cap`"),
        (b'{"label": "x", "source": "y", "points": [[1, -1]]}', "above 0"),
    ],
)
def test_unreadable(data: bytes, message: str) -> None:
    """A file that is no curve is refused by its name and with the reason."""
    with pytest.raises(CurveError, match=message) as caught:
        decode_curve(data, "my.json")
    assert "my.json" in str(caught.value)


def test_file(tmp_path: Any) -> None:
    """A curve file is read from where it is; one that is not there is a CurveError."""
    path = tmp_path / "curve.json"
    with pytest.raises(CurveError, match=r"curve\.json cannot be read"):
        read_curve(path)
    path.write_bytes(msgspec.json.encode(curve((1, 0.01))))
    assert read_curve(path) == curve((1, 0.01))
    with pytest.raises(CurveError, match="planted-12, h200-topk4"):
        shipped_curve("planted-13", Role.BASELINE)


KEPT = Path("deploy/calibrations/h200-sim-acc2.0/sweep.json")


@pytest.mark.parametrize("role", list(Role))
def test_what_a_sweep_leaves_is_a_curve(role: Role) -> None:
    """From a sweep.json of both servers each gives its own curve, which runs as fast as it did."""
    found = read_curve(KEPT, role)
    measured: dict[int, list[float]] = {}
    for point in decode_sweep(KEPT.read_bytes()).points:
        if point.role is role and point.level is not None:
            measured.setdefault(point.level, []).append(point.output_tok_s.value)
    assert [at for at, _ in found.points] == sorted(measured)
    for level, speeds in measured.items():
        # 5 %: noise that would make a step with more requests shorter is pooled away.
        mean = sum(speeds) / len(speeds)
        assert found.closed_loop_tok_s(level, 64, 256) == pytest.approx(mean, rel=0.05)
    assert (found.tokens_per_step > 1.8) is (role is Role.SPECULATIVE)


def test_a_sweep_of_one_server_is_taken_whatever_its_role(tmp_path: Path) -> None:
    """A sweep of a third server (adaptive, say) needs no role; one of both servers does."""
    with pytest.raises(CurveError, match="holds the sweeps of baseline and speculative: say which"):
        read_curve(KEPT)
    sweep = decode_sweep(KEPT.read_bytes())
    alone = tuple(point for point in sweep.points if point.role is Role.BASELINE)
    path = tmp_path / "sweep.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(sweep, points=alone)))
    assert read_curve(path, Role.SPECULATIVE).points == read_curve(KEPT, Role.BASELINE).points
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(sweep, points=())))
    with pytest.raises(CurveError, match="holds no level that was measured"):
        read_curve(path)
    path.write_bytes(b'{"schema": "crossover.sweep/1"}')
    with pytest.raises(CurveError, match="is no sweep"):
        read_curve(path)
