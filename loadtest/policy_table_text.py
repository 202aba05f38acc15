"""The cells of the policy table as Markdown. Pure.

Numbers are milliseconds per output token, mean / 95th percentile. A rule's ratios are to the better
single server, the one with the lower mean: r is the rule's mean by that server's, and p the same of the
95th percentiles.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadtest.compare import Outcome

Cells = Mapping[tuple[str, str, str, str], Outcome]  # part, arm, load, arrangement
SPECULATIVE, BASELINE = "speculative only", "baseline only"
FIRST = "Mean ms per token / mean ms to the first token."


def table_text(cells: Cells) -> str:
    """All tables."""
    parts = [_worst(cells)]
    for arm in _arms(cells, "one"):
        parts += ["", f"### One GPU, {arm}", "", *_one(cells, "one", arm, "forecast")]
    parts += ["", "### Two GPUs: mean ms per token by the best rule at that load", ""]
    parts += _two(cells)
    for arm in _arms(cells, "own"):
        parts += ["", f"### One GPU, {arm}, each request paying for its own prompt", ""]
        parts += _one(cells, "own", arm, "forecast")
    for arm in _arms(cells, "talk"):
        parts += ["", f"### One GPU, {arm}, conversations with prefix caches", ""]
        parts += _one(cells, "talk", arm, "forecast")
    if _arms(cells, "stay"):
        parts += ["", "### Two GPUs, conversations: with and without affinity", "", FIRST, ""]
        parts += _kept(cells, "stay", ("threshold", "join-speed", "join-delay"), ", affinity")
    if _arms(cells, "shared"):
        parts += ["", "### One GPU, conversations: what staying would cost", "", FIRST, ""]
        parts += _shared(cells)
    for arm in _arms(cells, "cap"):
        parts += ["", f"### One GPU, {arm}, a speculative server that runs 48 at most", ""]
        parts += _one(cells, "cap", arm, "forecast")
    return "\n".join(parts)


def better(cells: Cells, part: str, arm: str, load: str) -> Outcome:
    """The single server with the lower mean."""
    found = [cells[part, arm, load, name] for name in (SPECULATIVE, BASELINE)]
    return min(found, key=lambda outcome: outcome.ms_per_token)


def ratios(outcome: Outcome, single: Outcome) -> tuple[float, float]:
    """Mean and 95th percentile by the better single server's."""
    return (
        outcome.ms_per_token / single.ms_per_token,
        outcome.p95_ms_per_token / single.p95_ms_per_token,
    )


def _arms(cells: Cells, part: str) -> list[str]:
    return list(dict.fromkeys(arm for each, arm, _, _ in cells if each == part))


def _loads(cells: Cells, part: str, arm: str) -> list[str]:
    return list(dict.fromkeys(load for each, of, load, _ in cells if each == part and of == arm))


def _names(cells: Cells, part: str) -> list[str]:
    return list(dict.fromkeys(name for each, _, _, name in cells if each == part))


def _worst(cells: Cells) -> str:
    """One line for each rule: its worst and mean ratio at steady loads, and at those that change."""
    lines = [
        "### One GPU: every rule by the better single server, over all arms",
        "",
        "| rule | steady: within 5 % | worst mean | worst p95 | mean | changing: worst | best |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in _names(cells, "one"):
        if name in {SPECULATIVE, BASELINE}:
            continue
        still: list[tuple[float, float]] = []
        moving: list[float] = []
        for (part, arm, load, of), outcome in cells.items():
            if part != "one" or of != name:
                continue
            mean, p95 = ratios(outcome, better(cells, part, arm, load))
            if load in {"steps", "day"}:
                moving.append(mean)
            else:
                still.append((mean, p95))
        steady = " | | | "
        if still:
            inside = sum(max(each) <= 1.05 for each in still)
            steady = (
                f"{inside} of {len(still)} | {max(m for m, _ in still):.2f} |"
                f" {max(p for _, p in still):.2f} |"
                f" {sum(m for m, _ in still) / len(still):.3f}"
            )
        lines.append(f"| {name} | {steady} | {max(moving):.3f} | {min(moving):.3f} |")
    return "\n".join(lines)


def _one(cells: Cells, part: str, arm: str, rule: str) -> list[str]:
    """One arm: both servers, the rule, its ratios and switches, and the bound where there is one."""
    lines = [
        f"| load | speculative only | baseline only | {rule} | r | p | switches | clairvoyant |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for load in _loads(cells, part, arm):
        spec, base, found = (cells[part, arm, load, n] for n in (SPECULATIVE, BASELINE, rule))
        mean, p95 = ratios(found, better(cells, part, arm, load))
        known = cells.get((part, arm, load, "clairvoyant"))
        bound = _pair(known) if known is not None else ""
        lines.append(
            f"| {load} | {_pair(spec)} | {_pair(base)} | {_pair(found)} | {mean:.3f} | {p95:.3f} |"
            f" {found.switches} | {bound} |"
        )
    return lines


def _two(cells: Cells) -> list[str]:
    names = _names(cells, "two")
    lines = [f"| arm | load | best | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for arm in _arms(cells, "two"):
        for load in _loads(cells, "two", arm):
            row = {name: cells["two", arm, load, name].ms_per_token for name in names}
            best = min(row[name] for name in names if cells["two", arm, load, name].kind == "rule")
            ratio = " | ".join(f"{row[name] / best:.2f}" for name in names)
            lines.append(f"| {arm} | {load} | {best:.1f} | {ratio} |")
    return lines


def _kept(cells: Cells, part: str, rules: tuple[str, ...], suffix: str) -> list[str]:
    """Each rule as it is and with affinity, beside two speculative servers."""
    lines = [
        f"| arm | load | two speculative | {' | '.join(f'{name} | with' for name in rules)} |",
        "|---" * (3 + 2 * len(rules)) + "|",
    ]
    for arm in _arms(cells, part):
        for load in _loads(cells, part, arm):
            found = [cells[part, arm, load, "two speculative"]]
            for name in rules:
                found += [cells[part, arm, load, name], cells[part, arm, load, name + suffix]]
            lines.append(f"| {arm} | {load} | {' | '.join(_with_first(each) for each in found)} |")
    return lines


def _shared(cells: Cells) -> list[str]:
    """Beside the better server, what was tried and the bound of who knows the load."""
    names = [name for name in _names(cells, "shared") if name not in {SPECULATIVE, BASELINE}]
    lines = [
        f"| arm | load | better server | {' | '.join(names)} |",
        "|---" * (3 + len(names)) + "|",
    ]
    for arm in _arms(cells, "shared"):
        for load in _loads(cells, "shared", arm):
            found = [better(cells, "shared", arm, load)]
            found += [cells["shared", arm, load, name] for name in names]
            lines.append(f"| {arm} | {load} | {' | '.join(_with_first(each) for each in found)} |")
    return lines


def _with_first(outcome: Outcome) -> str:
    first = 0.0 if outcome.ttft_ms is None else outcome.ttft_ms
    return f"{outcome.ms_per_token:.2f} / {first:.0f}"


def _pair(outcome: Outcome) -> str:
    return f"{outcome.ms_per_token:.1f} / {outcome.p95_ms_per_token:.1f}"
