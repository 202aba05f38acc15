"""`make soak`: minutes of short requests, and nothing may grow.

    python -m tests.chaos.soak --seconds 600 --json soak.json

A router as a process before two light servers. Every few seconds its resident memory, its open
files and the series on `/metrics` are looked at; after the warm-up all three must stay:

    memory    a straight line through it grows by at most 2 bytes for each request (and 3 MiB that
              an allocator may take over such a time): less than one object for every tenth request
    files     under load three for each client (its own connection, and one to each backend) and
              4; when it is gone and idle connections have been closed, as before it came, but 4
    series    the same number from the end of the warm-up to the end
    counts    0 in flight at the end, no error; as many lines in the log as requests that were sent,
              without those to paths that there are not, which it does not tell of

Exit code 0 when all of it holds, 1 when not, 2 when it could not be run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import linear_regression
from typing import Annotated, Final

import httpx
import msgspec
import typer
import uvloop
from rich.console import Console

from loadtest.children import SOURCE, ChildError, Children
from tests.chaos.soak_load import Load
from tests.chaos.verdict import UNHANDLED

MIB: Final = 1 << 20
WARM_SHARE: Final = 0.25  # of the time, for caches and rings to fill
BYTES_A_REQUEST: Final = 2.0
ALLOCATOR: Final = 3 * MIB
FILES: Final = 4  # connections of the watchers come and go
A_CLIENT: Final = 3  # files
QUIET_S: Final = 5.0  # idle connections to backends are closed after 4
PORTS: Final = r"listening on (\d+) (\d+)"
LISTENING: Final = re.compile(rb'"port":\s*(\d+).*?"admin_port":\s*(\d+)')
START_S: Final = 30.0
FAULT, CANNOT = 1, 2


class Sample(msgspec.Struct):
    """One look at the router."""

    at: float  # seconds since the load began
    requests: int
    rss: int  # bytes
    files: int
    series: int


class Report(msgspec.Struct):
    """Everything that is reported."""

    seconds: float
    requests: int
    rate: float
    errors: dict[str, int]
    rss_first: int  # bytes at the end of the warm-up
    rss_last: int
    growth: float  # bytes, of the line through the samples after the warm-up
    growth_a_request: float
    files_before: int
    files_most: int
    files_after: int
    series: list[int]  # least and most after the warm-up
    in_flight: float
    logged: int
    unhandled: list[str]
    exit_code: int | None
    samples: list[Sample]
    broken_promises: list[str] = []


class Watched:
    """The router as a process, its log read as it comes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = self.admin_port = 0
        self.logged = 0  # lines about requests
        self.unhandled: list[str] = []
        self._rest = b""
        self._listening = asyncio.Event()
        self._client = httpx.AsyncClient(trust_env=False, timeout=10.0)

    async def read_log(self) -> None:
        """Count lines about requests, look at the others, keep none."""
        stream = self.process.stderr
        if stream is None:
            raise ChildError("the router's log cannot be read")
        while data := await stream.read(MIB):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if b'"event":"request"' in line:
                    self.logged += 1
                    if b'"internal_error"' not in line:
                        continue
                found = LISTENING.search(line)
                if found and not self.port:
                    self.port, self.admin_port = int(found[1]), int(found[2])
                    self._listening.set()
                if b'"level": "error"' in line or any(w.encode() in line for w in UNHANDLED):
                    self.unhandled.append(line[:400].decode("utf-8", "replace"))

    async def until_ready(self) -> None:
        """Wait until requests are served. Raises ChildError."""
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(START_S):
                await self._listening.wait()
                url = f"http://127.0.0.1:{self.port}/ready"
                while (await self._client.get(url)).status_code != 200:
                    await asyncio.sleep(0.05)
                return
        raise ChildError(f"the router was not ready within {START_S:g} s")

    async def sample(self, at: float, requests: int) -> Sample:
        """One look."""
        pid = self.process.pid
        lines = await self.metrics()
        series = sum(not line.startswith("#") for line in lines)
        return Sample(at, requests, resident(pid), open_files(pid), series)

    async def metrics(self) -> list[str]:
        """The lines of `/metrics`."""
        answer = await self._client.get(f"http://127.0.0.1:{self.admin_port}/metrics")
        return answer.text.splitlines()

    async def in_flight(self) -> float:
        """What is counted as in flight on both backends."""
        lines = await self.metrics()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("crossover_in_flight{")
        )

    async def close(self) -> None:
        """Hang up."""
        await self._client.aclose()


