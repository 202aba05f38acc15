"""Which backend, and why: tables, whole sequences of requests, and properties."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from router.agreement import agrees
from router.config import load_settings
from router.frontier import Frontier, Scope
from router.load import BackendLoad, Lease, LoadSnapshot, LoadTracker, PolicyMemory, Role, Telemetry
from router.policies import configured_policy, make_frontier
from router.policy import (
    Decision,
    Fences,
    FixedPolicy,
    FrontierPolicy,
    LeastInFlightPolicy,
    Marks,
    Policy,
    Reason,
    RoundRobinPolicy,
)
from router.request import NOTHING_KNOWN, RequestInfo

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
INF = math.inf
NOW = 1000.0  # monotonic seconds
ON_SPEC = PolicyMemory(SPEC, NOW - 100.0)
ON_BASE = PolicyMemory(BASE, NOW - 100.0, NOW - 50.0)  # the dwell is long over
JUST_LEFT = PolicyMemory(BASE, NOW - 1.0, NOW - 1.0)
JUST_FELL = PolicyMemory(BASE, NOW - 100.0, NOW - 1.0)  # a long stay, above the edge until now
JUST_BEFORE = math.nextafter(NOW + 5.0, 0.0) - NOW  # the last moment of a dwell of 5 s
PINNED = {role: RequestInfo(pinned=role) for role in Role}
FENCED = RequestInfo(structured_output=True)


def load(role: Role, concurrency: int = 0, **more: Any) -> BackendLoad:
    return BackendLoad(role, **({"in_flight": concurrency} | more))


def snap(
    n: int = 0,
    m: int = 0,
    memory: PolicyMemory = ON_SPEC,
    spec: dict[str, Any] | None = None,
    base: dict[str, Any] | None = None,
    now: float = NOW,
) -> LoadSnapshot:
    return LoadSnapshot(now, load(SPEC, n, **(spec or {})), load(BASE, m, **(base or {})), memory)


def decide(policy: Policy, snapshot: LoadSnapshot, info: RequestInfo = NOTHING_KNOWN) -> Decision:
    return policy.decide(snapshot, info)


def line(k: float = 8, scope: Scope = "total", **more: Any) -> FrontierPolicy:
    return FrontierPolicy(make_frontier(k, scope), **more)


def arrive(
    policy: Policy, tracker: LoadTracker, now: float = NOW, info: RequestInfo = NOTHING_KNOWN
) -> tuple[Decision, Lease]:
    """Decide and count in one step, as an exchange does."""
    decision = policy.decide(tracker.snapshot(now), info)
    assert decision.backend is not None
    return decision, tracker.lease(decision.backend, now, decision.memory)


# ---------------------------------------------------------------------- K is the most that run


@pytest.mark.parametrize("scope", ["total", "speculative"])
@pytest.mark.parametrize("k", [1, 2, 8, 32])
def test_exactly_k_of_a_burst_speculate(scope: Scope, k: int) -> None:
    """Of arrivals one after another, the first K go to the speculative backend and no other."""
    policy, tracker = line(k, scope), LoadTracker()
    decisions = [arrive(policy, tracker)[0] for _ in range(50)]
    assert [d.backend for d in decisions] == [SPEC] * k + [BASE] * (50 - k)
    assert [d.reason for d in decisions[:k]] == [Reason.BELOW_THRESHOLD] * k
    assert {d.reason for d in decisions[k:]} == {Reason.AT_THRESHOLD}
    assert [d.n + d.m for d in decisions] == list(range(50))


@pytest.mark.parametrize(
    ("k", "most", "reasons"),
    [
        (0, 0, {Reason.NEVER}),
        (0.5, 0, {Reason.NEVER}),
        (1, 1, {Reason.BELOW_THRESHOLD, Reason.AT_THRESHOLD}),
        (2.5, 2, {Reason.BELOW_THRESHOLD, Reason.AT_THRESHOLD}),
        (INF, 20, {Reason.ALWAYS}),
    ],
)
def test_the_odd_thresholds(k: float, most: int, reasons: set[Reason]) -> None:
    """A threshold of 0 is never, 1 lets one run, a fraction its floor, infinity everything."""
    policy, tracker = line(k), LoadTracker()
    decisions = [arrive(policy, tracker)[0] for _ in range(20)]
    assert [d.backend for d in decisions].count(SPEC) == most
    assert {d.reason for d in decisions} == reasons


@pytest.mark.parametrize("scope", ["total", "speculative"])
def test_the_request_being_decided_is_not_counted(scope: Scope) -> None:
    """The first request of an idle pair is decided at 0/0, and the second sees it."""
    policy, tracker = line(1, scope), LoadTracker()
    first, lease = arrive(policy, tracker)
    second, _ = arrive(policy, tracker)
    assert (first.n, first.m, first.backend) == (0, 0, SPEC)
    assert (second.n, second.m, second.backend) == (1, 0, BASE)
    lease.release(NOW)


def test_scope_total_counts_both_and_scope_speculative_one() -> None:
    """Work on the baseline fills a total of K, and not a speculative K."""
    assert decide(line(8, "total"), snap(2, 6)).reason is Reason.AT_THRESHOLD
    assert decide(line(8, "total"), snap(2, 5)).backend is SPEC
    assert decide(line(8, "speculative"), snap(2, 600)).backend is SPEC
    assert decide(line(8, "speculative"), snap(8, 0)).reason is Reason.AT_THRESHOLD


def test_foreign_requests_count() -> None:
    """Other clients' requests fill the line as our own do."""
    decision = decide(line(8), snap(spec={"foreign": 5}, base={"foreign": 3}))
    assert (decision.n, decision.m, decision.reason) == (5, 3, Reason.AT_THRESHOLD)


def test_pinned_requests_count_for_others() -> None:
    """Requests pinned to the speculative backend take places under the line."""
    policy, tracker = line(3), LoadTracker()
    for _ in range(2):
        arrive(policy, tracker, info=PINNED[SPEC])
    assert [arrive(policy, tracker)[0].backend for _ in range(3)] == [SPEC, BASE, BASE]


@settings(deadline=None)
@given(k=st.integers(0, 20), ends=st.lists(st.booleans(), max_size=120), data=st.data())
def test_no_more_than_k_ever_run(k: int, ends: list[bool], data: st.DataObject) -> None:
    """Whatever the order of arrivals and ends, never more than K run on the speculative backend."""
    policy, tracker = line(k, band=0.0, dwell=0.0), LoadTracker()
    leases: list[Lease] = []
    for end in ends:
        if end and leases:
            leases.pop(data.draw(st.integers(0, len(leases) - 1))).release(NOW)
            continue
        total = tracker.in_flight
        decision, lease = arrive(policy, tracker)
        leases.append(lease)
        assert (decision.backend is SPEC) is (total < k)
        assert tracker.speculative.in_flight <= k


# ---------------------------------------------------------------------- the band and the dwell


