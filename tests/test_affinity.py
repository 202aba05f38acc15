"""Conversations stay where their prefix is: the memory, the keys, and what the policies make of it."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.affinity import FORGET_S, SIZE, Prefix, Prefixes, near, outweighs
from router.agreement import agrees
from router.frontier import Frontier, Scope
from router.load import BackendLoad, LoadSnapshot, LoadTracker, PolicyMemory, Role
from router.policies import make_policy
from router.policy import Decision, Fences, FrontierPolicy, Policy, Reason
from router.request import RequestInfo, read_info

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
NOW = 1000.0
FLAT: Final = [(1.0, 100.0), (64.0, 3200.0)]
SLOW: Final = [(1.0, 50.0), (64.0, 1600.0)]
TURN = RequestInfo(prompt_bytes=8000, conversation=1)
HOME = {SPEC: Prefix(8000, 0, NOW), BASE: Prefix(0, 8000, NOW)}


def snap(n: int, m: int, prefix: Prefix | None, **more: Any) -> LoadSnapshot:
    spec = BackendLoad(SPEC, **({"in_flight": n} | more.get("spec", {})))
    base = BackendLoad(BASE, **({"in_flight": m} | more.get("base", {})))
    return LoadSnapshot(NOW, spec, base, more.get("memory", PolicyMemory()), prefix)


def overflow(k: float = 8, *, affinity: bool = True, scope: Scope = "speculative") -> Policy:
    return FrontierPolicy(Frontier(scope, k), affinity=affinity)


def chosen(decision: Decision) -> tuple[Role | None, Reason]:
    return decision.backend, decision.reason


# ---------------------------------------------------------------------- the memory


def test_a_conversation_is_found_where_it_went_last() -> None:
    """Each server is remembered with the longest body that it got."""
    known = Prefixes()
    known.keep(7, 1000, NOW, speculative=True)
    assert known.find(7, NOW + 1) == Prefix(1000, 0, NOW)
    known.keep(7, 1500, NOW + 1, speculative=False)
    assert known.find(7, NOW + 2) == Prefix(1000, 1500, NOW + 1)
    assert known.find(8, NOW + 2) is None
    assert (known.stayed, known.moved, len(known)) == (0, 1, 1)
    known.keep(7, 2000, NOW + 2, speculative=False)
    assert (known.stayed, known.moved, len(known)) == (1, 1, 1)


def test_a_shorter_request_goes_on_with_nothing() -> None:
    """A request that is shorter than what was seen does not contain it."""
    known = Prefixes()
    known.keep(7, 1000, NOW, speculative=True)
    found = known.find(7, NOW)
    assert found is not None
    assert found == Prefix(1000, 0, NOW)
    assert [found.lost(length, speculative=False) for length in (999, 1000)] == [0, 1000]
    known.keep(7, 400, NOW, speculative=False)
    assert known.find(7, NOW) == Prefix(400, 400, NOW)
    assert (known.stayed, known.moved) == (0, 0)


def test_a_prefix_is_forgotten_in_time() -> None:
    """What has not gone on for long is taken to be evicted, and a new turn begins anew."""
    known = Prefixes()
    known.keep(7, 1000, NOW, speculative=True)
    assert known.find(7, NOW + FORGET_S) is not None
    late = NOW + FORGET_S + 1
    assert known.find(7, late) is None
    known.keep(7, 1200, late, speculative=False)
    assert known.find(7, late) == Prefix(0, 1200, late)
    assert (known.stayed, known.moved) == (0, 0)


def test_a_memory_of_nothing_is_refused() -> None:
    """A memory without room is a mistake of the caller's."""
    with pytest.raises(ValueError, match="a memory of 0 conversations is none"):
        Prefixes(0)
    assert Prefixes().size == SIZE


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6), st.integers(1, 5), st.floats(0.0, FORGET_S * 1.2), st.booleans()
        ),
        max_size=60,
    )
)
def test_the_memory_is_a_bounded_lru(turns: list[tuple[int, int, float, bool]]) -> None:
    """It never holds more than its size, and always the ones that went on last."""
    known, plain, now = Prefixes(3), OrderedDict[int, float](), NOW
    for key, length, wait, speculative in turns:
        now += wait
        known.keep(key, length, now, speculative=speculative)
        plain[key] = now
        plain.move_to_end(key)
        if len(plain) > 3:
            plain.popitem(last=False)
        found = known.find(key, now)
        assert found is not None
        assert (found.speculative if speculative else found.baseline) == length
        assert max(found.speculative, found.baseline) <= length
        assert found.lost(length, speculative=speculative) <= 0
        assert len(known) == len(plain) <= 3
        for other, at in plain.items():
            assert (known.find(other, now) is None) is (now - at > FORGET_S)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_what_one_server_would_lose_the_other_one_has(one: int, other: int, length: int) -> None:
    """The two losses are opposite, and what is longer than the request counts for nothing."""
    prefix = Prefix(one, other, NOW)
    lost = prefix.lost(length, speculative=True)
    assert lost == -prefix.lost(length, speculative=False)
    assert lost == (other if other <= length else 0) - (one if one <= length else 0)


