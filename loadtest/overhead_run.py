"""Measures a server directly and through a router in turns, and gives the router back afterwards.

The router is told to send everything to the one server that is measured. What is measured is on
disk before the next window begins, so that a run that was stopped goes on.

What a difference says is `overhead`'s.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

import msgspec

from loadtest.client import ChatClient
from loadtest.live_borrow import borrowed
from loadtest.live_files import LiveDirectory
from loadtest.live_router import RouterAdmin
from loadtest.live_schema import LiveError
from loadtest.on_disk import replace_document
from loadtest.overhead import Conditions, Found, Way, decode, judged, order, resumed
from loadtest.overhead_view import outcome
from loadtest.overhead_window import Between, Options, Parts, measure
from loadtest.progress import Lines
from loadtest.prompts import Tokenizer, described, prompts_from
from loadtest.sweep import Asker
from loadtest.sweep_level import Instruments
from loadtest.sweep_probe import ServerProbe, public_url
from loadtest.sweep_run import now, real_instruments
from loadtest.sweep_schema import Server, Workload
from router import __version__

FILE: Final = "overhead.json"


async def run_overhead(
    options: Options, show: Lines, *, instruments: Instruments | None = None
) -> Found:
    """Measure what is not measured yet; all of it, judged.

    Raises LiveError, SweepError and PromptError. In any case the router then decides as before.
    """
    tools = instruments or real_instruments()
    with LiveDirectory.opened(options.out) as directory:
        async with (
            RouterAdmin(options.admin_url, key=options.admin_key, clock=tools.clock) as admin,
            ServerProbe(options.direct, key=options.key, clock=tools.clock) as probe,
            borrowed(admin, directory, show, tools) as hand,
        ):
            server = await probe.facts(options.role, options.model)
            await _same_server(admin, options, server)
            routed_url = public_url(options.url)
            key, limit = options.key, options.timeout
            async with (
                ChatClient(server.url, api_key=key, timeout=limit, clock=tools.clock) as direct,
                ChatClient(routed_url, api_key=key, timeout=limit, clock=tools.clock) as routed,
            ):
                found, askers = _wanted(options, server)
                parts = Parts(
                    {Way.DIRECT: direct, Way.ROUTER: routed}, askers, server, probe, hand, tools
                )
                return await _measure_all(options, directory, found, parts, show)


async def _same_server(admin: RouterAdmin, options: Options, server: Server) -> None:
    """Raise LiveError when the router has another server in this role."""
    status = await admin.status()
    mine = next(each.url for each in status.backends if each.role is options.role)
    if mine.rstrip("/").removesuffix("/v1") != server.url.rstrip("/").removesuffix("/v1"):
        raise LiveError(
            f"the router's {options.role.value} server is {mine} and not {server.url}: give --direct"
            " as the router has it, or another --role"
        )


def _wanted(options: Options, server: Server) -> tuple[Found, dict[Way, Asker]]:
    """What the file begins with, and who asks on each way: the same, but for the prompts' marks."""
    prompts = prompts_from(
        options.prompts,
        options.seed,
        Tokenizer.of(server.tokens_per_word, server.tokens_per_mark),
        input_tokens=options.input_tokens,
    )
    workload = Workload(
        prompts="corpus" if options.prompts is None else described(options.prompts),
        input_tokens=options.input_tokens,
        output_tokens=options.longest if options.shortest == options.longest else None,
        trace=f"answers of {options.shortest} to {options.longest} tokens",
        seed=options.seed,
    )
    lengths = Between(options.shortest, options.longest, options.input_tokens, options.seed)
    found = Found(
        created=now(),
        command=options.command,
        version=__version__,
        servers=" ".join(filter(None, (server.gpu, server.engine_version))),
        conditions=Conditions(
            direct=server.url,
            url=options.url,
            role=options.role,
            level=options.level,
            model=server.model,
            workload=workload,
            pace=options.pace,
        ),
        rounds=options.rounds,
        margin=options.margin,
    )
    askers = {way: Asker(prompts, lengths, workload, salt=secrets.token_hex(3)) for way in Way}
    return found, askers


async def _measure_all(
    options: Options, directory: LiveDirectory, wanted: Found, parts: Parts, show: Lines
) -> Found:
    path = directory.path / FILE
    found = resumed(_read(path), wanted)
    kept = tuple(
        each
        for each in found.windows
        if len(directory.records(each.point.run)) == each.point.records
    )
    found = judged(msgspec.structs.replace(found, windows=kept))
    done = {each.point.run for each in kept}
    turns = list(order(options.rounds))
    left = [turn for turn in turns if turn.run not in done]
    if left:
        await parts.hand.decide({"policy": options.role.value})
    for at, turn in enumerate(left):
        show.begins(turn.title, len(turns) - len(left) + at, len(turns))
        window, records = await measure(options, turn, parts, show)
        directory.add(turn.run, records)
        found = judged(msgspec.structs.replace(found, windows=(*found.windows, window)))
        replace_document(path, found)
        show.ended(turn.title, outcome(window))
    return found


def _read(path: Path) -> Found | None:
    try:
        return decode(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LiveError(f"{path} cannot be read: {error.strerror}") from error