@pytest.mark.parametrize(
    ("memory", "n", "m", "reason"),
    [
        (ON_SPEC, 7, 2, Reason.BELOW_THRESHOLD),
        (ON_SPEC, 9, 0, Reason.BELOW_THRESHOLD),
        (ON_SPEC, 10, 0, Reason.AT_THRESHOLD),
        (ON_SPEC, 5, 5, Reason.AT_THRESHOLD),
        (ON_SPEC, 0, 10, Reason.AT_THRESHOLD),
        (ON_BASE, 0, 10, Reason.AT_THRESHOLD),
        (ON_BASE, 0, 9, Reason.BAND),
        (ON_BASE, 0, 8, Reason.BAND),  # 8 is 10 x 0.8: not below it
        (ON_BASE, 3, 5, Reason.BAND),
        (ON_BASE, 0, 7, Reason.BELOW_THRESHOLD),
        (ON_BASE, 7, 0, Reason.BELOW_THRESHOLD),
        (ON_BASE, 0, 0, Reason.BELOW_THRESHOLD),
        (JUST_LEFT, 0, 10, Reason.AT_THRESHOLD),
        (JUST_LEFT, 0, 8, Reason.BAND),
        (JUST_LEFT, 0, 7, Reason.DWELL),
        (JUST_LEFT, 0, 0, Reason.DWELL),
        (JUST_FELL, 0, 10, Reason.AT_THRESHOLD),
        (JUST_FELL, 0, 8, Reason.BAND),
        (JUST_FELL, 0, 7, Reason.DWELL),
        (JUST_FELL, 7, 0, Reason.DWELL),
        (JUST_FELL, 0, 0, Reason.DWELL),
    ],
)
def test_leave_at_k_and_return_below_the_band(
    memory: PolicyMemory, n: int, m: int, reason: Reason
) -> None:
    """The line is left at K at once, and returned to after the dwell below K x (1 - band)."""
    decision = decide(line(10, band=0.2, dwell=5.0), snap(n, m, memory))
    assert decision.reason is reason
    assert decision.backend is (SPEC if reason is Reason.BELOW_THRESHOLD else BASE)


@pytest.mark.parametrize(
    ("scope", "n", "m", "reason"),
    [
        ("speculative", 8, 0, Reason.BAND),
        ("speculative", 7, 0, Reason.BELOW_THRESHOLD),
        ("speculative", 7, 500, Reason.BELOW_THRESHOLD),
        ("total", 7, 1, Reason.BAND),
        ("total", 7, 0, Reason.BELOW_THRESHOLD),
    ],
)
def test_the_band_is_of_what_is_compared(scope: Scope, n: int, m: int, reason: Reason) -> None:
    """For scope speculative the band is of n alone, for scope total of n + m."""
    assert decide(line(10, scope, band=0.2), snap(n, m, ON_BASE)).reason is reason


def test_a_band_of_a_table() -> None:
    """A table is left where it is reached, and the way back is the table drawn nearer."""
    policy = FrontierPolicy(Frontier.from_table((10, 9, 8, 6, 5, 4, 3)), band=0.2, dwell=0.0)
    assert decide(policy, snap(7, 2)).reason is Reason.BELOW_THRESHOLD
    assert decide(policy, snap(8, 2)).reason is Reason.AT_THRESHOLD
    assert decide(policy, snap(6, 2, ON_BASE)).reason is Reason.BAND
    assert decide(policy, snap(5, 2, ON_BASE)).reason is Reason.BELOW_THRESHOLD
    decision = decide(policy, snap(7, 2))
    assert (decision.frontier, decision.threshold) == (8, 8)


@pytest.mark.parametrize("stayed", [0.0, 3600.0])
@pytest.mark.parametrize(
    ("below", "reason"),
    [
        (0.0, Reason.DWELL),
        (4.999, Reason.DWELL),
        (JUST_BEFORE, Reason.DWELL),
        (5.0, Reason.BELOW_THRESHOLD),
        (5.001, Reason.BELOW_THRESHOLD),
    ],
)
def test_the_dwell_ends_on_time(below: float, reason: Reason, stayed: float) -> None:
    """The way back is open from `dwell` seconds after the load was last seen above the edge.

    How long the baseline side had lasted until then is no matter.
    """
    memory = PolicyMemory(BASE, NOW - stayed, NOW)
    assert decide(line(dwell=5.0), snap(0, 0, memory, now=NOW + below)).reason is reason


def test_leaving_never_waits() -> None:
    """The line is left at once, also right after a return."""
    memory = PolicyMemory(SPEC, NOW)
    decision = decide(line(8, dwell=1e9), snap(8, 0, memory))
    assert (decision.backend, decision.reason) == (BASE, Reason.AT_THRESHOLD)
    assert decision.memory == PolicyMemory(BASE, NOW, NOW)


# Each way to be seen at or above the edge, under `line(10, band=0.2)`.
ABOVE: list[tuple[int, dict[str, Any], Reason]] = [
    (10, {}, Reason.AT_THRESHOLD),
    (8, {}, Reason.BAND),
    (4, {"cap": 5}, Reason.BAND),  # of the cap: 5 x 0.8 is 4
    (5, {"cap": 5}, Reason.CAP),
    (10, {"cap": 5}, Reason.AT_THRESHOLD),
]


@pytest.mark.parametrize("memory", [ON_BASE, JUST_LEFT, JUST_FELL])
@pytest.mark.parametrize(("n", "spec", "reason"), ABOVE)
def test_the_dwell_counts_from_the_last_look_above(
    n: int, spec: dict[str, Any], reason: Reason, memory: PolicyMemory
) -> None:
    """Seen at the line, in the band or at the cap, the load starts the dwell anew."""
    policy = line(10, band=0.2, dwell=5.0)
    above = decide(policy, snap(n, 0, memory, spec))
    assert above.reason is reason
    assert above.memory == PolicyMemory(BASE, memory.since, NOW)
    early = decide(policy, snap(0, 0, above.memory, now=NOW + JUST_BEFORE))
    assert (early.backend, early.reason) == (BASE, Reason.DWELL)
    back = decide(policy, snap(0, 0, above.memory, now=NOW + 5.0))
    assert (back.backend, back.reason) == (SPEC, Reason.BELOW_THRESHOLD)


def test_waiting_does_not_lengthen_the_wait() -> None:
    """Looks below the edge leave the dwell as it is, however many there are before it ends."""
    policy = line(10, dwell=5.0)
    memory = decide(policy, snap(10, 0, ON_BASE)).memory
    for wait in (0.0, 0.001, 1.0, 2.5, 4.0, 4.999, JUST_BEFORE):
        decision = decide(policy, snap(7, 0, memory, now=NOW + wait))
        assert decision.reason is Reason.DWELL
        assert decision.memory is memory
    back = decide(policy, snap(7, 0, memory, now=NOW + 5.0))
    assert (back.backend, back.reason) == (SPEC, Reason.BELOW_THRESHOLD)
    assert back.memory == PolicyMemory(SPEC, NOW + 5.0)


@pytest.mark.parametrize(
    ("wait", "reason"),
    [(JUST_BEFORE, Reason.DWELL), (5.0, Reason.BELOW_THRESHOLD), (60.0, Reason.BELOW_THRESHOLD)],
)
def test_sparse_arrivals_return(wait: float, reason: Reason) -> None:
    """One arrival above the edge and the next below it, a dwell later: nothing else is needed."""
    policy, tracker = line(2, band=0.5, dwell=5.0), LoadTracker()
    leases = [arrive(policy, tracker, 0.0)[1] for _ in range(3)]
    assert tracker.memory == PolicyMemory(BASE, 0.0, 0.0)
    for lease in leases:
        lease.release(wait)
    decision, _ = arrive(policy, tracker, wait)
    assert (decision.n, decision.m, decision.reason) == (0, 0, reason)


