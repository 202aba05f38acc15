"""One request inside a simulated server: its choices, and a mailbox for what comes of them.

It holds numbers of tokens; the words are made by whoever answers.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from loadtest.batching import Sequence


class Event(NamedTuple):
    """News of one choice of a request: tokens number `first` up to `first + tokens`."""

    choice: int
    first: int
    tokens: int
    finish: str | None  # finish reason, on the last event of a choice


class Generation:
    """One request inside the core: its choices and what has come of them."""

    def __init__(
        self, sequences: list[Sequence], finish: list[str], *, stream: bool, speculative: bool
    ) -> None:
        self.sequences = sequences
        self.stream = stream
        self.speculative = speculative
        self.queued_at = 0.0
        self.cached = 0  # tokens of the prompt that came from the prefix cache
        self.started_at = 0.0  # when its prefill began
        self.first_token_at = 0.0
        self.finished_at = 0.0
        self.finish_reasons = finish
        self.closed = False  # its client is gone, or the server ends
        self._events: list[Event] = []
        self._open = len(sequences)
        self._waiter: asyncio.Future[None] | None = None

    @property
    def produced(self) -> int:
        """Tokens of all choices so far."""
        return sum(sequence.produced for sequence in self.sequences)

    @property
    def verify_steps(self) -> int:
        """Decode steps that all choices took part in."""
        return sum(sequence.verify_steps for sequence in self.sequences)

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.closed or not self._open

    def deliver(self, choice: int, tokens: int, finish: str | None) -> None:
        """Put news into the mailbox. A request that does not stream is woken only by the last."""
        if finish is not None:
            self._open -= 1
        if self.stream:
            first = self.sequences[choice].produced - tokens
            self._events.append(Event(choice, first, tokens, finish))
        elif self._open:
            return
        self._wake()

    def close(self) -> None:
        """Nobody wants the rest."""
        self.closed = True
        self._wake()

    async def news(self) -> list[Event]:
        """What came since the last call: waits for something; empty when nothing more will come.

        A reader that was slow finds the events of a choice merged into one, as a client of SGLang
        finds several steps in one chunk.
        """
        while not self._events and not self.done:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        if self.closed:
            return []
        return events if len(events) <= 1 else _merged(events)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merged(events: list[Event]) -> list[Event]:
    """One event for each choice, in the order of their first news."""
    merged: dict[int, Event] = {}
    for event in events:
        earlier = merged.get(event.choice)
        if earlier is not None:
            tokens = earlier.tokens + event.tokens
            event = Event(event.choice, earlier.first, tokens, event.finish)  # noqa: PLW2901
        merged[event.choice] = event
    return list(merged.values())
