"""What `loadtest overhead` says: a line for each window, a table of both ways, and the difference.

It shows what is in the document and works nothing out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadtest.overhead import Difference, Found, Measured, Verdict, Way, mean_of

SAID: Final = {
    Verdict.LEVEL: "level: no difference that matters",
    Verdict.SLOWER: "slower through the router",
    Verdict.FASTER: "faster through the router, which it cannot make anything: look for what differs",
    Verdict.UNSURE: "unsure: more --rounds or more --seconds tell",
}
Value = Callable[[Measured], float | None]
# The rows of the table: what, its unit and digits, and where it stands.
ROWS: Final[tuple[tuple[str, str, Value], ...]] = (
    ("output tokens per second", ".0f", lambda w: w.point.output_tok_s.value),
    ("time per token of a request, ms", ".2f", lambda w: w.ms_per_token),
    ("first token, median, ms", ".0f", lambda w: _ms(w.point.ttft_s.p50)),
    ("engine: requests running", ".1f", lambda w: w.point.running),
    ("engine: requests queued", ".1f", lambda w: w.point.queued),
    ("engine: its own tok/s while it decodes", ".0f", lambda w: w.engine_tok_s),
    ("engine: tok/s by its counter", ".0f", lambda w: w.counted_tok_s),
    ("sent within 10 ms of each other", ".1f", lambda w: w.together),
    ("router: cores used", ".2f", lambda w: w.router_cpu),
    ("this client: cores used", ".2f", lambda w: w.point.client_cpu),
    ("this client: lateness, 95th percentile, ms", ".1f", lambda w: _s(w.point.client_lag_s)),
)


def outcome(window: Measured) -> str:
    """A window in one line."""
    running = _text(window.point.running, ".1f")
    return f"{window.point.output_tok_s.value:.0f} tok/s, engine running {running}"


def report(found: Found) -> RenderableType:
    """The table of both ways, and a sentence for each difference."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("mean of the windows")
    for way in Way:
        count = sum(each.way is way for each in found.windows)
        name = "direct" if way is Way.DIRECT else "through the router"
        table.add_column(f"{name} ({count})", justify="right")
    for what, form, value in ROWS:
        told = [mean_of([value(w) for w in found.windows if w.way is way]) for way in Way]
        if any(each is not None for each in told):
            table.add_row(what, *(_text(each, form) for each in told))
    asked = found.conditions
    head = Text(
        f"{asked.level} requests in flight on the {asked.role.value} server at {asked.direct}, direct"
        f" and through {asked.url}; {asked.workload.trace}"
    )
    return Group(head, table, *(Text(sentence(each, found.margin)) for each in found.differences))


def sentence(found: Difference, margin: float) -> str:
    """One difference in words."""
    share = found.share
    text = f"{found.what}: {share.value:+.1%} through the router"
    if share.low is not None and share.high is not None:
        text += f" [{share.low:+.1%}, {share.high:+.1%}]"
    pairs = f"{found.pairs} pair{'s' if found.pairs > 1 else ''}"
    return f"{text}, 95 % confidence over {pairs}, margin {margin:.0%}: {SAID[found.verdict]}"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ms(figure: object) -> float | None:
    value = getattr(figure, "value", None)
    return None if value is None else 1e3 * float(value)


def _s(value: float | None) -> float | None:
    return None if value is None else 1e3 * value
