"""`crossover launch` before it starts anything: the dry run, every error and its exit code."""

from __future__ import annotations

import io
import os
import re
import shlex
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from router.__main__ import app
from router.config import load_settings
from router.config_launch import LaunchTable, LaunchTableError, read_launch
from router.exit_codes import MEANINGS
from router.launch_cli import launch
from router.launch_flags import from_args
from router.launch_gpus import ProbeError, look, read
from router.launch_prepare import where_to_find
from router.launch_view import View, shown
from router.logs import LineWriter
from tests.launching import fake_gpus, model_folder
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "launch"
H200 = {"name": "NVIDIA H200", "free": 150 * 10**9, "total": 151 * 10**9}
# What started the recorded servers, for the folder of the models in {w}.
RECORDED = (
    "python3 -m sglang.launch_server --model-path {w}/target --served-model-name sim-llama-8b "
    "--load-format dummy --host 127.0.0.1 --port {port} --attention-backend fa3 "
    "--mem-fraction-static 0.9 --max-running-requests 256 "
    "--cuda-graph-bs-decode 1 2 4 8 12 16 24 32 40 48 56 64 80 96 112 128 160 192 224 256 "
    "--disable-prefill-cuda-graph --mm-feature-transport cpu --max-total-tokens 131072 "
    "--enable-metrics --context-length 8192 --random-seed 1 --decode-log-interval 40 "
)
RECORDED_ENV = (
    "TVM_FFI_CACHE_DIR=/tmp/tvmffi HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 GLOO_SOCKET_IFNAME=lo "
    "NCCL_SOCKET_IFNAME=lo SGLANG_HOST_IP=127.0.0.1 HOST_IP=127.0.0.1 PYTHONUNBUFFERED=1 "
    "PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false"
)
RECORDED_SPECULATION = (
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path {w}/draft "
    "--speculative-draft-load-format dummy --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)


class Host:
    """A host with GPUs, models and free ports, as the command sees it."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.environ = environ
        names = ("speculative", "baseline", "router", "admin")
        self.ports = dict(zip(names, free_ports(4), strict=True))
        self.model = model_folder(folder / "target")
        self.draft = model_folder(
            folder / "draft", "LlamaForCausalLMEagle3", draft_vocab_size=32000
        )

    def gpus(self, *gpus: dict[str, Any], sglang: str | None = "0.5.17") -> None:
        self.environ["PYTHONPATH"] = fake_gpus(self.folder / "site", gpus, sglang)

    def launch(
        self, *flags: str, models: bool = True, ports: bool = True, dry_run: bool = True
    ) -> Result:
        command = ["launch", *["--dry-run"] * dry_run, *flags]
        if models:
            command += ["--model", self.model, "--draft", self.draft]
        if ports:
            for name in ("speculative", "baseline"):
                if f"--{name}" not in flags:
                    command += [f"--{name}", f"http://127.0.0.1:{self.ports[name]}"]
            command += ["--port", str(self.ports["router"])]
            command += ["--admin-port", str(self.ports["admin"])]
        return CliRunner().invoke(app, command)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    """A host with one H200."""
    environ = {"PATH": os.environ["PATH"], "COLUMNS": "200", "TERM": "dumb"}
    monkeypatch.setattr("os.environ", environ)
    made = Host(tmp_path, environ)
    made.gpus(H200)
    return made


def commands(result: Result) -> list[list[str]]:
    """The command lines of a dry run, taken apart as a shell would."""
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


def refused(result: Result, code: int) -> str:
    """The one line of an error with this exit code."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("crossover launch: ")
    return line.removeprefix("crossover launch: ")


def test_the_recorded_servers(host: Host) -> None:
    """The file for the H200 gives the flags with which the recorded servers were started, no more."""
    result = host.launch("--config", str(DATA / "h200.toml"), "--threshold", "64")
    speculative, baseline, _ = commands(result)
    for command, role in ((speculative, "speculative"), (baseline, "baseline")):
        text = RECORDED + RECORDED_SPECULATION * (role == "speculative")
        words = shlex.split(text.format(w=host.folder, port=host.ports[role]))
        env = [command.pop(0) for _ in range(command.index("python3"))]
        assert env == RECORDED_ENV.split() + ["SGLANG_SIMULATE_ACC_LEN=2.0"] * (
            role == "speculative"
        )
        assert command[:3] == words[:3]
        assert from_args(command[3:]) == from_args(words[3:])
        assert len(command) == len(words)
    assert "# both servers at once; when they are ready, the router" in result.stdout


def test_a_dry_run(host: Host) -> None:
    """A dry run prints both commands, the other ones for a later start, the order and the router."""
    result = host.launch("--threshold", "32", "--admin-key", "sk-Xq7")
    speculative, again, baseline, beside, router = commands(result)
    assert from_args(speculative[3:])["mem-fraction-static"] == ("0.420",)
    assert from_args(beside[3:])["mem-fraction-static"] == ("0.840",)
    assert from_args(again[3:])["port"] == (str(host.ports["speculative"]),)
    assert from_args(baseline[3:])["port"] == (str(host.ports["baseline"]),)
    assert router[-2:] == ["router", "serve"]
    assert f"CROSSOVER_SPECULATIVE=http://127.0.0.1:{host.ports['speculative']}" in router
    assert "CROSSOVER_THRESHOLD=32" in router
    assert "CROSSOVER_ADMIN_KEY=***" in router
    assert "sk-Xq7" not in result.output
    assert "one after the other, in this order" in result.stdout


def test_default_addresses(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without addresses the servers listen on the ports of the documentation."""
    monkeypatch.setattr("router.launch_checks.check_ports", lambda wanted: None)
    speculative, _, baseline, *_ = commands(host.launch("--threshold", "32", ports=False))
    assert from_args(speculative[3:])["port"] == ("31000",)
    assert from_args(baseline[3:])["port"] == ("30000",)


def test_no_line(host: Host) -> None:
    """Without a threshold and a calibration everything goes to the baseline, and that is said."""
    result = host.launch()
    assert "CROSSOVER_POLICY=baseline" in commands(result)[-1]
    assert "# no threshold and no calibration: every request goes to the baseline" in result.stdout


@pytest.mark.parametrize(
    ("gpus", "flags", "scope"),
    [
        (2, ["--threshold", "9"], ["CROSSOVER_SCOPE=speculative"]),
        (2, ["--threshold", "9", "--scope", "total"], ["CROSSOVER_SCOPE=total"]),
        (2, ["--threshold", "9", "--gpus", "shared"], []),
        (2, ["--policy", "least-in-flight"], []),
        (1, ["--threshold", "9"], []),
    ],
)
def test_scope(host: Host, tmp_path: Path, gpus: int, flags: list[str], scope: list[str]) -> None:
    """With GPUs of their own the threshold is the speculative server's, unless the user says other."""
    host.environ["PYTHONPATH"] = fake_gpus(tmp_path / "more", [H200] * gpus)
    router = commands(host.launch(*flags))[-1]
    assert [word for word in router if word.startswith("CROSSOVER_SCOPE")] == scope


def test_two_gpus(host: Host, tmp_path: Path) -> None:
    """On two GPUs each server is told its own, by the names in an outer CUDA_VISIBLE_DEVICES."""
    host.environ["PYTHONPATH"] = fake_gpus(tmp_path / "two", [H200, H200])
    host.environ["CUDA_VISIBLE_DEVICES"] = "3,5"
    speculative, baseline, _ = commands(host.launch("--threshold", "9"))
    assert speculative[0] == "CUDA_VISIBLE_DEVICES=3"
    assert baseline[0] == "CUDA_VISIBLE_DEVICES=5"


def test_a_file(host: Host, tmp_path: Path) -> None:
    """All keys of the table are obeyed, flags win over them, and a folder with a dot is beside the file."""
    config = tmp_path / "c.toml"
    config.write_text(
        'threshold = 7\n[launch]\nmodel = "./target"\ndraft = "nowhere"\ngpus = "shared"\n'
        'args = ["--context-length", 4096]\nenv = { A = 1 }\nwithout = ["sleep-on-idle"]\n'
        "[launch.baseline]\nenv = { HF_TOKEN = 'hf_Xq7' }\nargs = ['--api-key', 'sk-Xq7']\n"
    )
    flags = ["--config", str(config), "--draft", host.draft]
    result = host.launch(*flags, models=False)
    speculative, _, baseline, _, router = commands(result)
    assert speculative[0] == "A=1"
    assert baseline[:2] == ["A=1", "HF_TOKEN=***"]
    found = from_args(speculative[4:])
    assert found["model-path"] == (str(tmp_path / "target"),)
    assert found["speculative-draft-model-path"] == (host.draft,)
    assert found["context-length"] == ("4096",)
    assert "sleep-on-idle" not in found
    assert "api-key" not in from_args(baseline[5:])
    (file,) = from_args(baseline[5:])["config"]
    assert f"its key is in {file}, which is written for its start" in result.stdout
    assert not Path(file).parent.exists()  # a dry run writes nothing
    assert "Xq7" not in result.output
    assert router[-2:] == ["--config", str(config)]


def test_the_router_leaves_the_table_alone(tmp_path: Path) -> None:
    """The same file serves the router, whatever is in the launch table."""
    config = tmp_path / "c.toml"
    config.write_text(
        'speculative = "http://a"\nbaseline = "http://b"\nthreshold = 7\n[launch]\nmodell = 1\n'
    )
    assert load_settings(config=config, environ={}).threshold == 7


def test_keys_of_the_servers(host: Host, tmp_path: Path) -> None:
    """The router is told the key that a server is started with, unless it has one for that server."""
    config = tmp_path / "c.toml"
    config.write_text(
        "threshold = 7\nbaseline_api_key = 'sk-mine'\n[launch]\nargs = ['--api-key', 'sk-both']\n"
    )
    router = commands(host.launch("--config", str(config)))[-1]
    assert [word for word in router if "API_KEY" in word] == ["CROSSOVER_SPECULATIVE_API_KEY=***"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory"),
        ("- 1\n", "not a mapping of flags to values"),
        ("a: [\n", "expected the node content"),
    ],
)
def test_a_file_of_sglangs_that_cannot_be_read(
    host: Host, tmp_path: Path, text: str | None, said: str
) -> None:
    """A --config of the user's that must become part of ours is refused when it cannot."""
    mine = tmp_path / "mine.yaml"
    if text is not None:
        mine.write_text(text)
    config = tmp_path / "c.toml"
    config.write_text(f'threshold = 7\n[launch]\nargs = ["--config", "{mine}", "--api-key", "k"]\n')
    line = refused(host.launch("--config", str(config)), 2)
    assert line.startswith("the --config among the args of the speculative server cannot be used: ")
    assert said in line


def test_a_file_by_the_environment(host: Host, tmp_path: Path) -> None:
    """CROSSOVER_CONFIG names the file for the launch as it does for the router."""
    config = tmp_path / "c.toml"
    config.write_text('threshold = 7\n[launch]\nargs = ["--page-size", "16"]\n')
    host.environ["CROSSOVER_CONFIG"] = str(config)
    speculative, *_ = commands(host.launch())
    assert from_args(speculative[3:])["page-size"] == ("16",)


def test_refused_settings(host: Host, tmp_path: Path) -> None:
    """Everything that is wrong with the table is reported at once, with a hint."""
    config = tmp_path / "c.toml"
    config.write_text(
        '[launch]\nmodell = "x"\ngpus = "both"\nargs = "--a"\nstop_timeout = "soon"\n'
        "[launch.speculative]\narg = ['--a']\nenv = { A = [1] }\n"
    )
    result = host.launch("--config", str(config))
    assert result.exit_code == 2
    first, *lines = result.stderr.splitlines()
    assert first == "crossover: the configuration is refused:"
    at = f"(file {config})"
    assert sorted(lines) == sorted(
        [
            f"  launch.gpus = 'both' {at}: should be 'shared' or 'split'",
            f"  launch.args = '--a' {at}: should be a valid tuple",
            f"  launch.stop_timeout = 'soon' {at}: not a duration: write seconds, or 250ms, 5s, 2m, 1h",
            f"  launch.modell {at}: no such setting; did you mean model?",
            f"  launch.speculative.arg {at}: no such setting; did you mean args?",
            f"  launch.speculative.env.A = [1] {at}: should be a valid string",
        ]
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file or directory"),
        ("[launch", "not a TOML file: "),
        ('[launch.env]\n"A=B" = "1"', "not the name of a variable"),
        ("launch = 1", "a table is wanted: [launch]"),
        ('[launch]\nargs = ["a\\u0000"]', "a text with a zero byte in it"),
        ('[launch]\nserver_command = "a\\u0000"', "a text with a zero byte in it"),
        ('[launch]\nmodel = "a\\u0000"', "a text with a zero byte in it"),
    ],
)
def test_a_bad_file(tmp_path: Path, text: str | None, problem: str) -> None:
    """A file that is not there, not TOML or has no table there is refused in one line."""
    config = tmp_path / "c.toml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(LaunchTableError) as caught:
        read_launch(config, {})
    (line,) = caught.value.lines
    assert problem in line


