"""The demo's verdict: tables, checks and one honest sentence.

It looks at what was recorded, and asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.arrivals import Closed
from loadtest.demo_speed import Speed
from loadtest.demo_stage import LINE, MODEL, Stage
from loadtest.demo_view import COLOUR
from loadtest.record import RequestRecord
from loadtest.verdict import (
    Check,
    Decided,
    Score,
    best_of_each_level,
    by_reason,
    disagreement,
    level_scores,
    overlap_seconds,
    speed_sentence,
    total_score,
    unseen,
)
from router.load import Role
from router.policy import Reason

CAPTION: Final = """\
ms per token: a request's whole time by its output tokens; each level counts alike.
out of reach: the better server at every level, were switching free."""
SHOWN_FAULTS: Final = 3
_MARKS: Final = {
    True: Text("✓ ", "green"),
    False: Text("✗ ", "bold red"),
    None: Text("- ", "dim"),
}
BAR: Final = 12
# What each reason means with this line; the router's documentation says the same in general.
MEANING: Final = {
    Reason.BELOW_THRESHOLD: f"n + m < {LINE.threshold:g}",
    Reason.AT_THRESHOLD: f"n + m >= {LINE.threshold:g}",
    Reason.BAND: f"back below {LINE.threshold:g}, but not yet below {LINE.lower:g}",
    Reason.DWELL: f"below {LINE.lower:g}, but not yet for {LINE.dwell:g} s",
}

SNIPPET: Final = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.chat.completions.with_raw_response.create(
    model="{model}", messages=[{{"role": "user", "content": "Hello!"}}], max_tokens=24
)
print(answer.headers["x-crossover-backend"], answer.headers["x-crossover-reason"])
print(answer.parse().choices[0].message.content)"""


class Finished(msgspec.Struct, frozen=True):
    """One of the three runs, over."""

    name: str
    only: Role | None  # None: the pair
    records: list[RequestRecord]
    decisions: list[Decided]


def check_all(runs: list[Finished], counts: dict[str, int]) -> list[Check]:
    """Everything that decides the exit code."""
    records = [record for run in runs for record in run.records]
    faults = [f"{record.id}: {record.error}" for record in records if record.error is not None]
    pair = next(run for run in runs if run.only is None)
    used = {role: sum(record.backend is role for record in pair.records) for role in Role}
    wrong = [
        fault
        for run in runs
        for decided in run.decisions
        if (fault := disagreement(decided, None if run.only else LINE, run.only))
    ]
    missing = [one for run in runs for one in unseen(run.records, run.decisions)]
    seen = sum(len(run.decisions) for run in runs)
    leaked = {name: count for name, count in counts.items() if count}
    return [
        Check(
            not faults and bool(records),
            f"{len(records)} requests, {len(faults)} errors{_some(faults)}",
        ),
        Check(
            not leaked and bool(counts),
            "no count leaked: nothing in flight, by the router's gauges and by the servers' own"
            if not leaked
            else f"counts that did not come back to 0: {leaked}",
        ),
        Check(
            all(used.values()),
            "the pair used both servers: "
            + ", ".join(f"{count} requests to {role.value}" for role, count in used.items()),
        ),
        Check(
            not wrong,
            f"the reasons of {seen - len(wrong)} of {seen} decisions agree with their"
            f" numbers{_some(wrong)}",
        ),
        Check(
            not missing,
            "every answer's headers are what /decisions holds of it"
            if not missing
            else f"{len(missing)} answers are not in /decisions as they were explained"
            + _some(missing),
        ),
    ]


def report(
    console: Console, load: Closed, runs: list[Finished], checks: list[Check], speed: Speed
) -> None:
    """Print the verdict."""
    console.print()
    console.rule("[b]Verdict[/b]", align="left")
    totals = {run.only: total_score(run.records, load) for run in runs}
    levels = {run.only: level_scores(run.records, load) for run in runs}
    ideal = best_of_each_level([levels[role] for role in Role])
    pair = next(run for run in runs if run.only is None)
    console.print(_totals(runs, totals, ideal))
    console.print(f"[dim]{CAPTION}[/]")
    console.print(_levels(load, levels))
    console.print(_reasons(pair.records))
    console.print()
    for check in checks:
        console.print(Text("✓ ", "green") if check.ok else Text("✗ ", "bold red"), end="")
        console.print(check.text, markup=False)
    console.print(_MARKS[speed.ok], end="")
    console.print(f"speed: {speed.text}" if speed.ok is not None else f"speed {speed.text}")
    console.print()
    alone = {role: totals[role] for role in Role}
    sentence = speed_sentence(totals[None], alone, overlap_seconds(pair.records), load.seconds)
    console.print(f"[b]Speed.[/b] {sentence}")
    console.print(
        "[dim]These are planted curves on a simulated GPU: they show how the router works, not what"
        " your servers gain.[/]"
    )
    console.print()


