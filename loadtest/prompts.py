"""What is asked: real text, since acceptance depends on it, and how many tokens of answer.

Three sources of prompts: the texts shipped in `data/corpus` (its README names where they come
from), a file, or the shipped texts cut to a number of tokens. All are a function of the seed and of
a place in the sweep (pass, level, number), so that both servers of a pair are asked the same.

Prompts are made unique by a mark in front, because a server keeps the beginnings of prompts that it
has seen, and a prompt that it has would cost it no prefill. The mark also has a salt of this start:
a level that is measured again, or a second sweep, asks nothing that the server remembers.

Tokens are counted by the server's own /tokenize when it has one (`Tokenizer`), else taken as 4 for 3
words of English, which is OpenAI's rule of thumb for its own tokenizers. Either is of the text: a
chat template adds some 10 to 40.

Nothing is sent from here.
"""

from __future__ import annotations

import bisect
import csv
import hashlib
import io
import itertools
import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

import msgspec

TEXTS: Final = ("alice", "constitution", "declaration")
INSTRUCTIONS: Final = (
    "Summarise this passage in three sentences.",
    "Continue this passage in the same style.",
    "Explain this passage to a child of ten years.",
    "Rewrite this passage in plain modern English.",
    "List the main points of this passage, with a reason for each.",
    "Translate this passage into German.",
    "What questions does this passage raise? Answer two of them.",
    "Write a dialogue between two people who disagree about this passage.",
)
# Words of a passage when no length is asked for.
PASSAGE_WORDS: Final = (60, 240)
TOKENS_PER_WORD: Final = 4 / 3
# What a mark like "(Request 3fa9c1-2-128-57)" is in tokenizers of today's models, about.
MARK_TOKENS: Final = 16
# Tokens that a chat template adds to a prompt, with room.
TEMPLATE_TOKENS: Final = 64
# A JSON line of a file may be an object with one of these: a text, or turns of which the first is it.
FIELDS: Final = ("prompt", "text", "question", "turns")
COLUMNS: Final = ("ContextTokens", "GeneratedTokens")


class PromptError(ValueError):
    """A file that cannot be used; the message says which line and why."""


class Place(NamedTuple):
    """Where in a sweep a request is."""

    number: int  # of the pass
    step: str  # the level or the rate
    at: int  # from 0

    def random(self, seed: int) -> random.Random:
        """Chance of its own."""
        return random.Random(f"{seed}/{self.number}/{self.step}/{self.at}")


class Tokenizer(msgspec.Struct, frozen=True):
    """How many tokens text has, on average."""

    per_word: float = TOKENS_PER_WORD
    mark: float = MARK_TOKENS

    @classmethod
    def of(cls, per_word: float | None, mark: float | None) -> Self:
        """As a server counts; what it does not say is taken as usual."""
        return cls(per_word or TOKENS_PER_WORD, mark or MARK_TOKENS)


class Prompts(Protocol):
    """A source of prompts."""

    def text(self, place: Place, tokens: int | None) -> str:
        """The prompt for a place, of about so many tokens if the source can."""
        ...


class Corpus:
    """The shipped texts: questions, and passages with something to do about them."""

    def __init__(self, seed: int, tokenizer: Tokenizer, *, marked: bool) -> None:
        """`marked`: room is left for a mark."""
        self._seed = seed
        self._per_word = tokenizer.per_word
        self._mark = tokenizer.mark if marked else 0.0
        self._questions = corpus_lines("questions")
        lines = [line for name in TEXTS for line in corpus_lines(name)]
        self._words = [word for line in lines for word in line.split()]
        lengths = (len(line.split()) for line in lines)
        self._starts = [0, *itertools.accumulate(lengths)][:-1]

    def text(self, place: Place, tokens: int | None) -> str:
        """A question or a passage; of a given length always a passage."""
        chance = place.random(self._seed)
        if tokens is None and place.at % 2:
            return chance.choice(self._questions)
        instruction = chance.choice(INSTRUCTIONS)
        start = chance.choice(self._starts)
        if tokens is None:
            return f"{instruction}\n\n{self._passage(start, chance.randint(*PASSAGE_WORDS))}"
        words = max(1, round((tokens - self._mark) / self._per_word))
        left = words - len(instruction.split())
        if left < len(instruction.split()):
            return self._passage(start, words)
        return f"{instruction}\n\n{self._passage(start, left)}"

    def _passage(self, start: int, count: int) -> str:
        """So many words from a paragraph's first on, paragraphs kept apart; round and round."""
        parts: list[str] = []
        while count > 0:
            after = bisect.bisect_right(self._starts, start)
            end = self._starts[after] if after < len(self._starts) else len(self._words)
            taken = self._words[start : min(end, start + count)]
            parts.append(" ".join(taken))
            count -= len(taken)
            start = end % len(self._words)
        return "\n".join(parts)