def test_a_home_that_nobody_has(host: Host, tmp_path: Path) -> None:
    """A path below the home of nobody is one that is not there, wherever it is given."""
    for flag in ("--config", "--api-keys-file", "--calibration"):
        result = host.launch(flag, "~nobody-here/c")
        assert result.exit_code == 2
        assert "no such file" in result.stderr.lower()
    result = host.launch("--model", "~nobody-here/m", "--draft", "d", models=False)
    assert (result.exit_code, "no such folder" in result.stderr) == (7, True)
    config = tmp_path / "c.toml"
    config.write_text('[launch]\nmodel = "~nobody-here/m"')
    assert read_launch(config, {}).model == str(tmp_path / "~nobody-here/m")


def test_flags_are_named_in_errors(host: Host) -> None:
    """A bad flag of the launch and a bad one of the router are both refused with code 2."""
    result = host.launch("--gpus", "both")
    assert result.exit_code == 2
    assert "launch.gpus = 'both' (flag --gpus): should be 'shared' or 'split'" in result.stderr
    result = host.launch("--threshold", "-1")
    assert result.exit_code == 2
    assert "threshold = '-1' (flag --threshold)" in result.stderr


def test_no_table() -> None:
    """Without a file there are the defaults."""
    assert read_launch(None, {"model": None}) == LaunchTable()


