"""The result files of SGLang's own benchmarks.

Pure. Formats as written by sglang 0.5.5 and as in the source of 0.5.23
(`python/sglang/benchmark/{serving,one_batch_server}.py`):

* `sglang.benchmark.serving` appends one object per run. `max_concurrency` is the closed loop's
  level; without it the run was open (`request_rate`, possibly `Infinity`), and its mean
  `concurrency` is taken. `server_info` is the whole of `/server_info`, keys included: only the
  settings named below are read. `accept_length` is a mean since the server's start.
* `bench_one_batch_server` sends `batch_size` requests at once and waits for all. Its
  `output_throughput` leaves the prefill out (batch x output / (latency - last_ttft)); here the
  whole `latency` counts, as in a sweep. `acc_length` is -1 without speculation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from loadtest.points import Fact, Measured, Sweep
from loadtest.values import ResultsError, at, count, number, positive, seconds, text
from router.load import Role

# In /server_info -> in a fingerprint. Nothing else of it may get into a file that people share.
_SETTINGS: Final = {
    "model_path": "model",
    "speculative_draft_model_path": "draft",
    "tp_size": "tp_size",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "attention_backend": "attention",
    "page_size": "page_size",
    "disable_overlap_schedule": "disable_overlap_schedule",
    "speculative_algorithm": "speculative_algorithm",
    "speculative_num_steps": "speculative_num_steps",
    "speculative_eagle_topk": "speculative_eagle_topk",
    "speculative_num_draft_tokens": "speculative_num_draft_tokens",
}
# A run whose mean concurrency is below this share of its level is mostly start and end.
_HELD: Final = 0.8


def serving(documents: Sequence[Mapping[str, Any]], name: str) -> list[Sweep]:
    """One sweep for each load (dataset and lengths) in the file. Raises ResultsError."""
    loads: dict[tuple[tuple[str, Fact], ...], list[Mapping[str, Any]]] = {}
    for document in documents:
        loads.setdefault(tuple(_serving_load(document).items()), []).append(document)
    return [
        Sweep(
            name=name,
            kind="sglang.benchmark.serving",
            points=tuple(_serving_point(document) for document in group),
            facts=_server_facts(group[0].get("server_info")) | dict(load),
            remarks=tuple(remark for document in group for remark in _serving_remarks(document)),
            cap=_cap(group[0].get("server_info")),
            role=_serving_role(group),
        )
        for load, group in loads.items()
    ]


def _serving_load(document: Mapping[str, Any]) -> dict[str, Fact]:
    found: dict[str, Fact] = {}
    dataset = text(document, "dataset_name")
    if dataset is not None:
        found["dataset"] = dataset
    if dataset is not None and dataset.startswith("random"):
        for key, word in (
            ("random_input_len", "prompt_tokens"),
            ("random_output_len", "output_tokens"),
        ):
            if (value := number(document, key)) is not None:
                found[word] = value
    return found


def _serving_point(document: Mapping[str, Any]) -> Measured:
    level = positive(document, "max_concurrency") or positive(document, "concurrency")
    speed = number(document, "output_throughput")
    if level is None or speed is None:
        raise ResultsError("a run has neither max_concurrency nor concurrency, or no throughput")
    return Measured(
        concurrency=level,
        tokens_per_second=speed,
        ttft=seconds(positive(document, "median_ttft_ms")),
        ttft_tail=seconds(positive(document, "p99_ttft_ms")),
        time_per_token=seconds(positive(document, "median_tpot_ms")),
        time_per_token_tail=seconds(positive(document, "p99_tpot_ms")),
        accept_length=positive(document, "accept_length"),
        requests=count(document, "completed"),
        seconds=number(document, "duration"),
    )


def _serving_remarks(document: Mapping[str, Any]) -> list[str]:
    level, mean = positive(document, "max_concurrency"), positive(document, "concurrency")
    if level is None:
        return [f"open load, mean concurrency {mean or 0.0:.1f}"]
    if mean is not None and mean < _HELD * level:
        return [
            f"{level:g} requests: only {mean:.1f} on average; more prompts would hold the level"
        ]
    return []


def _serving_role(documents: Sequence[Mapping[str, Any]]) -> Role | None:
    info = [d["server_info"] for d in documents if isinstance(d.get("server_info"), dict)]
    if any(text(i, "speculative_algorithm") for i in info):
        return Role.SPECULATIVE
    if any(positive(document, "accept_length") for document in documents):
        return Role.SPECULATIVE
    return Role.BASELINE if info else None


def _server_facts(info: Any) -> dict[str, Fact]:
    found: dict[str, Fact] = {
        word: value
        for key, word in _SETTINGS.items()
        if isinstance(value := at(info, key), str | int | float | bool)
    }
    if (version := text(info, "version")) is not None:
        found["engine"] = f"sglang {version}"
    return found


def _cap(info: Any) -> int | None:
    states = at(info, "internal_states")
    if isinstance(states, list) and states:
        each = count(states[0], "effective_max_running_requests_per_dp")
        if each:
            return each * (count(info, "dp_size") or 1)
    return count(info, "max_running_requests")


def one_batch(documents: Sequence[Mapping[str, Any]], name: str) -> list[Sweep]:
    """One sweep for each pair of lengths in the file. Raises ResultsError."""
    loads: dict[tuple[float | None, float | None], list[Measured]] = {}
    for document in documents:
        lengths = number(document, "input_len"), number(document, "output_len")
        loads.setdefault(lengths, []).append(_batch(document))
    return [
        Sweep(
            name=name,
            kind="bench_one_batch_server",
            points=tuple(points),
            facts={
                word: value
                for word, value in (("prompt_tokens", prompt), ("output_tokens", output))
                if value is not None
            },
            remarks=("one batch at a time: all requests of a level start together",),
            role=Role.SPECULATIVE if any(p.accept_length for p in points) else Role.BASELINE,
        )
        for (prompt, output), points in loads.items()
    ]


def _batch(document: Mapping[str, Any]) -> Measured:
    batch, latency = positive(document, "batch_size"), positive(document, "latency")
    each = positive(document, "output_len")
    if batch is None or latency is None or each is None:
        raise ResultsError("a line has no batch_size, output_len or latency")
    tokens = positive(document, "total_output_tokens") or batch * each
    first = positive(document, "last_ttft")
    decode = None if first is None or each < 2 else (latency - first) / (each - 1)
    return Measured(
        concurrency=batch,
        tokens_per_second=tokens / latency,
        ttft=first,
        ttft_tail=first,
        time_per_token=decode if decode and decode > 0 else None,
        accept_length=positive(document, "acc_length"),
        requests=int(batch),
        seconds=latency,
    )
