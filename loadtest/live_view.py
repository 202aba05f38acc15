"""A live comparison for people: a cell in a line, a table for each load, a picture, advice.

It shows what is in the document and works nothing out. Rich for the tables; `plot` for the picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadtest.live_schema import Comparison, Offered, Outcome, Turn
from loadtest.live_summary import said_of
from loadtest.plot import agg_figure
from loadtest.sweep_schema import Figure
from loadtest.sweep_view import plain_text, plus_minus

LEGEND: Final = (
    "ms/token: of a request, its whole time by its output tokens. ± and (a-b): 95 % confidence."
    " speculative: share of the requests."
)


def line(turn: Turn, comparison: Comparison) -> str:
    """What is known of a policy under a load, all passes so far, in one line."""
    key = turn.policy, turn.load.name
    found = next(each for each in comparison.outcomes if (each.policy, each.load) == key)
    text = (
        f"{plus_minus(found.ms_per_token, 2)} ms per token, {plus_minus(found.tok_s)} tok/s,"
        f" {found.speculative_share:.0%} speculative, {found.requests} answers"
    )
    if found.passes > 1:
        text += f" in {found.passes} passes"
    return text + (f", {found.errors} failed" if found.errors else "")


def report(comparison: Comparison) -> RenderableType:
    """Everything: conditions, a table for each load, the advice."""
    asked = comparison.conditions
    work = asked.workload
    answers = f"{work.output_tokens} tokens" if work.output_tokens else f"as in {work.trace}"
    passes = f"{comparison.passes} pass{'es' if comparison.passes > 1 else ''}"
    head = [
        f"Comparison of {comparison.created} through {asked.url}: {asked.model}, {passes}",
        f"  prompts: {work.prompts}; answers: {answers}. {LEGEND}",
        *_line(comparison),
    ]
    tables = [
        table(load, [each for each in comparison.outcomes if each.load == load.name])
        for load in comparison.loads
    ]
    said = [Text(said_of(each, comparison.loads)) for each in comparison.advice]
    return Group(*map(Text, head), *(each for each in tables if each.row_count), *said)


def _line(comparison: Comparison) -> list[str]:
    """What `frontier` stands for, if it is compared."""
    asked = comparison.conditions.line
    if not asked:
        return []
    words = [f"{name} {value}" for name, value in asked.items() if name != "policy"]
    rules = {c.decided_by for c in comparison.cells if c.policy == "frontier"} - {"frontier"}
    return [f"  frontier: {', '.join([*sorted(rules), *words]) or 'as configured'}"]


def summary_text(comparison: Comparison) -> str:
    """The same as plain text."""
    return plain_text(report(comparison))


def table(load: Offered, outcomes: list[Outcome]) -> Table:
    """One load's policies, the fastest in bold."""
    found = Table(title=str(load), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    found.add_column("policy", no_wrap=True)
    for name in ("ms/token", "p95", "tok/s", "first token p50, ms", "speculative", "switches"):
        found.add_column(name, justify="right", no_wrap=True)
    for name in ("answers", "errors"):
        found.add_column(name, justify="right", no_wrap=True)
    best = min((each.ms_per_token.value for each in outcomes), default=0.0)
    for each in outcomes:
        found.add_row(
            each.policy,
            plus_minus(each.ms_per_token, 2),
            _bounds(each.p95_ms_per_token, 2),
            plus_minus(each.tok_s),
            "?" if each.ttft_p50_ms is None else _bounds(each.ttft_p50_ms, 0),
            f"{each.speculative_share:.0%}",
            str(each.switches),
            str(each.requests),
            f"{each.errors}{' overload' if each.gave_up else ''}",
            style="bold" if each.ms_per_token.value == best else "",
        )
    return found


def _bounds(figure: Figure, digits: int) -> str:
    """A percentile with its bounds, as far as the data gives them."""
    low, high = ("?" if b is None else f"{b:.{digits}f}" for b in (figure.low, figure.high))
    bounds = "" if (low, high) == ("?", "?") else f" ({low}-{high})"
    return f"{figure.value:.{digits}f}{bounds}"


def draw(path: Path, comparison: Comparison) -> None:
    """Draw mean and p95 over load into a PNG. Raises PlotError without matplotlib, and OSError."""
    from loadtest.compare_report import COLOURS, DASHES

    figure = agg_figure((12, 5.2), "leave it out")
    loads = {load.name: load.size for load in comparison.loads}
    seen: dict[str, int] = {}
    axes = figure.subplots(1, 2, sharex=True)
    for policy in comparison.policies:
        row = [each for each in comparison.outcomes if each.policy == policy]
        if not row:
            continue
        row.sort(key=lambda each: loads[each.load])
        kind = row[0].kind
        dash = DASHES[seen.get(kind, 0) % len(DASHES)]
        seen[kind] = seen.get(kind, 0) + 1
        for each_axes, figures in zip(
            axes,
            ([o.ms_per_token for o in row], [o.p95_ms_per_token for o in row]),
            strict=True,
        ):
            values = [f.value for f in figures]
            below = [f.value - (f.value if f.low is None else f.low) for f in figures]
            above = [(f.value if f.high is None else f.high) - f.value for f in figures]
            each_axes.errorbar(
                [loads[each.load] for each in row],
                values,
                yerr=[below, above],
                color=COLOURS[kind],
                linestyle=dash,
                linewidth=2.4 if kind == "rule" else 1.6,
                marker="o",
                markersize=4,
                capsize=3,
                label=policy,
            )
    for each_axes, label in zip(axes, ("mean", "p95"), strict=True):
        each_axes.set_ylabel(f"{label} ms per output token")
        each_axes.set_xlabel(_axis(comparison.loads[0]))
        each_axes.set_ylim(bottom=0)
        each_axes.set_xticks(sorted(loads.values()))
        each_axes.grid(visible=True, alpha=0.2)
    axes[0].legend(fontsize=8, frameon=False, handlelength=5)
    figure.suptitle(_title(comparison), x=0.01, ha="left", fontsize=10)
    figure.savefig(path)


def _title(comparison: Comparison) -> str:
    """What was measured, where and when."""
    conditions = comparison.conditions
    said = [conditions.model, comparison.servers, f"{comparison.created[:10]}"]
    if conditions.workload.output_tokens is not None:
        said.append(f"answers of {conditions.workload.output_tokens} tokens")
    return ", ".join(part for part in said if part)


def _axis(load: Offered) -> str:
    if load.in_flight is not None:
        return "requests in flight"
    return "requests a second" if load.rate is not None else "scale of the trace (1: as recorded)"
