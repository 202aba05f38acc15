"""Facts of a sound pair, and for each of the doctor's rules what spoils them and what does not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from router.doctor_facts import Pair, ServerFacts
from router.doctor_reading import Bodies, read_facts

DATA = Path(__file__).parent / "data"
VARIANTS = DATA / "server_info"
CAPTURED = DATA / "sglang-0.5.17"

Changes = dict[str, Any]


def info(name: str) -> bytes:
    """The body of one variant."""
    return (VARIANTS / f"{name}.json").read_bytes()


def body_of(name: str) -> bytes:
    """The body of a captured response."""
    return (CAPTURED / name).read_bytes().partition(b"\r\n\r\n")[2]


def canary(verify: int | None, output: int = 64, prompt: int = 40) -> bytes:
    """What /generate answers; without verify steps the keys are absent, as captured."""
    meta: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if verify is not None:
        meta |= {"spec_verify_ct": verify, "spec_accept_length": output / verify}
    return json.dumps({"text": "", "meta_info": meta}).encode()


def facts_of(variant: str, **more: Any) -> ServerFacts:
    """The facts of a variant with the usual pages beside it; `more` goes into the bodies."""
    loads = {"accelerator": "NVIDIA H200", "loads": [{"max_running_requests": 256}]}
    models = {"data": [{"id": "llama-8b", "max_model_len": 131_072}]}
    speculates = b"EAGLE" in info(variant) and b'"speculative_algorithm": null' not in info(variant)
    bodies: dict[str, Any] = {
        "models": json.dumps(models).encode(),
        "loads": json.dumps(loads).encode(),
        "metrics": b"sglang:num_running_reqs 0.0\n",
        "canary": canary(24 if speculates else None),
    }
    return read_facts(Bodies(server_info=info(variant), **(bodies | more)))


def captured() -> Pair:
    """The pair that was captured, all of its pages included."""
    found = []
    for role, name in (("k1", "eagle3-topk1"), ("base", "baseline")):
        found.append(
            read_facts(
                Bodies(
                    server_info=info(f"captured-0.5.17-{name}"),
                    models=body_of(f"{role}/v1_models.resp.http"),
                    loads=body_of(f"{role}/v1_loads.resp.http"),
                    metrics=(CAPTURED / role / "load_metrics.trimmed.txt").read_bytes(),
                    canary=body_of(f"{role}/native_generate.resp.http"),
                )
            )
        )
    return Pair(found[0], found[1])


def sound() -> Pair:
    """A pair of 0.5.23 in which every rule can be judged and none finds anything."""
    return Pair(facts_of("written-0.5.23-eagle3"), facts_of("written-0.5.23-baseline"))


def changed(pair: Pair, spec: Changes, base: Changes, threshold: float | None = None) -> Pair:
    """The pair with other facts."""
    return Pair(
        msgspec.structs.replace(pair.speculative, **spec),
        msgspec.structs.replace(pair.baseline, **base),
        pair.threshold if threshold is None else threshold,
    )


@dataclass(frozen=True)
class Case:
    """Changes to the sound pair, and what the rule then says: a severity, or nothing."""

    spec: Changes = field(default_factory=dict)
    base: Changes = field(default_factory=dict)
    severity: str | None = "spoils"
    threshold: float | None = None
    seen: str = ""  # a part of what was seen
    mend: str = ""  # a part of the advice


OLD = {"release": (0, 5, 12), "version": "0.5.12"}
CASES: dict[str, list[Case]] = {
    "speculation-off": [
        Case({"algorithm": "off"}, seen="though its command line asks for speculation"),
        Case({"algorithm": "off", "asked": None, "speculative_draft_model_path": "none"},
             seen="speculative_algorithm is null"),
        Case({"algorithm": "off"}, {"algorithm": "EAGLE3"}, mend="swap them"),
        Case({"algorithm": "NGRAM"}, severity=None),
    ],
    "overlap-off": [
        Case({"disable_overlap_schedule": True}, mend="leave out --disable-overlap-schedule"),
        Case({**OLD, "disable_overlap_schedule": True}, mend="--speculative-eagle-topk 1"),
        Case({"disable_overlap_schedule": True, "algorithm": "off"}, severity=None),
    ],
    "topk-old": [
        Case({**OLD, "speculative_eagle_topk": 4}, seen="speculative_eagle_topk 4 on 0.5.12"),
        Case({"release": (0, 5, 9), "version": "0.5.9", "speculative_eagle_topk": 2}),
        Case({**OLD, "speculative_eagle_topk": 1}, severity=None),
        Case({"release": (0, 5, 13), "speculative_eagle_topk": 4}, severity=None),
        Case({"release": (0, 6, 0), "speculative_eagle_topk": 4}, severity=None),
    ],
    "topk-tree": [
        Case({"speculative_eagle_topk": 4}, severity="warning", mend="topk 1 too"),
        Case({"release": (0, 5, 13), "speculative_eagle_topk": 4}, severity="warning"),
        Case({**OLD, "speculative_eagle_topk": 4}, severity=None),
        Case({"speculative_eagle_topk": 10, "algorithm": "NGRAM"}, severity=None),
    ],
    "spec-v2-env": [
        Case({"env": {"SGLANG_ENABLE_SPEC_V2": "1"}}, severity="warning"),
        Case({"env": {"SGLANG_ENABLE_SPEC_V2": "1"}, "release": (0, 5, 14)}, severity="warning"),
        Case({"env": {"SGLANG_ENABLE_SPEC_V2": "False"}, "release": (0, 5, 13)},
             mend="SGLANG_ENABLE_SPEC_V2=1"),
        Case({"env": {"SGLANG_ENABLE_SPEC_V2": "true"}, "release": (0, 5, 13)}, severity=None),
    ],
    "verify-count": [
        Case({"canary_verify": 0}, seen="0 verify steps for a canary of 64 tokens"),
        Case({"canary_verify": None, "grown_tokens": 900.0, "grown_verify": 0.0},
             seen="0 verify steps for 900 tokens"),
        Case({"canary_verify": 0, "algorithm": "off"}, severity=None),
        Case({"canary_verify": None, "grown_tokens": 900.0, "grown_verify": 3.0}, severity=None),
    ],
    "accept-length": [
        Case({"canary_verify": 64, "accept_lifetime": 1.0}, seen="accept length 1.00",
             mend="--speculative-algorithm EAGLE3"),
        Case({"canary_verify": 63, "accept_lifetime": None}, seen="accept length 1.02"),
        Case({"accept_recent": 1.0}),
        Case({"canary_verify": 52, "accept_lifetime": 1.2}, severity="warning"),
        Case({"canary_verify": 64, "accept_lifetime": 2.5}, severity=None),
        Case({"canary_verify": 30, "accept_lifetime": 1.0}, severity=None),
        Case({"accept_recent": 1.0, "speculative_adaptive": True, "speculative_num_steps": 0},
             severity=None),
    ],
    "eagle-head": [
        Case({"algorithm": "EAGLE"}, severity="warning", mend="EAGLE3"),
        Case({"algorithm": "EAGLE", "speculative_draft_model_path": "org/EAGLE-llama"},
             severity=None),
    ],
    "adaptive-static": [
        Case({"asked": frozenset({"speculative-adaptive"}), "speculative_eagle_topk": 4},
             seen="topk is 4"),
        Case({"speculative_adaptive_config": "/etc/adaptive.json"}),
        Case({"asked": frozenset({"speculative-adaptive"}), "speculative_adaptive": True},
             severity=None),
    ],
    "adaptive-on": [
        Case({"speculative_adaptive": True}, severity="warning", seen="3 steps now"),
        Case({"speculative_adaptive": False}, severity=None),
    ],
    "simulated-acceptance": [
        Case({"env": {"SGLANG_SIMULATE_ACC_LEN": "2.8"}}),
        Case({"env": {"SGLANG_SIMULATE_ACC_LEN": "-1"}}, severity=None),
    ],
    "baseline-speculates": [
        Case({}, {"algorithm": "EAGLE3"}, seen="EAGLE3", mend="leave out every"),
        Case({"algorithm": "off"}, {"algorithm": "EAGLE3"}, mend="swap them"),
        Case({"algorithm": "off"}, {"algorithm": "off"}, severity=None),
    ],
    "baseline-verifies": [
        Case({}, {"canary_verify": 20}, seen="20 verify steps"),
        Case({}, {"algorithm": "EAGLE3", "canary_verify": 20}, severity=None),
        Case({}, {"canary_verify": None, "grown_tokens": 90.0, "grown_verify": 0.0},
             severity=None),
    ],
    "version": [
        Case({}, {"version": "0.5.22"}, seen="speculative 0.5.23, baseline 0.5.22"),
        Case({"version": "0.5.22"}, {"version": "0.5.22"}, severity=None),
    ],
    "model": [
        Case({}, {"model_path": "meta-llama/Llama-3.1-70B"}),
        Case({}, {"model_path": "/models/Llama-3.1-8B-Instruct"}, severity="warning"),
        Case({"model_path": "x"}, {"model_path": "x"}, severity=None),
    ],
    "weights": [
        Case({}, {"revision": "v2"}),
        Case({"json_model_override_args": '{"num_hidden_layers": 2}'}),
        Case({"revision": "v2"}, {"revision": "v2"}, severity=None),
    ],
    "random-weights": [
        Case({"load_format": "dummy"}),
        Case({"load_format": "dummy"}, {"load_format": "dummy"}, severity="warning"),
        Case({"load_format": "safetensors"}, severity=None),
    ],
    "served-name": [
        Case({}, {"served": ("other",)}, severity="warning"),
        Case({"served": ("a",)}, {"served": ("a",)}, severity=None),
    ],
    "tokenizer": [
        Case({"tokenizer_path": "other"}),
        Case({"tokenizer_path": "/m/Llama-3.1-8B-Instruct"}, severity="warning"),
        Case({"tokenizer_path": "x"}, {"tokenizer_path": "x"}, severity=None),
    ],
    "prompt-tokens": [
        Case({"canary_prompt": 41}, seen="speculative 41, baseline 40 tokens"),
        Case({"canary_prompt": 9}, {"canary_prompt": 9}, severity=None),
    ],
    "chat-template": [
        Case({"chat_template": "/etc/chat.jinja"}, seen="/etc/chat.jinja"),
        Case({}, {"hf_chat_template_name": "tool_use"}),
        Case({"chat_template": "x"}, {"chat_template": "x"}, severity=None),
    ],
    "context-length": [
        Case({"context": 8192}, seen="speculative 8192, baseline 131072"),
        Case({"context": 8192}, {"context": 8192}, severity=None),
    ],
    "quantization": [
        Case({"quantization": "fp8"}, seen="speculative fp8, baseline none"),
        Case({"quantization": "fp8"}, {"quantization": "fp8"}, severity=None),
    ],
    "dtype": [
        Case({"dtype": "float16"}, {"dtype": "bfloat16"}),
        Case({"dtype": "bfloat16"}, severity="warning"),
        Case({"dtype": "bfloat16"}, {"dtype": "bfloat16"}, severity=None),
    ],
    "kv-cache-dtype": [
        Case({}, {"kv_cache_dtype": "fp8_e4m3"}),
        Case({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e4m3"}, severity=None),
    ],
    "page-size": [
        Case({}, {"page_size": 64}),
        Case({"page_size": 64}, {"page_size": 64}, severity=None),
    ],
    "attention-backend": [
        Case({}, {"attention_backend": "trtllm_mha"}, mend="the same --attention-backend"),
        Case({"asked": frozenset()}, {"attention_backend": "trtllm_mha"},
             mend="--speculative-eagle-topk 1"),
        Case({"decode_attention_backend": "flashinfer"},
             seen="fa3 for prefill, flashinfer for decode"),
        Case({"prefill_attention_backend": "fa3"}, severity=None),
    ],
    "overlap": [
        Case({}, {"disable_overlap_schedule": True}),
        Case({"disable_overlap_schedule": True}, {"disable_overlap_schedule": True},
             severity=None),
    ],
    "parallelism": [
        Case({"tp_size": 2}, seen="tp_size: speculative 2, baseline 1"),
        Case({"tp_size": 2, "dp_size": 2}, {"tp_size": 2, "dp_size": 2}, severity=None),
    ],
    "accelerator": [
        Case({"accelerator": "NVIDIA B200"}),
        Case({"accelerator": "x"}, {"accelerator": "x"}, severity=None),
    ],
    "prefix-cache": [
        Case({}, {"disable_radix_cache": True}, seen="baseline true"),
        Case({"disable_radix_cache": True}, {"disable_radix_cache": True}, severity=None),
    ],
    "chunked-prefill": [
        Case({"chunked_prefill_size": 4096}, severity="warning"),
        Case({"chunked_prefill_size": -1}, {"chunked_prefill_size": -1}, severity=None),
    ],
    "other-flags": [
        Case({"stream_interval": 8}, {"schedule_policy": "lpm"}, severity="warning",
             seen="schedule_policy: speculative fcfs, baseline lpm; stream_interval"),
        Case({"stream_interval": None}, severity=None),
    ],
    "running-cap": [
        Case({"cap": 48, "asked": frozenset()}, {"cap": 4096}, seen="SGLang's own choice"),
        Case({"cap": 48, "asked": None}),
        Case({"cap": 48}, severity="warning"),  # typed: its command line has the flag
        Case({"cap": 128}, severity="warning"),
        Case({"cap": 48}, {"cap": 48}, severity=None),
    ],
    "cap-threshold": [
        Case({"cap": 48}, severity="warning", threshold=64.0, mend="--max-running-requests 64"),
        Case({"cap": 64}, severity=None, threshold=64.0),
        Case({"cap": 48}, severity=None, threshold=float("inf")),
    ],
    "graphs-off": [
        Case({"graph_ceiling": 0}, seen="no CUDA graphs on the speculative server"),
        Case({"graph_ceiling": 0}, {"graph_ceiling": 0}, severity="warning"),
        Case({"graph_ceiling": 1}, severity=None),
    ],
    "graph-ceiling": [
        Case({"graph_ceiling": 32}, threshold=64.0, seen="graphs to 32 requests, threshold 64"),
        Case({"graph_ceiling": 128}, severity="warning", seen="graphs to 128 requests, cap 256"),
        Case({"graph_ceiling": 64}, severity=None, threshold=64.0),
        Case({"graph_ceiling": 0}, severity=None),  # another rule's
        Case({"graph_ceiling": 32, "cap": 16}, severity=None, threshold=64.0),
    ],
    "kv-capacity": [
        Case({"max_total_num_tokens": 200_000}, severity="warning"),
        Case({"max_total_num_tokens": 300_000}, severity=None),
    ],
    "memory-fraction": [
        Case({"mem_fraction_static": 0.45}, severity="note"),
        Case({"mem_fraction_static": 0.5}, {"mem_fraction_static": 0.5}, severity=None),
    ],
    "metrics-off": [
        Case({"enable_metrics": False}, severity="warning", seen="enable_metrics is false"),
        Case({}, {"metrics_page": False}, severity="warning", seen="/metrics is missing"),
        Case({"enable_metrics": None}, severity=None),
    ],
    "api-key": [
        Case({"api_key": True}, severity="warning", seen="the speculative server wants a key"),
        Case({}, {"api_key": True}, severity="warning", seen="the baseline server wants a key"),
        Case({"api_key": True}, {"api_key": True}, severity=None),
    ],
    "zombies": [
        Case({"release": (0, 5, 16), "version": "0.5.16"}, severity="warning",
             seen="speculative 0.5.16"),
        Case({}, {"release": (0, 5, 18), "version": "0.5.18"}, severity="warning"),
        Case({"release": (0, 5, 15)}, {"release": (0, 5, 19)}, severity=None),
    ],
    "version-unknown": [
        Case({"release": None, "version": "main"}, severity="note", seen="version main"),
        Case({}, {"release": None, "version": None}, severity="note", seen="no version"),
        Case({"release": (1, 0, 0)}, severity=None),
    ],
}  # fmt: skip
