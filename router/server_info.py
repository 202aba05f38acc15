"""What the pair says of itself on `/server_info`: the speculative server's facts, redacted.

SGLang's own answer holds its API keys, the password of its TLS key, its command line and, on
request, its environment, in clear. So fields are allowed by name, never removed by name: a field
that a later version adds is hidden until it is listed here.

The pair is described as one server with one data-parallel rank. What adds up is summed (capacity,
memory, speed), what both must hold is the smaller one (context length), everything else is the
speculative server's, because that is the one a benchmark wants to see at work (its acceptance).
Benchmarks take a body with `prefill`, `decode` or `router_manager` for a router and read less of
it: those names are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

Info = dict[str, Any]
Combine = Callable[[list[float]], float]

ALLOWED: Final = frozenset({
    # the model
    "model_path", "served_model_name", "tokenizer_path", "tokenizer_mode", "skip_tokenizer_init",
    "load_format", "trust_remote_code", "revision", "dtype", "quantization", "kv_cache_dtype",
    "context_length", "is_embedding", "weight_version", "reasoning_parser", "tool_call_parser",
    "preferred_sampling_params", "sampling_defaults", "random_seed",
    # capacity and scheduling
    "max_running_requests", "max_queued_requests", "max_total_tokens", "max_total_num_tokens",
    "max_req_input_len", "max_prefill_tokens", "chunked_prefill_size", "schedule_policy",
    "schedule_conservativeness", "mem_fraction_static", "page_size", "disable_radix_cache",
    "disable_overlap_schedule", "enable_mixed_chunk", "num_continuous_decode_steps",
    "stream_interval", "sleep_on_idle", "load_snapshot_publish_interval", "enable_metrics",
    "enable_cache_report", "enable_deterministic_inference", "enable_priority_scheduling",
    "stream_response_default_include_usage", "load_balance_method", "disaggregation_mode",
    # hardware
    "device", "tp_size", "pp_size", "dp_size", "ep_size", "nnodes", "enable_dp_attention",
    "attention_backend", "prefill_attention_backend", "decode_attention_backend",
    "sampling_backend", "grammar_backend", "moe_runner_backend", "cuda_graph_config",
    "cuda_graph_bs_decode", "cuda_graph_max_bs_decode", "cuda_graph_max_bs", "disable_cuda_graph",
    # speculation
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_adaptive",
    "speculative_attention_mode", "speculative_draft_window_size",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc",
    "max_speculative_num_draft_tokens",
    # the process
    "status", "startup_time", "version", "frontend",
})  # fmt: skip
ALLOWED_STATE: Final = frozenset({
    "avg_spec_accept_length", "effective_max_running_requests_per_dp", "last_gen_throughput",
    "memory_usage", "step_time_dict", "decode_cuda_graph_bs", "decode_cuda_graph_memory_gb",
    "disaggregation_mode", "disable_overlap_schedule", "max_running_requests", "page_size",
    "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "speculative_adaptive", "tp_size", "dp_size",
})  # fmt: skip
ALLOWED_MEMORY: Final = frozenset({
    "weight", "kvcache", "startup_available", "token_capacity", "token_capacity_swa", "graph",
})  # fmt: skip
_SUMMED: Final = ("max_running_requests", "max_total_num_tokens")
_SMALLEST: Final = ("context_length", "max_req_input_len")


def merge(found: Sequence[Info]) -> Info:
    """One server's facts for the pair: `found` are the answers, the speculative one first.

    Raises ValueError when there is none.
    """
    if not found:
        raise ValueError("no server to describe")
    merged = {name: value for name, value in found[0].items() if name in ALLOWED}
    for name in _SUMMED:
        _put(merged, name, found, sum)
    for name in _SMALLEST:
        _put(merged, name, found, min)
    if "status" in merged:
        merged["status"] = next((s for f in found if (s := f.get("status")) != "ready"), "ready")
    if "dp_size" in merged:
        merged["dp_size"] = 1
    states = [_states(info) for info in found]
    if any(states):
        merged["internal_states"] = [_state(states)]
    return merged


def _states(info: Info) -> list[Info]:
    """The states of one server's data-parallel ranks, redacted."""
    listed = info.get("internal_states")
    return [
        {name: value for name, value in state.items() if name in ALLOWED_STATE}
        for state in (listed if isinstance(listed, list) else [])
        if isinstance(state, dict)
    ]


def _state(states: Sequence[list[Info]]) -> Info:
    """All ranks of both servers as one."""
    ranks = [state for listed in states for state in listed]
    merged = dict(ranks[0])
    for name in ("effective_max_running_requests_per_dp", "last_gen_throughput"):
        _put(merged, name, ranks, sum)
    if "dp_size" in merged:
        merged["dp_size"] = 1
    lengths = _numbers(states[0], "avg_spec_accept_length")
    if lengths:
        merged["avg_spec_accept_length"] = sum(lengths) / len(lengths)
    memories = [m for rank in ranks if isinstance(m := rank.get("memory_usage"), dict)]
    if memories:
        memory = {name: value for name, value in memories[0].items() if name in ALLOWED_MEMORY}
        for name in ("weight", "kvcache", "token_capacity"):
            _put(memory, name, memories, sum)
        merged["memory_usage"] = memory
    return merged


def _put(merged: Info, name: str, found: Iterable[Info], combine: Combine) -> None:
    """Combine the numbers of this name, where there are any."""
    numbers = _numbers(found, name)
    if numbers:
        merged[name] = combine(numbers)


def _numbers(found: Iterable[Info], name: str) -> list[float]:
    return [
        value
        for info in found
        if isinstance(value := info.get(name), int | float) and not isinstance(value, bool)
    ]
