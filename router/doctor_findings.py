"""The words of the doctor: what a rule is, what it spots, and what comes out of asking them all.

The law of this file: values, and the one loop that asks every rule. It knows no rule.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from router.doctor_facts import Pair, ServerFacts
from router.load import ROLES, Role


class Severity(enum.StrEnum):
    """How bad a finding is."""

    SPOILS = "spoils"  # a calibration of this pair would measure something else than it says
    WARNING = "warning"  # it can be calibrated, and will disappoint in a way worth knowing
    NOTE = "note"


class Group(enum.StrEnum):
    """What a rule is about."""

    SPECULATION = "speculation"  # a finding that spoils means: it is lost
    SETUP = "setup"  # how it speculates
    PARITY = "parity"  # a finding that spoils means: the comparison is not fair


class Spot(NamedTuple):
    """What a rule has spotted. `mend` replaces the rule's own advice where there is better one."""

    severity: Severity
    seen: str
    mend: str = ""


Check = Callable[[Pair, ServerFacts], Iterable[Spot]]


class Rule(NamedTuple):
    """One thing that is looked at.

    A rule about servers (`of`) is asked for each with its facts; one about the pair once, with the
    speculative server's. It is asked only when all of `needs` is known: names of `ServerFacts`, of
    the server that it is asked for, or of both.
    """

    name: str
    group: Group
    severities: tuple[Severity, ...]  # that it can have
    looks: str  # at what
    why: str
    mend: str
    check: Check
    needs: tuple[str, ...] = ()
    of: tuple[Role, ...] = ()


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong with the pair, for people and for machines."""

    rule: str
    group: Group
    severity: Severity
    backend: Role | None  # None: both together
    seen: str
    why: str
    mend: str


class Unjudged(msgspec.Struct, frozen=True):
    """A rule that could not be asked, and what is not known for it."""

    rule: str
    group: Group
    backend: Role | None
    missing: tuple[str, ...]  # as in "baseline.page_size"


class Examination(msgspec.Struct, frozen=True):
    """Everything that was found, the worst first, and what could not be judged."""

    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]
    asked: int  # rules; one that is asked for both servers counts twice

    @property
    def sound(self) -> bool:
        """Whether nothing spoils a calibration."""
        return not self.spoiled()

    def spoiled(self, *groups: Group) -> list[Finding]:
        """What spoils a calibration, of these groups or of all."""
        return [
            finding
            for finding in self.findings
            if finding.severity is Severity.SPOILS and finding.group in (groups or Group)
        ]


def examine(pair: Pair, rules: Sequence[Rule]) -> Examination:
    """Ask every rule."""
    findings: list[Finding] = []
    unjudged: list[Unjudged] = []
    asked = 0
    for rule in rules:
        for backend in rule.of or (None,):
            asked += 1
            missing = tuple(
                f"{role.value}.{name}"
                for role in ([backend] if backend else ROLES)
                for name in rule.needs
                if getattr(pair.of(role), name) is None
            )
            if missing:
                unjudged.append(Unjudged(rule.name, rule.group, backend, missing))
                continue
            findings += [
                Finding(
                    rule.name,
                    rule.group,
                    spot.severity,
                    backend,
                    spot.seen,
                    rule.why,
                    spot.mend or rule.mend,
                )
                for spot in rule.check(pair, pair.of(backend or Role.SPECULATIVE))
            ]
    findings.sort(key=lambda finding: list(Severity).index(finding.severity))
    return Examination(tuple(findings), tuple(unjudged), asked)
