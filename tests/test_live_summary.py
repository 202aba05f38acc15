"""Live comparisons without a server: what comes after what, the figures, the advice, the document."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.live_compare import _refuse
from loadtest.live_files import LiveDirectory, Loan
from loadtest.live_load import Asking, InOrder, Wanted, arrivals
from loadtest.live_schema import (
    KINDS,
    Cell,
    Change,
    Comparison,
    Conditions,
    LiveError,
    LiveFailedError,
    Offered,
    Outcome,
    Turn,
    decode_comparison,
    order,
    resumed,
)
from loadtest.live_summary import Passed, advise, outcome, said_of
from loadtest.live_view import draw, summary_text
from loadtest.prompts import Place, PromptError
from loadtest.record import RequestRecord
from loadtest.simulator_load import Row
from loadtest.summary import Window
from loadtest.sweep_level import Outcome as Measured
from loadtest.sweep_schema import Figure, Pace, Workload
from loadtest.sweep_seen import Seen
from router.load import Role
from tests.sweeps import BASE, SPEC, record, server

LOADS = (Offered(in_flight=8), Offered(in_flight=32))


def comparison(**fields: Any) -> Comparison:
    usual: dict[str, Any] = {
        "created": "then", "command": "loadtest compare", "version": "1",
        "conditions": Conditions(
            url="http://r", model="m", workload=Workload(prompts="corpus", output_tokens=100),
            pace=Pace(), line={"policy": "frontier"},
        ),
        "policies": ("baseline", "speculative", "frontier"), "loads": LOADS, "passes": 1,
    }  # fmt: skip
    return Comparison(**(usual | fields))


def cell(policy: str = "frontier", **fields: Any) -> Cell:
    number, load = fields.get("number", 1), fields.get("load", "8")
    usual: dict[str, Any] = {
        "policy": policy, "number": 1, "load": "8", "run": f"{policy}-{number}-{load}",
        "decided_by": policy, "measured_at": "then", "records": 1, "window_start_s": 10.0,
        "window_s": 100.0, "requests": 1, "errors": 0,
    }  # fmt: skip
    return Cell(**(usual | fields))


def summed(policy: str, ms: float, half: float | None, load: str = "8", **more: Any) -> Outcome:
    usual: dict[str, Any] = {
        "policy": policy, "kind": KINDS[policy], "load": load, "passes": 1,
        "interval": "none" if half is None else "batches",
        "ms_per_token": Figure(ms) if half is None else Figure(ms, ms - half, ms + half),
        "p95_ms_per_token": Figure(2 * ms), "tok_s": Figure(1000 / ms), "ttft_p50_ms": Figure(5.0),
        "speculative_share": {"speculative": 1.0, "baseline": 0.0}.get(policy, 0.5), "switches": 3, "requests": 40, "errors": 0, "gave_up": False,
    }  # fmt: skip
    return Outcome(**(usual | more))


@given(st.permutations(sorted(KINDS)), st.integers(1, 4), st.integers(1, 6))
def test_nobody_is_always_first(policies: list[str], loads: int, passes: int) -> None:
    """Every policy meets every load in every pass once, one after the other, and all take turns."""
    offered = [Offered(in_flight=2**at) for at in range(loads)]
    turns = list(order(policies, offered, passes))
    assert len(set(turns)) == len(turns) == len(policies) * loads * passes
    blocks = [turns[at : at + len(policies)] for at in range(0, len(turns), len(policies))]
    assert all(len({(t.number, t.load) for t in block}) == 1 for block in blocks)
    assert all({t.policy for t in block} == set(policies) for block in blocks)
    firsts = Counter(block[0].policy for block in blocks)
    if passes >= len(policies):
        assert len(firsts) == len(policies)
    assert len({turn.run for turn in turns}) == len(turns)


def test_passes_rotate_and_turn_round() -> None:
    """The second pass begins with the next policy, and with the load that the first ended with."""
    turns = list(order(("a", "b"), LOADS, 2))
    assert [(t.number, t.load.name, t.policy) for t in turns] == [
        (1, "8", "a"), (1, "8", "b"), (1, "32", "b"), (1, "32", "a"),
        (2, "32", "b"), (2, "32", "a"), (2, "8", "a"), (2, "8", "b"),
    ]  # fmt: skip


def test_figures_of_one_cell() -> None:
    """Only what ended in the window is judged, and sides are counted in the order of the starts."""
    records = [
        record(1.0, 5.0, backend=BASE),  # before the window
        record(20.0, 22.0, backend=SPEC),  # 20 ms per token
        record(12.0, 15.0, backend=BASE),  # 30 ms
        record(30.0, 34.0, backend=SPEC),  # 40 ms
        record(31.0, 32.0, backend=BASE, error="broken"),
        record(32.0, 200.0, backend=SPEC),  # ends after it
    ]
    found = outcome("frontier", "8", [Passed(cell(requests=3, errors=1), records)])
    assert found.ms_per_token.value == pytest.approx(30.0)
    assert found.p95_ms_per_token.value == pytest.approx(40.0)
    assert found.ttft_p50_ms is not None
    assert found.ttft_p50_ms.value == pytest.approx(500.0)
    # Whole answers, and the part of the late one that came within: 32.5 to 110 of 32.5 to 200.
    assert found.tok_s.value == pytest.approx((300 + 100 * 77.5 / 167.5) / 100)
    # By start: base, spec, spec, base, spec.
    assert found.speculative_share == pytest.approx(3 / 5)
    assert found.switches == 3
    assert (found.requests, found.errors, found.kind) == (3, 1, "rule")


def test_passes_give_the_interval_when_there_are_three() -> None:
    """Three passes: Student's t over their means; one: over parts of its window."""

    def passed(number: int, seconds: float) -> Passed:
        starts = [10.0 + at * seconds for at in range(int(90 / seconds))]
        return Passed(
            cell(number=number), [record(at, at + seconds, backend=BASE) for at in starts]
        )

    three = outcome("frontier", "8", [passed(n, s) for n, s in ((1, 1.0), (2, 1.1), (3, 1.2))])
    assert three.interval == "passes"
    assert three.ms_per_token.value == pytest.approx(11.0)
    # t(2 degrees) = 4.303, standard deviation 1, root of 3.
    assert three.ms_per_token.high == pytest.approx(11.0 + 4.303 / 3**0.5)
    one = outcome("frontier", "8", [passed(1, 1.0)])
    assert one.interval == "batches"
    assert one.ms_per_token.high == pytest.approx(10.0)


