"""From sweeps to a calibration: measured ones, planted ones, and what a calibration must say."""

from __future__ import annotations

import json
import math
import random
from functools import cache, partial
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.conditions import FitError
from loadtest.contention import Both, pair_up
from loadtest.fit import fit
from loadtest.fit_words import describe
from loadtest.importers import read_sweeps
from loadtest.objectives import Slo
from loadtest.points import Measured, Sweep
from loadtest.values import ResultsError
from router.calibration import Calibration, format_calibration, parse_calibration
from router.curves import Number
from router.frontier import Frontier
from tests.planted_sweeps import BASE, LEVELS, PLANTED, server, sweep

DATA = Path(__file__).parent / "data" / "sweeps"


def measured(*names: str) -> list[Sweep]:
    return [s for n in names for s in read_sweeps((DATA / f"{n}.json").read_bytes(), f"{n}.json")]


def both() -> list[Both]:
    return pair_up((p.name, p.read_bytes()) for p in sorted((DATA / "contention").glob("*.json")))


# For facts that do not depend on how finely the interval is drawn.
quick = partial(fit, replicates=50)


@cache
def topk4() -> Calibration:
    """The fit that most tests look at."""
    return fit(measured("base"), measured("k4", "k4_rerun"))


@cache
def shared_pair() -> Calibration:
    return fit(measured("base"), measured("k1"), both=both())


def interval(calibration: Calibration) -> tuple[float, float]:
    assert calibration.interval is not None
    low, high = calibration.interval
    return as_float(low), as_float(high)


def as_float(value: Number) -> float:
    return math.inf if isinstance(value, str) else value


def crossover(calibration: Calibration, objective: str = "throughput") -> float:
    return as_float(calibration.objectives[objective].crossover)


def test_the_published_parallel_points_say_never() -> None:
    """Blackwell, parallel benchmark: never speculate."""
    found = fit(measured("baseline"), measured("eagle3-topk4-parallel"))
    assert found.verdict == "never"
    assert found.line == Frontier.total(0)


def test_the_published_single_stream_points_say_one_request() -> None:
    """Blackwell, single stream: K is 1, and the interval owns up to the gap from 1 to 70."""
    found = fit(measured("baseline"), measured("eagle3-topk4-single-stream"))
    assert found.verdict == "at"
    assert found.line == Frontier.total(1)
    low, high = interval(found)
    assert low <= 1
    assert 10 < high < 70
    assert any("between 1 and 70" in note for note in found.notes)
    assert any("measured twice" in note for note in found.notes)


def test_topk_1_at_acceptance_2_8_always_pays() -> None:
    """H200, EAGLE-3 topk 1, acceptance 2.8: always, up to the last level of 256."""
    found = shared_pair()
    assert found.verdict == "always"
    assert found.line == Frontier.total(math.inf)
    assert any(line.endswith("up to 256, the last level measured") for line in describe(found))


@pytest.mark.parametrize("passes", [("base",), ("base", "base_rerun")])
def test_topk_4_crosses_between_48_and_96(passes: tuple[str, ...]) -> None:
    """H200, EAGLE-3 topk 4, two passes: it crosses between 48 and 96, and the stall is left out."""
    found = fit(measured(*passes), measured("k4", "k4_rerun"))
    assert found.verdict == "at"
    assert 48 <= crossover(found) <= 96
    low, high = interval(found)
    assert 40 < low < 60 < high < 96
    assert found.curves is not None
    assert found.curves.speculative.left_out == ((48.0, 2656.0),)


def test_the_outlier_does_not_decide() -> None:
    """Without the stalled measurement the answer is the same as with it."""
    stalled = measured("k4", "k4_rerun")
    clean = [
        Sweep(
            name=s.name,
            kind=s.kind,
            points=tuple(p for p in s.points if p.tokens_per_second != 2656.0),
        )
        for s in stalled
    ]
    one, other = topk4(), fit(measured("base"), clean)
    assert crossover(one) == crossover(other)
    assert one.interval == other.interval


def test_topk_1_at_acceptance_2_keeps_its_wide_interval() -> None:
    """H200, acceptance 2.0: about even from 64 on, so the interval is wide and says so."""
    found = fit(measured("base"), measured("k1_acc2.0"))
    assert found.verdict == "unsure"
    low, high = interval(found)
    assert low == pytest.approx(53, abs=6)
    assert math.isinf(high)
    assert found.objectives["throughput"].settle == (
        "levels above 256 and 3 more passes from 53 to 256"
    )


def test_more_passes_narrow_what_was_unsure() -> None:
    """With the second pass of the baseline the same pair gets two ends, still far apart."""
    found = fit(measured("base", "base_rerun"), measured("k1_acc2.0"))
    assert found.verdict == "at"
    low, high = interval(found)
    assert low < 64
    assert 128 < high < 256


