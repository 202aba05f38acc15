"""The simulated overlay's Pod, run on this machine as it is rendered; and the keeper by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kubernetes_build import FOLDER, built, containers
from tests.kubernetes_node import ConfigFolder, Node, running_pod
from tests.launching import wait_for

KEEPER = FOLDER / "keeper" / "keeper.py"


def quick(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same Pod with a shorter delay, so that its end takes 2 s and not 10."""
    (delay,) = [
        each
        for each in containers(documents)["router"]["env"]
        if each["name"] == "CROSSOVER_DRAIN_DELAY"
    ]
    delay["value"] = "2s"
    return documents


def status(node: Node) -> Any:
    """The router's own view, asked as Prometheus would: with the key of the Secret."""
    key = {"authorization": f"Bearer {node.secret('admin-key')}"}
    url = f"http://127.0.0.1:{node.port('admin')}/status"
    return httpx.get(url, headers=key, trust_env=False).json()


def answers(client: httpx.Client, url: str) -> int:
    """The status of a GET; 0 where nobody listens."""
    with contextlib.suppress(httpx.HTTPError):
        return client.get(url).status_code
    return 0


def child_of(pid: int) -> int:
    """The process id of the server that a keeper has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return int(found[0])


@pytest.mark.slow
def test_a_pod_serves_survives_its_parts_and_ends_in_order(tmp_path: Path) -> None:
    """Keys, probes, a dead server, a new calibration, and an end that breaks no stream."""
    with running_pod(quick(built("simulated")), tmp_path) as node:
        public = f"http://127.0.0.1:{node.port('http')}"
        with httpx.Client(trust_env=False, timeout=30) as client:
            # Prometheus gets the router's page with the key, a server's without; else keys are asked.
            metrics = f"http://127.0.0.1:{node.port('admin')}/metrics"
            assert client.get(metrics).status_code == 401
            engine = f"http://127.0.0.1:{node.port('speculative')}"
            assert client.get(f"{engine}/metrics").status_code == 200
            assert client.get(f"{engine}/v1/models").status_code == 401

            # A server dies: the Pod stays ready, and its keeper brings it back.
            wait_for(lambda: all(each["usable"] for each in status(node)["backends"]))
            server = child_of(node.processes["speculative"].pid)
            os.kill(server, signal.SIGKILL)
            assert node.probe("readinessProbe")
            assert node.probe("livenessProbe")
            body = {"model": "sim-llama-8b", "messages": [{"role": "user", "content": "a"}]}
            answer = client.post(f"{public}/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert answer.headers["x-crossover-backend"] == "baseline"
            wait_for(lambda: answers(client, f"{engine}/v1/models") == 401)
            assert node.processes["speculative"].poll() is None
            assert "the server ended (signal 9)" in node.log("speculative")

            # The ConfigMap is updated: the new line is in force, in the same process.
            held = node.folders["calibration"]
            text = (held.path / "calibration.json").read_text(encoding="utf-8")
            new = json.loads(text)
            new["frontier"]["threshold"] = 7.0
            held.replace({"calibration.json": json.dumps(new)})
            wait_for(lambda: status(node)["policy"]["frontier"]["threshold"] == 7.0)

            # The end of the Pod: a running stream is finished, its server with it, then all end.
            long = body | {"stream": True, "max_tokens": 800, "ignore_eos": True}
            with client.stream("POST", f"{public}/v1/chat/completions", json=long) as stream:
                pieces = stream.iter_raw()
                got = next(pieces)
                node.terminate()
                wait_for(lambda: not node.probe("readinessProbe"), 2)
                got += b"".join(pieces)
            assert got.endswith(b"data: [DONE]\n\n")
            assert got.count(b'"content":') > 200
            for name, process in node.processes.items():
                assert process.wait(20) == 0, name
            for name in ("speculative", "baseline"):
                assert "the router is gone: SIGTERM to the server" in node.log(name)


def test_a_configmap_is_replaced_through_its_link(tmp_path: Path) -> None:
    """What stands in for a kubelet moves one link: the file's own path and link never change."""
    held = ConfigFolder(tmp_path / "mount", {"a.json": "1"})
    path = held.path / "a.json"
    before = path.lstat()
    assert path.read_text(encoding="utf-8") == "1"
    held.replace({"a.json": "2"})
    assert path.read_text(encoding="utf-8") == "2"
    assert path.lstat().st_mtime_ns == before.st_mtime_ns
    assert len([entry for entry in held.path.iterdir() if entry.name.startswith("..2026")]) == 1


@contextlib.contextmanager
def keeper(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A keeper that runs, at most for as long as the block does."""
    with subprocess.Popen(
        [sys.executable, "-I", str(KEEPER), *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_server_is_ended_only_after_the_router(tmp_path: Path, host: str) -> None:
    """SIGTERM reaches the server when the address refuses connections, and then at once."""
    told = tmp_path / "told"
    begun = tmp_path / "begun"
    program = (
        "import pathlib, signal, sys, time\n"
        f"def end(*_): pathlib.Path({str(told)!r}).touch(); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "time.sleep(60)"
    )
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
    with socket.create_server((host.strip("[]"), 0), family=family) as router:
        address = f"{host}:{router.getsockname()[1]}"
        with keeper(f"--after={address}", "--", sys.executable, "-c", program) as process:
            wait_for(begun.exists)
            process.send_signal(signal.SIGTERM)
            router.settimeout(5)
            for _ in range(2):  # the keeper looks, and looks again
                router.accept()[0].close()
            assert not told.exists()
            router.close()
            _, said = process.communicate(timeout=10)
            assert told.exists()
            assert process.returncode == 0
    assert said.splitlines() == [
        "keeper: the router is gone: SIGTERM to the server",
        "keeper: ended",
    ]


def test_what_a_dead_server_leaves_behind_is_ended_before_the_next(tmp_path: Path) -> None:
    """A process of the dead server's group, which would hold its GPU memory, does not live on."""
    lives = tmp_path / "lives"
    script = f"sleep 60 & echo $! >> {lives}; kill -9 $$"
    with keeper("--", "sh", "-c", script) as process:
        wait_for(lambda: lives.exists() and len(lives.read_text(encoding="ascii").split()) >= 2)
        first = int(lives.read_text(encoding="ascii").split()[0])
        wait_for(lambda: not Path(f"/proc/{first}").exists(), 5)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=10)
        assert process.returncode == 0
    assert "keeper: the server ended (signal 9), it is started again in 1 s" in said
    assert script not in said  # keys are among the arguments


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ([], 2, "keeper: a command is missing: keeper.py [--after=HOST:PORT] -- COMMAND [ARGUMENT...]"),
        (["--", "/nowhere"], 127, "keeper: /nowhere cannot be started: No such file or directory"),
        (["--after=9400", "--", "true"], 2, "keeper: --after=9400: only --after=HOST:PORT may stand before --"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_line(arguments: list[str], code: int, line: str) -> None:
    """What is wrong is said in one line, with the documented exit code."""
    with keeper(*arguments) as process:
        _, said = process.communicate(timeout=10)
        assert (process.returncode, said.splitlines()) == (code, [line])
