"""A router as a process of its own, with all that it wrote: for memory, logs and whole clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

START_S = 20.0


class RouterProcess:
    """A running `crossover serve`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, fields: dict[str, int]) -> None:
        self.process = process
        self.port = fields["port"]
        self.admin_port = fields["admin_port"]
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin_url = f"http://127.0.0.1:{self.admin_port}"
        self._log = log
        self._whole: bytes | None = None

    @property
    def log(self) -> bytes:
        """Everything written to standard output and error so far, or until the end."""
        return self._log.read_bytes() if self._whole is None else self._whole

    def ended(self) -> None:
        """Keep the log: its file goes."""
        self._whole = self._log.read_bytes()

    def memory(self, field: str = "VmRSS") -> int:
        """Resident bytes now, or with VmHWM the most that there ever were (Linux)."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(rf"{field}:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024


@contextlib.contextmanager
def router_process(speculative: str, baseline: str, *flags: str) -> Iterator[RouterProcess]:
    """`crossover serve` on free ports for as long as the block runs; it must end with 0."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CROSSOVER_")}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "router", "serve",
                    "--speculative", speculative, "--baseline", baseline, "--threshold", "1000",
                    "--port", "0", "--admin-port", "0", "--drain-delay", "0", *flags,
                ],
                stdout=out, stderr=out, env=clean,
            )  # fmt: skip
        try:
            router = RouterProcess(process, log, _wait(process, log))
            yield router
            process.terminate()
            assert process.wait(10) == 0
            router.ended()
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path) -> dict[str, int]:
    """The fields of the line that says where it listens."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        for line in log.read_bytes().splitlines(keepends=True):
            if b'"admin_port"' in line and line.endswith(b"\n"):
                fields: dict[str, int] = json.loads(line)
                return fields
        time.sleep(0.02)
    raise AssertionError(f"no router: {log.read_text(encoding='utf-8', errors='replace')}")