def test_both_factors_of_speculative_speed_are_kept() -> None:
    """Tokens/s is accept length x steps/s at every level of the speculative curve."""
    found = topk4()
    assert found.curves is not None
    for point in found.curves.speculative.points:
        assert point.accept_length is not None
        assert point.accept_length == pytest.approx(2.8, abs=0.02)
        assert point.steps_per_second is not None
        assert point.tokens_per_second == pytest.approx(
            point.accept_length * point.steps_per_second, rel=1e-3
        )
        assert point.low is not None
        assert point.high is not None
        assert point.low <= point.tokens_per_second <= point.high
        assert point.time_per_token is not None
        assert point.ttft is not None
    assert [len(p.measured) for p in found.curves.speculative.points] == [
        1, 1, 1, 1, 2, 2, 1, 2, 2, 1, 1, 1,
    ]  # fmt: skip
    assert all(p.accept_length in {None, 1.0} for p in found.curves.baseline.points)


def test_the_line_can_be_asked_again_at_another_acceptance() -> None:
    """The curves in the file give the crossover of the fit, and an earlier one at less acceptance."""
    found = topk4()
    assert found.curves is not None
    assert found.curves.crossover() == pytest.approx(crossover(found), rel=0.01)
    assert found.curves.crossover(speedup=0.85) < 0.7 * crossover(found)


def test_shared_gpus_are_noticed() -> None:
    """Both servers at once on one GPU kept half to four fifths: the total decides."""
    found = shared_pair()
    assert found.contention is not None
    assert found.contention.gpus == "shared"
    assert found.contention.speculative == pytest.approx(0.63, abs=0.03)
    assert found.contention.baseline == pytest.approx(0.57, abs=0.03)
    assert len(found.contention.overlaps) == 9
    assert found.line.scope == "total"


def test_another_acceptance_is_not_contention() -> None:
    """Overlaps measured at acceptance 2.8 say as much of the same server at 2.0: steps count."""
    found = quick(measured("base"), measured("k1_acc2.0"), both=both())
    assert found.contention is not None
    assert found.contention.speculative == pytest.approx(0.59, abs=0.04)


def test_contention_with_another_server_is_not_passed_off_as_this_one() -> None:
    """Overlaps were measured with topk 1: for a topk 4 server only the baseline's share is known."""
    found = fit(measured("base"), measured("k4", "k4_rerun"), both=both())
    assert found.contention is not None
    assert found.contention.speculative is None
    assert found.contention.baseline == pytest.approx(0.57, abs=0.03)
    assert any("another speculative server" in note for note in found.notes)


def test_servers_that_do_not_disturb_each_other_have_a_gpu_each() -> None:
    """Where both keep their speed, only the speculative server's concurrency counts."""
    apart = [
        Both(n, n, sweep(PLANTED["middle"].speculative, [n]), sweep(BASE, [n])) for n in (8, 32)
    ]
    found = quick([sweep(BASE)], [sweep(PLANTED["middle"].speculative)], both=apart)
    assert found.contention is not None
    assert (found.contention.gpus, found.line) == ("split", Frontier.speculative_only(48))


@pytest.mark.parametrize(("gpus", "scope"), [("shared", "total"), ("split", "speculative")])
def test_what_the_user_says_of_the_gpus_counts(
    gpus: Literal["shared", "split"], scope: str
) -> None:
    """--gpus decides the scope, and a contradiction of the measurement is noted."""
    found = fit(measured("base"), measured("k1"), both=both(), gpus=gpus)
    assert found.line.scope == scope
    assert any("looks like shared" in note for note in found.notes) is (gpus == "split")


def test_a_crossover_at_a_level_is_that_k() -> None:
    """Curves without noise that are equal at 48 give K = 48, at 48.9 still 48."""
    for spec, k in (
        (server("s", 6.5, 0.25, 2.5), 48),
        (server("s", 6.5, 0.2477, 2.5), 48),
        (server("s", 6.5, 0.2450, 2.5), 50),
    ):
        found = quick([sweep(BASE)], [sweep(spec)])
        assert (found.verdict, found.line) == ("at", Frontier.total(k))


def test_levels_above_the_cap_are_not_used_and_said() -> None:
    """A speculative server that runs 48 at once measured a queue above, not a batch."""
    levels = (1, 2, 4, 8, 16, 32, 48)
    capped = Sweep(
        name="capped.json",
        kind="planted",
        points=(
            *sweep(PLANTED["always"].speculative, levels).points,
            *(
                Measured(concurrency=n, tokens_per_second=PLANTED["always"].speculative.tok_s(48))
                for n in (64, 128, 256)
            ),
        ),
        cap=48,
    )
    found = quick([sweep(BASE)], [capped])
    assert found.verdict == "always"
    assert found.curves is not None
    assert found.curves.speculative.cap == 48
    assert [p.concurrency for p in found.curves.speculative.points] == list(levels)
    said = found.conditions["speculative.not_used"]
    assert "capped.json, 64 requests: above the server's max_running_requests of 48" in said
    assert f"note: not used: {said}" in list(describe(found))


