"""Matplotlib (the extra `plot`), as far as all pictures share it: an empty figure, or why there is none.

Imported when a picture is drawn, since nothing else needs it. What is drawn is the caller's.
"""

from __future__ import annotations

from typing import Any


class PlotError(RuntimeError):
    """The picture cannot be drawn; the text says what to install."""


def agg_figure(size: tuple[float, float], instead: str) -> Any:
    """An empty figure of so many inches that needs no display. Raises PlotError without matplotlib.

    `instead`: what to do without it, for the message.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(
            f"a picture needs matplotlib: pip install matplotlib, or {instead}"
        ) from error
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
