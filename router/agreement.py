"""Do a decision's numbers bear out its reason? For tests, the demo and whoever reads a log.

Everything that a decision was made of is in the decision: this checks it after the fact, without
the policy that made it.

Pure.
"""

from __future__ import annotations

from typing import Literal

from router.affinity import near
from router.frontier import INFINITE, below_band
from router.load import Role
from router.policy import Decision, Reason


def agrees(
    decision: Decision, band: float, scope: Literal["total", "speculative", "table"] = "total"
) -> bool:
    """Whether the numbers of a decision bear out its reason.

    `band` and `scope` are those of the line that decided. The edge of a table's band is not among
    the numbers: BAND and DWELL need only be below its line.
    """
    backend, reason, n, m = decision.backend, decision.reason, decision.n, decision.m
    line, k, speculative = decision.frontier, decision.threshold, backend is Role.SPECULATIVE
    match reason:
        case Reason.PINNED | Reason.UNAVAILABLE:
            return True
        case Reason.FIXED | Reason.ROUND_ROBIN | Reason.REPLAY_CONNECT | Reason.REPLAY_REFUSED:
            return backend is not None
        case Reason.LEAST_IN_FLIGHT:
            return backend is not None and speculative is (n <= m)
        case Reason.CONTENDED if line is None:  # a policy without a line
            return backend is not None
    if decision.offered is not None or decision.gain is not None:  # a rule that decides by curves
        return backend is not None and _rule_agrees(decision)
    if line is None or k is None or backend is None:
        return False
    load, limit = (n + m, max(0.0, k - m)) if scope == "total" else (n, k)
    low = below_band(load, k, band) and below_band(n, line, band)  # the line in force may be a cap
    match reason:
        case Reason.BELOW_THRESHOLD | Reason.ALWAYS:
            fits = speculative and n < line and (reason is not Reason.ALWAYS or k == INFINITE)
        case Reason.NEVER:
            fits = not speculative and k == 0
        case Reason.AT_THRESHOLD:
            fits = not speculative and load >= k
        case Reason.CAP:
            fits = not speculative and line <= n and load < k
        case Reason.BAND | Reason.DWELL:
            edge = scope == "table" or low is (reason is Reason.DWELL)
            fits = not speculative and n < line and edge
        case Reason.PREFIX:  # it stays on the side that the line would not have chosen
            within = n < line or line == k  # the line in force may be a cap
            fits = near(n, k, speculative=speculative) and (within if speculative else n < line)
        case Reason.CONTENDED | Reason.QUEUED | Reason.KV_CACHE:
            fits = speculative or n < line  # sent away from the speculative side: below the line
        case _:
            fits = not speculative  # a fence
    return fits and line <= limit


def _rule_agrees(decision: Decision) -> bool:
    """The same for a rule that decides by curves: the sign of its gain is what decided."""
    speculative, gain = decision.backend is Role.SPECULATIVE, decision.gain
    match decision.reason:
        case Reason.FORECAST_UNSURE:
            return gain is None
        case Reason.FORECAST:
            return gain is not None and gain <= 0.0
        case Reason.FORECAST_SWITCH | Reason.DWELL:
            return gain is not None and gain > 0.0
        case Reason.JOIN:
            return gain is not None and speculative is (gain >= 0.0)
        case Reason.PREFIX:
            return gain is not None and speculative is (gain < 0.0)
        case Reason.CAP:
            return (
                not speculative
                and decision.frontier is not None
                and decision.n >= decision.frontier
            )
        case Reason.CONTENDED | Reason.QUEUED | Reason.KV_CACHE:
            return True
        case reason:
            return reason.startswith("fence_") and not speculative
