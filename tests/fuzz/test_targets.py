"""The fuzzer's targets, a little of each: recorded bytes, and words of the language in any order."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.corpus import CUT, WORDS, seeds
from tests.fuzz.targets import TARGETS, pieces_of

ENDS = st.one_of(st.sampled_from([b"\x00", b"\x07"]), st.binary(min_size=1, max_size=7))


def inputs(target: str) -> st.SearchStrategy[bytes]:
    """Words, seeds with a piece replaced, and anything."""
    word = st.one_of(st.sampled_from(WORDS[target]), st.binary(max_size=4))
    words = st.lists(word, max_size=14).map(b"".join)
    spliced = st.builds(
        lambda seed, at, gap, new: seed[: at % len(seed)] + new + seed[at % len(seed) + gap :],
        st.sampled_from(seeds(target)),
        st.integers(0, 2048),
        st.integers(0, 40),
        word,
    )
    bodies = st.one_of(words, spliced)
    return st.builds(lambda body, end: body + end, bodies, ENDS) if target in CUT else bodies


@pytest.mark.parametrize("target", TARGETS)
def test_recorded_bytes_keep_every_promise(target: str) -> None:
    """What was recorded of real servers, whole and byte by byte, breaks no promise of a target."""
    found = seeds(target)
    assert len(found) >= 20
    for seed in found:
        TARGETS[target](seed)


@pytest.mark.parametrize("target", TARGETS)
def test_no_bytes_break_a_promise(target: str) -> None:
    """Words of the language in any order, and recorded bytes with a piece replaced."""

    @given(inputs(target))
    def attempt(data: bytes) -> None:
        TARGETS[target](data)

    attempt()


@given(st.binary(max_size=60))
@example(b"abc\x07")
@example(b"abcdef\x00\x02\x00\x04\x02")
def test_pieces_are_the_whole(data: bytes) -> None:
    """However a stream is cut, its pieces are the stream, and none is empty."""
    whole, pieces = pieces_of(data)
    assert b"".join(pieces) == whole
    assert b"" not in pieces
    assert data.startswith(whole)