def test_few_answers_have_no_interval() -> None:
    """Where the window holds no three parts nothing is said of how sure the mean is."""
    found = outcome("baseline", "8", [Passed(cell(), [record(20.0, 80.0, backend=BASE)])])
    assert found.interval == "none"
    assert found.ms_per_token == Figure(600.0)
    assert found.switches == 0


def test_no_answer_is_no_outcome() -> None:
    """A window without an answer is refused and not made up."""
    with pytest.raises(ValueError, match="no answer ended in the window"):
        outcome("baseline", "8", [Passed(cell(), [record(20.0, 500.0)])])


ADVICE: list[tuple[list[Outcome], str]] = [
    (
        [summed("baseline", 10.0, 0.1), summed("frontier", 8.0, 0.1)],
        "Run the pair with frontier: 8.00 ±0.10 ms per token against 10.0 ±0.1 of baseline only, 20%",
    ),
    (
        [summed("baseline", 10.0, 1.5), summed("frontier", 8.0, 0.6)],
        "is ahead of baseline only, but within noise, 8.00 ±0.60 ms per token against 10.0 ±1.5.",
    ),
    (
        [summed("baseline", 10.0, 0.1), summed("frontier", 10.1, 0.1)],
        "Run one server (baseline only), not the pair: the best policy, frontier, is within noise",
    ),
    (
        [summed("baseline", 10.0, 0.01), summed("frontier", 9.9, 0.01)],
        "is as good and no better",
    ),
    (
        [summed("speculative", 10.0, 0.1), summed("round-robin", 15.0, 0.1)],
        "Run one server (speculative only), not the pair: the best policy, round-robin, is 50% slower",
    ),
    (
        [summed("frontier", 10.0, 0.1), summed("round-robin", 15.0, 0.1)],
        "33% less. Add baseline and speculative to --policies to know whether to run a pair.",
    ),
    (
        [summed("baseline", 10.0, 1.0), summed("speculative", 11.0, 1.0)],
        "baseline only and speculative only are within noise of each other",
    ),
    ([summed("baseline", 10.0, 1.0)], "Only baseline only is measured: 10.0 ±1.0"),
    (
        [summed("baseline", 10.0, 0.1, errors=3), summed("frontier", 8.0, 0.1)],
        "Requests failed (baseline only 3): read the errors first.",
    ),
    (
        [summed("baseline", 10.0, 0.1, gave_up=True), summed("frontier", 8.0, 0.1)],
        "The load was too much for baseline only",
    ),
    (
        [summed("baseline", 10.0, 0.1, speculative_share=0.01), summed("frontier", 8.0, 0.1)],
        "The router sent some of baseline only elsewhere: read the reasons.",
    ),
    (
        [summed("baseline", 10.0, None), summed("frontier", 8.0, None)],
        "How sure that is, is not known",
    ),
]


