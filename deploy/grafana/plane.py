"""The plane of both concurrencies: the line, where the load was, and where it is.

An XY chart pairs two columns of one table, and Prometheus gives a value and labels. So m is made a
label (`count_values`), joined to n, and the label's column is made a number again in Grafana. The
tables are told apart by their place: the path first, since only the line can be missing.
"""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import common as widgets
from grafana_foundation_sdk.builders import xychart
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.xychart import SeriesMapping, XYShowMode

from deploy.grafana.style import BAD, BOTH, ROUTER, SOURCE, SPECULATIVE, describe, properties, table

# Grafana takes the options of a panel without a version for those of the beta before 11.1.
PLUGIN_VERSION: Final = "11.6.0"
CONCURRENCY: Final = f"crossover_concurrency{{{ROUTER},backend"
POINT: Final = f"crossover_frontier_point{{{ROUTER},axis"
WHERE: Final = (
    f'sum by (instance) ({CONCURRENCY}="speculative"}}) * on (instance) group_left (m)'
    f' count_values by (instance) ("m", {CONCURRENCY}="baseline"}})'
)
# Sorted by n: the line runs one way only, so that is its order.
FRONTIER: Final = (
    f'sort(sum by (instance, point) ({POINT}="n"}}) * on (instance, point) group_left (m)'
    f' count_values by (instance, point) ("m", {POINT}="m"}}))'
)


class Versioned(Builder[dashboard.Panel]):
    """A panel with the version of the plugin that its options are for."""

    def __init__(self, panel: Builder[dashboard.Panel]) -> None:
        self._panel = panel

    def build(self) -> dashboard.Panel:
        """Build the panel."""
        built = self._panel.build()
        built.plugin_version = PLUGIN_VERSION
        return built


def _series(name: str, place: int) -> xychart.XYSeriesConfig:
    """One table as points: n, which is the value, across, and m up."""

    def matcher(kind: str, options: object) -> xychart.MatcherConfig:
        return xychart.MatcherConfig().id(kind).options(options)

    return (
        xychart.XYSeriesConfig()
        .name(xychart.XychartXYSeriesConfigName().fixed(name))
        .frame(xychart.XychartXYSeriesConfigFrame().matcher(matcher("byIndex", place)))
        .x(xychart.XychartXYSeriesConfigX().matcher(matcher("byRegexp", "/^Value/")))
        .y(xychart.XychartXYSeriesConfigY().matcher(matcher("byName", "m")))
    )


def panel() -> Builder[dashboard.Panel]:
    """The chart (Grafana 11.1 and newer)."""
    number = {"targetField": "m", "destinationType": "number"}
    built = (
        xychart.Panel()
        .title("The plane and its line")
        .description(
            describe(
                "n, requests on the speculative server, across; m, on the baseline, up. A request "
                "speculates while the pair is on the left of the blue line, or below it; grey is "
                "where the load was, red where it is. With several routers choose one above.",
                good="grey dots along one axis: the pair keeps to one side and crosses the line "
                "seldom.",
                bad="a cloud around the line (the pair flips), dots far beyond the line on n, or "
                "no line (the policy in force has none, or says always).",
                do="for a cloud, widen the band or the dwell; for dots beyond the line, see "
                "*Decisions by reason* (pinned, unavailable) and who else uses the server.",
            )
        )
        .datasource(SOURCE)
        .unit("none")
        .min(0)
        .height(11)
        .span(9)
        .no_value("no router is scraped")
        .mapping(SeriesMapping.MANUAL)
        .series([_series("where it was", 0), _series("the line", 1), _series("now", 2)])
        .with_target(table(WHERE, "path", instant=False))
        .with_target(table(FRONTIER, "line", instant=True))
        .with_target(table(WHERE, "now", instant=True))
        .with_transformation(
            dashboard.DataTransformerConfig(
                id_val="convertFieldType", options={"fields": {}, "conversions": [number]}
            )
        )
        .legend(
            widgets.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
        .tooltip(widgets.VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE))
    )
    for ref, colour, values in (
        ("path", BOTH, {"custom.show": XYShowMode.POINTS, "custom.pointSize.fixed": 5}),
        ("line", SPECULATIVE, {"custom.show": XYShowMode.LINES, "custom.lineWidth": 2}),
        ("now", BAD, {"custom.show": XYShowMode.POINTS, "custom.pointSize.fixed": 12}),
    ):
        fixed = {"color": {"mode": "fixed", "fixedColor": colour}}
        built = built.override_by_query(ref, properties(fixed | values))
    across = {"custom.axisLabel": "n, on the speculative server"}
    built = built.override_by_regexp("/^Value/", properties(across))
    up = {"custom.axisLabel": "m, on the baseline server"}
    return Versioned(built.override_by_name("m", properties(up)))
