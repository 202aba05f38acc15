"""compose.yaml and what belongs to it, without a Docker engine: `make compose-test` is for one.

Compose's own reading of the file is asked for where its command is there (it needs no engine).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest
import yaml

from router.calibration import parse_calibration
from router.config import Settings

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "compose"
FILE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = FILE["services"]
PAIRS = {"gpu": ("speculative", "baseline"), "sim": ("speculative-sim", "baseline-sim")}
OURS = ("prepare", "router", "calibrate", *PAIRS["sim"])
# Flags of SGLang that 0.5.14 to 0.5.23 all know, as far as engine.sh may use them.
KNOWN_FLAGS = {
    "--api-key", "--config", "--context-length", "--host", "--mem-fraction-static", "--model-path",
    "--port", "--speculative-draft-model-path", "--tensor-parallel-size",
}  # fmt: skip


def module(name: str) -> ModuleType:
    """A program of deploy/compose/ as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def seconds(text: str) -> int:
    """A duration as Compose writes it."""
    found = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", text)
    assert found is not None, text
    return 60 * int(found[1] or 0) + int(found[2] or 0)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ------------------------------------------------------------------ what is started, and for whom


def test_a_profile_has_one_pair_and_everything_else() -> None:
    """Gpu and sim differ in the two servers alone; what is checked in starts the real pair."""
    always = {name for name, one in SERVICES.items() if "profiles" not in one}
    assert always == {"prepare", "router", "prometheus", "grafana"}
    for profile, pair in PAIRS.items():
        assert {n for n, one in SERVICES.items() if one.get("profiles") == [profile]} == set(pair)
    lines = [line for line in text_of(".env").splitlines() if line and not line.startswith("#")]
    assert lines == ["COMPOSE_PROFILES=gpu"]


def test_the_simulated_servers_answer_under_the_same_names() -> None:
    """The names in the router's settings and in Prometheus' targets are those of both pairs."""
    for real, simulated in zip(*PAIRS.values(), strict=True):
        assert SERVICES[simulated]["networks"]["default"]["aliases"] == [real]
        command = SERVICES[simulated]["command"]
        port = {"speculative": 31000, "baseline": 30000}[real]
        assert {f"--role={real}", f"--port={port}", "--gpu-lock=/gpu/lock"} <= set(command)
        assert SERVICES[simulated]["volumes"] == ["gpu:/gpu"]
        asked = SERVICES["router"]["environment"][f"CROSSOVER_{real.upper()}"]
        assert asked == f"http://{real}:{port}"


def test_only_three_ports_are_published_and_on_loopback() -> None:
    """The router, its admin listener and Grafana can be reached, from this machine alone."""
    published = {name: one["ports"] for name, one in SERVICES.items() if "ports" in one}
    assert published == {
        "router": [
            "127.0.0.1:${ROUTER_PORT:-8000}:8000",
            "127.0.0.1:${ADMIN_PORT:-9400}:9400",
        ],
        "grafana": ["127.0.0.1:${GRAFANA_PORT:-3000}:3000"],
    }
    assert not any("network_mode" in one for n, one in SERVICES.items() if n != "prepare")


def test_what_stops_is_given_longer_than_it_takes() -> None:
    """The router's grace period is above its drain delay and limit, and it stops before servers."""
    router = SERVICES["router"]
    limit = seconds(router["environment"]["CROSSOVER_DRAIN_TIMEOUT"])
    delay = Settings.model_fields["drain_delay"].default
    assert "CROSSOVER_DRAIN_DELAY" not in router["environment"]
    assert seconds(router["stop_grace_period"]) >= limit + delay + 10
    waits = {name: one["condition"] for name, one in router["depends_on"].items()}
    servers = [name for pair in PAIRS.values() for name in pair]
    assert waits == {
        "prepare": "service_completed_successfully",
        **dict.fromkeys(servers, "service_started"),
    }
    assert not any(router["depends_on"][name]["required"] for name in servers)


