"""One SGLang server in virtual time, moved from event to event instead of step by step.

The law of this file: the server is told how much time has passed (`advance`) and when it must be
looked at again (`next_at`); it has no clock of its own. Between two events nothing about it changes,
so what it does in between is one multiplication:

    decoding      every running request gets the same steps, at `1 / step_s(running)` steps a second:
                  processor sharing. One counter of steps serves all of them; a request that needs k
                  steps is done when the counter has grown by k since it joined
    prefilling    nobody decodes; the batch of prompts is done after its seconds

What the model contains: the curve's step times, prefill in batches ahead of decoding (first come,
first served), the cap on running requests with a queue behind it, the seconds of dispatch that block
nobody, a share of its speed while the GPU's other server is busy, and cached prefixes (of whole
conversations, the least recently used forgotten first). What it does not: the rounding of a step (a
request ends between two steps), the KV cache as a limit, retraction, and chunked prefill.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from typing import Final, NamedTuple

from loadtest.batching import PREFILL_BATCH_TOKENS
from loadtest.service import ServiceCurve

NEVER: Final = math.inf


class Job(NamedTuple):
    """One request as the server sees it."""

    key: int
    prompt_tokens: int
    steps: float  # decode steps that it needs after its first token
    conversation: int = 0  # 0: of none
    total_tokens: int = 0  # prompt and answer: what the cache holds of it afterwards


class ConversationCache:
    """What a server's radix cache holds of each conversation, in tokens."""

    def __init__(self, tokens: float) -> None:
        self.limit = tokens
        self.held = 0
        self._of: OrderedDict[int, int] = OrderedDict()

    def hit(self, job: Job) -> int:
        """Tokens of this prompt that need no prefill. One token is always computed."""
        found = self._of.get(job.conversation, 0)
        if found:
            self._of.move_to_end(job.conversation)
        return min(found, job.prompt_tokens - 1)

    def keep(self, job: Job) -> None:
        """Hold a finished request; forget the least recently used beyond the limit."""
        self.held += job.total_tokens - self._of.pop(job.conversation, 0)
        self._of[job.conversation] = job.total_tokens
        while self.held > self.limit:
            _, tokens = self._of.popitem(last=False)
            self.held -= tokens


class VirtualServer:
    """A queue, a batch and a counter of decode steps. Read it, never write it."""

    def __init__(
        self,
        curve: ServiceCurve,
        *,
        max_running: float = math.inf,
        cache_tokens: float = 0.0,
    ) -> None:
        """`cache_tokens`: what the prefix cache holds; 0 has none."""
        self.curve = curve
        self.max_running = max_running
        self.cache = ConversationCache(cache_tokens) if cache_tokens else None
        self.next_at = NEVER
        self.prompt_tokens = 0  # that were prefilled, cached ones left out
        self._rates = [1.0 / curve.step_s(max(1, n)) for n in range(513)]
        self._entering: deque[tuple[float, Job]] = deque()
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._prefill_left = 0.0  # seconds, with the GPU to itself
        self._running: list[tuple[float, int, Job]] = []  # by the counter at which each ends
        self._counter = 0.0  # decode steps since the start
        self._speed = 0.0  # steps a second now; of a prefill, its seconds a second

    @property
    def running(self) -> int:
        """Requests that are decoded or prefilled; never above the cap."""
        return len(self._running) + len(self._prefilling)

    @property
    def queued(self) -> int:
        """Requests that wait for a place or for the prefill before theirs."""
        return len(self._waiting)

    def enter(self, now: float, job: Job) -> None:
        """Take a request in; it reaches the scheduler after the dispatch time."""
        self._entering.append((now + self.curve.dispatch_s, job))

    def advance(self, seconds: float) -> None:
        """Let time pass, at most until `next_at`."""
        if self._prefilling:
            self._prefill_left -= seconds * self._speed
        elif self._running:
            self._counter += seconds * self._speed

    def plan(self, now: float, share: float) -> None:
        """Settle the speed until the next event, and when that is."""
        at = self._entering[0][0] if self._entering else NEVER
        if self._prefilling:
            self._speed = share
            at = min(at, now + max(0.0, self._prefill_left) / share)
        elif self._running:
            n = len(self._running)
            rate = self._rates[n] if n < 513 else 1.0 / self.curve.step_s(n)
            self._speed = speed = rate * share
            left = (self._running[0][0] - self._counter) / speed
            at = min(at, now + left) if left > 0.0 else now
        self.next_at = at

    def event(self, now: float, first: list[float]) -> Job | None:
        """What happens at `next_at`: the finished request, if one finished.

        `first` gets, by key, the moments of first tokens.
        """
        if self._entering and self._entering[0][0] <= now:
            self._waiting.append(self._entering.popleft()[1])
            if not self._prefilling:
                self._admit(now, first)
            return None
        if self._prefilling:
            for job in self._prefilling:
                first[job.key] = now
                heapq.heappush(self._running, (self._counter + job.steps, job.key, job))
            self._prefilling = []
            self._admit(now, first)
            return None
        mark, _, job = heapq.heappop(self._running)
        self._counter = mark
        if self.cache is not None and job.conversation:
            self.cache.keep(job)
        if self._waiting:
            self._admit(now, first)
        return job

    def _admit(self, now: float, first: list[float]) -> None:
        """Start the next prefill batch, of what fits of the queue's head."""
        curve, seconds, tokens = self.curve, 0.0, 0
        batch: list[Job] = []
        while self._waiting and len(self._running) + len(batch) < self.max_running:
            job = self._waiting[0]
            fresh = job.prompt_tokens
            if self.cache is not None and job.conversation:
                fresh -= self.cache.hit(job)
            if batch and tokens + fresh > PREFILL_BATCH_TOKENS:
                break
            self._waiting.popleft()
            batch.append(job)
            tokens += fresh
            seconds += curve.prefill_s(1, fresh)
        self.prompt_tokens += tokens
        if seconds > 0.0:
            self._prefilling, self._prefill_left = batch, seconds
            return
        for job in batch:  # a prefill that costs nothing takes no event
            first[job.key] = now
            heapq.heappush(self._running, (self._counter + job.steps, job.key, job))
