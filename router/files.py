"""Whether there is room for one more connection under the system's limit on open files.

A stream takes two: one towards the client, one towards the backend. Without room, a backend's
connection is given up before a client's, so that a client can always be told why (503): when
accepting itself fails, the system only resets the client's connection. Counts, and does no I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.relay import Relay

# Descriptors left free for listeners, probes, the log and DNS, and for clients that are refused.
SPARE_TO_ACCEPT: Final = 64
SPARE_TO_CONNECT: Final = 128


class FileBudget:
    """Knows the limit and what of it the relay's connections take."""

    limit = -1  # open files that the process may have, -1 for any number; `Router` sets it

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def _room(self, spare: int) -> bool:
        if self.limit < 0:
            return True
        relay = self._relay
        taken = len(relay.connections) + len(relay.admin_connections)
        for pool in relay.pools.values():
            taken += len(pool.open) + pool.connecting
        return self.limit - taken >= spare

    def may_accept(self) -> bool:
        """Whether a client's connection that was accepted may stay."""
        return self._room(SPARE_TO_ACCEPT)

    def may_connect(self) -> bool:
        """Whether one more connection to a backend may be made."""
        return self._room(SPARE_TO_CONNECT)