def invite(console: Console, stage: Stage) -> None:
    """Say how to play with what is left running."""
    console.rule("[b]It keeps running[/b]", align="left")
    rows = [
        ("chat", f"{stage.public}/v1"),
        ("the page", f"{stage.admin}/"),
        ("metrics", f"{stage.admin}/metrics"),
        ("status", f"{stage.admin}/status"),
        ("decisions", f"{stage.admin}/decisions"),
    ]
    for name, url in rows:
        console.print(f"  {name:<10} {url}", soft_wrap=True)
    console.print(
        f"\nThe page asks for the admin key, {stage.admin_key}. The others want it too:"
        f" curl -H 'authorization: Bearer {stage.admin_key}' '{stage.admin}/decisions?limit=3'",
        soft_wrap=True,
        markup=False,
    )
    console.print()
    console.print(SNIPPET.format(url=stage.public, model=MODEL), markup=False, soft_wrap=True)
    console.print("\n[b]Ctrl-C[/b] stops everything.")


def _totals(runs: list[Finished], totals: dict[Role | None, Score], ideal: float) -> Table:
    table = _table("Over the whole load")
    for name in ("output tok/s", "ms per token", "p95", "requests", "errors"):
        table.add_column(name, justify="right")
    scores = list(totals.values())
    for run in runs:
        score = totals[run.only]
        table.add_row(
            run.name,
            _best(score.tok_s, max(each.tok_s for each in scores), digits=0),
            _best(score.ms_per_token, _least(each.ms_per_token for each in scores)),
            _best(score.p95_ms_per_token, _least(each.p95_ms_per_token for each in scores)),
            str(score.requests),
            str(sum(not record.ok for record in run.records)),
        )
    table.add_row("[dim]out of reach[/]", f"[dim]{ideal:.0f}[/]")
    return table


def _levels(load: Closed, levels: dict[Role | None, list[Score]]) -> Table:
    table = _table("Level by level, in the order of time")
    table.columns[0].header = "requests\nin flight"
    table.columns[0].justify = "right"
    runs: list[tuple[str, Role | None]] = [("pair", None), *((role.value, role) for role in Role)]
    for unit in ("tok/s", "ms/token"):
        for name, _ in runs:
            table.add_column(f"{name}\n{unit}", justify="right")
    table.add_column("the pair's\nrequests went to")
    for at, level in enumerate(load.levels):
        scores = [levels[role][at] for _, role in runs]
        most = max(score.tok_s for score in scores)
        least = _least(score.ms_per_token for score in scores)
        table.add_row(
            str(level.concurrency),
            *(_best(score.tok_s, most, digits=0) for score in scores),
            *(_best(score.ms_per_token, least) for score in scores),
            _share(scores[0]),
        )
    return table


def _reasons(records: list[RequestRecord]) -> Table:
    table = _table("The pair's requests by backend and reason")
    table.columns[0].header = "backend"
    table.add_column("reason")
    table.add_column("requests", justify="right")
    table.add_column("n: running on speculative, m: on baseline")
    counts = by_reason(records)
    for (role, reason), count in sorted(counts.items(), key=lambda item: -item[1]):
        meaning = MEANING.get(Reason(reason), "") if reason in set(Reason) else ""
        name = "none" if role is None else f"[{COLOUR[role]}]{role.value}[/]"
        table.add_row(name, str(reason), str(count), meaning)
    return table


def _table(title: str) -> Table:
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    table.add_column("")
    return table


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _best(value: float | None, best: float | None, *, digits: int = 1) -> Text:
    """A number, marked if it is the best of its kind, as far as it is shown."""
    if value is None:
        return Text("-")
    text = f"{value:.{digits}f}"
    return Text(text, "bold green" if text == f"{best:.{digits}f}" else "")


def _share(score: Score) -> Text:
    """A bar of where the requests of a level went."""
    if not score.requests:
        return Text("-")
    width = round(BAR * score.by_backend[Role.SPECULATIVE] / score.requests)
    bar = Text("█" * width, COLOUR[Role.SPECULATIVE])
    bar.append("░" * (BAR - width), COLOUR[Role.BASELINE])
    used = [(role, count) for role, count in score.by_backend.items() if count]
    if len(used) == 1:
        return bar.append(f" {used[0][0].value}", "default")
    return bar.append(f" {used[0][1]} and {used[1][1]}" if used else " none", "default")


def _some(faults: list[str]) -> str:
    """The first few of them."""
    if not faults:
        return ""
    more = len(faults) - SHOWN_FAULTS
    return ": " + "; ".join(faults[:SHOWN_FAULTS]) + (f"; {more} more" if more > 0 else "")
