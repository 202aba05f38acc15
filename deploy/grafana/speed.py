"""The row on speed: what users feel, by server, and what the calibration promised."""

from __future__ import annotations

from grafana_foundation_sdk.builders import common as widgets
from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard

from deploy.grafana.style import (
    RATE,
    ROUTER,
    WARN,
    describe,
    lines,
    marked,
    of_servers,
    quantile,
    query,
)
from router.drift import BOUND

QUANTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def panels() -> list[Builder[dashboard.Panel]]:
    """Two lines of three."""
    return [_tokens(), _first_chunk(), _chunk_gap(), _whole(), _accept_length(), _against()]


def logarithmic(panel: timeseries.Panel) -> timeseries.Panel:
    """The same with a scale on which a tail and a median are both seen; it has no zero."""
    scale = widgets.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
    return panel.scale_distribution(scale).min(0.00001)


def _quantiles(title: str, text: str, histogram: str) -> Builder[dashboard.Panel]:
    found = (
        query(quantile(share, histogram, "backend"), f"{{{{backend}}}} {name}", name)
        for share, name in QUANTILES
    )
    return lines(title, text, "s", *found)


def _tokens() -> Builder[dashboard.Panel]:
    return lines(
        "Output tokens per second",
        describe(
            "Solid: from the usage of requests as they end, so it lags by a request's length and "
            "lacks clients that do not ask for usage. Dashed: what the server itself measures, the "
            "median of the last moments.",
            good="at every load about the higher of the two calibrated curves.",
            bad="both servers busy and their sum below one curve alone (they share a GPU and are "
            "in each other's way).",
            do="compare with the calibration's curves at the load of *Load and threshold*; then "
            "*Speed against the calibration*.",
        ),
        "none",
        query(
            f"sum by (backend) (rate(crossover_output_tokens_total{{{ROUTER}}}{RATE}))",
            "{{backend}}",
            "A",
        ),
        query(of_servers("sglang:gen_throughput", median=True), "{{backend}}, by the server", "B"),
    )


def _first_chunk() -> Builder[dashboard.Panel]:
    return _quantiles(
        "Time to first chunk",
        describe(
            "From a streamed request's arrival to its first chunk, the router's own queue included. "
            "Solid p50, dashed p95, dotted p99.",
            good="the median near the length of a prefill, p99 within a few times of it.",
            bad="p99 of seconds while the median is low: requests queue behind long prefills; all "
            "three high: the server is full.",
            do="see *Queued* and *KV cache and slots used*; lower K or the server's cap, or add a pair.",
        ),
        "crossover_first_chunk_seconds",
    )


def _chunk_gap() -> Builder[dashboard.Panel]:
    return _quantiles(
        "Time per chunk",
        describe(
            "Between two chunks of a stream: a decode step. A chunk of the speculative server holds "
            "several tokens, so its step may take longer and still be faster per token.",
            good="steady for a steady load, rising with it.",
            bad="p99 of many steps: prefills of others stand in between, or the servers share a GPU "
            "and both work.",
            do="chunked prefill, or fewer overlaps (band, dwell).",
        ),
        "crossover_chunk_gap_seconds",
    )


def _whole() -> Builder[dashboard.Panel]:
    return _quantiles(
        "Whole requests",
        describe(
            "From arrival to the last byte of a complete answer.",
            good="follows the length of answers.",
            bad="grows at the same load and the same lengths of answer.",
            do="see which part grows: *Time to first chunk* or *Time per chunk*.",
        ),
        "crossover_request_seconds",
    )


def _accept_length() -> Builder[dashboard.Panel]:
    live = f"max(crossover_accept_length_ratio{{{ROUTER}}})"
    calibrated = f"max(crossover_accept_length_calibrated{{{ROUTER}}})"
    return lines(
        "Accept length",
        describe(
            "Tokens per verify step: the server's own gauge, the smoothed figure that moves the "
            "line, and what the calibration was measured with.",
            good="live about the calibrated one.",
            bad="well below: this traffic is harder to draft than what was calibrated with, and "
            "the line moves towards the baseline.",
            do="a lasting change asks for a calibration with prompts like today's; 1 means that "
            "nothing is accepted: see *Speculation* and the draft model.",
        ),
        "none",
        query(
            of_servers("sglang:spec_accept_length", over="max", backend="speculative"),
            "{{backend}}, by the server",
            "A",
        ),
        query(f"{live} * {calibrated}", "speculative, smoothed", "B"),
        query(calibrated, "speculative, calibrated", "C"),
    ).min(1)


def _against() -> Builder[dashboard.Panel]:
    return marked(
        lines(
            "Speed against the calibration",
            describe(
                "Measured speed of requests over what the calibration's curve says at their load; "
                "1 is as promised. Absent until enough was seen.",
                good=f"between the dashed marks, 1/{BOUND} and {BOUND}.",
                bad="outside for minutes: engine, GPU, flags or traffic have changed.",
                do="`/status` gives the advice with its reasons; calibrate anew.",
            ),
            "none",
            query(
                f"avg by (backend) (crossover_calibration_drift_ratio{{{ROUTER}}})",
                "{{backend}}",
                "A",
            ),
        ),
        (None, "transparent"),
        (round(1 / BOUND, 2), WARN),
        (BOUND, WARN),
    ).axis_soft_max(1.5)
