"""The result files of GuideLLM and AIPerf.

Pure. Formats as in files written by GuideLLM 0.5 (`benchmarks.json`; 0.2 to 0.4 kept the strategy
under `args`) and AIPerf 0.10 (`profile_export_aiperf.json`; before 0.9 the level was under
`input_config.loadgen`).

* GuideLLM: each benchmark is a level. Only strategies that hold a concurrency are levels of a
  sweep: `concurrent` (its `streams`) and `synchronous` (one). `output_tokens_per_second` is of all
  requests together; `inter_token_latency_ms` leaves the first token out, `time_per_output_token_ms`
  does not.
* AIPerf: one file is one level, from the profiling phase's `concurrency`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.points import Fact, Measured, Sweep
from loadtest.values import ResultsError, at, count, number, positive, seconds, text


def guidellm(documents: Sequence[Mapping[str, Any]], name: str) -> list[Sweep]:
    """One sweep for each report. Raises ResultsError when it holds no level."""
    return [_report(document, name) for document in documents]


def _report(document: Mapping[str, Any], name: str) -> Sweep:
    points: list[Measured] = []
    passed_over: list[str] = []
    for run in document["benchmarks"]:
        strategy = at(run, "config", "strategy") or at(run, "args", "strategy") or {}
        kind = text(strategy, "type_") or "unknown"
        level = 1.0 if kind == "synchronous" else None
        if kind == "concurrent":
            level = positive(strategy, "streams") or positive(strategy, "max_concurrency")
        if level is None:
            passed_over.append(kind)
        else:
            points.append(_guidellm_level(level, run))
    if not points:
        raise ResultsError(
            f"no benchmark in it holds a concurrency (there is {', '.join(passed_over) or 'none'}):"
            " run guidellm with --profile concurrent"
        )
    return Sweep(
        name=name,
        kind="GuideLLM",
        points=tuple(points),
        facts=_guidellm_facts(document),
        remarks=tuple(
            f"a {kind} benchmark holds no concurrency and was passed over" for kind in passed_over
        ),
    )


def _guidellm_level(level: float, run: Mapping[str, Any]) -> Measured:
    metrics = run["metrics"]
    speed = number(metrics, "output_tokens_per_second", "successful", "mean")
    if speed is None:
        raise ResultsError("a benchmark has no output_tokens_per_second")

    def ms(metric: str, *path: str) -> float | None:
        return seconds(positive(metrics, metric, "successful", *path))

    start, end = (
        number(run, "scheduler_metrics", f"measure_{side}_time") for side in ("start", "end")
    )
    return Measured(
        concurrency=level,
        tokens_per_second=speed,
        ttft=ms("time_to_first_token_ms", "median"),
        ttft_tail=ms("time_to_first_token_ms", "percentiles", "p99"),
        time_per_token=ms("inter_token_latency_ms", "median"),
        time_per_token_tail=ms("inter_token_latency_ms", "percentiles", "p99"),
        requests=count(metrics, "request_totals", "successful"),
        errors=count(metrics, "request_totals", "errored") or 0,
        seconds=None if start is None or end is None else end - start,
    )


def _guidellm_facts(document: Mapping[str, Any]) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    runs = document["benchmarks"]
    model = text(document, "args", "model") or text(runs[0], "config", "backend", "model")
    if model is not None:
        facts["model"] = model
    for key, word in (
        ("prompt_token_count", "prompt_tokens"),
        ("output_token_count", "output_tokens"),
    ):
        means = [positive(run, "metrics", key, "successful", "mean") for run in runs]
        known = [mean for mean in means if mean is not None]
        if known:
            facts[word] = round(statistics.fmean(known), 1)
    return facts


def aiperf(documents: Sequence[Mapping[str, Any]], name: str) -> list[Sweep]:
    """One level for each export. Raises ResultsError for one that held no concurrency."""
    return [
        Sweep(
            name=name,
            kind="AIPerf",
            points=(_aiperf_level(document),),
            facts=_aiperf_facts(document),
            remarks=("the run was cancelled",) if document.get("was_cancelled") is True else (),
        )
        for document in documents
    ]


def _aiperf_level(document: Mapping[str, Any]) -> Measured:
    level = positive(document, "input_config", "loadgen", "concurrency")
    phases = at(document, "input_config", "phases")
    for phase in phases if isinstance(phases, list) else []:
        if at(phase, "exclude_from_results") is not True:
            level = positive(phase, "concurrency") or level
    if level is None:
        raise ResultsError("the run held no concurrency: run aiperf profile with --concurrency")

    def ms(metric: str, statistic: str) -> float | None:
        return seconds(positive(document, metric, statistic))

    return Measured(
        concurrency=level,
        tokens_per_second=number(document, "output_token_throughput", "avg") or 0.0,
        ttft=ms("time_to_first_token", "p50"),
        ttft_tail=ms("time_to_first_token", "p99"),
        time_per_token=ms("inter_token_latency", "p50"),
        time_per_token_tail=ms("inter_token_latency", "p99"),
        requests=count(document, "request_count", "avg"),
        errors=count(document, "error_request_count", "avg") or 0,
        seconds=number(document, "benchmark_duration", "avg"),
    )


def _aiperf_facts(document: Mapping[str, Any]) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    names = at(document, "input_config", "endpoint", "model_names")
    models = at(document, "input_config", "models", "items")
    model = names[0] if isinstance(names, list) and names else None
    if model is None and isinstance(models, list) and models:
        model = text(models[0], "name")
    if isinstance(model, str):
        facts["model"] = model
    for key, word in (
        ("input_sequence_length", "prompt_tokens"),
        ("output_sequence_length", "output_tokens"),
    ):
        if (mean := positive(document, key, "avg")) is not None:
            facts[word] = round(mean, 1)
    return facts
