"""The shapes of the admin listener's JSON, as its OpenAPI document describes them.

Shapes only: what fills them is in `status_view`, `status_calibration` and `explain`. A field that
is there once keeps its name and unit, since programs read it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.load import Role
from router.metrics import Outcome
from router.policy import Reason

Requests = float | Literal["infinity"]
PolicyName = Literal["frontier", "speculative", "baseline", "least-in-flight", "round-robin"]


class Shape(BaseModel):
    """Closed: what is not listed is refused on the way in and never sent on the way out."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)


class ErrorDetail(Shape):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Shape):
    """Every error of this listener."""

    error: ErrorDetail


class DecisionItem(Shape):
    """One decision."""

    kind: Literal["decision"]
    time: float = Field(description="Unix seconds.")
    request_id: str
    route: str
    backend: Role | None
    reason: Reason
    n: int = Field(description="Concurrency of the speculative backend, without this request.")
    m: int = Field(description="Concurrency of the baseline backend, without this request.")
    frontier: Requests | None = Field(description="F(m) in force: what n was compared with.")
    threshold: Requests | None = Field(description="K, or F(m) for a line without a K.")
    replay: bool
    outcome: Outcome | None = Field(description="None while the request runs.")
    status: int | None
    duration: float | None = Field(description="Seconds from the decision to the end.")
    offered: float | None = Field(None, description="Tokens/s asked for, of a rule by curves.")
    gain: float | None = Field(
        None,
        description="What its sign decided: requests in flight that leaving the server in use saves"
        " (forecast), or by how much the speculative server gains more by one more request (join).",
    )


class EventItem(Shape):
    """Something that an operator did."""

    kind: Literal["event"]
    time: float = Field(description="Unix seconds.")
    event: str
    detail: str


class Decisions(Shape):
    """The newest first."""

    items: list[Annotated[DecisionItem | EventItem, Field(discriminator="kind")]]


class TelemetryItem(Shape):
    """What a backend last said of itself."""

    source: str
    age: float = Field(description="Seconds since it was read.")
    fresh: bool = Field(description="Whether it still counts.")
    running: int
    queued: int
    token_usage: float | None
    accept_length: float | None
    max_running: int | None


class ConnectionsItem(Shape):
    """Connections to one backend."""

    busy: int
    idle: int


class BackendItem(Shape):
    """One backend as it stands."""

    role: Role
    url: str
    usable: bool = Field(description="Whether it may get new work.")
    health: Literal["up", "down", "unknown"]
    ready_probe: Literal["up", "down", "unknown"] = Field(description="What its /ready alone says.")
    breaker: Literal["closed", "half_open", "open"]
    failures: int = Field(description="Failed requests in a row.")
    drained: bool
    contended: bool = Field(description="Whether it refused work a moment ago, or says nothing.")
    in_flight: int
    foreign: int = Field(description="Other clients' requests, by its own telemetry.")
    concurrency: int
    connections: ConnectionsItem
    telemetry: TelemetryItem | None


class FrontierItem(Shape):
    """The line in force."""

    scope: Literal["total", "speculative", "table"]
    threshold: Requests | None = Field(description="K; None for a table.")
    table: list[Requests]
    in_force: Requests = Field(description="F(m) at this moment, never above the cap.")
    band: float
    dwell: float = Field(description="Seconds.")


class PolicyItem(Shape):
    """What decides, and what it remembers."""

    name: str
    configured: bool = Field(
        description="Kept up to date with the calibration; else by an operator."
    )
    frontier: FrontierItem | None
    side: Role | None = Field(description="Of the line; None for a policy without one.")
    side_for: float | None = Field(description="Seconds on this side; None since the start.")


class FindingItem(Shape):
    """Something that the last look at the pair found; `crossover doctor` explains it."""

    rule: str
    severity: Literal["spoils", "warning", "note"]
    backend: Role | None = Field(description="None: both together.")
    seen: str
    why: str
    mend: str


class PairItem(Shape):
    """Whether the pair is still what its flags say."""

    age: float | None = Field(description="Seconds since the last look; None before the first.")
    speculation: Literal["active", "lost", "unknown"]
    parity: Literal["fair", "unfair", "unknown"]
    alarm: str | None = Field(description="Why speculation is lost, until it was seen back.")
    findings: list[FindingItem]
    unknown: list[str] = Field(description="Why a backend could not be asked.")


