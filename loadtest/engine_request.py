"""From a request's body to what is wanted of the model. Pure; every refusal is an exception.

One `Wanted` serves all dialects (OpenAI, Anthropic, Ollama, native): they differ in how they ask
and in how the answer looks, not in what the batch does.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from loadtest.engine_config import EngineConfig
from loadtest.engine_errors import BadToken, bad_request, invalid, missing, value_error
from loadtest.engine_messages import Tool, forced_call, message_problems, message_tokens
from loadtest.engine_text import Answer, count_tokens, draw
from loadtest.engine_validation import Fields

# What SGLang generates when nothing is asked for: OpenAI's 16 for completions, 128 natively.
COMPLETION_TOKENS: Final = 16
NATIVE_TOKENS: Final = 128
# Tokens that a verify step may hold with three steps and topk 1: the drafts and the bonus token.
DRAFT_TOKENS: Final = 4


class Choice(msgspec.Struct, frozen=True):
    """One answer that is wanted."""

    prompt_tokens: int
    output_tokens: int
    finish: str
    answer: Answer


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for."""

    choices: list[Choice]
    prompt_tokens: int  # of all prompts; each counts once, however many choices it has
    model: str
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    top_logprobs: int | None = None  # None: no logprobs
    rid: str | None = None
    tool: Tool | None = None
    spec_details: bool = False


def chat(fields: Fields, config: EngineConfig) -> Wanted:
    """A chat completion."""
    values = fields.values
    if "messages" not in values:
        given = dict(values)
        if not given.get("tools"):
            given.setdefault("tool_choice", "none")
        fields.problems.append(missing(("body", "messages"), given))
    messages = fields.listing("messages")
    for at, message in enumerate(messages or ()):
        fields.problems.extend(message_problems(at, message))
    asked = fields.integer("max_completion_tokens")
    asked = fields.integer("max_tokens") if asked is None else asked
    tokens = message_tokens(messages or [])
    wanted = _sampling(fields, config, [(tokens, prompt_bytes(messages))], asked, None)
    if not messages:
        raise bad_request("Messages cannot be empty.")
    tool = forced_call(values)
    return msgspec.structs.replace(
        wanted,
        top_logprobs=(fields.integer("top_logprobs") or 0) if values.get("logprobs") else None,
        tool=tool,
        choices=[_calling(choice, tool) for choice in wanted.choices] if tool else wanted.choices,
    )


def completion(fields: Fields, config: EngineConfig) -> Wanted:
    """A text completion."""
    values = fields.values
    if "prompt" not in values:
        fields.problems.append(missing(("body", "prompt"), values))
    asked = fields.integer("max_tokens")
    if asked is not None and asked <= 0:
        where = ("body", "max_tokens")
        fields.problems.append(value_error(where, "max_tokens must be positive", asked))
    fields.check()
    prompts = [
        (token_count(prompt, config), prompt_bytes(prompt))
        for prompt in _prompts(fields, values["prompt"])
    ]
    wanted = _sampling(fields, config, prompts, asked, COMPLETION_TOKENS)
    logprobs = fields.integer("logprobs")
    return msgspec.structs.replace(wanted, top_logprobs=logprobs)


def native(fields: Fields, config: EngineConfig) -> Wanted:
    """SGLang's own `/generate`: a text or token ids, and `sampling_params`."""
    values = fields.values
    prompt = values.get("input_ids", values.get("text"))
    if prompt is None:
        raise bad_request("Either text, input_ids or input_embeds should be provided.")
    where = ("body", "sampling_params")
    parameters = Fields(fields.path, fields.mapping("sampling_params"), where)
    prompts = [(token_count(one, config), prompt_bytes(one)) for one in _prompts(fields, prompt)]
    asked = parameters.integer("max_new_tokens")
    wanted = _sampling(parameters, config, prompts, asked, NATIVE_TOKENS)
    return msgspec.structs.replace(
        wanted, stream=fields.boolean("stream"), rid=fields.string("rid"), model=config.model
    )


def token_count(prompt: Any, config: EngineConfig) -> int:
    """Tokens of one prompt, a text or ids. Raises BadToken for an id that the model does not have."""
    if isinstance(prompt, str):
        return count_tokens(prompt)
    if any(not 0 <= token < config.vocabulary for token in prompt):
        raise BadToken
    return len(prompt)


