"""Write the dashboard's JSON, or say whether the one that is checked in is stale.

    python -m deploy.grafana.dashboard            write deploy/grafana/dashboards/crossover.json
    python -m deploy.grafana.dashboard --check    exit code 1 if it is not what the code says

Built with the types of Grafana 11.6, as a dashboard of schema version 41 (the classic model), which
Grafana 11.1 to 12 show whole. Grafana 10 imports it as well, but for the XY chart of the plane,
whose options were others then.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from deploy.grafana import deciding, first, operation, servers, speed
from deploy.grafana.style import SOURCE

JSON_FILE: Final = Path(__file__).resolve().parent / "dashboards" / "crossover.json"
UID: Final = "crossover"
DATA_SOURCE: Final = "crossover-prometheus"  # as in provisioning/datasources/prometheus.yaml
TITLES: Final = {
    "deciding": "Deciding: where the load is, and why requests go where they go",
    "speed": "Speed: what users feel, by server",
    "servers": "The servers: as the router sees them, and by themselves",
    "operation": "Errors, and the router itself",
}


class Annotation(dashboard.AnnotationQuery):
    """Events from a query, with the words of a marker, which the library has no field for."""

    def to_json(self) -> dict[str, object]:
        """Say it on the marker; the step bounds how exact its place is."""
        words = {"titleFormat": self.name, "textFormat": "{{instance}} {{version}}", "step": "60s"}
        return super().to_json() | words


class _Numbered(Builder[dashboard.Panel]):
    """A panel with a number, which links to it hold on to."""

    def __init__(self, panel: Builder[dashboard.Panel], number: int) -> None:
        self._panel = panel
        self._number = number

    def build(self) -> dashboard.Panel:
        built = self._panel.build()
        built.id_val = self._number
        return built


class _Annotated(Builder[dashboard.AnnotationQuery]):
    def __init__(self, name: str, colour: str, expr: str) -> None:
        self._built = Annotation(
            name=name, datasource=SOURCE, icon_color=colour, expr=expr, enable=True, hide=False
        )

    def build(self) -> dashboard.AnnotationQuery:
        return self._built


def build() -> dashboard.Dashboard:
    """The whole dashboard."""
    board = (
        boards.Dashboard("Crossover")
        .uid(UID)
        .description(
            "A pair of SGLang servers, one speculative, one baseline, and the router that decides "
            "for each request. Blue is speculative and orange is baseline, everywhere."
        )
        .tags(["crossover", "sglang"])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .editable()
    )
    for variable in _variables():
        board = board.with_variable(variable)
    for name, colour, expr in operation.events():
        board = board.annotation(_Annotated(name, colour, expr))
    number = 1
    for panel in first.panels():
        board = board.with_panel(_Numbered(panel, number))
        number += 1
    for row, module in enumerate((deciding, speed, servers, operation), start=1):
        title = TITLES[module.__name__.rpartition(".")[2]]
        board = board.with_row(boards.Row(title).id(100 * row))
        for place, panel in enumerate(module.panels(), start=1):
            board = board.with_panel(_Numbered(panel, 100 * row + place))
    return board.build()


def _variables() -> list[Builder[dashboard.VariableModel]]:
    """The data source, and which routers and servers, all of them at first."""
    source = (
        boards.DatasourceVariable("datasource")
        .label("Data source")
        .type("prometheus")
        .current(dashboard.VariableOption(text="Prometheus", value=DATA_SOURCE))
    )
    instances = [
        boards.QueryVariable(name)
        .label(label)
        .description(text)
        .datasource(SOURCE)
        .query(f"label_values({metric}, instance)")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(dashboard.VariableOption(text="All", value="$__all"))
        for name, label, text, metric in (
            ("router", "Router", "Which routers, by address.", "crossover_build_info"),
            ("engine", "Server", "Which SGLang servers, by address.", "sglang:num_running_reqs"),
        )
    ]
    return [source, *instances]


def text() -> str:
    """The JSON, one line for each value, keys in order: readable in a diff."""
    return json.dumps(build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether the file is stale.")
    ] = False,
    output: Annotated[Path, typer.Option(help="The file.")] = JSON_FILE,
) -> None:
    """Write the dashboard's JSON."""
    wanted = text()
    if not check:
        output.parent.mkdir(exist_ok=True)
        output.write_text(wanted, encoding="utf-8")
        typer.echo(f"{output.name}: written")
        return
    found = output.read_text(encoding="utf-8") if output.exists() else ""
    if found != wanted:
        typer.echo(f"{output.name} is not what the code says: run make dashboard", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