def test_no_model(host: Host) -> None:
    """What to serve must be said."""
    assert refused(host.launch(models=False), 2) == "what to serve is not said: give --model"


def test_a_missing_model(host: Host) -> None:
    """A folder that is not there is code 7, a folder that is no model too."""
    result = host.launch("--model", "/nowhere/to/be/found", "--draft", host.draft, models=False)
    assert refused(result, 7) == "--model /nowhere/to/be/found: no such folder: check the path"
    (host.folder / "empty").mkdir()
    empty = str(host.folder / "empty")
    result = host.launch("--model", host.model, "--draft", empty, models=False)
    assert refused(result, 7).startswith(f"--draft {empty}: no config.json in it")
    (host.folder / "empty" / "config.json").write_text("{")
    result = host.launch("--model", host.model, "--draft", empty, models=False)
    assert "its config.json cannot be read" in refused(result, 7)


def test_models_of_the_hub(host: Host) -> None:
    """Names on the hub are not looked at, which is said; the attention backend is left to SGLang."""
    result = host.launch("--model", "meta-llama/Llama-3.1-8B", "--draft", "x/y", models=False)
    assert "attention-backend" not in from_args(commands(result)[0][3:])
    assert "# model and draft are not compared" in result.stdout


def test_a_draft_that_does_not_fit(host: Host) -> None:
    """A draft for another model is code 7, with both numbers; so is the model itself as its draft."""
    other = model_folder(host.folder / "qwen", "LlamaForCausalLMEagle3", vocab_size=151936)
    result = host.launch("--model", host.model, "--draft", other, models=False)
    line = refused(result, 7)
    assert "the model has 128256 tokens and the draft 151936: use one made for this model" in line
    result = host.launch("--model", host.model, "--draft", host.model, models=False)
    assert "--model and --draft are the same folder" in refused(result, 7)


