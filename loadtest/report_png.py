"""The two pictures of a calibration as one PNG, for a pull request or a slide.

It shows what the file holds and works nothing out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loadtest.fit_words import line_words, sentence, top_level
from loadtest.plot import agg_figure
from loadtest.report_svg import Scale, frontier_path, plane_top
from router.calibration import Calibration
from router.curves import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPECULATIVE: Final = "#2a6fdb"
BASELINE: Final = "#c2570c"
INK: Final = "#1d1d1b"
SOFT: Final = "#6b6a66"


def write_png(
    calibration: Calibration, path: Path, samples: Sequence[tuple[float, float]] = ()
) -> None:
    """Draw both pictures into this file. Raises PlotError without matplotlib, OSError."""
    figure = agg_figure((12, 5.2), "--no-png")
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1.0))
    found = calibration.objectives.get(calibration.objective or "")
    said = line_words(calibration)
    if found is not None:
        said = f"{said}\n{sentence(found, top_level(calibration))}"
    figure.suptitle(said, x=0.01, ha="left", fontsize=11, color=INK)
    _curves(left, calibration)
    _plane(right, calibration, samples)
    figure.savefig(path)


def _curves(axes: Axes, calibration: Calibration) -> None:
    found = calibration.objectives.get("throughput")
    if found is not None and found.interval is not None:
        low, high = found.interval
        right = (top_level(calibration) or 1.0) if isinstance(high, str) else high
        axes.axvspan(max(0.5, float(low)), right, color=INK, alpha=0.07, linewidth=0)
        if not isinstance(found.crossover, str) and found.crossover > 0:
            axes.axvline(found.crossover, color=INK, linestyle="--", linewidth=1)
            axes.annotate(
                f"crossover {found.crossover:.1f}", (found.crossover, 0.03), (4, 0),
                xycoords=("data", "axes fraction"), textcoords="offset points", color=INK,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    if calibration.curves is not None:
        _curve(axes, calibration.curves.speculative, SPECULATIVE, "speculative")
        _curve(axes, calibration.curves.baseline, BASELINE, "baseline")
        levels = sorted({p.concurrency for p in calibration.curves.baseline.points})
        axes.set_xticks(levels, [f"{level:g}" for level in levels], fontsize=8)
        axes.minorticks_off()
        low, high = axes.get_ylim()
        ticks = [t for t in Scale(low, high, 0, 1).ticks() if low <= t <= high]
        axes.set_yticks(ticks, [f"{tick:,.6g}" for tick in ticks])
        axes.legend(frameon=False, loc="best")
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("output tokens/s (95 % bands)")
    _plain(axes)


def _curve(axes: Axes, curve: Curve, colour: str, label: str) -> None:
    levels = [point.concurrency for point in curve.points]
    axes.fill_between(
        levels,
        [p.tokens_per_second if p.low is None else p.low for p in curve.points],
        [p.tokens_per_second if p.high is None else p.high for p in curve.points],
        color=colour, alpha=0.18, linewidth=0,
    )  # fmt: skip
    axes.plot(levels, [p.tokens_per_second for p in curve.points], color=colour, label=label)
    dots = [(p.concurrency, speed) for p in curve.points for speed in p.measured]
    axes.plot([n for n, _ in dots], [s for _, s in dots], "o", color=colour, markersize=3.5)
    out = curve.left_out
    axes.plot([n for n, _ in out], [s for _, s in out], "x", color=colour, markersize=7)


def _plane(axes: Axes, calibration: Calibration, samples: Sequence[tuple[float, float]]) -> None:
    top = plane_top(calibration, samples)
    path = frontier_path(calibration, top)
    edge, ms = [n for n, _ in path], [m for _, m in path]
    axes.fill_betweenx(ms, 0, edge, color=SPECULATIVE, alpha=0.16, linewidth=0)
    axes.plot(edge, ms, color=SPECULATIVE, linewidth=2, clip_on=False)
    if samples:
        alpha = max(0.03, min(0.4, 20 / math.sqrt(len(samples)) / 10))
        axes.plot(
            [n for n, _ in samples], [m for _, m in samples], "o", color=INK, alpha=alpha,
            markersize=4, markeredgewidth=0, clip_on=False,
        )  # fmt: skip
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_aspect("equal")
    axes.set_xlabel("n, requests on the speculative server")
    axes.set_ylabel("m, requests on the baseline server")
    axes.set_title("shaded: to the speculative server", fontsize=9, color=SOFT)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.grid(visible=True, color="#e2e1dc", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=SOFT)
