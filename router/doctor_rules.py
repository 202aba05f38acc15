"""Every rule of the doctor, in one table, and the document that is made of it.

The law of this file: it only gathers. A rule is added where it belongs (`doctor_speculation`,
`doctor_parity`, `doctor_capacity`) and described there; `DOCTOR.md` is this table, and a test says
so.
"""

from __future__ import annotations

from typing import Final

from router import doctor_capacity, doctor_findings, doctor_parity, doctor_speculation
from router.doctor_facts import Pair
from router.doctor_findings import Examination, Group, Rule

RULES: Final[tuple[Rule, ...]] = (
    *doctor_speculation.RULES,
    *doctor_parity.RULES,
    *doctor_capacity.RULES,
)
_TITLES: Final = {
    Group.SPECULATION: "Is speculation on?",
    Group.SETUP: "How does it speculate?",
    Group.PARITY: "Is the comparison fair?",
}
_HEAD: Final = """\
# What `crossover doctor` looks at

Written by `crossover doctor --rules`. A finding that **spoils** makes the exit code 1: a
calibration of this pair would measure something else than it says. A *warning* or a *note* does
not. What a server does not say is not judged, and the doctor lists it.

The router asks the same rules itself, without the canary, at its start, every `pair_interval` and
when a server has come back: a finding that spoils in the first group makes
`crossover_speculation_active` 0, one in the last group makes `crossover_pair_parity` 0.
"""


def examine(pair: Pair) -> Examination:
    """Ask every rule about this pair."""
    return doctor_findings.examine(pair, RULES)


def document() -> str:
    """The rules in Markdown."""
    lines = [_HEAD]
    for group, title in _TITLES.items():
        lines += [f"## {title}", "", "| rule | severity | looks at | why | mend |"]
        lines.append("|---|---|---|---|---|")
        for rule in RULES:
            if rule.group is group:
                of = " or ".join(rule.severities)
                lines.append(f"| `{rule.name}` | {of} | {rule.looks} | {rule.why} | {rule.mend} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