def test_a_doubtful_draft(host: Host) -> None:
    """A draft that does not look like an EAGLE-3 head is worth a word and no more."""
    other = model_folder(host.folder / "odd", "LlamaForCausalLMEagle")
    result = host.launch("--model", host.model, "--draft", other, models=False)
    assert result.exit_code == 0
    assert "# LlamaForCausalLMEagle does not look like an EAGLE-3 head" in result.stdout


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        ("", "", "the draft takes 2048 tokens of context and 131072 are served: give both servers"),
        ("'--context-length', '4096'", "", "2048 tokens of context and 4096 are served"),
        ("'--context-length', '2048'", "", None),
        ("", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN = 1", None),
    ],
)
def test_a_short_draft(host: Host, tmp_path: Path, args: str, env: str, said: str | None) -> None:
    """A draft that takes less context than is served is mentioned, unless SGLang is told to allow it."""
    model = model_folder(host.folder / "long", max_position_embeddings=131072)
    short = {"draft_vocab_size": 32000, "max_position_embeddings": 2048}
    draft = model_folder(host.folder / "short", "LlamaForCausalLMEagle3", **short)
    config = tmp_path / "c.toml"
    config.write_text(f"[launch]\nargs = [{args}]\n[launch.speculative]\nenv = {{ {env} }}\n")
    flags = ["--config", str(config), "--model", model, "--draft", draft]
    result = host.launch(*flags, models=False)
    assert result.exit_code == 0
    assert ("tokens of context" in result.stdout) is (said is not None)
    assert (said or "") in result.stdout


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("speculative", "--speculative http://127.0.0.1:PORT"),
        ("baseline", "--baseline http://127.0.0.1:PORT"),
        ("router", "--port"),
        ("admin", "--admin-port"),
    ],
)
def test_a_port_that_is_taken(host: Host, name: str, flag: str) -> None:
    """A port that somebody listens on is code 3, before a GPU is looked for."""
    with socket.create_server(("127.0.0.1", host.ports[name])):
        dry = host.launch()
        host.environ["PYTHONPATH"] = "/nowhere"
        line = refused(host.launch(dry_run=False), 3)
    assert len(commands(dry)) == 5  # a dry run may be made beside a running pair
    assert f"# {line}" in dry.stdout.splitlines()
    assert line.startswith(f"cannot listen on 127.0.0.1 port {host.ports[name]}: ")
    assert line.endswith(f"or give another port with {flag}")


