"""What the tests of `crossover launch` share: small servers, a Python with GPUs, a look at /proc."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from router.launch import Job, launch
from router.launch_kept import Command
from router.launch_plan import Address, Plan, ServerPlan, Share
from router.launch_view import View
from router.load import Role
from router.logs import LineWriter
from tests.ports import free_port, free_ports

ROOT = Path(__file__).resolve().parent.parent
LOOK_S = 0.02

# The least that is a server: /health is 200, and what else there is, is 404. On standard library
# alone it is up in a tenth of a second. It answers, with `child`, below a process of another session.
SERVER = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass
subprocess.Popen(["sleep", sys.argv[2]], start_new_session=True)
print("up", "as", os.getpid(), flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def processes(marker: str) -> list[int]:
    """The living processes that have `marker` in their command line or their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                if state not in "ZX" and marker.encode() in text:
                    found.append(int(entry.name))
    return found


def wait_for(done: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Look until `done` says something true, and return it."""
    limit = time.monotonic() + seconds
    while not (result := done()):
        assert time.monotonic() < limit, "not in time"
        time.sleep(LOOK_S)
    return result


class Lines:
    """What a launch wrote, from a view of its own."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.view = View(Console(file=io.StringIO()), LineWriter(self.data.extend))

    @property
    def all(self) -> list[str]:
        """The lines so far."""
        return self.data.decode().splitlines()

    def having(self, text: str) -> list[str]:
        """Those with this text in them."""
        return [line for line in self.all if text in line]

    async def wait(self, text: str, count: int = 1, seconds: float = 20.0) -> list[str]:
        """Wait until that many lines have this text."""
        async with asyncio.timeout(seconds):
            while len(found := self.having(text)) < count:
                await asyncio.sleep(LOOK_S)
        return found


def job(
    commands: Mapping[Role, Sequence[str]],
    ports: Mapping[Role, int],
    *,
    router: Sequence[str] | None = None,
    **settings: Any,
) -> Job:
    """A launch of these commands, with a small server as its router unless the test has another."""
    port = free_port()
    servers = [
        ServerPlan(
            role=role,
            address=Address("127.0.0.1", ports[role]),
            command=tuple(commands[role]),
            beside=tuple(commands[role]),
            env={},
        )
        for role in (Role.SPECULATIVE, Role.BASELINE)
    ]
    at_once = settings.pop("at_once", True)
    values: dict[str, Any] = {
        "drain": 0.0,
        "start_timeout": 20.0,
        "stop_timeout": 5.0,
        "restart_delay": 0.05,
        "restart_delay_max": 0.2,
        "keys": {},
        "threshold": None,
    } | settings
    return Job(
        plan=Plan(servers=(servers[0], servers[1]), at_once=at_once, share=Share.SHARED),
        router=Command(tuple(router or server(port)), dict(os.environ)),
        router_address=("127.0.0.1", port),
        router_url=f"http://127.0.0.1:{port}/v1",
        base_env=dict(os.environ),
        **values,
    )


def server(port: int, nap: str = "600") -> list[str]:
    """The command of the least server; its child sleeps for `nap` seconds, which is its mark."""
    return [sys.executable, "-I", "-S", "-c", SERVER, str(port), nap]


async def launched(work: Job, lines: Lines) -> int:
    """Run a launch in this loop; whatever happens, nothing of it stays."""
    try:
        return await launch(work, lines.view)
    finally:
        lines.view.close()


def fake_gpus(
    folder: Path, gpus: Sequence[Mapping[str, Any]], sglang: str | None = "0.5.17"
) -> str:
    """A folder for PYTHONPATH, with a torch that sees these GPUs and an SGLang of this version."""
    torch = folder / "torch"
    torch.mkdir(parents=True)
    seen = [{"free": 0, "total": 0, "name": "GPU", "major": 9, "minor": 0} | dict(g) for g in gpus]
    (torch / "__init__.py").write_text(
        "__version__ = '2.11.0'\n"
        f"SEEN = {seen!r}\n"
        "class Properties:\n"
        "    def __init__(self, gpu):\n"
        "        self.name, self.major, self.minor = gpu['name'], gpu['major'], gpu['minor']\n"
        "        self.total_memory = gpu['total']\n"
        "class cuda:\n"
        "    device_count = staticmethod(lambda: len(SEEN))\n"
        "    get_device_properties = staticmethod(lambda i: Properties(SEEN[i]))\n"
        "    mem_get_info = staticmethod(lambda i: (SEEN[i]['free'], SEEN[i]['total']))\n"
    )
    if sglang is not None:
        (folder / "sglang").mkdir()
        (folder / "sglang" / "__init__.py").write_text("")
        info = folder / f"sglang-{sglang}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {sglang}\n")
    return str(folder)


def model_folder(folder: Path, architecture: str = "LlamaForCausalLM", **more: Any) -> str:
    """A folder with the config.json of a model of Llama-3.1-8B's shape."""
    folder.mkdir(parents=True)
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 128256}
    (folder / "config.json").write_text(
        json.dumps({"architectures": [architecture]} | shape | more)
    )
    return str(folder)


class Launcher:
    """A running `crossover launch` on simulated servers."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, ports: dict[str, int]) -> None:
        self.process = process
        self.ports = ports
        self.url = f"http://127.0.0.1:{ports['router']}"
        self._log = log

    @property
    def lines(self) -> list[str]:
        """What it has written."""
        return self._log.read_text(encoding="utf-8", errors="replace").splitlines()

    def wait(self, text: str, count: int = 1, seconds: float = 30.0) -> list[str]:
        """Wait until that many lines have this text."""

        def found() -> list[str] | None:
            lines = [line for line in self.lines if text in line]
            return lines if len(lines) >= count else None

        try:
            lines: list[str] = wait_for(found, seconds)
        except AssertionError:
            raise AssertionError(f"{text!r} is not in:\n" + "\n".join(self.lines)) from None
        return lines


@contextlib.contextmanager
def launcher(*flags: str, marker: str) -> Iterator[Launcher]:
    """`crossover launch` of two engines on free ports; all its processes have the mark."""
    names = ("speculative", "baseline", "router", "admin")
    ports = dict(zip(names, free_ports(4), strict=True))
    command = (
        f"{sys.executable} -m loadtest engine --role {{role}} --port {{port}} --health-seconds 0 "
        "--time-scale 0.05 --max-running-requests 256 --shutdown-poll 1"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("CROSSOVER_")}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "router", "launch", "--server-command", command,
                    "--speculative", f"http://127.0.0.1:{ports['speculative']}",
                    "--baseline", f"http://127.0.0.1:{ports['baseline']}",
                    "--port", str(ports["router"]), "--admin-port", str(ports["admin"]),
                    "--drain-delay", "0", *flags,
                ],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT), "LAUNCH_MARKER": marker},
            )  # fmt: skip
        try:
            yield Launcher(process, log, ports)
        finally:
            process.kill()
            process.wait()
            wait_for(lambda: not processes(marker), 10.0)