def test_a_momentary_dip_does_not_return() -> None:
    """Requests that end in one step empty both servers for an instant: no way back, for a minute.

    Then the load stays away for a dwell, and there is one.
    """
    policy, tracker = line(4, band=0.5, dwell=5.0), LoadTracker()
    kept = [arrive(policy, tracker)[1] for _ in range(5)]
    assert tracker.memory == PolicyMemory(BASE, NOW, NOW)
    for lease in kept:
        lease.release(NOW)
    now = NOW
    for step in range(600):
        now = NOW + step * 0.1
        burst = [arrive(policy, tracker, now) for _ in range(6)]
        assert [d.n + d.m for d, _ in burst] == list(range(6))
        assert [d.reason for d, _ in burst] == [
            *[Reason.DWELL] * 2,
            *[Reason.BAND] * 2,
            *[Reason.AT_THRESHOLD] * 2,
        ]
        assert {d.backend for d, _ in burst} == {BASE}
        assert tracker.memory == PolicyMemory(BASE, NOW, now)
        for _, lease in burst:
            lease.release(now)
    early, lease = arrive(policy, tracker, now + 4.999)
    lease.release(now + 4.999)
    assert (early.n, early.m, early.reason) == (0, 0, Reason.DWELL)
    back, _ = arrive(policy, tracker, now + 5.001)
    assert (back.n, back.m, back.reason) == (0, 0, Reason.BELOW_THRESHOLD)
    assert back.memory == PolicyMemory(SPEC, now + 5.001)


def test_a_whole_visit_to_the_baseline() -> None:
    """Up to K, over it, down again, the dwell, and back: each step with its reason."""
    policy, tracker = line(4, band=0.5, dwell=5.0), LoadTracker()
    leases = [arrive(policy, tracker, NOW)[1] for _ in range(4)]
    over, last = arrive(policy, tracker, NOW)
    assert (over.reason, over.memory) == (Reason.AT_THRESHOLD, PolicyMemory(BASE, NOW, NOW))
    seen = []
    for wait in (1.0, 2.0, 6.0):
        leases.pop().release(NOW + wait)
        decision, lease = arrive(policy, tracker, NOW + wait)
        lease.release(NOW + wait)
        assert decision.memory == PolicyMemory(BASE, NOW, NOW + wait)
        seen.append((decision.n + decision.m, decision.reason))
    assert seen == [(4, Reason.AT_THRESHOLD), (3, Reason.BAND), (2, Reason.BAND)]
    last.release(NOW + 6.0)
    for wait in (6.0, 6.0 + JUST_BEFORE):
        decision, lease = arrive(policy, tracker, NOW + wait)
        lease.release(NOW + wait)
        assert (decision.n, decision.m, decision.reason) == (1, 0, Reason.DWELL)
        assert decision.memory == PolicyMemory(BASE, NOW, NOW + 6.0)
    back, _ = arrive(policy, tracker, NOW + 11.0)
    assert (back.n, back.m, back.reason) == (1, 0, Reason.BELOW_THRESHOLD)
    assert back.memory == PolicyMemory(SPEC, NOW + 11.0)


def test_the_first_request_of_all_may_speculate() -> None:
    """A router that has just started is on the speculative side and waits for nothing."""
    decision = decide(line(8, dwell=60.0), LoadTracker().snapshot(0.0))
    assert (decision.backend, decision.reason) == (SPEC, Reason.BELOW_THRESHOLD)
    assert decision.memory == PolicyMemory()


LEFT = PolicyMemory(BASE, NOW, NOW)
BACK = PolicyMemory(SPEC, NOW)


@pytest.mark.parametrize(
    ("k", "memory", "n", "cap", "reason", "after"),
    [
        (10, ON_SPEC, 9, None, Reason.BELOW_THRESHOLD, ON_SPEC),
        (INF, ON_SPEC, 99, None, Reason.ALWAYS, ON_SPEC),
        (10, ON_SPEC, 10, None, Reason.AT_THRESHOLD, LEFT),
        (10, ON_SPEC, 5, 5, Reason.CAP, LEFT),
        (0, ON_SPEC, 0, None, Reason.NEVER, LEFT),
        (10, ON_BASE, 10, None, Reason.AT_THRESHOLD, PolicyMemory(BASE, NOW - 100.0, NOW)),
        (10, ON_BASE, 8, None, Reason.BAND, PolicyMemory(BASE, NOW - 100.0, NOW)),
        (10, ON_BASE, 4, 5, Reason.BAND, PolicyMemory(BASE, NOW - 100.0, NOW)),
        (10, ON_BASE, 5, 5, Reason.CAP, PolicyMemory(BASE, NOW - 100.0, NOW)),
        (0, ON_BASE, 0, None, Reason.NEVER, PolicyMemory(BASE, NOW - 100.0, NOW)),
        (10, JUST_LEFT, 8, None, Reason.BAND, PolicyMemory(BASE, NOW - 1.0, NOW)),
        (10, JUST_LEFT, 7, None, Reason.DWELL, JUST_LEFT),
        (10, JUST_FELL, 7, None, Reason.DWELL, JUST_FELL),
        (10, JUST_FELL, 3, 5, Reason.DWELL, JUST_FELL),
        (10, ON_BASE, 7, None, Reason.BELOW_THRESHOLD, BACK),
        (10, ON_BASE, 3, 5, Reason.BELOW_THRESHOLD, BACK),
        (INF, JUST_FELL, 99, None, Reason.ALWAYS, BACK),
    ],
)
def test_what_is_remembered(
    k: float, memory: PolicyMemory, n: int, cap: int | None, reason: Reason, after: PolicyMemory
) -> None:
    """`since` changes with the side, `above_at` with each look above the edge, and nothing else.

    Where neither does, what is remembered is the very same value.
    """
    decision = decide(line(k, band=0.2, dwell=5.0), snap(n, 0, memory, spec={"cap": cap}))
    assert (decision.reason, decision.memory) == (reason, after)
    assert (decision.memory is memory) is (memory == after)


# ---------------------------------------------------------------------- the cap


@pytest.mark.parametrize(
    ("n", "cap", "memory", "reason", "in_force"),
    [
        (3, 4, ON_SPEC, Reason.BELOW_THRESHOLD, 4),
        (4, 4, ON_SPEC, Reason.CAP, 4),
        (9, 4, ON_SPEC, Reason.CAP, 4),
        (10, 4, ON_SPEC, Reason.AT_THRESHOLD, 4),
        (9, 10, ON_SPEC, Reason.BELOW_THRESHOLD, 10),
        (10, 10, ON_SPEC, Reason.AT_THRESHOLD, 10),
        (9, 48, ON_SPEC, Reason.BELOW_THRESHOLD, 10),
        (0, 0, ON_SPEC, Reason.CAP, 0),
        (4, 5, ON_BASE, Reason.BAND, 5),  # 5 x 0.8 is 4
        (3, 5, ON_BASE, Reason.BELOW_THRESHOLD, 5),
        (3, 5, JUST_LEFT, Reason.DWELL, 5),
        (3, 5, JUST_FELL, Reason.DWELL, 5),
    ],
)
def test_the_line_never_exceeds_the_cap(
    n: int, cap: int, memory: PolicyMemory, reason: Reason, in_force: float
) -> None:
    """A cap below the line takes its place, with reason cap, and with its own band."""
    decision = decide(line(10, band=0.2), snap(n, 0, memory, spec={"cap": cap}))
    assert (decision.reason, decision.frontier) == (reason, in_force)
    assert decision.threshold == 10


