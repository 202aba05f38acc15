"""What all panels share: queries, colours, lines, and how a description is made.

Pure: it builds values of grafana-foundation-sdk and reads or writes nothing. A backend has one
colour everywhere, and the legend's words decide how a line is drawn, so that no panel can differ:

    speculative ...         blue                    ... p95                     dashed
    baseline ...            orange                  ... p99                     dotted
    both, router            grey                    ..., by the server          dashed
    threshold ...           the colour of text      ... calibrated              dotted

The names of colours are Grafana's own, which it shades for the light and for the dark theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from grafana_foundation_sdk.builders import common as widgets
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE: Final = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
# What the routers and the servers export is chosen by their instances; all of them by default.
ROUTER: Final = 'instance=~"$router"'
# With priority scheduling SGLang has a row for each priority beside the total.
ENGINE: Final = 'instance=~"$engine",priority=""'
RATE: Final = "[$__rate_interval]"

SPECULATIVE: Final = "blue"
BASELINE: Final = "orange"
BOTH: Final = "#8e8e8e"
LINE: Final = "text"
GOOD: Final = "green"
WARN: Final = "yellow"
BAD: Final = "red"
NEUTRAL: Final = "text"

DASH: Final = {"fill": "dash", "dash": [8, 5]}
DOTS: Final = {"fill": "dot", "dash": [1, 5]}

Rule = tuple[str, dict[str, object]]
"""A regular expression of a legend, and what a line of that name has."""

RULES: Final[tuple[Rule, ...]] = (
    ("/^speculative/", {"color": {"mode": "fixed", "fixedColor": SPECULATIVE}}),
    ("/^baseline/", {"color": {"mode": "fixed", "fixedColor": BASELINE}}),
    ("/^(both|router)/", {"color": {"mode": "fixed", "fixedColor": BOTH}}),
    (
        "/^threshold/",
        {
            "color": {"mode": "fixed", "fixedColor": LINE},
            "custom.lineWidth": 2,
            "custom.lineInterpolation": "stepAfter",
            "custom.fillOpacity": 0,
        },
    ),
    ("/ p95$/", {"custom.lineStyle": DASH, "custom.fillOpacity": 0}),
    ("/ p99$/", {"custom.lineStyle": DOTS, "custom.fillOpacity": 0}),
    ("/, by the server$/", {"custom.lineStyle": DASH, "custom.fillOpacity": 0}),
    ("/calibrated/", {"custom.lineStyle": DOTS, "custom.fillOpacity": 0}),
)


def describe(shows: str, *, good: str, bad: str, do: str) -> str:
    """The text behind a panel's (i): what it is, how it looks when well and when not, what then."""
    return f"{shows}\n\n**Good:** {good}\n\n**Bad:** {bad}\n\n**Do:** {do}"


def query(expr: str, legend: str, ref: str, *, instant: bool = False) -> prometheus.Dataquery:
    """One query. `ref`: its name within the panel."""
    built = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref)
    built = built.format(PromQueryFormat.TIME_SERIES)
    return built.instant() if instant else built.range()


def table(expr: str, ref: str, *, instant: bool) -> prometheus.Dataquery:
    """One query whose labels become columns."""
    return query(expr, "", ref, instant=instant).format(PromQueryFormat.TABLE)


def quantile(share: float, histogram: str, *by: str) -> str:
    """The quantile of a histogram of the router's, over the time that a rate looks back."""
    rate = f"sum by ({', '.join((*by, 'le'))}) (rate({histogram}_bucket{{{ROUTER}}}{RATE}))"
    return f"histogram_quantile({share:g}, {rate})"


def of_servers(metric: str, *, over: str = "sum", backend: str = ".+", median: bool = False) -> str:
    """One figure of the servers' own: the largest within a dp rank, then over ranks and servers.

    Tensor and pipeline ranks of one dp rank report the same requests, as the router reads it.
    `median`: of the last moments, for a gauge that may be far off in a single scrape.
    """
    rows = f'{metric}{{{ENGINE},backend=~"{backend}"}}'
    if median:
        rows = f"quantile_over_time(0.5, {rows}{RATE})"
    return f"{over} by (backend) (max by (backend, instance, dp_rank) ({rows}))"


def properties(values: Mapping[str, object]) -> list[dashboard.DynamicConfigValue]:
    """The properties of an override."""
    return [
        dashboard.DynamicConfigValue(id_val=name, value=value) for name, value in values.items()
    ]


def steps(*found: tuple[float | None, str]) -> boards.ThresholdsConfig:
    """Colours by value: the first pair has no value and holds below the second's."""
    return boards.ThresholdsConfig().steps(
        [dashboard.Threshold(value=value, color=colour) for value, colour in found]
    )


def words(found: Mapping[int, tuple[str, str]]) -> list[dashboard.ValueMapping]:
    """A word and a colour in place of a number."""
    results = {
        str(value): dashboard.ValueMappingResult(text=text, color=colour, index=index)
        for index, (value, (text, colour)) in enumerate(found.items())
    }
    return [dashboard.ValueMap(options=results)]


def figures(
    title: str, text: str, unit: str, *targets: prometheus.Dataquery, none: str = "unknown"
) -> stat.Panel:
    """A few large figures; `none` stands where there is no value."""
    panel = (
        stat.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .no_value(none)
        .height(4)
        .span(3)
        .graph_mode(common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.VALUE)
        .reduce_options(widgets.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    for target in targets:
        panel = panel.with_target(target)
    return panel


def by_backend(panel: stat.Panel) -> stat.Panel:
    """Figures that are no verdict have the colour of their backend."""
    for name, colour in (("speculative", SPECULATIVE), ("baseline", BASELINE)):
        fixed = {"color": {"mode": "fixed", "fixedColor": colour}}
        panel = panel.override_by_name(name, properties(fixed))
    return panel


def lines(
    title: str,
    text: str,
    unit: str,
    *targets: prometheus.Dataquery,
    width: int = 8,
    height: int = 9,
    rules: Sequence[Rule] = (),
) -> timeseries.Panel:
    """Lines over time, drawn by the rules above and then by the panel's own."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .height(height)
        .span(width)
        .line_width(1)
        .fill_opacity(0)
        .show_points(common.VisibilityMode.NEVER)
        .no_value("nothing to show")
        .tooltip(
            widgets.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .legend(
            widgets.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
    )
    for target in targets:
        panel = panel.with_target(target)
    for regexp, values in (*RULES, *rules):
        panel = panel.override_by_regexp(regexp, properties(values))
    return panel


def stacked(panel: timeseries.Panel, opacity: int = 75) -> timeseries.Panel:
    """The same, as areas on top of each other."""
    return (
        panel.fill_opacity(opacity)
        .line_width(0)
        .stacking(widgets.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    )


def marked(panel: timeseries.Panel, *found: tuple[float | None, str]) -> timeseries.Panel:
    """The same with the values of the thresholds as dashed lines."""
    return panel.thresholds(steps(*found)).thresholds_style(
        widgets.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
    )


def states(
    title: str,
    text: str,
    *targets: prometheus.Dataquery,
    width: int = 8,
    height: int = 9,
    none: str = "nothing to show",
) -> statetimeline.Panel:
    """A strip for each series, coloured by its value."""
    panel = (
        statetimeline.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit("none")
        .no_value(none)
        .height(height)
        .span(width)
        .merge_values(merge_values=True)
        .show_value(common.VisibilityMode.AUTO)
        .row_height(0.8)
        .fill_opacity(75)
        .line_width(0)
        .legend(
            widgets.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(show_legend=False)
        )
    )
    for target in targets:
        panel = panel.with_target(target)
    return panel