def test_no_gpu(host: Host, tmp_path: Path) -> None:
    """No GPU is code 5; so is a Python without torch, and a split of one GPU."""
    host.environ["PYTHONPATH"] = fake_gpus(tmp_path / "none", [])
    assert refused(host.launch(), 5).startswith(
        "no GPU on this host (torch sees none): check nvidia"
    )
    (tmp_path / "none" / "torch" / "__init__.py").write_text("raise ImportError('libcuda.so.1')")
    line = refused(host.launch(), 5)
    assert line.startswith("torch cannot be imported in ")
    assert '(libcuda.so.1): pip install ".[gpu]" in a clone of Crossover' in line
    host.environ["PYTHONPATH"] = fake_gpus(tmp_path / "one", [H200])
    assert refused(host.launch("--gpus", "split"), 5).endswith("use --gpus shared")


def test_no_sglang(host: Host, tmp_path: Path) -> None:
    """A Python without SGLang is code 6, and the extra that brings it is named."""
    host.environ["PYTHONPATH"] = fake_gpus(tmp_path / "bare", [H200], sglang=None)
    line = refused(host.launch(), 6)
    assert (
        'pip install ".[gpu]" in a clone of Crossover, or name the Python that has it with --python'
        in line
    )


def test_a_python_that_is_none(host: Host) -> None:
    """An interpreter that cannot be run, or that fails, is code 2."""
    line = refused(host.launch("--python", "/nowhere/python"), 2)
    assert line == "/nowhere/python cannot be run: No such file or directory: check --python"
    line = refused(host.launch("--python", "/bin/false"), 2)
    assert line.startswith("/bin/false ended with 1 when asked for its GPUs: no output")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--speculative", "http://gpu-host:31000"], "launch starts it on this host"),
        (["--speculative", "https://127.0.0.1:31000"], "launch starts it on this host"),
        (
            ["--server-command", "a 'b"],
            "--server-command cannot be taken apart: No closing quotation",
        ),
        (["--server-command", " "], "--server-command is empty"),
        (
            ["--gpus", "shared", "--tensor-parallel-size", "2"],
            "wants more GPUs for a server than the 1",
        ),
    ],
)
def test_other_refusals(host: Host, flags: list[str], text: str) -> None:
    """What cannot be started like this is refused in one line."""
    code = 5 if "--gpus" in flags else 2
    assert text in refused(host.launch(*flags), code)


