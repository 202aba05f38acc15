"""The same stack as processes of their own, so that a picture shows the router's own times.

Two simulated servers on one simulated GPU and the router, each on a port that the system picked.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from deploy.grafana.trial import MODEL, MOST, PAIR, calibration_of
from loadtest.children import Child, Children
from router.load import Role

START_S: Final = 20.0
ENGINE_URL: Final = r"engine on (http://\S+?):? "
LISTENING: Final = r"listening on port (\d+), admin on port (\d+)"
# Intervals short enough for minutes to show what takes hours.
QUICK: Final = {
    "pair-interval": "2s",
    "calibration-interval": "500ms",
    "acceptance-smoothing": "10s",
    "health-interval": "1s",
    "drain-delay": "0",
    "drain-timeout": "1s",
}


class Processes:
    """The running stack."""

    def __init__(self, children: Children, directory: Path) -> None:
        self._children = children
        self._gpu = directory / "gpu"
        self._engines: dict[Role, Child] = {}
        self._urls: dict[Role, str] = {}
        self.calibration = directory / "calibration.json"
        self.url = ""
        self.admin = ""

    @classmethod
    async def start(cls, children: Children, directory: Path) -> Self:
        """Start all three and wait until they listen. Raises ChildError."""
        stack = cls(children, directory)
        for role in Role:
            await stack._serve(role, "0")
        await stack.calibrate()
        quick = (word for name, value in QUICK.items() for word in (f"--{name}", value))
        router = children.start(
            "router", "router", "serve",
            "--speculative", stack._urls[Role.SPECULATIVE],
            "--baseline", stack._urls[Role.BASELINE],
            "--calibration", str(stack.calibration),
            "--port", "0", "--admin-port", "0", "--no-access-log", *quick,
        )  # fmt: skip
        ports = await asyncio.to_thread(router.wait_for, LISTENING, START_S)
        stack.url, stack.admin = (f"http://127.0.0.1:{port}" for port in ports.groups())
        return stack

    @property
    def servers(self) -> dict[str, str]:
        """Addresses of the servers by role."""
        return {role.value: url for role, url in self._urls.items()}

    async def calibrate(self) -> None:
        """Write the calibration anew; its date is of now."""
        document = await calibration_of(self._urls)
        await asyncio.to_thread(self.calibration.write_bytes, document)

    async def crash(self, role: Role, seconds: float) -> None:
        """Kill one server, and start it again at the same address after so long."""
        self._engines[role].process.kill()
        await asyncio.sleep(seconds)
        await self._serve(role, str(urlsplit(self._urls[role]).port))

    async def _serve(self, role: Role, port: str) -> None:
        child = self._children.start(
            f"{role.value} server {port}", "loadtest", "engine",
            "--port", port, "--role", role.value, "--curve", PAIR, "--model", MODEL,
            "--gpu-lock", str(self._gpu), "--max-running-requests", str(MOST),
            "--health-seconds", "0.05", "--shutdown-poll", "0.05",
        )  # fmt: skip
        found = await asyncio.to_thread(child.wait_for, ENGINE_URL, START_S)
        self._engines[role], self._urls[role] = child, found[1]