def test_servers_on_one_gpu_start_one_after_the_other() -> None:
    """The second server waits for the first one's health, which is given time to load."""
    assert SERVICES["baseline"]["depends_on"] == {"speculative": {"condition": "service_healthy"}}
    for name in PAIRS["gpu"]:
        check = SERVICES[name]["healthcheck"]
        # SGLang answers /health within 20 s by design; our program waits longer, Docker longest.
        assert (
            20 < float(check["test"][-1]) < seconds(check["timeout"]) <= seconds(check["interval"])
        )
        assert seconds(check["start_period"]) >= 1800
        assert check["retries"] >= 3
        assert check["test"][-2].endswith(("31000/health", "30000/health"))


def test_what_runs_comes_back() -> None:
    """Everything that is to run is started again after a crash; what ends once is not."""
    policies = {name: one.get("restart") for name, one in SERVICES.items()}
    assert policies.pop("prepare") == "no"
    assert policies.pop("calibrate") is None
    assert set(policies.values()) == {"unless-stopped"}


def test_our_containers_have_no_rights_to_lose() -> None:
    """Our own image runs with a read-only root, and without capabilities."""
    for name in OURS:
        one = SERVICES[name]
        assert one["read_only"] is True
        assert one["tmpfs"] == ["/tmp"]
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]
    for name in ("prometheus", "grafana"):
        assert SERVICES[name]["cap_drop"] == ["ALL"]


def test_what_is_mounted_is_there() -> None:
    """Each file and folder of ours that a service mounts exists and is mounted read-only."""
    volumes = set(FILE["volumes"])
    for name, one in SERVICES.items():
        for mount in one.get("volumes", []):
            source, _, rest = mount.partition(":")
            if source.startswith("./"):
                assert (ROOT / source).exists(), f"{name}: {source}"
                assert rest.endswith(":ro"), mount
            else:
                assert source in volumes, mount


def test_images_are_settings_with_public_defaults() -> None:
    """Every image and the base of ours can be replaced by the environment."""
    found = {name: one["image"] for name, one in SERVICES.items()}
    assert {name: found[name] for name in OURS} == dict.fromkeys(
        OURS, "${ROUTER_IMAGE:-crossover-router:local}"
    )
    for name, variable, default in (
        ("speculative", "SGLANG_IMAGE", "lmsysorg/sglang:v"),
        ("baseline", "SGLANG_IMAGE", "lmsysorg/sglang:v"),
        ("prometheus", "PROMETHEUS_IMAGE", "prom/prometheus:v"),
        ("grafana", "GRAFANA_IMAGE", "grafana/grafana:"),
    ):
        assert found[name].startswith(f"${{{variable}:-{default}")
    built = {name: one["build"] for name, one in SERVICES.items() if "build" in one}
    args = {"PYTHON_IMAGE": "${PYTHON_IMAGE:-python:3.11-slim-bookworm}"}
    assert built == {"router": {"context": ".", "args": args}}
    # The image is nowhere to be pulled from, and must not be looked for under its name.
    assert {SERVICES[name]["pull_policy"] for name in OURS} == {"never"}


# ------------------------------------------------------------------ settings and secrets


def names_in(text: str) -> set[str]:
    """The variables that a file of settings has, commented out or not."""
    return set(re.findall(r"^#?([A-Z_]+)(?==|$)", text, re.MULTILINE))


def test_settings_are_documented_and_exist() -> None:
    """What the shell may set is in .env.example, and what is the router's is one of its settings."""
    example = text_of(".env.example")
    passed = names_in(text_of("deploy/compose/settings.env"))
    undocumented = passed - names_in(example)
    assert undocumented == {
        "CROSSOVER_CALIBRATION", "CROSSOVER_POLICY", "CROSSOVER_SCOPE", "CROSSOVER_LOG_LEVEL",
    }  # fmt: skip
    assert names_in(example) - passed == {"LOADTEST_API_KEY"}
    environment = SERVICES["router"]["environment"]
    for name in {*passed, *names_in(example), *environment}:
        if name.startswith("CROSSOVER_") and name != "CROSSOVER_CONFIG":
            assert name.removeprefix("CROSSOVER_").lower() in Settings.model_fields
    asked = set(re.findall(r"\$\{(\w+)", text_of("compose.yaml")))
    assert all(name in example for name in asked)
    # The router refuses settings that it does not know, so Compose's own have another prefix.
    assert not any(name.startswith("CROSSOVER_") for name in asked)