def prompt_bytes(prompt: Any) -> bytes:
    """What decides the answer."""
    return msgspec.json.encode(prompt)


def _sampling(
    fields: Fields,
    config: EngineConfig,
    prompts: list[tuple[int, bytes]],
    asked: int | None,
    default: int | None,
) -> Wanted:
    """The fields that all dialects share; `asked` and `default` are output tokens."""
    temperature, top_p = fields.number("temperature"), fields.number("top_p")
    n = fields.integer("n")
    ignore_eos, least = fields.boolean("ignore_eos"), fields.integer("min_tokens") or 0
    where = (*fields.where, "stream_options")
    options = Fields(fields.path, fields.mapping("stream_options"), where)
    wanted: dict[str, Any] = {
        "stream": fields.boolean("stream"),
        "include_usage": options.boolean("include_usage"),
        "continuous_usage": options.boolean("continuous_usage_stats"),
        "spec_details": fields.boolean("return_spec_tokens_details"),
        "model": fields.string("model") or "default",
        "rid": fields.string("rid"),
    }
    fields.problems += options.problems
    fields.check()
    if n == 0:
        raise bad_request("range() arg 3 must not be zero", "BadRequest")
    choices = []
    for tokens, material in prompts:
        _check_length(tokens, asked, config)
        _check_ranges(fields, temperature, top_p, asked)
        room = config.context_length - tokens - (DRAFT_TOKENS if config.speculates else 0)
        limit = min(asked if asked is not None else default or room, room)
        drawn = draw(material, config.seed, config.natural_tokens)
        natural = limit if ignore_eos else max(drawn.natural_tokens, least)
        choice = Choice(
            tokens,
            min(natural, limit),
            "stop" if natural < limit else "length",
            drawn.answer,
        )
        choices += [choice] * (n or 1)
    return Wanted(choices=choices, prompt_tokens=sum(tokens for tokens, _ in prompts), **wanted)


def _check_length(tokens: int, asked: int | None, config: EngineConfig) -> None:
    """Refuse what does not fit; a server that speculates adds its draft tokens to every prompt."""
    longest = config.context_length
    tokens += DRAFT_TOKENS if config.speculates else 0
    if tokens >= longest:
        raise bad_request(
            f"The input ({tokens} tokens) is longer than the model's context length"
            f" ({longest} tokens)."
        )
    if asked is not None and tokens + asked > longest:
        raise bad_request(
            f"Requested token count exceeds the model's maximum context length of {longest} tokens."
            f" You requested a total of {tokens + asked} tokens: {tokens} tokens from the input"
            f" messages and {asked} tokens for the completion. Please reduce the number of tokens"
            " in the input messages or the completion to fit within the limit."
        )


def _check_ranges(
    fields: Fields, temperature: float | None, top_p: float | None, asked: int | None
) -> None:
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise bad_request(f"temperature must be a non-negative finite number, got {temperature}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise bad_request(f"top_p must be in (0, 1], got {top_p}.")
    for name in ("frequency_penalty", "presence_penalty"):
        penalty = fields.number(name)
        fields.check()
        if penalty is not None and not -2 <= penalty <= 2:
            raise bad_request(f"{name} must be in [-2, 2], got {penalty}.")
    if asked is not None and asked < 0:
        raise bad_request(f"max_new_tokens must be at least 0, got {asked}.")


def _prompts(fields: Fields, prompt: Any) -> list[Any]:
    """A prompt may be a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(part) is int for part in prompt):
            return [prompt]
        if all(isinstance(part, str) for part in prompt):
            return prompt
        if all(isinstance(part, list) and all(type(i) is int for i in part) for part in prompt):
            return prompt
    problem = {
        "type": "string_type",
        "loc": ("body", "prompt", "str"),
        "msg": "Input should be a valid string",
        "input": prompt,
    }
    raise invalid(fields.path, [problem])


def _calling(choice: Choice, tool: Tool) -> Choice:
    """A call ends by itself: a token for its name, and one for every four characters."""
    tokens = 1 + -(-len(tool.arguments) // 4)
    if tokens > choice.output_tokens and choice.finish == "length":
        return choice
    return Choice(choice.prompt_tokens, tokens, "tool_calls", choice.answer)
