"""The Grafana dashboard as a document: fresh, complete, and of metrics that exist."""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from typer.testing import CliRunner

from deploy.grafana import dashboard, style
from deploy.grafana.charts import Span, on_grid
from deploy.grafana.looks import Series, number
from deploy.grafana.queries import all_queries, fill, metrics, panels, queries, shown
from loadtest.engine_metrics import HELP
from router.admin import create_admin_app
from router.calibrated import read_terms
from router.calibration_state import CalibrationState
from router.exposition import create_registry
from router.pair_watch import PairState
from router.policy import Reason
from tests.calibrations import document
from tests.fake_relay import UNIX, FakeRelay

FOLDER = dashboard.JSON_FILE.parent.parent
BOARD: dict[str, Any] = json.loads(dashboard.JSON_FILE.read_text(encoding="utf-8"))
PANELS = panels(BOARD)
QUERIES = all_queries(BOARD)
TITLES = [panel["title"] for panel in PANELS]


def catalogue() -> set[str]:
    """Every sample that a router with a calibration may export, by name."""
    relay = FakeRelay()
    content = document(16)
    terms = read_terms(content, relay.settings)
    relay.calibration = CalibrationState("c.json", content, terms, wall=lambda: UNIX)
    registry = create_registry(relay.metrics, relay)
    create_admin_app(relay, registry, pair=PairState())
    return exported(registry)


def exported(registry: CollectorRegistry) -> set[str]:
    found: set[str] = set()
    for line in generate_latest(registry).decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            found |= (
                {name, *(f"{name}_{part}" for part in ("bucket", "sum", "count"))}
                if (kind == "histogram")
                else {name}
            )
    return found


def test_the_file_is_what_the_code_says() -> None:
    """The JSON that is checked in is fresh: make dashboard would change nothing."""
    assert dashboard.JSON_FILE.read_text(encoding="utf-8") == dashboard.text()


def test_a_stale_file_is_said(tmp_path: Path) -> None:
    """The check of a file that is missing or old ends with 1 and says what to run; then it is 0."""
    app = typer.Typer()
    app.command()(dashboard.main)
    path = tmp_path / "dashboards" / "crossover.json"

    def run(*flags: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*flags, "--output", str(path)])
        return done.exit_code, done.output

    stale = (1, "crossover.json is not what the code says: run make dashboard\n")
    assert run("--check") == stale
    assert run() == (0, "crossover.json: written\n")
    assert run("--check") == (0, "")
    path.write_text(path.read_text(encoding="utf-8").replace("Speculation", "Speed"), "utf-8")
    assert run("--check") == stale


def test_every_metric_exists() -> None:
    """No panel and no annotation asks for a name that neither the router nor a server exports."""
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    known = {*catalogue(), *exported(process), *(f"sglang:{name}" for name in HELP), "ALERTS"}
    asked = {name for query in QUERIES for name in metrics(query.expr)}
    assert asked - known == set()
    assert {"crossover_frontier_point", "sglang:num_running_reqs", "ALERTS"} <= asked


def test_a_query_without_a_metric_is_a_mistake() -> None:
    """Each query names at least one metric, so the test above sees it."""
    assert [query.name for query in QUERIES if not metrics(query.expr)] == []


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_every_panel_explains_itself(panel: dict[str, Any]) -> None:
    """A title, a unit, a data source, queries, and what good and bad look like and what to do."""
    assert panel["title"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["fieldConfig"]["defaults"]["noValue"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]
    text = panel["description"]
    for part in ("**Good:**", "**Bad:**", "**Do:**"):
        assert len(text.partition(part)[2].strip()) > 3, part
    refs = [query.ref for query in queries(panel)]
    assert len(refs) == len(set(refs))


def test_panels_are_told_apart() -> None:
    """Titles and numbers are unique, and a description that names a panel names one that is there."""
    assert len(set(TITLES)) == len(TITLES)
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    named = {
        name
        for panel in PANELS
        for name in re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", panel["description"])
    }
    assert named - set(TITLES) == set()
    assert "Load and threshold" in named


def test_nothing_overlaps() -> None:
    """Panels lie within the 24 columns, fill their rows to the end, and none lies on another."""
    cells: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]),
                range(place["y"], place["y"] + place["h"]),
            )
        )
        assert not own & cells, panel["title"]
        cells |= own
    height = max(y for _, y in cells) + 1
    assert len(cells) == 24 * height


def test_a_backend_has_one_colour_everywhere() -> None:
    """Every panel of lines has the same rules for names, and no rule gives a backend another one."""
    for panel in PANELS:
        wanted = {"speculative": "blue", "baseline": "orange"}
        for override in panel["fieldConfig"].get("overrides", []):
            name = str(override["matcher"]["options"])
            for each in override["properties"]:
                role = next((role for role in wanted if role in name), None)
                if each["id"] == "color" and role is not None:
                    assert each["value"]["fixedColor"] == wanted[role], panel["title"]
        if panel["type"] == "timeseries":
            rules = [
                override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]
            ]
            assert rules[: len(style.RULES)] == [rule for rule, _ in style.RULES]


