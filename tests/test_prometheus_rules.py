"""The recording rules and alerts: that promtool takes them, that they ask for what there is.

No Prometheus runs here; what needs promtool is skipped where there is none.
"""

from __future__ import annotations

import datetime as dt
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.engine import EngineConfig, running_engine
from router.load import ROLES
from tests.calibrations import document, planted
from tests.stack import run, running_router

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "deploy" / "prometheus"
RULE_FILES = sorted(FOLDER.glob("rules/*.yml"))
CAPTURED = HERE / "data" / "telemetry" / "base-32.metrics.txt"  # a real server's page
# What Prometheus itself knows of every target.
OF_PROMETHEUS = {"up"}
WORDS = {
    "and", "or", "unless", "on", "ignoring", "by", "without", "group_left", "group_right",
    "offset", "bool",
}  # fmt: skip


def rules() -> list[dict[str, Any]]:
    """All rules of all files."""
    found = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in RULE_FILES]
    return [rule for file in found for group in file["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDED = {rule["record"] for rule in rules() if "record" in rule}


def promtool(*arguments: str | Path) -> str:
    """Run promtool, which must be content, and return what it says."""
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def names_of(expr: str) -> set[str]:
    """The metrics that an expression of PromQL asks for."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', "", expr)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", text)
    text = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    found = re.findall(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", text)
    return set(found) - WORDS


def matched(expr: str) -> Iterator[tuple[str, str]]:
    """Each label and value that an expression selects or leaves out."""
    for inside in re.findall(r"\{([^}]*)\}", expr):
        for label, values in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', inside):
            for value in values.split("|"):
                yield label, value


def series_of(page: str) -> set[str]:
    """The names that a page of metrics has or will have: of a family without a sample too."""
    found: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE):
        found |= (
            {f"{name}_{part}" for part in ("bucket", "count", "sum")}
            if kind == "histogram"
            else {name}
        )
    return found


async def pages(folder: Path) -> tuple[str, str]:
    """The metrics of a router with a calibration, and of a simulated server."""
    path = folder / "calibration.json"
    made = dt.datetime.now(dt.UTC).isoformat()
    path.write_bytes(document(16, curves=planted(), created=made))
    async with (
        running_engine(EngineConfig.quick("speculative")) as one,
        running_engine(EngineConfig.quick("baseline")) as other,
        running_router(one.url, other.url, calibration=path) as stack,
        httpx.AsyncClient(trust_env=False, timeout=10) as client,
    ):
        assert (await stack.chat(max_tokens=4)).status_code == 200
        router = await client.get(f"{stack.admin_url}/metrics")
        engine = await client.get(f"{one.url}/metrics")
    return router.text, engine.text


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The page of a router that runs and that of a simulated server."""
    found: list[tuple[str, str]] = []

    async def look() -> None:
        found.append(await pages(tmp_path_factory.mktemp("live")))

    run(look, 30)
    return found[0]


def test_the_configuration_is_taken(tmp_path: Path) -> None:
    """Promtool takes prometheus.yml with its rules and a credentials file."""
    copy = Path(shutil.copytree(FOLDER, tmp_path / "prometheus"))
    key = tmp_path / "admin.key"
    key.write_text("k" * 32, encoding="ascii")
    path = copy / "prometheus.yml"
    text = path.read_text(encoding="utf-8")
    assert "/run/crossover/admin.key" in text
    path.write_text(text.replace("/run/crossover/admin.key", str(key)), encoding="utf-8")
    said = promtool("check", "config", path)
    assert f"{len(RULE_FILES)} rule files found" in said


def test_the_rules_are_taken() -> None:
    """Promtool takes every rule, and counts as many as we do."""
    said = promtool("check", "rules", *RULE_FILES)
    assert sum(map(int, re.findall(r"(\d+) rules found", said))) == len(ALERTS) + len(RECORDED)


def test_the_alerts_fire_and_stay_silent() -> None:
    """The unit tests of the rules pass."""
    assert "SUCCESS" in promtool("test", "rules", FOLDER / "tests" / "alerts.yml")


def test_each_alert_is_tried_both_ways() -> None:
    """Every alert has a unit test in which it fires, and stays silent on the pair that is well."""
    tests = yaml.safe_load((FOLDER / "tests" / "alerts.yml").read_text(encoding="utf-8"))["tests"]
    fired = {
        one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]
    }
    healthy = next(test for test in tests if test["name"] == "healthy")
    silent = {one["alertname"] for one in healthy["alert_rule_test"] if not one["exp_alerts"]}
    assert fired == set(ALERTS)
    assert silent == set(ALERTS)


def test_each_alert_has_its_entry_in_the_runbook() -> None:
    """Headings of the runbook and alerts are the same, and each alert points at its own."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (\w+)\n\n(critical|warning)\. ", text, re.MULTILINE)
    assert dict(entries) == {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"deploy/prometheus/README.md#{name.lower()}"
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}


def test_names_are_found_in_expressions() -> None:
    """The reading of PromQL that the next tests lean on finds metrics, and only those."""
    expr = (
        'sum by (job, le) (rate(a_total{x="b"}[5m])) / on (c) group_left (d) (e:f:rate5m > 0.5)'
        " and changes(g[1h]) unless h == 1e6"
    )
    assert names_of(expr) == {"a_total", "e:f:rate5m", "g", "h"}
    assert list(matched('a{b=~"c|d", e!="f"}')) == [("b", "c"), ("b", "d"), ("e", "f")]


def test_rules_ask_for_metrics_that_exist(live: tuple[str, str]) -> None:
    """Every metric in a rule is on the page of a running router or server, or recorded by a rule."""
    router, engine = map(series_of, live)
    real = series_of(CAPTURED.read_text(encoding="utf-8"))
    known = router | OF_PROMETHEUS | RECORDED
    for rule in rules():
        asked = names_of(rule["expr"])
        assert asked, rule
        of_engine = {name for name in asked if name.startswith("sglang:")}
        assert of_engine <= engine & real, rule
        assert asked - of_engine <= known, rule
    assert {"crossover_in_flight", "process_start_time_seconds"} <= router


def test_rules_select_labels_that_exist(live: tuple[str, str]) -> None:
    """Every value that a rule selects by is one that the router or Prometheus gives."""
    given: set[tuple[str, str]] = {
        (label, value) for page in live for label, value in re.findall(r'(\w+)="([^"]*)"', page)
    }
    jobs = configured()
    given |= {("job", job["job_name"]) for job in jobs}
    for rule in rules():
        assert set(matched(rule["expr"])) <= given, rule


def configured() -> list[dict[str, Any]]:
    """The jobs of prometheus.yml."""
    found: list[dict[str, Any]] = yaml.safe_load(
        (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    )["scrape_configs"]
    return found


def test_both_servers_are_told_apart() -> None:
    """Each server is a target with its role as its label; the router's key comes from a file."""
    jobs = {job["job_name"]: job for job in configured()}
    assert set(jobs) == {"crossover", "sglang"}
    assert {
        (one["labels"]["backend"], *one["targets"]) for one in jobs["sglang"]["static_configs"]
    } == {("speculative", "speculative:31000"), ("baseline", "baseline:30000")}
    assert {one["labels"]["backend"] for one in jobs["sglang"]["static_configs"]} == set(ROLES)
    assert set(jobs["crossover"]["authorization"]) == {"credentials_file"}