# ---------------------------------------------------------------------- tracker


def test_the_lease_notes_where_a_conversation_went() -> None:
    """The look before a decision finds what the lease of the turn before has noted."""
    tracker = LoadTracker(prefixes=Prefixes())
    assert tracker.snapshot(NOW, 1).prefix is None
    tracker.lease(BASE, NOW, None, 1, 800)
    assert tracker.snapshot(NOW, 1).prefix == Prefix(0, 800, NOW)
    assert tracker.snapshot(NOW, 2).prefix is None
    assert tracker.snapshot(NOW).prefix is None
    tracker.lease(SPEC, NOW)
    assert tracker.prefixes is not None
    assert len(tracker.prefixes) == 1


def test_without_a_memory_nothing_is_noted() -> None:
    """A tracker without one takes keys and forgets them."""
    tracker = LoadTracker()
    tracker.lease(BASE, NOW, None, 1, 800)
    assert tracker.snapshot(NOW, 1).prefix is None


# ---------------------------------------------------------------------- the line


@pytest.mark.parametrize(
    ("n", "home", "wanted"),
    [
        (7, BASE, (BASE, Reason.PREFIX)),
        (2, BASE, (BASE, Reason.PREFIX)),
        (1, BASE, (SPEC, Reason.BELOW_THRESHOLD)),  # nearly idle: worth a prefill
        (8, BASE, (BASE, Reason.AT_THRESHOLD)),
        (8, SPEC, (SPEC, Reason.PREFIX)),
        (13, SPEC, (SPEC, Reason.PREFIX)),
        (14, SPEC, (BASE, Reason.AT_THRESHOLD)),  # three quarters above the line
        (7, SPEC, (SPEC, Reason.BELOW_THRESHOLD)),
    ],
)
def test_a_conversation_stays_near_the_line(
    n: int, home: Role, wanted: tuple[Role, Reason]
) -> None:
    """Within three quarters of the line the request stays with its prefix, beyond it does not."""
    decision = overflow().decide(snap(n, 3, HOME[home]), TURN)
    assert chosen(decision) == wanted
    assert agrees(decision, 0.2, "speculative")


def test_the_band_and_the_dwell_give_way_too() -> None:
    """Below the line but in its band, a conversation of the speculative server stays there."""
    in_use = PolicyMemory(BASE, NOW - 9.0, NOW - 9.0)
    assert chosen(overflow().decide(snap(7, 3, HOME[SPEC], memory=in_use), TURN)) == (
        SPEC,
        Reason.PREFIX,
    )
    just = PolicyMemory(BASE, NOW - 1.0, NOW - 1.0)
    decision = overflow().decide(snap(2, 3, HOME[SPEC], memory=just), TURN)
    assert chosen(decision) == (SPEC, Reason.PREFIX)
    assert decision.memory == just  # the side follows the load, not who stayed