def test_the_caps_edge_is_as_on_paper() -> None:
    """The band of a cap of 10 at 0.7 ends at 3, not at a float above it."""
    policy = line(100, band=0.7)
    assert decide(policy, snap(3, 0, ON_BASE, spec={"cap": 10})).reason is Reason.BAND
    assert decide(policy, snap(2, 0, ON_BASE, spec={"cap": 10})).backend is SPEC


def test_the_cap_of_the_baseline_is_no_matter() -> None:
    """Only the speculative server's cap bounds the line."""
    assert decide(line(10), snap(0, 5, base={"cap": 1})).backend is SPEC


def test_always_still_knows_the_cap() -> None:
    """With an infinite line the cap is the line, and there is no way back to wait for."""
    assert decide(line(INF), snap(48, 0, spec={"cap": 48})).reason is Reason.CAP
    back = decide(line(INF), snap(47, 0, JUST_LEFT, spec={"cap": 48}))
    assert (back.backend, back.reason, back.frontier) == (SPEC, Reason.ALWAYS, 48)
    assert back.threshold == INF


# ---------------------------------------------------------------------- order of the cases


@pytest.mark.parametrize("policy", [line(8), FixedPolicy(BASE), LeastInFlightPolicy(),
                                    RoundRobinPolicy()])  # fmt: skip
@pytest.mark.parametrize("role", list(Role))
def test_pinning_comes_first(policy: Policy, role: Role) -> None:
    """A pinned request goes where it is pinned, against load, marks and every policy."""
    full = {"queued": 9, "contended": True, "token_usage": 1.0, "cap": 1}
    decision = decide(policy, snap(99, 99, spec=full, base=full), PINNED[role])
    assert (decision.backend, decision.reason) == (role, Reason.PINNED)


@pytest.mark.parametrize("policy", [line(8), FixedPolicy(BASE), LeastInFlightPolicy(),
                                    RoundRobinPolicy()])  # fmt: skip
@pytest.mark.parametrize("role", list(Role))
def test_pinned_to_what_is_unavailable_is_nowhere(policy: Policy, role: Role) -> None:
    """A request pinned to an unavailable backend goes nowhere, never to the other one."""
    away = {"available": False}
    snapshot = snap(spec=away) if role is SPEC else snap(base=away)
    decision = decide(policy, snapshot, PINNED[role])
    assert (decision.backend, decision.reason) == (None, Reason.PINNED)


@pytest.mark.parametrize("policy", [line(0), line(8), line(INF), FixedPolicy(BASE),
                                    FixedPolicy(SPEC), LeastInFlightPolicy(),
                                    RoundRobinPolicy()])  # fmt: skip
@pytest.mark.parametrize(("spec", "base"), [(True, False), (False, True), (False, False)])
def test_only_an_available_backend_gets_work(policy: Policy, spec: bool, base: bool) -> None:
    """With one backend available it is the one, with none there is none, whatever the policy."""
    expected = SPEC if spec else BASE if base else None
    for memory in (PolicyMemory(SPEC), PolicyMemory(BASE)):  # round robin goes by it
        snapshot = snap(0, 0, memory, spec={"available": spec}, base={"available": base})
        decision = decide(policy, snapshot)
        assert decision.backend is expected
        if isinstance(policy, FrontierPolicy) or expected is None:
            assert decision.reason is Reason.UNAVAILABLE


@pytest.mark.parametrize(
    ("fences", "info", "reason"),
    [
        (Fences(structured_output=True), RequestInfo(structured_output=True),
         Reason.FENCE_STRUCTURED),
        (Fences(logprobs=True), RequestInfo(logprobs=True), Reason.FENCE_LOGPROBS),
        (Fences(choices=True), RequestInfo(choices=2), Reason.FENCE_CHOICES),
        (Fences(choices=True), RequestInfo(choices=1), None),
        (Fences(choices=True), RequestInfo(choices=0), None),
        (Fences(prompt_bytes=100), RequestInfo(prompt_bytes=101), Reason.FENCE_PROMPT),
        (Fences(prompt_bytes=100), RequestInfo(prompt_bytes=100), None),
        (Fences(prompt_bytes=0), RequestInfo(prompt_bytes=1), Reason.FENCE_PROMPT),
        (Fences(), RequestInfo(structured_output=True, logprobs=True, choices=9,
                               prompt_bytes=10**9), None),
        (Fences(structured_output=True, logprobs=True, choices=True, prompt_bytes=1),
         NOTHING_KNOWN, None),
        (Fences(structured_output=True), RequestInfo(logprobs=True, choices=5), None),
    ],
)  # fmt: skip
def test_each_fence(fences: Fences, info: RequestInfo, reason: Reason | None) -> None:
    """A fence that is on keeps its kind of request on the baseline, and no other kind."""
    assert fences.match(info) is reason
    decision = decide(line(8, fences=fences), snap(), info)
    assert decision.reason is (reason or Reason.BELOW_THRESHOLD)
    assert decision.backend is (BASE if reason else SPEC)


def test_fences_come_before_load() -> None:
    """A fenced request goes to the baseline below the line, and though the baseline queues."""
    policy = line(INF, fences=Fences(structured_output=True))
    over = {"queued": 5, "contended": True}
    decision = decide(policy, snap(base=over), FENCED)
    assert (decision.backend, decision.reason) == (BASE, Reason.FENCE_STRUCTURED)


def test_availability_comes_before_fences() -> None:
    """A fence keeps nobody out when the baseline is down."""
    policy = line(8, fences=Fences(structured_output=True))
    decision = decide(policy, snap(base={"available": False}), FENCED)
    assert (decision.backend, decision.reason) == (SPEC, Reason.UNAVAILABLE)


OVER: list[tuple[dict[str, Any], Reason]] = [
    ({"contended": True}, Reason.CONTENDED),
    ({"queued": 3}, Reason.QUEUED),
    ({"token_usage": 0.91}, Reason.KV_CACHE),
    ({"contended": True, "queued": 3, "token_usage": 1.0}, Reason.CONTENDED),
    ({"queued": 3, "token_usage": 1.0}, Reason.QUEUED),
]
NOT_OVER: list[dict[str, Any]] = [
    {},
    {"queued": None, "token_usage": None},
    {"queued": 0, "token_usage": 0.0},
    {"queued": 2, "token_usage": 0.9},  # at its marks, not over them
]
MARKED = Marks(queued=2, kv_cache=0.9)


@pytest.mark.parametrize(("over", "reason"), OVER)
@pytest.mark.parametrize("well", NOT_OVER)
@pytest.mark.parametrize("side", list(Role))
def test_over_a_mark_sends_work_to_the_other(
    over: dict[str, Any], reason: Reason, well: dict[str, Any], side: Role
) -> None:
    """A backend over a mark passes new work to the other when that one is over none."""
    n = 0 if side is SPEC else 50
    one, other = (over, well) if side is SPEC else (well, over)
    decision = decide(line(8, marks=MARKED), snap(n, 0, spec=one, base=other))
    assert (decision.backend, decision.reason) == (side.other, reason)
    assert decision.memory.side is side  # a mark moves a request, not the side


