"""The same arms, each request paying for its own prompt.

Reads the shipped sweeps. A sweep's server has its prefill in its step times (two prompt tokens for
each output token); here prefill is kept apart and a request of the trace pays for what its own prompt
costs, at 45,000 tokens/s, in which nobody decodes. The chat trace has four and a half prompt tokens for
each output token, so prefill alone fills either server from about scale 8 on, and the arms differ by
less. A rule is told what a sweep with such requests would have measured.

`Talks` makes conversations of the trace: each arrival opens one, a later turn brings its whole history
with it, and each server has a prefix cache, so that a turn pays only for what its server has not seen.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from loadtest.arms import ARMS, raw_sweep
from loadtest.compare import Gpus, Pair
from loadtest.service import from_sweep
from loadtest.simulator_contention import H200
from loadtest.simulator_load import Call, Row, conversation_calls, trace_calls

# An H200 has room for about this many tokens of KV cache beside each of two 8B models.
CACHE_TOKENS: Final = 300_000.0
TURNS: Final = 4.0
THINK_S: Final = 15.0
# Of the opening's prompt, added by each later turn.
ADDED: Final = 0.15


class Talks(NamedTuple):
    """Conversations, opened as the trace says, `turns` times as rarely.

    The Azure traces do not say which requests go on with which: here the number of turns is drawn
    (geometric), and so is how long the user thinks between two (exponential, `THINK_S` in the mean).
    """

    name: str
    scale: float | Callable[[float], float]
    seconds: float
    judged_after: float = 60.0
    seed: int = 0
    turns: float = TURNS

    def calls(self, rows: Sequence[Row]) -> Iterator[Call]:
        """Their first turns; each carries those after it."""
        scale, turns = self.scale, self.turns
        rarely = (lambda now: scale(now) / turns) if callable(scale) else scale / turns
        opened = trace_calls(rows, rarely, self.seconds)
        chance = random.Random(self.seed)
        return conversation_calls(opened, chance, turns=turns, think_s=THINK_S, share=ADDED)


def own_prompts_pair(arm: str, rows: Sequence[Row], *, talks: bool = False, gpus: Gpus = 1) -> Pair:
    """An arm for requests like those of this trace; with prefix caches for conversations.

    A rule is told of a sweep with prompts as long as what no cache holds of them: all, or, of a
    conversation, its opening in one turn of `TURNS` and the words added in the others.
    """
    found = ARMS[arm]
    speculative = from_sweep(raw_sweep(found.file))
    if found.acceptance is not None:
        speculative = speculative.accepting(found.acceptance)
    pair = Pair(
        speculative=speculative, baseline=from_sweep(raw_sweep()), contention=H200, gpus=gpus
    )
    return for_prompts(pair, rows, TURNS if talks else None)


def for_prompts(pair: Pair, rows: Sequence[Row], turns: float | None) -> Pair:
    """The pair as its rules know it for this trace, in conversations of so many turns if any."""
    fresh = 1.0 if turns is None else (1.0 + (turns - 1.0) * ADDED) / turns
    return msgspec.structs.replace(
        pair,
        prompt_tokens=round(statistics.fmean(row.prompt for row in rows) * fresh),
        cache_tokens=0.0 if turns is None else CACHE_TOKENS,
        output_tokens=round(statistics.fmean(row.output for row in rows)),
    )
