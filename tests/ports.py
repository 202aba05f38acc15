"""Ports for programs that take a fixed one: free, and left alone until they take it.

A port that the system hands out (port 0) may be handed to another test, or to a client's end of a
connection, between the moment it is looked up and the moment a program listens there. So these are
below the range that systems hand out from (32768 on Linux), each given once per process.
"""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

PORTS: Final = range(20_000, 30_000)
_given: set[int] = set()
_chance = random.SystemRandom()  # not the seed that tests share: others pick at the same time


def free_port() -> int:
    """A port that nobody listens on, and that was not given before."""
    for port in _chance.sample(PORTS, len(PORTS)):
        if port in _given:
            continue
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given.add(port)
            return port
    raise OSError(f"no port is free between {PORTS.start} and {PORTS.stop}")


def free_ports(count: int) -> list[int]:
    """So many of them, all different."""
    return [free_port() for _ in range(count)]