@pytest.mark.parametrize(("outcomes", "words"), ADVICE, ids=itertools.count())
def test_advice(outcomes: list[Outcome], words: str) -> None:
    """One sentence says what to run, whether that is noise, and what makes it doubtful."""
    policies = tuple(each.policy for each in outcomes)
    found = advise(comparison(policies=policies, outcomes=tuple(outcomes), loads=LOADS[:1]))
    assert len(found) == 1
    assert words in found[0].text
    assert said_of(found[0], LOADS).startswith("At 8 in flight: ")


def test_advice_over_all_loads() -> None:
    """Servers that are each best at one load make the pair best over both, with its interval."""
    table = {"speculative": (5.0, 20.0), "baseline": (10.0, 10.0), "frontier": (5.0, 10.0)}
    outcomes = [
        summed(policy, ms, 0.3, load.name)
        for load, at in zip(LOADS, (0, 1), strict=True)
        for policy, ms in ((name, row[at]) for name, row in table.items())
    ]
    found = advise(comparison(outcomes=tuple(outcomes)))
    assert [each.load for each in found] == ["8", "32", None]
    assert all("within noise" in each.text for each in found[:2])
    # The mean of 5 and 10; the root of 0.3 squared and 0.3 squared, by two.
    assert said_of(found[2], LOADS) == (
        "Over all loads: Run the pair with frontier: 7.50 ±0.21 ms per token against 10.0 ±0.2 of"
        " baseline only, 25% less."
    )


def test_goes_on_only_with_the_same() -> None:
    """Cells are kept under the same conditions, whatever is added, and another condition is named."""
    before = comparison(cells=(cell(), cell("round-robin")), created="earlier")
    found = resumed(before, comparison(passes=3))
    assert [each.run for each in found.cells] == ["frontier-1-8"]
    assert found.created == "earlier"
    other = msgspec.structs.replace(
        before.conditions, line={"policy": "frontier", "threshold": 9.0}
    )
    with pytest.raises(LiveError, match="another line"):
        resumed(before, comparison(conditions=other))
    longer = msgspec.structs.replace(before.conditions, pace=Pace(window_s=99.0))
    with pytest.raises(LiveError, match=r"another window_s \(10.0, now 99.0\)"):
        resumed(before, comparison(conditions=longer))


def test_the_document_is_read_back() -> None:
    """What is written is read back equal, and what is no comparison is refused by name."""
    whole = comparison(cells=(cell(),), outcomes=(summed("frontier", 8.0, 0.1),))
    data = msgspec.json.encode(whole)
    assert decode_comparison(data) == whole
    assert b'"schema":"crossover.compare/1"' in data
    with pytest.raises(LiveError, match=r"f\.json is no comparison"):
        decode_comparison(b"{}", "f.json")
    with pytest.raises(LiveError, match="schema 'x' is not"):
        decode_comparison(data.replace(b"crossover.compare/1", b"x"), "f.json")


def test_a_cell_without_its_records_is_measured_again(tmp_path: Path) -> None:
    """A cell counts only if its file has all its records; a file that is no comparison is refused."""
    with LiveDirectory.opened(tmp_path) as directory:
        assert directory.read() is None
        directory.add("frontier-1-8", [record(1.0, 2.0)])
        kept = comparison(cells=(cell(), cell("baseline"), cell("speculative", records=2)))
        directory.add("speculative-1-8", [record(1.0, 2.0)])
        directory.write(kept, "text")
        found = directory.read()
        assert found is not None
        assert [each.run for each in found.cells] == ["frontier-1-8"]
        with (
            pytest.raises(LiveError, match="another comparison is at work"),
            LiveDirectory.opened(tmp_path),
        ):
            pass


def test_what_is_owed(tmp_path: Path) -> None:
    """A loan is owed to its router until it is returned, or until that router has started again."""
    directory = LiveDirectory(tmp_path)
    assert directory.owed("http://a", 0.0) is None
    directory.lend(Loan("http://a", {"policy": "baseline"}))
    os.utime(tmp_path / "borrowed.json", (1000.0, 1000.0))
    assert directory.owed("http://a", 999.0) == {"policy": "baseline"}
    assert directory.owed("http://b", 999.0) is None
    assert directory.owed("http://a", 1001.0) is None
    directory.returned()
    assert directory.owed("http://a", 0.0) is None