class Listed:
    """Prompts of a file, in its order from a place that each level has of its own."""

    def __init__(self, prompts: Sequence[str], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed

    def text(self, place: Place, tokens: int | None) -> str:  # noqa: ARG002 (a file's are as long as they are)
        """The next one of the file."""
        first = place._replace(at=-1).random(self._seed).randrange(len(self._prompts))
        return self._prompts[(first + place.at) % len(self._prompts)]


class Lengths:
    """How long prompts and answers are: the same always, or as in a trace."""

    def __init__(
        self,
        output_tokens: int | None,
        rows: Sequence[tuple[int, int]] = (),
        input_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        """`rows`: prompt and output tokens of a trace; `input_tokens` and `output_tokens` lead."""
        if output_tokens is None and not rows:
            raise PromptError("the length of answers is given by --output-tokens or --trace")
        self._output = output_tokens
        self._input = input_tokens
        self._rows = rows
        self._seed = seed

    def of(self, place: Place) -> tuple[int | None, int]:
        """Prompt tokens, if somebody says how many, and output tokens."""
        row: tuple[int | None, int] = (None, 0)
        if self._rows:
            first = place._replace(at=-1).random(self._seed).randrange(len(self._rows))
            row = self._rows[(first + place.at) % len(self._rows)]
        return self._input or row[0], self._output or row[1]


def corpus_lines(name: str) -> list[str]:
    """The paragraphs of a shipped text."""
    path = resources.files("loadtest").joinpath(f"data/corpus/{name}.txt")
    return path.read_text(encoding="utf-8").splitlines()


def mark(prompt: str, place: Place, salt: str) -> str:
    """The prompt with something in front that no other has."""
    return f"(Request {salt}-{place.number}-{place.step}-{place.at}) {prompt}"


def prompts_from(
    file: Path | None,
    seed: int,
    tokenizer: Tokenizer,
    *,
    input_tokens: int | None,
    marked: bool = True,
) -> Prompts:
    """The prompts of this file, or the shipped ones. Raises PromptError."""
    if file is None:
        return Corpus(seed, tokenizer, marked=marked)
    if input_tokens is not None:
        raise PromptError("--prompts are as long as they are: leave out --input-tokens")
    return Listed(read_prompts(file), seed)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, one a line: text, or JSON (a string, or an object of `FIELDS`).

    Raises PromptError.
    """
    lines = _read(path).splitlines()
    prompts = [
        _prompt(line, f"{path}, line {at}") for at, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise PromptError(f"{path} has no prompts: one a line, as text or as JSON")
    return prompts


def read_trace(path: Path, context_length: int | None = None) -> list[tuple[int, int]]:
    """Prompt and output tokens of each request of a trace, as Azure publishes them (CSV).

    Rows that have no output, or that with a mark and a template would not fit in the context, are
    left out. Raises PromptError.
    """
    reader = csv.DictReader(io.StringIO(_read(path)))
    if not set(COLUMNS) <= set(reader.fieldnames or ()):
        raise PromptError(f"{path} is no trace: its first line must name {' and '.join(COLUMNS)}")
    rows: list[tuple[int, int]] = []
    for at, row in enumerate(reader, start=2):
        try:
            prompt, output = (int(row[name]) for name in COLUMNS)
        except (TypeError, ValueError):
            raise PromptError(f"{path}, line {at}: {' and '.join(COLUMNS)} are numbers") from None
        if output > 0 and (context_length is None or 1.1 * prompt + 64 + output <= context_length):
            rows.append((max(1, prompt), output))
    if not rows:
        raise PromptError(f"{path} has no request that fits in {context_length} tokens")
    return rows


def described(path: Path) -> str:
    """A file's name with a digest of what is in it, for the conditions of a sweep."""
    digest = hashlib.blake2b(_read(path).encode(), digest_size=6).hexdigest()
    return f"{path.name} ({digest})"


def _prompt(line: str, where: str) -> str:
    if line.lstrip()[:1] not in {"{", '"'}:
        return line
    try:
        found: Any = msgspec.json.decode(line)
    except msgspec.MsgspecError as error:
        if not line.lstrip().startswith("{"):
            return line  # text that begins with a quotation mark
        raise PromptError(f"{where}: no JSON: {error}") from None
    if isinstance(found, dict):
        found = next((found[name] for name in FIELDS if name in found), None)
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, str) or not found:
        raise PromptError(f"{where}: no text in any of {', '.join(FIELDS)}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is no text in UTF-8: {error}") from error