class CurvesItem(Shape):
    """What was measured of both servers, for drawing: [requests, tokens/s], rising.

    Straight between its points on logarithmic axes, and constant beyond the ends.
    """

    speculative: list[tuple[float, float]] = Field(description="As calibrated.")
    baseline: list[tuple[float, float]]
    ratio: float = Field(description="What the speculative curve is multiplied with now.")
    interval: tuple[Requests, Requests] | None = Field(description="Of the crossover, requests.")


class CalibrationItem(Shape):
    """The calibration in force, and what speaks against it."""

    path: str
    created: str | None = Field(description="When it was made, in its own words.")
    age: float | None = Field(description="Seconds since then.")
    loaded: float = Field(description="Unix seconds: since when it is in force.")
    verdict: Literal["at", "always", "never", "unsure"] | None
    scope: Literal["total", "speculative", "table"]
    threshold: Requests | None = Field(description="K as calibrated; None for a table.")
    table: list[Requests]
    live_threshold: Requests | None = Field(description="K as the accept length moves it.")
    rule: str = Field(description="How it is followed; threshold: by its line.")
    problem: str | None = Field(description="Why what the file holds now is not in force.")
    matches: bool | None = Field(description="Whether the live servers are those that it is of.")
    mismatches: list[str]
    alarm: str | None = Field(
        description="Why its line is not trusted: all goes to the server that does not speculate."
    )
    accept_length: float | None = Field(description="Tokens per verify step, live.")
    accept_length_calibrated: float | None
    accept_length_ratio: float | None = Field(description="Live over calibrated, smoothed.")
    drift: dict[Role, float] = Field(description="Measured speed over the curve's, where known.")
    advice: str | None = Field(description="recalibrate, and why.")
    curves: CurvesItem | None = Field(description="None where the file holds none.")


class AffinityItem(Shape):
    """Where conversations are."""

    in_force: bool = Field(description="Whether the policy in force lets them stay.")
    conversations: int = Field(description="Remembered now.")
    size: int = Field(description="Remembered at most.")
    kept: int = Field(description="Later turns that went to the server with their prefix.")
    lost: int = Field(description="Later turns that went to the other one.")


class QueueItem(Shape):
    """Our own queue and limits."""

    waiting: int
    queue_size: int
    queue_timeout: float
    in_flight: int
    max_in_flight: int


class ReasonItem(Shape):
    """How often a backend was chosen for one reason since the start, replays included."""

    backend: Role | None
    reason: Reason
    count: int


class AdviceItem(Shape):
    """Something that is not as it should be, in plain words."""

    code: str = Field(description="One of a closed set, or pair:RULE for a rule of the doctor.")
    severity: Literal["wrong", "warning", "note"]
    backend: Role | None = Field(description="None: the router, or both backends together.")
    seen: str
    mend: str = Field(description="The command, flag or step that mends it.")


class Status(Shape):
    """The whole router at one moment."""

    time: float = Field(description="Unix seconds.")
    version: str
    uptime: float = Field(description="Seconds.")
    draining: bool
    ready: bool
    policy: PolicyItem
    backends: list[BackendItem]
    pair: PairItem | None = Field(description="None when nobody watches it.")
    calibration: CalibrationItem | None = Field(description="None without one.")
    affinity: AffinityItem | None = Field(description="None where it is off.")
    queue: QueueItem
    client_connections: int
    findings: list[AdviceItem] = Field(description="The worst first; empty: all is well.")
    reasons: list[ReasonItem] = Field(description="Those that were ever given.")
    path: list[tuple[float, int, int]] = Field(
        description="[unix seconds, n, m] over the last minutes, oldest first."
    )
    settings: dict[str, str | int | float | bool | list[str] | None]


class PolicyChange(Shape):
    """A new policy. What is left out stays as it was configured."""

    policy: PolicyName
    threshold: (
        Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["always", "never"] | None
    ) = Field(None, description="K in requests; only with the frontier policy.")
    scope: Literal["total", "speculative"] | None = None
    band: Annotated[float, Field(ge=0, lt=1)] | None = None
    dwell: Annotated[float, Field(ge=0, allow_inf_nan=False, description="Seconds.")] | None = None


class DrainState(Shape):
    """What became of a drain or an enable."""

    role: Role
    drained: bool
    usable: bool


class Alive(Shape):
    """The admin listener answers."""

    status: Literal["ok"] = "ok"
