"""From a name to a policy: the one place where the names of policies are known.

Used at the start, when the configuration names one, and by the admin listener, when an operator
changes it. Nothing is guessed: a setting that the policy has no use for is refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Final, Literal, Protocol

from router.frontier import Frontier, Scope
from router.load import Role
from router.policy import (
    Fences,
    FixedPolicy,
    FrontierPolicy,
    LeastInFlightPolicy,
    Marks,
    Policy,
    RoundRobinPolicy,
)
from router.rules import Curves, ForecastPolicy, JoinPolicy, RuleError, read_parameters

# Those that decide by the curves of a calibration.
RULES: Final = ("forecast", "join-speed", "join-delay")
NAMES: Final = ("frontier", "speculative", "baseline", "least-in-flight", "round-robin", *RULES)


class LineSettings(Protocol):
    """The settings that a policy is made of; `router.config.Settings` has them."""

    @property
    def band(self) -> float:
        """Share of the line."""
        ...

    @property
    def dwell(self) -> float:
        """Seconds."""
        ...

    @property
    def queue_mark(self) -> int | None:
        """Requests queued inside a backend; None: what fits the policy."""
        ...

    @property
    def affinity(self) -> Literal["auto", "off"]:
        """Whether conversations stay with their prefix where that is cheaper."""
        ...

    @property
    def kv_mark(self) -> float:
        """Share of a KV cache."""
        ...

    @property
    def fence_structured_output(self) -> bool:
        """Whether such requests go to the baseline."""
        ...

    @property
    def fence_logprobs(self) -> bool:
        """Whether such requests go to the baseline."""
        ...

    @property
    def fence_n(self) -> bool:
        """Whether such requests go to the baseline."""
        ...

    @property
    def fence_prompt_bytes(self) -> int | None:
        """The longest body that is speculated."""
        ...


class PolicyError(ValueError):
    """There is no such policy, or it cannot be made of what was given."""


def make_frontier(threshold: float, scope: Scope = "total") -> Frontier:
    """The line for one number of requests; infinity is always and zero never."""
    if math.isnan(threshold) or threshold < 0:
        raise PolicyError(f"threshold: not a number of requests from 0 up: {threshold}")
    if scope == "total":
        return Frontier.total(threshold)
    if scope == "speculative":
        return Frontier.speculative_only(threshold)
    raise PolicyError(f"scope: neither total nor speculative: {scope}")


def make_policy(
    name: str,
    *,
    frontier: Frontier | None = None,
    band: float = 0.2,
    dwell: float = 5.0,
    marks: Marks = Marks(),  # noqa: B008  (frozen)
    fences: Fences = Fences(),  # noqa: B008  (frozen)
    curves: Curves | None = None,
    parameters: Mapping[str, float] = {},
    affinity: bool = False,
) -> Policy:
    """The policy of this name. Raises PolicyError for an unknown name or a value out of range.

    `band` is a share of the line, 0 up to but not 1; `dwell` is in seconds. `curves` and
    `parameters` are for the rules; `affinity` is for policies of servers with a GPU each.
    """
    if name in RULES:
        return _make_rule(name, curves, parameters, marks, fences, affinity=affinity)
    if name == "frontier":
        if frontier is None:
            raise PolicyError("policy: frontier needs a threshold or a calibration")
        if not 0.0 <= band < 1.0:
            raise PolicyError(f"band: not a share from 0 up to but not 1: {band}")
        if not 0.0 <= dwell < math.inf:
            raise PolicyError(f"dwell: not a number of seconds from 0 up: {dwell}")
        return FrontierPolicy(
            frontier, band=band, dwell=dwell, marks=marks, fences=fences, affinity=affinity
        )
    if name == "least-in-flight":
        return LeastInFlightPolicy()
    if name == "round-robin":
        return RoundRobinPolicy()
    if name in {Role.SPECULATIVE, Role.BASELINE}:
        return FixedPolicy(Role(name))
    raise PolicyError(f"policy: none of {', '.join(NAMES)}: {name}")


def _make_rule(
    name: str,
    curves: Curves | None,
    parameters: Mapping[str, float],
    marks: Marks,
    fences: Fences,
    *,
    affinity: bool,
) -> Policy:
    if curves is None:
        raise PolicyError(f"policy: {name} needs a calibration with the curves of both servers")
    try:
        if name == "forecast":
            given = read_parameters(parameters)
            return ForecastPolicy(curves, given, marks=marks, fences=fences)
        if parameters:
            raise RuleError(f"there are no parameters of {name}, got {', '.join(parameters)}")
        by: Literal["speed", "delay"] = "speed" if name == "join-speed" else "delay"
        return JoinPolicy(curves, by, marks=marks, fences=fences, affinity=affinity)
    except ValueError as error:
        raise PolicyError(f"policy: {name}: {error}") from error


def configured_policy(
    name: str,
    settings: LineSettings,
    frontier: Frontier | None,
    *,
    band: float | None = None,
    dwell: float | None = None,
    curves: Curves | None = None,
    parameters: Mapping[str, float] = {},
) -> Policy:
    """The policy of this name with marks, fences, band and dwell as configured, or as given."""
    queued = settings.queue_mark
    if queued is None:
        # On shared GPUs the other server has no more room, and each switch is an overlap: a mark of
        # 0 made 500 switches in four minutes and twice the wait (loadtest/RULES.md).
        shared = name == "frontier" and frontier is not None and frontier.scope == "total"
        queued = sys.maxsize if shared else 0
    return make_policy(
        name,
        frontier=frontier,
        band=settings.band if band is None else band,
        dwell=settings.dwell if dwell is None else dwell,
        marks=Marks(queued, settings.kv_mark),
        fences=Fences(
            settings.fence_structured_output,
            settings.fence_logprobs,
            settings.fence_n,
            settings.fence_prompt_bytes,
        ),
        curves=curves,
        parameters=parameters,
        affinity=settings.affinity == "auto",
    )


def policy_name(policy: Policy) -> str:
    """The name that makes a policy of this kind; the class for one that has no name."""
    match policy:
        case FrontierPolicy():
            return "frontier"
        case FixedPolicy():
            return policy.role.value
        case LeastInFlightPolicy():
            return "least-in-flight"
        case RoundRobinPolicy():
            return "round-robin"
        case ForecastPolicy():
            return "forecast"
        case JoinPolicy():
            return f"join-{policy.by}"
    return type(policy).__name__