def test_arguments_that_are_no_flags(host: Host, tmp_path: Path) -> None:
    """An argument that no flag stands before is refused, not given to SGLang."""
    config = tmp_path / "c.toml"
    config.write_text('[launch]\nargs = ["page-size", "16"]\n')
    assert "'page-size' is not a flag" in refused(host.launch("--config", str(config)), 2)
    flags = ["--config", str(config), "--server-command", "server {port}"]
    assert "'page-size' is not a flag" in refused(host.launch(*flags), 2)


def test_the_probe_names_gpus() -> None:
    """The probe's answer becomes values, and an error with line breaks one line."""
    gpu = {"index": 0, "name": "B200", "capability": [10, 0], "total": 9, "free": 8}
    seen = {"gpus": [gpu], "torch": "2.11.0", "sglang": "0.5.17", "error": "a\n b"}
    machine = read(seen, {})
    assert machine.gpus[0].capability == (10, 0)
    assert machine.gpus[0].token == "0"
    assert machine.error == "a b"
    assert machine.release == (0, 5, 17)


def test_a_probe_that_hangs(tmp_path: Path) -> None:
    """A Python that says nothing is given up."""
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 9\n")
    silent.chmod(0o755)
    with pytest.raises(ProbeError, match=r"did not say within 0\.2 s"):
        look(str(silent), {}, seconds=0.2)


