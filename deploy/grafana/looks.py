"""What a panel's JSON says of how a series looks, and Prometheus' answers as series. Pure.

Read are: units, thresholds, mappings, overrides (colour, line style, fill), the names in legends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from deploy.grafana.queries import Panel, shown

PAGE: Final = "#111217"
PANEL: Final = "#181b1f"
INK: Final = "#ccccdc"
SOFT: Final = "#8e8fa0"
GRID: Final = "#2c2f36"
PALETTE: Final = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#b877d9", "#37872d")
NAMES: Final = {
    "blue": "#5794f2", "orange": "#ff9830", "green": "#73bf69", "yellow": "#fade2a",
    "red": "#f2495c", "purple": "#b877d9", "text": "#e8e8f0", "dark-red": "#c4162a",
    "dark-purple": "#8f3bb8", "super-light-yellow": "#fff899", "light-green": "#96d98d",
    "semi-dark-green": "#56a64b", "transparent": "none",
}  # fmt: skip


class Series(NamedTuple):
    """One line of a query's result. An instant one has one point."""

    ref: str
    labels: dict[str, str]
    name: str
    points: list[tuple[float, float]]  # (unix seconds, value)


def to_series(ref: str, legend: str, rows: list[dict[str, Any]]) -> list[Series]:
    """What Prometheus answered, as series with their names."""
    found = []
    for row in rows:
        pairs = row["values"] if "values" in row else [row["value"]]
        labels = row["metric"]
        points = [(float(moment), float(value)) for moment, value in pairs]
        found.append(Series(ref, labels, shown(legend, labels), points))
    return found


def colour_of(name: str) -> str:
    """Grafana's word for a colour as matplotlib has it."""
    return NAMES.get(name, name)


def settings(panel: Panel, series: Series) -> dict[str, Any]:
    """The defaults of a panel's fields with the overrides that apply to this series, in order."""
    defaults = panel["fieldConfig"]["defaults"]
    found = {f"custom.{name}": value for name, value in defaults.get("custom", {}).items()}
    found |= {name: value for name, value in defaults.items() if name != "custom"}
    for override in panel["fieldConfig"].get("overrides", []):
        kind, wanted = override["matcher"]["id"], override["matcher"]["options"]
        fits = (
            (kind == "byName" and wanted == series.name)
            or (kind == "byFrameRefID" and wanted == series.ref)
            or (kind == "byRegexp" and re.search(wanted.strip("/"), series.name) is not None)
        )
        if fits:
            found |= {each["id"]: each["value"] for each in override["properties"]}
    return found


def number(value: float, unit: str, decimals: float | None = None) -> str:
    """A value as Grafana writes it, nearly."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB"
    if unit == "s":
        for size, word in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
            if value >= size:
                return f"{value / size:.3g} {word}"
        return (
            "0 s"
            if value == 0
            else f"{value * 1e3:.3g} ms"
            if value >= 1e-3
            else f"{value * 1e6:.3g} µs"
        )
    text = f"{value:.{int(decimals)}f}" if decimals is not None else f"{value:.3g}"
    return text + {"ops": " ops/s", "reqps": " req/s"}.get(unit, "")


def by_value(value: float, found: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The word and the colour that a value has, by mappings and then by thresholds."""
    for mapping in found.get("mappings", []):
        result = mapping["options"].get(f"{value:g}")
        if result is not None:
            return result.get("text"), result.get("color")
    colour = None
    for step in found.get("thresholds", {}).get("steps", []):
        if step["value"] is None or value >= step["value"]:
            colour = step["color"]
    return None, colour


def coloured(panel: Panel, found: list[Series]) -> Iterator[tuple[Series, dict[str, Any], str]]:
    """Each series with its settings and its colour."""
    shades: dict[str, int] = {}
    for place, series in enumerate(found):
        own = settings(panel, series)
        chosen = own.get("color", {})
        colour = PALETTE[place % len(PALETTE)]
        if chosen.get("mode") == "fixed":
            colour = colour_of(chosen["fixedColor"])
        elif chosen.get("mode") == "shades":
            step = shades.setdefault(chosen["fixedColor"], 0)
            shades[chosen["fixedColor"]] += 1
            colour = _shade(colour_of(chosen["fixedColor"]), step)
        yield series, own, colour


def _shade(colour: str, step: int) -> str:
    """The colour, then lighter and darker ones by turns."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    towards, share = (255, 0.3 * ((step + 1) // 2)) if step % 2 else (0, 0.25 * (step // 2))
    mixed = [round(part + (towards - part) * min(share, 0.8)) for part in parts]
    return "#" + "".join(f"{part:02x}" for part in mixed)
