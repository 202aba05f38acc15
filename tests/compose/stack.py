"""A running copy of the stack in compose.yaml: started under a name of its own, always removed.

It is a copy of what git knows, so that nobody's .env.local or running stack is touched, and so that
what is checked in is shown to be enough. Image names come from the environment, as for everybody;
COMPOSE_TEST_BUILD_NETWORK=host lets the build use the host's network where a bridge reaches no
package registry.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.ports import free_ports

ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_S = 180
SERVICES = ("router", "speculative-sim", "baseline-sim", "prometheus")
# Asks another container from inside the network and prints what it says.
ASK = (
    "import sys, urllib.request as r;"
    "sys.stdout.write(r.build_opener(r.ProxyHandler({})).open(sys.argv[1], timeout=10)"
    ".read().decode())"
)


def engine_or_skip() -> str:
    """The docker command, if it has Compose and reaches an engine; else skip with the reason."""
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("no docker command here")
    for arguments, missing in (
        (["compose", "version"], "docker has no Compose v2"),
        (["info", "--format", "{{.ServerVersion}}"], "no Docker engine can be reached"),
    ):
        done = subprocess.run([docker, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{missing}: {(done.stderr or done.stdout).strip()[:200]}")
    return docker


class Stack:
    """The stack, and how to talk to it."""

    def __init__(self, docker: str, folder: Path) -> None:
        self.docker = docker
        self.folder = folder
        self.name = f"crossover-test-{secrets.token_hex(4)}"
        self.image = f"{self.name}:test"
        self.port, self.admin_port, grafana_port = free_ports(3)
        self.services = list(SERVICES)
        self.first_key = ""  # as it was after the first start
        self.environ = {
            **os.environ,
            "COMPOSE_PROFILES": "sim",
            "COMPOSE_PROJECT_NAME": self.name,
            "ROUTER_IMAGE": self.image,
            "ROUTER_PORT": str(self.port),
            "ADMIN_PORT": str(self.admin_port),
            "GRAFANA_PORT": str(grafana_port),
        }
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=60
        )
        self._copy()

    def run(self, *arguments: str, seconds: float = WAIT_S, ok: bool = True) -> str:
        """Run `docker compose` with these arguments and return what it printed."""
        done = subprocess.run(
            [self.docker, "compose", *self._files(), *arguments],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if ok and done.returncode:
            raise AssertionError(
                f"docker compose {' '.join(arguments)}: exit code {done.returncode}\n"
                f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{self.logs()}"
            )
        return done.stdout

    def up(self) -> float:
        """Start everything and wait until it is healthy; return the seconds that it took."""
        begun = time.monotonic()
        self.run("up", "-d", "--wait", "--wait-timeout", str(WAIT_S), *self.services, seconds=600)
        return time.monotonic() - begun

    def logs(self) -> str:
        """The end of what the containers wrote."""
        done = subprocess.run(
            [self.docker, "compose", *self._files(), "logs", "--no-color", "--tail", "25"],
            cwd=self.folder, env=self.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout[-8000:]

    def state(self, service: str) -> dict[str, Any]:
        """What the engine says of a service's container."""
        container = self.run("ps", "-aq", service).strip()
        done = subprocess.run(
            [self.docker, "inspect", container], capture_output=True, text=True, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)[0]
        return found

    def image_facts(self) -> dict[str, Any]:
        """What the engine says of the image that was built."""
        done = subprocess.run(
            [self.docker, "image", "inspect", self.image],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)[0]
        return found

    def key(self) -> str:
        """The admin key, as the documentation says to get it."""
        return self.run("exec", "-T", "router", "cat", "/run/crossover/admin.key")

    def admin(self, path: str, key: str | None) -> httpx.Response:
        """A GET on the admin listener, from the host."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        return httpx.get(url, headers=headers, timeout=10, trust_env=False)

    def prometheus(self, path: str) -> Any:
        """The data of an answer of Prometheus' API, asked from inside the network."""
        url = f"http://prometheus:9090/api/v1/{path}"
        answer = json.loads(self.run("exec", "-T", "router", "python", "-c", ASK, url))
        assert answer["status"] == "success", answer
        return answer["data"]

    def chat(self, **fields: Any) -> httpx.Response:
        """One chat request from the host."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def remove(self) -> None:
        """Take away containers, network, volumes and the image."""
        self.client.close()
        self.run("down", "-v", "--remove-orphans", "-t", "2", ok=False)
        subprocess.run(
            [self.docker, "image", "rm", "-f", self.image], capture_output=True, check=False
        )

    def left(self) -> str:
        """What of it the engine still has."""
        found = []
        for arguments in (
            ["ps", "-aq", "--filter", f"label=com.docker.compose.project={self.name}"],
            ["volume", "ls", "-q", "--filter", f"label=com.docker.compose.project={self.name}"],
            ["network", "ls", "-q", "--filter", f"label=com.docker.compose.project={self.name}"],
            ["image", "ls", "-q", self.image],
        ):
            done = subprocess.run(
                [self.docker, *arguments], capture_output=True, text=True, check=True
            )
            found.append(done.stdout)
        return "".join(found)

    def _copy(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                target = self.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, target)
        network = os.environ.get("COMPOSE_TEST_BUILD_NETWORK")
        if network:
            text = yaml.safe_dump({"services": {"router": {"build": {"network": network}}}})
            (self.folder / "build-network.yaml").write_text(text, encoding="utf-8")

    def _files(self) -> list[str]:
        more = self.folder / "build-network.yaml"
        return ["-f", "compose.yaml", "-f", more.name] if more.exists() else []
