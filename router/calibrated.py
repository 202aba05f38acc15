"""From a calibration to the policy that it asks for.

Pure. A calibration names a rule and its parameters (`switch_rule`); a setting may name another one.
What a rule has to know of the pair and the parameters do not say is taken from the calibration.
`Terms` are what a calibration comes to under the settings, and `policy_of` makes the policy of them,
also with the speculative curve moved by the live accept length (`live_line`).
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import msgspec

from router.calibration import Calibration, CalibrationError, parse_calibration
from router.fingerprint import Fact
from router.frontier import Frontier
from router.live_line import live_frontier
from router.policies import RULES, LineSettings, configured_policy
from router.policy import Policy
from router.rules import Curves

# Both names of following the line as it is.
PLAIN: Final = ("threshold", "frontier")


class Rule(msgspec.Struct, frozen=True):
    """What to make the policy of."""

    name: str  # as `policies.make_policy` knows it
    parameters: dict[str, float]
    curves: Curves


def read_rule(calibration: Calibration, wanted: str | None) -> Rule | None:
    """The rule to decide by; None to follow the line. `wanted`: the setting, which wins.

    Raises CalibrationError for a rule that is not known, or one without the curves that it needs.
    """
    named = calibration.switch_rule
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
    if name == "forecast":
        given = known_of(calibration) | given
    one, other = (
        [(point.concurrency, point.tokens_per_second) for point in curve.points]
        for curve in (curves.speculative, curves.baseline)
    )
    return Rule(name, given, (one, other))


def known_of(calibration: Calibration) -> dict[str, float]:
    """What a calibration says of its pair, as parameters of the forecast; a hand's own come first.

    The length of an answer is of the sweep. It counts until as many real answers have ended
    (`offered.PRIOR`), and one that is four times too long has the first seconds judged as a load
    four times as large.
    """
    found: dict[str, float] = {}
    length = _answer_tokens(calibration.fingerprint.get("output_tokens"))
    if length is not None:
        found["output_tokens"] = length
    shares = calibration.contention
    if shares is not None:
        for key, share in (("speculative", shares.speculative), ("baseline", shares.baseline)):
            if share is not None:
                found[f"{key}_share"] = min(1.0, share)
    return found


def _answer_tokens(said: Fact) -> float | None:
    """The mean length that a fingerprint says: a number, or the bounds that lengths lie evenly in."""
    try:
        bounds = [float(bound) for bound in str(said).split("-")]
    except ValueError:
        return None
    mean = sum(bounds) / len(bounds)
    return mean if 1.0 <= mean < math.inf else None


class RoutingSettings(LineSettings, Protocol):
    """The settings that a calibration is read under; `router.config.Settings` has them."""

    @property
    def rule(self) -> str | None:
        """The rule to follow instead of the calibration's."""
        ...

    @property
    def model_fields_set(self) -> set[str]:
        """The names of the settings that were given: those win over the calibration."""
        ...


class Terms(msgspec.Struct, frozen=True):
    """What a calibration comes to under the settings."""

    calibration: Calibration
    frontier: Frontier
    band: float | None  # None: as configured
    dwell: float | None  # seconds; None: as configured
    rule: Rule | None  # None: the line is followed as it is


def read_terms(document: bytes, settings: RoutingSettings) -> Terms:
    """Understand a file. Raises CalibrationError, also where it and the settings contradict."""
    calibration = parse_calibration(document)
    given, switch = settings.model_fields_set, calibration.switch
    return Terms(
        calibration,
        calibration.line,
        None if "band" in given else switch.band,
        None if "dwell" in given else switch.dwell,
        read_rule(calibration, settings.rule),
    )


def policy_of(terms: Terms, settings: LineSettings, ratio: float = 1.0) -> Policy:
    """The policy, with the speculative server `ratio` times as fast as it was measured.

    Takes a tenth of a second for a rule that decides by tables. Raises CalibrationError for curves
    or parameters that the rule cannot take.
    """
    rule, frontier, curves = terms.rule, terms.frontier, terms.calibration.curves
    try:
        if ratio != 1.0 and rule is None and curves is not None:
            frontier = live_frontier(frontier, curves, ratio)
        return configured_policy(
            "frontier" if rule is None else rule.name,
            settings,
            frontier,
            band=terms.band,
            dwell=terms.dwell,
            curves=None if rule is None else _faster(rule.curves, ratio),
            parameters={} if rule is None else rule.parameters,
        )
    except ValueError as error:  # PolicyError is one
        raise CalibrationError(str(error)) from error


def _faster(curves: Curves, ratio: float) -> Curves:
    speculative, baseline = curves
    return [(level, speed * ratio) for level, speed in speculative], baseline