ROWS = [Row(0.0, 10, 5), Row(1.0, 20, 6), Row(3.0, 30, 7)]


def test_a_trace_comes_round() -> None:
    """Arrivals are scaled, and after the last line the first comes again a mean gap later."""
    times = list(itertools.islice(arrivals(ROWS, 2.0), 7))
    assert times == pytest.approx([0.0, 0.5, 1.5, 2.25, 2.75, 3.75, 4.5])
    lengths = InOrder(ROWS, None, None)
    assert [lengths.of(Place(1, "x2", at)) for at in (0, 2, 3)] == [(10, 5), (30, 7), (10, 5)]
    assert InOrder(ROWS, 9, 8).of(Place(1, "x2", 1)) == (8, 9)


def test_a_trace_that_does_not_fit(tmp_path: Path) -> None:
    """Lines too long for the context are left out, and a trace of fewer than two is refused."""
    path = tmp_path / "t.csv"
    path.write_text("seconds,prompt,output\n0,9,5\n1,9000,5\n3,9,6\n", encoding="utf-8")
    asking = Asking(Wanted(loads=(), trace=path), server(BASE, context_length=8192))
    load = asking.load(Offered(scale=2.0))
    assert load.step.rate == pytest.approx(2 / 6 * 2)
    assert load.arrivals is not None
    assert list(itertools.islice(load.arrivals(), 2)) == pytest.approx([0.0, 1.5])
    with pytest.raises(LiveError, match="no two requests"):
        Asking(Wanted(loads=(), trace=path), server(BASE, context_length=16))
    with pytest.raises(LiveError, match="cannot be read"):
        Asking(Wanted(loads=(), trace=tmp_path / "x.csv"), server(BASE))
    with pytest.raises(LiveError, match="need 8264 tokens"):
        Asking(Wanted(loads=(), output_tokens=8200), server(BASE, context_length=8192))
    with pytest.raises(PromptError, match="leave out --input-tokens"):
        Asking(Wanted(loads=(), output_tokens=9, input_tokens=9, prompts=path), server(BASE))


def measured(records: list[RequestRecord]) -> Measured:
    return Measured(records, Window(0.0, 10.0), Seen(()), 0)


def test_a_cell_that_says_nothing() -> None:
    """Failures alone are a failed server; no answer in the window, or no usage, asks for a change."""
    turn = Turn(1, LOADS[0], "frontier")
    with pytest.raises(LiveFailedError, match=r"2 requests failed .*the first with: down"):
        _refuse(turn, measured([record(2, 3, error="late"), record(1, 2, error="down")]))
    with pytest.raises(LiveError, match="give more --seconds"):
        _refuse(turn, measured([record(1, 20)]))
    with pytest.raises(LiveError, match="sends usage"):
        _refuse(turn, measured([record(1, 2, output_tokens=None)]))
    _refuse(turn, measured([record(1, 2), record(1, 2, error="one of many")]))


def test_a_summary_and_a_picture(tmp_path: Path) -> None:
    """People get a table for each load with every figure, the advice, and a PNG over load."""
    outcomes = [
        summed(policy, ms, 0.3, load.name, errors=2, gave_up=policy == "baseline")
        for load in LOADS
        for policy, ms in (("baseline", 10.0), ("speculative", 12.0), ("frontier", 9.0))
    ]
    whole = comparison(outcomes=tuple(outcomes))
    whole = msgspec.structs.replace(whole, advice=advise(whole))
    text = summary_text(whole)
    row = next(line for line in text.splitlines() if line.startswith(" frontier"))
    assert row.split() == [
        "frontier", "9.00", "±0.30", "18.00", "111", "5", "50%", "3", "40", "2",
    ]  # fmt: skip
    assert "2 overload" in text
    assert "  frontier: as configured" in text.splitlines()
    line: Change = {"policy": "frontier", "threshold": 12.0, "scope": "total"}
    told = msgspec.structs.replace(whole.conditions, line=line)
    ruled = msgspec.structs.replace(whole, conditions=told, cells=(cell(decided_by="forecast"),))
    assert "  frontier: forecast, threshold 12.0, scope total" in summary_text(ruled).splitlines()
    assert "Over all loads: Run the pair with frontier" in text
    draw(tmp_path / "p.png", whole)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_kinds_are_what_the_router_takes() -> None:
    """The policies of a comparison are those that the router's admin listener can be told."""
    from typing import get_args

    from router.admin_models import PolicyName

    assert set(KINDS) == set(get_args(PolicyName))
    assert {name for name, kind in KINDS.items() if kind == "single"} == set(Role)
