"""The row on errors and the router itself."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard

from deploy.grafana.speed import logarithmic
from deploy.grafana.style import (
    BAD,
    DOTS,
    GOOD,
    RATE,
    ROUTER,
    WARN,
    Rule,
    describe,
    lines,
    marked,
    quantile,
    query,
    stacked,
    states,
    words,
)

# Faults of a server red, of the way there purple, ours and clients' in quieter colours.
OUTCOMES: Final[tuple[Rule, ...]] = tuple(
    (f"/^{name}$/", {"color": {"mode": "fixed", "fixedColor": colour}})
    for name, colour in (
        ("backend_error", "red"),
        ("backend_lost", "dark-red"),
        ("timeout", "purple"),
        ("refused", "yellow"),
        ("broken", "dark-purple"),
        ("rejected", "super-light-yellow"),
        ("client_error", "light-green"),
        ("client_gone", "semi-dark-green"),
    )
)
FAILED: Final = "backend_error|backend_lost|timeout|refused|broken"
REQUESTS: Final = f"crossover_requests_total{{{ROUTER},"
# Process metrics have no prefix of ours: those of a process that is a router.
OURS: Final = f"and on (instance, job) crossover_build_info{{{ROUTER}}}"


def panels() -> list[Builder[dashboard.Panel]]:
    """Two lines."""
    return [
        _outcomes(),
        _failures(),
        _own_answers(),
        _alerts(),
        _overhead(),
        _connections(),
        _process(),
    ]


def _outcomes() -> Builder[dashboard.Panel]:
    return stacked(
        lines(
            "Requests that did not end well",
            describe(
                "Requests a second by outcome, without `ok`.",
                good="nothing, or a little green (clients that left, clients' own errors).",
                bad="red: a server failed or was cut off; purple: it did not answer in time; "
                "yellow: it refused work.",
                do="*Failures by server* says which; `/decisions` and the access log have each one "
                "with its error.",
            ),
            "reqps",
            query(f'sum by (outcome) (rate({REQUESTS}outcome!="ok"}}{RATE}))', "{{outcome}}", "A"),
            rules=OUTCOMES,
        )
    )


def _failures() -> Builder[dashboard.Panel]:
    return marked(
        lines(
            "Failures by server",
            describe(
                "Share of the requests sent to a server that it failed, refused or lost.",
                good="0.",
                bad="above 1 % for minutes; the breaker opens on failures in a row.",
                do="that server's log; take it out with `POST /backends/{role}/drain` while you "
                "look.",
            ),
            "percentunit",
            query(
                f'sum by (backend) (rate({REQUESTS}backend!="none",outcome=~"{FAILED}"}}{RATE})) / '
                f'clamp_min(sum by (backend) (rate({REQUESTS}backend!="none"}}{RATE})), 0.001)',
                "{{backend}}",
                "A",
            ),
        ),
        (None, "transparent"),
        (0.01, WARN),
        (0.05, BAD),
    )


def _own_answers() -> Builder[dashboard.Panel]:
    return lines(
        "Answered by the router, sent twice",
        describe(
            "Requests that the router answered itself, by reason, and requests that it sent a "
            "second time, by kind. Nothing is shown while there are none.",
            good="nothing.",
            bad="`no_backend`, `queue_full`, `queue_timeout`, `overloaded`: no room. `replay_*`: "
            "connections to a server break. `internal_error`: a fault of the router.",
            do="room: see *Queued*; replays: that server restarts or its keep-alive is shorter than "
            "configured; `internal_error`: please report the log line.",
        ),
        "reqps",
        query(
            f"sum by (reason) (rate(crossover_rejected_total{{{ROUTER}}}{RATE})) > 0",
            "answered: {{reason}}",
            "A",
        ),
        query(
            f"sum by (kind) (rate(crossover_retries_total{{{ROUTER}}}{RATE})) > 0",
            "sent twice: {{kind}}",
            "B",
        ),
    )


def _alerts() -> Builder[dashboard.Panel]:
    panel = states(
        "Alerts firing",
        describe(
            "Each alert for as long as it fires, of any rule in Prometheus.",
            good="empty.",
            bad="a strip that reaches the right edge.",
            do="what the alert's annotations say.",
        ),
        query(
            'max by (alertname, backend) (ALERTS{alertstate="firing"})',
            "{{alertname}} {{backend}}",
            "A",
        ),
        width=6,
        height=8,
        none="no alert",
    )
    return panel.mappings(words({1: ("firing", BAD), 0: ("over", GOOD)}))


def _overhead() -> Builder[dashboard.Panel]:
    return logarithmic(
        lines(
            "Router overhead",
            describe(
                "From a request's arrival until it is sent on, without time in the router's queue: "
                "the decision and, now and then, a new connection.",
                good="p50 below a millisecond.",
                bad="p50 of milliseconds: the router's core is full.",
                do="see *Router process*; a router has one process by design, so put "
                "another pair with its router beside it.",
            ),
            "s",
            *(
                query(quantile(share, "crossover_overhead_seconds"), f"router {name}", name)
                for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
            ),
            width=6,
            height=8,
        )
    )


def _connections() -> Builder[dashboard.Panel]:
    return lines(
        "Connections",
        describe(
            "Open connections of clients (idle ones included), and to each server (busy and idle).",
            good="busy equals *In flight*; idle ones come and go.",
            bad="clients' connections that only grow.",
            do="look for a client that does not close; `--max-connections` bounds them.",
        ),
        "none",
        query(f"sum(crossover_client_connections{{{ROUTER}}})", "router: clients", "A"),
        query(
            f"sum by (backend, state) (crossover_backend_connections{{{ROUTER}}})",
            "{{backend}} {{state}}",
            "B",
        ),
        width=6,
        height=8,
        rules=(("/ idle$/", {"custom.lineStyle": DOTS}),),
    )


def _process() -> Builder[dashboard.Panel]:
    memory: dict[str, object] = {"unit": "bytes", "custom.axisPlacement": "right"}
    return lines(
        "Router process",
        describe(
            "Share of one core that each router uses (left), and its memory (right). It uses one "
            "core at most.",
            good="below 70 % of a core, memory flat.",
            bad="at 100 %: overhead grows for everybody. Memory that only grows.",
            do="share the load with another pair; memory: please report it with `/metrics`.",
        ),
        "percentunit",
        query(f"rate(process_cpu_seconds_total{RATE}) {OURS}", "CPU {{instance}}", "A"),
        query(f"process_resident_memory_bytes {OURS}", "memory {{instance}}", "B"),
        width=6,
        height=8,
        rules=(("/^memory/", memory), ("/^CPU/", {"custom.fillOpacity": 15})),
    )


def events() -> tuple[tuple[str, str, str], ...]:
    """Name, colour and query of each. A window of two steps, so that none falls between two."""
    taken = f"crossover_calibration_loads_total{{{ROUTER},result"
    return (
        ("Router restarted", BAD, f"changes(process_start_time_seconds[2m]) > 0 {OURS}"),
        ("Calibration taken", GOOD, f'increase({taken}="ok"}}[2m]) > 0'),
        ("Calibration refused", WARN, f'increase({taken}="refused"}}[2m]) > 0'),
        (
            "Side changed",
            "purple",
            f'changes(crossover_side{{{ROUTER},backend="speculative"}}[2m]) > 0',
        ),
    )
