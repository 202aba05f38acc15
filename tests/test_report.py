"""`loadtest report`: the page and the picture of a calibration, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from loadtest import report_png
from loadtest.__main__ import main
from loadtest.report import report_html
from loadtest.report_svg import Scale
from router.calibration import SCHEMA, Calibration, Line, parse_calibration

SWEEPS = Path(__file__).parent / "data" / "sweeps"


@pytest.fixture(scope="module")
def topk4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration file as `loadtest fit` writes it."""
    out = tmp_path_factory.mktemp("report") / "calibration.json"
    arguments = ["--baseline", "base.json", "--speculative", "k4.json", "k4_rerun.json"]
    files = [str(SWEEPS / word) if word.endswith(".json") else word for word in arguments]
    both = ["--contention", str(SWEEPS / "contention")]
    assert main(["fit", *files, *both, "--out", str(out)]) == 0
    return out


def test_the_page(topk4: Path) -> None:
    """The page shows verdict, curves, interval, line and tables, and asks nothing of a network."""
    page = report_html(parse_calibration(topk4.read_bytes()), [(3, 0), (3, 0), (0, 70)])
    for part in ("Speculate while n + m &lt; 60", "crossover 60.4", "4.8", "By objective", "2656",
                 "Both servers at once (shared GPUs)", "EAGLE-3 steps=3 topk=4", "n 3, m 0: 2",
                 "prefers-color-scheme:dark", "where 3 requests found the pair"):  # fmt: skip
        assert part in page
    assert page.count("<svg") == 2
    assert not re.search(r"<script|<link|src=|url\(|@import", page)
    assert re.findall(r"https?://[^\"<]*", page) == ["http://www.w3.org/2000/svg"] * 2


def test_text_of_a_file_is_escaped() -> None:
    """A calibration from somewhere else cannot put markup into the page."""
    evil = "<script>alert(1)</script>"
    page = report_html(
        Calibration(
            schema=SCHEMA, frontier=Line(threshold=8.0), notes=(evil,), command=evil,
            fingerprint={evil: evil}, conditions={evil: evil},
        )
    )  # fmt: skip
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 6


@pytest.mark.parametrize(
    "line",
    [
        Line(threshold="never"), Line(threshold="always"), Line(scope="speculative", threshold=12.0),
        Line(scope="table", table=(9.0, 8.0, 4.0, 0.0)), Line(scope="table", table=("infinity",)),
    ],
)  # fmt: skip
def test_a_page_without_curves(line: Line) -> None:
    """A file written by hand, with a line and nothing else, has a page too."""
    page = report_html(Calibration(schema=SCHEMA, frontier=line))
    assert page.count("<svg") == 1
    assert "nan" not in page
    assert "inf," not in page


def test_report_writes_both_files(
    topk4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page and the picture lie beside the calibration; records put a load into the plane."""
    file = tmp_path / "c.json"
    shutil.copy(topk4, file)
    records = tmp_path / "run.jsonl"
    rows = [
        {"id": "a", "started": 0, "ended": 1, "n": 5, "m": 2},
        {"id": "b", "started": 0, "ended": 1},
    ]
    records.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    assert main(["report", str(file), "--arrivals", str(records)]) == 0
    assert capsys.readouterr().out == (
        f"written: {tmp_path / 'c.html'}\nwritten: {tmp_path / 'c.png'}\n"
    )
    assert "n 5, m 2: 1" in (tmp_path / "c.html").read_text()
    picture = (tmp_path / "c.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


@pytest.mark.parametrize("verdict", ["always", "never"])
def test_a_picture_of_a_plain_answer(verdict: str, tmp_path: Path) -> None:
    """A line without curves, never reached or never allowed, can be drawn."""
    path = tmp_path / "x.png"
    line = Line(threshold="always" if verdict == "always" else "never")
    report_png.write_png(Calibration(schema=SCHEMA, frontier=line), path, [(1.0, 2.0)])
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("no.json", None, "No such file or directory"),
        ("bad.json", b"{}", "schema"),
        ("sweep.json", b'{"points": []}', "points"),
    ],
)
def test_a_report_of_no_calibration(
    name: str, content: bytes | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no calibration is refused in one line."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["report", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert name in said
    assert said.count("\n") == 1


def test_a_report_with_records_that_are_none(
    topk4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arrivals that are no records are refused with file and line."""
    (tmp_path / "r.jsonl").write_text(json.dumps({"x": 1}))
    out = str(tmp_path / "p.html")
    arguments = [str(topk4), "--out", out, "--arrivals", str(tmp_path / "r.jsonl"), "--no-png"]
    assert main(["report", *arguments]) == 2
    assert "r.jsonl, line 1: no request record" in capsys.readouterr().err
    assert main(["report", str(topk4), "--out", out, "--no-png"]) == 0
    assert capsys.readouterr().out == f"written: {out}\n"


def test_ticks_are_round_and_inside() -> None:
    """Axes carry few, round numbers."""
    assert Scale(0.9, 280, 0, 100).ticks() == [1, 2, 5, 10, 20, 50, 100, 200]
    assert Scale(0, 91, 0, 100, log=False).ticks() == [0, 20, 40, 60, 80]
    assert Scale(1, 100, 0, 100)(10) == 50
    assert Scale(1, 100, 0, 100)(1000) == 100
