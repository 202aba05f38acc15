"""The row on the two servers: the router's view of them and their own, side by side."""

from __future__ import annotations

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard

from deploy.grafana.style import (
    BAD,
    DOTS,
    ROUTER,
    WARN,
    describe,
    lines,
    marked,
    of_servers,
    query,
)


def panels() -> list[Builder[dashboard.Panel]]:
    """One line of four."""
    return [_running(), _queued(), _room(), _age()]


def _running() -> Builder[dashboard.Panel]:
    return lines(
        "Running",
        describe(
            "Requests that run on each server: as the router's telemetry has it, and as the "
            "server's own metrics have it (dashed).",
            good="the lines of one colour lie on each other and follow *In flight*.",
            bad="a server that runs more than the router has in flight: others use it too.",
            do="give the other clients the router's address, or leave them: their share counts in "
            "*Load and threshold*.",
        ),
        "none",
        query(f"sum by (backend) (crossover_telemetry_running{{{ROUTER}}})", "{{backend}}", "A"),
        query(of_servers("sglang:num_running_reqs"), "{{backend}}, by the server", "B"),
        width=6,
    )


def _queued() -> Builder[dashboard.Panel]:
    return lines(
        "Queued",
        describe(
            "Requests that wait inside each server (dashed: by its own metrics), and in the router's "
            "own queue (grey).",
            good="0, with short peaks.",
            bad="a queue that grows: the pair gets more than it can do.",
            do="new work already goes to the other server; when both queue, add a pair or set "
            "`--queue-size` and `--max-in-flight` so that clients are refused early.",
        ),
        "none",
        query(f"sum by (backend) (crossover_telemetry_queued{{{ROUTER}}})", "{{backend}}", "A"),
        query(of_servers("sglang:num_queue_reqs"), "{{backend}}, by the server", "B"),
        query(f"sum(crossover_queue_waiting{{{ROUTER}}})", "router's own queue", "C"),
        width=6,
    ).axis_soft_max(4)


def _room() -> Builder[dashboard.Panel]:
    running = f"crossover_telemetry_running{{{ROUTER}}}"
    slots = f"{running} / crossover_telemetry_max_running{{{ROUTER}}}"
    return marked(
        lines(
            "KV cache and slots used",
            describe(
                "Share of each server's KV cache in use (dashed: by its own metrics), and of the "
                "requests that it runs at once at most (dotted).",
                good="below 90 % at peak load.",
                bad="KV cache near 100 %: requests are pushed back and computed again. Slots at "
                "100 %: it queues.",
                do="KV: a larger `--mem-fraction-static`, a smaller draft, shorter contexts. Slots: "
                "`--max-running-requests`; the line never goes above the speculative server's.",
            ),
            "percentunit",
            query(
                f"max by (backend) (crossover_telemetry_token_usage{{{ROUTER}}})",
                "{{backend}}",
                "A",
            ),
            query(of_servers("sglang:token_usage", over="max"), "{{backend}}, by the server", "B"),
            query(f"max by (backend) ({slots})", "{{backend}} slots", "C"),
            width=6,
            rules=(("/ slots$/", {"custom.lineStyle": DOTS}),),
        ),
        (None, "transparent"),
        (0.9, WARN),
        (1.0, BAD),
    )


def _age() -> Builder[dashboard.Panel]:
    return marked(
        lines(
            "Age of telemetry",
            describe(
                "Time since each server last told the router its load.",
                good="below 2 s, from when on it counts as absent (`--telemetry-stale`).",
                bad="a line that climbs: the router decides by its own count alone and does not see "
                "other clients.",
                do="the server's `/v1/loads` or `/metrics` is slow or gone: see its log and "
                "`/status`.",
            ),
            "s",
            query(
                f"max by (backend) (crossover_telemetry_age_seconds{{{ROUTER}}})",
                "{{backend}}",
                "A",
            ),
            width=6,
        ),
        (None, "transparent"),
        (2, WARN),
    )
