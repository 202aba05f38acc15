"""The table of reported cases and the tests of their ids say the same; the matrix still runs."""

from __future__ import annotations

import ast
import asyncio
import re
from collections import Counter
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner

from tests.matrix import Peer, main, run_all, table
from tests.trials import TRIALS

HERE = Path(__file__).resolve().parent
ROW = re.compile(r"^\| ([A-Z]\d+) \| ([^|]+) \| ([^|]+) \| \[`(\w+)`\]\(cases/(\w+\.py)\) \|$")
VERDICTS = ("held", "was broken, mended: ", "does not apply: ")


def rows() -> list[tuple[str, ...]]:
    """The rows of the table: id, symptom, verdict, test, file."""
    lines = (HERE / "cases.md").read_text(encoding="utf-8").splitlines()
    return [match.groups() for line in lines if (match := ROW.match(line))]


def functions() -> set[tuple[str, str]]:
    """Every test in `tests/cases`, with its file."""
    return {
        (node.name, path.name)
        for path in (HERE / "cases").glob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_case_is_named_once_with_its_verdict() -> None:
    """There are 76 ids, each once, each with a symptom and one of three verdicts, at most 6 idle."""
    ids = Counter(row[0] for row in rows())
    assert len(ids) == 76
    assert set(ids.values()) == {1}
    numbers = {
        "S": {1, 3, 4, 5, 6, 7, 8, 10, 11, 12}, "E": {*range(1, 10)},
        "L": {1, 2, *range(4, 12), 13, 14, 15}, "D": {*range(2, 20)},
        "H": {1, 2, *range(4, 10)}, "B": {1, 3, 4, 5, 6, 7}, "X": {1, 3, 4, 5, 6},
        "M": {1, 3, 4}, "A": {1, 2, 4, 5},
    }  # fmt: skip
    assert set(ids) == {f"{letter}{n}" for letter, found in numbers.items() for n in found}
    assert all(row[2].startswith(VERDICTS) for row in rows())
    assert sum(row[2].startswith(VERDICTS[2]) for row in rows()) <= 6


def test_every_named_test_exists_and_every_test_is_named() -> None:
    """The tests in the table are those in `tests/cases`, and each carries its id."""
    assert {(row[3], row[4]) for row in rows()} == functions()
    assert [row for row in rows() if not row[3].startswith(f"test_{row[0]}_")] == []


def test_the_matrix_names_trials_of_known_cases() -> None:
    """Each line of the matrix in the document is a trial, and each trial a reported case."""
    ids = {row[0] for row in rows()}
    assert all({*re.findall(r"[A-Z]\d+", name)} <= ids for name in TRIALS)
    text = (HERE / "cases.md").read_text(encoding="utf-8").partition("## Other proxies")[2]
    assert re.findall(r"^\| ([A-Z]\d+[^|]*) \|", text, re.MULTILINE) == list(TRIALS)


def test_the_matrix_runs_on_a_fresh_router() -> None:
    """Two trials on a router of our own end as passed, in a table that says the version."""
    trials = {name: TRIALS[name] for name in ("S8 plain", "H9")}
    found = asyncio.run(run_all([Peer("crossover")], trials))
    text = table(found, {"crossover": Peer("crossover").version()})
    assert found == {"S8 plain": {"crossover": None}, "H9": {"crossover": None}}
    assert "| S8 plain | pass |" in text
    assert "| passed of 2 | 2 |" in text
    broken = table({"H9": {"crossover": "two | of them"}}, {"crossover": "Crossover"})
    assert "**fail**" in broken
    assert broken.endswith("- H9, crossover: two / of them")


def test_the_matrix_refuses_names_that_it_does_not_know() -> None:
    """A peer or a trial of another name is one line and code 2."""
    app = Typer()
    app.command()(main)
    for arguments in (["--peers", "squid"], ["--only", "S99"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert result.output == f"matrix: not known: {arguments[1]}\n"