def test_secrets_stay_out_of_git_and_of_the_image() -> None:
    """Git ignores .env.local, the image has only what is listed, and no file has a key."""
    done = subprocess.run(
        ["git", "check-ignore", "-q", ".env.local"], cwd=ROOT, check=False, capture_output=True
    )
    assert done.returncode in {0, 128}  # 128: not a checkout
    assert "/.env.local" in text_of(".gitignore").splitlines()
    lines = text_of(".dockerignore").splitlines()
    assert next(line for line in lines if not line.startswith("#")) == "*"
    assert not any(line.startswith("!") and ".env" in line for line in lines)
    for line in text_of(".env.example").splitlines():
        assert not line or line.startswith("#")


def test_nobody_gets_the_secrets_of_others() -> None:
    """The servers do not get the router's keys, nor the router the token of the model hub."""
    for name in PAIRS["gpu"]:
        environment = SERVICES[name]["environment"]
        assert (environment["CROSSOVER_ADMIN_KEY"], environment["CROSSOVER_API_KEYS"]) == ("", "")
    for name in ("prepare", "router", "calibrate"):
        assert SERVICES[name]["environment"]["HF_TOKEN"] == ""
    holders = {
        n for n, one in SERVICES.items() if any("keys:" in v for v in one.get("volumes", ()))
    }
    assert holders == {"prepare", "router", "prometheus", "grafana"}


def test_the_image_runs_as_nobody_and_hears_signals() -> None:
    """The Dockerfile ends as a number that is not root, with an exec-form entry point."""
    text = text_of("Dockerfile")
    code = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert code[0] == "ARG PYTHON_IMAGE=python:3.11-slim-bookworm"
    assert [line for line in code if line.startswith("FROM ")] == [
        "FROM ${PYTHON_IMAGE} AS build",
        "FROM ${PYTHON_IMAGE}",
    ]
    assert [line for line in code if line.startswith("USER ")] == ["USER 10001:10001"]
    assert 'ENTRYPOINT ["crossover"]' in code
    assert "requirements/run.txt" in text
    assert "--mount" not in text  # it builds without BuildKit
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    assert f"ARG VERSION={project['version']}" in code


def calibration() -> bytes:
    return (FOLDER / "simulated-calibration.json").read_bytes()


def test_the_shipped_calibration_is_of_the_simulated_pair() -> None:
    """It has curves, a line, and the flags that the simulated servers are started with."""
    found = parse_calibration(calibration())
    assert found.curves is not None
    assert found.frontier.scope == "total"
    assert isinstance(found.frontier.threshold, float)
    assert 8 <= found.frontier.threshold <= 16  # planted to cross at 12
    for role in PAIRS["gpu"]:
        cap = next(f for f in SERVICES[f"{role}-sim"]["command"] if "max-running" in f)
        assert str(json.loads(calibration())["fingerprint"][f"{role}.cap"]) == cap.split("=")[1]


# ------------------------------------------------------------------ prepare.py