@pytest.mark.parametrize("over", [over for over, _ in OVER])
@pytest.mark.parametrize("other", [over for over, _ in OVER])
@pytest.mark.parametrize("side", list(Role))
def test_both_over_a_mark_changes_nothing(
    over: dict[str, Any], other: dict[str, Any], side: Role
) -> None:
    """When both are over a mark the line decides: neither can help the other."""
    n = 0 if side is SPEC else 50
    decision = decide(line(8, marks=MARKED), snap(n, 0, spec=over, base=other))
    assert decision.backend is side
    assert decision.reason is (Reason.BELOW_THRESHOLD if side is SPEC else Reason.AT_THRESHOLD)


@pytest.mark.parametrize("well", NOT_OVER)
def test_at_a_mark_is_not_over_it(well: dict[str, Any]) -> None:
    """What is at a mark, or unknown, is not over it."""
    decision = decide(line(8, marks=MARKED), snap(spec=well, base=well))
    assert decision.reason is Reason.BELOW_THRESHOLD


# ---------------------------------------------------------------------- memory follows the load


@pytest.mark.parametrize("info", [PINNED[SPEC], PINNED[BASE], FENCED])
def test_every_request_evaluates_the_line(info: RequestInfo) -> None:
    """A pinned or fenced request that finds the line reached leaves it for all."""
    policy = line(8, fences=Fences(structured_output=True))
    assert decide(policy, snap(8, 0), info).memory == PolicyMemory(BASE, NOW, NOW)
    assert decide(policy, snap(0, 0, ON_BASE), info).memory == PolicyMemory(SPEC, NOW)


@pytest.mark.parametrize("info", [NOTHING_KNOWN, PINNED[SPEC], PINNED[BASE], FENCED])
@pytest.mark.parametrize(
    ("n", "memory", "after"),
    [
        (0, ON_SPEC, ON_SPEC),
        (7, ON_SPEC, ON_SPEC),
        (7, ON_BASE, PolicyMemory(BASE, NOW - 100.0, NOW)),  # in the band
        (8, JUST_FELL, PolicyMemory(BASE, NOW - 100.0, NOW)),
        (0, JUST_LEFT, JUST_LEFT),
        (0, JUST_FELL, JUST_FELL),
    ],
)
def test_the_mix_of_requests_leaves_no_trace(
    info: RequestInfo, n: int, memory: PolicyMemory, after: PolicyMemory
) -> None:
    """A pinned or fenced request leaves the side and the dwell as any other request does."""
    policy = line(8, fences=Fences(structured_output=True))
    found = decide(policy, snap(n, 0, memory), info).memory
    assert found == after
    assert (found is memory) is (memory == after)


def test_what_is_down_does_not_change_the_side() -> None:
    """Losing a backend is not load: after it is back, the side is what the load says."""
    away = {"available": False}
    for spec, base in ((away, {}), ({}, away)):
        assert decide(line(8), snap(0, 0, ON_SPEC, spec, base)).memory is ON_SPEC
        assert decide(line(8), snap(0, 0, JUST_FELL, spec, base)).memory is JUST_FELL
        seen = decide(line(8), snap(9, 0, ON_BASE, spec, base)).memory
        assert seen == PolicyMemory(BASE, NOW - 100.0, NOW)


# ---------------------------------------------------------------------- policies without a line


@pytest.mark.parametrize("role", list(Role))
def test_fixed_names_one(role: Role) -> None:
    """A fixed policy sends everything to its backend, whatever the load."""
    over = {"queued": 9, "contended": True}
    decision = decide(FixedPolicy(role), snap(99, 99, spec=over, base=over))
    assert (decision.backend, decision.reason) == (role, Reason.FIXED)
    assert (decision.frontier, decision.threshold) == (None, None)


FRESH = {"fresh": True}


@pytest.mark.parametrize(
    ("spec", "base", "backend", "numbers"),
    [
        ({"in_flight": 2} | FRESH, {"in_flight": 3} | FRESH, SPEC, (2, 3)),
        ({"in_flight": 3} | FRESH, {"in_flight": 2} | FRESH, BASE, (3, 2)),
        ({"in_flight": 2} | FRESH, {"in_flight": 2} | FRESH, SPEC, (2, 2)),
        ({"in_flight": 2, "foreign": 5} | FRESH, {"in_flight": 3} | FRESH, BASE, (7, 3)),
        # One is blind: both are compared by own in-flight, and those numbers are shown.
        ({"in_flight": 2, "foreign": 5} | FRESH, {"in_flight": 3}, SPEC, (2, 3)),
        ({"in_flight": 3}, {"in_flight": 2, "foreign": 5} | FRESH, BASE, (3, 2)),
        ({"in_flight": 2}, {"in_flight": 3}, SPEC, (2, 3)),
    ],
)
def test_least_in_flight_compares_one_unit(
    spec: dict[str, Any], base: dict[str, Any], backend: Role, numbers: tuple[int, int]
) -> None:
    """The lower number gets the request, a tie goes to the speculative, units are never mixed."""
    decision = decide(LeastInFlightPolicy(), snap(spec=spec, base=base))
    assert (decision.backend, (decision.n, decision.m)) == (backend, numbers)
    assert decision.reason is Reason.LEAST_IN_FLIGHT


def test_round_robin_takes_turns() -> None:
    """One and the other in turn, and pinned requests in between take no turn."""
    policy, tracker = RoundRobinPolicy(), LoadTracker()
    seen = []
    for _ in range(6):
        arrive(policy, tracker, info=PINNED[SPEC])
        seen.append(arrive(policy, tracker)[0].backend)
    assert seen in ([SPEC, BASE] * 3, [BASE, SPEC] * 3)


def test_round_robin_goes_on_past_a_backend_that_is_down() -> None:
    """While one is down the other gets all; afterwards turns are taken again."""
    policy, tracker = RoundRobinPolicy(), LoadTracker()
    tracker.set_usable(SPEC, usable=False)
    assert {arrive(policy, tracker)[0].backend for _ in range(4)} == {BASE}
    tracker.set_usable(SPEC, usable=True)
    assert Counter(arrive(policy, tracker)[0].backend for _ in range(4)) == {SPEC: 2, BASE: 2}


# ---------------------------------------------------------------------- reasons agree


def random_line(shape: str, k: float, table: tuple[float, ...]) -> Frontier:
    if shape == "table":
        return Frontier.from_table(table)
    return Frontier.total(k) if shape == "total" else Frontier.speculative_only(k)


thresholds = st.integers(0, 60).map(float) | st.sampled_from([0.0, 1.0, 2.5, INF])
frontiers = st.builds(
    random_line,
    st.sampled_from(["total", "speculative", "table"]),
    thresholds,
    st.builds(
        lambda line, falls: tuple(sorted(line, reverse=falls)),
        st.lists(thresholds, min_size=1, max_size=8),
        st.booleans(),
    ),
)
infos = st.builds(
    RequestInfo,
    structured_output=st.booleans(),
    logprobs=st.booleans(),
    choices=st.integers(0, 3),
    prompt_bytes=st.integers(0, 200),
    pinned=st.none() | st.sampled_from(Role),
) | st.just(NOTHING_KNOWN)