def test_levels_that_waited_or_failed_are_not_used() -> None:
    """Requests waiting inside the server, or failing, make a level something else."""
    base = sweep(BASE)
    odd = Sweep(
        name="odd.json",
        kind="planted",
        points=(
            *base.points,
            Measured(concurrency=300, tokens_per_second=9.0, waiting=100),
            Measured(concurrency=310, tokens_per_second=9.0, requests=80, errors=20),
            Measured(concurrency=320, tokens_per_second=0.0),
        ),
    )
    found = quick([odd], [sweep(PLANTED["middle"].speculative)])
    assert found.conditions["baseline.not_used"] == (
        "odd.json, 300 requests: 100 of them were waiting inside the server;"
        " odd.json, 310 requests: 20 of 100 failed; odd.json, 320 requests: no output"
    )
    assert crossover(found) == pytest.approx(48, rel=0.01)


def test_each_objective_has_its_own_answer() -> None:
    """Throughput, time per token and time to the first token are compared each by itself."""
    found = topk4()
    assert set(found.objectives) == {"throughput", "time_per_token", "ttft"}
    assert 40 < crossover(found, "time_per_token") < 80
    ttft = found.objectives["ttft"]
    assert ttft.verdict == "never"
    assert ttft.again is not None
    assert ttft.again > 100


def test_the_line_follows_the_objective_that_was_asked_for() -> None:
    """With time to the first token as the aim the same sweeps say never."""
    found = quick(measured("base"), measured("k4", "k4_rerun"), objective="ttft")
    assert (found.objective, found.verdict, found.line.never) == ("ttft", "never", True)


def test_a_service_level_is_an_objective() -> None:
    """Limits give a margin to compare, and the last level that each server meets them at."""
    slo = Slo(ttft=1.0, time_per_token=0.030)
    found = quick([sweep(BASE)], [sweep(PLANTED["middle"].speculative)], slo=slo, objective="slo")
    # The baseline's step is 5 + 0.05 n ms; the speculative one's token takes (6.5 + 0.25 n) / 2.5.
    assert found.objectives["slo"].holds_up_to == {"speculative": 256.0, "baseline": 256.0}
    strict = fit(
        [sweep(BASE)], [sweep(PLANTED["middle"].speculative)], slo=Slo(time_per_token=0.010)
    )
    assert strict.objectives["slo"].holds_up_to == {"speculative": 64.0, "baseline": 96.0}
    assert crossover(strict, "slo") == pytest.approx(48, rel=0.02)


def test_the_fingerprint_says_what_must_be_the_same() -> None:
    """Model, engine, GPU, prompts and each server's flags are in the file."""
    found = topk4()
    assert found.fingerprint == {
        "model": "Llama-3.1-8B shape, bf16, dummy weights",
        "engine": "sglang 0.5.17",
        "gpu": "1x NVIDIA H200",
        "prompt_tokens": 256,
        "output_tokens": "64-192",
        "stream": True,
        "speculative.attention": "fa3",
        "speculative.prefill_cuda_graph": False,
        "speculative.server": "EAGLE-3 steps=3 topk=4 draft_tokens=8",
        "speculative.simulated_accept_length": 2.8,
        "baseline.attention": "fa3",
        "baseline.prefill_cuda_graph": False,
        "baseline.server": "baseline",
    }
    assert found.conditions["speculative.levels"] == "1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256"
    assert found.conditions["speculative.measurements"] == "17"


def test_sweeps_of_different_loads_are_not_compared() -> None:
    """Other prompts are other work: that is refused, not averaged."""
    other = Sweep(
        name="long.json",
        kind="planted",
        points=sweep(BASE).points,
        facts={"prompt_tokens": 1024, "output_tokens": 128},
    )
    with pytest.raises(FitError, match="different loads: prompt_tokens 1024 and 256"):
        quick([other], [sweep(PLANTED["middle"].speculative)])


def test_a_pair_on_different_gpus_is_noted() -> None:
    """Another GPU, or the wrong role's file, does not stop the fit, and is said."""
    h200, b200 = (
        Sweep(name=f"{gpu}.json", kind="planted", points=s.points, facts={"gpu": gpu}, role=s.role)
        for gpu, s in (("H200", sweep(BASE)), ("B200", sweep(PLANTED["middle"].speculative)))
    )
    assert quick([h200], [b200]).notes[0] == "the sweeps do not agree on gpu: B200 and H200"
    swapped = quick(measured("k1"), measured("base"))
    assert any("base.json looks like a baseline" in note for note in swapped.notes)
    assert any("the baseline accepts 2.8" in note for note in swapped.notes)


