"""Gives a listening process a CPU core of its own, and keeps its callers off it (Linux).

    python pin.py 8000 15 31000 30000     # the router on core 15; the servers and this shell elsewhere
    python pin.py 8000 all 31000 30000    # as before

The first port is the one of the process that gets the core; the others are of processes that must
stay off it, as must the shell that called. Threads and children that exist are moved too; later ones
inherit. Exit code 1: no such process, or no such core.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LISTEN: Final = "0A"  # a socket's state in /proc/net/tcp


def listening(port: int) -> int:
    """The process that listens on this port. Raises LookupError."""
    wanted = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text("ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    wanted.add(f"socket:[{fields[9]}]")
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and any(
                str(each.readlink()) in wanted for each in (entry / "fd").iterdir()
            ):
                return int(entry.name)
    raise LookupError(f"no process here listens on port {port}")


def family(pid: int) -> Iterator[int]:
    """Every thread of a process, and of what it has started."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal():
                text = (entry / "status").read_text("utf-8", "replace")
                found = re.search(r"^PPid:\s+(\d+)", text, re.MULTILINE)
                parents.setdefault(int(found[1]) if found else 0, []).append(int(entry.name))
    left = [pid]
    while left:
        one = left.pop()
        left += parents.get(one, [])
        with contextlib.suppress(OSError):
            yield from (int(task.name) for task in Path("/proc", str(one), "task").iterdir())


def pin(port: int, cores: set[int], others: list[int], rest: set[int]) -> list[str]:
    """Move them; what was done, in words. Raises LookupError, OSError."""
    said = []
    for each, to in ((port, cores), *((other, rest) for other in others)):
        pid = listening(each)
        threads = list(family(pid))
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, to)
        said.append(f"port {each}: process {pid}, {len(threads)} threads on {len(to)} cores")
    os.sched_setaffinity(os.getppid(), rest)
    return said


def main(arguments: list[str]) -> int:
    """Read the command line; the exit code."""
    everything = set(range(os.cpu_count() or 1))
    try:
        port, others = int(arguments[0]), [int(each) for each in arguments[2:]]
        mine = everything if arguments[1] == "all" else {int(arguments[1])}
        rest = everything if arguments[1] == "all" else (everything - mine or everything)
        print("\n".join(pin(port, mine, others, rest)))
    except (IndexError, ValueError):
        print("pin.py: give a port, a core or `all`, and ports to keep off it", file=sys.stderr)
        return 1
    except (LookupError, OSError) as error:
        print(f"pin.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
