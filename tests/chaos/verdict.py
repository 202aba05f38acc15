"""What came of it: every request of the load held against both journals and the router's log."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from tests.chaos.load import Result
from tests.chaos.stage import Entry
from tests.chaos.timeline import Happened

REPLAY_S: Final = 0.25 + 1.0  # the router's replay window, and what a busy machine adds
UNHANDLED: Final = ("Traceback", "never retrieved", "never awaited", "Unclosed")


class Report(msgspec.Struct):
    """Everything that is reported; `broken_promises` must be empty."""

    seconds: float
    sent: int
    whole: int
    errors: dict[str, int]
    broken: int
    left: int
    unsent: int
    lost: int
    duplicated: int
    replayed: int  # seen twice, as the rules of replay allow
    uncounted: int
    leaked: dict[str, int]
    unhandled: int
    exit_code: int | None
    happened: list[Happened]
    failed_fast: list[int]  # 500s that got through in each spell of failing fast
    examples: list[str]
    broken_promises: list[str] = []


class Evidence(msgspec.Struct):
    """What the processes left behind."""

    results: list[Result]
    journal: list[Entry]
    log: list[str]
    counts: dict[str, int]
    exit_code: int | None
    happened: list[Happened]
    seconds: float


def judge(found: Evidence) -> Report:
    """The report."""
    sent = [result for result in found.results if result.kind != "unsent"]
    kinds = Counter(result.kind for result in sent)
    requests, unhandled = read_log(found.log)
    duplicated, replayed = duplicates(found.journal, requests)
    lost = [f"lost: {r.id} {r.status} {r.detail}" for r in sent if r.kind == "lost"]
    uncounted = [
        f"{r.id} ({r.kind}) has {len(requests.get(r.id, ()))} lines in the log"
        for r in sent
        if len(requests.get(r.id, ())) > 1
        or (r.kind in {"whole", "error"} and r.id not in requests)
    ]
    report = Report(
        seconds=round(found.seconds, 1),
        sent=len(sent),
        whole=kinds["whole"],
        errors=dict(
            Counter(f"{r.status} {r.detail}" for r in sent if r.kind == "error").most_common()
        ),
        broken=kinds["broken"],
        left=kinds["left"],
        unsent=len(found.results) - len(sent),
        lost=len(lost),
        duplicated=len(duplicated),
        replayed=replayed,
        uncounted=len(uncounted),
        leaked={name: count for name, count in found.counts.items() if count},
        unhandled=len(unhandled),
        exit_code=found.exit_code,
        happened=found.happened,
        failed_fast=failed_fast(sent, found.happened),
        examples=[*lost[:5], *duplicated[:5], *uncounted[:5], *unhandled[:5]],
    )
    report.broken_promises = broken_promises(report)
    return report


def broken_promises(report: Report) -> list[str]:
    """What must not be, in words; empty when all is well."""
    never_used = [
        f"{each.role} was not used after {each.step}"
        for each in report.happened
        if each.to_use is None
    ]
    checks = (
        (report.whole == 0, "no request was answered whole"),
        (report.lost > 0, f"{report.lost} requests were lost silently"),
        (report.duplicated > 0, f"{report.duplicated} requests were wrongly sent twice"),
        (report.uncounted > 0, f"{report.uncounted} requests were not counted once"),
        (bool(report.leaked), f"counts are left: {report.leaked}"),
        (report.unhandled > 0, f"{report.unhandled} lines of the log tell of what nobody handled"),
        (report.exit_code != 0, f"the router ended with exit code {report.exit_code}"),
    )
    return [text for wrong, text in checks if wrong] + never_used


def read_log(lines: Iterable[str]) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """The lines of requests by id, and those that should not be."""
    requests: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    unhandled = []
    for line in lines:
        try:
            told = json.loads(line)
        except ValueError:
            unhandled.append(f"not JSON: {line[:200]}")
            continue
        if told["event"] == "request":
            requests[told["request_id"]].append(told)
        if told["level"] in {"error", "critical"} or any(word in line for word in UNHANDLED):
            unhandled.append(line[:400])
    return dict(requests), unhandled


def duplicates(
    journal: list[Entry], requests: dict[str, list[dict[str, Any]]]
) -> tuple[list[str], int]:
    """Requests that were wrongly sent more than once, and how many rightly were."""
    seen: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(journal, key=lambda entry: entry.at):
        if entry.id != "-":
            seen[entry.id].append(entry)
    wrong = []
    right = 0
    for name, entries in seen.items():
        if len(entries) == 1:
            continue
        replay = next((line["replay"] for line in requests.get(name, ())), None)
        if allowed(entries, replay):
            right += 1
        else:
            told = ", ".join(
                f"{entry.role} at {entry.at:.3f} ({entry.orders})" for entry in entries
            )
            wrong.append(f"twice: {name} by {told}; the log says {replay}")
    return wrong, right


def allowed(entries: list[Entry], replay: str | None) -> bool:
    """Whether a rule of replay lets a request be seen so often."""
    if len(entries) > 2:
        return False
    first, second = entries
    if first.role == second.role:  # (b): a reused connection broke at once
        return replay == "replay_stale" and second.at - first.at < REPLAY_S
    return replay == "replay_refused" and "refusing" in first.orders  # (c)


def failed_fast(sent: list[Result], happened: list[Happened]) -> list[int]:
    """How many 500s clients got in each spell in which a server failed fast."""
    return [
        sum(
            result.status == 500 and spell.begin <= result.ended <= spell.end + 1.0
            for result in sent
        )
        for spell in happened
        if spell.step == "fail"
    ]
