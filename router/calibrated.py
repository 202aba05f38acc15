"""From a calibration to the rule that it asks for.

Pure. A calibration names a rule and its parameters (`switch_rule`); a setting may name another one.
What a rule has to know of the pair and the parameters do not say is taken from the calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from router.calibration import Calibration, CalibrationError
from router.policies import RULES
from router.rules import Curves

# Both names of following the line as it is.
PLAIN: Final = ("threshold", "frontier")


class NamedRule(Protocol):
    """`switch_rule` of a calibration."""

    @property
    def name(self) -> str:
        """Of the rule."""
        ...

    @property
    def parameters(self) -> Mapping[str, float]:
        """Of the rule."""
        ...


class Shares(Protocol):
    """`contention` of a calibration: the mean share of its speed that each server keeps."""

    @property
    def speculative(self) -> float | None:
        """None: not known."""
        ...

    @property
    def baseline(self) -> float | None:
        """None: not known."""
        ...


class Rule(msgspec.Struct, frozen=True):
    """What to make the policy of."""

    name: str  # as `policies.make_policy` knows it
    parameters: dict[str, float]
    curves: Curves


def read_rule(calibration: Calibration, wanted: str | None) -> Rule | None:
    """The rule to decide by; None to follow the line. `wanted`: the setting, which wins.

    Raises CalibrationError for a rule that is not known, or one without the curves that it needs.
    """
    named: NamedRule | None = getattr(calibration, "switch_rule", None)
    name = wanted or (named.name if named is not None else PLAIN[0])
    if name in PLAIN:
        return None
    if name not in RULES:
        known = ", ".join((PLAIN[0], *RULES))
        raise CalibrationError(f"switch_rule.name: {name!r} is none of {known}")
    curves = calibration.curves
    if curves is None:
        raise CalibrationError(f"curves: the rule {name} decides by them, and there are none")
    given = dict(named.parameters) if named is not None and named.name == name else {}
    shares: Shares | None = getattr(calibration, "contention", None)
    if name == "forecast" and shares is not None:
        for key, share in (("speculative", shares.speculative), ("baseline", shares.baseline)):
            if share is not None:
                given.setdefault(f"{key}_share", min(1.0, share))
    one, other = (
        [(point.concurrency, point.tokens_per_second) for point in curve.points]
        for curve in (curves.speculative, curves.baseline)
    )
    return Rule(name, given, (one, other))
