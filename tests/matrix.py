"""Runs the trials of `tests.trials` against several proxies and prints a table in Markdown.

    python -m tests.matrix --peers crossover,smg,nginx

Each trial gets a fresh process of the proxy, with its defaults, and two fresh scripted backends. A
peer that is not installed is said so and left out. Nothing is downloaded. The paths of the others'
programs are taken from PATH, or from SMG and NGINX in the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from router import __version__
from tests.ports import free_port
from tests.raw_client import ask, post
from tests.scripted_backend import ScriptedBackend, response, scripted_backend
from tests.trials import TRIALS, Bench, Trial, body, says

NGINX_CONF = """
{user} daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream pair {{ least_conn; server {a}; server {b}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://pair; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""


class Peer:
    """One proxy: how it is found, named and started."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.program = {
            "crossover": sys.executable,
            "smg": os.environ.get("SMG") or shutil.which("smg"),
            "nginx": os.environ.get("NGINX") or shutil.which("nginx", path="/usr/sbin:/usr/bin"),
        }[name]

    def version(self) -> str:
        """Its name and version, as it says itself."""
        if self.name == "crossover":
            return f"Crossover {__version__}".removesuffix(" 0+unknown")  # not installed
        flag = "-v" if self.name == "nginx" else "--version"
        found = subprocess.run(
            [self.program or "", flag], capture_output=True, text=True, check=True
        )
        return (found.stdout or found.stderr).strip().removeprefix("nginx version: ")

    def command(self, port: int, a: str, b: str, folder: str) -> list[str]:
        """Its command line: two backends, and otherwise its defaults."""
        program = self.program or ""
        if self.name == "crossover":
            return [
                program, "-m", "router", "serve", "--speculative", a, "--baseline", b,
                "--policy", "round-robin", "--port", str(port), "--admin-port", str(free_port()),
            ]  # fmt: skip
        if self.name == "smg":
            return [
                program, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", a, b,
                "--policy", "round_robin", "--prometheus-port", str(free_port()),
            ]  # fmt: skip
        conf = Path(folder) / "nginx.conf"
        urls = {"a": a.removeprefix("http://"), "b": b.removeprefix("http://")}
        user = "" if os.getuid() else "user root;"  # else its worker may not write to the folder
        text = NGINX_CONF.format(folder=folder, port=port, user=user, **urls)
        conf.write_text(text, encoding="utf-8")
        return [program, "-p", folder, "-c", str(conf)]


@contextlib.asynccontextmanager
async def bench_of(peer: Peer) -> AsyncIterator[Bench]:
    """A fresh proxy that serves, in front of two fresh backends."""
    async with scripted_backend() as a, scripted_backend() as b:
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            process = await asyncio.create_subprocess_exec(
                *peer.command(port, a.url, b.url, folder),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            try:
                bench = Bench(port, a, b, process)
                # Closed after each answer, so that a trial begins without an idle connection.
                bench.both(says(response(extra=b"connection: close\r\n")))
                await serves(bench)
                yield bench
            finally:
                await end(process, a, b)


async def serves(bench: Bench) -> None:
    """Wait until requests are answered. TimeoutError after 20 s."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(OSError):
                if (await ask(bench.port, post(body()))).status == 200:
                    return
            await asyncio.sleep(0.1)


async def end(process: asyncio.subprocess.Process, *backends: ScriptedBackend) -> None:
    """End the proxy, whatever it does."""
    for backend in backends:
        await backend.leave()
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 3)
    if process.returncode is None:
        process.kill()
        await process.wait()


async def verdict(peer: Peer, trial: Trial) -> str | None:
    """None when the trial was passed, else what was wrong."""
    async with bench_of(peer) as bench:
        try:
            async with asyncio.timeout(100):
                await trial(bench)
        except AssertionError as error:
            return (str(error).splitlines() or ["it does not hold"])[0]
        except (OSError, TimeoutError, ValueError, LookupError) as error:
            return f"{type(error).__name__}: {error}"
    return None


def table(rows: dict[str, dict[str, str | None]], versions: dict[str, str]) -> str:
    """The verdicts as Markdown: a line for each trial, then what was wrong."""
    lines = [f"| trial | {' | '.join(versions.values())} |", "| --- |" + " --- |" * len(versions)]
    notes = []
    for trial, verdicts in rows.items():
        cells = []
        for peer in versions:
            wrong = verdicts[peer]
            cells.append("pass" if wrong is None else "**fail**")
            if wrong is not None:
                notes.append(f"- {trial}, {peer}: {wrong.replace('|', '/')}")
        lines.append(f"| {trial} | {' | '.join(cells)} |")
    passed = [sum(row[peer] is None for row in rows.values()) for peer in versions]
    lines.append(f"| passed of {len(rows)} | {' | '.join(map(str, passed))} |")
    return "\n".join([*lines, "", *notes]).rstrip()


async def run_all(peers: list[Peer], trials: dict[str, Trial]) -> dict[str, dict[str, str | None]]:
    """Every trial on every peer, one after the other."""
    rows: dict[str, dict[str, str | None]] = {}
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        task = progress.add_task("trials", total=len(trials) * len(peers))
        for name, trial in trials.items():
            rows[name] = {}
            for peer in peers:
                progress.update(task, description=f"{name} on {peer.name}")
                rows[name][peer.name] = await verdict(peer, trial)
                progress.advance(task)
    return rows


def main(
    peers: Annotated[str, typer.Option(help="Which proxies, with commas between.")] = "crossover",
    only: Annotated[str, typer.Option(help="Which trials, with commas between.")] = "",
) -> None:
    """Print a table of which proxy passes which trial.

    For example: python -m tests.matrix --peers crossover,smg,nginx

    Exit codes: 0 the table was printed, 2 a name is not known, 3 none of the peers is installed.
    """
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    names = [name.strip() for name in peers.split(",")]
    unknown = sorted({*wanted} - TRIALS.keys() | {*names} - {"crossover", "smg", "nginx"})
    if unknown:
        typer.echo(f"matrix: not known: {', '.join(unknown)}", err=True)
        raise typer.Exit(2)
    found = [Peer(name) for name in names]
    for peer in found:
        if peer.program is None:
            typer.echo(f"matrix: {peer.name} is not installed and left out", err=True)
    found = [peer for peer in found if peer.program is not None]
    if not found:
        raise typer.Exit(3)
    trials = {name: trial for name, trial in TRIALS.items() if not wanted or name in wanted}
    rows = asyncio.run(run_all(found, trials))
    typer.echo(table(rows, {peer.name: peer.version() for peer in found}))


if __name__ == "__main__":
    typer.run(main)
