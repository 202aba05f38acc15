"""A request's body as it is collected: whole, and in no more memory than is counted for it."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.incoming import WORTH_KEEPING, Incoming

sizes = st.one_of(
    st.integers(0, 20), st.integers(WORTH_KEEPING - 2, WORTH_KEEPING + 2), st.just(3000)
)


@given(st.lists(sizes, max_size=30))
def test_a_body_is_its_pieces(cuts: list[int]) -> None:
    """However it is cut, the same bytes come out, once, and their number is known on the way."""
    incoming, wanted = Incoming(), b""
    for i, size in enumerate(cuts):
        piece = bytes([i]) * size
        incoming.add(piece)
        wanted += piece
        assert incoming.size == len(wanted)
    taken = incoming.take_body()
    assert (type(taken), taken) == (bytes, wanted)
    assert incoming.take_body() == b""


@pytest.mark.parametrize("size", [2, 20, WORTH_KEEPING - 1, WORTH_KEEPING])
def test_small_pieces_take_no_more_than_they_count(size: int) -> None:
    """A body in pieces of 2 bytes, or of any size, takes at most a quarter more than its length."""
    incoming = Incoming()
    tracemalloc.start()
    try:
        for i in range(200_000 // size):
            incoming.add((i % 65_536).to_bytes(2, "big") + b"x" * (size - 2))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert incoming.size <= held < 1.25 * incoming.size
