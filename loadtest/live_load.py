"""What a live comparison asks: loads, prompts and lengths, the same for every policy.

It says what is asked and when; nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from loadtest.arms import read_trace_file
from loadtest.live_compare import Load
from loadtest.live_schema import LiveError, Offered
from loadtest.prompts import (
    TEMPLATE_TOKENS,
    Lengths,
    Place,
    Tokenizer,
    described,
    prompts_from,
)
from loadtest.service import CurveError
from loadtest.simulator_load import Row
from loadtest.sweep import Asker
from loadtest.sweep_schema import Server, Workload
from loadtest.sweep_turns import Step

# By how much a count of tokens from words may be off.
DOUBT: Final = 1.1


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be asked."""

    loads: tuple[Offered, ...]
    prompts: Path | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None  # None: of the trace
    trace: Path | None = None
    seed: int = 0


class InOrder(Lengths):
    """The lengths of a trace, each with its own arrival."""

    def __init__(self, rows: Sequence[Row], output: int | None, input_tokens: int | None) -> None:
        """What is given leads over the trace."""
        super().__init__(output, [(row.prompt, row.output) for row in rows], input_tokens)
        self._lines = rows

    def of(self, place: Place) -> tuple[int | None, int]:
        """Those of the line of this number; after the last comes the first."""
        row = self._lines[place.at % len(self._lines)]
        return self._input or row.prompt, self._output or row.output


class Asking:
    """Makes requests and loads."""

    def __init__(self, wanted: Wanted, server: Server) -> None:
        """Raises LiveError and PromptError for what cannot be asked."""
        self._rows = _rows(wanted, server)
        self._wanted = wanted
        self._prompts = prompts_from(
            wanted.prompts,
            wanted.seed,
            Tokenizer.of(server.tokens_per_word, server.tokens_per_mark),
            input_tokens=wanted.input_tokens,
        )
        self._lengths = _lengths(wanted, server, self._rows)
        trace = None
        if wanted.trace is not None:
            trace = described(wanted.trace)
        self.workload = Workload(
            prompts="corpus" if wanted.prompts is None else described(wanted.prompts),
            input_tokens=wanted.input_tokens,
            output_tokens=wanted.output_tokens,
            trace=trace,
            seed=wanted.seed,
        )

    def asker(self, salt: str) -> Asker:
        """Asks the same as any other; `salt` is in its marks."""
        return Asker(self._prompts, self._lengths, self.workload, salt=salt)

    def load(self, offered: Offered) -> Load:
        """How this load is made."""
        if offered.in_flight is not None:
            return Load(offered, Step(level=offered.in_flight))
        if offered.rate is not None:
            return Load(offered, Step(rate=offered.rate))
        scale = offered.scale or 1.0
        rate = len(self._rows) / _length(self._rows) * scale
        return Load(offered, Step(rate=rate), lambda: arrivals(self._rows, scale))


def arrivals(rows: Sequence[Row], scale: float) -> Iterator[float]:
    """The trace's start times in seconds, `scale` times as fast, and over and over."""
    begin = 0.0
    while True:
        for row in rows:
            yield (begin + row.at) / scale
        begin += _length(rows)


def _length(rows: Sequence[Row]) -> float:
    """Seconds from the first line to where the first may come again: a mean gap after the last."""
    return rows[-1].at * len(rows) / (len(rows) - 1)


def _rows(wanted: Wanted, server: Server) -> list[Row]:
    if wanted.trace is None:
        return []
    try:
        rows = read_trace_file(wanted.trace)
    except CurveError as error:
        raise LiveError(str(error)) from error
    limit = server.context_length
    fitting = [
        row
        for row in rows
        if limit is None or DOUBT * row.prompt + TEMPLATE_TOKENS + row.output <= limit
    ]
    if len(fitting) < 2 or fitting[-1].at <= 0:
        raise LiveError(
            f"{wanted.trace} has no two requests at different times that fit in {limit} tokens"
        )
    return [row._replace(at=row.at - fitting[0].at) for row in fitting]


def _lengths(wanted: Wanted, server: Server, rows: Sequence[Row]) -> Lengths:
    needed = (wanted.input_tokens or 0) + (wanted.output_tokens or 0) + TEMPLATE_TOKENS
    if server.context_length is not None and needed > server.context_length:
        raise LiveError(
            f"prompt, answer and chat template need {needed} tokens, the servers have a context of"
            f" {server.context_length}: lower --input-tokens or --output-tokens"
        )
    if rows:
        return InOrder(rows, wanted.output_tokens, wanted.input_tokens)
    return Lengths(wanted.output_tokens, (), wanted.input_tokens, wanted.seed)