def loads(role: Role) -> st.SearchStrategy[BackendLoad]:
    return st.builds(
        BackendLoad,
        st.just(role),
        in_flight=st.integers(0, 70),
        foreign=st.integers(0, 10),
        available=st.integers(0, 9).map(bool),
        contended=st.integers(0, 5).map(lambda i: i == 0),
        queued=st.none() | st.integers(0, 3),
        token_usage=st.none() | st.floats(0.0, 1.0),
        cap=st.none() | st.integers(0, 70),
        fresh=st.booleans(),
    )


moments = st.floats(NOW - 10.0, NOW) | st.just(-INF)
snapshots = st.builds(
    LoadSnapshot,
    st.just(NOW),
    loads(SPEC),
    loads(BASE),
    st.builds(PolicyMemory, st.sampled_from(Role), moments, moments),
)
fences = st.builds(Fences, st.booleans(), st.booleans(), st.booleans(), st.just(100) | st.none())
bands = st.integers(0, 99).map(lambda percent: percent / 100)


@settings(max_examples=500, deadline=None)
@given(snapshot=snapshots, info=infos, frontier=frontiers, band=bands, fence=fences)
def test_every_decision_agrees_with_its_numbers(
    snapshot: LoadSnapshot, info: RequestInfo, frontier: Frontier, band: float, fence: Fences
) -> None:
    """Over any load, line, band, cap, mark, fence and memory, the reason follows from the numbers."""
    policy = FrontierPolicy(frontier, band=band, fences=fence)
    decision = policy.decide(snapshot, info)
    assert agrees(decision, band, frontier.scope)
    assert (decision.n, decision.m) == (
        snapshot.speculative.concurrency,
        snapshot.baseline.concurrency,
    )
    assert decision == policy.decide(snapshot, info)
    if decision.backend is not None:
        assert snapshot.of(decision.backend).available
    else:
        assert info.pinned or not (snapshot.speculative.available or snapshot.baseline.available)


@settings(deadline=None)
@given(
    snapshot=snapshots,
    info=infos,
    policy=st.sampled_from(
        [FixedPolicy(SPEC), FixedPolicy(BASE), LeastInFlightPolicy(), RoundRobinPolicy()]
    ),
)
def test_decisions_without_a_line_agree_too(
    snapshot: LoadSnapshot, info: RequestInfo, policy: Policy
) -> None:
    """The reasons of the policies without a line follow from their numbers as well."""
    decision = policy.decide(snapshot, info)
    assert agrees(decision, 0.2)
    assert (decision.frontier, decision.threshold) == (None, None)
    assert decision.memory == snapshot.memory or isinstance(policy, RoundRobinPolicy)


@settings(deadline=None)
@given(snapshot=snapshots, info=infos, frontier=frontiers, band=bands)
def test_the_backend_follows_from_the_reason(
    snapshot: LoadSnapshot, info: RequestInfo, frontier: Frontier, band: float
) -> None:
    """Told as the other backend's, a decision by load would not agree with its numbers."""
    decision = FrontierPolicy(frontier, band=band).decide(snapshot, info)
    free = {Reason.PINNED, Reason.UNAVAILABLE, Reason.CONTENDED, Reason.QUEUED, Reason.KV_CACHE}
    if decision.backend is None or decision.reason in free:
        return
    turned = msgspec.structs.replace(decision, backend=decision.backend.other)
    assert not agrees(turned, band, frontier.scope)


def say(
    reason: Reason,
    backend: Role | None,
    n: int = 0,
    m: int = 0,
    frontier: float | None = None,
    k: float | None = None,
    offered: float | None = None,
    gain: float | None = None,
) -> Decision:
    return Decision(backend, reason, n, m, frontier, PolicyMemory(), k, offered, gain)


def by_rule(
    reason: Reason,
    backend: Role | None,
    gain: float | None,
    n: int = 0,
    cap: float | None = None,
    offered: float | None = 900.0,
) -> Decision:
    """What a rule that decides by curves says."""
    return say(reason, backend, n, 3, cap, cap, offered, gain)


