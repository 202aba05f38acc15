"""`/metrics` of a simulated server: SGLang's names, labels and help, built as plain text.

Only what somebody may want to read is here, about a third of the real page; what is here has the
same type and the same labels. Gauges are those of the last refresh (every 40 decode steps, each
prefill, and when idle), as in the real one.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final

from loadtest.engine_core import Generation
from loadtest.engine_request import Wanted

if TYPE_CHECKING:
    from loadtest.engine_server import SimulatedServer

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
    0.0, 0.001, 0.002, 0.003, 0.004, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7,
    0.8, 0.9, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 100.0, 200.0, 300.0, 400.0,
    500.0, 1000.0, 2000.0, 3000.0,
)  # fmt: skip


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
        self.ttft[stream].observe(first - received)
        self.e2e[stream].observe(end - received)
        gaps = tokens - len(generation.sequences)
        if gaps > 0:
            self.itl.observe((end - first) * len(generation.sequences) / gaps, gaps)


GAUGES: Final = (
    ("num_running_reqs", "The number of running requests."),
    ("num_queue_reqs", "The number of requests in the waiting queue."),
    ("num_grammar_queue_reqs", "The number of requests in the grammar waiting queue."),
    ("gen_throughput", "The generation throughput (token/s)."),
    ("cache_hit_rate", "The prefix cache hit rate."),
    ("token_usage", "The token usage."),
    ("num_used_tokens", "The number of used tokens."),
    ("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool."),
    ("utilization", "The utilization."),
    ("spec_accept_length", "The average acceptance length of speculative decoding."),
    ("spec_accept_rate", "The average acceptance rate of speculative decoding."),
    ("spec_num_steps", "Active number of speculative steps."),
    ("spec_num_draft_tokens", "Active number of speculative draft tokens."),
    ("context_len", "Model context length."),
    ("page_size", "KV cache page size."),
)


def page(server: SimulatedServer) -> bytes:
    """The whole page."""
    config, core, recorder = server.config, server.core, server.recorder
    label = f'engine_type="unified",model_name="{config.model}"'
    ranks = f'{label},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    report, pace, total = core.gauges, core.pace, core.batch.counters()
    spec = config.speculates
    values: dict[str, float] = {
        "num_running_reqs": report.running,
        "num_queue_reqs": report.waiting,
        "gen_throughput": pace.tokens_s,
        "token_usage": round(report.used_tokens / config.max_total_tokens, 2),
        "num_used_tokens": report.used_tokens,
        "max_total_num_tokens": config.max_total_tokens,
        "spec_accept_length": pace.accept_length if spec else 0.0,
        "spec_accept_rate": max(0.0, (pace.accept_length - 1) / 3) if spec else 0.0,
        "spec_num_steps": 3 if spec else 0,
        "spec_num_draft_tokens": 4 if spec else 0,
        "context_len": config.context_length,
        "page_size": 1,
    }
    lines = []
    for name, text in GAUGES:
        lines += _head(name, text, "gauge")
        lines.append(f"sglang:{name}{{{ranks}}} {float(values.get(name, 0.0))}")
    for name, text, pair in (
        ("prompt_tokens_total", "Number of prefill tokens processed.", recorder.prompt_tokens),
        (
            "generation_tokens_total",
            "Number of generation tokens processed.",
            recorder.output_tokens,
        ),
        ("num_requests_total", "Number of requests processed.", recorder.requests),
    ):
        lines += _head(name, text, "counter")
        for stream in (0, 1):
            lines.append(f"sglang:{name}{{{_streaming(label, stream)}}} {float(pair[stream])}")
    if spec:
        lines += _head("spec_verify_calls_total", "Number of speculative verify calls.", "counter")
        lines.append(f"sglang:spec_verify_calls_total{{{label}}} {float(total.verify_calls)}")
    lines += _head("num_aborted_requests_total", "Number of requests aborted.", "counter")
    lines.append(f"sglang:num_aborted_requests_total{{{label}}} {float(total.aborted)}")
    for name, text, pair_of in (
        (
            "time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            recorder.ttft,
        ),
        (
            "e2e_request_latency_seconds",
            "Histogram of End-to-end request latency in seconds",
            recorder.e2e,
        ),
    ):
        lines += _head(name, text, "histogram")
        for stream in (0, 1):
            lines += pair_of[stream].lines(f"sglang:{name}", _streaming(label, stream))
    for name, text, histogram, labels in (
        (
            "inter_token_latency_seconds",
            "Histogram of inter-token latency in seconds.",
            recorder.itl,
            label,
        ),
        ("queue_time_seconds", "Histogram of queueing time in seconds.", recorder.queue, ranks),
    ):
        lines += _head(name, text, "histogram")
        lines += histogram.lines(f"sglang:{name}", labels)
    return ("\n".join([*lines, *_http(server)]) + "\n").encode()


def _http(server: SimulatedServer) -> list[str]:
    lines = _head("http_requests_total", "Total number of HTTP requests by endpoint.", "counter")
    lines += [
        f'sglang:http_requests_total{{endpoint="{path}",method="{method}"}} {float(count)}'
        for (path, method), count in server.requests.items()
    ]
    lines += _head("http_responses_total", "Total number of HTTP responses.", "counter")
    lines += [
        f'sglang:http_responses_total{{endpoint="{path}",method="{method}",status_code="{status}"}}'
        f" {float(count)}"
        for (path, method, status), count in server.responses.items()
    ]
    return lines


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP sglang:{name} {text}", f"# TYPE sglang:{name} {kind}"]


def _streaming(label: str, stream: int) -> str:
    engine, model = label.split(",", 1)
    return f'{engine},is_streaming="{"true" if stream else "false"}",{model}'
