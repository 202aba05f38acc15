"""What to run, in a sentence: the words for it, whether servers were simulated or measured.

Pure. A difference below `WORTH`, or one within noise, is not worth a second server: the sentence then
says so, and why.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# Differences below this are not worth a second server.
WORTH: Final = 0.02


class Time(NamedTuple):
    """Milliseconds per output token under one arrangement or policy."""

    name: str
    ms: float
    half: float | None = None  # of its interval of 95 % confidence; None: not known

    def __str__(self) -> str:
        """The figure, with its interval if there is one."""
        if self.half is None:
            return f"{self.ms:.1f}"
        digits = 2 if self.ms < 10.0 else 1
        return f"{self.ms:.{digits}f} ±{self.half:.{digits}f}"


def within_noise(one: Time, other: Time) -> bool:
    """Whether the intervals overlap; what has no interval is taken as exact."""
    return abs(one.ms - other.ms) <= (one.half or 0.0) + (other.half or 0.0)


def numbers(one: Time, other: Time) -> str:
    """Both figures."""
    return f"{one} ms per token against {other}"


def pair_or(pair: Time, other: Time, what: str, *, among: str = "rule") -> str:
    """Whether to run the pair. `other` is the best without one, in words `what`.

    `among` is the word for what `pair` is the best of.
    """
    gain = 1.0 - pair.ms / other.ms
    noise = within_noise(pair, other) and (pair.half, other.half) != (None, None)
    said = f"Run {what} ({other.name}), not the pair"
    best = f"the best {among}, {pair.name},"
    if noise and gain > WORTH:
        return (
            f"Nothing decides for the pair yet: {best} is ahead of {other.name}, but within noise,"
            f" {numbers(pair, other)}. Until it is clear, {what} is simpler."
        )
    if noise:
        return f"{said}: {best} is within noise of it, {numbers(pair, other)}."
    if gain > WORTH:
        return f"Run the pair with {pair.name}: {numbers(pair, other)} of {other.name}, {gain:.0%} less."
    if gain >= -WORTH:
        return f"{said}: {best} is as good and no better, {numbers(pair, other)}."
    return f"{said}: {best} is {-gain:.0%} slower, {numbers(pair, other)}."


def faster(best: Time, next_best: Time) -> str:
    """The fastest of several of one kind, and how far ahead it is."""
    if best.half is not None and next_best.half is not None and within_noise(best, next_best):
        return (
            f"{best.name} and {next_best.name} are within noise of each other:"
            f" {numbers(best, next_best)}."
        )
    gain = 1.0 - best.ms / next_best.ms
    return f"{best.name} is the fastest: {numbers(best, next_best)} of {next_best.name}, {gain:.0%} less."
