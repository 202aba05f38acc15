"""The simulator: nothing is lost, work is conserved, and closed forms and the step-by-step batch agree."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.arms import arm_curves, levels_of, shipped_trace
from loadtest.arrivals import ClosedLoop, Ramp
from loadtest.batching import ContinuousBatch
from loadtest.service import ServiceCurve
from loadtest.simulator import PairModel, Run, ServerModel, Simulation
from loadtest.simulator_contention import H200, SEPARATE, Contention, Overlap
from loadtest.simulator_load import (
    Acceptance,
    Call,
    Row,
    Size,
    Turn,
    conversation_calls,
    day,
    steps,
    trace_calls,
)
from router.load import Role
from router.policies import make_policy
from router.speeds import in_flight, speeds

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
ONLY = {role: make_policy(role.value) for role in Role}
FREE = {"prefill_s_per_token": 0.0}


def curve(*points: tuple[float, float], **more: Any) -> ServiceCurve:
    found = points or ((1, 0.01), (64, 0.03))
    return ServiceCurve(label="test", source="made up", points=found, **more)


def pair(
    spec: ServiceCurve, base: ServiceCurve | None = None, contention: Contention = SEPARATE
) -> PairModel:
    return PairModel(
        speculative=ServerModel(curve=spec, max_running=spec.max_running),
        baseline=ServerModel(curve=base or spec),
        contention=contention,
    )


def arm_pair(name: str) -> PairModel:
    """A measured arm on one GPU."""
    return pair(*arm_curves(name), H200)


def poisson_calls(
    rate: float, seconds: float, sizes: Iterator[Size], chance: random.Random
) -> Iterator[Call]:
    """Arrivals without memory, `rate` a second."""
    now = chance.expovariate(rate)
    while now < seconds:
        yield Call(now, *next(sizes))
        now += chance.expovariate(rate)


def uniform_sizes(prompt: int, low: int, high: int, chance: random.Random) -> Iterator[Size]:
    """A fixed prompt, outputs uniform from `low` to `high`, as a sweep has them."""
    while True:
        yield Size(prompt, chance.randint(low, high))


def waits(run: Run) -> list[float]:
    return [(e - s) / o for s, e, o in zip(run.started, run.ended, run.output, strict=True)]


calls = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 3000), st.integers(1, 400)), min_size=1, max_size=60
).map(lambda rows: [Call(at, prompt, output) for at, prompt, output in sorted(rows)])


@settings(max_examples=60, deadline=None)
@given(
    calls,
    st.sampled_from(["round-robin", "least-in-flight", "baseline", "speculative"]),
    st.integers(1, 8) | st.none(),
    st.floats(0.3, 1.0),
    st.sampled_from([0.0, 0.0001]),
)
def test_every_request_ends_once(
    load: list[Call], policy: str, cap: int | None, kept: float, prefill: float
) -> None:
    """Each request starts when it arrives, gets its first token, ends after it, and leaves no count."""
    servers = curve(max_running=cap, prefill_s_per_token=prefill, dispatch_s=0.01)
    simulation = Simulation(
        pair(servers, servers, Contention.constant(kept, kept)), make_policy(policy)
    )
    run = simulation.play(load)
    assert run.started == [call.at for call in load]
    assert run.output == [call.output for call in load]
    assert all(s <= f <= e for s, f, e in zip(run.started, run.first, run.ended, strict=True))
    assert simulation.tracker.in_flight == 0
    assert run.prefilled == sum(call.prompt for call in load)


@settings(max_examples=60, deadline=None)
@given(calls, st.integers(1, 8) | st.none())
def test_work_is_conserved(load: list[Call], cap: int | None) -> None:
    """With a speed that no batch size changes a server is busy for exactly the work it was given."""
    # Twice the requests take twice the time for a step: 100 tokens/s, however they are shared out.
    constant = curve((1, 0.01), (1000, 10.0), max_running=cap, prefill_s_per_token=1e-4)
    run = Simulation(pair(constant), ONLY[SPEC]).play(load)
    end = 0.0
    for call in load:
        work = call.prompt * 1e-4 + (call.output - 1) * 0.01
        end = max(end, call.at) + work
    assert max(run.ended) == pytest.approx(end, rel=1e-6, abs=1e-6)


def test_one_request_alone() -> None:
    """A request alone takes its dispatch, its prefill and its steps, to the last digit."""
    servers = curve((1, 0.02), prefill_s_per_token=0.001, dispatch_s=0.5, tokens_per_step=2.0)
    run = Simulation(pair(servers), ONLY[SPEC]).play([Call(3.0, 100, 21)])
    assert run.first == [pytest.approx(3.0 + 0.5 + 0.1)]
    assert run.ended == [pytest.approx(3.0 + 0.5 + 0.1 + 10 * 0.02)]


def test_an_overlap_costs_what_was_measured() -> None:
    """While both servers work each keeps its share; alone again it has all of its speed."""
    shared = Contention((Overlap(1, 1, 0.5, 0.25),))
    both = pair(curve((1, 0.01), **FREE), curve((1, 0.01), **FREE), shared)
    run = Simulation(both, make_policy("round-robin")).play([Call(0, 1, 101), Call(0, 1, 101)])
    ended = dict(zip(run.backend, run.ended, strict=True))
    # The speculative one is done at 2 s; by then the baseline has done half a second's work of 1 s.
    assert ended[SPEC] == pytest.approx(2.0)
    assert ended[BASE] == pytest.approx(2.5)


def test_a_cap_queues_in_order() -> None:
    """Beyond the cap requests wait for a place, first come, first served."""
    servers = curve((1, 0.01), max_running=1, **FREE)
    run = Simulation(pair(servers), ONLY[SPEC]).play([Call(0, 1, 101)] * 3)
    assert run.ended == [pytest.approx(1.0), pytest.approx(2.0), pytest.approx(3.0)]


@pytest.mark.parametrize("concurrency", [1, 8, 32, 64])
@pytest.mark.parametrize("prefill", [0.0, 1 / 45_000])
def test_a_closed_loop_reproduces_its_curve(concurrency: int, prefill: float) -> None:
    """So many requests in flight give the tokens/s that the curve says of that level, within 2 %."""
    servers = curve((1, 0.005), (16, 0.006), (64, 0.01), prefill_s_per_token=prefill)
    sizes = uniform_sizes(256, 64, 192, random.Random(1))
    run = Simulation(pair(servers), ONLY[SPEC]).keep(ClosedLoop(concurrency, 40.0), sizes)
    inside = [i for i, end in enumerate(run.ended) if 5.0 <= end < 40.0]
    rate = sum(run.output[i] for i in inside) / 35.0
    assert rate == pytest.approx(servers.closed_loop_tok_s(concurrency, 256, 128), rel=0.02)


def test_a_ramp_keeps_its_levels() -> None:
    """A closed load that falls lets requests end without replacing them."""
    servers = curve((1, 0.01), **FREE)
    sizes: Iterator[Size] = iter(lambda: Size(1, 101), None)
    run = Simulation(pair(servers), ONLY[SPEC]).keep(Ramp((4, 1), 10.0), sizes)

    def at(now: float) -> int:
        return sum(s <= now < e for s, e in zip(run.started, run.ended, strict=True))

    assert [at(0.5), at(9.5), at(12.5), at(19.5)] == [4, 4, 1, 1]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_memoryless_arrivals_give_the_closed_form(share: float) -> None:
    """The mean number in flight under Poisson arrivals is that of the processor-sharing queue."""
    model = arm_pair("topk1-2.0")
    table = speeds([level[:2] for level in levels_of(model.baseline.curve, 0, 128)])
    offered = share * max(table)
    chance = random.Random(7)
    sizes = uniform_sizes(1, 64, 192, chance)
    load = poisson_calls(offered / 128.0, 900.0, sizes, chance)
    run = Simulation(model, ONLY[BASE]).play(load)
    judged = [i for i, at in enumerate(run.started) if at >= 30.0]
    mean = sum(run.ended[i] - run.started[i] for i in judged) / (900.0 - 30.0)
    assert mean == pytest.approx(in_flight(table, offered), rel=0.1)


@pytest.mark.parametrize("prompt", [0, 500])
def test_events_agree_with_steps(prompt: int) -> None:
    """The run from event to event gives the times of the step-by-step batch, within 3 % of the mean."""
    servers = curve((1, 0.005), (64, 0.02), prefill_s_per_token=1e-4, tokens_per_step=1.7)
    chance = random.Random(3)
    load = list(poisson_calls(12.0, 60.0, uniform_sizes(prompt + 1, 50, 150, chance), chance))
    run = Simulation(pair(servers), ONLY[SPEC]).play(load)
    batch, now = ContinuousBatch(servers, max_running=4096), 0.0
    ended: dict[int, float] = {}
    keys: dict[int, int] = {}
    left = iter(load)
    following = next(left, None)
    while following is not None or not batch.idle:
        while following is not None and (following.at <= now or batch.idle):
            now = max(now, following.at)
            sequence = batch.submit(following.prompt, following.output)
            assert sequence is not None
            keys[sequence.key] = len(keys)
            following = next(left, None)
        step = batch.begin()
        if step is None:
            continue
        now += step.seconds
        ended.update({keys[each.key]: now for each in batch.finish() if each.finished})
    stepped = [ended[i] - call.at for i, call in enumerate(load)]
    fluid = [e - s for s, e in zip(run.started, run.ended, strict=True)]
    assert statistics.fmean(fluid) == pytest.approx(statistics.fmean(stepped), rel=0.03)
    assert sorted(fluid)[-20] == pytest.approx(sorted(stepped)[-20], rel=0.06)


def test_the_same_seed_gives_the_same_run() -> None:
    """Two runs with one seed are equal to the last digit, another seed gives another run."""
    model = arm_pair("topk1-2.0")
    spread = PairModel(
        speculative=ServerModel(
            curve=model.speculative.curve, acceptance=Acceptance(2.0, spread=0.3)
        ),
        baseline=model.baseline,
        contention=model.contention,
    )
    rows = shipped_trace()

    def ended(seed: int) -> list[float]:
        policy = make_policy("least-in-flight")
        return Simulation(spread, policy, seed=seed).play(trace_calls(rows, 4, 30)).ended

    assert ended(1) == ended(1)
    assert ended(1) != ended(2)


def test_virtual_time_is_much_faster_than_real_time() -> None:
    """Ten minutes of the trace at scale 6 take less than a hundredth of that."""
    rows = shipped_trace()
    simulation = Simulation(arm_pair("topk1-2.0"), make_policy("least-in-flight"), telemetry_s=0.2)
    start = time.process_time()
    run = simulation.play(trace_calls(rows, 6, 120))
    took = time.process_time() - start
    assert len(run) > 2000
    assert took < 120 / 100


def test_prefixes_stay_where_they_are() -> None:
    """A conversation's next turn prefills only what its server has not seen; the other has nothing."""
    talk = Call(0.0, 1000, 100, 1, (Turn(1.0, 50, 100), Turn(1.0, 50, 100)))
    servers = curve((1, 0.001), prefill_s_per_token=1e-5)
    cached = PairModel(
        speculative=ServerModel(curve=servers, cache_tokens=1e6),
        baseline=ServerModel(curve=servers, cache_tokens=1e6),
    )
    stays = Simulation(cached, ONLY[SPEC]).play([talk])
    assert stays.prompt == [1000, 1150, 1300]
    assert stays.prefilled == 1000 + 50 + 50
    moves = Simulation(cached, make_policy("round-robin")).play([talk])
    assert (
        moves.prefilled == 1000 + 1150 + 200
    )  # the third turn finds what its server has of the first
    none = Simulation(pair(servers), ONLY[SPEC]).play([talk])
    assert none.prefilled == 1000 + 1150 + 1300


