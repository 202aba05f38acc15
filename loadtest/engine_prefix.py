"""What a simulated server's radix cache holds of prompts, and how much of a new one it is spared.

Pure. A prompt is read as one long list of words: those of each message, behind as many for its role as the
chat template costs. Words are taken in blocks, and a block's hash holds the hash of the block before it, so
that a hash that is known says that everything up to its end is known. SGLang does the same for tokens, with a
tree, and with blocks of one token at page size 1; here a hit is a multiple of `BLOCK`. As there, at least
one token of a prompt is always computed, what was used least recently goes out first, and a finished
request leaves its answer behind too, with which the next turn begins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from loadtest.engine_messages import MESSAGE_TOKENS, TEMPLATE_TOKENS

BLOCK: Final = 8  # tokens
# How a prompt is written that may be one text or several.
TEXTS: Final = ("prompt", "text")


class PrefixCache:
    """The blocks that are known, by hash."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: how many it holds."""
        self.limit = tokens // BLOCK
        self._known: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Tokens held."""
        return len(self._known) * BLOCK

    def hit(self, words: Sequence[str]) -> int:
        """Tokens of this prompt that need no prefill."""
        known, found = self._known, 0
        for block in _blocks(words):
            if block not in known:
                break
            known.move_to_end(block)
            found += BLOCK
        return max(0, min(found, len(words) - 1))

    def keep(self, words: Sequence[str]) -> None:
        """Hold a finished request, prompt and answer."""
        for block in _blocks(words):
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > self.limit:
            self._known.popitem(last=False)

    def flush(self) -> None:
        """Hold nothing."""
        self._known.clear()


def prompt_words(body: bytes) -> list[str] | None:
    """The words of a request's only prompt, as many as it has tokens; None for another kind of body."""
    values = msgspec.json.decode(body)
    messages = values.get("messages")
    if isinstance(messages, list):
        words = ["<template>"] * TEMPLATE_TOKENS
        for message in messages:
            words += _message(str(message.get("role")), _text(message.get("content")))
        return words
    texts = [values[name] for name in TEXTS if isinstance(values.get(name), str)]
    return texts[0].split() if texts else None


def with_answer(words: list[str], answer: str, *, chat: bool) -> list[str]:
    """Prompt and answer, as the next turn will repeat them."""
    return words + (_message("assistant", answer) if chat else answer.split())


def _message(role: str, text: str) -> list[str]:
    return [f"<{role}>"] * MESSAGE_TOKENS + text.split()


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(
        str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part
    )


def _blocks(words: Sequence[str]) -> Iterator[int]:
    """The hash of every whole block with all before it."""
    before = 0
    for at in range(BLOCK, len(words) + 1, BLOCK):
        before = hash((before, *words[at - BLOCK : at]))
        yield before
