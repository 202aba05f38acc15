"""The calibrations kept in deploy/calibrations: records of real servers, fitted again here."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import msgspec
import pytest

from loadtest.__main__ import main
from loadtest.record import RequestRecord
from router.calibration import parse_calibration

KEPT = sorted(path.parent for path in Path("deploy/calibrations").glob("*/calibration.json"))


def test_there_is_one() -> None:
    """The tests below are about something."""
    assert KEPT


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_the_sweeps_beside_it_give_the_same_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fit of the recorded sweeps and overlaps is the calibration that is kept."""
    out = tmp_path / "calibration.json"
    sweep = str(folder / "sweep.json")
    asked = ["fit", "--baseline", sweep, "--speculative", sweep, "--contention", str(folder)]
    assert main([*asked, "--out", str(out)]) == 0
    kept = parse_calibration((folder / "calibration.json").read_bytes())
    made = parse_calibration(out.read_bytes())
    assert (made.verdict, made.frontier, made.interval) == (
        kept.verdict,
        kept.frontier,
        kept.interval,
    )
    assert made.contention == kept.contention
    assert capsys.readouterr().out.splitlines()[-1] == kept.verdict
    index = Path("deploy/calibrations/README.md").read_text()
    assert f"[{folder.name}]({folder.name}/README.md)" in index
    assert f"{kept.verdict}, best guess {kept.frontier.threshold:g} [" in index


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_its_comparison_is_what_its_records_say(folder: Path) -> None:
    """The means per token in compare.json come from the records, and no request had failed."""
    lines = lzma.decompress((folder / "compare" / "records.jsonl.xz").read_bytes()).splitlines()
    records = [msgspec.json.decode(line, type=RequestRecord) for line in lines]
    assert [record.error for record in records if not record.ok] == []
    kept = json.loads((folder / "compare" / "compare.json").read_text())
    told = {(one["policy"], one["load"]): one["ms_per_token"]["value"] for one in kept["outcomes"]}
    for cell in kept["cells"]:
        start = cell["window_start_s"]
        spent = [
            1e3 * (record.seconds_per_token or 0.0)
            for record in records
            if record.run == cell["run"] and start <= record.ended < start + cell["window_s"]
        ]
        mean = sum(spent) / len(spent)
        assert mean == pytest.approx(told[cell["policy"], cell["load"]], rel=1e-6)


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_every_trial_of_the_real_pair_held(folder: Path) -> None:
    """What is kept of the trials says so, for both servers."""
    found = json.loads((folder / "trials.json").read_text())
    assert [each["trial"] for each in found if each["ok"] is not True] == []
    assert len(found) >= 7