R = Reason
TOTAL, ALONE, TABLE = "total", "speculative", "table"
AGREEING = [
    (say(R.PREFIX, BASE, 7, 2, 8, 8), ALONE),  # near enough below the line
    (say(R.PREFIX, BASE, 2, 2, 8, 8), ALONE),
    (say(R.PREFIX, SPEC, 13, 2, 8, 8), ALONE),  # and above it
    (say(R.PREFIX, SPEC, 5, 0, 6, 8), ALONE),  # below a cap, within the band
    (by_rule(R.PREFIX, BASE, 0.5, offered=None), TOTAL),
    (by_rule(R.PREFIX, SPEC, -0.5, offered=None), TOTAL),
    (say(R.BELOW_THRESHOLD, SPEC, 7, 2, 8, 10), TOTAL),
    (say(R.AT_THRESHOLD, BASE, 8, 2, 8, 10), TOTAL),
    (say(R.AT_THRESHOLD, BASE, 0, 99, 0, 10), TOTAL),
    (say(R.AT_THRESHOLD, BASE, 10, 0, 10, 10), ALONE),
    (say(R.AT_THRESHOLD, BASE, 3, 7, 3, 3), TABLE),
    (say(R.BAND, BASE, 8, 0, 10, 10), TOTAL),
    (say(R.BAND, BASE, 4, 0, 5, 100), TOTAL),  # in the band of the cap
    (say(R.BAND, BASE, 8, 50, 10, 10), ALONE),
    (say(R.BAND, BASE, 1, 50, 10, 10), TABLE),
    (say(R.DWELL, BASE, 7, 0, 10, 10), TOTAL),
    (say(R.DWELL, BASE, 7, 99, 10, 10), ALONE),
    (say(R.DWELL, BASE, 9, 99, 10, 10), TABLE),
    (say(R.CAP, BASE, 4, 0, 4, 10), TOTAL),
    (say(R.CAP, BASE, 4, 0, 4, INF), TOTAL),
    (say(R.ALWAYS, SPEC, 999, 9, INF, INF), TOTAL),
    (say(R.ALWAYS, SPEC, 47, 9, 48, INF), ALONE),
    (say(R.NEVER, BASE, 0, 0, 0, 0), TOTAL),
    (say(R.PINNED, SPEC, 99, 0, 8, 8), TOTAL),
    (say(R.PINNED, None, 0, 0, 8, 8), TOTAL),
    (say(R.UNAVAILABLE, None), TOTAL),
    (say(R.UNAVAILABLE, SPEC, 99, 0, 8, 8), TOTAL),
    (say(R.FENCE_STRUCTURED, BASE, 0, 0, 8, 8), TOTAL),
    (say(R.FENCE_LOGPROBS, BASE, 0, 0, 8, 8), TOTAL),
    (say(R.FENCE_CHOICES, BASE, 0, 0, 8, 8), TOTAL),
    (say(R.FENCE_PROMPT, BASE, 9, 0, 8, 8), TOTAL),
    (say(R.CONTENDED, BASE, 7, 0, 8, 8), TOTAL),
    (say(R.QUEUED, SPEC, 9, 0, 8, 8), TOTAL),
    (say(R.KV_CACHE, BASE, 7, 0, 8, 8), ALONE),
    (say(R.FIXED, BASE), TOTAL),
    (say(R.ROUND_ROBIN, SPEC), TOTAL),
    (say(R.LEAST_IN_FLIGHT, SPEC, 3, 3), TOTAL),
    (say(R.LEAST_IN_FLIGHT, BASE, 3, 2), TOTAL),
    (say(R.REPLAY_CONNECT, BASE, 3, 2, 8, 8), TOTAL),
    (say(R.REPLAY_REFUSED, SPEC, 99, 2, 8, 8), TOTAL),
    (by_rule(R.FORECAST, SPEC, -2.0), TOTAL),
    (by_rule(R.FORECAST, BASE, 0.0), TOTAL),
    (by_rule(R.FORECAST_SWITCH, BASE, 0.1), TOTAL),
    (by_rule(R.FORECAST_UNSURE, SPEC, None, offered=0.0), TOTAL),
    (by_rule(R.DWELL, BASE, 3.0), TOTAL),
    (by_rule(R.CAP, BASE, None, 4, 4.0), TOTAL),
    (by_rule(R.FENCE_CHOICES, BASE, None), TOTAL),
    (by_rule(R.QUEUED, BASE, -1.0), TOTAL),
    (by_rule(R.JOIN, SPEC, 0.0, offered=None), TOTAL),
    (by_rule(R.JOIN, BASE, -0.1, offered=None), TOTAL),
]
CONTRADICTING = [
    (say(R.BELOW_THRESHOLD, SPEC, 8, 2, 8, 10), TOTAL),
    (say(R.BELOW_THRESHOLD, BASE, 7, 2, 8, 10), TOTAL),
    (say(R.BELOW_THRESHOLD, SPEC, 7, 2), TOTAL),  # without a line nothing is below it
    (say(R.BELOW_THRESHOLD, None, 7, 2, 8, 10), TOTAL),
    (say(R.BELOW_THRESHOLD, SPEC, 8, 2, 10, 10), TOTAL),  # F(2) is 8
    (say(R.BELOW_THRESHOLD, SPEC, 10, 0, 11, 10), ALONE),  # nor is F above K
    (say(R.AT_THRESHOLD, BASE, 7, 2, 8, 10), TOTAL),
    (say(R.AT_THRESHOLD, SPEC, 8, 2, 8, 10), TOTAL),
    (say(R.AT_THRESHOLD, BASE, 9, 2, 10, 10), ALONE),
    (say(R.BAND, BASE, 7, 0, 10, 10), TOTAL),  # below the band
    (say(R.BAND, BASE, 10, 0, 10, 10), TOTAL),  # at the line
    (say(R.BAND, SPEC, 8, 0, 10, 10), TOTAL),
    (say(R.BAND, BASE, 7, 50, 10, 10), ALONE),
    (say(R.BAND, BASE, 10, 0, 10, 10), TABLE),
    (say(R.DWELL, BASE, 8, 0, 10, 10), TOTAL),
    (say(R.DWELL, BASE, 3, 5, 5, 10), TOTAL),
    (say(R.DWELL, SPEC, 7, 0, 10, 10), TOTAL),
    (say(R.DWELL, BASE, 4, 0, 5, 100), TOTAL),  # in the band of the cap
    (say(R.CAP, BASE, 3, 0, 4, 10), TOTAL),
    (say(R.CAP, BASE, 10, 0, 10, 10), TOTAL),  # that is the line
    (say(R.CAP, SPEC, 4, 0, 4, 10), TOTAL),
    (say(R.ALWAYS, SPEC, 0, 0, 8, 8), TOTAL),
    (say(R.ALWAYS, BASE, 0, 0, INF, INF), TOTAL),
    (say(R.ALWAYS, SPEC, 48, 0, 48, INF), TOTAL),
    (say(R.NEVER, BASE, 0, 0, 8, 8), TOTAL),
    (say(R.NEVER, SPEC, 0, 0, 0, 0), TOTAL),
    (say(R.NEVER, BASE, 0, 0, 1, 0), TOTAL),
    (say(R.FENCE_STRUCTURED, SPEC, 0, 0, 8, 8), TOTAL),
    (say(R.FENCE_CHOICES, None, 0, 0, 8, 8), TOTAL),
    (say(R.FENCE_PROMPT, BASE), TOTAL),
    (say(R.CONTENDED, BASE, 8, 0, 8, 8), TOTAL),  # the line would have sent it there
    (say(R.QUEUED, None, 0, 0, 8, 8), TOTAL),
    (say(R.KV_CACHE, BASE), TOTAL),
    (say(R.FIXED, None), TOTAL),
    (say(R.ROUND_ROBIN, None), TOTAL),
    (say(R.REPLAY_CONNECT, None, 0, 0, 8, 8), TOTAL),
    (say(R.LEAST_IN_FLIGHT, SPEC, 4, 3), TOTAL),
    (say(R.LEAST_IN_FLIGHT, BASE, 3, 3), TOTAL),
    (say(R.LEAST_IN_FLIGHT, None, 3, 3), TOTAL),
    (by_rule(R.FORECAST, SPEC, 2.0), TOTAL),
    (by_rule(R.FORECAST, SPEC, None), TOTAL),
    (by_rule(R.FORECAST, None, -2.0), TOTAL),
    (by_rule(R.FORECAST_SWITCH, BASE, 0.0), TOTAL),
    (by_rule(R.FORECAST_UNSURE, SPEC, 1.0), TOTAL),
    (by_rule(R.DWELL, BASE, -3.0), TOTAL),
    (by_rule(R.CAP, BASE, None, 3, 4.0), TOTAL),
    (by_rule(R.CAP, BASE, None, 3), TOTAL),
    (by_rule(R.FENCE_CHOICES, SPEC, None), TOTAL),
    (by_rule(R.BELOW_THRESHOLD, SPEC, -1.0), TOTAL),
    (by_rule(R.JOIN, SPEC, -0.1, offered=None), TOTAL),
    (by_rule(R.JOIN, BASE, 0.1, offered=None), TOTAL),
    (say(R.JOIN, BASE), TOTAL),
    (say(R.FORECAST_UNSURE, BASE), TOTAL),
    (say(R.PREFIX, BASE, 1, 0, 8, 8), ALONE),  # the speculative server is nearly idle
    (say(R.PREFIX, BASE, 8, 0, 8, 8), ALONE),  # the line would have sent it there
    (say(R.PREFIX, SPEC, 14, 0, 8, 8), ALONE),
    (say(R.PREFIX, SPEC, 6, 0, 6, 8), ALONE),  # the cap is reached
    (by_rule(R.PREFIX, BASE, -0.5, offered=None), TOTAL),
    (by_rule(R.PREFIX, SPEC, 0.5, offered=None), TOTAL),
]


@pytest.mark.parametrize(("decision", "scope"), AGREEING)
def test_numbers_that_bear_out_a_reason(
    decision: Decision, scope: Literal["total", "speculative", "table"]
) -> None:
    """Each of these reasons follows from its numbers, with a band of 0.2."""
    assert agrees(decision, 0.2, scope)


@pytest.mark.parametrize(("decision", "scope"), CONTRADICTING)
def test_numbers_that_contradict_a_reason(
    decision: Decision, scope: Literal["total", "speculative", "table"]
) -> None:
    """None of these reasons follows from its numbers, with a band of 0.2."""
    assert not agrees(decision, 0.2, scope)