def test_the_plane_is_read_as_it_is_written() -> None:
    """The XY chart says its version (else Grafana takes its options for the beta's), and its places."""
    plane = next(panel for panel in PANELS if panel["type"] == "xychart")
    assert plane["pluginVersion"] >= "11.1"
    assert [target["refId"] for target in plane["targets"]] == ["path", "line", "now"]
    assert [target["format"] for target in plane["targets"]] == ["table"] * 3
    places = [each["frame"]["matcher"]["options"] for each in plane["options"]["series"]]
    assert places == [0, 1, 2]
    assert plane["transformations"][0]["id"] == "convertFieldType"


def test_the_panels_of_the_issue_are_there() -> None:
    """What a person must find: the plane, load, reasons, speed, acceptance, servers, errors."""
    wanted = {
        "The plane and its line", "Load and threshold", "Decisions by reason",
        "Output tokens per second", "Time to first chunk", "Time per chunk", "Accept length",
        "Queued", "KV cache and slots used", "Requests that did not end well", "Router overhead",
    }  # fmt: skip
    assert wanted <= set(TITLES)
    kinds = [panel["type"] for panel in PANELS]
    assert kinds[:9] == ["stat"] * 9
    assert {"xychart", "timeseries", "state-timeline"} <= set(kinds)


def test_reasons_in_the_text_are_reasons() -> None:
    """The reasons that the panel on decisions explains are those that the policy can give."""
    text = next(panel for panel in PANELS if panel["title"] == "Decisions by reason")["description"]
    named = set(re.findall(r"`([a-z_]+)`", text)) - {"replay_*"}
    assert named <= {reason.value for reason in Reason}
    assert "below_threshold" in named


def test_provisioning_and_dashboard_agree() -> None:
    """The data source's uid is the one that the dashboard asks for first; paths are the container's."""
    folder = FOLDER / "provisioning"
    source = lines_of(folder / "datasources" / "prometheus.yaml")
    variable = BOARD["templating"]["list"][0]
    assert (variable["name"], variable["type"]) == ("datasource", "datasource")
    assert variable["current"]["value"] == dashboard.DATA_SOURCE
    assert f"uid: {dashboard.DATA_SOURCE}" in source
    assert "url: http://prometheus:9090" in source
    assert "path: /var/lib/grafana/dashboards" in lines_of(folder / "dashboards" / "crossover.yaml")


def lines_of(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_variable_without_a_value_is_refused() -> None:
    """A query is sent with every variable filled in; a new one is not sent as it is."""
    assert fill('x{a=~"$router"}[$__rate_interval]', rate_interval="4s") == 'x{a=~".*"}[4s]'
    assert fill("${router}", rate_interval="4s", router="r:1") == "r:1"
    with pytest.raises(ValueError, match="pair"):
        fill('x{pair="$pair"}', rate_interval="4s")
    assert [q.name for q in QUERIES if "$" in fill(q.expr, rate_interval="4s")] == []


def test_a_restart_is_marked_once() -> None:
    """The annotation sees a router that came back, and neither a steady one nor another process."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian package prometheus) is not installed")
    (restart,) = [query for query in QUERIES if query.panel == "Router restarted"]
    series = {
        'crossover_build_info{instance="r",job="c"}': "1+0x20",
        'process_start_time_seconds{instance="r",job="c"}': "100+0x9 700+0x10",
        'crossover_build_info{instance="steady",job="c"}': "1+0x20",
        'process_start_time_seconds{instance="steady",job="c"}': "100+0x20",
        'process_start_time_seconds{instance="other",job="p"}': "5+9x20",
    }
    expr = fill(restart.expr, rate_interval="2m")
    seen = [{"labels": '{instance="r",job="c"}', "value": 1}]
    checks = [
        {"expr": expr, "eval_time": at, "exp_samples": found}
        for at, found in (("9m", []), ("10m", seen), ("11m", seen), ("13m", []))
    ]
    test = {
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": v} for name, v in series.items()],
                "promql_expr_test": checks,
            }
        ],
    }
    done = subprocess.run(
        [promtool, "test", "rules", "/dev/stdin"],
        input=json.dumps(test).encode(), capture_output=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_picture_writes() -> None:
    """Values have Grafana's units, a legend has its labels, and what is missing is a gap."""
    assert number(0.25, "percentunit") == "25 %"
    assert [number(value, "s") for value in (0.0, 0.00012, 0.02, 90.0)] == [
        "0 s", "120 µs", "20 ms", "1.5 min",
    ]  # fmt: skip
    assert number(1.0, "none", 2) == "1.00"
    assert shown("{{backend}}: {{ reason }}", {"backend": "none", "reason": "x"}) == "none: x"
    values = on_grid(Series("A", {}, "a", [(10.0, 1.0), (12.0, 3.0)]), Span(10.0, 13.0, 1.0))
    assert values[0] == 1.0
    assert math.isnan(values[1])
    assert values[2] == 3.0


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_small(path: Path) -> None:
    """The dashboard's code keeps to the sizes of the product's."""
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 300
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    assert [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= 60] == []
