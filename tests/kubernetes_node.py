"""Runs a rendered Pod on this machine: its commands, environments, ConfigMaps, Secrets and probes.

What a kubelet does, as far as the simulated overlay needs it: `$(NAME)` in arguments, variables from
Secrets, ConfigMaps mounted as folders whose files are links through `..data`, HTTP probes by the
names of ports, and SIGTERM to every container at once. Ports and paths are moved to free ones; what
is run is otherwise what the documents say. No images, no limits, no security: the machine has none.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx

from tests.kubernetes_build import containers, one, pod
from tests.ports import free_port

START_S: Final = 30.0
PORTS: Final = (8000, 9400, 30000, 31000)
# What the image has on its PATH, as this checkout has it.
PROGRAMS: Final = {
    "python3": [sys.executable],
    "loadtest": [sys.executable, "-m", "loadtest"],
    "crossover": [sys.executable, "-m", "router"],
}


class ConfigFolder:
    """A ConfigMap as a kubelet mounts it: each file a link to ..data/FILE, and that to a folder."""

    def __init__(self, path: Path, data: dict[str, str]) -> None:
        self.path = path
        self._times = 0
        path.mkdir(parents=True)
        self.replace(data)
        for name in data:
            (path / name).symlink_to(Path("..data") / name)

    def replace(self, data: dict[str, str]) -> None:
        """A new state: a folder beside, one link moved, the old folder removed."""
        self._times += 1
        folder = self.path / f"..2026_{self._times}"
        folder.mkdir()
        for name, text in data.items():
            (folder / name).write_text(text, encoding="utf-8")
        before = self.path / "..data"
        old = before.resolve() if before.exists() else None
        (self.path / "..data_tmp").symlink_to(folder.name)
        (self.path / "..data_tmp").rename(before)
        if old is not None:
            for left in old.iterdir():
                left.unlink()
            old.rmdir()


class Node:
    """One Pod that runs."""

    def __init__(self, documents: list[dict[str, Any]], root: Path) -> None:
        self.documents = documents
        self.root = root
        self.ports = {str(port): str(free_port()) for port in PORTS}
        self.folders: dict[str, ConfigFolder] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._containers = containers(documents)
        self._secrets = {
            name: base64.b64decode(value).decode()
            for name, value in one(documents, "Secret", "crossover-keys")["data"].items()
        }

    def port(self, name: str) -> int:
        """Where the container port of this name is here."""
        ports = [p for c in self._containers.values() for p in c["ports"] if p["name"] == name]
        return int(self.ports[str(ports[0]["containerPort"])])

    def secret(self, key: str) -> str:
        """A value of the Secret."""
        return self._secrets[key]

    def log(self, name: str) -> str:
        """What a container has written."""
        return (self.root / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def _moved(self, text: str) -> str:
        """The same with this machine's ports and paths."""
        for port, free in self.ports.items():
            text = re.sub(rf"(?<![0-9]){port}(?![0-9])", free, text)
        for mount in ("/etc/crossover/", "/gpu/"):
            text = text.replace(mount, f"{self.root}{mount}")
        return text

    def start(self) -> None:
        """Mount everything and start all containers."""
        for volume in pod(self.documents)["volumes"]:
            mounts = [
                mount["mountPath"]
                for container in self._containers.values()
                for mount in container["volumeMounts"]
                if mount["name"] == volume["name"]
            ]
            folder = self.root / mounts[0].lstrip("/")
            if "configMap" in volume:
                data = one(self.documents, "ConfigMap", volume["configMap"]["name"])["data"]
                self.folders[volume["name"]] = ConfigFolder(folder, data)
            else:
                folder.mkdir(parents=True, exist_ok=True)
        for name, container in self._containers.items():
            self._run(name, container)

    def _run(self, name: str, container: dict[str, Any]) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CROSSOVER_")}
        given = {}
        for each in container["env"]:
            if "value" in each:
                given[each["name"]] = self._moved(each["value"])
            elif (key := each["valueFrom"]["secretKeyRef"]["key"]) in self._secrets:
                given[each["name"]] = self._secrets[key]
        # An image's entry point takes `args`; `command` replaces it.
        words = [*container.get("command", ["crossover"]), *container.get("args", [])]
        words = [re.sub(r"\$\((\w+)\)", lambda m: given[m[1]], self._moved(word)) for word in words]
        words = [part for word in words for part in PROGRAMS.get(word, [word])]
        with (self.root / f"{name}.log").open("wb") as out:
            self.processes[name] = subprocess.Popen(
                words, stdout=out, stderr=out, env=environment | given
            )

    def probe(self, name: str) -> bool:
        """Whether a probe of the router passes now."""
        probe = self._containers["router"][name]
        get = probe["httpGet"]
        with contextlib.suppress(httpx.HTTPError):
            url = f"http://127.0.0.1:{self.port(get['port'])}{get['path']}"
            answer = httpx.get(url, timeout=probe.get("timeoutSeconds", 1), trust_env=False)
            return 200 <= answer.status_code < 400
        return False

    def wait_for(self, name: str) -> None:
        """Wait until a probe passes."""
        limit = time.monotonic() + START_S
        while not self.probe(name):
            assert time.monotonic() < limit, self.log("router")
            time.sleep(0.05)

    def terminate(self) -> None:
        """The end of a Pod begins: SIGTERM to every container."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Leave nothing behind."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def running_pod(documents: list[dict[str, Any]], root: Path) -> Iterator[Node]:
    """A Pod that is ready, for as long as the block runs."""
    node = Node(documents, root)
    try:
        node.start()
        node.wait_for("startupProbe")
        node.wait_for("readinessProbe")
        yield node
    finally:
        node.close()
