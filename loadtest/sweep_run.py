"""Puts a sweep together from what was asked for: clients, probes, prompts, directory.

`run_sweep` takes a list of targets, so that one server or both of a pair are swept by the same
call. What is measured after what is in `sweep`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadtest.client import ChatClient
from loadtest.on_disk import locked
from loadtest.progress import Lines
from loadtest.prompts import (
    TEMPLATE_TOKENS,
    Lengths,
    Prompts,
    Tokenizer,
    described,
    prompts_from,
    read_trace,
)
from loadtest.sweep import Asker, ConcurrencySweep, Target
from loadtest.sweep_files import SweepDirectory
from loadtest.sweep_level import Instruments
from loadtest.sweep_probe import ServerProbe
from loadtest.sweep_schema import Pace, Plan, Server, Sweep, SweepError, Workload
from router import __version__
from router.load import Role


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. Times are seconds."""

    targets: tuple[tuple[Role, str], ...]  # a server's URL for each role
    out: Path
    plan: Plan
    pace: Pace = Pace()
    prompts: Path | None = None
    input_tokens: int | None = None
    output_tokens: int | None = 128
    trace: Path | None = None
    unique: bool = True
    ignore_eos: bool = True
    temperature: float | None = None
    seed: int = 0
    model: str | None = None  # default: what each server serves
    key: str | None = None
    timeout: float = 600.0  # for a whole request
    command: str = ""


def real_instruments() -> Instruments:
    """The machine's own time."""
    return Instruments(time.monotonic, asyncio.sleep, time.process_time)


class Prepared(NamedTuple):
    """Everything that a sweep needs; the directory and the clients are open."""

    directory: SweepDirectory
    targets: list[Target]
    asker: Asker
    wanted: Sweep
    tools: Instruments

    async def run(self, show: Lines) -> Sweep:
        """Measure what is not measured yet; the whole sweep. Raises SweepError."""
        sweep = ConcurrencySweep(
            self.directory, self.targets, self.asker, self.wanted, self.tools, now, show
        )
        return await sweep.run()


@contextlib.asynccontextmanager
async def prepared(
    options: Options, *, instruments: Instruments | None = None
) -> AsyncIterator[Prepared]:
    """Ask the servers what they are and open what a sweep needs. Raises SweepError, PromptError."""
    tools = instruments or real_instruments()
    with locked(options.out, "sweep", SweepError):
        directory = SweepDirectory(options.out)
        async with contextlib.AsyncExitStack() as stack:
            targets: list[Target] = []
            for role, url in options.targets:
                probe = await stack.enter_async_context(
                    ServerProbe(url, key=options.key, clock=tools.clock)
                )
                server = await probe.facts(role, options.model)
                client = ChatClient(
                    server.url, api_key=options.key, timeout=options.timeout, clock=tools.clock
                )
                targets.append(Target(server, await stack.enter_async_context(client), probe))
            servers = tuple(target.server for target in targets)
            asker, workload = _asker(options, servers)
            wanted = Sweep(
                created=now(),
                command=options.command,
                version=__version__,
                workload=workload,
                pace=options.pace,
                plan=options.plan,
                servers=servers,
            )
            yield Prepared(directory, targets, asker, wanted, tools)


async def run_sweep(
    options: Options, show: Lines, *, instruments: Instruments | None = None
) -> Sweep:
    """Measure what is not measured yet; the whole sweep. Raises SweepError, PromptError."""
    async with prepared(options, instruments=instruments) as ready:
        return await ready.run(show)


def _asker(options: Options, servers: Sequence[Server]) -> tuple[Asker, Workload]:
    """Who makes the requests, and what is said of them in the file."""
    contexts = [server.context_length for server in servers if server.context_length]
    context = min(contexts, default=None)
    rows: list[tuple[int, int]] = []
    trace = None
    if options.trace is not None:
        rows = read_trace(options.trace, context)
        trace = described(options.trace)
        if left_out := len(read_trace(options.trace)) - len(rows):
            trace += f", without {left_out} too long for the context"
    needed = (options.input_tokens or 0) + (options.output_tokens or 0) + TEMPLATE_TOKENS
    if context is not None and needed > context:
        raise SweepError(
            f"prompt, answer and chat template need {needed} tokens, the server has a context of"
            f" {context}: lower --input-tokens or --output-tokens"
        )
    workload = Workload(
        prompts="corpus" if options.prompts is None else described(options.prompts),
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        trace=trace,
        unique=options.unique,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        seed=options.seed,
    )
    lengths = Lengths(options.output_tokens, rows, options.input_tokens, options.seed)
    prompts = _prompts(options, servers)
    return Asker(prompts, lengths, workload, salt=secrets.token_hex(3)), workload


def _prompts(options: Options, servers: Sequence[Server]) -> Prompts:
    told = next((server for server in servers if server.tokens_per_word), servers[0])
    return prompts_from(
        options.prompts,
        options.seed,
        Tokenizer.of(told.tokens_per_word, told.tokens_per_mark),
        input_tokens=options.input_tokens,
        marked=options.unique,
    )


def now() -> str:
    """The time of day (ISO 8601, UTC)."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