@pytest.mark.parametrize(
    ("policy", "snapshot", "info", "wanted"),
    [
        (overflow(), snap(8, 3, HOME[SPEC], spec={"cap": 8}), TURN, (BASE, Reason.AT_THRESHOLD)),
        (overflow(), snap(6, 3, HOME[SPEC], spec={"cap": 6}), TURN, (BASE, Reason.CAP)),
        (overflow(), snap(9, 0, HOME[SPEC], spec={"queued": 1}), TURN, (BASE, Reason.QUEUED)),
        (overflow(), snap(7, 0, HOME[BASE], base={"queued": 1}), TURN, (SPEC, Reason.QUEUED)),
        (
            overflow(),
            snap(9, 0, HOME[SPEC], spec={"token_usage": 0.97}),
            TURN,
            (BASE, Reason.KV_CACHE),
        ),
        (overflow(), snap(9, 0, HOME[SPEC], spec={"contended": True}), TURN,
         (BASE, Reason.CONTENDED)),
        (overflow(), snap(9, 0, HOME[SPEC], spec={"available": False}), TURN,
         (BASE, Reason.UNAVAILABLE)),
        (overflow(), snap(7, 0, HOME[BASE], base={"available": False}), TURN,
         (SPEC, Reason.UNAVAILABLE)),
        (overflow(), snap(7, 0, HOME[BASE]), RequestInfo(prompt_bytes=8000, pinned=SPEC),
         (SPEC, Reason.PINNED)),
        (FrontierPolicy(Frontier("speculative", 8), fences=Fences(choices=True), affinity=True),
         snap(9, 0, HOME[SPEC]), RequestInfo(choices=2, prompt_bytes=8000),
         (BASE, Reason.FENCE_CHOICES)),
        (overflow(0), snap(0, 0, HOME[SPEC]), TURN, (BASE, Reason.NEVER)),
        (overflow(float("inf")), snap(9, 0, HOME[BASE]), TURN, (SPEC, Reason.ALWAYS)),
        (overflow(affinity=False), snap(9, 0, HOME[SPEC]), TURN, (BASE, Reason.AT_THRESHOLD)),
        (overflow(scope="total"), snap(9, 0, HOME[SPEC]), TURN, (BASE, Reason.AT_THRESHOLD)),
        (overflow(), snap(9, 0, None), TURN, (BASE, Reason.AT_THRESHOLD)),
        (overflow(), snap(9, 0, Prefix(4000, 4000, NOW)), TURN, (BASE, Reason.AT_THRESHOLD)),
    ],
)  # fmt: skip
def test_nothing_stays_against_the_rules(
    policy: Policy, snapshot: LoadSnapshot, info: RequestInfo, wanted: tuple[Role, Reason]
) -> None:
    """Caps, marks, breakers, pins and fences win, and so do never, always and a shared GPU."""
    assert chosen(policy.decide(snapshot, info)) == wanted


def test_near_is_symmetric_about_the_line() -> None:
    """The two edges are as far from the line."""
    assert [n for n in range(40) if near(n, 16, speculative=True)] == list(range(28))
    assert [n for n in range(40) if near(n, 16, speculative=False)] == list(range(4, 40))


# ---------------------------------------------------------------------- the join rules


@pytest.mark.parametrize("name", ["join-delay", "join-speed"])
def test_a_join_rule_weighs_the_prefill(name: str) -> None:
    """A long prefix keeps a conversation on the slower server, a short one does not."""
    policy = make_policy(name, curves=(FLAT, SLOW), affinity=True)
    long, short = RequestInfo(prompt_bytes=2_000_000), RequestInfo(prompt_bytes=400)
    stayed = policy.decide(snap(2, 2, Prefix(0, 2_000_000, NOW)), long)
    moved = policy.decide(snap(2, 2, Prefix(0, 400, NOW)), short)
    assert chosen(stayed) == (BASE, Reason.PREFIX)
    assert chosen(moved) == (SPEC, Reason.JOIN)
    assert agrees(stayed, 0.0)
    assert agrees(moved, 0.0)
    off = make_policy(name, curves=(FLAT, SLOW))
    assert chosen(off.decide(snap(2, 2, Prefix(0, 2_000_000, NOW)), long)) == (SPEC, Reason.JOIN)


def test_a_join_rule_keeps_the_cap_and_the_marks() -> None:
    """A conversation of the speculative server leaves it where that is full or queues."""
    policy = make_policy("join-delay", curves=(SLOW, FLAT), affinity=True)
    info, prefix = RequestInfo(prompt_bytes=2_000_000), Prefix(2_000_000, 0, NOW)
    assert chosen(policy.decide(snap(2, 2, prefix), info)) == (SPEC, Reason.PREFIX)
    for spec, reason in (({"cap": 2}, Reason.CAP), ({"queued": 3}, Reason.QUEUED)):
        assert chosen(policy.decide(snap(2, 2, prefix, spec=spec), info)) == (BASE, reason)


