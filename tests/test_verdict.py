"""The demo's verdict, from records and decisions that are made up."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from loadtest.arrivals import Ramp
from loadtest.demo_report import Finished, check_all, report
from loadtest.demo_speed import Speed
from loadtest.record import RequestRecord
from loadtest.verdict import (
    Decided,
    DecisionPage,
    Happened,
    Line,
    Score,
    best_of_each_level,
    by_reason,
    disagreement,
    level_scores,
    overlap_seconds,
    quantile,
    speed_sentence,
    total_score,
    unseen,
)
from router.load import Role
from router.policy import Reason

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
LINE = Line(threshold=12, band=0.25, dwell=2.0)
LOAD = Ramp((1, 2), 10.0)


def record(started: float, ended: float, tokens: int = 10, **fields: Any) -> RequestRecord:
    usual: dict[str, Any] = {"id": "a", "first_chunk": started, "output_tokens": tokens}
    return RequestRecord(started=started, ended=ended, **(usual | fields))


def score(tok_s: float, ms: float | None = 10.0) -> Score:
    return Score(tok_s, ms, ms, 1, {SPEC: 1, BASE: 0})


def decided(
    backend: Role | None,
    reason: str,
    n: int,
    m: int,
    frontier: float | None = None,
    threshold: float | None = 12.0,
) -> Decided:
    if frontier is None and threshold is not None:
        frontier = max(0.0, threshold - m)
    return Decided("a", backend, Reason(reason), n, m, frontier, threshold)


def test_levels() -> None:
    """Tokens count in the level in which they came, a request in the one in which it started."""
    records = [
        record(0, 5, 10, backend=SPEC),
        record(5, 15, 100, backend=BASE),
        record(11, 13, 20, backend=BASE),
    ]
    one, two = level_scores(records, LOAD)
    assert (one.tok_s, two.tok_s) == (6.0, 7.0)
    assert (one.requests, two.requests) == (2, 1)
    assert one.ms_per_token == pytest.approx((500 + 100) / 2)
    assert two.ms_per_token == pytest.approx(100)
    assert one.by_backend == {SPEC: 1, BASE: 1}


def test_each_level_counts_alike() -> None:
    """A level with few slow requests weighs as much as one with many fast ones."""
    fast = [record(i, i + 1, 100) for i in range(9)]
    total = total_score([*fast, record(10, 20, 100)], LOAD)
    assert total.ms_per_token == pytest.approx((10 + 100) / 2)
    assert total.p95_ms_per_token == pytest.approx(100)
    assert (total.tok_s, total.requests) == (50.0, 10)


def test_tokens_after_the_load_do_not_count() -> None:
    """What the last requests emit after the load has ended adds nothing to its speed."""
    assert total_score([record(15, 25, 100)], LOAD).tok_s == 2.5


def test_no_requests() -> None:
    """A level in which nothing started has no time per token, and a load likewise."""
    assert level_scores([], LOAD)[0] == Score(0.0, None, None, 0, {SPEC: 0, BASE: 0})
    assert total_score([], LOAD) == Score(0.0, None, None, 0, {SPEC: 0, BASE: 0})


@pytest.mark.parametrize(
    ("weighted", "share", "value"),
    [
        ([], 0.5, None),
        ([(3, 1)], 0.95, 3),
        ([(2, 1), (1, 1), (3, 1), (4, 1)], 0.5, 2),
        ([(1, 1), (2, 19)], 0.95, 2),
        ([(1, 19), (2, 1)], 0.95, 1),
        ([(1, 18), (2, 2)], 0.95, 2),
    ],
)
def test_quantile(weighted: list[tuple[float, float]], share: float, value: float | None) -> None:
    """A quantile is the smallest value that has the share of the weight at or below it."""
    assert quantile(weighted, share) == value


def test_the_best_of_each_level() -> None:
    """What free switching would reach is the mean of the better server at each level."""
    assert best_of_each_level([[score(1), score(5)], [score(3), score(2)]]) == 4


def test_overlap() -> None:
    """Only the time in which both servers have a request open is an overlap."""
    records = [
        record(0, 4, backend=SPEC),
        record(2, 3, backend=SPEC),
        record(3, 6, backend=BASE),
        record(6, 7, backend=SPEC),
        record(8, 9, backend=BASE),
        record(0, 9),
    ]
    assert overlap_seconds(records) == pytest.approx(1.0)
    assert overlap_seconds([]) == 0


@pytest.mark.parametrize(
    ("pair", "starts"),
    [
        (110, "The pair is better than either server alone here: +10% output tokens"),
        (101, "The pair is about as good as baseline only here"),
        (99, "The pair is about as good as baseline only here"),
        (80, "The pair is not better than baseline only here, because each switch overlaps both"),
    ],
)
def test_speed(pair: float, starts: str) -> None:
    """The sentence on speed names the better single server and says when the pair is not better."""
    said = speed_sentence(score(pair, 9.0), {SPEC: score(50), BASE: score(100)}, 2.5, 20.0)
    assert said.startswith(starts)
    assert "at 9.0 ms per token (speculative and baseline: 10.0 and 10.0)" in said
    assert "2.5 of 20.0 s" in said


def test_no_speed() -> None:
    """Without tokens there is no verdict on speed, and without times it has none."""
    silent = {SPEC: score(0), BASE: score(100)}
    assert "no verdict" in speed_sentence(score(1), silent, 0, 1)
    alone = {SPEC: score(50, None), BASE: score(100)}
    assert "ms per token" not in speed_sentence(score(1), alone, 0, 1)


@pytest.mark.parametrize(
    ("backend", "reason", "n", "m", "fine"),
    [
        (SPEC, "below_threshold", 11, 0, True),
        (SPEC, "below_threshold", 4, 7, True),
        (SPEC, "below_threshold", 4, 8, False),
        (BASE, "below_threshold", 4, 7, False),
        (BASE, "at_threshold", 0, 12, True),
        (BASE, "at_threshold", 0, 11, False),
        (SPEC, "at_threshold", 12, 0, False),
        (BASE, "band", 0, 11, True),
        (BASE, "band", 0, 9, True),
        (BASE, "band", 0, 8, False),
        (BASE, "band", 0, 12, False),
        (BASE, "dwell", 0, 8, True),
        (BASE, "dwell", 0, 9, False),
        (SPEC, "dwell", 0, 8, False),
        (BASE, "fixed", 0, 0, True),
        (BASE, "queued", 3, 0, True),
        (BASE, "always", 0, 0, False),
        (None, "at_threshold", 12, 0, False),
        (SPEC, "below_threshold", -1, 0, False),
    ],
)
def test_reasons_agree_with_their_numbers(
    backend: Role | None, reason: str, n: int, m: int, fine: bool
) -> None:
    """A decision's reason is checked against n, m and the line, and against where it was sent."""
    said = disagreement(decided(backend, reason, n, m), LINE)
    assert (said is None) is fine, said
    assert said is None or reason in said