def test_every_reason_is_judged_by_agrees() -> None:
    """The two tables above hold every reason, and the second all that can be wrong."""
    assert {decision.reason for decision, _ in AGREEING} == set(Reason)
    judged = {decision.reason for decision, _ in CONTRADICTING}
    assert set(Reason) - judged == {*{R.PINNED, R.UNAVAILABLE, R.REPLAY_REFUSED, R.FENCE_LOGPROBS}}


def test_each_reason_of_a_line_can_happen() -> None:
    """Every reason that a frontier policy may give is given for some load and request."""
    down, over = {"available": False}, {"queued": 1}
    policy = line(8, fences=Fences(True, True, True, 100))
    makes: dict[Reason, Callable[[], Decision]] = {
        R.BELOW_THRESHOLD: lambda: decide(policy, snap()),
        R.AT_THRESHOLD: lambda: decide(policy, snap(8)),
        R.BAND: lambda: decide(policy, snap(7, 0, ON_BASE)),
        R.DWELL: lambda: decide(policy, snap(0, 0, JUST_LEFT)),
        R.CAP: lambda: decide(policy, snap(2, 0, spec={"cap": 2})),
        R.ALWAYS: lambda: decide(line(INF), snap()),
        R.NEVER: lambda: decide(line(0), snap()),
        R.PINNED: lambda: decide(policy, snap(), PINNED[BASE]),
        R.UNAVAILABLE: lambda: decide(policy, snap(spec=down)),
        R.FENCE_STRUCTURED: lambda: decide(policy, snap(), RequestInfo(structured_output=True)),
        R.FENCE_LOGPROBS: lambda: decide(policy, snap(), RequestInfo(logprobs=True)),
        R.FENCE_CHOICES: lambda: decide(policy, snap(), RequestInfo(choices=2)),
        R.FENCE_PROMPT: lambda: decide(policy, snap(), RequestInfo(prompt_bytes=101)),
        R.CONTENDED: lambda: decide(policy, snap(spec={"contended": True})),
        R.QUEUED: lambda: decide(policy, snap(spec=over)),
        R.KV_CACHE: lambda: decide(policy, snap(spec={"token_usage": 0.96})),
    }
    assert {reason: make().reason for reason, make in makes.items()} == {r: r for r in makes}


# ---------------------------------------------------------------------- tracker and policy together


class Pair(RuleBasedStateMachine):
    """Arrivals, ends, time, outages and reports in any order, against the rules in plain words."""

    running: Bundle[Lease] = Bundle("running")

    @initialize(k=st.integers(1, 12), scope=st.sampled_from(["total", "speculative"]))
    def begin(self, k: int, scope: Scope) -> None:
        self.k, self.scope, self.band, self.dwell = k, scope, 0.25, 5.0
        self.policy = line(k, scope, band=self.band, dwell=self.dwell)
        self.tracker = LoadTracker()
        self.now = NOW
        self.left_at: float | None = None  # when the line was left, on the baseline side
        self.above_at = (
            self.back_at
        ) = -INF  # last seen above the edge; when the side was returned to

    @rule(seconds=st.floats(0.0, 4.0) | st.just(5.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=running, pinned=st.none() | st.none() | st.sampled_from(Role))
    def arrive(self, pinned: Role | None) -> Lease:
        spec, base = self.tracker.speculative.in_flight, self.tracker.baseline.in_flight
        compared = spec + base if self.scope == "total" else spec
        if compared >= self.k:
            expected = R.AT_THRESHOLD
            self.left_at = self.now if self.left_at is None else self.left_at
            self.above_at = self.now
        elif self.left_at is None:
            expected = R.BELOW_THRESHOLD
        elif compared * 4 >= self.k * 3:  # K x (1 - 0.25)
            expected, self.above_at = R.BAND, self.now
        elif self.now - self.above_at < self.dwell:
            expected = R.DWELL
        else:
            expected, self.left_at = R.BELOW_THRESHOLD, None
            self.above_at, self.back_at = -INF, self.now
        decision, lease = arrive(
            self.policy, self.tracker, self.now, PINNED[pinned] if pinned else NOTHING_KNOWN
        )
        assert (decision.n, decision.m) == (spec, base)
        assert decision.reason is (R.PINNED if pinned else expected)
        assert decision.backend is (pinned or (SPEC if expected is R.BELOW_THRESHOLD else BASE))
        assert agrees(decision, self.band, self.scope)
        return lease

    @rule(lease=consumes(running))
    def end(self, lease: Lease) -> None:
        lease.release(self.now)

    @rule(role=st.sampled_from(Role))
    def report(self, role: Role) -> None:
        """A backend that says exactly what is ours changes nothing."""
        own = self.tracker.of(role).in_flight
        self.tracker.observe(role, Telemetry(own, 0, self.now, self.now, "test"))

    @invariant()
    def memory_is_as_told(self) -> None:
        side, since = (SPEC, self.back_at) if self.left_at is None else (BASE, self.left_at)
        memory = self.tracker.snapshot(self.now).memory
        assert memory == PolicyMemory(side, since, self.above_at)


TestPair = Pair.TestCase
TestPair.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(
    ("pause", "expected"), [(0.1, 1), (4.9, 1), (5.0, 1999), (7.5, 1999), (60.0, 1999)]
)
def test_flapping_around_the_line_is_bounded_by_the_dwell(pause: float, expected: int) -> None:
    """However often the load crosses K, the side changes at most twice in one dwell.

    Crossings less than a dwell apart leave it where it is.
    """
    policy, tracker = line(4, band=0.0, dwell=5.0), LoadTracker()
    base = [arrive(policy, tracker)[1] for _ in range(3)]
    sides, now = [], NOW
    for step in range(1000):  # between 3 and 4
        now = NOW + step * pause
        first, held = arrive(policy, tracker, now)
        second, more = arrive(policy, tracker, now)
        sides += [first.memory.side, second.memory.side]
        held.release(now)
        more.release(now)
    changes = sum(a is not b for a, b in itertools.pairwise(sides))
    assert changes == expected
    assert changes <= 2 * (1000 * pause / 5 + 1)
    for lease in base:
        lease.release(now)
    assert tracker.in_flight == 0


@pytest.mark.parametrize(
    ("scope", "mark", "queued", "moved"),
    [
        ("total", None, 50, False),
        ("total", 4, 5, True),
        ("total", 4, 4, False),
        ("speculative", None, 1, True),
        ("speculative", None, 0, False),
        ("speculative", 4, 4, False),
    ],
)
def test_a_queue_moves_work_only_where_the_other_server_has_room(
    scope: Scope, mark: int | None, queued: int, moved: bool
) -> None:
    """Servers that share GPUs take no notice of a queue unless a mark is set for it."""
    given = {"speculative": "http://a", "baseline": "http://b", "threshold": 8, "scope": scope}
    found = load_settings(given | ({} if mark is None else {"queue_mark": mark}), environ={})
    policy = configured_policy("frontier", found, make_frontier(8, scope))
    decision = decide(policy, snap(1, 0, spec={"queued": queued}))
    assert (decision.backend, decision.reason) == (
        (BASE, R.QUEUED) if moved else (SPEC, R.BELOW_THRESHOLD)
    )
