"""One GPU for two simulated servers: each says whether it is busy, and is slower when the other is.

Two SGLang servers on one GPU time-slice: as soon as both have work, each keeps a half to three
quarters of its speed. The servers are processes of their own, so they meet in a small file, mapped
into memory by each. A slot of the file belongs to one server and only that one writes it:

    pid       of the server, 0 if the slot is free
    running   requests in its batch
    until     monotonic seconds until which that holds (the end of its step, and some grace)

A server that dies leaves its slot behind; it stops to count when `until` has passed, and the slot
goes to whoever comes next. Where the system has them (Linux), a lock on the slot's bytes that ends
with its server says that it is taken: in containers of their own all servers have the process id 1.
Elsewhere the process id says it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import Final, Protocol

SLOT: Final = struct.Struct("<QQd")  # pid, running, until
SLOTS: Final = 8
# A step that is late (a busy machine) must not make its server look idle.
GRACE_S: Final = 1.0
# struct flock on a 64-bit Linux: type, whence, start, length, pid (0 for a lock of a description).
FLOCK: Final = struct.Struct("@hhqqi4x")
# A file that outlived a restart of the machine holds times of another clock.
LONGEST_STEP_S: Final = 3600.0


class GpuShare(Protocol):
    """What a server tells and asks about its GPU; `now` and `until` are monotonic seconds."""

    def publish(self, running: int, until: float) -> None:
        """Say that this many requests run here, at least until then."""
        ...

    def others_running(self, now: float) -> int:
        """How many requests the GPU's other servers run."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


class OwnGpu:
    """A GPU that nobody else uses."""

    def publish(self, running: int, until: float) -> None:
        """Nobody listens."""

    def others_running(self, now: float) -> int:  # noqa: ARG002 - the protocol's signature
        """Nobody is there."""
        return 0

    def close(self) -> None:
        """Nothing is held."""


class SharedGpu:
    """A GPU shared through a file. Raises OSError if the file cannot be used or is full."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # The lock guards only the choice of a slot; a killed process drops it by dying. It is
            # dropped by name below, since the mapping keeps a copy of the descriptor open.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_size < SLOT.size * SLOTS:
                os.ftruncate(descriptor, SLOT.size * SLOTS)
            self._map = mmap.mmap(descriptor, SLOT.size * SLOTS)
            try:
                self._offset = self._claim(path, descriptor)
            except OSError:
                self._map.close()
                raise
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def publish(self, running: int, until: float) -> None:
        """Say that this many requests run here, at least until then."""
        SLOT.pack_into(self._map, self._offset, os.getpid(), running, until + GRACE_S)

    def others_running(self, now: float) -> int:
        """How many requests the GPU's other servers run, as far as they still tell."""
        total = 0
        for offset in range(0, SLOT.size * SLOTS, SLOT.size):
            pid, running, until = SLOT.unpack_from(self._map, offset)
            if offset != self._offset and pid and 0 < until - now < LONGEST_STEP_S:
                total += running
        return total

    def close(self) -> None:
        """Free the slot."""
        if not self._map.closed:
            SLOT.pack_into(self._map, self._offset, 0, 0, 0.0)
            self._map.close()

    def _claim(self, path: Path, descriptor: int) -> int:
        """Take the first slot that is free or whose process is gone."""
        for offset in range(0, SLOT.size * SLOTS, SLOT.size):
            pid, _, _ = SLOT.unpack_from(self._map, offset)
            locked = _lock(descriptor, offset)
            if locked or (locked is None and (not pid or not _alive(pid))):
                SLOT.pack_into(self._map, offset, os.getpid(), 0, 0.0)
                return offset
        raise OSError(f"{path} has no free slot: {SLOTS} servers share this GPU already")


def _lock(descriptor: int, offset: int) -> bool | None:
    """Lock a slot for as long as the mapping lives; None where there is no such lock.

    It belongs to the open file, of which the mapping keeps a copy, and not to the process: closing
    the descriptor does not end it, and two servers of one process exclude each other as well.
    """
    command = getattr(fcntl, "F_OFD_SETLK", None)  # Linux, and Python 3.9 or newer
    if command is None or struct.calcsize("P") != 8:
        return None
    try:
        wanted = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, SLOT.size, 0)
        fcntl.fcntl(descriptor, command, wanted)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _alive(pid: int) -> bool:
    try:
        with contextlib.suppress(PermissionError):  # somebody else's, but alive
            os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True
