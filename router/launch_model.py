"""What a model's and a draft's config.json say, and whether the two fit each other.

The law of this file: it judges what it is given and reads no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

# Lets SGLang serve more context than a model, or its draft, says that it takes.
LONGER: Final = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
# Attention that the recipes' backends are right for, by the model's architecture: ordinary heads,
# no sinks, no latent cache, no other kind of layer in between. A model that is not here gets what
# SGLang chooses.
PLAIN: Final = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
}


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What matters here of a config.json. None: it does not say."""

    architecture: str | None = None
    vocabulary: int | None = None
    hidden: int | None = None
    target_hidden: int | None = None  # of a draft: what it takes from its target
    draft_vocabulary: int | None = None
    heads: int | None = None
    context: int | None = None  # tokens

    @property
    def plain_attention(self) -> bool:
        """Whether its attention is of the ordinary kind."""
        return self.architecture in PLAIN


def read(config: Mapping[str, Any]) -> ModelFacts:
    """Take the facts out of a config.json; those of the text part, where there are several."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None

    def number(key: str) -> int | None:
        value = text.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return ModelFacts(
        architecture=name if isinstance(name, str) else None,
        vocabulary=number("vocab_size"),
        hidden=number("hidden_size"),
        target_hidden=number("target_hidden_size"),
        draft_vocabulary=number("draft_vocab_size"),
        heads=number("num_attention_heads"),
        context=number("max_position_embeddings"),
    )


def misfits(model: ModelFacts, draft: ModelFacts, algorithm: str) -> Iterator[str]:
    """Yield why this draft cannot serve this model: one line each, SGLang would end at its start."""
    if None not in (model.vocabulary, draft.vocabulary) and model.vocabulary != draft.vocabulary:
        yield f"the model has {model.vocabulary} tokens and the draft {draft.vocabulary}"
    if draft.draft_vocabulary and model.vocabulary and draft.draft_vocabulary > model.vocabulary:
        yield f"the draft proposes {draft.draft_vocabulary} tokens of {model.vocabulary}"
    if algorithm.startswith("EAGLE"):
        wanted = draft.target_hidden or draft.hidden
        if None not in (model.hidden, wanted) and model.hidden != wanted:
            yield f"the model's hidden size is {model.hidden}, the draft takes {wanted}"


def doubts(draft: ModelFacts, algorithm: str) -> Iterator[str]:
    """Yield what looks wrong about this draft and need not be."""
    name = draft.architecture or ""
    eagle3 = "eagle3" in name.lower() or draft.draft_vocabulary is not None
    if algorithm == "EAGLE3" and not eagle3:
        yield f"{name or 'the draft'} does not look like an EAGLE-3 head: EAGLE3 wants one"
    if algorithm == "EAGLE" and eagle3:
        yield f"{name} is an EAGLE-3 head: EAGLE would accept 1.00 token a step, use EAGLE3"


def short_draft(context: int | None, draft: ModelFacts) -> Iterator[str]:
    """Yield a word if the draft takes less than the context, in tokens, that is served.

    SGLang then ends at its start (read in 0.5.17) unless LONGER is set. The draft only proposes, so
    what it does beyond its own length costs acceptance and never a wrong token.
    """
    if context is not None and draft.context is not None and draft.context < context:
        yield (
            f"the draft takes {draft.context} tokens of context and {context} are served: give both "
            f"servers --context-length {draft.context}, or the speculative one {LONGER}=1"
        )
