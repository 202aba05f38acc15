"""The row on deciding: load against the line, decisions with their reasons, states."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard

from deploy.grafana import plane
from deploy.grafana.style import (
    BAD,
    BASELINE,
    GOOD,
    RATE,
    ROUTER,
    SPECULATIVE,
    WARN,
    Rule,
    describe,
    lines,
    properties,
    query,
    stacked,
    states,
    words,
)

SHADES: Final[tuple[Rule, ...]] = tuple(
    (f"/^{name}: /", {"color": {"mode": "shades", "fixedColor": colour}})
    for name, colour in (("speculative", SPECULATIVE), ("baseline", BASELINE), ("none", BAD))
)
WORDS: Final = (
    ("/^side/", {1: ("speculative", SPECULATIVE), 0: ("baseline", BASELINE)}),
    ("/ takes work$/", {1: ("yes", GOOD), 0: ("no", BAD)}),
    ("/ breaker$/", {0: ("closed", GOOD), 1: ("half open", WARN), 2: ("open", BAD)}),
    ("/ taken out$/", {0: ("in", GOOD), 1: ("taken out", WARN)}),
)


def panels() -> list[Builder[dashboard.Panel]]:
    """Two lines of them."""
    return [plane.panel(), _load(), _reasons(), _states()]


def _load() -> Builder[dashboard.Panel]:
    return lines(
        "Load and threshold",
        describe(
            "Concurrency (own requests and other clients' share) of each server and of both, with "
            "K in force, moved by acceptance, and K as calibrated or configured. A line over the "
            "total compares *both* with K, one over the speculative server compares *speculative*. "
            "Several routers are added up.",
            good="the speculative server carries the load while it is below K, the baseline carries "
            "it above.",
            bad="work on both servers of one GPU for long, or K in force far below the calibrated "
            "one.",
            do="compare the times with *Decisions by reason*; a low K follows a low accept length: "
            "see *Accept length*.",
        ),
        "none",
        query(f"sum by (backend) (crossover_concurrency{{{ROUTER}}})", "{{backend}}", "A"),
        query(f"sum(crossover_concurrency{{{ROUTER}}})", "both", "B"),
        query(f"sum(crossover_threshold{{{ROUTER}}})", "threshold", "C"),
        query(
            f"sum(crossover_threshold_configured{{{ROUTER}}})",
            "threshold, calibrated or configured",
            "D",
        ),
        width=15,
        height=11,
        rules=(("/^(speculative|baseline)$/", {"custom.fillOpacity": 15}),),
    )


def _reasons() -> Builder[dashboard.Panel]:
    return stacked(
        lines(
            "Decisions by reason",
            describe(
                "Decisions a second, blue for the speculative server, orange for the baseline, red "
                "for neither.",
                good="`below_threshold` at low load, `at_threshold`, `band` and `dwell` around the "
                "line and above.",
                bad="`unavailable`, `contended`, `queued`, `kv_cache`, `replay_*`: a server is in "
                "trouble and the line is not what decides. `never`: the calibration says not to "
                "speculate at all.",
                do="`/decisions?reason=...` lists them one by one with the load that each one saw.",
            ),
            "ops",
            query(
                f"sum by (backend, reason) (rate(crossover_decisions_total{{{ROUTER}}}{RATE})) > 0",
                "{{backend}}: {{reason}}",
                "A",
            ),
            width=12,
            rules=SHADES,
        )
    )


def _states() -> Builder[dashboard.Panel]:
    panel = states(
        "Side of the line, and who takes work",
        describe(
            "Which side the policy is on, and what stands against a server: health, breaker, an "
            "operator.",
            good="long strips of one side; everything else green.",
            bad="a side that changes every few seconds; a breaker that opens again and again.",
            do="flapping: widen the band or the dwell. Breaker: see *Failures by server* and that "
            "server's log. Taken out: `POST /backends/{role}/enable` brings it back.",
        ),
        query(f'max(crossover_side{{{ROUTER},backend="speculative"}})', "side", "A"),
        query(
            f"min by (backend) (crossover_backend_ready{{{ROUTER}}})", "{{backend}} takes work", "B"
        ),
        query(
            f"max by (backend) (crossover_breaker_state{{{ROUTER}}})", "{{backend}} breaker", "C"
        ),
        query(
            f"max by (backend) (crossover_backend_drained{{{ROUTER}}})",
            "{{backend}} taken out",
            "D",
        ),
        width=12,
    )
    for regexp, found in WORDS:
        panel = panel.override_by_regexp(regexp, properties({"mappings": words(found)}))
    return panel
