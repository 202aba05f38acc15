"""A real Prometheus for a while: on loopback, in a directory of its own, ended by its process id."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx

START_S: Final = 15.0
STOP_S: Final = 5.0
POLL_S: Final = 0.05


class PrometheusError(RuntimeError):
    """It did not start, or refused a query; the text says why."""


def binary() -> str | None:
    """The program, if it is installed (Debian's package prometheus)."""
    return shutil.which("prometheus")


class Prometheus:
    """Asks one by its address."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=10.0)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def ready(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(httpx.HTTPError):
            return (await self._client.get("/-/ready")).status_code == 200
        return False

    async def up(self) -> int:
        """How many targets it scrapes with success."""
        return sum(int(float(row["value"][1])) for row in await self.at("up"))

    async def at(self, expr: str, moment: float | None = None) -> list[Any]:
        """An instant query, now or at a unix time. Raises PrometheusError when it is refused."""
        more = {} if moment is None else {"time": str(moment)}
        return await self._ask("query", {"query": expr, **more})

    async def between(self, expr: str, start: float, end: float, step_s: float) -> list[Any]:
        """A range query. Raises PrometheusError when it is refused."""
        times = {"start": str(start), "end": str(end), "step": str(step_s)}
        return await self._ask("query_range", {"query": expr, **times})

    async def _ask(self, kind: str, fields: Mapping[str, str]) -> list[Any]:
        answer = (await self._client.post(f"/api/v1/{kind}", data=fields)).json()
        if answer["status"] != "success":
            raise PrometheusError(f"{answer['error']}: {fields['query']}")
        result: list[Any] = answer["data"]["result"]
        return result


def configuration(
    router: str, engines: Mapping[str, str], *, scrape: str, rules: str | None
) -> str:
    """What to scrape, with the labels that the shipped configuration gives. JSON is YAML."""

    def target(url: str, **labels: str) -> dict[str, object]:
        return {"targets": [url.removeprefix("http://")], "labels": labels}

    jobs = {
        "crossover": [target(router)],
        "sglang": [target(url, backend=role) for role, url in engines.items()],
    }
    found: dict[str, object] = {
        "global": {
            "scrape_interval": scrape,
            "scrape_timeout": scrape,
            "evaluation_interval": scrape,
        },
        "scrape_configs": [
            {"job_name": name, "static_configs": targets} for name, targets in jobs.items()
        ],
    }
    if rules is not None:
        found["rule_files"] = [rules]
    return json.dumps(found)


@contextlib.asynccontextmanager
async def running_prometheus(
    directory: Path,
    router: str,
    engines: Mapping[str, str],
    *,
    scrape: str = "1s",
    alerts: Mapping[str, str] | None = None,
) -> AsyncIterator[Prometheus]:
    """One that scrapes a router's admin listener and both servers for as long as the block runs.

    `alerts`: names and expressions. Raises PrometheusError when it does not start.
    """
    rules = None
    if alerts:
        written = [{"alert": name, "expr": expr} for name, expr in alerts.items()]
        rules = str(directory / "rules.json")
        await asyncio.to_thread(
            Path(rules).write_text, json.dumps({"groups": [{"name": "a", "rules": written}]})
        )
    config, log = directory / "prometheus.json", directory / "prometheus.log"
    await asyncio.to_thread(
        config.write_text, configuration(router, engines, scrape=scrape, rules=rules)
    )
    address = f"127.0.0.1:{_free_port()}"
    program = binary()
    if program is None:
        raise PrometheusError("prometheus is not installed (Debian: apt-get install prometheus)")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=warn",
            stdout=output,
            stderr=output,
        )
    asked = Prometheus(f"http://{address}")
    try:
        await _until_ready(asked, process, log)
        yield asked
    finally:
        await asked.close()
        await _end(process)


async def _until_ready(asked: Prometheus, process: asyncio.subprocess.Process, log: Path) -> None:
    for _ in range(int(START_S / POLL_S)):
        if process.returncode is not None:
            break
        if await asked.ready():
            return
        await asyncio.sleep(POLL_S)
    said = (await asyncio.to_thread(log.read_text)).strip()[:600]
    raise PrometheusError(f"prometheus did not start: {said}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _free_port() -> int:
    """One that is free now; taken in between, Prometheus says so and does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