PREPARE = module("prepare")
Prepare = Callable[[Mapping[str, str]], tuple[dict[str, Any], str, str]]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """Runs it and returns the router's settings, the key and what was said."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "calibration").mkdir()

    def run(environ: Mapping[str, str]) -> tuple[dict[str, Any], str, str]:
        folder = tmp_path / "keys"
        said = PREPARE.prepare(folder, environ, tmp_path / "calibration")
        for name in ("router.toml", "admin.key"):
            assert (folder / name).stat().st_mode & 0o777 == 0o440
        settings = tomllib.loads((folder / "router.toml").read_text(encoding="ascii"))
        return settings, (folder / "admin.key").read_text(encoding="ascii"), said

    return run


def test_a_key_is_made_once(prepare: Prepare) -> None:
    """The first start makes a long random key, and later ones keep it."""
    settings, key, _ = prepare({"COMPOSE_PROFILES": "gpu"})
    assert len(key) >= 40
    assert settings["admin_key"] == key
    assert prepare({"COMPOSE_PROFILES": "sim"})[1] == key


def test_a_key_of_ones_own(prepare: Prepare) -> None:
    """A key that is given is taken as it is, quotes and all; a short one or no word is refused."""
    given = 'with"quote\\and-more'
    settings, key, _ = prepare({"COMPOSE_PROFILES": "gpu", "CROSSOVER_ADMIN_KEY": given})
    assert (settings["admin_key"], key) == (given, given)
    for bad in ("short", "with a space in it", "k" * 20 + "\n", "é" * 20):
        with pytest.raises(PREPARE.PrepareError, match="at least 16 printable"):
            prepare({"COMPOSE_PROFILES": "gpu", "CROSSOVER_ADMIN_KEY": bad})


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, {"threshold": 32, "scope": "total"}),
        ({"GPU_LAYOUT": "split"}, {"threshold": 32, "scope": "speculative"}),
        ({"CROSSOVER_SCOPE": "total"}, {"threshold": 32}),
        ({"CROSSOVER_THRESHOLD": "12"}, {}),
        ({"CROSSOVER_POLICY": "baseline"}, {}),
        ({"COMPOSE_PROFILES": "sim"}, {"calibration": str(PREPARE.SIMULATED)}),
        ({"COMPOSE_PROFILES": "gpu,calibrate"}, {"threshold": 32, "scope": "total"}),
    ],
)
def test_where_the_line_comes_from(
    prepare: Prepare, environ: dict[str, str], wanted: dict[str, object]
) -> None:
    """The environment wins, the simulated pair has its calibration, a new pair gets a guess."""
    settings, key, _ = prepare({"COMPOSE_PROFILES": "gpu", **environ})
    assert settings == {"admin_key": key, **wanted}


def test_a_calibration_of_ones_own_wins(prepare: Prepare, tmp_path: Path) -> None:
    """What `calibrate` measured is used for the pair that it was measured on, and no other."""
    own = tmp_path / "calibration" / "gpu.json"
    own.write_bytes(b"{}")
    assert prepare({"COMPOSE_PROFILES": "gpu"})[0]["calibration"] == str(own)
    assert prepare({"COMPOSE_PROFILES": "sim"})[0]["calibration"] == str(PREPARE.SIMULATED)
    out = SERVICES["calibrate"]["entrypoint"][-1]
    assert out == "--out=/calibration/${COMPOSE_PROFILES:-gpu}.json"


@pytest.mark.parametrize("profiles", ["", "gpu,sim", "other"])
def test_two_pairs_at_once_are_refused(prepare: Prepare, profiles: str) -> None:
    """Both pairs have the same names, so exactly one must be asked for."""
    with pytest.raises(PREPARE.PrepareError, match="one of gpu and sim"):
        prepare({"COMPOSE_PROFILES": profiles})


def test_an_unknown_layout_is_refused(prepare: Prepare) -> None:
    """GPU_LAYOUT has two values."""
    with pytest.raises(PREPARE.PrepareError, match="shared or split, not both"):
        prepare({"COMPOSE_PROFILES": "gpu", "GPU_LAYOUT": "both"})


# ------------------------------------------------------------------ engine.sh


class Started:
    """What engine.sh became."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.error = done.stderr
        self.lines = done.stdout.splitlines()

    @property
    def arguments(self) -> list[str]:
        return self.lines[2:]

    def value(self, flag: str) -> str | None:
        """The last value of a flag, which is the one that counts."""
        at = [i for i, word in enumerate(self.arguments) if word == flag]
        return self.arguments[at[-1] + 1] if at else None


