"""One panel's chart, drawn with matplotlib from its JSON and its series.

Tooltips, tables in legends and the like are left out. Times are seconds since the picture's start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from deploy.grafana.looks import (
    GRID,
    INK,
    PANEL,
    SOFT,
    Series,
    by_value,
    colour_of,
    coloured,
    number,
    settings,
)
from deploy.grafana.queries import Panel

DASHES: Final = {"solid": "-", "dash": (0, (5, 2.5)), "dot": (0, (1, 2))}
ROOM: Final = 1.08  # above the highest value
CHARACTER_IN: Final = 0.043  # of a legend, inches


class Span(NamedTuple):
    """The moments that the range queries were asked for, in unix seconds."""

    start: float
    end: float
    step: float

    @property
    def moments(self) -> list[float]:
        """All of them, as Prometheus counts them."""
        count = int((self.end - self.start) / self.step + 1e-6) + 1
        return [self.start + at * self.step for at in range(count)]


class Mark(NamedTuple):
    """An annotation: a line through every panel over time."""

    name: str
    colour: str
    at: float  # seconds since the picture's start


def mark_all(axes: Axes, marks: Sequence[Mark]) -> None:
    """Draw the annotations, as Grafana does."""
    for mark in marks:
        axes.axvline(
            mark.at, color=colour_of(mark.colour), linewidth=0.7, linestyle=(0, (2, 2)), alpha=0.8
        )


def on_grid(series: Series, span: Span) -> list[float]:
    """A value for each moment; NaN, which is a gap, where there is none."""
    known = {round((moment - span.start) / span.step): value for moment, value in series.points}
    return [known.get(at, math.nan) for at in range(len(span.moments))]


def dress(axes: Axes) -> None:
    """Ticks and grid as quiet as Grafana's."""
    axes.tick_params(colors=SOFT, labelsize=7, length=2, width=0.5)
    axes.grid(visible=True, color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def stat(card: Axes, panel: Panel, found: list[Series]) -> None:
    """Large figures beside each other."""
    if not found:
        none = panel["fieldConfig"]["defaults"].get("noValue", "")
        card.text(0.5, 0.42, none, color=SOFT, size=12, ha="center", va="center")
        return
    for place, series in enumerate(found):
        own = settings(panel, series)
        value = series.points[-1][1]
        word, colour = by_value(value, own)
        fixed = own.get("color", {})
        if fixed.get("mode") == "fixed":
            colour = fixed["fixedColor"]
        text = word or number(value, own.get("unit", "none"), own.get("decimals"))
        style: dict[str, Any] = {"ha": "center", "va": "center"}
        at, size = (place + 0.5) / len(found), 16 if len(found) == 1 else 14
        ink = colour_of(colour or "text")
        card.text(at, 0.46, text, color=ink, size=size, weight="bold", **style)
        if len(found) > 1:
            card.text(at, 0.15, series.name, color=SOFT, size=7.5, **style)


def lines(axes: Axes, panel: Panel, found: list[Series], span: Span) -> None:
    """Lines over time, or areas on top of each other."""
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"].get("stacking", {}).get("mode") == "normal"
    right = axes.twinx() if any(_right(panel, series) for series in found) else None
    at = [moment - span.start for moment in span.moments]
    floor = [0.0] * len(at)
    for series, own, colour in coloured(panel, found):
        onto = right if right is not None and _right(panel, series) else axes
        values = on_grid(series, span)
        if stacked:
            top = [
                low + (0.0 if math.isnan(value) else value)
                for low, value in zip(floor, values, strict=True)
            ]
            seen = [not math.isnan(value) for value in values]
            onto.fill_between(
                at, floor, top, where=seen, color=colour, alpha=0.75, linewidth=0,
                label=series.name,
            )  # fmt: skip
            floor = top
            continue
        if own.get("custom.fillOpacity"):
            onto.fill_between(
                at, values, color=colour, alpha=own["custom.fillOpacity"] / 100, linewidth=0
            )
        steps = own.get("custom.lineInterpolation") == "stepAfter"
        onto.plot(
            at, values, color=colour, linewidth=0.4 + 0.5 * own.get("custom.lineWidth", 1),
            drawstyle="steps-post" if steps else "default", label=series.name,
            linestyle=DASHES[own.get("custom.lineStyle", {}).get("fill", "solid")],
        )  # fmt: skip
    highest = max(floor) if stacked else _highest(panel, found)
    _scale(axes, defaults, highest)
    if right is not None:
        right.set_ylim(0, right.get_ylim()[1] * ROOM)
        right.yaxis.set_major_locator(MaxNLocator(4))
        _units(right, "bytes")
        dress(right)
        right.grid(visible=False)
    times(axes, span)
    _legend(axes, *([right] if right is not None else []))


def _highest(panel: Panel, found: list[Series]) -> float:
    values = [
        value
        for series in found
        if not _right(panel, series)
        for _, value in series.points
        if math.isfinite(value)
    ]
    return max(values, default=1.0)


def _scale(axes: Axes, defaults: Mapping[str, Any], highest: float) -> None:
    """The left axis: its unit, its ends, the values that are marked."""
    unit, custom = defaults.get("unit", "none"), defaults["custom"]
    if custom.get("scaleDistribution", {}).get("type") == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=5))
        axes.yaxis.set_minor_formatter(NullFormatter())
        _units(axes, unit)
        return
    top = max(highest, custom.get("axisSoftMax", 0.0)) or 1.0
    axes.set_ylim(defaults.get("min", 0), top * ROOM)
    if custom.get("thresholdsStyle", {}).get("mode") == "dashed":
        for step in defaults["thresholds"]["steps"]:
            if step["value"] is not None and step["value"] <= top * ROOM:
                axes.axhline(
                    step["value"], color=colour_of(step["color"]), linewidth=0.7,
                    linestyle=(0, (6, 4)), alpha=0.8,
                )  # fmt: skip
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=unit == "none" and top > 4))
    _units(axes, unit)


