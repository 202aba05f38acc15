"""The trials for real servers, rehearsed on `crossover launch` of two simulated ones."""

from __future__ import annotations

import asyncio
import io
import sys
import uuid

import pytest
from rich.console import Console

from router.load import Role
from tests.launching import launcher
from tests.real_pair.__main__ import Options, tried
from tests.real_pair.pair import Pair

KEY = "rehearsal-key"
SERVERS = (
    f"{sys.executable} -m loadtest engine --role {{role}} --port {{port}} --health-seconds 0 "
    "--max-running-requests 24 --max-queued-requests 8 --shutdown-poll 1"
)


@pytest.mark.slow
def test_all_trials_hold_on_the_simulated_pair() -> None:
    """Client, hang-ups, a full queue, a kill and SIGTERM: each is tried, and each holds."""
    flags = ("--server-command", SERVERS, "--threshold", "12", "--admin-key", KEY)
    said = io.StringIO()
    with launcher(*flags, marker=f"real-pair-{uuid.uuid4()}") as up:
        up.wait("| ready after")
        pair = Pair(
            up.url,
            f"http://127.0.0.1:{up.ports['admin']}",
            {role: f"http://127.0.0.1:{up.ports[role.value]}" for role in Role},
            admin_key=KEY,
        )
        # The simulated servers look for unary clients that have gone as seldom as real ones do.
        options = Options(
            launcher=up.process.pid, overload=60, stream_gone=1.0, unary_gone=8.0, restart=30.0
        )
        found = asyncio.run(tried(pair, options, Console(file=said, width=400)))
        assert [each for each in found if each.ok is not True] == []
        assert len(found) == 8
        assert up.process.wait(10) == 0
    full = next(each for each in found if each.trial == "queue full").seen
    assert full["outcomes"]["whole"] >= 32
    assert full["outcomes"].total() == 60
