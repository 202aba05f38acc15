"""All checks of one gateway, one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from tests.gateways import failing, passing
from tests.gateways.findings import Finding
from tests.gateways.fronts import Gateway, front
from tests.gateways.site import Site
from tests.gateways.tap import tap


async def watched(gateway: Gateway, site: Site, folder: Path, *, listen_s: float) -> list[Finding]:
    """What passes, with a tap before each pair; its own questions are listened to for so long."""
    first, second = site.pairs
    async with tap(first.port) as one, tap(second.port) as two:
        begun = time.monotonic()
        taps = [one, two]
        async with front(gateway, [each.url for each in taps], folder) as made:
            await asyncio.sleep(listen_s)
            asked = passing.asked_by_itself(taps, time.monotonic() - begun)
            found = [
                *await passing.what_passes(made, taps),
                await passing.arrives_at_once(made),
                *await passing.ordinary(made, site),
            ]
    return [*found, asked]


async def tried(
    gateway: Gateway,
    site: Site,
    folder: Path,
    *,
    streams: int,
    requests: int,
    steady_s: float,
    say: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Load, leaving clients, killed and drained pairs, without anything between gateway and pairs."""
    async with front(gateway, site.urls, folder) as made:
        say("streams")
        found = [await passing.streams_whole(made, site, streams)]
        say("shares")
        found.append(await failing.shares(made, site, requests))
        say("leaving clients")
        found += await failing.client_leaves(made, site)
        say("a killed pair")
        found += await failing.pair_killed(made, site, steady_s)
        say("a drained pair")
        found.append(await failing.pair_drained(made, site, steady_s))
        say("no pair")
        found.append(await failing.nobody_left(made, site))
    return found
