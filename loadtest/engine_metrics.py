"""`/metrics` of a simulated server: SGLang's names, labels and help, built as plain text.

Only what somebody may want to read is here, about a third of the real page; what is here has the
same type and the same labels. Gauges are those of the last refresh (every 40 decode steps, each
prefill, and when idle), as in the real one.

Counts are the batch's (`batching`); only what finished requests leave behind is kept here (`Recorder`).
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final

from loadtest.engine_generation import Generation
from loadtest.engine_request import Wanted

if TYPE_CHECKING:
    from loadtest.engine_server import SimulatedServer

DRAFT_STEPS: Final = 3
TTFT_BUCKETS: Final = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0,
    400.0,
)  # fmt: skip
E2E_BUCKETS: Final = (*TTFT_BUCKETS, 600.0, 1200.0, 1800.0, 2400.0)
ITL_BUCKETS: Final = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2,
    0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
)  # fmt: skip
QUEUE_BUCKETS: Final = (
    0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0,
    900.0, 1000.0, 1200.0, 1400.0, 1600.0, 1800.0, 2000.0, 2500.0, 3000.0,
)  # fmt: skip
ACCEPT_LENGTH_HELP: Final = (
    "Mean acceptance length of speculative decoding (accepted drafts + bonus token per forward)."
)
# Name, type and help of everything on the page.
HELP: Final = {
    "num_running_reqs": ("gauge", "The number of running requests."),
    "num_queue_reqs": ("gauge", "The number of requests in the waiting queue."),
    "num_grammar_queue_reqs": ("gauge", "The number of requests in the grammar waiting queue."),
    "gen_throughput": ("gauge", "The generation throughput (token/s)."),
    "cache_hit_rate": ("gauge", "The prefix cache hit rate."),
    "token_usage": ("gauge", "The token usage."),
    "num_used_tokens": ("gauge", "The number of used tokens."),
    "max_total_num_tokens": ("gauge", "Maximum total number of tokens in the KV cache pool."),
    "utilization": ("gauge", "The utilization."),
    "spec_accept_length": ("gauge", ACCEPT_LENGTH_HELP),
    "spec_accept_rate": (
        "gauge",
        "Speculative acceptance rate (`accepted drafts / proposed drafts` in batch).",
    ),
    "spec_num_steps": ("gauge", "Currently active speculative_num_steps."),
    "spec_num_draft_tokens": (
        "gauge",
        "Currently active speculative_num_draft_tokens (decouples from steps under topk>1).",
    ),
    "context_len": ("gauge", "Maximum context length."),
    "page_size": ("gauge", "KV cache page size in tokens."),
    "prompt_tokens_total": ("counter", "Number of prefill tokens processed."),
    "cached_tokens_total": ("counter", "Number of cached prompt tokens."),
    "generation_tokens_total": ("counter", "Number of generation tokens processed."),
    "num_requests_total": ("counter", "Number of requests processed."),
    "spec_verify_calls_total": ("counter", "Number of speculative decoding verification calls."),
    "num_aborted_requests_total": ("counter", "Number of requests aborted."),
    "time_to_first_token_seconds": ("histogram", "Histogram of time to first token in seconds."),
    "e2e_request_latency_seconds": (
        "histogram",
        "Histogram of End-to-end request latency in seconds",
    ),
    "inter_token_latency_seconds": ("histogram", "Histogram of inter-token latency in seconds."),
    "queue_time_seconds": ("histogram", "Histogram of queueing time in seconds."),
    "http_requests_total": ("counter", "Total number of HTTP requests by endpoint and method"),
    "http_responses_total": (
        "counter",
        "Total number of HTTP responses by endpoint and status code",
    ),
}


class Histogram:
    """Counts of a value in buckets, and its sum."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, several times if that many things had it."""
        self.counts[bisect.bisect_left(self.buckets, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> list[str]:
        """The samples; a bucket counts all that is not above it."""
        lines, total = [], 0
        for bound, count in zip((*self.buckets, float("inf")), self.counts, strict=True):
            total += count
            le = "+Inf" if bound == float("inf") else repr(bound)
            lines.append(f'{name}_bucket{{{labels},le="{le}"}} {float(total)}')
        return [
            *lines,
            f"{name}_count{{{labels}}} {float(total)}",
            f"{name}_sum{{{labels}}} {self.sum}",
        ]


class Recorder:
    """What finished requests leave behind. `stream` picks the first or the second of a pair."""

    def __init__(self) -> None:
        self.ttft = (Histogram(TTFT_BUCKETS), Histogram(TTFT_BUCKETS))
        self.e2e = (Histogram(E2E_BUCKETS), Histogram(E2E_BUCKETS))
        self.itl = Histogram(ITL_BUCKETS)
        self.queue = Histogram(QUEUE_BUCKETS)
        self.requests = [0, 0]
        self.prompt_tokens = [0, 0]
        self.output_tokens = [0, 0]
        self.verify_calls = 0  # of the same requests, as in the real one: the two are divided
        self.cached_tokens = 0
        self.refused = 0

    def observe(self, wanted: Wanted, generation: Generation, received: float, now: float) -> None:
        """Count a request that was accepted and has ended, one way or the other."""
        stream = int(wanted.stream)
        if generation.started_at:
            self.queue.observe(generation.started_at - generation.queued_at)
        if generation.closed or not generation.first_token_at:
            return
        first, end = generation.first_token_at, generation.finished_at or now
        tokens = generation.produced
        self.requests[stream] += 1
        self.prompt_tokens[stream] += wanted.prompt_tokens
        self.output_tokens[stream] += tokens
        self.verify_calls += generation.verify_steps
        self.cached_tokens += generation.cached
        self.ttft[stream].observe(first - received)
        self.e2e[stream].observe(end - received)
        gaps = tokens - len(generation.sequences)
        if gaps > 0:
            self.itl.observe((end - first) * len(generation.sequences) / gaps, gaps)


def page(server: SimulatedServer) -> bytes:
    """The whole page."""
    recorder, total = server.recorder, server.core.batch.counters()
    label = f'engine_type="unified",model_name="{server.config.model}"'
    ranks = f'{label},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    streams = [
        f'engine_type="unified",is_streaming="{word}",model_name="{server.config.model}"'
        for word in ("false", "true")
    ]
    lines = []
    for name, value in _gauges(server).items():
        lines += [*_head(name), _sample(name, ranks, value)]
    for name, pair in (
        ("prompt_tokens_total", recorder.prompt_tokens),
        ("generation_tokens_total", recorder.output_tokens),
        ("num_requests_total", recorder.requests),
    ):
        lines += _head(name)
        lines += [_sample(name, labels, n) for labels, n in zip(streams, pair, strict=True)]
    if recorder.cached_tokens:  # not there before the first hit, as in the real one
        source = f'cache_source="device",{label}'
        lines += _head("cached_tokens_total")
        lines.append(_sample("cached_tokens_total", source, recorder.cached_tokens))
    counters = {"num_aborted_requests_total": total.aborted}
    if server.config.speculates:
        counters["spec_verify_calls_total"] = recorder.verify_calls
    for name, count in counters.items():
        lines += [*_head(name), _sample(name, label, count)]
    for name, histograms in (
        ("time_to_first_token_seconds", zip(streams, recorder.ttft, strict=True)),
        ("e2e_request_latency_seconds", zip(streams, recorder.e2e, strict=True)),
        ("inter_token_latency_seconds", [(label, recorder.itl)]),
        ("queue_time_seconds", [(ranks, recorder.queue)]),
    ):
        lines += _head(name)
        for labels, histogram in histograms:
            lines += histogram.lines(f"sglang:{name}", labels)
    return ("\n".join([*lines, *_http(server)]) + "\n").encode()


def _gauges(server: SimulatedServer) -> dict[str, float]:
    config, core = server.config, server.core
    report, pace, spec = core.gauges, core.pace, config.speculates
    return {
        "num_running_reqs": report.running,
        "num_queue_reqs": report.waiting,
        "num_grammar_queue_reqs": 0,
        "gen_throughput": pace.tokens_s,
        "cache_hit_rate": 0,
        "token_usage": round(report.used_tokens / config.max_total_tokens, 2),
        "num_used_tokens": report.used_tokens,
        "max_total_num_tokens": config.max_total_tokens,
        "utilization": 0,
        "spec_accept_length": pace.accept_length if spec else 0,
        "spec_accept_rate": max(0, pace.accept_length - 1) / (config.draft_tokens - 1)
        if spec
        else 0,
        "spec_num_steps": DRAFT_STEPS if spec else 0,
        "spec_num_draft_tokens": config.draft_tokens if spec else 0,
        "context_len": config.context_length,
        "page_size": 1,
    }


def _http(server: SimulatedServer) -> list[str]:
    lines = _head("http_requests_total")
    for (path, method), count in server.requests.items():
        lines.append(_sample("http_requests_total", f'endpoint="{path}",method="{method}"', count))
    lines += _head("http_responses_total")
    for (path, method, status), count in server.responses.items():
        labels = f'endpoint="{path}",method="{method}",status_code="{status}"'
        lines.append(_sample("http_responses_total", labels, count))
    return lines


def _head(name: str) -> list[str]:
    kind, text = HELP[name]
    return [f"# HELP sglang:{name} {text}", f"# TYPE sglang:{name} {kind}"]


def _sample(name: str, labels: str, value: float) -> str:
    return f"sglang:{name}{{{labels}}} {float(value)}"
