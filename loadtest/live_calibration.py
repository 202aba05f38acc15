"""Which calibration a router decides by, and the wait until it is the one that was just written.

A router looks at its file every `calibration_interval` (2 s unless set), so a comparison that
begins right after `loadtest calibrate` would otherwise measure the line of before. Nothing of
the router is changed here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from loadtest.live_router import InForce, RouterAdmin
from loadtest.live_schema import LiveError, LiveFailedError
from router.calibration import CalibrationError, parse_calibration

WAIT_S: Final = 30.0  # for a router to take up a file: many times its usual interval
LOOK_S: Final = 0.25


def made(path: Path) -> str:
    """When the calibration in a file was made, in its own words. Raises LiveError."""
    try:
        created = parse_calibration(path.read_bytes()).created
    except OSError as error:
        raise LiveError(f"--calibration {path} cannot be read: {error.strerror}") from error
    except CalibrationError as error:
        raise LiveError(f"--calibration {path} cannot be used: {error}") from error
    if created is None:
        raise LiveError(
            f"--calibration {path} does not say when it was made, so no router can tell it"
        )
    return created


async def until_in_force(
    admin: RouterAdmin,
    path: Path,
    *,
    limit_s: float = WAIT_S,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> InForce:
    """Wait until the router decides by this calibration. Raises LiveError."""
    wanted = made(path)
    end = clock() + limit_s
    while True:
        found = (await admin.status()).calibration
        if found is None:
            raise LiveError(
                f"the router has no calibration, so it cannot decide by {path}: start it with"
                " --calibration"
            )
        if found.created == wanted:
            if found.alarm is not None:
                raise LiveError(f"the router does not follow {path}: {found.alarm}")
            return found
        if clock() >= end:
            break
        await sleep(LOOK_S)
    why = f"; what the file holds now is refused: {found.problem}" if found.problem else ""
    raise LiveFailedError(
        f"the router does not decide by {path} (made {wanted}) after {limit_s:g} s, but by"
        f" {described(found)}{why}"
    )


def described(found: InForce) -> str:
    """Which calibration that is, in words."""
    return f"{found.path} (made {found.created or 'at a time that it does not say'})"


def said(found: InForce | None) -> str | None:
    """What to know before `frontier` is measured: by which calibration, and what speaks against it."""
    if found is None:
        return None
    words = f"frontier is the line of {described(found)}"
    if found.problem is not None:
        return f"{words}; what that file holds now is not in force: {found.problem}"
    try:
        newer = made(Path(found.path))
    except LiveError:  # on another host, or nothing to compare with
        return words
    if newer == found.created:
        return words
    return (
        f"{words}; a newer one (made {newer}) is in that file and not in force yet: give"
        f" --calibration {found.path} to wait for it"
    )