def resident(pid: int) -> int:
    """Bytes of memory that a process has. Raises ChildError where that cannot be known."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except OSError as error:
        raise ChildError(f"the router is gone, or this is no Linux: {error}") from error
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> int:
    """How many files a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@contextlib.asynccontextmanager
async def watched_router(ports: tuple[str, str]) -> AsyncIterator[Watched]:
    """A router before two servers, for as long as the block runs."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    env = {name: value for name, value in os.environ.items() if not name.startswith("CROSSOVER_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "router", "serve", "--speculative", urls[0],
        "--baseline", urls[1], "--threshold", "32", "--scope", "speculative",
        "--port", "0", "--admin-port", "0", "--drain-delay", "0", "--drain-timeout", "5s",
        stderr=asyncio.subprocess.PIPE, limit=4 * MIB, env=env | {"PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    router = Watched(process)
    reading = asyncio.ensure_future(router.read_log())
    try:
        await router.until_ready()
        yield router
    finally:
        await router.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def soak(
    directory: Path, seconds: float, connections: int, rate: float, console: Console
) -> Report:
    """The whole run; what came of it. Raises ChildError."""
    with Children(directory) as children:
        servers = children.start("servers", "loadtest.bench_backend", "servers")
        found = await asyncio.to_thread(servers.wait_for, PORTS, START_S)
        async with watched_router((found[1], found[2])) as router:
            return await _run(router, seconds, connections, rate, console)


async def _run(
    router: Watched, seconds: float, connections: int, rate: float, console: Console
) -> Report:
    before = await router.sample(0.0, 0)
    load = Load(router.port, connections, rate)
    began = time.monotonic()
    every = min(5.0, seconds / 20)
    samples: list[Sample] = []
    await load.start()
    while (now := time.monotonic() - began) < seconds:
        await asyncio.sleep(min(every, seconds - now))
        now = time.monotonic() - began
        samples.append(await router.sample(now, load.answered + load.left))
        console.print(_progress(samples), highlight=False)
    await load.stop()
    console.print("quiet: idle connections are to be closed", highlight=False)
    await asyncio.sleep(QUIET_S)
    after = await router.sample(now + QUIET_S, load.answered + load.left)
    in_flight = await router.in_flight()
    router.process.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(router.process.wait(), 15)
    await asyncio.sleep(0.1)  # the end of its log
    return judge(samples, before, after, load, router, in_flight)


def _progress(samples: list[Sample]) -> str:
    last = samples[-1]
    earlier = samples[-2] if len(samples) > 1 else Sample(0.0, 0, 0, 0, 0)
    rate = (last.requests - earlier.requests) / max(1e-9, last.at - earlier.at)
    return (
        f"{last.at:6.0f} s  {last.requests:>10,} requests  {rate:>7,.0f}/s  "
        f"{last.rss / MIB:7.1f} MiB  {last.files:>4} files  {last.series:>5} series"
    )


def judge(
    samples: list[Sample],
    before: Sample,
    after: Sample,
    load: Load,
    router: Watched,
    in_flight: float,
) -> Report:
    """Figures and promises."""
    warm = samples[int(len(samples) * WARM_SHARE) :]
    growth, each = line_through(warm)
    report = Report(
        seconds=round(samples[-1].at, 1),
        requests=samples[-1].requests,
        rate=round(samples[-1].requests / samples[-1].at, 1),
        errors=dict(load.errors),
        rss_first=warm[0].rss,
        rss_last=warm[-1].rss,
        growth=round(growth),
        growth_a_request=round(each, 3),
        files_before=before.files,
        files_most=max(sample.files for sample in samples),
        files_after=after.files,
        series=[min(s.series for s in warm), max(s.series for s in warm)],
        in_flight=in_flight,
        logged=router.logged,
        unhandled=router.unhandled[:10],
        exit_code=router.process.returncode,
        samples=samples,
    )
    report.broken_promises = broken_promises(
        report, load.sent - load.unknown, before.files + A_CLIENT * load.connections + FILES
    )
    return report


def line_through(samples: list[Sample]) -> tuple[float, float]:
    """Bytes by which memory grew along a straight line, and bytes for each request."""
    requests = [float(sample.requests) for sample in samples]
    if len(samples) < 2 or requests[0] == requests[-1]:
        return 0.0, 0.0
    each = linear_regression(requests, [float(sample.rss) for sample in samples]).slope
    return each * (requests[-1] - requests[0]), each


def broken_promises(report: Report, logged: int, files: int) -> list[str]:
    """What must not be, in words; empty when all is well.

    `logged`: lines that the log must have; `files`: how many may be open under load.
    """
    measured = report.growth / report.growth_a_request if report.growth_a_request else 0.0
    allowed = ALLOCATOR + BYTES_A_REQUEST * measured
    checks = (
        (report.requests == 0, "nothing was answered"),
        (bool(report.errors), f"errors: {report.errors}"),
        (
            report.growth > allowed,
            f"memory grew by {report.growth / MIB:.1f} MiB, {allowed / MIB:.1f} are allowed",
        ),
        (report.files_most > files, f"{report.files_most} files were open, {files} may be"),
        (
            report.files_after > report.files_before + FILES,
            f"{report.files_after} files are open at rest, {report.files_before} were before",
        ),
        (report.series[0] != report.series[1], f"series rose: {report.series}"),
        (report.in_flight != 0, f"{report.in_flight:g} are counted as in flight at rest"),
        (report.logged != logged, f"{report.logged} requests were logged and not {logged}"),
        (bool(report.unhandled), f"unhandled in the log: {report.unhandled[:3]}"),
        (report.exit_code != 0, f"the router ended with exit code {report.exit_code}"),
    )
    return [text for wrong, text in checks if wrong]


def show(report: Report, console: Console) -> None:
    """The figures and the verdict."""
    console.print(
        f"{report.requests:,} requests in {report.seconds:g} s ({report.rate:,.0f}/s), "
        f"{sum(report.errors.values())} errors\n"
        f"memory  {report.rss_first / MIB:.1f} MiB after the warm-up, {report.rss_last / MIB:.1f} at "
        f"the end; the line grows by {report.growth / MIB:.2f} MiB, "
        f"{report.growth_a_request:.2f} bytes a request "
        f"(at most {BYTES_A_REQUEST:g}, and {ALLOCATOR / MIB:g} MiB)\n"
        f"files   {report.files_before} before, at most {report.files_most}, "
        f"{report.files_after} at rest\n"
        f"series  {report.series[0]} to {report.series[1]}\n"
        f"log     {report.logged:,} requests, {len(report.unhandled)} unhandled; "
        f"exit code {report.exit_code}",
        highlight=False,
    )
    for line in report.broken_promises:
        console.print(f"[bold red]broken:[/] {line}")
    if not report.broken_promises:
        console.print("[bold green]nothing grows[/]")


def main(
    seconds: Annotated[float, typer.Option(help="How long.", min=1)] = 600.0,
    connections: Annotated[int, typer.Option(help="Open at any time.", min=1)] = 64,
    rate: Annotated[
        float, typer.Option(help="At most so many requests a second; 0: all that can be.", min=0)
    ] = 0.0,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
) -> None:
    """Send short requests for a long time, and see that nothing grows."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                report = runner.run(soak(Path(directory), seconds, connections, rate, console))
        except ChildError as error:
            console.print(f"soak: {error}", markup=False, highlight=False)
            raise typer.Exit(CANNOT) from error
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    show(report, console)
    raise typer.Exit(FAULT if report.broken_promises else 0)


if __name__ == "__main__":
    typer.run(main)
