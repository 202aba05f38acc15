"""The fuzzer's targets, a little of each: recorded bytes, and words of the language in any order."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.corpus import CUT, WORDS, seeds
from tests.fuzz.targets import TARGETS, pieces_of
from tests.fuzz.worker import MAX_LENGTH, mutated

ROOT = Path(__file__).parents[2]

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


def worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz.worker", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip


def test_the_worker_runs_without_guidance_and_says_how_much(tmp_path: Path) -> None:
    """Where atheris cannot be had, a target runs on mutated seeds for the time that it is given."""
    found = worker("guard", "--plain", "--seconds", "0.2", "--corpus", str(tmp_path))
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("Done ")
    assert int(found.stdout.split()[1]) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_worker_replays_files_and_names_its_targets(tmp_path: Path) -> None:
    """A file is run as it is; a name that is no target is refused with those that are."""
    file = tmp_path / "crash"
    file.write_bytes(b"/v1/models\nhost: a")
    assert worker("guard", str(file)).returncode == 0
    found = worker("nothing", "--corpus", str(tmp_path))
    assert found.returncode == 2
    assert "no target 'nothing': choose one of guard, request" in found.stderr


def test_mutation_is_repeatable_and_bounded() -> None:
    """One seed gives one sequence of inputs, none longer than may be."""

    def some(seed: int) -> list[bytes]:
        chance = random.Random(seed)
        return [mutated(chance, [b"x" * 2000, b"ab"], (b"word",)) for _ in range(200)]

    assert some(1) == some(1) != some(2)
    assert max(map(len, some(1))) <= MAX_LENGTH
