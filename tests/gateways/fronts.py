"""The gateways: how each is found, what it is told, how it is started and ended.

Each runs with the configuration that is in `deploy/gateways/`. Changed is only what has to be here:
the addresses of the pairs, the port, and where a process without rights may write.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

import httpx

from tests.gateways.site import KEY, POLL_S, chat
from tests.ports import free_port

CONFIGS: Final = Path(__file__).parents[2] / "deploy" / "gateways"
START_S: Final = 60.0
END_S: Final = 10.0
# What the committed files call the two pairs.
NAMES: Final = ("pair1:8000", "pair2:8000")


class Front:
    """One gateway that runs."""

    def __init__(self, port: int, process: asyncio.subprocess.Process) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process


class Gateway:
    """One gateway, as it is installed here."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.program = os.environ.get(name.upper()) or shutil.which(
            name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
        )

    def version(self) -> str:
        """Its name and version, as it says itself."""
        assert self.program is not None
        flag = "--version" if self.name == "smg" else "-v"
        told = subprocess.run(
            [self.program, flag], capture_output=True, text=True, check=True, timeout=60
        )
        found = re.search(r"\d+(\.\d+)+", told.stdout + told.stderr)
        return f"{self.name} {found[0] if found else ''}".strip()

    def command(self, port: int, urls: Sequence[str], folder: Path) -> list[str]:
        """Its command line in front of two pairs; files go into `folder`."""
        assert self.program is not None
        if self.name == "smg":
            return [
                self.program, "launch", "--host", "127.0.0.1", "--port", str(port),
                "--worker-urls", *urls, *smg_flags(), "--api-key", KEY,
                "--prometheus-port", str(free_port()), "--log-level", "warn",
            ]  # fmt: skip
        if self.name == "haproxy":
            path = folder / "haproxy.cfg"
            path.write_text(fitted("haproxy.cfg", port, urls), encoding="utf-8")
            return [self.program, "-db", "-f", str(path)]
        path = folder / "nginx.conf"
        path.write_text(nginx_config(port, urls, folder), encoding="utf-8")
        user = "user root; " if os.getuid() == 0 else ""
        own = f"daemon off; {user}pid {folder}/nginx.pid;"
        return [self.program, "-p", str(folder), "-c", str(path), "-g", own]


def smg_flags() -> list[str]:
    """The flags in `smg.flags`."""
    lines = (CONFIGS / "smg.flags").read_text(encoding="utf-8").splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


def fitted(name: str, port: int, urls: Sequence[str]) -> str:
    """A committed configuration with these addresses. Each must be there exactly once."""
    text = (CONFIGS / name).read_text(encoding="utf-8")
    listen = ("bind :8080", "bind") if name == "haproxy.cfg" else ("listen 8080", "listen")
    changes = {listen[0]: f"{listen[1]} 127.0.0.1:{port}"}
    for own, url in zip(NAMES, urls, strict=True):
        changes[own] = url.removeprefix("http://")
    for old, new in changes.items():
        assert text.count(old) == 1, f"{name}: {old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return text


def nginx_config(port: int, urls: Sequence[str], folder: Path) -> str:
    """The same for nginx, which also wants to know where it may write."""
    text = fitted("nginx.conf", port, urls)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    lines = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    return text.replace("http {\n", f"http {{\n{lines}", 1)


@contextlib.asynccontextmanager
async def front(gateway: Gateway, urls: Sequence[str], folder: Path) -> AsyncIterator[Front]:
    """A gateway that serves in front of these two pairs, for as long as the block runs."""
    port = free_port()
    log = folder / f"{gateway.name}.log"
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *gateway.command(port, urls, folder), stdout=out, stderr=out
        )
    try:
        made = Front(port, process)
        await _serves(made, lambda: log.read_text(encoding="utf-8", errors="replace")[-2000:])
        yield made
    finally:
        await _end(process)


async def _serves(made: Front, log: Callable[[], str]) -> None:
    """Wait until requests are answered."""
    limit = time.monotonic() + START_S
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(trust_env=False, timeout=10, headers=headers) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await client.post(f"{made.url}/v1/chat/completions", json=chat("-", 1))
                if answer.status_code == 200:
                    return
            assert made.process.returncode is None, log()
            assert time.monotonic() < limit, log()
            await asyncio.sleep(POLL_S * 5)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End it, whatever it does."""
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)
    if process.returncode is None:
        process.kill()
        await process.wait()
