"""The top row: what a person looks at first. Every figure is of now, none of the last one known."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import stat

from deploy.grafana.style import (
    BAD,
    GOOD,
    NEUTRAL,
    RATE,
    ROUTER,
    SPECULATIVE,
    WARN,
    by_backend,
    describe,
    figures,
    query,
    steps,
    words,
)
from router.drift import BOUND

WIDTHS: Final = (3, 2, 3, 3, 3, 3, 3, 2, 2)
DAY_S: Final = 86_400.0


def panels() -> list[stat.Panel]:
    """All of them, left to right."""
    found = [
        *_pair(),
        *_calibration(),
        *_traffic(),
    ]
    return [panel.span(width) for panel, width in zip(found, WIDTHS, strict=True)]


def _pair() -> list[stat.Panel]:
    speculation = figures(
        "Speculation",
        describe(
            "Whether the speculative server really speculates, by what it says of itself and by its "
            "counters.",
            good="active.",
            bad="LOST: it answers, but as a slower baseline (a flag that SGLang dropped in silence).",
            do="run `crossover doctor`, read the server's log for the speculative algorithm, restart "
            "it; until then set the policy to `baseline`.",
        ),
        "none",
        query(f"min(crossover_speculation_active{{{ROUTER}}})", "speculation", "A", instant=True),
    ).mappings(words({1: ("active", GOOD), 0: ("LOST", BAD)}))
    parity = figures(
        "Pair",
        describe(
            "Whether the two servers may be compared: same model, same limits, same settings but "
            "for speculation.",
            good="fair.",
            bad="UNFAIR: a difference other than speculation decides which server is faster.",
            do="`crossover doctor` names the difference and how to mend it; calibrate after that.",
        ),
        "none",
        query(f"min(crossover_pair_parity{{{ROUTER}}})", "pair", "A", instant=True),
    ).mappings(words({1: ("fair", GOOD), 0: ("UNFAIR", BAD)}))
    up = figures(
        "Servers",
        describe(
            "Whether each server answers probes and traffic.",
            good="both up.",
            bad="one DOWN: the other gets everything, whatever the line says.",
            do="look at that server's log and GPU; `/status` says which probe fails and since when.",
        ),
        "none",
        query(
            f"min by (backend) (crossover_backend_up{{{ROUTER}}})", "{{backend}}", "A", instant=True
        ),
    ).mappings(words({1: ("up", GOOD), 0: ("DOWN", BAD)}))
    return [speculation, parity, up]


def _calibration() -> list[stat.Panel]:
    verdict = figures(
        "Calibration",
        describe(
            "Whether the calibration in force is of these servers. *trusted*: same model, not "
            "swapped. *matches*: every flag that moves a curve is as it was measured.",
            good="yes and yes.",
            bad="not trusted: everything goes to the server that does not speculate. No match: the "
            "line may be at the wrong place.",
            do="`/status` lists the facts that differ; calibrate anew, or put the flag back.",
        ),
        "none",
        query(f"min(crossover_calibration_trusted{{{ROUTER}}})", "trusted", "A", instant=True),
        query(f"min(crossover_calibration_matches{{{ROUTER}}})", "matches", "B", instant=True),
        none="no calibration",
    ).mappings(words({1: ("yes", GOOD), 0: ("NO", BAD)}))
    age = figures(
        "Calibration age",
        describe(
            "Time since the calibration was measured.",
            good="younger than the last change of model, engine, driver or traffic.",
            bad="yellow after 30 days, red after 90: nobody has asked whether it still holds.",
            do="compare with *Speed against the calibration*; if that is off as well, sweep and "
            "calibrate anew.",
        ),
        "s",
        query(f"max(crossover_calibration_age_seconds{{{ROUTER}}})", "age", "A", instant=True),
        none="not said",
    ).thresholds(steps((None, GOOD), (30 * DAY_S, WARN), (90 * DAY_S, BAD)))
    drift = figures(
        "Speed / calibration",
        describe(
            "Measured speed of each server's requests over the speed that its curve says.",
            good="about 1.",
            bad=f"beyond 1/{BOUND} or {BOUND}: the curves are no longer these servers'.",
            do="look for another tenant on the GPU, another engine version or other traffic; "
            "calibrate anew if it stays.",
        ),
        "none",
        query(
            f"avg by (backend) (crossover_calibration_drift_ratio{{{ROUTER}}})",
            "{{backend}}",
            "A",
            instant=True,
        ),
        none="not known yet",
    )
    bounds = steps((None, BAD), (round(1 / BOUND, 2), GOOD), (BOUND, BAD))
    return [verdict, age, drift.decimals(2).thresholds(bounds)]


def _traffic() -> list[stat.Panel]:
    in_flight = figures(
        "In flight",
        describe(
            "Requests that the router has open on each server.",
            good="the speculative server below the threshold, or all on one side of the line.",
            bad="both high and growing: the pair is out of room, whatever the line says.",
            do="look at *Queued* and *KV cache and slots used*; add a pair or limit the clients.",
        ),
        "none",
        query(
            f"sum by (backend) (crossover_in_flight{{{ROUTER}}})", "{{backend}}", "A", instant=True
        ),
    )
    decided = f"crossover_decisions_total{{{ROUTER},backend"
    share = figures(
        "To speculative",
        describe(
            "Share of the decisions of the last moments that went to the speculative server.",
            good="near 100 % at low load, near 0 % at high load, without much time in between on "
            "servers that share a GPU.",
            bad="0 % at low load, or a share that swings back and forth.",
            do="*Decisions by reason* says why; flapping asks for a wider band or a longer dwell.",
        ),
        "percentunit",
        query(
            f'sum(rate({decided}="speculative"}}{RATE})) / (sum(rate({decided}!="none"}}{RATE})) > 0)',
            "share",
            "A",
            instant=True,
        ),
        none="no traffic",
    ).thresholds(steps((None, SPECULATIVE)))
    alerts = figures(
        "Alerts",
        describe(
            "Alerts that are firing in Prometheus, of any rule.",
            good="0.",
            bad="1 or more; *Alerts firing* below shows which and since when.",
            do="each alert's annotations name what to do.",
        ),
        "none",
        query('count(ALERTS{alertstate="firing"}) or vector(0)', "firing", "A", instant=True),
    ).thresholds(steps((None, GOOD), (1, BAD)))
    return [by_backend(in_flight.thresholds(steps((None, NEUTRAL)))), share, alerts]