def _right(panel: Panel, series: Series) -> bool:
    return bool(settings(panel, series).get("custom.axisPlacement") == "right")


def _units(axes: Axes, unit: str) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, unit)))


def times(axes: Axes, span: Span) -> None:
    """The same time in every panel, in minutes and seconds."""
    axes.set_xlim(0, span.end - span.start)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 3, 6, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{int(s) // 60}:{int(s) % 60:02d}"))


def _legend(axes: Axes, *more: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    for other in more:
        extra = other.get_legend_handles_labels()
        handles, labels = [*handles, *extra[0]], [*labels, *extra[1]]
    longest = max(map(len, labels), default=1)
    wide = axes.get_position().width * axes.get_figure(root=True).get_figwidth()  # type: ignore[union-attr]
    columns = max(1, min(len(labels), int(wide / (longest * CHARACTER_IN + 0.25)), 4))
    axes.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(-0.03, -0.1), ncols=columns,
        fontsize=6.5, frameon=False, labelcolor=INK, handlelength=1.6, columnspacing=1.0,
        labelspacing=0.15, borderpad=0.1,
    )  # fmt: skip


def plane(axes: Axes, panel: Panel, found: list[Series], _span: Span) -> None:
    """What the XY chart shows: the value across, the label m up."""
    mapped = panel["options"]["series"]
    names = {each["frame"]["matcher"]["options"]: each["name"]["fixed"] for each in mapped}
    for place, target in enumerate(panel["targets"]):
        rows = [series for series in found if series.ref == target["refId"]]
        points = [
            (value, float(series.labels["m"])) for series in rows for _, value in series.points
        ]
        if not points:
            continue
        own = settings(panel, rows[0]._replace(name="m"))
        colour = colour_of(own["color"]["fixedColor"])
        across, up = zip(*points, strict=True)
        if own.get("custom.show") == "lines":
            axes.plot(across, up, color=colour, linewidth=1.8, label=names[place])
        else:
            size = own.get("custom.pointSize.fixed", 5)
            axes.scatter(
                across, up, s=size**2 * 0.8, color=colour, alpha=0.6, linewidth=0,
                label=names[place], zorder=3, clip_on=False,
            )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(_axis_label(panel, "Value"), color=SOFT, size=7, labelpad=1)
    axes.set_ylabel(_axis_label(panel, "m"), color=SOFT, size=7, labelpad=1)
    axes.legend(loc="upper right", fontsize=7, frameon=False, labelcolor=INK)


def _axis_label(panel: Panel, field: str) -> str:
    found = settings(panel, Series("", {}, field, []))
    return str(found.get("custom.axisLabel", ""))


def strips(axes: Axes, panel: Panel, found: list[Series], span: Span) -> None:
    """A strip for each series; equal neighbours are one."""
    for place, series in enumerate(found):
        own, row = settings(panel, series), len(found) - 1 - place
        runs: list[tuple[float, float, float]] = []
        for moment, value in series.points:
            at = moment - span.start
            if runs and runs[-1][2] == value and at - runs[-1][1] < 0.5 * span.step:
                runs[-1] = (runs[-1][0], at + span.step, value)
            else:
                runs.append((at, at + span.step, value))
        for begin, end, value in runs:
            word, colour = by_value(value, own)
            fill = colour_of(colour or "green")
            axes.barh(row, end - begin, left=begin, height=0.75, color=fill, alpha=0.8, linewidth=0)
            if end - begin > 0.08 * (span.end - span.start):
                text = word or f"{value:g}"
                middle = (begin + end) / 2
                axes.text(middle, row, text, color=PANEL, size=7, ha="center", va="center")
    axes.set_yticks(range(len(found)), [series.name for series in reversed(found)])
    times(axes, span)
