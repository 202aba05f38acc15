"""The calibration file: what is read of it, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.calibration import (
    SCHEMA,
    Calibration,
    CalibrationError,
    Line,
    SwitchRule,
    format_calibration,
    parse_calibration,
)
from router.frontier import Frontier


def document(frontier: Any = None, **more: Any) -> bytes:
    line = {"scope": "total", "threshold": 32} if frontier is None else frontier
    return json.dumps({"schema": SCHEMA, "frontier": line} | more).encode()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"scope": "total", "threshold": 32}, Frontier.total(32)),
        ({"threshold": 32}, Frontier.total(32)),
        ({"threshold": 59.6}, Frontier.total(59)),
        ({"threshold": "never"}, Frontier.total(0)),
        ({"threshold": 0}, Frontier.total(0)),
        ({"threshold": "always"}, Frontier.total(math.inf)),
        ({"threshold": "infinity"}, Frontier.total(math.inf)),
        ({"scope": "speculative", "threshold": 8}, Frontier.speculative_only(8)),
        ({"scope": "speculative", "threshold": "always"}, Frontier.speculative_only(math.inf)),
        ({"scope": "table", "table": [8, 4, 1]}, Frontier.from_table((8, 4, 1))),
        ({"scope": "table", "table": ["infinity", 5, "never"]},
         Frontier.from_table((math.inf, 5, 0))),
        ({"scope": "table", "table": [0]}, Frontier.from_table((0,))),
    ],
)  # fmt: skip
def test_the_line_of_a_file(written: dict[str, Any], expected: Frontier) -> None:
    """A number, a word or a table becomes the line that it says."""
    assert parse_calibration(document(written)).line == expected


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "truncated"),
        (b"\xff", "malformed"),
        (b"[]", "object"),
        (b"{}", "schema"),
        (b'{"schema": "%b"}' % SCHEMA.encode(), "frontier"),
        (document(schema="crossover.calibration/2"), "schema: 'crossover.calibration/2' is not"),
        (document(schema=""), "schema"),
        (document(schema=1), "schema"),
        (document(treshold=3), "treshold"),
        (document({"treshold": 3}), "treshold"),
        (document({"threshold": 3, "Scope": "total"}), "Scope"),
        (document(switch={"bend": 0.1}), "bend"),
        (document(curves={"speculative": {"points": []}}), "baseline"),
        (document(curves={"speculative": {"points": [], "x": 1}, "baseline": {"points": []}}), "x"),
        (document({"scope": "both", "threshold": 3}), "both"),
        (document({"threshold": "32"}), "32"),
        (document({"threshold": "sometimes"}), "sometimes"),
        (document({"threshold": True}), "bool"),
        (document({"threshold": -1}), "negative"),
        (b'{"schema":"%b","frontier":{"threshold":1e999}}' % SCHEMA.encode(), "range"),
        (b'{"schema":"%b","frontier":{"threshold":NaN}}' % SCHEMA.encode(), "malformed"),
        (b'{"schema":"%b","note":"\xff","frontier":{"threshold":1}}' % SCHEMA.encode(), "UTF-8"),
        (document({}), "do not go together"),
        (document({"threshold": None}), "do not go together"),
        (document({"scope": "table"}), "do not go together"),
        (document({"scope": "table", "table": []}), "do not go together"),
        (document({"scope": "table", "threshold": 8}), "do not go together"),
        (document({"scope": "table", "threshold": 8, "table": [8]}), "do not go together"),
        (document({"threshold": 8, "table": [8]}), "do not go together"),
        (document({"scope": "speculative", "table": [8]}), "do not go together"),
        (document({"scope": "table", "table": [1, 2, 1]}), "never rises or never falls"),
        (document({"scope": "table", "table": [1, -2]}), "negative"),
        (document({"scope": "table", "table": ["sometimes"]}), "table"),
        (document(verdict="perhaps"), "verdict"),
        (document(switch={"band": 1.0}), "switch.band: 1.0"),
        (document(switch={"band": -0.1}), "switch.band: -0.1"),
        (document(switch={"dwell": -1}), "switch.dwell: -1"),
        (document(switch={"dwell": "1e999"}), "dwell"),
        (document(interval=[1]), "interval"),
        (document(fingerprint={"gpu": ["H200"]}), "fingerprint"),
        (document(interval=[1, "sometime"]), "interval"),
        (document(switch_rule={"parameters": {}}), "name"),
        (document(switch_rule={"name": "regret", "parameters": {"cost": "much"}}), "parameters"),
        (document(switch_rule={"name": "regret", "params": {}}), "params"),
        (document(objectives={"ttft": {"verdict": "at"}}), "crossover"),
        (document(contention={"gpus": "some"}), "gpus"),
    ],
)  # fmt: skip
def test_what_is_no_calibration_is_refused(body: bytes, where: str) -> None:
    """A file with a fault is refused as a whole, and the text names the place."""
    with pytest.raises(CalibrationError, match=where.replace("[", r"\[")):
        parse_calibration(body)


def test_what_is_not_said_is_not_guessed() -> None:
    """A minimal file leaves band and dwell as configured and claims no curves."""
    found = parse_calibration(document())
    assert (found.switch.band, found.switch.dwell) == (None, None)
    assert (found.verdict, found.curves, found.interval, found.fingerprint) == (
        None,
        None,
        None,
        {},
    )


@pytest.mark.parametrize(
    ("verdict", "threshold"),
    [("at", 32), ("always", "always"), ("never", "never"), ("unsure", 32), ("unsure", "never")],
)
def test_every_verdict_can_be_said(verdict: str, threshold: object) -> None:
    """A calibration may say at, always, never and not sure, with a line that fits."""
    frontier = {"scope": "total", "threshold": threshold}
    found = parse_calibration(document(verdict=verdict, frontier=frontier))
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("verdict", "threshold"), [("at", "never"), ("always", 32), ("never", 32), ("never", "always")]
)
def test_a_verdict_does_not_contradict_its_line(verdict: str, threshold: object) -> None:
    """A file whose verdict and line say different things is refused."""
    frontier = {"scope": "total", "threshold": threshold}
    with pytest.raises(CalibrationError, match="contradict"):
        parse_calibration(document(verdict=verdict, frontier=frontier))


def test_a_whole_file_is_read_as_written() -> None:
    """Curves, interval, fingerprint and words about the making arrive unchanged."""
    point = {"concurrency": 4, "tokens_per_second": 300.5, "low": 290, "high": 310}
    found = parse_calibration(
        document(
            verdict="unsure",
            switch={"band": 0.0, "dwell": 0},
            curves={"speculative": {"points": [point | {"accept_length": 2.1}]},
                    "baseline": {"points": [point]}},
            interval=[10, 14.5],
            fingerprint={"gpu": "H200", "tp": 1, "topk": 1, "overlap": True, "temperature": 0.5,
                         "draft": None},
            created="2026-11-29T12:00:00Z",
            command="loadtest calibrate",
            note="Größe \u2713",
        )
    )  # fmt: skip
    assert found.curves is not None
    assert found.curves.speculative.points[0].accept_length == 2.1
    assert found.curves.baseline.points[0].accept_length is None
    assert found.curves.baseline.points[0].tokens_per_second == 300.5
    assert (found.switch.band, found.switch.dwell) == (0.0, 0.0)
    assert found.interval == (10.0, 14.5)
    assert found.fingerprint["overlap"] is True
    assert found.fingerprint["draft"] is None
    assert found.note == "Größe \u2713"


def test_what_a_fit_adds_is_read() -> None:
    """Objectives, contention, conditions, notes and a switch rule arrive unchanged."""
    found = parse_calibration(
        document(
            objective="throughput",
            interval=[43.5, "infinity"],
            objectives={"throughput": {"verdict": "unsure", "crossover": 60.5,
                                       "interval": [43.5, "infinity"], "confidence": 0.98,
                                       "settle": "levels above 256"},
                        "slo": {"verdict": "always", "crossover": "infinity",
                                "holds_up_to": {"speculative": 64}}},
            contention={"gpus": "shared", "speculative": 0.6,
                        "overlaps": [{"n": 8, "m": 16, "speculative": 0.5}]},
            switch_rule={"name": "regret", "parameters": {"cost_s": 1.5}},
            conditions={"baseline.levels": "1, 2"},
            notes=["measured once"],
        )
    )  # fmt: skip
    assert found.interval == (43.5, "infinity")
    assert found.objectives["throughput"].settle == "levels above 256"
    assert found.objectives["slo"].holds_up_to == {"speculative": 64.0}
    assert found.contention is not None
    assert found.contention.overlaps[0].baseline is None
    assert found.switch_rule == SwitchRule("regret", {"cost_s": 1.5})
    assert (found.conditions, found.notes) == ({"baseline.levels": "1, 2"}, ("measured once",))


def test_a_switch_rule_needs_no_parameters() -> None:
    """A rule may be a name alone."""
    found = parse_calibration(document(switch_rule={"name": "regret"}))
    assert found.switch_rule == SwitchRule("regret")


def test_what_is_not_known_is_not_written() -> None:
    """A file has the fields that say something, and reads back as it was."""
    made = Calibration(
        schema=SCHEMA, frontier=Line(threshold=60.0), verdict="at", switch_rule=SwitchRule("regret")
    )
    written = format_calibration(made)
    assert json.loads(written) == {
        "schema": SCHEMA,
        "frontier": {"threshold": 60.0},
        "verdict": "at",
        "switch_rule": {"name": "regret", "parameters": {}},
    }
    assert parse_calibration(written) == made


def test_two_files_do_not_share_a_fingerprint() -> None:
    """The empty fingerprint of one file is not that of another."""
    one, other = parse_calibration(document()), parse_calibration(document())
    one.fingerprint["gpu"] = "H200"
    assert other.fingerprint == {}


@given(body=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(deadline=None)
def test_bytes_of_any_kind_never_crash_the_reader(body: bytes) -> None:
    """Whatever the bytes, the reader refuses them with its own error."""
    with pytest.raises(CalibrationError):
        parse_calibration(body)


words = st.sampled_from(["scope", "threshold", "table", "total", "speculative", "always", "never"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@given(frontier=values)
@settings(deadline=None)
def test_a_file_gives_a_valid_line_or_an_error(frontier: Any) -> None:
    """Whatever is written for the frontier, it is a line or refused: nothing between."""
    try:
        line = parse_calibration(document({"threshold": 1} if frontier is None else frontier)).line
    except CalibrationError:
        return
    assert line.at(0) >= 0
