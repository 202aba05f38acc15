"""What an exchange is given to work with: the budget of replays and the limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.actions import Finish, Open, RetryBudget, Rules, Sample, Shared, Write
from router.breaker import Verdict
from router.load import LoadTracker, Role
from router.policy import FixedPolicy


def taken(budget: RetryBudget, times: int) -> int:
    return sum(budget.take() for _ in range(times))


def test_a_quiet_router_may_replay_at_once() -> None:
    """The reserve is there from the start, and no more than it."""
    assert taken(RetryBudget(0.2, 10.0), 50) == 10


def test_requests_pay_for_replays() -> None:
    """With the reserve spent, five requests at a share of 20 % pay for one replay."""
    budget = RetryBudget(0.2, 10.0)
    taken(budget, 50)
    for _ in range(4):
        budget.deposit()
    assert not budget.take()
    budget.deposit()
    assert budget.take()
    assert not budget.take()


def test_what_is_saved_has_a_limit() -> None:
    """A long quiet time saves up the reserve and nothing beyond it."""
    budget = RetryBudget(0.2, 3.0)
    for _ in range(1000):
        budget.deposit()
    assert budget.saved == 3.0
    assert taken(budget, 50) == 3


def test_a_share_of_zero_forbids_replays() -> None:
    """With a share of zero there is no reserve either, whatever comes in."""
    budget = RetryBudget(0.0)
    for _ in range(100):
        budget.deposit()
    assert not budget.take()


@given(
    share=st.floats(0.01, 1.0),
    reserve=st.floats(1.0, 20.0),
    steps=st.lists(st.booleans(), max_size=300),
)
def test_replays_never_exceed_share_and_reserve(
    share: float, reserve: float, steps: list[bool]
) -> None:
    """In any order of requests and refusals, replays <= reserve + share x requests."""
    budget = RetryBudget(share, reserve)
    requests = replays = 0
    for request in steps:
        if request:
            budget.deposit()
            requests += 1
        else:
            replays += budget.take()
        assert replays <= reserve + share * requests + 1e-6
        assert 0.0 <= budget.saved <= reserve


def test_actions_are_values() -> None:
    """Two actions that say the same are equal, and none can be changed."""
    role = Role.BASELINE
    assert Open(role) == Open(role, fresh=False) != Open(role, fresh=True)
    assert Write(b"x") == Write(b"x")
    assert Sample(role, Verdict.FAILURE) == Sample(role, Verdict.FAILURE)
    assert Finish(close=True) != Finish(close=False)
    with pytest.raises(AttributeError):
        Write(b"x").data = b"y"  # type: ignore[misc]


def test_the_limits_are_those_that_the_documents_promise() -> None:
    """Defaults: 250 ms to replay a stale connection, 8 KB and 50 ms to peek, 256 KB to hold."""
    rules = Rules()
    assert (rules.replay_window, rules.peek_timeout, rules.peek_bytes) == (0.25, 0.05, 8192)
    assert rules.hold_bytes == 262_144


def test_a_shared_state_begins_without_date_and_drain() -> None:
    """`Shared` refreshes nothing unless told to, and is not draining."""
    policy = FixedPolicy(Role.BASELINE)
    shared = Shared(LoadTracker(), policy, Rules(), RetryBudget(), {})
    shared.refresh(1.0)
    assert shared.common == b""
    assert shared.draining is False
