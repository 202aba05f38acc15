"""A router whose policy a live comparison borrows, and gives back as it was.

The law of this file: from the first change on, whatever happens, the policy of before is put back;
unless somebody else changed it meanwhile, whose will is then done. What is owed is on disk before it is
owed, so that not even a kill loses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

import msgspec

from loadtest.live_files import LiveDirectory, Loan
from loadtest.live_router import Policy, RouterAdmin, Status
from loadtest.live_schema import Change, LiveError, LiveFailedError
from loadtest.progress import Lines
from loadtest.sweep_level import Instruments

# Two looks in a row that find the servers idle, this far apart: longer than one poll of the router.
IDLE_S: Final = 0.25
RESTORE_TRIES: Final = 3
RESTORE_PAUSE_S: Final = 0.5


class Borrowed:
    """A router whose policy is ours for a while."""

    def __init__(self, admin: RouterAdmin, before: Change, line: Change | None = None) -> None:
        """`before` is what is put back, `line` the figures that it stands for, where it has some."""
        self.admin = admin
        self.before = before
        self.line = line or before
        self._now: Policy | None = None  # what the router made of our last change
        self._asked = False  # whether a change was sent and no answer has come

    async def decide(self, change: Change) -> str:
        """Set a policy; the name of what then decides. Raises LiveError."""
        self._asked = True
        try:
            self._now = await self.admin.set_policy(change)
        except LiveFailedError:
            raise
        except LiveError:
            self._asked = False  # refused
            raise
        self._asked = False
        return self._now.name

    async def still_ours(self) -> None:
        """Raise LiveFailedError if somebody else has changed the policy, or a server was lost."""
        status = await self.admin.status()
        found = status.policy
        if self._now is not None and found != self._now:
            now = self._now
            raise LiveFailedError(
                f"the router decides by {found.name} and no longer by {now.name}: it was changed or"
                " started again meanwhile, and is left as it is; give the same command again"
            )
        if status.unusable:
            raise LiveFailedError(status.unusable)

    async def give_back(self, sleep: Callable[[float], Awaitable[None]]) -> str | None:
        """Put the policy back; None, or what has to be done by hand."""
        if self._now is None and not self._asked:
            return None
        problem: LiveError | None = None
        for number in range(RESTORE_TRIES):
            if number:
                await sleep(RESTORE_PAUSE_S)
            try:
                # A change whose answer never came may have been made: then nobody else's is known.
                if self._asked or (await self.admin.status()).policy == self._now:
                    await self.admin.set_policy(self.before)
            except LiveError as error:
                problem = error
            else:
                return None
        body = msgspec.json.encode(self.before).decode()
        return (
            f"the router's policy could not be put back ({problem}): if the router still runs, send"
            f" POST {self.admin.url}/policy with {body}"
        )


async def until_idle(
    admin: RouterAdmin,
    limit_s: float,
    *,
    apart_s: float = IDLE_S,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> Status:
    """Wait until both servers are usable and idle, at two looks so far apart.

    Raises LiveFailedError.
    """
    end = clock() + limit_s
    idle = 0
    while True:
        found = await admin.status()
        idle = 0 if found.busy or found.unusable else idle + 1
        if idle == 2:
            return found
        if clock() >= end:
            break
        await sleep(apart_s)
    if found.unusable:
        raise LiveFailedError(found.unusable)
    counts = ", ".join(f"{name} {count}" for name, count in found.busy.items())
    raise LiveFailedError(
        f"the servers are not idle after {limit_s:g} s (in flight: {counts}): a comparison needs them"
        " for itself, so keep other clients away, or give more --settle"
    )


@contextlib.asynccontextmanager
async def borrowed(
    admin: RouterAdmin, directory: LiveDirectory, show: Lines, tools: Instruments
) -> AsyncIterator[Borrowed]:
    """A router whose policy may be changed for as long as the block runs. Raises LiveError."""
    status = await admin.status()
    found = status.policy
    owed = directory.owed(admin.url, time.time() - status.uptime)
    if owed is not None:
        show.say(f"Putting back what a comparison that was killed has left: {owed['policy']}")
        found = await admin.set_policy(owed)
    directory.lend(Loan(admin.url, found.back))
    hand = Borrowed(admin, found.back, found.change)
    cause: str | None = None
    try:
        yield hand
    except LiveError as error:
        cause = str(error)
        raise
    finally:
        problem, cancelled = await _surely(hand.give_back(tools.sleep))
        if problem is not None:
            raise LiveFailedError(f"{cause}; {problem}" if cause else problem)
        directory.returned()
        if cancelled is not None:
            raise cancelled


async def _surely(
    work: Coroutine[Any, Any, str | None],
) -> tuple[str | None, asyncio.CancelledError | None]:
    """Do this to its end, also when cancelled meanwhile; what it gave, and that."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    return task.result(), cancelled
