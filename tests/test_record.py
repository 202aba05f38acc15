"""Records: what they compute, and that a file gives back what was written."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.record import (
    RecordError,
    RequestRecord,
    as_number,
    as_threshold,
    read_records,
    write_records,
)
from router.load import Role


def record(**fields: Any) -> RequestRecord:
    usual: dict[str, Any] = {"id": "a", "started": 1.0, "first_chunk": 2.0, "ended": 4.0}
    return RequestRecord(**(usual | {"status": 200, "output_tokens": 10} | fields))


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    """Whatever a record holds survives the file, one line each."""
    path = tmp_path / "records.jsonl"
    records = [
        record(
            run="pair", level=3, backend=Role.BASELINE, reason="band", n=0, m=11, threshold=12.0
        ),
        record(threshold="infinity", prompt_tokens=7),
        RequestRecord(id="ö\n", started=0.0, ended=0.1, error="Connection refused"),
    ]
    write_records(path, records)
    assert path.read_bytes().count(b"\n") == 3
    assert list(read_records(path)) == records


def test_a_second_writing_replaces_the_first(tmp_path: Path) -> None:
    """A file holds one writing, not a sum of several."""
    path = tmp_path / "records.jsonl"
    write_records(path, [record(), record()])
    write_records(path, [record(id="b")])
    assert [one.id for one in read_records(path)] == ["b"]


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"id":"a"}', b'{"id":"a","started":0,"ended":1,"sped":2}', b"\n"]
)
def test_a_line_that_is_no_record(tmp_path: Path, line: bytes) -> None:
    """A bad line is refused with its file and number, after the good ones before it."""
    path = tmp_path / "records.jsonl"
    write_records(path, [record()])
    path.write_bytes(path.read_bytes() + line)
    found = read_records(path)
    assert next(found) == record()
    with pytest.raises(RecordError, match=r"records\.jsonl, line 2"):
        next(found)


def test_times() -> None:
    """A request's time for each token holds the wait for the first one."""
    assert record().seconds == 3.0
    assert record().seconds_per_token == pytest.approx(0.3)
    assert record(output_tokens=None).seconds_per_token is None
    assert record(output_tokens=0).seconds_per_token is None


def test_a_complete_answer_is_ok() -> None:
    """A record is of a failure exactly if it names an error."""
    assert record().ok
    assert not record(error="status 503: full").ok


@pytest.mark.parametrize(
    ("start", "end", "tokens"),
    [(0, 10, 10), (2, 3, 5), (0, 2.5, 2.5), (3.5, 9, 2.5), (0, 2, 0), (4, 9, 0)],
)
def test_tokens_come_evenly(start: float, end: float, tokens: float) -> None:
    """A window holds the share of the tokens that it holds of the time from first chunk to end."""
    assert record().tokens_between(start, end) == pytest.approx(tokens)


def test_tokens_of_one_moment() -> None:
    """An answer in one chunk is in the window that its moment is in; an unknown one in none."""
    at_once = record(first_chunk=4.0)
    assert at_once.tokens_between(3, 4) == 0
    assert at_once.tokens_between(4, 5) == 10
    assert record(first_chunk=None).tokens_between(0, 10) == 0
    assert record(output_tokens=None).tokens_between(0, 10) == 0


@given(st.lists(st.floats(0, 10), min_size=2, max_size=6).map(sorted))
def test_windows_add_up(edges: list[float]) -> None:
    """However time is cut, each token is counted once."""
    edges = [0.0, *edges, 10.0]
    parts = [record().tokens_between(a, b) for a, b in itertools.pairwise(edges)]
    assert math.isclose(sum(parts), 10, abs_tol=1e-6)


def test_infinity_is_a_word() -> None:
    """A line that is never reached is written as the word and read as the number."""
    assert as_threshold(math.inf) == "infinity"
    assert as_number("infinity") == math.inf
    assert as_number(as_threshold(12.0)) == 12.0
    assert as_number(None) is None
