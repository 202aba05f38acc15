"""The pairs of deploy/calibrations/pairs: each differs from the measured one in what it says, no more."""

from __future__ import annotations

import json
import os
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from router.__main__ import app
from router.launch_flags import Flags, from_args
from tests.launching import fake_gpus, model_folder

FOLDER = Path("deploy/calibrations")
MEASURED = FOLDER / "h200-sim-acc2.0" / "pair.toml"
H200 = {"name": "NVIDIA H200", "free": 150 * 10**9, "total": 151 * 10**9}
SPECULATION: Flags = {
    "speculative-algorithm": ("EAGLE3",),
    "speculative-num-steps": ("3",),
    "speculative-eagle-topk": ("1",),
    "speculative-num-draft-tokens": ("4",),
    "speculative-draft-load-format": ("dummy",),
}
CHAIN = tuple(SPECULATION)[:4]
ONE, TWO = {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}
ACCEPTS = {"SGLANG_SIMULATE_ACC_LEN": "2.0"}


class Server:
    """One command line of a dry run, taken apart."""

    def __init__(self, line: str) -> None:
        words = shlex.split(line)
        start = words.index("python3")
        self.env = dict(word.split("=", 1) for word in words[:start])
        flags = from_args(words[start + 3 :])
        self.draft = flags.pop("speculative-draft-model-path", None)
        self.flags = {k: v for k, v in flags.items() if k not in {"port", "model-path"}}


def servers(
    config: Path, gpus: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Server, Server]:
    """What this file would start: the speculative and the baseline server."""
    environ = {"PATH": os.environ["PATH"], "COLUMNS": "200", "TERM": "dumb"}
    environ["PYTHONPATH"] = fake_gpus(folder / "site", [H200] * gpus)
    monkeypatch.setattr("os.environ", environ)
    model = model_folder(folder / "target")
    draft = model_folder(folder / "draft", "LlamaForCausalLMEagle3", draft_vocab_size=32000)
    command = ["launch", "--dry-run", "--config", str(config), "--model", model, "--draft", draft]
    result = CliRunner().invoke(app, [*command, "--threshold", "64"])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if not line.startswith("#")]
    return Server(lines[0]), Server(lines[1])


@pytest.mark.parametrize(
    ("name", "gpus", "changed", "removed", "envs"),
    [
        ("acc1.6", 1, {}, (), ({"SGLANG_SIMULATE_ACC_LEN": "1.6"}, {})),
        (
            "topk4",
            1,
            {"speculative-eagle-topk": ("4",), "speculative-num-draft-tokens": ("8",)},
            (),
            ({"SGLANG_SIMULATE_ACC_LEN": "2.8"}, {}),
        ),
        (
            "adaptive",
            1,
            {
                "speculative-adaptive": (),
                "speculative-adaptive-config": (str(FOLDER / "pairs" / "adaptive-table.json"),),
            },
            (),
            (ACCEPTS, {}),
        ),
        ("split", 2, {}, (), (ACCEPTS | ONE, TWO)),
        ("crossed", 2, {}, (), (ACCEPTS | TWO, ONE)),
        ("two-speculative", 2, {}, (), (ACCEPTS | ONE, ACCEPTS | TWO)),
        ("two-baseline", 2, {}, CHAIN, (ONE, TWO)),
    ],
)
def test_a_pair_differs_in_what_it_is_for(
    name: str,
    gpus: int,
    changed: Flags,
    removed: tuple[str, ...],
    envs: tuple[dict[str, str], dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flags and environment of both servers are the measured pair's, but for what is named here."""
    known = servers(MEASURED, 1, tmp_path / "known", monkeypatch)
    found = servers(FOLDER / "pairs" / f"{name}.toml", gpus, tmp_path / name, monkeypatch)
    flags = {key: value for key, value in known[0].flags.items() if key not in removed} | changed
    if name == "two-baseline":
        flags.pop("speculative-draft-load-format")
    assert found[0].flags == flags
    more = SPECULATION if name == "two-speculative" else {}
    assert found[1].flags == known[1].flags | more
    assert (found[0].env, found[1].env) == envs
    assert (found[0].draft is None) is (name == "two-baseline")
    assert (found[1].draft is not None) is (name == "two-speculative")


def test_every_pair_is_looked_at() -> None:
    """A new file belongs into the table above, and each says in its head how it is started."""
    text = Path(__file__).read_text(encoding="utf-8")
    files = sorted((FOLDER / "pairs").glob("*.toml"))
    assert len(files) == 7
    for file in files:
        assert f'("{file.stem}", ' in text or f'"{file.stem}",\n' in text
        assert f"crossover launch --config {file} " in file.read_text(encoding="utf-8")
        assert tomllib.loads(file.read_text())["launch"]["model"] == "/tmp/w/model/target"


def test_the_adaptive_table_is_sglangs_less_the_tier_that_does_not_start() -> None:
    """SGLang 0.5.17's default slots with 7 steps taken out; the static server's 3 steps are in it."""
    table = json.loads((FOLDER / "pairs" / "adaptive-table.json").read_text())
    steps = {int(slot): entry["candidate_steps"] for slot, entry in table.items()}
    assert steps == {1: [1, 3], 8: [0, 1, 3], 32: [0, 1], 64: [0]}
