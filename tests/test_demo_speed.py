"""The demo's verdict on speed: what virtual time says, what is judged, and what is not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from loadtest.arrivals import Ramp
from loadtest.demo import LEVELS, _conclude, speed_of, tokens_of
from loadtest.demo_report import Finished
from loadtest.demo_speed import LEAST, Run, Speed, judge, summed, virtual
from loadtest.record import RequestRecord
from loadtest.verdict import Check, Score
from router.load import Role

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
LOAD = Ramp(LEVELS, 1.6)
KNOWN = {role: virtual(LOAD, map(tokens_of, itertools.count()), role) for role in Role}
PAIR = virtual(LOAD, map(tokens_of, itertools.count()), None)


def at(share: float, run: Run) -> Run:
    """The same run on a machine that makes this share of its tokens."""
    levels = [msgspec.structs.replace(level, tok_s=level.tok_s * share) for level in run.levels]
    return Run(run.tok_s * share, levels)


def measured(spec: float = 0.97, base: float = 0.97, pair: float = 0.97) -> dict[Role | None, Run]:
    return {None: at(pair, PAIR), SPEC: at(spec, KNOWN[SPEC]), BASE: at(base, KNOWN[BASE])}


def test_the_pair_gains_in_virtual_time() -> None:
    """With the planted curves the pair is better than either server, and both servers cross."""
    assert PAIR.tok_s / KNOWN[BASE].tok_s == pytest.approx(1.034, abs=0.01)
    assert KNOWN[BASE].tok_s > KNOWN[SPEC].tok_s
    assert KNOWN[SPEC].levels[0].tok_s > 1.5 * KNOWN[BASE].levels[0].tok_s
    used = [level.by_backend for level in PAIR.levels]
    assert used[0][BASE] == 0
    assert used[6][SPEC] == 0  # at the peak


@pytest.mark.parametrize(
    ("runs", "ok", "said"),
    [
        (measured(), True, "made 1.03 times the tokens of baseline only, the better server"),
        (measured(0.99, 0.99, 0.94), True, "made 1.03 times"),  # a hiccup in the pair's run
        (measured(0.94, 0.99, 0.95), True, "this machine had 94% of the speed of virtual time"),
        (measured(spec=0.8), None, "not judged: speculative only made 80.0% of its tokens"),
        (measured(base=0.92), None, "not judged: baseline only made 92.0% of its tokens"),
        (measured(0.6, 0.6, 0.6), None, "this machine is too slow"),
        (measured(pair=0.7), None, "not judged: the pair, while one server was at work, made "),
    ],
)  # fmt: skip
def test_what_is_judged(runs: Mapping[Role | None, Run], ok: bool | None, said: str) -> None:
    """A machine that is too slow is not judged; one that is not shows what the pair is worth."""
    speed = judge(LOAD, runs, KNOWN)
    assert speed.ok is ok
    assert said in speed.text


@pytest.mark.parametrize(("share", "ok"), [(0.95, True), (0.93, False)])
def test_switches_that_cost_too_much_fail(share: float, ok: bool) -> None:
    """Tokens that are lost while both servers work are the pair's own loss, not the machine's."""
    found = Run(PAIR.tok_s * share, PAIR.levels)
    assert judge(LOAD, measured() | {None: at(0.97, found)}, KNOWN).ok is ok


def test_a_pair_that_overlaps_all_the_time_fails() -> None:
    """Where both servers are always at work nothing hides it: the pair is judged, and fails."""
    both = {SPEC: 5, BASE: 5}
    levels = [Score(100.0, None, None, 10, both) for _ in LEVELS]
    speed = judge(LOAD, measured() | {None: Run(0.65 * KNOWN[BASE].tok_s, levels)}, KNOWN)
    assert speed.ok is False
    assert f"at least {LEAST:.2f} is wanted" in speed.text


def test_a_load_too_short_to_tell_is_not_judged() -> None:
    """Levels in which no answer ends say nothing of speed."""
    short = Ramp(LEVELS, 0.15)
    empty = {None: summed([], short), SPEC: summed([], short), BASE: summed([], short)}
    speed = judge(short, empty, {role: summed([], short) for role in Role})
    assert speed == Speed(
        ok=None,
        text="not judged: levels of 0.15 s are too short for their answers;"
        " it takes 1.5 s (--seconds-per-level)",
    )


def test_the_demo_judges_its_records() -> None:
    """Runs without tokens are those of a machine that did nothing."""
    record = RequestRecord(id="a", backend=SPEC, started=0.0, first_chunk=0.1, ended=1.0,
                           output_tokens=9)  # fmt: skip
    runs = [Finished("x", only, [record], []) for only in (None, SPEC, BASE)]
    assert speed_of(LOAD, runs).ok is None


@pytest.mark.parametrize(
    ("checks", "speed", "passed", "said"),
    [
        ([True, True], True, True, "PASSED: all 3 checks"),
        ([True, True], None, True, "PASSED: all 2 checks; speed was not judged"),
        ([True, True], False, False, "FAILED: 1 of 3 checks"),
        ([False, True], None, False, "FAILED: 1 of 2 checks"),
    ],
)
def test_speed_joins_the_exit_code(
    checks: list[bool], speed: bool | None, passed: bool, said: str
) -> None:
    """A speed that was judged counts as a check; one that was not leaves it to the others."""
    console = Console(file=StringIO(), width=100)
    found = _conclude(console, [Check(ok, "") for ok in checks], Speed(ok=speed, text=""))
    assert found is passed
    assert console.file.getvalue().strip() == said  # type: ignore[attr-defined]
