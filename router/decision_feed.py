"""Decisions as they happen, for whoever listens: batches of server-sent events from the ring.

The relay knows nothing of this. The router's sweep calls `tick` four times a second; with nobody
listening that is one comparison. With somebody it reads what the ring of decisions has got since the
last tick and writes one event for all listeners together, so neither the rate of events nor their
size follows the traffic. What a listener has not taken is bounded: one that is slow is dropped, and may
come back with the id of the last event that it saw.

No task, no timer and no socket of its own: `router.admin_events` has those.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from router.explain import DecisionLog, DecisionView, EventView

MAX_LISTENERS: Final = 16
PENDING: Final = 8  # events that a listener may be behind: two seconds of them
BATCH: Final = 250  # decisions in one event; of more, the newest
GREETING: Final = 50  # decisions that a new listener gets at once
HEARTBEAT: Final = 10.0  # seconds of silence, after which a comment says that the line is alive
COMMENT: Final = b": still here\n\n"
RETRY: Final = b"retry: 1000\n\n"  # milliseconds, for clients that come back by themselves


class Batch(msgspec.Struct):
    """The data of one event."""

    items: list[DecisionView | EventView]  # oldest first
    skipped: int  # older ones that are not in it: too many, or no longer in the ring


class TooManyListenersError(Exception):
    """All places are taken."""


class Listener:
    """One who listens: what was not yet taken, and whether more will come."""

    def __init__(self, now: float) -> None:
        """`now`: monotonic seconds."""
        self.written_at = now
        self.open = True
        self._pending: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def offer(self, piece: bytes, now: float) -> None:
        """Give it an event, or drop it when it is too far behind."""
        if len(self._pending) >= PENDING:
            self._pending.clear()
            self.close()
            return
        self.written_at = now
        self._pending.append(piece)
        self._wake.set()

    def close(self) -> None:
        """Nothing more will come; what is pending is still taken."""
        self.open = False
        self._wake.set()

    async def take(self) -> bytes | None:
        """The next event, or None at the end."""
        while not self._pending:
            if not self.open:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._pending.popleft()


class DecisionFeed:
    """All who listen to one ring of decisions."""

    def __init__(
        self,
        log: DecisionLog,
        *,
        most: int = MAX_LISTENERS,
        epoch: Callable[[], str] = lambda: secrets.token_hex(4),
    ) -> None:
        """`most` listeners; `epoch` names this router's numbering, which starts anew with it."""
        self._log = log
        self._most = most
        self._epoch = epoch()
        self._listeners: set[Listener] = set()
        self._told = 0  # number of the newest decision that listeners have
        self._closed = False

    @property
    def listening(self) -> int:
        """How many listen, those included that were dropped and have not gone yet."""
        return len(self._listeners)

    def join(self, now: float, last_id: str = "") -> Listener:
        """A new listener, with what it missed since `last_id`, or with the newest few.

        Raises TooManyListenersError. `now`: monotonic seconds.
        """
        if self.listening >= self._most:
            raise TooManyListenersError
        if not self._listeners:
            self._told = self._log.added
        listener = Listener(now)
        listener.offer(RETRY, now)
        known = self._number(last_id)
        seen = max(0, self._told - GREETING) if known is None else known
        if known is None or seen < self._told:
            # Up to what the others have: the next tick goes on from there for all.
            listener.offer(self._event(seen, self._told, at_most=len(self._log)), now)
        if self._closed:
            listener.close()
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        """It has gone."""
        self._listeners.discard(listener)

    def tick(self, now: float) -> None:
        """Tell all listeners what is new; `now` in monotonic seconds."""
        if not self._listeners:
            return
        added = self._log.added
        piece = self._event(self._told, added, at_most=BATCH) if added > self._told else None
        self._told = added
        for listener in self._listeners:
            if not listener.open:
                continue
            if piece is not None:
                listener.offer(piece, now)
            elif now - listener.written_at >= HEARTBEAT:
                listener.offer(COMMENT, now)

    def close(self) -> None:
        """The router stops: every stream ends."""
        self._closed = True
        for listener in self._listeners:
            listener.close()

    def _number(self, last_id: str) -> int | None:
        """The decision that an event's id speaks of; None for an id that is not one of ours."""
        epoch, _, number = last_id.partition("-")
        if epoch != self._epoch or not (number.isascii() and number.isdigit()):
            return None
        found = int(number[:20])
        return found if found <= self._told else None

    def _event(self, after: int, upto: int, *, at_most: int) -> bytes:
        """The decisions with the numbers above `after` and up to `upto`, as one event."""
        newer = self._log.added - upto
        wanted = min(upto - after, at_most)
        found = self._log.view(limit=newer + wanted)[newer:]
        batch = Batch(found[::-1], upto - after - len(found))
        head = f"id: {self._epoch}-{upto}\nevent: decisions\ndata: ".encode()
        return head + msgspec.json.encode(batch) + b"\n\n"