def test_a_full_cache_forgets_the_oldest() -> None:
    """Beyond the cache's tokens the conversation that was silent longest is computed again."""
    servers = curve((1, 0.001), prefill_s_per_token=1e-5)
    model = PairModel(
        speculative=ServerModel(curve=servers, cache_tokens=1500.0),
        baseline=ServerModel(curve=servers),
    )
    later = (Turn(10.0, 10, 100),)
    run = Simulation(model, ONLY[SPEC]).play(
        [Call(0, 900, 100, 1, later), Call(5, 900, 100, 2, later)]
    )
    # The first was dropped for the second, and the second for the first's next turn.
    assert run.prefilled == 900 + 900 + 1010 + 1010


def test_conversations_keep_the_rate() -> None:
    """Opened at a rate divided by the mean number of turns, they ask about as many requests."""
    chance = random.Random(5)
    opened = poisson_calls(2.0, 400.0, uniform_sizes(100, 50, 50, chance), chance)
    load = list(conversation_calls(opened, chance, turns=4.0, think_s=2.0, share=0.2))
    run = Simulation(pair(curve()), ONLY[SPEC]).play(load)
    assert len(run) / len(load) == pytest.approx(4.0, rel=0.15)
    assert sorted(run.started) == run.started


def test_acceptance_drifts() -> None:
    """The mean moves straight between the given moments, and stays within what is possible."""
    drifting = Acceptance(2.0, drift=((10.0, 1.0), (20.0, 0.4)))
    assert [drifting.at(t) for t in (0, 10, 15, 20, 99)] == pytest.approx([2, 2, 1.4, 1, 1])
    chance = random.Random(1)
    spread = Acceptance(2.5, spread=0.2)
    drawn = [spread.of_request(0.0, chance) for _ in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(2.5, rel=0.02)
    assert statistics.stdev(drawn) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    "fields", [{"mean": 0.9}, {"mean": 2, "spread": -1}, {"mean": 2, "drift": ((0, 0),)}]
)
def test_no_acceptance(fields: dict[str, Any]) -> None:
    """An acceptance below 1, a negative spread and a factor of 0 are refused."""
    with pytest.raises(ValueError, match=r"acceptance is|drift is"):
        Acceptance(**fields)


