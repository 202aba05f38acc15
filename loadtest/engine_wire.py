"""What all dialects of an answer have in common: usage, logprobs, pieces of text, ids.

A `Renderer` turns news of a request into the bytes of its stream, and the end into the last bytes.
It does no I/O. What is the same in all chunks of a request is made once, so that a chunk costs one
concatenation.
"""

from __future__ import annotations

import uuid
from typing import Any, Final, Protocol

import msgspec

from loadtest.engine_generation import Event, Generation
from loadtest.engine_messages import Tool
from loadtest.engine_request import Choice, Wanted

# Characters of a tool call's arguments per token, see `engine_request`.
CHARACTERS_PER_TOKEN: Final = 4
encode: Final = msgspec.json.Encoder().encode


class Renderer(Protocol):
    """One dialect's stream."""

    content_type: bytes

    def events(self, event: Event) -> list[bytes]:
        """The chunks that this news makes."""
        ...

    def ending(self) -> list[bytes]:
        """The chunks after the last news."""
        ...


def new_id() -> str:
    """An id as SGLang makes them: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def quoted(text: str) -> bytes:
    """A text as the inside of a JSON string."""
    return encode(text)[1:-1]


def usage(prompt_tokens: int, completion_tokens: int, cached: int = 0) -> dict[str, Any]:
    """Token counts as chat and answers in one piece have them. As in SGLang, no hit has no details."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
        "reasoning_tokens": 0,
    }


def chat_logprobs(choice: Choice, first: int, count: int, top: int) -> dict[str, Any]:
    """Log probabilities in the shape of chat completions; all words are equally likely."""
    return {
        "content": [
            _logprob(word) | {"top_logprobs": [_logprob(word) for _ in range(top)]}
            for word in choice.answer.words(first, count)
        ]
    }


def text_logprobs(choice: Choice, first: int, count: int, top: int) -> dict[str, Any]:
    """Log probabilities in the shape of completions."""
    words = choice.answer.words(first, count)
    offsets = [len(choice.answer.text(first, at)) for at in range(count)]
    return {
        "text_offset": offsets,
        "token_logprobs": [LOGPROB] * count,
        "tokens": words,
        "top_logprobs": [{word: LOGPROB} for word in words] if top else [],
    }


def arguments_piece(tool: Tool, first: int, count: int) -> str:
    """The part of a tool call's arguments in these tokens; token 0 is the function's name."""
    start = max(0, first - 1) * CHARACTERS_PER_TOKEN
    return tool.arguments[start : max(0, first + count - 1) * CHARACTERS_PER_TOKEN]


def spec_details(generation: Generation) -> dict[str, Any]:
    """What speculation did for a request, as SGLang counts it.

    The first token comes from the prefill, so the accept length here is completion tokens over
    verify steps, as theirs is.
    """
    steps, tokens = generation.verify_steps, generation.produced
    drafts = max(0, tokens - len(generation.sequences) - steps)
    proposed = steps * DRAFTS
    return {
        "spec_accept_rate": drafts / proposed if proposed else 0.0,
        "spec_accept_length": tokens / steps if steps else 0.0,
        "spec_num_correct_drafts": drafts,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": steps,
    }


def speculated(wanted: Wanted, generation: Generation) -> bool:
    """Whether to tell about speculation: it was asked for, and there was any."""
    return wanted.spec_details and generation.speculative


# ln(1 / vocabulary): what every token of a model with random weights gets.
LOGPROB: Final = -11.76176643371582
# Draft tokens that a verify step proposes with three steps and topk 1.
DRAFTS: Final = 3


def _logprob(word: str) -> dict[str, Any]:
    return {"token": word, "bytes": list(word.encode()), "logprob": LOGPROB}
