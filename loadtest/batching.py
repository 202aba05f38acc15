"""Continuous batching, without a clock and without sockets.

The law of this file: `begin` says what the server does next and how long it takes, `finish` says
what came out of it. Who calls them decides what time is: the simulated server sleeps between the
two, a simulator adds the seconds up. `submit` and `abort` may come at any moment, also between
`begin` and `finish`.

What is imitated of SGLang's scheduler:

* first come, first served: a request that does not fit holds up those behind it;
* a prefill batch goes before the next decode step, and emits each request's first token;
* a decode step advances every running request;
* an abort takes effect when the step in progress ends;
* a request occupies prompt + output tokens of the KV cache until it ends.

What is not: chunked prefill (a long prompt is one batch), and retraction: a real server guesses how
long outputs get and retracts requests when it guessed too low; here the output length is known, so
it is reserved and the cache cannot overflow. Cached tokens (`engine_prefix`) need their room too.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final, NamedTuple

import msgspec

from loadtest.service import ServiceCurve

# SGLang's default chunked_prefill_size on a GPU of this size: one batch takes no more prompt tokens
# than this, or one prompt if that one is longer.
PREFILL_BATCH_TOKENS: Final = 8192
# Successive multiples of the golden ratio spread evenly over [0, 1): the phases at which requests
# round their fractional tokens per step.
GOLDEN_RATIO: Final = 0.618033988749895


class Kind(enum.Enum):
    """What a step does."""

    PREFILL = "prefill"
    DECODE = "decode"


class Sequence:
    """One request (or one of its `n` choices) inside the server. Only this module changes it."""

    def __init__(
        self, key: int, prompt_tokens: int, output_tokens: int, credit: float, cached: int = 0
    ) -> None:
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.fresh = prompt_tokens - cached  # tokens to prefill
        self.output_tokens = output_tokens
        self.produced = 0
        self.verify_steps = 0
        self.credit = credit  # fraction of a token owed by the steps so far
        self.aborted = False


class Step(NamedTuple):
    """Work in progress."""

    kind: Kind
    seconds: float  # with the GPU to itself
    sequences: list[Sequence]
    prompt_tokens: int


class Emission(NamedTuple):
    """What one sequence got out of a step."""

    key: int
    tokens: int
    finished: bool


class Counters(msgspec.Struct, kw_only=True):
    """Totals since the start, and what is inside now."""

    refused: int = 0  # the queue was full
    finished: int = 0
    aborted: int = 0
    waiting: int = 0
    running: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0  # of prompts that were prefilled
    output_tokens: int = 0  # emitted, first tokens included
    verify_calls: int = 0  # one per running request per decode step
    decode_tokens: int = 0  # emitted by decode steps
    kv_used: int = 0  # tokens in the cache


class ContinuousBatch:
    """One server's queue and batch."""

    def __init__(
        self,
        curve: ServiceCurve,
        *,
        max_running: int,
        max_queued: int | None = None,
        kv_tokens: int = 131_072,
        prefill_batch_tokens: int = PREFILL_BATCH_TOKENS,
        seed: int = 0,
    ) -> None:
        if max_running < 1 or (max_queued is not None and max_queued < 0):
            raise ValueError(f"no batch with max_running={max_running}, max_queued={max_queued}")
        self.curve = curve
        self.max_running = max_running
        self.max_queued = max_queued
        self.kv_tokens = kv_tokens
        self.prefill_batch_tokens = prefill_batch_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}  # in order of arrival
        self._by_key: dict[int, Sequence] = {}
        self._doomed: list[Sequence] = []  # aborted ones that leave when the step ends
        self._step: Step | None = None
        self._next_key = seed
        self._kv_reserved = 0
        self._total = Counters()

    @property
    def running(self) -> int:
        """Requests in the batch, those in prefill included; never above the cap."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens in the queue."""
        return sum(sequence.prompt_tokens for sequence in self._waiting)

    @property
    def kv_used(self) -> int:
        """Tokens in the KV cache."""
        return self._total.kv_used

    @property
    def decode_steps(self) -> int:
        """Decode steps since the start."""
        return self._total.decode_steps

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._by_key or self._step)

    def submit(self, prompt_tokens: int, output_tokens: int, cached: int = 0) -> Sequence | None:
        """Queue a request for this many tokens, some of them cached; None if the queue is full.

        Free places in the batch count as room: whether requests that arrive together are refused
        must not depend on whether the scheduler looked in between.
        """
        if prompt_tokens < 0 or output_tokens < 0:
            raise ValueError(f"tokens are at least 0, got {prompt_tokens} and {output_tokens}")
        if prompt_tokens + output_tokens > self.kv_tokens:
            raise ValueError(
                f"{prompt_tokens} + {output_tokens} tokens never fit into {self.kv_tokens}"
            )
        free = self.max_running - len(self._running)
        if self.max_queued is not None and len(self._waiting) - free >= self.max_queued:
            self._total.refused += 1
            return None
        self._next_key += 1
        credit = self._next_key * GOLDEN_RATIO % 1
        sequence = Sequence(self._next_key, prompt_tokens, output_tokens, credit, cached)
        self._waiting.append(sequence)
        self._by_key[sequence.key] = sequence
        return sequence

    def abort(self, key: int) -> bool:
        """Drop a request; False if it is not here (it ended, or never was).

        A waiting one is gone at once, a running one when the step in progress ends.
        """
        sequence = self._by_key.pop(key, None)
        if sequence is None:
            return False
        sequence.aborted = True
        self._total.aborted += 1
        if key not in self._running:
            self._waiting.remove(sequence)
        elif self._step is None:
            self._leave(sequence)
        else:
            self._doomed.append(sequence)
        return True

    def begin(self) -> Step | None:
        """Start the next step; None if there is nothing to do."""
        if self._step is not None:
            raise RuntimeError("a step is in progress: finish it first")
        admitted = self._admit()
        if admitted:
            tokens = sum(sequence.fresh for sequence in admitted)
            seconds = self.curve.prefill_s(len(admitted), tokens)
            self._step = Step(Kind.PREFILL, seconds, admitted, tokens)
        elif self._running:
            batch = list(self._running.values())
            self._step = Step(Kind.DECODE, self.curve.step_s(len(batch)), batch, 0)
        return self._step

    def finish(self) -> list[Emission]:
        """End the step in progress: what each of its requests got, in order of arrival."""
        step = self._step
        if step is None:
            raise RuntimeError("no step is in progress: begin one first")
        self._step = None
        if step.kind is Kind.PREFILL:
            self._total.prefill_steps += 1
            emissions = self._finish_prefill(step)
        else:
            self._total.decode_steps += 1
            emissions = self._finish_decode(step)
        for sequence in self._doomed:
            self._leave(sequence)
        self._doomed.clear()
        return emissions

    def counters(self) -> Counters:
        """Everything counted, as a copy."""
        return msgspec.structs.replace(
            self._total, waiting=len(self._waiting), running=len(self._running)
        )

    def _admit(self) -> list[Sequence]:
        """Move requests from the queue's head into the batch while they fit."""
        admitted: list[Sequence] = []
        budget = self.prefill_batch_tokens
        while self._waiting and len(self._running) < self.max_running:
            sequence = self._waiting[0]
            room = sequence.prompt_tokens + sequence.output_tokens
            if self._kv_reserved + room > self.kv_tokens:
                break
            if admitted and sequence.fresh > budget:
                break
            budget -= sequence.fresh
            self._waiting.popleft()
            self._running[sequence.key] = sequence
            self._kv_reserved += room
            self._total.kv_used += sequence.prompt_tokens
            admitted.append(sequence)
        return admitted

    def _finish_prefill(self, step: Step) -> list[Emission]:
        self._total.prompt_tokens += step.prompt_tokens
        emissions = []
        for sequence in step.sequences:
            if sequence.aborted:
                continue
            emissions.append(self._emit(sequence, min(1, sequence.output_tokens)))
        return emissions

    def _finish_decode(self, step: Step) -> list[Emission]:
        """Each request gets its tokens per step, rounded so that the mean is exact.

        As SGLang's own simulated acceptance does ("match-expected"), only the floor and the ceiling
        of the mean occur: the mean is realistic, the spread is not.
        """
        emissions = []
        per_step = self.curve.tokens_per_step
        for sequence in step.sequences:
            if sequence.aborted:
                continue
            credit = sequence.credit + per_step
            tokens = int(credit)
            sequence.credit = credit - tokens
            sequence.verify_steps += 1
            left = sequence.output_tokens - sequence.produced
            tokens = min(tokens, left)
            self._total.verify_calls += 1
            self._total.decode_tokens += tokens
            emissions.append(self._emit(sequence, tokens))
        return emissions

    def _emit(self, sequence: Sequence, tokens: int) -> Emission:
        sequence.produced += tokens
        self._total.kv_used += tokens
        self._total.output_tokens += tokens
        finished = sequence.produced >= sequence.output_tokens
        if finished:
            self._total.finished += 1
            del self._by_key[sequence.key]
            self._leave(sequence)
        return Emission(sequence.key, tokens, finished)

    def _leave(self, sequence: Sequence) -> None:
        """Free what a sequence holds in the batch."""
        del self._running[sequence.key]
        self._total.kv_used -= sequence.prompt_tokens + sequence.produced
        self._kv_reserved -= sequence.prompt_tokens + sequence.output_tokens
