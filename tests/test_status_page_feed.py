"""The feed of decisions and the path of the last minutes, without a socket."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decision_feed import (
    BATCH,
    COMMENT,
    GREETING,
    HEARTBEAT,
    PENDING,
    RETRY,
    DecisionFeed,
    Listener,
    TooManyListenersError,
)
from router.explain import RING_SIZE, DecisionLog
from router.load import PolicyMemory, Role
from router.policy import Decision, Reason
from router.status_path import KEPT, LoadPath

CHOSEN = Decision(Role.SPECULATIVE, Reason.BELOW_THRESHOLD, 3, 1, 7.0, PolicyMemory(), 8.0)


class Fed:
    """A log, its feed, and what comes out."""

    def __init__(self, most: int = 16) -> None:
        self.log = DecisionLog(clock=lambda: 0.0, wall=lambda: 1000.0)
        self.feed = DecisionFeed(self.log, most=most, epoch=lambda: "e")
        self.made = 0

    def decide(self, times: int = 1) -> None:
        for _ in range(times):
            self.made += 1
            self.log.add(0.0, f"r-{self.made}", "generate", CHOSEN)

    def join(self, last_id: str = "") -> Listener:
        return self.feed.join(0.0, last_id)


def taken(listener: Listener) -> list[bytes]:
    """Everything that waits for a listener; RETRY, which opens every stream, left out."""
    found = []
    while listener._pending:
        piece = asyncio.run(listener.take())
        assert piece is not None
        found.append(piece)
    return [piece for piece in found if piece != RETRY]


def parsed(piece: bytes) -> tuple[str, list[str], int]:
    """Id, request ids and the number of those that were skipped."""
    head, event, data, *rest = piece.decode().split("\n")
    assert event == "event: decisions"
    assert rest == ["", ""]
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return head.removeprefix("id: "), [i["request_id"] for i in found["items"]], found["skipped"]


def ids(first: int, last: int) -> list[str]:
    return [f"r-{number}" for number in range(first, last + 1)]


def test_a_new_listener_gets_the_newest_few() -> None:
    """The greeting holds the newest decisions, oldest first, and says how many came before."""
    fed = Fed()
    fed.decide(GREETING + 7)
    (piece,) = taken(fed.join())
    assert parsed(piece) == (f"e-{GREETING + 7}", ids(8, GREETING + 7), 0)


def test_what_happens_between_two_ticks_is_one_event() -> None:
    """However many decisions there were, a tick makes one event, and none when there was none."""
    fed = Fed()
    listener = fed.join()
    taken(listener)
    fed.decide(40)
    fed.feed.tick(0.25)
    fed.feed.tick(0.5)
    (piece,) = taken(listener)
    assert parsed(piece) == ("e-40", ids(1, 40), 0)


def test_a_flood_is_cut_to_the_newest() -> None:
    """More than one event holds is counted instead of sent."""
    fed = Fed()
    listener = fed.join()
    taken(listener)
    fed.decide(BATCH + 60)
    fed.feed.tick(0.25)
    (piece,) = taken(listener)
    assert parsed(piece) == (f"e-{BATCH + 60}", ids(61, BATCH + 60), 60)


def test_a_listener_that_comes_back_gets_what_it_missed() -> None:
    """From the id that it saw on, up to all that the ring holds, and nothing twice."""
    fed = Fed()
    fed.decide(10)
    fed.join()  # somebody listens all the time
    (piece,) = taken(fed.join("e-4"))
    assert parsed(piece) == ("e-10", ids(5, 10), 0)
    assert taken(fed.join("e-10")) == []
    fed.decide(RING_SIZE)
    fed.feed.tick(0.25)
    (piece,) = taken(fed.join("e-4"))
    last = 10 + RING_SIZE
    assert parsed(piece) == (f"e-{last}", ids(11, last), 6)


@pytest.mark.parametrize("last_id", ["f-4", "e-99", "e-", "e--4", "4", "e-4x", "é-4", "e-٤"])
def test_an_id_that_is_not_ours_is_a_new_listener(last_id: str) -> None:
    """Another router's id, or none at all, gets the greeting."""
    fed = Fed()
    fed.decide(5)
    (piece,) = taken(fed.join(last_id))
    assert parsed(piece) == ("e-5", ids(1, 5), 0)


def test_a_new_listener_and_the_others_stay_in_step() -> None:
    """What was not told yet when one comes is told to it once, by the next tick."""
    fed = Fed()
    first = fed.join()
    fed.decide(3)
    second = fed.join()
    fed.feed.tick(0.25)
    for listener in (first, second):
        greeting, event = taken(listener)
        assert parsed(greeting)[1] == []
        assert parsed(event)[1] == ids(1, 3)


