"""What a simulated model says: words that cost nothing to make, and the same ones each time.

An answer is a walk through a fixed list of words, one token each. Where the walk starts and how
long an answer gets by itself follow from the prompt and the seed alone, so that both servers of a
pair answer a prompt alike, as two servers with one model at temperature 0 do.

Pure.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

WORDS: Final = tuple(
    " the router sends each request to one of two servers and counts it until its last byte has"
    " gone while few run the server that guesses ahead is faster but when many run guessing costs"
    " more than it gives so there is a line between them which has to be measured on the machine"
    " that serves".replace(" ", "\n ").split("\n")[1:]
)
# Chunks of up to this many tokens are made once; longer ones (a slow client) are put together.
READY_MADE: Final = 8
# The first token ids of the simulated vocabulary are the words.
FIRST_ID: Final = 100


def _ready_made() -> tuple[tuple[str, ...], ...]:
    twice = WORDS + WORDS
    return tuple(
        tuple("".join(twice[at : at + count]) for count in range(READY_MADE + 1))
        for at in range(len(WORDS))
    )


_CHUNKS: Final = _ready_made()


class Answer(NamedTuple):
    """One answer: a place in the list of words."""

    start: int

    def text(self, first: int, count: int) -> str:
        """The words of this many tokens from the given one on."""
        at = (self.start + first) % len(WORDS)
        if count <= READY_MADE:
            return _CHUNKS[at][count]
        return "".join(WORDS[(at + i) % len(WORDS)] for i in range(count))

    def words(self, first: int, count: int) -> list[str]:
        """The same, a word for each token."""
        return [WORDS[(self.start + first + i) % len(WORDS)] for i in range(count)]

    def ids(self, first: int, count: int) -> list[int]:
        """The same as token ids."""
        return [FIRST_ID + (self.start + first + i) % len(WORDS) for i in range(count)]


class Draw(NamedTuple):
    """What a prompt and a seed decide."""

    answer: Answer
    natural_tokens: int  # where the answer ends by itself


def draw(prompt: bytes, seed: int, natural_tokens: tuple[int, int]) -> Draw:
    """The answer to a prompt, and its length if nothing cuts it."""
    digest = hashlib.blake2b(prompt, digest_size=16, key=seed.to_bytes(16, "big", signed=True))
    value = int.from_bytes(digest.digest(), "big")
    shortest, longest = natural_tokens
    return Draw(
        Answer(value % len(WORDS)),
        shortest + (value >> 64) % (longest - shortest + 1),
    )


def count_tokens(text: str) -> int:
    """Tokens of a text: one for each word."""
    return len(text.split())


def encode(text: str) -> list[int]:
    """Token ids of a text: a word's own id if the model knows it, else one that its bytes decide."""
    ids = []
    for word in text.split():
        if f" {word}" in _IDS:
            ids.append(_IDS[f" {word}"])
        else:
            digest = hashlib.blake2b(word.encode(), digest_size=2).digest()
            ids.append(1000 + int.from_bytes(digest, "big"))
    return ids


def decode(ids: list[int]) -> str:
    """The text of token ids: known words, and `w` with the id for the others."""
    return "".join(
        WORDS[i - FIRST_ID] if FIRST_ID <= i < FIRST_ID + len(WORDS) else f" w{i:x}" for i in ids
    )


_IDS: Final = {word: FIRST_ID + at for at, word in reversed(list(enumerate(WORDS)))}