def test_another_line_is_a_disagreement() -> None:
    """A decision along another line than the one that was set is wrong, whatever its numbers."""
    said = disagreement(decided(SPEC, "below_threshold", 0, 0, threshold=8.0), LINE)
    assert said is not None
    assert "threshold 8.0" in said


@pytest.mark.parametrize(
    ("backend", "reason", "fine"),
    [(BASE, "fixed", True), (SPEC, "fixed", False), (BASE, "at_threshold", False)],
)
def test_a_fixed_policy(backend: Role, reason: str, fine: bool) -> None:
    """Under a policy that names one server, every decision names it and says that it is fixed."""
    assert (
        disagreement(decided(backend, reason, 0, 5, threshold=None), None, BASE) is None
    ) is fine


def test_decisions_as_the_router_writes_them() -> None:
    """The body of /decisions is read, its events included and its other fields left out."""
    body = {
        "items": [
            {
                "kind": "decision", "time": 1.0, "request_id": "a", "route": "chat_completions",
                "backend": "baseline", "reason": "at_threshold", "n": 0, "m": 12, "frontier": 0.0,
                "threshold": 12.0, "replay": False, "outcome": None, "status": None,
                "duration": None,
            },
            {"kind": "event", "time": 0.5, "event": "policy", "detail": "policy=frontier"},
        ]
    }  # fmt: skip
    page = msgspec.json.decode(msgspec.json.encode(body), type=DecisionPage)
    assert page.items == [
        decided(BASE, "at_threshold", 0, 12),
        Happened("policy", "policy=frontier"),
    ]


