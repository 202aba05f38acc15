"""Each notice: a case that makes it appear and one that does not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.notices import CODES, codes, point_notices, sweep_notices
from loadtest.sweep_schema import Pace, Plan, Point, Server, Sweep, Workload
from router.load import Role
from tests.sweeps import BASE, SPEC, point, server

PACE = Pace()


def said(**fields: Any) -> set[str]:
    return {notice.code for notice in point_notices(point(**fields), PACE)}


def test_a_good_point_says_nothing() -> None:
    """A level about which nothing is to be said has no notice."""
    assert said() == set()


# Code; what makes it appear; nearly the same, which does not.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("above-cap", {"level": 49, "requests": 500}, {"level": 48, "requests": 500}),
    ("above-cap", {"cap": 7}, {"cap": None}),
    ("queued", {"queued": 0.5}, {"queued": 0.4}),
    ("queued", {"queued": 9.0}, {"queued": None}),
    ("errors", {"errors": 1, "error": "status 503: full"}, {"errors": 0}),
    ("gave-up", {"gave_up": True}, {"gave_up": False}),
    ("short-window", {"requests": 23}, {"requests": 24}),
    ("short-window", {"level": None, "rate": 2.0, "requests": 29, "window_s": 15.0},
     {"level": None, "rate": 2.0, "requests": 30, "window_s": 15.0}),
    ("short-warm-up", {"unwarmed": 1}, {"unwarmed": 0}),
    ("client-bound", {"client_cpu": 0.8}, {"client_cpu": 0.79}),
    ("client-bound", {"client_lag_s": 0.02}, {"client_lag_s": 0.019}),
    ("client-bound", {"client_lag_s": 0.5, "client_cpu": None},
     {"client_lag_s": None, "client_cpu": None}),
    (
        "cache-hits",
        {"cached_share": 0.1, "input_tokens": 900.0},
        {"cached_share": 0.09, "input_tokens": 900.0},
    ),
    # A chat template's beginning is in everybody's cache.
    ("cache-hits", {"cached_share": 0.65}, {"cached_share": 0.64}),
    ("cache-hits", {"cached_share": 0.9, "input_tokens": None}, {"cached_share": 0.3}),
    ("cache-hits", {"cached_share": 0.9}, {"cached_share": None}),
    ("repeated-prompts", {"repeated": 1}, {"repeated": 0}),
    ("no-usage", {"uncounted": 1}, {"uncounted": 0}),
    ("short-answers", {"output_tokens": 120.0}, {"output_tokens": 122.0}),
    ("short-answers", {"output_tokens": None}, {"asked_tokens": None}),
    ("other-load", {"most_running": 10, "most_queued": 0}, {"most_running": 9}),
    ("other-load", {"most_queued": 3, "most_running": 8},
     {"level": None, "rate": 5.0, "most_running": 90}),
    ("behind-rate", {"level": None, "rate": 10.0, "requests": 69, "most_running": 90},
     {"level": None, "rate": 10.0, "requests": 71}),
    ("no-telemetry", {"polls": 0}, {"polls": 1}),
    ("no-accept-length", {"accept_length": None}, {"accept_length": None, "role": BASE}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "bad", "good"), CASES)
def test_rules(code: str, bad: dict[str, Any], good: dict[str, Any]) -> None:
    """The notice appears where it should and not a step beside it."""
    assert code in said(**bad)
    assert code not in said(**good)


def test_a_queue_above_the_cap_is_the_caps() -> None:
    """Above the cap requests must wait: that is said once, as the cap's doing."""
    assert {"above-cap"} == said(level=60, queued=12.0, requests=500, most_queued=12)


def sweep(*points: Point, **fields: Any) -> Sweep:
    usual: dict[str, Any] = {
        "created": "t", "command": "c", "version": "1", "plan": Plan(levels=(8,), passes=3),
        "workload": Workload(prompts="corpus"), "pace": PACE,
        "servers": (server(SPEC), server(BASE)), "points": points,
    }  # fmt: skip
    return Sweep(**(usual | fields))


WHOLE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("few-passes", {"plan": Plan(levels=(8,), passes=2)}, {}),
    ("wrong-role", {"servers": (server(SPEC, speculates=False),)}, {"servers": (server(SPEC),)}),
    ("wrong-role", {"servers": (server(BASE, speculates=True),)},
     {"servers": (server(BASE, speculates=None),)}),
    ("estimated-tokens", {"workload": Workload(prompts="corpus", input_tokens=9)},
     {"workload": Workload(prompts="corpus", input_tokens=9),
      "servers": (server(SPEC, tokens_per_word=1.3),)}),
    ("estimated-tokens", {"workload": Workload(prompts="corpus", trace="t.csv")},
     {"workload": Workload(prompts="mine.txt (ab)", trace="t.csv")}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "bad", "good"), WHOLE)
def test_rules_of_the_whole(code: str, bad: dict[str, Any], good: dict[str, Any]) -> None:
    """Notices of the sweep as a whole appear where they should and only there."""
    assert code in codes(sweep_notices(sweep(**bad)))
    assert code not in codes(sweep_notices(sweep(**good)))


def test_passes_of_one_level_are_said_together() -> None:
    """The same notice of several passes is one, with the passes; others stay apart."""
    points = [point(number=at, errors=1, error="no") for at in (3, 1)]
    points += [
        point(number=2, level=4, errors=1, error="no", most_running=4),
        point(role=BASE, errors=1, error="no"),
    ]
    found = sweep_notices(sweep(*points))
    assert [(n.code, n.role, n.level, n.passes) for n in found] == [
        ("errors", Role.BASELINE, 8, (1,)),
        ("errors", Role.SPECULATIVE, 4, (2,)),
        ("errors", Role.SPECULATIVE, 8, (1, 3)),
    ]


def test_texts_tell() -> None:
    """A notice's words hold the numbers that made it, and its code is of the closed set."""
    by_code: dict[str, str] = {}
    for _, bad, _ in CASES:
        by_code |= {notice.code: notice.text for notice in point_notices(point(**bad), PACE)}
    for _, bad, _ in WHOLE:
        by_code |= {notice.code: notice.text for notice in sweep_notices(sweep(**bad))}
    assert set(by_code) == set(CODES)
    above = next(point_notices(point(level=60, requests=500), PACE)).text
    assert "runs 48 requests at once (max_running_requests): the other 12 waited" in above
    said_of = {n.code: n.text for n in point_notices(point(errors=3, error="status 503"), PACE)}
    assert said_of["errors"] == "3 of 60 failed, the first: status 503"
    busy = next(point_notices(point(client_cpu=0.93, client_lag_s=0.031), PACE)).text
    assert "used 93% of a core and its event loop was late by up to 31 ms" in busy


def test_a_server_that_says_nothing_of_its_mode() -> None:
    """Not knowing whether a server speculates is no contradiction of its role."""
    unknown: Server = msgspec.structs.replace(server(SPEC), speculates=None)
    assert codes(sweep_notices(sweep(servers=(unknown,)))) == ()


def test_the_document_has_every_code() -> None:
    """SWEEPS.md says of each code what it means and what to do; it names no other."""
    text = (Path(__file__).parent.parent / "loadtest" / "SWEEPS.md").read_text(encoding="utf-8")
    table = text.split("| code | means | do |", 1)[1].split("\n\n", 1)[0]
    firsts = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(code for first in firsts for code in re.findall("`([a-z-]+)`", first)) == sorted(
        CODES
    )