def test_secrets_are_not_shown() -> None:
    """Values of flags and variables that sound like secrets are hidden, others are not."""
    command = ["run", "--api-key", "k1", "--admin-api-key", "k2", "--max-total-tokens", "5", "a b"]
    text = shown(command, {"HF_TOKEN": "k3", "TOKENIZERS_PARALLELISM": "false"})
    assert text == (
        "HF_TOKEN=*** TOKENIZERS_PARALLELISM=false "
        "run --api-key *** --admin-api-key *** --max-total-tokens 5 'a b'"
    )


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--api-key=k1", "'--api-key=***'"),
        ("HF_TOKEN=k1", "'HF_TOKEN=***'"),
        ("serve --api-key k1 --port 1", "'serve --api-key *** --port 1'"),
        ("serve --api-key 'k1 k2' -x", "'serve --api-key *** -x'"),
        ('{"api_key": "k1", "n": 1}', """'{"api_key": ***, "n": 1}'"""),
        ("--tokenizer-path=/k1", "--tokenizer-path=/k1"),
        ("x:y http://h:80/k=1", "'x:y http://h:80/k=1'"),
    ],
)
def test_secrets_within_a_word_are_not_shown(word: str, text: str) -> None:
    """A secret is hidden where it stands in one word with its name; other words stay as they are."""
    assert shown(["sh", "-c", word, "end"], {}) == f"sh -c {text} end"


def test_the_document(tmp_path: Path) -> None:
    """LAUNCH.md lists every exit code, its example is a file that both commands take, with each key."""
    text = (ROOT / "router" / "LAUNCH.md").read_text(encoding="utf-8")
    codes = set(MEANINGS["launch"])
    assert {int(code) for code in re.findall(r"^\| (\d+) \| ", text, re.MULTILINE)} >= codes
    shown_codes = re.findall(r"\| (\d+) \| [a-zS]", text.partition("## Exit codes")[2])
    assert {int(code) for code in shown_codes} == codes
    help_text = " ".join((launch.__doc__ or "").partition("Exit codes: ")[2].split())
    assert {int(code) for code in re.findall(r"(?:^|, )(\d+) ", help_text)} == codes
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    config = tmp_path / "c.toml"
    config.write_text(example)
    table = read_launch(config, {})
    assert table.stop_timeout == 30.0
    flags = {"speculative": "http://a", "baseline": "http://b"}
    assert load_settings(flags, config=config, environ={}).threshold == 32
    for name in LaunchTable.model_fields:
        assert re.search(rf"^{name} =|`{name}`|\[launch\.{name}\]", text, re.MULTILINE), name


def view_of(*, terminal: bool) -> tuple[View, io.StringIO]:
    """A view that writes into a text, as on a terminal or as into a pipe."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=60, color_system=None)
    writer = None if terminal else LineWriter(lambda data: out.write(data.decode()))
    return View(console, writer), out


def test_lines_in_a_pipe() -> None:
    """Into a pipe go plain lines, progress among them, and control characters do not."""
    view, out = view_of(terminal=False)
    view.say("baseline", "a\tb \x1b[31mred\x1b[0m \x07 10%\r20%\r")
    view.own("two\nlines [bold]")
    view.progress("waiting")
    view.progress(None)
    view.close()
    assert out.getvalue().splitlines() == [
        "baseline    | 20%",
        "crossover   | two\\nlines [bold]",
        "crossover   | waiting",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_server_cannot_speak_for_others(terminal: bool) -> None:
    """No character of a line begins another one, moves the terminal's cursor or turns the writing."""
    view, out = view_of(terminal=terminal)
    ends = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    view.say("router", f"a{ends}crossover   | b\x9b2Jc\u009b31md\u202ee\x1b]0;f\x07\x00g")
    view.close()
    assert out.getvalue().splitlines() == ["router      | acrossover   | bcde]0;fg"]


def test_a_server_that_prints_its_key() -> None:
    """The keys of the servers are in no line, whoever prints them; what is too short to be one stays."""
    out = io.StringIO()
    writer = LineWriter(lambda data: out.write(data.decode()))
    view = View(Console(file=io.StringIO()), writer, secrets=["sk-0123456789", "in"])
    view.say("baseline", "server_args=ServerArgs(api_key='sk-0123456789', admin_api_key=None)")
    view.own("in the end: sk-\x1b[0m0123456789")
    view.close()
    assert out.getvalue().splitlines() == [
        "baseline    | server_args=ServerArgs(api_key='***', admin_api_key=None)",
        "crossover   | in the end: ***",
    ]