def test_unseen() -> None:
    """An answer whose headers are not what /decisions holds of it is named."""
    said: dict[str, Any] = {"backend": BASE, "reason": "band", "n": 0, "m": 11}
    records = [
        record(0, 1, id="a", **said),
        record(0, 1, id="a", **(said | {"m": 10})),
        record(0, 1, id="b", **said),
    ]
    assert unseen(records, [decided(BASE, "band", 0, 11)]) == ["a", "b"]


def test_by_reason() -> None:
    """Requests are counted by backend and reason."""
    records = [record(0, 1, backend=BASE, reason="band")] * 2 + [record(0, 1)]
    assert by_reason(records) == {(BASE, "band"): 2, (None, None): 1}


def finished(only: Role | None, **fields: Any) -> Finished:
    """A run in which nothing went wrong, but for `fields` of its first record."""
    backends = [SPEC, BASE] if only is None else [only]
    records, decisions = [], []
    for at, backend in enumerate(backends):
        reason = "fixed" if only else ("below_threshold" if backend is SPEC else "at_threshold")
        n, m = (0, 0) if backend is SPEC else (0, 12)
        name = f"{only}-{at}"
        said: dict[str, Any] = {"id": name, "backend": backend, "reason": reason, "n": n, "m": m}
        records.append(record(0, 1, **(said | (fields if at == 0 else {}))))
        k = None if only else 12.0
        frontier = None if k is None else max(0.0, k - m)
        decisions.append(Decided(name, backend, Reason(reason), n, m, frontier, k))
    return Finished(str(only), only, records, decisions)


GOOD = [finished(None), finished(SPEC), finished(BASE)]
AT_REST = {"router, speculative": 0, "speculative server": 0}


def test_a_good_run_passes() -> None:
    """Nothing wrong is five checks that pass."""
    checks = check_all(GOOD, AT_REST)
    assert [check.ok for check in checks] == [True] * 5
    assert checks[0].text == "4 requests, 0 errors"
    assert checks[3].text == "the reasons of 4 of 4 decisions agree with their numbers"


@pytest.mark.parametrize(
    ("runs", "counts", "failed", "said"),
    [
        ([finished(None, error="cut"), *GOOD[1:]], AT_REST, [0], "1 errors: None-0: cut"),
        (GOOD, {"router, speculative": 1}, [1], "{'router, speculative': 1}"),
        (GOOD, {}, [1], ""),
        ([Finished("pair", None, GOOD[0].records[:1], GOOD[0].decisions), *GOOD[1:]], AT_REST, [2],
         "1 requests to speculative, 0 requests to baseline"),
        ([Finished("pair", None, GOOD[0].records, [decided(BASE, "band", 0, 0)]), *GOOD[1:]],
         AT_REST, [3, 4], "band with n=0, m=0"),
        ([finished(None, m=3), *GOOD[1:]], AT_REST, [4], "None-0"),
        ([Finished("pair", None, [], []), *GOOD[1:]], AT_REST, [2], "0 requests"),
    ],
)  # fmt: skip
def test_a_fault_fails_its_check(
    runs: list[Finished], counts: dict[str, int], failed: list[int], said: str
) -> None:
    """An error, a leak, an unused server, a wrong reason and a missing entry each fail one check."""
    checks = check_all(runs, counts)
    assert [at for at, check in enumerate(checks) if not check.ok] == failed
    assert said in checks[failed[0]].text


def test_many_faults_are_cut_short() -> None:
    """Of many faults a few are shown, and how many more there are."""
    records = [record(0, 1, id=f"r{i}", error="cut", backend=SPEC) for i in range(9)]
    checks = check_all([Finished("pair", None, records, [])], AT_REST)
    assert checks[0].text == "9 requests, 9 errors: r0: cut; r1: cut; r2: cut; 6 more"


def test_the_report_of_a_bad_run() -> None:
    """A run with an error, a request without a decision and levels without requests is reported."""
    console = Console(file=StringIO(), width=100)
    runs = [finished(None, error="cut", backend=None, reason=None), *GOOD[1:]]
    checks = check_all(runs, AT_REST)
    report(console, LOAD, runs, checks, Speed(ok=None, text="not judged: no time"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "✗ 4 requests, 1 errors: None-0: cut" in text
    assert "✓ no count leaked" in text
    assert "\n- speed not judged: no time\n" in text
    assert re.search(r"\nnone +None +1 *\n", text)
    assert re.search(r"\n +2 +0 +0 +0 +- +- +- +- *\n", text)
