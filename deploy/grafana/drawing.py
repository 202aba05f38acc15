"""Draw the whole dashboard from its JSON and its queries' results, without Grafana.

Enough to judge it by: every panel is where it is in Grafana's grid of 24 columns. Dark, as Grafana.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from matplotlib.figure import Figure

from deploy.grafana import charts
from deploy.grafana.looks import GRID, INK, PAGE, PANEL, SOFT, Series
from deploy.grafana.queries import Board, Panel

COLUMNS: Final = 24
UNIT_IN: Final = 0.245  # height of one unit of Grafana's grid, inches
WIDTH_IN: Final = 15.0
GAP_IN: Final = 0.05
HEAD_IN: Final = 0.62

Results = dict[int, list[Series]]
"""By the panel's number."""


def draw(
    board: Board,
    results: Results,
    *,
    label: str,
    span: charts.Span,
    marks: Sequence[charts.Mark] = (),
) -> Figure:
    """The whole dashboard over these moments, with a line that says what the picture is."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    height = rows * UNIT_IN + HEAD_IN
    figure = Figure(figsize=(WIDTH_IN, height), facecolor=PAGE)
    headline = 1 - 0.24 / height
    figure.text(0.006, headline, board["title"], color=INK, size=15, va="center")
    figure.text(0.994, headline, label, color=SOFT, size=10, va="center", ha="right")
    for panel in board["panels"]:
        place = panel["gridPos"]
        top = 1 - (HEAD_IN * 0.75 + place["y"] * UNIT_IN) / height
        if panel["type"] == "row":
            middle = top - 0.5 * UNIT_IN / height
            figure.text(0.006, middle, panel["title"], color=INK, size=11, va="center")
            continue
        high = (place["h"] * UNIT_IN - GAP_IN) / height
        left = place["x"] / COLUMNS + GAP_IN / WIDTH_IN
        wide = place["w"] / COLUMNS - 2 * GAP_IN / WIDTH_IN
        box = (left, top - high, wide, high)
        _panel(figure, panel, results.get(panel["id"], []), box, span, marks)
    return figure


def _panel(
    figure: Figure,
    panel: Panel,
    found: list[Series],
    box: tuple[float, float, float, float],
    span: charts.Span,
    marks: Sequence[charts.Mark],
) -> None:
    left, bottom, width, height = box
    across, up = width * WIDTH_IN, height * figure.get_figheight()
    card = figure.add_axes(box, facecolor=PANEL)
    card.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
    for spine in card.spines.values():
        spine.set_color(GRID)
    card.text(0.07 / across, 1 - 0.14 / up, panel["title"], color=INK, size=8.5, va="center")
    if panel["type"] == "stat":
        charts.stat(card, panel, found)
        return
    if not any(math.isfinite(value) for series in found for _, value in series.points):
        none = panel["fieldConfig"]["defaults"].get("noValue", "no data")
        card.text(0.5, 0.5, none, color=SOFT, size=9, ha="center", va="center")
        return
    names = 1.25 if panel["type"] == "state-timeline" else 0.56
    last = 0.55 if panel["title"] == "Router process" else 0.14  # a second axis has numbers too
    inner = figure.add_axes(
        (
            left + names / WIDTH_IN,
            bottom + 0.66 / figure.get_figheight(),
            width * (1 - (names + last) / across),
            height * (1 - 0.96 / up),
        ),
        facecolor=PANEL,
    )
    draws = {"timeseries": charts.lines, "xychart": charts.plane, "state-timeline": charts.strips}
    draws[panel["type"]](inner, panel, found, span)
    if panel["type"] != "xychart":
        charts.mark_all(inner, marks)
    charts.dress(inner)
