"""`loadtest fit`: what is printed, written, and refused in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.fit_words import describe
from loadtest.record import RequestRecord, write_records
from router.calibration import parse_calibration
from router.load import Role

DATA = Path(__file__).parent / "data"
SWEEPS = DATA / "sweeps"


def run_fit(
    tmp_path: Path, baseline: list[Path], speculative: list[Path], *more: str
) -> tuple[int, Path]:
    out = tmp_path / "calibration.json"
    arguments = ["--baseline", *map(str, baseline), "--speculative", *map(str, speculative)]
    # Rules are simulated for seconds; one test has them.
    return main(["fit", *arguments, *more, "--no-rule", "--out", str(out)]), out


@pytest.fixture(scope="session")
def topk4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration file as the command writes it."""
    code, out = run_fit(
        tmp_path_factory.mktemp("fit"),
        [SWEEPS / "base.json"],
        [SWEEPS / "k4.json", SWEEPS / "k4_rerun.json"],
        "--contention", str(SWEEPS / "contention"), "--slo-ttft-ms", "500", "--slo-token-ms", "30",
    )  # fmt: skip
    assert code == 0
    return out


def test_the_verdict_is_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several files follow one option; the last line is the verdict word, and it is in the file."""
    code, out = run_fit(
        tmp_path, [SWEEPS / "baseline.json"], [SWEEPS / "eagle3-topk4-parallel.json"]
    )
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    assert printed.out.splitlines()[-1] == "never"
    found = parse_calibration(out.read_bytes())
    assert found.verdict == "never"
    assert found.line.never


def test_what_a_fit_prints(topk4: Path) -> None:
    """Each objective, the line, the outlier, the shares and the verdict: a line each."""
    lines = list(describe(parse_calibration(topk4.read_bytes())))
    assert lines[-1] == "at"
    assert re.fullmatch(r"output tokens per second: at 60 \[4\d, 7\d\]", lines[0])
    assert lines[2].startswith("time to the first token: never: the baseline is ahead")
    assert "line: speculate while n + m < 60 (scope total)" in lines
    assert (
        "note: outlier, left out: speculative at 48 requests: 2656 tok/s where the curve has 4858"
        in lines
    )
    assert any("the baseline server keeps 5" in line for line in lines)
    assert any(line.startswith("note: the limits are met by speculative up to") for line in lines)


def test_the_file_names_no_folder(topk4: Path) -> None:
    """The command is in the file without the paths of the machine that it ran on."""
    found = parse_calibration(topk4.read_bytes())
    assert found.command == (
        "loadtest fit --baseline base.json --speculative k4.json k4_rerun.json"
        " --contention contention --slo-ttft-ms 500 --slo-token-ms 30 --out calibration.json"
    )
    assert str(SWEEPS.parent) not in topk4.read_text()
    assert found.created is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found.created)


@pytest.mark.parametrize("kind", ["serving", "one-batch", "guidellm"])
def test_files_of_other_tools_are_fitted(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pair of result files of another tool gives a crossover between 30 and 45."""
    (baseline,) = (DATA / "imports").glob(f"{kind}-baseline.*")
    (speculative,) = (DATA / "imports").glob(f"{kind}-speculative.*")
    code, out = run_fit(tmp_path, [baseline], [speculative], "--gpus", "split")
    assert code == 0
    assert capsys.readouterr().out.splitlines()[-1] in {"at", "unsure"}
    found = parse_calibration(out.read_bytes())
    assert found.line.scope == "speculative"
    assert 30 < found.line.threshold < 45
    assert "sk-not" not in out.read_text()


def test_one_file_a_level(tmp_path: Path) -> None:
    """AIPerf writes a file for each concurrency: all of them are the sweep."""
    files = DATA / "imports"
    code, out = run_fit(
        tmp_path,
        sorted(files.glob("aiperf-baseline-*")),
        sorted(files.glob("aiperf-speculative-*")),
        "--objective", "time_per_token",
    )  # fmt: skip
    assert code == 0
    found = parse_calibration(out.read_bytes())
    assert found.objective == "time_per_token"
    assert found.curves is not None
    assert [p.concurrency for p in found.curves.speculative.points] == [2, 8, 32]
    assert "nothing was measured below 2 requests" in found.notes


def test_one_file_of_records_for_both_servers(tmp_path: Path) -> None:
    """Records of a sweep over both servers can be given twice: each role takes its own."""
    rows = [
        RequestRecord(
            id=f"{role}-{level}-{i}", run="a", level=level, backend=role, started=i * 1.0,
            first_chunk=i + 0.1, ended=i + 1.0, output_tokens=tokens,
        )
        for role, tokens in ((Role.SPECULATIVE, 30), (Role.BASELINE, 20))
        for level in (1, 4, 8)
        for i in range(20)
        for _ in range(level)
    ]  # fmt: skip
    write_records(tmp_path / "run.jsonl", rows)
    code, out = run_fit(tmp_path, [tmp_path / "run.jsonl"], [tmp_path / "run.jsonl"])
    assert code == 0
    found = parse_calibration(out.read_bytes())
    assert found.verdict == "always"
    assert found.conditions["baseline.measurements"] == "3"
    assert found.curves is not None
    assert found.curves.baseline.tokens_per_second(4) == pytest.approx(80, rel=0.1)
    assert found.curves.speculative.tokens_per_second(4) == pytest.approx(120, rel=0.1)


@pytest.mark.parametrize(
    ("speculative", "more", "why"),
    [
        ("README.md", (), "README.md is not JSON"),
        ("missing.json", (), "missing.json: No such file or directory"),
        ("k4.json", ("--objective", "slo"), "slo was not measured"),
        (
            "k4.json",
            ("--contention", str(SWEEPS / "none")),
            "holds neither contention_*.json nor both.json",
        ),
        ("k4.json", ("--objective", "speed"), "'speed' is not one of"),
        ("k4.json", ("--slo-ttft-ms", "0"), "greater than or equal to 0.001"),
    ],
)
def test_input_that_cannot_be_used(
    speculative: str, more: tuple[str, ...], why: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A bad file or option is one line, exit code 2, and nothing is written."""
    code, out = run_fit(tmp_path, [SWEEPS / "base.json"], [SWEEPS / speculative], *more)
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("loadtest: ")
    assert why in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_a_rule_is_chosen_on_the_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fit that has a line tries the rules on it, writes the best, and says by how much it leads."""
    out = tmp_path / "calibration.json"
    files = [str(SWEEPS / name) for name in ("k4.json", "k4_rerun.json")]
    code = main(
        ["fit", "--baseline", str(SWEEPS / "base.json"), "--speculative", *files,
         "--contention", str(SWEEPS / "contention"), "--out", str(out)]
    )  # fmt: skip
    assert code == 0
    found = parse_calibration(out.read_bytes())
    assert found.switch_rule is not None or found.switch.band is not None
    (said,) = [note for note in found.notes if note.startswith("simulated on these curves: ")]
    assert re.search(
        r" is (best; .*, the next, is \d+\.\d% slower|as good as .* and simpler)$", said
    )
    assert said in capsys.readouterr().out