def test_a_slow_listener_is_dropped() -> None:
    """One that takes nothing loses its place in line, and the others notice nothing."""
    fed = Fed()
    slow, quick = fed.join(), fed.join()
    for tick in range(PENDING):
        fed.decide()
        fed.feed.tick(tick / 4)
        taken(quick)
    assert not slow.open
    assert quick.open
    assert asyncio.run(slow.take()) is None
    assert fed.feed.listening == 2  # until its connection has gone
    fed.feed.leave(slow)
    assert fed.feed.listening == 1


def test_the_number_of_listeners_is_bounded() -> None:
    """The last place taken, the next one is refused until one leaves."""
    fed = Fed(most=2)
    first = fed.join()
    fed.join()
    with pytest.raises(TooManyListenersError):
        fed.join()
    fed.feed.leave(first)
    fed.join()


def test_silence_is_broken_by_a_comment() -> None:
    """A line on which nothing happens shows that it lives, and not more often than that."""
    fed = Fed()
    listener = fed.join()
    taken(listener)
    for tick in range(int(HEARTBEAT * 4)):
        fed.feed.tick(tick / 4)
    assert taken(listener) == []
    fed.feed.tick(HEARTBEAT)
    fed.feed.tick(HEARTBEAT + 0.25)
    assert taken(listener) == [COMMENT]


def test_a_closed_feed_ends_every_stream() -> None:
    """Who listens is told that nothing more comes, and who comes later too."""
    fed = Fed()
    listener = fed.join()
    fed.feed.close()
    taken(listener)
    assert asyncio.run(listener.take()) is None
    late = fed.join()
    taken(late)
    assert asyncio.run(late.take()) is None


def test_with_nobody_listening_nothing_is_read() -> None:
    """A tick does not touch the ring when nobody is there."""

    class Unread(DecisionLog):
        def view(self, **_: object) -> Any:
            raise AssertionError

    log = Unread(clock=lambda: 0.0, wall=lambda: 0.0)
    feed = DecisionFeed(log)
    log.add(0.0, "r", "generate", CHOSEN)
    feed.tick(1.0)


@given(
    st.lists(
        st.one_of(st.integers(0, 400), st.just("tick"), st.just("take"), st.just("back")),
        max_size=40,
    )
)
def test_nothing_is_told_twice_or_lost_unsaid(moves: list[int | str]) -> None:
    """Whatever happens in between, each decision is in one event, in order, or counted as skipped."""
    fed = Fed()
    listener = fed.join()
    seen: list[int] = []
    last, skipped = "", 0

    def take() -> None:
        nonlocal last, skipped
        for piece in taken(listener):
            last, requests, more = parsed(piece)
            skipped += more
            seen.extend(int(request.removeprefix("r-")) for request in requests)

    for move in [*moves, "tick", "take"]:
        if isinstance(move, int):
            fed.decide(move)
        elif move == "tick":
            fed.feed.tick(0.0)
        elif move == "take" or last == "":
            take()
        else:
            fed.feed.leave(listener)
            listener = fed.join(last)
        if not listener.open:
            fed.feed.leave(listener)
            listener = fed.join(last)
    take()
    assert seen == sorted(set(seen))
    assert len(seen) + skipped == fed.made


def test_the_path_is_sampled_once_a_second() -> None:
    """Of four ticks a second one is kept, with the loads of that moment."""
    path = LoadPath()
    for tick in range(12):
        path.sample(tick / 4, tick, 0)
    assert path.samples() == [(0.0, 0, 0), (1.0, 4, 0), (2.0, 8, 0)]


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=100))
def test_the_path_is_bounded_and_rises(pauses: list[float]) -> None:
    """However ticks come, samples are in order, half a second apart at least, and never too many."""
    path, now = LoadPath(kept=10), 0.0
    for pause in pauses:
        now += pause
        path.sample(now, 1, 2)
    times = [at for at, _, _ in path.samples()]
    assert len(times) <= 10
    assert all(b - a >= 0.499 for a, b in itertools.pairwise(times))


def test_the_path_holds_five_minutes() -> None:
    """The oldest go first."""
    path = LoadPath()
    for second in range(KEPT + 20):
        path.sample(float(second), second, 0)
    assert len(path.samples()) == KEPT
    assert path.samples()[0] == (20.0, 20, 0)
