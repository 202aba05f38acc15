"""Where a conversation's prefix is: a bounded memory, and when a request stays with it.

SGLang keeps the KV cache of what it has served (its radix cache) in one server's memory. The next turn
of a conversation begins with all the turns before it: on the server that served them only the new words
are prefilled, on the other one everything is. The tracker notes where a conversation went in the same
step as its lease, and a policy for servers with a GPU each weighs what moving costs:

    stay   iff   gain x output tokens  <=  (n + 1) x lost / PREFILL_TOKENS_S

`gain` is what the better server saves, in seconds for each token, of this request and of all that it
delays (`speeds.joined_delay`); `lost` are the prompt tokens that the better server would have to prefill
and this one would not, while which the n requests there and this one wait, since nobody decodes during
a prefill. A line has no curves to weigh with: there a request stays as long as the concurrency is less
than `STAY` of the line away from it.

On a shared GPU nothing stays. What stays behind after a switch keeps both servers at work, and that
costs every request a third of its speed for seconds, where a prefill costs tens of milliseconds;
loadtest/RULES.md has the figures.

No clock, no I/O, and no text: a conversation is the hash that `request` made of how it opens, and what
is kept of it is two lengths and a time, for `SIZE` conversations, in constant time. A length is that of
the request's body, in bytes: cheap, and proportional to the prompt. A request that is shorter than the
one before it does not contain it, whatever its key says; there is then nothing to stay for. That keeps
conversations that open alike from being taken for each other.
"""

from __future__ import annotations

from typing import Final

import msgspec

# Conversations that are remembered, 212 bytes each: some minutes of a pair that is busy.
SIZE: Final = 16_384
# Seconds without a turn after which a prefix is taken to be gone. SGLang evicts what was used least
# recently, and does not say of a prefix whether it is still there.
FORGET_S: Final = 300.0
# Bytes of a body for each prompt token: English text in JSON, as a rule of thumb.
BYTES_PER_TOKEN: Final = 4
# Prompt tokens a second of an 8B model on one H200 (loadtest/service.py says how it was found).
PREFILL_TOKENS_S: Final = 45_000.0
# Of a mean request, as for a rule that has seen none (`rules.ForecastParameters`).
OUTPUT_TOKENS: Final = 128.0
# Share of the line. A whole one brings little more (loadtest/RULES.md), and a speculative server that
# is nearly idle is worth a prefill.
STAY: Final = 0.75


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """How much of a conversation each server has seen, in bytes of a body, and when it last went on."""

    speculative: int
    baseline: int
    at: float  # seconds

    def lost(self, length: int, *, speculative: bool) -> int:
        """Bytes of a body of this length that one server must prefill and the other one need not.

        `speculative` says which; it is not above 0 where there is nothing to lose by going there.
        """
        one = self.speculative if self.speculative <= length else 0
        other = self.baseline if self.baseline <= length else 0
        return other - one if speculative else one - other


class Prefixes:
    """The conversations of late; the one that has not gone on for the longest time goes out first."""

    __slots__ = ("_of", "moved", "size", "stayed")

    def __init__(self, size: int = SIZE) -> None:
        """`size`: conversations, at least one."""
        if size < 1:
            raise ValueError(f"a memory of {size} conversations is none")
        self.size = size
        self.stayed = 0  # later turns that went to a server with the longest prefix
        self.moved = 0  # later turns that went to the other one
        self._of: dict[int, Prefix] = {}  # in order of their last turn

    def __len__(self) -> int:
        return len(self._of)

    def find(self, conversation: int, now: float) -> Prefix | None:
        """What is known of a conversation, if it went on lately."""
        found = self._of.get(conversation)
        return None if found is None or now - found.at > FORGET_S else found

    def keep(self, conversation: int, length: int, now: float, *, speculative: bool) -> None:
        """Note that this server has a request of this length from now on."""
        known, one, other = self._of, 0, 0
        was = known.pop(conversation, None)  # what is put in again is the youngest
        if was is not None and now - was.at <= FORGET_S:
            one, other = was.speculative, was.baseline
            if 0 < one <= length or 0 < other <= length:
                if was.lost(length, speculative=speculative) > 0:
                    self.moved += 1
                else:
                    self.stayed += 1
            # Something else that opens alike, or a history cut short: no more is common than this.
            one, other = min(one, length), min(other, length)
        known[conversation] = (
            Prefix(length, other, now) if speculative else Prefix(one, length, now)
        )
        if len(known) > self.size:
            del known[next(iter(known))]


def near(load: int, line: float, *, speculative: bool) -> bool:
    """Whether a request stays on a server that the line would not have chosen.

    `load` and `line` in requests; `speculative`: it is that one on which it would stay.
    """
    if speculative:
        return load < line * (1.0 + STAY)
    return load >= line * (1.0 - STAY)


def stays(
    prefix: Prefix, length: int, load: int, line: float, cap: int | None, speculative: bool
) -> bool:
    """Whether a request of this length stays where the line would not have sent it.

    `speculative`: it is that server on which it would stay, unless its `cap` is reached.
    """
    return (
        prefix.lost(length, speculative=not speculative) > 0
        and near(load, line, speculative=speculative)
        and not (speculative and cap is not None and load >= cap)
    )


def outweighs(lost: int, others: int, gain: float) -> bool:
    """Whether prefilling what is lost costs at least what the better server gains.

    `lost` bytes of a body, `others` running on the better server, `gain` seconds for each token.
    """
    tokens = lost / BYTES_PER_TOKEN
    return gain * OUTPUT_TOKENS <= (others + 1) * tokens / PREFILL_TOKENS_S