@pytest.mark.parametrize(
    ("baseline", "speculative", "why"),
    [
        ([], [sweep(BASE)], "no level of the baseline sweeps can be used: there is none"),
        ([sweep(BASE, cap=4, levels=(8, 16))], [sweep(BASE)], "baseline sweeps can be used: base"),
        ([sweep(BASE, (1, 2))], [sweep(BASE, (8, 16))], "no range of concurrency in common"),
    ],
)
def test_sweeps_that_give_nothing(
    baseline: list[Sweep], speculative: list[Sweep], why: str
) -> None:
    """Nothing usable, or nothing in common, is an error in one line."""
    with pytest.raises(FitError, match=why) as caught:
        quick(baseline, speculative)
    assert "\n" not in str(caught.value)


def test_an_objective_that_was_not_measured() -> None:
    """Points without times cannot be fitted for time."""
    with pytest.raises(FitError, match="ttft was not measured in the speculative sweeps"):
        fit(measured("baseline"), measured("eagle3-topk4-parallel"), objective="ttft")


@given(order=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=2)
def test_the_order_of_files_and_levels_does_not_matter(order: random.Random) -> None:
    """Passes given in another order, with levels in another order, make the same file."""
    files = [measured("base"), measured("k4", "k4_rerun")]
    mixed: list[list[Sweep]] = []
    for sweeps in files:
        shuffled = []
        for one in sweeps:
            points = list(one.points)
            order.shuffle(points)
            shuffled.append(
                Sweep(
                    name=one.name, kind=one.kind, points=tuple(points), facts=one.facts,
                    remarks=one.remarks, cap=one.cap, role=one.role,
                )
            )  # fmt: skip
        order.shuffle(shuffled)
        mixed.append(shuffled)
    assert fit(mixed[0], mixed[1]) == topk4()


def test_the_unit_of_speed_does_not_matter() -> None:
    """Speeds given in hundreds of tokens move the curves and not the crossover."""
    spec = PLANTED["middle"].speculative
    one, other = (quick([sweep(BASE, scale=s)], [sweep(spec, scale=s)]) for s in (1.0, 0.01))
    assert crossover(other) == pytest.approx(crossover(one), rel=1e-3)
    assert interval(other) == pytest.approx(interval(one), rel=1e-2)


def test_what_is_written_is_read_back_and_served() -> None:
    """The file is the calibration again, and gives the router its line."""
    found = fit(
        measured("base"), measured("k4", "k4_rerun"), both=both(), created="2026-11-29T12:00:00Z",
        command="loadtest fit", slo=Slo(ttft=0.3),
    )  # fmt: skip
    document = format_calibration(found)
    assert parse_calibration(document) == found
    assert json.loads(document)["verdict"] == "at"
    assert parse_calibration(document).line == found.line


def test_an_unsure_file_can_be_written() -> None:
    """An interval without an end is a word in the file, since JSON has no infinity."""
    document = format_calibration(fit(measured("base"), measured("k1_acc2.0")))
    assert json.loads(document)["interval"][1] == "infinity"
    assert parse_calibration(document).verdict == "unsure"


def test_a_run_of_both_without_its_partner_is_refused() -> None:
    """Half of a contention run, a file without a label or the same twice say nothing."""
    name = "contention_k1-8_base-8.k1.json"
    half = (DATA / "contention" / name).read_bytes()
    with pytest.raises(ResultsError, match="both servers at 8:8: only the speculative one"):
        pair_up([(name, half)])
    with pytest.raises(ResultsError, match="is there twice"):
        pair_up([(name, half), ("again.json", half)])
    with pytest.raises(ResultsError, match="no run of both servers"):
        pair_up([("base.json", (DATA / "base.json").read_bytes())])
    with pytest.raises(ResultsError, match="no run of both servers"):
        pair_up([("x", b"\xff")])
    blank = json.dumps({"label": "x@8:8", "points": [{"C": 8, "out_tok_s": 5}]}).encode()
    with pytest.raises(ResultsError, match="does not tell which server"):
        pair_up([("x", blank)])


def test_planted_levels_are_those_of_the_curve() -> None:
    """Every level of a sweep is a point of the curve, at its own concurrency exactly."""
    found = quick([sweep(BASE)], [sweep(PLANTED["middle"].speculative)])
    assert found.curves is not None
    assert [p.concurrency for p in found.curves.baseline.points] == [float(n) for n in LEVELS]
