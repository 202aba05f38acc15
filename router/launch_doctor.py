"""The doctor's rules, asked once when the pair is up: one line of text for each finding.

It knows one thing more than the doctor: the environment that both servers were started with. No
finding ends a launch.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.doctor import CannotLookError, Target, diagnose
from router.doctor_facts import Pair, ServerFacts
from router.doctor_reading import ENV
from router.doctor_rules import examine
from router.load import ROLES, Role

Environments = Mapping[Role, Mapping[str, str]]


async def look(
    targets: tuple[Target, Target], environments: Environments, threshold: float | None
) -> list[str]:
    """Return what is to be said about the pair; never empty."""
    try:
        looked = await diagnose(targets, threshold=threshold, canary=False)
    except CannotLookError as error:
        return [f"doctor: {error}"]
    found = examine(started_with(looked.pair, environments))
    lines = []
    for finding in found.findings:
        of = f" ({finding.backend})" if finding.backend else ""
        lines.append(
            f"doctor: {finding.severity}: {finding.rule}{of}: {finding.seen}. "
            f"Why: {finding.why}. Mend: {finding.mend}"
        )
    sound = "nothing spoils" if found.sound else "what is said above spoils"
    return [*lines, f"doctor: {sound} a calibration of this pair"]


def started_with(pair: Pair, environments: Environments) -> Pair:
    """Return the pair with the variables that the rules look at, as the servers have them."""

    def with_env(facts: ServerFacts, role: Role) -> ServerFacts:
        mine = environments[role]
        return msgspec.structs.replace(facts, env={n: mine[n] for n in ENV if n in mine})

    speculative, baseline = (with_env(pair.of(role), role) for role in ROLES)
    return msgspec.structs.replace(pair, speculative=speculative, baseline=baseline)
