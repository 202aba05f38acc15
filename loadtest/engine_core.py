"""The batch of a simulated server, driven by a clock.

`EngineCore.run` is the scheduler's loop: begin a step, wait as long as it takes, hand out what came
of it. Steps follow each other from deadline to deadline, so that a late wake-up does not slow the
server down; only a machine that cannot keep up at all does.

It knows tokens and time, and nothing of HTTP or of words.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from loadtest.batching import ContinuousBatch, Kind, Sequence, Step
from loadtest.clock import Clock
from loadtest.engine_config import EngineConfig
from loadtest.engine_generation import Generation
from loadtest.gpu_share import GpuShare

# How far behind its schedule a server may be and still catch up, in seconds: more than a hiccup of
# the event loop, less than what would come out as a visible burst.
MOST_LAG_S: Final = 0.25


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the server last published about its load; it lags, as SGLang's does."""

    at: float  # monotonic seconds
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    used_tokens: int = 0


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What the decode log would say: throughput and acceptance since the line before."""

    at: float
    tokens_s: float = 0.0
    accept_length: float = 0.0
    verify_calls: int = 0  # totals up to now, to take the next difference from
    decode_tokens: int = 0
    output_tokens: int = 0


class EngineCore:
    """A simulated server without its HTTP side."""

    def __init__(self, config: EngineConfig, clock: Clock, gpu: GpuShare) -> None:
        self.config = config
        self.curve = config.service
        self.batch = ContinuousBatch(
            self.curve,
            max_running=config.cap,
            max_queued=config.max_queued_requests,
            kv_tokens=config.max_total_tokens,
            seed=config.seed,
        )
        self.report = LoadReport(at=clock.now())
        self.pace = Pace(at=clock.now())
        self.gauges = self.report
        self._clock = clock
        self._gpu = gpu
        self._owners: dict[int, tuple[Generation, int]] = {}
        self._work = asyncio.Event()
        self._going = asyncio.Event()
        self._going.set()

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self.batch.running

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self.batch.waiting

    @property
    def aborted(self) -> int:
        """Choices that were aborted since the start."""
        return self.batch.counters().aborted

    @property
    def finished(self) -> int:
        """Choices that ran to their end since the start."""
        return self.batch.counters().finished

    def submit(
        self,
        prompt_tokens: list[int],
        output_tokens: list[int],
        finish: list[str],
        *,
        stream: bool,
        cached: int = 0,
    ) -> Generation | None:
        """Queue one request with these choices; None if the queue is full.

        `cached`: tokens of the prompt that every choice is spared.
        """
        sequences: list[Sequence] = []
        for prompt, output in zip(prompt_tokens, output_tokens, strict=True):
            sequence = self.batch.submit(prompt, output, cached)
            if sequence is None:
                for queued in sequences:
                    self.batch.abort(queued.key)
                return None
            sequences.append(sequence)
        generation = Generation(
            sequences, finish, stream=stream, speculative=self.config.speculates
        )
        generation.queued_at, generation.cached = self._clock.now(), cached
        for index, sequence in enumerate(sequences):
            self._owners[sequence.key] = (generation, index)
        self._work.set()
        return generation

    def abort(self, generation: Generation) -> None:
        """Drop what is left of a request, since its client is gone."""
        for sequence in generation.sequences:
            if self._owners.pop(sequence.key, None) is not None:
                self.batch.abort(sequence.key)
        generation.close()

    def cancel(self, generation: Generation) -> None:
        """Drop what is left of a request on somebody's order: it ends with reason `abort`."""
        for index, sequence in enumerate(generation.sequences):
            if self._owners.pop(sequence.key, None) is not None:
                self.batch.abort(sequence.key)
                generation.finish_reasons[index] = "abort"
                generation.deliver(index, 0, "abort")

    def accept(self, tokens_per_step: float) -> None:
        """From the next step on, requests get so many tokens a step: the traffic has changed."""
        self.curve = self.batch.curve = self.curve.accepting(tokens_per_step)

    def pause(self) -> None:
        """Stop after the step in progress: the server hangs, with all its connections open."""
        self._going.clear()

    def resume(self) -> None:
        """Go on."""
        self._going.set()

    def close(self) -> None:
        """End all requests without an answer and leave the GPU."""
        for generation, _ in list(self._owners.values()):
            self.abort(generation)
        self._gpu.close()

    async def run(self) -> None:
        """Serve until cancelled."""
        clock, batch, scale = self._clock, self.batch, self.config.time_scale
        deadline = clock.now()
        while True:
            await self._going.wait()
            step = batch.begin()
            now = clock.now()
            if step is None:
                self._rest(now)
                self._work.clear()
                await self._work.wait()
                deadline = clock.now()
                continue
            if now - deadline > MOST_LAG_S:
                deadline = now  # the machine is too slow for the curve: do not catch up
            slowdown = self.curve.slowdown(self._gpu.others_running(now))
            deadline += step.seconds * slowdown * scale
            self._gpu.publish(batch.running, deadline)
            self._publish(step, now)
            await clock.sleep(deadline - now)
            self._hand_out(step)

    def load(self) -> LoadReport:
        """The last published report; an idle server publishes all the time."""
        if self.batch.idle:
            return LoadReport(at=self._clock.now())
        return self.report

    def _hand_out(self, step: Step) -> None:
        now = self._clock.now()
        first = step.kind is Kind.PREFILL
        for key, tokens, finished in self.batch.finish():
            generation, index = self._owners[key]
            if first:
                generation.first_token_at = generation.first_token_at or now
            reason = None
            if finished:
                del self._owners[key]
                generation.finished_at = now
                reason = generation.finish_reasons[index]
            generation.deliver(index, tokens, reason)

    def _publish(self, step: Step, now: float) -> None:
        """Publish as SGLang does: before each prefill, without those in it, and every 15 steps."""
        prefill = step.kind is Kind.PREFILL
        if prefill:
            for sequence in step.sequences:
                owner = self._owners.get(sequence.key)
                if owner is not None:
                    owner[0].started_at = owner[0].started_at or now
        decoded = 0 if prefill else self.batch.decode_steps
        publishes = prefill or (decoded > 0 and decoded % self.config.publish_steps == 0)
        logs = decoded > 0 and decoded % self.config.metrics_steps == 0
        if publishes or logs:
            report = LoadReport(
                at=now,
                running=self.batch.running - (len(step.sequences) if prefill else 0),
                waiting=self.batch.waiting,
                waiting_tokens=self.batch.waiting_tokens,
                used_tokens=self.batch.kv_used,
            )
            if publishes:
                self.report = report
            if prefill or logs:
                self.gauges = report
            if logs:
                self._log_pace(now)

    def _log_pace(self, now: float) -> None:
        was, total = self.pace, self.batch.counters()
        calls = total.verify_calls - was.verify_calls
        self.pace = Pace(
            at=now,
            tokens_s=(total.output_tokens - was.output_tokens) / max(now - was.at, 1e-9),
            accept_length=(total.decode_tokens - was.decode_tokens) / calls if calls else 0.0,
            verify_calls=total.verify_calls,
            decode_tokens=total.decode_tokens,
            output_tokens=total.output_tokens,
        )

    def _rest(self, now: float) -> None:
        """Publish that there is nothing to do."""
        self._gpu.publish(0, now)
        self.report = self.gauges = LoadReport(at=now)
        self.pace = msgspec.structs.replace(self.pace, at=now, tokens_s=0.0)
