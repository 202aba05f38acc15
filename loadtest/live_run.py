"""Puts a live comparison together from what was asked for, and gives the router back afterwards.

What is measured after what, and what of it counts, is in `live_compare`.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from loadtest.client import ChatClient
from loadtest.live_borrow import IDLE_S, Borrowed, borrowed
from loadtest.live_calibration import said, until_in_force
from loadtest.live_compare import LiveComparison, Tools
from loadtest.live_files import PICTURE, LiveDirectory
from loadtest.live_load import Asking, Wanted
from loadtest.live_router import RouterAdmin
from loadtest.live_schema import Change, Comparison, Conditions
from loadtest.live_view import draw
from loadtest.plot import PlotError
from loadtest.progress import Lines
from loadtest.sweep_level import Instruments
from loadtest.sweep_probe import ServerProbe
from loadtest.sweep_run import now, real_instruments
from loadtest.sweep_schema import Pace, Server
from router import __version__
from router.load import Role


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. Times are seconds."""

    url: str
    admin_url: str
    policies: tuple[str, ...]
    wanted: Wanted
    out: Path
    admin_key: str | None = None
    key: str | None = None  # the router's, for clients
    passes: int = 1
    pace: Pace = Pace()
    settle_s: float = 30.0
    idle_s: float = IDLE_S
    model: str | None = None  # default: what is served
    timeout: float = 600.0  # for a whole request
    plot: Path | None = None  # default: in `out`
    calibration: Path | None = None  # to wait for
    command: str = ""


async def run_live(
    options: Options, show: Lines, *, instruments: Instruments | None = None
) -> Comparison:
    """Measure what is not measured yet; the whole comparison.

    Raises LiveError, SweepError and PromptError. In any case the router then decides as before.
    """
    tools = instruments or real_instruments()
    with LiveDirectory.opened(options.out) as directory:
        async with (
            RouterAdmin(options.admin_url, key=options.admin_key, clock=tools.clock) as admin,
            ServerProbe(options.url, key=options.key, clock=tools.clock) as probe,
        ):
            await _in_force(options, admin, tools, show)
            async with borrowed(admin, directory, show, tools) as hand:
                server = await probe.facts(Role.BASELINE, options.model)
                async with ChatClient(
                    server.url, api_key=options.key, timeout=options.timeout, clock=tools.clock
                ) as client:
                    comparison = make(options, directory, hand, server, client, tools, show)
                    found = await comparison.run()
        picture = options.plot or directory.path / PICTURE
        try:
            draw(picture, found)
        except (PlotError, OSError) as error:
            show.say(f"no picture: {error}")
    return found


async def _in_force(options: Options, admin: RouterAdmin, tools: Instruments, show: Lines) -> None:
    """Before anything is borrowed: wait for the calibration, and say which one `frontier` is of."""
    if options.calibration is not None:
        show.say(f"Waiting until the router decides by {options.calibration}")
        await until_in_force(admin, options.calibration, clock=tools.clock, sleep=tools.sleep)
    if "frontier" in options.policies:
        words = said((await admin.status()).calibration)
        if words is not None:
            show.say(words)


def _words(server: Server) -> str:
    said = [f"{server.gpus or 1} x {server.gpu}"] if server.gpu else []
    if server.engine_version:
        said.append(f"engine {server.engine_version}")
    if server.flags.get("load_format") == "dummy":
        said.append("random weights")
    return ", ".join(said)


def make(
    options: Options,
    directory: LiveDirectory,
    hand: Borrowed,
    server: Server,
    client: ChatClient,
    tools: Instruments,
    show: Lines,
) -> LiveComparison:
    """The comparison that was asked for. Raises LiveError and PromptError."""
    asking = Asking(options.wanted, server)
    line: Change = hand.line if hand.line["policy"] == "frontier" else {"policy": "frontier"}
    wanted = Comparison(
        created=now(),
        command=options.command,
        version=__version__,
        conditions=Conditions(
            url=server.url,
            model=server.model,
            workload=asking.workload,
            pace=options.pace,
            line=line if "frontier" in options.policies else {},
        ),
        servers=_words(server),
        policies=options.policies,
        loads=options.wanted.loads,
        passes=options.passes,
    )
    askers = {policy: asking.asker(secrets.token_hex(3)) for policy in options.policies}
    loads = {load.name: asking.load(load) for load in options.wanted.loads}
    parts = Tools(
        client=client,
        server=server,
        askers=askers,
        instruments=tools,
        now=now,
        settle_s=options.settle_s,
        idle_s=options.idle_s,
        salt=secrets.token_hex(3),
    )
    return LiveComparison(directory, hand, wanted, loads, parts, show)
