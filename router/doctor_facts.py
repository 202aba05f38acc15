"""What is known of one SGLang server, and of a pair: the facts that the doctor's rules judge.

The law of this file: values only. `doctor_reading` makes them out of a server's answers,
`doctor_rules` judges them. What a server does not say is None, and a rule that needs it is not
judged. No key, password or command line is among the facts: they are printed and logged.
"""

from __future__ import annotations

from typing import Final

import msgspec

from router.frontier import Frontier
from router.load import Role

Release = tuple[int, int, int]

OFF: Final = "off"
NONE: Final = "none"  # what a null says: the default, or nothing of the kind
# Output tokens after which a server that speculates has verified: a draft proposes 16 at most.
ENOUGH_TOKENS: Final = 32


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says. None: it does not say. Fields with SGLang's own names are copies."""

    version: str | None = None
    release: Release | None = None
    asked: frozenset[str] | None = None  # the flags of its launch command, without values
    env: dict[str, str] | None = None  # those of `ENV` that it lists; {} when it lists others
    api_key: bool | None = None  # whether it wants one
    # the model
    served: tuple[str, ...] | None = None  # names on /v1/models
    model_path: str | None = None
    revision: str | None = None
    weight_version: str | None = None
    json_model_override_args: str | None = None
    load_format: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    tokenizer_path: str | None = None
    tokenizer_mode: str | None = None
    chat_template: str | None = None
    hf_chat_template_name: str | None = None
    context: int | None = None  # tokens of prompt and output together
    # how it computes
    accelerator: str | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dp_size: int | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    page_size: int | None = None
    cap: int | None = None  # requests that run at once, over all ranks
    graph_ceiling: int | None = None  # largest decode batch with a CUDA graph; 0 without graphs
    chunked_prefill_size: int | None = None
    disable_radix_cache: bool | None = None
    mem_fraction_static: float | None = None
    max_total_num_tokens: int | None = None  # of the KV cache
    disable_overlap_schedule: bool | None = None
    enable_metrics: bool | None = None
    metrics_page: bool | None = None  # whether /metrics has SGLang's figures; None: not asked
    schedule_policy: str | None = None
    stream_interval: int | None = None
    num_continuous_decode_steps: int | None = None
    enable_mixed_chunk: bool | None = None
    enable_deterministic_inference: bool | None = None
    sampling_backend: str | None = None
    grammar_backend: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    # speculation
    algorithm: str | None = None  # OFF when it says that there is none
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None  # under adaptive speculation, those active now
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_adaptive: bool | None = None
    speculative_adaptive_config: str | None = None
    accept_lifetime: float | None = None  # tokens per verify step since the start
    # what was seen at work, by the canary or between two looks
    accept_recent: float | None = None
    grown_tokens: float | None = None  # output tokens of requests that ended between two looks
    grown_verify: float | None = None  # their verify steps
    canary_prompt: int | None = None  # tokens
    canary_output: int | None = None
    canary_verify: int | None = None  # verify steps; 0: speculation did not run

    @property
    def speculates(self) -> bool | None:
        """Whether its resolved arguments say that it speculates."""
        return None if self.algorithm is None else self.algorithm != OFF

    @property
    def attention(self) -> str | None:
        """The attention backends in use, prefill and decode."""
        if self.attention_backend is None:
            return None
        prefill, decode = (
            self.attention_backend if own in {None, NONE} else str(own)
            for own in (self.prefill_attention_backend, self.decode_attention_backend)
        )
        return prefill if prefill == decode else f"{prefill} for prefill, {decode} for decode"

    @property
    def template(self) -> str | None:
        """The chat template, where another one than the model's own was given."""
        names = [self.chat_template, self.hf_chat_template_name]
        if names == [None, None]:
            return None
        return ", ".join(name for name in names if name not in {None, NONE}) or NONE

    @property
    def canary_accept(self) -> float | None:
        """The canary's tokens per verify step, as SGLang counts them: all its output tokens."""
        if not self.canary_verify or self.canary_output is None:
            return None
        return self.canary_output / self.canary_verify

    @property
    def metrics_on(self) -> bool | None:
        """Whether it has figures for Prometheus, by its arguments and by the page itself."""
        told = [on for on in (self.enable_metrics, self.metrics_page) if on is not None]
        return all(told) if told else None

    @property
    def verified(self) -> bool | None:
        """Whether verify steps were seen; None when too little was served to see any."""
        if self.canary_verify is not None and self.canary_output:
            return self.canary_verify > 0
        if self.grown_verify is None or self.grown_tokens is None:
            return None
        if self.grown_verify > 0:
            return True
        return False if self.grown_tokens >= ENOUGH_TOKENS else None

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step, by the best evidence that there is.

        What was seen lately stands for itself. The mean since the start and one canary are each
        too little to condemn a server that the other speaks for: the larger counts.
        """
        if self.accept_recent is not None:
            return self.accept_recent
        known = [v for v in (self.canary_accept, self.accept_lifetime) if v is not None]
        return max(known) if known else None


class Pair(msgspec.Struct, frozen=True):
    """Both servers, and the threshold in requests that is configured for them, if one is."""

    speculative: ServerFacts
    baseline: ServerFacts
    threshold: float | None = None

    def of(self, role: Role) -> ServerFacts:
        """The facts of one of them."""
        return self.speculative if role is Role.SPECULATIVE else self.baseline


def threshold_in(line: Frontier | None) -> float | None:
    """The most requests that the line lets the speculative server run; None without a line."""
    if line is None:
        return None
    return max(line.table) if line.scope == "table" else line.threshold
