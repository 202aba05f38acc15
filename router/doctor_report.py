"""What the doctor found, for people (a table) and for machines (JSON).

The law of this file: it shows and decides nothing. Values came from servers, so they are shown as
text, never as markup.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.doctor import Looked
from router.doctor_facts import OFF, ServerFacts
from router.doctor_findings import Examination, Finding, Severity
from router.load import ROLES

_STYLE: Final = {Severity.SPOILS: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def as_json(looked: Looked) -> bytes:
    """One object: the verdict, the findings, what was not judged, and the facts of both servers."""
    pair, examination = looked.pair, looked.examination
    threshold = pair.threshold
    body: dict[str, Any] = {
        "sound": examination.sound,
        "findings": examination.findings,
        "unjudged": examination.unjudged,
        "asked": examination.asked,
        "threshold": "always" if threshold == math.inf else threshold,
    }
    for role in ROLES:
        facts = pair.of(role)
        more = {"speculates": facts.speculates, "accept_length": facts.accept_length}
        body[role.value] = {**msgspec.to_builtins(facts, order="sorted"), **more}
    return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"


def show(looked: Looked, console: Console) -> None:
    """Print the servers, the findings and the verdict."""
    console.print(_servers(looked))
    if looked.examination.findings:
        console.print(_findings(looked.examination))
    for line in _verdict(looked.examination):
        console.print(line)


def _servers(looked: Looked) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("server", "SGLang", "speculation", "accept length", "runs at once", "attention"):
        table.add_column(title)
    for role in ROLES:
        facts = looked.pair.of(role)
        length = facts.accept_length
        table.add_row(
            *(
                Text(text)
                for text in (
                    role.value,
                    facts.version or "?",
                    _speculation(facts),
                    "-" if length is None else f"{length:.2f}",
                    str(facts.cap or "?"),
                    facts.attention or "?",
                )
            )
        )
    return table


def _speculation(facts: ServerFacts) -> str:
    if facts.algorithm is None or facts.algorithm == OFF:
        return facts.algorithm or "?"
    shape = [
        f"{word} {value}"
        for word, value in (
            ("steps", facts.speculative_num_steps),
            ("topk", facts.speculative_eagle_topk),
        )
        if value is not None
    ]
    return ", ".join([facts.algorithm, *shape])


def _findings(examination: Examination) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True)
    table.add_column("severity", no_wrap=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("seen, why it matters, and what mends it", ratio=1)
    for finding in examination.findings:
        style = _STYLE[finding.severity]
        table.add_row(Text(finding.severity, style), Text(finding.rule), _explained(finding))
    return table


def _explained(finding: Finding) -> RenderableType:
    where = f"{finding.backend} server: " if finding.backend else ""
    return Group(
        Text(f"{where}{finding.seen}", "bold"),
        Text(finding.why),
        Text(f"-> {finding.mend}", "green"),
    )


def _verdict(examination: Examination) -> list[Text]:
    counts = {
        severity: sum(finding.severity is severity for finding in examination.findings)
        for severity in Severity
    }
    spoiled = counts[Severity.SPOILS]
    lines = [
        Text("Sound: nothing spoils a calibration of this pair.", "bold green")
        if not spoiled
        else Text(
            f"Do not calibrate this pair: {_count(spoiled, 'finding')} would spoil it.", "bold red"
        )
    ]
    judged = examination.asked - len(examination.unjudged)
    counted = (
        f"{_count(counts[Severity.WARNING], 'warning')}, {_count(counts[Severity.NOTE], 'note')}"
    )
    lines.append(Text(f"{judged} of {examination.asked} rules judged; {counted}."))
    if examination.unjudged:
        names = dict.fromkeys(each.rule for each in examination.unjudged)
        lines.append(Text(f"Not judged, because a server does not say: {', '.join(names)}.", "dim"))
    return lines


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
