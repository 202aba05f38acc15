"""A comparison as people read it: a table, and a picture over load.

Rich for the table; `plot` for the picture. It shows what was found and judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from loadtest.compare import Kind, Outcome
from loadtest.plot import agg_figure

# What each kind of arrangement is drawn in, and the dashes that tell one of a kind from the next.
COLOURS: Final[Mapping[Kind, str]] = {
    "single": "#1d1d1b",
    "control": "#7a4fb5",
    "plain": "#c2570c",
    "rule": "#2a6fdb",
}
DASHES: Final = ("solid", "dashed", "dotted", "dashdot", (0, (1, 3)))


def show(console: Console, outcomes: Sequence[Outcome], title: str) -> None:
    """Print one load's outcomes by kind, the fastest of them in bold."""
    table = Table(title=title, title_justify="left", padding=(0, 0))
    table.add_column("arrangement", no_wrap=True)
    names = ["ms/\ntoken", "p95", "first\ntoken", "tok/s", "specu-\nlative", "switches", "requests"]
    caches = any((outcome.cached or 0.0) > 0.0 for outcome in outcomes)
    for name in (*names, "cached") if caches else names:
        table.add_column(name, justify="right")
    best = min(outcome.ms_per_token for outcome in outcomes)
    for at, outcome in enumerate(outcomes):
        if at and outcome.kind != outcomes[at - 1].kind:
            table.add_section()
        table.add_row(
            outcome.name,
            f"{outcome.ms_per_token:.2f}",
            f"{outcome.p95_ms_per_token:.2f}",
            "" if outcome.ttft_ms is None else f"{outcome.ttft_ms:.0f} ms",
            f"{outcome.tok_s:.0f}",
            f"{outcome.speculative_share:.0%}",
            str(outcome.switches),
            str(outcome.requests),
            *([f"{outcome.cached or 0.0:.0%}"] if caches else []),
            style="bold" if outcome.ms_per_token == best else "",
        )
    console.print(table)


def draw(path: Path, scales: Sequence[float], rows: Mapping[str, Sequence[Outcome]]) -> None:
    """Draw mean and p95 over the scale of the load; `rows` by arrangement, in order of scale.

    Raises PlotError without matplotlib and OSError.
    """
    figure = agg_figure((12, 5.4), "leave --plot out")
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    values = (
        ("mean ms per output token", [o.ms_per_token for row in rows.values() for o in row]),
        ("p95 ms per output token", [o.p95_ms_per_token for row in rows.values() for o in row]),
    )
    for axes, (label, every) in zip(figure.subplots(1, 2), values, strict=True):
        seen: dict[Kind, int] = {}
        for name, row in rows.items():
            kind = row[0].kind
            dash = DASHES[seen.get(kind, 0) % len(DASHES)]
            seen[kind] = seen.get(kind, 0) + 1
            mean = label.startswith("mean")
            axes.plot(
                list(scales),
                [o.ms_per_token if mean else o.p95_ms_per_token for o in row],
                color=COLOURS[kind],
                linestyle=dash,
                linewidth=2.4 if kind == "rule" else 1.6,
                label=name,
            )
        # An overloaded server waits for ever: the servers that are not are what the picture is for.
        axes.set_yscale("log")
        axes.set_ylim(min(every) * 0.9, min(max(every), 20.0 * min(every)) * 1.1)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("scale of the trace (1: as recorded)")
        axes.set_ylabel(label)
        axes.grid(visible=True, which="both", alpha=0.2)
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path)