def test_lines_on_a_terminal() -> None:
    """On a terminal long lines stay whole, markup is text, and the moving line goes away."""
    view, out = view_of(terminal=True)
    assert view.moving
    view.progress("waiting for it")
    view.progress("waiting for it still")
    view.say("router", "[red]" + "x" * 100)
    view.close()
    text = out.getvalue()
    assert "router      | [red]" + "x" * 100 + "\n" in text
    assert "waiting for it still" in text
    assert "\r\x1b[1A\x1b[2K" in text  # the moving line, erased


def test_lines_that_nobody_reads() -> None:
    """A reader that is stuck costs lines, not the launcher; what was lost is counted."""
    stuck = threading.Event()
    written: list[bytes] = []

    def write(data: bytes) -> None:
        stuck.wait(10)
        written.append(data)

    view = View(Console(file=io.StringIO()), LineWriter(write, batches=2))
    for number in range(9):
        view.own(str(number))
    stuck.set()
    while len(written) < 2:
        time.sleep(0.01)
    view.close()
    assert re.fullmatch(rb"crossover   \| [67] lines were dropped: .*\n", written[-1])


def test_any_free_port(host: Host) -> None:
    """Port 0 of the router becomes a port that is free, since the launcher must find the router."""
    flags = ["--threshold", "9", "--port", "0", "--admin-port", "0"]
    for name in ("speculative", "baseline"):
        flags += [f"--{name}", f"http://127.0.0.1:{host.ports[name]}"]
    router = commands(host.launch(*flags, ports=False))[-1]
    chosen = dict(word.split("=", 1) for word in router if "_PORT=" in word)
    assert set(chosen) == {"CROSSOVER_PORT", "CROSSOVER_ADMIN_PORT"}
    assert all(1024 <= int(port) <= 65535 for port in chosen.values())


def test_a_bad_calibration(host: Host, tmp_path: Path) -> None:
    """A calibration that cannot be read is refused before anything is started."""
    bad = tmp_path / "calibration.json"
    bad.write_text("{}")
    assert str(bad) in refused(host.launch("--calibration", str(bad)), 2)


def test_an_address_that_is_not_here(host: Host) -> None:
    """An address that is not this host's is refused for what it is."""
    line = refused(host.launch("--host", "host.invalid", dry_run=False), 3)
    assert line.startswith("cannot listen on host.invalid port ")
    assert line.endswith("see --port")
    line = refused(host.launch("--host", "host.invalid", "--port", "0", ports=False), 3)
    assert line.startswith("cannot listen on host.invalid port 0: ")


def test_a_model_in_one_file(host: Host, tmp_path: Path) -> None:
    """A model that is one file is given to SGLang as it is, and not compared."""
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    result = host.launch("--model", str(model), "--draft", host.draft, models=False)
    assert from_args(commands(result)[0][3:])["model-path"] == (str(model),)
    assert "not compared" in result.stdout


def test_no_draft_is_needed(host: Host, tmp_path: Path) -> None:
    """A way to speculate without a draft is launched without one."""
    config = tmp_path / "c.toml"
    config.write_text("[launch.speculative]\nargs = ['--speculative-algorithm', 'ngram']\n")
    result = host.launch("--config", str(config), "--model", host.model, models=False)
    assert "speculative-draft-model-path" not in from_args(commands(result)[0][3:])


def test_the_address_that_is_shown() -> None:
    """The address that is shown is one that can be asked: brackets, scheme, no wildcard."""
    settings = load_settings(
        {"speculative": "http://a", "baseline": "http://b", "threshold": 1, "host": "::"},
        environ={},
    )
    assert where_to_find(settings) == "http://[::1]:8000/v1 (admin on port 9400)"
