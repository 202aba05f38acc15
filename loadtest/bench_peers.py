"""Other proxies that `loadtest bench` measures beside the router, each as a short description.

A description says how the program is found, which version it is, its files and its arguments, and
the port that it shall take. Starting, pinning and ending is the stage's. All send requests to the
two servers in turn, log no request, and keep their other settings: what is measured is what a user
gets who starts them. LiteLLM is not here: a request takes it so long that this load is no load for
it but a queue.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

VERSION_S: Final = 20.0
NUMBER: Final = re.compile(r"\d+\.\d+(?:\.\d+)*")
NGINX: Final = """
daemon off; master_process off; worker_processes 1; pid nginx.pid; error_log stderr;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 1000000; client_body_buffer_size 64k;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  upstream pair {{ server 127.0.0.1:{}; server 127.0.0.1:{}; keepalive 1024; }}
  server {{
    listen 127.0.0.1:{} backlog=4096;
    location / {{
      proxy_pass http://pair; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""
HAPROXY: Final = """
global
  nbthread 1
  no strict-limits
defaults
  mode http
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 600s
  timeout server 600s
frontend clients
  bind 127.0.0.1:{2} backlog 4096
  default_backend pair
backend pair
  balance roundrobin
  server one 127.0.0.1:{0} pool-max-conn 1024
  server other 127.0.0.1:{1} pool-max-conn 1024
"""
OF_PACKAGE: Final = "import importlib.metadata as m; print(m.version({!r}))"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a peer listens, what is behind it, and its own empty directory."""

    port: int
    servers: tuple[int, int]
    directory: Path
    spare: int  # a port for its metrics

    def fill(self, text: str) -> str:
        """A configuration with the servers' ports and its own."""
        return text.format(*self.servers, self.port)

    def urls(self) -> list[str]:
        """The servers' addresses."""
        return [f"http://127.0.0.1:{port}" for port in self.servers]


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One other proxy."""

    name: str  # of its column, and of the program on PATH
    variable: str  # of the environment: the program's file, where it is not on PATH
    arguments: Callable[[Place], list[str]]
    files: Callable[[Place], dict[str, str]] = lambda _: {}
    version: Callable[[str], list[str]]  # the command that prints it


def _rust_router(place: Place, *, level: str) -> list[str]:
    """What smg and vllm-router have in common: both come from SGLang's first router."""
    return [
        *("--host", "127.0.0.1", "--port", str(place.port), "--worker-urls", *place.urls()),
        *("--policy", "round_robin", "--log-level", level),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.spare)),
    ]


PEERS: Final = (
    Peer(
        name="nginx",
        variable="NGINX",
        files=lambda place: {"nginx.conf": place.fill(NGINX)},
        arguments=lambda place: [
            *("-p", str(place.directory), "-c", str(place.directory / "nginx.conf"))
        ],
        version=lambda program: [program, "-v"],
    ),
    Peer(
        name="haproxy",
        variable="HAPROXY",
        files=lambda place: {"haproxy.cfg": place.fill(HAPROXY)},
        arguments=lambda place: ["-db", "-f", str(place.directory / "haproxy.cfg")],
        version=lambda program: [program, "-v"],
    ),
    Peer(
        name="smg",
        variable="SMG",
        arguments=lambda place: ["launch", *_rust_router(place, level="warn")],
        version=lambda program: [program, "--version"],
    ),
    Peer(
        name="vllm-router",
        variable="VLLM_ROUTER",
        arguments=lambda place: _rust_router(place, level="warning"),
        # It has no option that prints its version; the Python beside it knows.
        version=lambda program: [
            *(str(Path(program).parent / "python"), "-c", OF_PACKAGE.format("vllm-router"))
        ],
    ),
)
NAMES: Final = tuple(peer.name for peer in PEERS)


def find(peer: Peer, environment: Mapping[str, str]) -> str | None:
    """The program's file: the one that the environment names, otherwise the one on PATH."""
    named = environment.get(peer.variable)
    found = shutil.which(named or peer.name, path=environment.get("PATH"))
    return os.path.abspath(found) if found else None  # noqa: PTH100 (keeps links: a venv is one)


def missing(peer: Peer, environment: Mapping[str, str]) -> str:
    """Why a peer that was not found is left out, and what would mend it."""
    named = environment.get(peer.variable)
    if named:
        return f"{peer.name} left out: {peer.variable}={named} is not a program that can be run"
    return f"{peer.name} left out: not on PATH, and {peer.variable} does not name its file"


def failed(peer: Peer, program: str, why: str, printed: str) -> str:
    """Why a peer that was started is left out: with the last line that it printed."""
    last = (printed.strip().splitlines() or ["it printed nothing"])[-1].strip()
    return f"{peer.name} left out: {program} did not start: {why} ({last[:200]})"


def version(peer: Peer, program: str) -> str:
    """The version of a program; "" where it does not say."""
    try:
        said = subprocess.run(  # noqa: S603 (a program that the user installed)
            peer.version(program),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = NUMBER.search(said.stdout or said.stderr)
    return found[0] if found and said.returncode == 0 else ""


def free_ports(number: int) -> list[int]:
    """So many ports of the loopback that are free now, all different."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