def test_beyond_the_tables_the_longer_queue_is_left_all_the_same() -> None:
    """With more requests than the tables hold, a prefix is weighed at their end."""
    policy = make_policy("join-delay", curves=(FLAT, FLAT), affinity=True)
    info, prefix = RequestInfo(prompt_bytes=8000), Prefix(8000, 0, NOW)
    assert chosen(policy.decide(snap(900, 600, prefix), info)) == (SPEC, Reason.PREFIX)


@given(st.integers(0, 10**7), st.integers(0, 500), st.floats(-1.0, 1.0))
def test_what_is_weighed(lost: int, others: int, gain: float) -> None:
    """No gain keeps; more to prefill, and more that wait for it, never argue for moving."""
    if gain <= 0:
        assert outweighs(lost, others, gain)
    if outweighs(lost, others, gain):
        assert outweighs(lost + 1000, others, gain)
        assert outweighs(lost, others + 1, gain)


# ---------------------------------------------------------------------- the key


def key_of(**fields: Any) -> int | None:
    return read_info(json.dumps({"model": "m"} | fields).encode()).conversation


def says(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


ASKED, ANSWERED = says("user", "Why is the sky blue?"), says("assistant", "Because of the air.")
SYSTEM = says("system", "You are brief.")


@pytest.mark.parametrize(
    "opening",
    [
        [ASKED],
        [SYSTEM, ASKED],
        [says("developer", "x" * 9000), ASKED],
        [{"content": "Hello", "role": "user"}],  # the role last, as LangChain writes it
        [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    ],
)
def test_all_turns_have_one_key(opening: list[dict[str, Any]]) -> None:
    """What a conversation opens with tells it, whatever is said later."""
    key = key_of(messages=opening)
    assert key is not None
    later = [*opening, ANSWERED, says("user", "Really?")]
    assert key_of(messages=later) == key
    assert key_of(messages=[*later, ANSWERED, says("user", "Sure?")], stream=True, n=2) == key


def test_other_openings_have_other_keys() -> None:
    """Another question, another system prompt, or another length of either is another conversation."""
    openings = [
        [ASKED],
        [SYSTEM, ASKED],
        [says("system", "You are kind."), ASKED],
        [SYSTEM, says("user", "Why is the sea blue?")],
        [SYSTEM, says("user", "x" * 5000)],
        [SYSTEM, says("user", "x" * 5001)],
    ]
    assert len({key_of(messages=opening) for opening in openings}) == len(openings)


def test_a_key_of_its_own_wins() -> None:
    """prompt_cache_key and SGLang's routing_key name the conversation, whatever it opens with."""
    named = key_of(messages=[ASKED], prompt_cache_key="c-1")
    assert named == key_of(messages=[SYSTEM, ASKED], prompt_cache_key="c-1")
    assert named not in {
        key_of(messages=[ASKED]),
        key_of(messages=[ASKED], prompt_cache_key="c-2"),
    }
    assert key_of(text="Hi", routing_key="r") == key_of(text="Hi there", routing_key="r") != None  # noqa: E711
    # A null is what many clients send for what they leave out.
    assert key_of(messages=[ASKED], prompt_cache_key=None) == key_of(messages=[ASKED])


@pytest.mark.parametrize("field", ["prompt", "text", "input"])
def test_a_long_prompt_is_told_by_its_first_bytes(field: str) -> None:
    """A prompt that goes on keeps its key from about 250 tokens on; a short one has none."""
    text = "Once upon a time there was a router. " * 40
    assert key_of(**{field: text}) == key_of(**{field: text + "It slept."}) is not None
    assert key_of(**{field: text}) != key_of(**{field: "But " + text})
    assert key_of(**{field: "Once upon a time"}) is None


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"messages":null}', b'{"messages":"Hello"}', b'{"messages":{"role":"user"}}',
     b'{"messages":7,"stream":true}', b'{"input":[]}'],
)  # fmt: skip
def test_what_is_no_conversation_has_no_key(body: bytes) -> None:
    """Messages that are no list are for the engine to refuse, and the rest is read all the same."""
    info = read_info(body)
    assert info.conversation is None
    assert info.stream is (b"true" in body)
    assert info.prompt_bytes == len(body)


def test_no_messages_at_all_are_one_conversation() -> None:
    """An empty list, and messages that are no objects, are read without a complaint."""
    assert read_info(b'{"messages":[]}').conversation == read_info(b'{"messages":[ ]}').conversation
    assert read_info(b'{"messages":[1,"a",null]}').conversation is not None
