"""The batch as a pure machine: who runs, who waits, what comes out, and that nothing gets lost."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loadtest.batching import ContinuousBatch, Kind
from loadtest.curve_files import shipped_curve
from loadtest.service import ServiceCurve
from router.load import Role

CURVE = ServiceCurve(
    label="test",
    source="made up",
    points=((1, 0.010), (11, 0.020)),
    prefill_s_per_token=1e-4,
    prefill_s_per_request=1e-3,
)


def batch(
    *, tokens: float = 1.0, cap: int = 8, queue: int | None = None, kv: int = 10_000
) -> ContinuousBatch:
    return ContinuousBatch(CURVE.accepting(tokens), max_running=cap, max_queued=queue, kv_tokens=kv)


def submit(b: ContinuousBatch, prompt: int, output: int) -> int:
    sequence = b.submit(prompt, output)
    assert sequence is not None
    return sequence.key


def step(b: ContinuousBatch) -> tuple[Any, Any, list[Any]]:
    begun = b.begin()
    assert begun is not None
    return begun.kind, begun.seconds, [tuple(emission) for emission in b.finish()]


def drain(b: ContinuousBatch) -> dict[int, int]:
    """Run to the end: the tokens that each request got."""
    got: dict[int, int] = {}
    while b.begin() is not None:
        for key, tokens, _ in b.finish():
            got[key] = got.get(key, 0) + tokens
    return got


def test_nothing_to_do() -> None:
    """An empty batch begins nothing."""
    b = batch()
    assert b.begin() is None
    assert b.idle


def test_first_token_comes_with_the_prefill() -> None:
    """A request's prefill takes its prompt's time and emits its first token."""
    b = batch()
    key = submit(b, 100, 3)
    assert step(b) == (Kind.PREFILL, pytest.approx(0.011), [(key, 1, False)])
    assert step(b) == (Kind.DECODE, 0.010, [(key, 1, False)])
    assert step(b) == (Kind.DECODE, 0.010, [(key, 1, True)])
    assert b.idle


def test_decode_time_is_the_curves() -> None:
    """A decode step of six requests takes what the curve says of six."""
    b = batch()
    for _ in range(6):
        submit(b, 10, 5)
    step(b)
    kind, seconds, emissions = step(b)
    assert (kind, len(emissions)) == (Kind.DECODE, 6)
    assert seconds == pytest.approx(0.015)


def test_prefill_goes_first() -> None:
    """A request that arrives is prefilled before those that run go on."""
    b = batch()
    first = submit(b, 10, 10)
    step(b)
    second = submit(b, 10, 10)
    assert step(b)[0] is Kind.PREFILL
    assert [key for key, _, _ in step(b)[2]] == [first, second]


def test_prefill_batches_are_bounded() -> None:
    """A prefill batch takes prompts up to its bound, and a longer prompt alone."""
    b = ContinuousBatch(CURVE, max_running=9, prefill_batch_tokens=100)
    for prompt in (60, 40, 1, 500, 10):
        submit(b, prompt, 2)
    sizes = []
    while (begun := b.begin()) is not None and begun.kind is Kind.PREFILL:
        sizes.append(begun.prompt_tokens)
        b.finish()
    assert sizes == [100, 1, 500, 10]


def test_cap() -> None:
    """More requests than the cap wait, and come in as others end."""
    b = batch(cap=2)
    keys = [submit(b, 1, output) for output in (2, 4, 2)]
    step(b)
    assert (b.running, b.waiting) == (2, 1)
    step(b)
    assert (b.running, b.waiting) == (1, 1)
    assert step(b) == (Kind.PREFILL, pytest.approx(0.0011), [(keys[2], 1, False)])


def test_queue() -> None:
    """A full queue refuses; free places in the batch are room too."""
    b = batch(cap=2, queue=1)
    assert [b.submit(1, 5) is not None for _ in range(4)] == [True, True, True, False]
    step(b)
    assert b.submit(1, 5) is None
    assert b.counters().refused == 2


def test_memory() -> None:
    """A request whose tokens do not fit waits, and so do the smaller ones behind it."""
    b = batch(kv=100)
    submit(b, 50, 30)
    submit(b, 20, 10)
    submit(b, 1, 1)
    step(b)
    assert (b.running, b.waiting, b.kv_used) == (1, 2, 51)
    assert b.waiting_tokens == 21


def test_accept_length_has_an_exact_mean() -> None:
    """With 2.5 tokens a step each request gets 2 or 3, and 2.5 on average."""
    b = batch(tokens=2.5)
    submit(b, 1, 1001)
    step(b)
    got = [step(b)[2][0][1] for _ in range(400)]
    assert set(got) == {2, 3}
    assert sum(got) == 1000


def test_requests_round_at_different_steps() -> None:
    """Requests with the same accept length do not all get their extra token in one step."""
    b = batch(tokens=2.5)
    for _ in range(8):
        submit(b, 1, 100)
    step(b)
    assert {tokens for _, tokens, _ in step(b)[2]} == {2, 3}


def test_last_step_is_cut() -> None:
    """A request gets exactly what it asked for, also if its last step would give more."""
    b = batch(tokens=4.0)
    key = submit(b, 1, 6)
    assert drain(b) == {key: 6}


def test_no_output() -> None:
    """A request for no tokens ends with its prefill."""
    b = batch()
    key = submit(b, 5, 0)
    assert step(b)[2] == [(key, 0, True)]
    assert b.idle


def test_abort_while_waiting() -> None:
    """A request that waits is gone at once."""
    b = batch(cap=1)
    submit(b, 1, 5)
    key = submit(b, 1, 5)
    assert b.abort(key)
    assert b.waiting == 1
    assert not b.abort(key)


def test_abort_while_running() -> None:
    """A request that runs is gone when its step ends, and gets nothing from it."""
    b = batch()
    key = submit(b, 10, 5)
    other = submit(b, 10, 5)
    step(b)
    b.begin()
    assert b.abort(key)
    assert b.running == 2
    assert [tuple(emission) for emission in b.finish()] == [(other, 1, False)]
    assert (b.running, b.kv_used) == (1, 12)


def test_abort_during_the_prefill_of_another() -> None:
    """A request that sits a prefill out and is aborted meanwhile is gone when that ends."""
    b = batch()
    key = submit(b, 10, 5)
    step(b)
    submit(b, 20, 5)
    begun = b.begin()
    assert begun is not None
    assert begun.kind is Kind.PREFILL
    b.abort(key)
    b.finish()
    assert (b.running, b.kv_used) == (1, 21)


def test_abort_between_steps() -> None:
    """With no step in progress an abort frees at once."""
    b = batch()
    key = submit(b, 10, 5)
    step(b)
    b.abort(key)
    assert b.idle
    assert b.kv_used == 0


def test_misuse() -> None:
    """Steps come one after the other, and what can never be is refused."""
    b = batch()
    with pytest.raises(RuntimeError, match="begin one first"):
        b.finish()
    submit(b, 1, 1)
    b.begin()
    with pytest.raises(RuntimeError, match="finish it first"):
        b.begin()
    with pytest.raises(ValueError, match="never fit"):
        b.submit(9_999, 2)
    with pytest.raises(ValueError, match="at least 0"):
        b.submit(-1, 2)
    with pytest.raises(ValueError, match="max_running=0"):
        batch(cap=0)


def test_counters() -> None:
    """The counters tell what went through."""
    b = batch(tokens=2.0)
    submit(b, 10, 5)
    submit(b, 20, 5)
    drain(b)
    total = b.counters()
    assert (total.finished, total.aborted, total.refused) == (2, 0, 0)
    assert (total.prefill_steps, total.decode_steps, total.verify_calls) == (1, 2, 4)
    assert (total.prompt_tokens, total.output_tokens, total.decode_tokens) == (30, 10, 8)


def closed_loop(curve: ServiceCurve, concurrency: int, outputs: list[int], prompt: int) -> float:
    """Output tokens/s of a closed loop in virtual time, dispatch included."""
    b = ContinuousBatch(curve, max_running=256, kv_tokens=10**9)
    now, tokens, at = 0.0, 0, 0
    arrivals = [0.0] * concurrency
    horizon = 20.0
    while now < horizon:
        while arrivals and min(arrivals) <= now:
            arrivals.remove(min(arrivals))
            submit(b, prompt, outputs[at % len(outputs)])
            at += 1
        begun = b.begin()
        if begun is None:
            now = min(arrivals)
            continue
        now += begun.seconds
        for emission in b.finish():
            tokens += emission.tokens
            if emission.finished:
                arrivals.append(now + curve.dispatch_s)
    return tokens / now


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("concurrency", [1, 8, 32, 96])
def test_closed_loop_gives_the_sweep_back(role: Role, concurrency: int) -> None:
    """In virtual time the measured server's batch does what its curve predicts for that load.

    The difference is the batch's own: fewer than C requests run while others are dispatched.
    """
    curve = shipped_curve("h200-topk4", role)
    outputs = [64 + 37 * i % 129 for i in range(128)]
    mean = round(statistics.fmean(outputs))
    predicted = curve.closed_loop_tok_s(concurrency, 256, mean)
    assert closed_loop(curve, concurrency, outputs, 256) == pytest.approx(predicted, rel=0.06)


requests = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=20)


@given(requests, st.floats(1.0, 5.0), st.integers(1, 6))
def test_tokens_are_conserved(wanted: list[tuple[int, int]], tokens: float, cap: int) -> None:
    """Every request gets all its tokens, once, whatever the cap and the accept length."""
    b = batch(tokens=tokens, cap=cap, kv=400)
    keys = [submit(b, *one) for one in wanted]
    got = drain(b)
    assert got == dict(zip(keys, (output for _, output in wanted), strict=True))
    total = b.counters()
    assert total.output_tokens == sum(output for _, output in wanted)
    assert total.prompt_tokens == sum(prompt for prompt, _ in wanted)
    assert (total.kv_used, total.running, total.waiting) == (0, 0, 0)


@given(requests, st.integers(1, 6))
def test_first_come_first_served(wanted: list[tuple[int, int]], cap: int) -> None:
    """Requests begin in the order in which they came."""
    b = batch(cap=cap, kv=400)
    keys = [submit(b, *one) for one in wanted]
    began = []
    while (begun := b.begin()) is not None:
        if begun.kind is Kind.PREFILL:
            began += [sequence.key for sequence in begun.sequences]
        b.finish()
    assert began == keys


class AnyOrder(RuleBasedStateMachine):
    """Submits, aborts and steps in any order; a plain model of who is where beside it."""

    @initialize(cap=st.integers(1, 5), queue=st.none() | st.integers(0, 4), tokens=st.floats(1, 4))
    def start(self, cap: int, queue: int | None, tokens: float) -> None:
        self.cap = cap
        self.queue = queue
        self.batch = batch(tokens=tokens, cap=cap, queue=queue, kv=200)
        self.left: dict[int, int] = {}  # tokens that each live request still has to get
        self.aborted = self.ended = 0
        self.working = False

    @rule(prompt=st.integers(0, 60), output=st.integers(0, 40))
    def submit(self, prompt: int, output: int) -> None:
        free = self.cap - self.batch.running
        sequence = self.batch.submit(prompt, output)
        full = self.queue is not None and self.batch.waiting - free >= self.queue
        if sequence is None:
            assert full
        else:
            self.left[sequence.key] = output

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.left)))
        assert self.batch.abort(key)
        assert not self.batch.abort(key)
        del self.left[key]
        self.aborted += 1

    @precondition(lambda self: not self.working)
    @rule()
    def begin(self) -> None:
        self.working = self.batch.begin() is not None
        assert self.working == bool(self.batch.running)

    @precondition(lambda self: self.working)
    @rule()
    def finish(self) -> None:
        self.working = False
        for key, tokens, finished in self.batch.finish():
            self.left[key] -= tokens
            assert self.left[key] >= 0
            assert finished == (self.left[key] == 0)
            if finished:
                del self.left[key]
                self.ended += 1

    @invariant()
    def counts_agree(self) -> None:
        total = self.batch.counters()
        assert (total.aborted, total.finished) == (self.aborted, self.ended)
        assert self.batch.running <= self.cap
        assert 0 <= self.batch.kv_used <= 200
        inside = self.batch.running + self.batch.waiting
        assert inside >= len(self.left)
        if not self.working:
            assert inside == len(self.left)
        if not (self.left or self.working):
            assert self.batch.idle
            assert self.batch.kv_used == 0


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
