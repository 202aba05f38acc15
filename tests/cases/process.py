"""The router as a process of its own, for what only a process shows: memory, limits, signals, output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from tests.scripted_backend import ScriptedBackend


class Serving:
    """A running `crossover serve` and all that it wrote."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path) -> None:
        self.process = process
        self.port = self.admin_port = 0
        self._output = output

    @property
    def output(self) -> str:
        """Standard output and standard error so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def memory(self, field: str) -> int:
        """Bytes of memory: VmRSS now, VmHWM the most so far."""
        return int(self.fact(field).removesuffix(" kB")) * 1024

    def fact(self, field: str) -> str:
        """A line of its status as the kernel tells it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(rf"^{field}:\s+(.+)$", status, re.MULTILINE)
        assert found is not None
        return found[1]

    def files(self) -> int:
        """File descriptors that it has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    async def ended(self, seconds: float = 5.0) -> int:
        """Its exit code."""
        return await asyncio.wait_for(self.process.wait(), seconds)


@contextlib.asynccontextmanager
async def serving(
    spec: ScriptedBackend, base: ScriptedBackend, *flags: str, files: int | None = None
) -> AsyncIterator[Serving]:
    """`crossover serve` on free ports; `files`: the most file descriptors it may have open."""
    limit = "" if files is None else f"ulimit -n {files}; "
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        with output.open("wb") as sink:
            process = await asyncio.create_subprocess_exec(
                "sh", "-c", limit + 'exec "$@"', "sh",
                sys.executable, "-m", "router", "serve", "--threshold", "1000",
                "--speculative", spec.url, "--baseline", base.url,
                "--port", "0", "--admin-port", "0", *flags,
                stdout=sink, stderr=sink,
                env={k: v for k, v in os.environ.items() if not k.startswith("CROSSOVER_")},
            )  # fmt: skip
        found = Serving(process, output)
        try:
            async with asyncio.timeout(20):
                while not found.port:
                    await asyncio.sleep(0.02)
                    for line in found.output.splitlines():
                        if '"admin_port"' in line:
                            told = json.loads(line)
                            found.port, found.admin_port = told["port"], told["admin_port"]
            yield found
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