def test_the_trace_is_played_faster() -> None:
    """A scale divides the gaps, and a trace that ends starts over."""
    rows = [Row(0.0, 1, 1), Row(10.0, 2, 2)]
    assert [call.at for call in trace_calls(rows, 2.0, 16.0)] == [0.0, 5.0, 10.0, 15.0]
    changing = [call.at for call in trace_calls(rows, steps((1.0, 10.0), 10.0), 13.0)]
    assert changing == [0.0, 10.0, 11.0, 12.0]
    with pytest.raises(ValueError, match="two arrivals"):
        next(trace_calls([Row(0.0, 1, 1)], 1.0, 1.0))


def test_shapes() -> None:
    """Steps hold each level for so long; a day rises from low to high and falls again."""
    assert [steps((1, 5), 10)(t) for t in (0, 9.9, 10, 19, 20)] == [1, 1, 5, 5, 1]
    assert [day(1, 7, 100)(t) for t in (0, 25, 50, 100)] == pytest.approx([1, 4, 7, 1])


def test_shares_between_measured_pairs() -> None:
    """Measured pairs give their shares, others something in between, and separate GPUs lose nothing."""
    found = Contention((Overlap(8, 8, 0.5, 0.4), Overlap(64, 64, 0.7, 0.6)))
    assert found.shares(8, 8) == (0.5, 0.4)
    assert found.shares(0, 8) == (1.0, 1.0)
    one, other = found.shares(20, 30)
    assert 0.5 < one < 0.7
    assert 0.4 < other < 0.6
    assert Contention().shares(9, 9) == (1.0, 1.0)
    with pytest.raises(ValueError, match="shares above 0"):
        Contention((Overlap(1, 1, 0.0, 1.0),))


def test_times_are_finite() -> None:
    """No time in a run is undefined, whatever the policy."""
    run = Simulation(arm_pair("topk4-2.8"), make_policy("round-robin")).play(
        trace_calls(shipped_trace(), 2, 20)
    )
    assert all(math.isfinite(x) for x in (*run.first, *run.ended))
    assert min(waits(run)) > 0
