"""The file through which servers share a simulated GPU."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.engine import EngineConfig, running_engine
from loadtest.gpu_share import GRACE_S, LONGEST_STEP_S, SLOT, SLOTS, OwnGpu, SharedGpu
from tests.engines import ask, connection, looped, request
from tests.stack import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu"


def test_each_sees_the_other(path: Path) -> None:
    """A server sees what the other one runs, and never itself."""
    one, two = SharedGpu(path), SharedGpu(path)
    one.publish(5, until=10.0)
    assert (one.others_running(9.0), two.others_running(9.0)) == (0, 5)
    two.publish(2, until=10.0)
    assert (one.others_running(9.0), two.others_running(9.0)) == (2, 5)
    one.close()
    two.close()


def test_idle_and_gone(path: Path) -> None:
    """A server that is idle, has left or has fallen silent slows nobody down."""
    one, two = SharedGpu(path), SharedGpu(path)
    one.publish(5, until=10.0)
    assert two.others_running(10.0 + GRACE_S) == 0
    one.publish(0, until=20.0)
    assert two.others_running(19.0) == 0
    one.publish(5, until=20.0)
    one.close()
    one.close()
    assert two.others_running(19.0) == 0
    two.close()


def test_slot_of_a_dead_process_is_taken(path: Path) -> None:
    """The slots of processes that are gone go to those who come, and a full file says so."""
    script = "import sys; from pathlib import Path; from loadtest.gpu_share import SharedGpu\n"
    script += f"for _ in range({SLOTS}): SharedGpu(Path(sys.argv[1])).publish(3, 0.0)"
    subprocess.run([sys.executable, "-c", script, path], check=True, cwd=Path(__file__).parents[1])
    gpus = [SharedGpu(path) for _ in range(SLOTS)]
    with pytest.raises(OSError, match=f"{SLOTS} servers share this GPU already"):
        SharedGpu(path)
    for gpu in gpus:
        gpu.close()


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="no locks of this kind here")
def test_a_slot_is_known_by_its_lock(path: Path) -> None:
    """In containers all servers are process 1: a dead one's slot is taken, a living one's is not."""
    living = SharedGpu(path)
    SLOT.pack_into(living._map, living._offset, 2**22 + 1, 3, 10.0)  # an id that nobody has here
    with path.open("r+b") as file:
        for slot in range(1, SLOTS):  # the ids of others that were killed, and of one who is here
            file.seek(SLOT.size * slot)
            file.write(SLOT.pack(os.getpid(), 1, 0.0))
    others = [SharedGpu(path) for _ in range(SLOTS - 1)]
    assert living._offset not in {other._offset for other in others}
    with pytest.raises(OSError, match="no free slot"):
        SharedGpu(path)
    for gpu in (living, *others):
        gpu.close()


def test_times_of_another_boot(path: Path) -> None:
    """What was written before the machine was restarted does not count."""
    gpu = SharedGpu(path)
    with path.open("r+b") as file:
        file.seek(SLOT.size)
        file.write(SLOT.pack(os.getppid(), 9, 100.0 + 2 * LONGEST_STEP_S))
    assert gpu.others_running(100.0) == 0
    gpu.close()


def test_unusable_file(tmp_path: Path) -> None:
    """A path that cannot be a file is an OSError."""
    with pytest.raises(OSError, match="directory"):
        SharedGpu(tmp_path)


def test_own_gpu() -> None:
    """Who has a GPU alone meets nobody."""
    gpu = OwnGpu()
    gpu.publish(5, until=1.0)
    gpu.close()
    assert gpu.others_running(0.0) == 0


@looped
async def test_servers_meet(path: Path) -> None:
    """Two servers with one file see each other's load while it lasts."""
    config = EngineConfig.quick(gpu_lock=path)
    async with running_engine(config) as one, running_engine(config) as two:
        watcher = SharedGpu(path)
        body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        async with connection(one, request("/v1/completions", body)):
            await until(lambda: one.core.running == 1, what="running")
            now = one.server.clock.now
            assert watcher.others_running(now()) == 1
            await ask(two, "/v1/completions", body | {"max_tokens": 3})
        await until(lambda: watcher.others_running(now()) == 0, what="idle again")
        watcher.close()
    await asyncio.sleep(0)
