"""Every query of the dashboard, asked of a real Prometheus that scrapes a running simulated stack.

One run feeds all tests: load below the line, above it and back; then trouble, so that the panels on
errors have something to show as well.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import uvloop

from deploy.grafana.dashboard import JSON_FILE
from deploy.grafana.prometheus_server import (
    Prometheus,
    PrometheusError,
    binary,
    configuration,
    running_prometheus,
)
from deploy.grafana.queries import Query, all_queries, fill
from deploy.grafana.trial import CROSSOVER, Trial, calibration_of, load, running_trial
from loadtest.record import RequestRecord
from router.load import Role
from tests.stack import until

QUERIES = all_queries(json.loads(JSON_FILE.read_text(encoding="utf-8")))
SCRAPE_S = 0.5
# What Grafana takes for $__rate_interval at this scrape interval.
RATE = f"{4 * SCRAPE_S * 1000:.0f}ms"
SPEED = 0.2  # the simulated servers are five times as fast as planted
# Empty while all is well, and here because they are provoked afterwards.
QUIET = {
    "Answered by the router, sent twice [A]",
    "Answered by the router, sent twice [B]",
    "Calibration taken [annotation]",
    "Calibration refused [annotation]",
}
# A process of its own would have to end: tests/test_dashboard.py has it with planted series.
ELSEWHERE = {"Router restarted [annotation]"}
SILENT = QUIET | ELSEWHERE
PATIENCE_S = 10.0  # for all queries together
Rows = list[dict[str, Any]]


class Seen(NamedTuple):
    """What came of the run."""

    well: dict[str, Rows]  # by the query's name, after load without trouble
    trouble: dict[str, Rows]
    records: list[RequestRecord]


def points(rows: Rows) -> list[float]:
    """All values that are numbers."""
    pairs = [pair for row in rows for pair in row.get("values") or [row["value"]]]
    return [value for _, text in pairs if math.isfinite(value := float(text))]


async def ask_all(
    prometheus: Prometheus, start: float, *, rate: str, loud: set[str]
) -> dict[str, Rows]:
    """Every query's rows. One that has to have data is asked for some seconds: a busy machine
    misses scrapes.
    """
    found: dict[str, Rows] = {}
    limit = time.monotonic() + PATIENCE_S
    for query in QUERIES:
        expr = fill(query.expr, rate_interval=rate)
        while True:
            end = time.time()
            rows = await (
                prometheus.at(expr, end)
                if query.instant
                else prometheus.between(expr, start, end, SCRAPE_S)
            )
            if points(rows) or query.name not in loud or time.monotonic() > limit:
                break
            await asyncio.sleep(SCRAPE_S / 2)
        found[query.name] = rows
    return found


async def until_scraped(prometheus: Prometheus, *exprs: str) -> None:
    """Wait until each of these has a row."""
    async with asyncio.timeout(15):
        for expr in exprs:
            while not await prometheus.at(expr):
                await asyncio.sleep(0.1)


async def cause_trouble(trial: Trial, prometheus: Prometheus) -> None:
    """An unreadable request, a calibration that is replaced and one that is refused, a dead server."""
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(trial.url + "/v1/chat/completions", content=b"{")
        assert answer.status_code == 400
    known = trial.router.relay.calibration
    assert known is not None
    urls = {role: engine.url for role, engine in trial.engines.items()}
    good = await calibration_of(urls, time_scale=SPEED, dwell=0.5)
    await asyncio.to_thread(trial.calibration.write_bytes, good)
    await until(lambda: known.loads["ok"] == 2)
    await asyncio.to_thread(trial.calibration.write_bytes, b"{}")
    await until(lambda: known.loads["refused"] >= 1)
    # Nobody there, which the router finds out by the next request: it is sent to the other one.
    trial.engines[Role.BASELINE].kill()
    running = asyncio.create_task(load(trial.url, (CROSSOVER + 8,), 1.2))
    await asyncio.sleep(0.8)
    trial.engines[Role.SPECULATIVE].cut()  # and streams that fail
    await running
    await until_scraped(
        prometheus,
        'crossover_backend_up{backend="baseline"} == 0',
        'crossover_requests_total{outcome="backend_lost"} > 0',
        'crossover_retries_total{kind="replay_connect"} > 0',
    )


async def watch(directory: Path) -> Seen:
    async with (
        running_trial(directory, time_scale=SPEED, dwell=0.5, health_interval=0.2) as trial,
        running_prometheus(
            directory,
            trial.admin,
            trial.servers,
            scrape=f"{SCRAPE_S * 1000:.0f}ms",
            alerts={"AlwaysThere": "vector(1)"},
        ) as prometheus,
    ):
        start = time.time()
        await until_scraped(prometheus, "sum(up) == 3")
        loading = asyncio.create_task(load(trial.url, (3, CROSSOVER + 8, 3, 3), 1.6))
        await asyncio.sleep(3.5 * 1.6)  # still under load: it shows what is now
        well = await ask_all(prometheus, start, rate=RATE, loud={q.name for q in QUERIES} - SILENT)
        records = await loading
        trouble = time.time()
        await cause_trouble(trial, prometheus)
        # A rate over all of it: one increase is seen whatever scrapes were missed.
        return Seen(well, await ask_all(prometheus, trouble, rate="20s", loud=QUIET), records)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    if binary() is None:
        pytest.skip("prometheus (Debian package prometheus) is not installed")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(watch(tmp_path_factory.mktemp("stack")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "query", [q for q in QUERIES if q.name not in SILENT], ids=lambda q: q.name
)
def test_every_query_returns_data(seen: Seen, query: Query) -> None:
    """Under load, on a healthy pair, each of them has a number to show."""
    assert points(seen.well[query.name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(QUIET))
def test_what_is_quiet_when_all_is_well_speaks_in_trouble(seen: Seen, name: str) -> None:
    """Empty on the healthy pair, and not after a fault."""
    assert points(seen.well[name]) == []
    assert points(seen.trouble[name])


@pytest.mark.slow
def test_the_first_row_tells_a_healthy_pair(seen: Seen) -> None:
    """The load was served, and every verdict of the top row is the good one."""
    assert {record.error for record in seen.records} == {None}
    for name in ("Speculation [A]", "Pair [A]", "Calibration [A]", "Calibration [B]"):
        assert points(seen.well[name]) == [1.0], name
    assert points(seen.well["Servers [A]"]) == [1.0, 1.0]
    assert 0 < points(seen.well["Calibration age [A]"])[0] < 60
    assert points(seen.well["Alerts [A]"]) == [1.0]
    assert 0 <= points(seen.well["To speculative [A]"])[0] <= 1
    assert {row["metric"]["backend"] for row in seen.well["In flight [A]"]} == {
        "speculative",
        "baseline",
    }


@pytest.mark.slow
def test_the_line_is_drawn_where_it_is(seen: Seen) -> None:
    """17 points in the order of n, each with n + m = K; the path has n as value and m as label."""
    rows = seen.well["The plane and its line [line]"]
    line = [(float(row["value"][1]), float(row["metric"]["m"])) for row in rows]
    assert len(line) == 17
    assert line == sorted(line)
    assert {n + m for n, m in line} == {float(CROSSOVER)}
    path = seen.well["The plane and its line [path]"]
    where = [(float(n), float(row["metric"]["m"])) for row in path for _, n in row["values"]]
    assert max(n + m for n, m in where) > CROSSOVER
    assert max(n for n, _ in where) > 0
    assert max(m for _, m in where) > CROSSOVER
    (now,) = seen.well["The plane and its line [now]"]
    assert float(now["metric"]["m"]) + float(now["value"][1]) <= 3


@pytest.mark.slow
def test_both_views_of_a_server_agree(seen: Seen) -> None:
    """The router's telemetry and the server's own gauge of running requests reach the same height."""
    peaks = []
    for ref in "AB":
        rows = seen.well[f"Running [{ref}]"]
        (baseline,) = (row for row in rows if row["metric"]["backend"] == "baseline")
        peaks.append(max(points([baseline])))
    assert peaks[0] > CROSSOVER
    assert abs(peaks[0] - peaks[1]) <= 8
    lengths = points(seen.well["Accept length [C]"])
    assert set(lengths) == {2.0}
    assert all(1.5 < value < 2.5 for value in points(seen.well["Accept length [A]"])[-3:])
    assert all(1.7 < value < 2.3 for value in points(seen.well["Accept length [B]"]))


@pytest.mark.slow
def test_quantiles_are_in_order(seen: Seen) -> None:
    """p50 is not above p95, nor p95 above p99, at any moment of any histogram."""
    titles = {query.panel for query in QUERIES if query.ref == "p99"}
    assert len(titles) == 4
    for title in titles:
        by_ref: dict[str, dict[tuple[str, float], float]] = {}
        for ref in ("p50", "p95", "p99"):
            by_ref[ref] = {
                (row["metric"].get("backend", ""), float(moment)): float(value)
                for row in seen.well[f"{title} [{ref}]"]
                for moment, value in row["values"]
                if value != "NaN"
            }
        for key, low in by_ref["p50"].items():
            assert low <= by_ref["p95"][key] <= by_ref["p99"][key], title


@pytest.mark.slow
def test_trouble_is_seen(seen: Seen) -> None:
    """The dead server is down, its failures have a share, and outcomes have their names."""
    up = {r["metric"]["backend"]: float(r["value"][1]) for r in seen.trouble["Servers [A]"]}
    assert up == {"speculative": 1.0, "baseline": 0.0}
    assert max(points(seen.trouble["Failures by server [A]"])) > 0
    outcomes = {
        row["metric"]["outcome"]: max(points([row]))
        for row in seen.trouble["Requests that did not end well [A]"]
    }
    assert outcomes["rejected"] > 0
    assert outcomes["backend_lost"] > 0
    kinds = {
        row["metric"]["kind"] for row in seen.trouble["Answered by the router, sent twice [B]"]
    }
    assert "replay_connect" in kinds
    reasons = {
        row["metric"]["reason"] for row in seen.trouble["Answered by the router, sent twice [A]"]
    }
    assert "invalid_body" in reasons


def test_prometheus_that_cannot_start_says_why(tmp_path: Path) -> None:
    """A rule that is none is an error with Prometheus' own words, and no process is left."""
    if binary() is None:
        pytest.skip("prometheus (Debian package prometheus) is not installed")

    @asynccontextmanager
    async def broken() -> AsyncIterator[Prometheus]:
        async with running_prometheus(
            tmp_path, "http://127.0.0.1:1", {}, alerts={"Broken": "sum("}
        ) as found:
            yield found

    async def work() -> None:
        async with broken():
            raise AssertionError("it started")

    with pytest.raises(PrometheusError, match=r"did not start: (?s:.*)Broken"):
        asyncio.run(work())


def test_the_scrape_has_the_shipped_labels() -> None:
    """Jobs and `backend` are those of the stack's own configuration."""
    text = configuration(
        "http://127.0.0.1:9400", {"baseline": "http://127.0.0.1:1"}, scrape="1s", rules=None
    )
    router, engines = json.loads(text)["scrape_configs"]
    assert (router["job_name"], engines["job_name"]) == ("crossover", "sglang")
    assert engines["static_configs"] == [
        {"targets": ["127.0.0.1:1"], "labels": {"backend": "baseline"}}
    ]