@pytest.fixture
def engine(tmp_path: Path) -> Callable[..., Started]:
    """Runs engine.sh with a python3 that prints what it was given and an nvidia-smi that lies."""
    programs = {
        "python3": '#!/bin/sh\necho "$PPID"\necho "$CUDA_VISIBLE_DEVICES"\n'
        'for word; do echo "$word"; done\n',
        "nvidia-smi": '#!/bin/sh\necho "$2" >>"$ASKED"\n[ -n "$MEMORY" ] && echo "$MEMORY"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text, encoding="ascii")
        (tmp_path / name).chmod(0o755)

    def start(*arguments: str, memory: str = "80000, 80000", **environ: str) -> Started:
        done = subprocess.run(
            ["sh", FOLDER / "engine.sh", *arguments],
            env={
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "MEMORY": memory,
                "ASKED": str(tmp_path / "asked"),
                **environ,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return Started(done)

    return start


@pytest.mark.parametrize(
    ("role", "port", "draft"), [("speculative", "31000", "d/r"), ("baseline", "30000", None)]
)
def test_a_server_gets_its_flags(
    engine: Callable[..., Started], role: str, port: str, draft: str | None
) -> None:
    """Each server has its file, port and model, and the speculative one its draft."""
    found = engine(role, MODEL="m/o", DRAFT="d/r", SGLANG_FLAGS="--context-length 8192")
    assert (found.code, found.error) == (0, "")
    assert found.lines[0] == str(os.getpid())  # it became SGLang: its parent is ours
    assert found.arguments[:4] == [
        "-m", "sglang.launch_server", "--config", f"/etc/crossover/sglang/{role}.yaml",
    ]  # fmt: skip
    assert (found.value("--port"), found.value("--host")) == (port, "0.0.0.0")
    assert (found.value("--model-path"), found.value("--context-length")) == ("m/o", "8192")
    assert found.value("--speculative-draft-model-path") == draft
    assert {word for word in found.arguments if word.startswith("--")} <= KNOWN_FLAGS


@pytest.mark.parametrize(
    ("memory", "share", "fraction"),
    [
        ("80000, 80000", None, "0.420"),  # the first server, on an empty GPU
        ("80000, 44000", None, "0.764"),  # the second, or one that comes back: as much as the first
        ("80000, 80000", "0.3", "0.300"),
        ("80000, 80000\n80000, 40000", None, "0.840"),  # the fullest of several
    ],
)
def test_a_share_of_the_gpu_is_a_fraction_of_what_is_free(
    engine: Callable[..., Started], memory: str, share: str | None, fraction: str
) -> None:
    """Each server gets the same memory, whichever starts first: share x total / free."""
    more = {} if share is None else {"GPU_SHARE": share}
    assert engine("baseline", memory=memory, **more).value("--mem-fraction-static") == fraction


def test_the_layouts(engine: Callable[..., Started]) -> None:
    """Shared gives both the same GPUs; split gives each its own, whole, as many as are named."""
    for role in ("speculative", "baseline"):
        assert engine(role, GPUS="0,1", memory="8, 8\n8, 8").lines[1] == "0,1"
        assert engine(role, GPUS="0,1", memory="8, 8\n8, 8").value("--tensor-parallel-size") == "2"
    split = {"GPU_LAYOUT": "split", "BASELINE_GPUS": "2,3"}
    assert engine("speculative", **split).lines[1] == "0"
    assert engine("speculative", **split).value("--tensor-parallel-size") is None
    assert engine("baseline", **split).lines[1] == "2,3"
    assert engine("baseline", **split).value("--mem-fraction-static") is None


def test_no_setting_is_a_command_or_a_pattern(engine: Callable[..., Started]) -> None:
    """Whatever a setting says reaches SGLang as it is: no shell reads it, no file names replace it."""
    odd = "a; touch /tmp/x $(id) `id` 'b\" *"
    found = engine("baseline", MODEL=odd, SGLANG_FLAGS='--override {"a":[1]} /*', DRAFT=odd)
    assert found.value("--model-path") == odd
    assert found.value("--override") == '{"a":[1]}'
    assert "/*" in found.arguments
    assert engine("speculative", DRAFT=odd).value("--speculative-draft-model-path") == odd
    key = "k$(id)*'\"\\"
    assert engine("baseline", CROSSOVER_BACKEND_API_KEY=key).value("--api-key") == key


def test_the_servers_key(engine: Callable[..., Started]) -> None:
    """The key that the router sends is the one that the server asks for; none by default."""
    assert engine("baseline", CROSSOVER_BACKEND_API_KEY="sk-b").value("--api-key") == "sk-b"
    assert engine("baseline").value("--api-key") is None


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        ((), {}, "first argument is speculative or baseline"),
        (("draft",), {}, "not 'draft'"),
        (("baseline",), {"GPU_LAYOUT": "both"}, "GPU_LAYOUT is shared"),
        (("baseline",), {"GPUS": "0;1"}, "named by number"),
        (("baseline",), {"GPUS": "0,"}, "named by number"),
        (("baseline",), {"GPU_SHARE": "40%"}, "GPU_SHARE is a part of the whole memory"),
        (("baseline",), {"GPU_SHARE": "0.4.2"}, "not '0.4.2'"),
        (("baseline",), {"GPU_SHARE": "0.0"}, "no memory at all"),
        (("baseline",), {"memory": ""}, "nvidia-smi does not say"),
        (("baseline",), {"memory": "80000, 30000"}, "too little free memory"),
    ],
)
def test_bad_settings_are_one_line(
    engine: Callable[..., Started], arguments: tuple[str, ...], environ: dict[str, str], says: str
) -> None:
    """A setting that cannot be used ends it with exit code 2 and one line that says which."""
    found = engine(*arguments, **environ)
    assert (found.code, len(found.error.splitlines())) == (2, 1)
    assert says in found.error
    assert found.lines == []


# ------------------------------------------------------------------ healthcheck.py


@pytest.mark.parametrize(
    ("command", "environ", "url"),
    [
        ("python /opt/crossover/bin/crossover serve", {}, "9400/healthz"),
        ("crossover serve", {"CROSSOVER_ADMIN_PORT": "9401"}, "9401/healthz"),
        ("crossover serve --admin-port=9402", {"CROSSOVER_ADMIN_PORT": "9401"}, "9402/healthz"),
        ("loadtest engine --role baseline --port 30000", {}, "30000/health"),
    ],
)
def test_the_image_asks_what_runs_in_it(command: str, environ: dict[str, str], url: str) -> None:
    """Without a URL the check asks the router or the simulated server, whichever process 1 is."""
    found = module("healthcheck").alive_url([*command.split(), ""], environ)
    assert found == f"http://127.0.0.1:{url}"


def test_the_health_check_is_the_status() -> None:
    """2xx is healthy; another status, silence and nobody there are not."""
    check = module("healthcheck").check

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(int(self.path[1:]))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert check(f"{url}/200") is None
        assert check(f"{url}/503") == f"{url}/503: status 503"
        server.shutdown()
        thread.join()
        assert "timed out" in str(check(f"{url}/200", 0.05))
    assert "refused" in str(check(f"{url}/200"))


# ------------------------------------------------------------------ Compose's own reading


@pytest.mark.parametrize("profile", sorted(PAIRS))
def test_compose_reads_it(profile: str) -> None:
    """`docker compose config` takes the file for either pair and starts what we say it does."""
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("the docker command is not installed")
    version = subprocess.run([docker, "compose", "version"], check=False, capture_output=True)
    if version.returncode:
        pytest.skip("docker has no Compose v2")
    environ = {k: v for k, v in os.environ.items() if k in {"PATH", "HOME", "DOCKER_CONFIG"}}
    done = subprocess.run(
        [docker, "compose", "config", "--format", "json"],
        cwd=ROOT,
        env=environ | {"COMPOSE_PROFILES": profile},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    assert set(services) == {"prepare", "router", "prometheus", "grafana", *PAIRS[profile]}
    assert services["prepare"]["environment"]["COMPOSE_PROFILES"] == profile
    if profile == "gpu":
        for role in PAIRS["gpu"]:
            (device,) = services[role]["deploy"]["resources"]["reservations"]["devices"]
            assert device["driver"] == "nvidia"
            assert services[role]["entrypoint"][-1] == role
