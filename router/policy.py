"""Which backend, and why: a pure function from (snapshot, request) to a decision.

No clock and no I/O; `now` and what a policy remembers come in the snapshot, and what it wants
remembered goes out in the decision. The caller decides and counts in one synchronous step, so
nothing can come between the look and the count.

Order of `FrontierPolicy`, first match wins; the numbered cases are the numbered branches of
`overruled`, which the rules share:

    1. the request is pinned to a backend;
    2. only one backend, or none, is available;
    3. a fence: the request is of a kind that is not speculated;
    4. the line, with its band and dwell; near it a request stays with its prefix (`affinity`);
    5. the chosen backend refused work a moment ago, queues, or is short of KV cache, and the
       other is none of these.

The line is evaluated for every request, pinned ones too: what a policy remembers follows the load,
not the mix of requests.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from router.affinity import stays
from router.explained import Explained
from router.frontier import Frontier, below_band
from router.load import BASELINE, SPECULATIVE, BackendLoad, LoadSnapshot, PolicyMemory, Role
from router.request import RequestInfo


class Reason(Explained):
    """Why a backend was chosen. A closed set: each is a metric label."""

    BELOW_THRESHOLD = "below_threshold", "speculative: n < F(m)"
    AT_THRESHOLD = "at_threshold", "baseline: the line is reached"
    BAND = "band", "baseline: below the line, not yet below the band"
    DWELL = "dwell", "the server in use: below the band, or worth leaving, not yet long enough"
    CAP = "cap", "baseline: the speculative server runs as many as it may"
    ALWAYS = "always", "speculative: the line is infinite"
    NEVER = "never", "baseline: the line is zero"
    PINNED = "pinned", "the client asked, and may"
    UNAVAILABLE = "unavailable", "the other backend takes no new work"
    FENCE_STRUCTURED = "fence_structured_output", "baseline: the request wants structured output"
    FENCE_LOGPROBS = "fence_logprobs", "baseline: the request wants log probabilities"
    FENCE_CHOICES = "fence_n", "baseline: the request wants more than one choice"
    FENCE_PROMPT = "fence_prompt", "baseline: the prompt is longer than the fence"
    CONTENDED = "contended", "the preferred backend refused work a moment ago, or says nothing"
    QUEUED = "queued", "the preferred backend queues"
    KV_CACHE = "kv_cache", "the preferred backend is short of KV cache"
    FIXED = "fixed", "a policy that always names one backend"
    LEAST_IN_FLIGHT = "least_in_flight", "the backend with the lower concurrency"
    ROUND_ROBIN = "round_robin", "the backend whose turn it is"
    FORECAST = "forecast", "the server in use: switching is not expected to pay"
    FORECAST_SWITCH = "forecast_switch", "the other one from now on: switching is expected to pay"
    FORECAST_UNSURE = "forecast_unsure", "the server in use: too little seen, or a switch under way"
    JOIN = "join", "the server that one more request serves better"
    PREFIX = "prefix", "the server with the conversation's prefix: the other is not worth moving"
    REPLAY_CONNECT = "replay_connect", "the first backend could not be reached"
    REPLAY_REFUSED = "replay_refused", "the first backend refused before working"


BELOW_THRESHOLD, DWELL = Reason.BELOW_THRESHOLD, Reason.DWELL
_LINE: Final = (BELOW_THRESHOLD, Reason.AT_THRESHOLD, Reason.BAND, DWELL)


class Decision(msgspec.Struct, frozen=True, gc=False):
    """One explained choice. `backend` is None when no backend may take the request.

    `frontier` is F(m) in force, which n was compared with; `threshold` is the number the line was
    made from (K), or F(m) where it was made from none. Both are None for a policy without a line;
    where a rule goes by the cap, both are the cap. A rule that decides by curves gives what it went by:
    the offered load in tokens/s (0 before it has seen any) and the `gain` whose sign decided.
    """

    backend: Role | None
    reason: Reason
    n: int
    m: int
    frontier: float | None
    memory: PolicyMemory
    threshold: float | None = None
    offered: float | None = None
    gain: float | None = None


class Policy(Protocol):
    """One synchronous method: value in, value out."""

    def decide(self, snapshot: LoadSnapshot, info: RequestInfo) -> Decision:
        """Choose a backend for one request."""
        ...


class Fences(msgspec.Struct, frozen=True):
    """Kinds of request that go to the baseline whatever the load. All off by default."""

    structured_output: bool = False
    logprobs: bool = False
    choices: bool = False  # more than one choice asked for (n > 1)
    prompt_bytes: int | None = None  # a body longer than this

    def match(self, info: RequestInfo) -> Reason | None:
        """The fence that this request hits, if any."""
        if self.structured_output and info.structured_output:
            return Reason.FENCE_STRUCTURED
        if self.logprobs and info.logprobs:
            return Reason.FENCE_LOGPROBS
        if self.choices and info.choices > 1:
            return Reason.FENCE_CHOICES
        if self.prompt_bytes is not None and info.prompt_bytes > self.prompt_bytes:
            return Reason.FENCE_PROMPT
        return None


class Marks(msgspec.Struct, frozen=True):
    """Telemetry above a mark on one backend sends new work to the other."""

    queued: int = 0  # requests waiting inside the backend
    kv_cache: float = 0.95  # share of the KV cache in use

    def exceeded(self, load: BackendLoad) -> Reason | None:
        """The mark that this backend is over, if any. Absent telemetry exceeds nothing."""
        if load.contended:
            return Reason.CONTENDED
        if load.queued is not None and load.queued > self.queued:
            return Reason.QUEUED
        if load.token_usage is not None and load.token_usage > self.kv_cache:
            return Reason.KV_CACHE
        return None


class FrontierPolicy:
    """Speculate below the calibrated line."""

    def __init__(
        self,
        frontier: Frontier,
        *,
        band: float = 0.2,
        dwell: float = 5.0,
        marks: Marks = Marks(),  # noqa: B008  (frozen)
        fences: Fences = Fences(),  # noqa: B008  (frozen)
        affinity: bool = False,
    ) -> None:
        """`band`: a share of the line (0 <= band < 1), `dwell`: seconds that the load stays below it."""
        self.frontier = frontier
        self.band, self.dwell = band, dwell
        self.marks = marks
        self.fences = fences
        # Settled once, since a frontier never changes. On shared GPUs nothing stays (`affinity`).
        self._number = None if frontier.scope == "table" else frontier.threshold
        self._never, self._always = frontier.never, frontier.always
        self._fences = fences if fences != Fences() else None
        self.affinity = affinity and frontier.scope == "speculative"

    def decide(self, snapshot: LoadSnapshot, info: RequestInfo) -> Decision:
        """Choose a backend for one request."""
        spec, base = snapshot.speculative, snapshot.baseline
        n, m = spec.in_flight + spec.foreign, base.in_flight + base.foreign
        limit = self.frontier.at(m)
        side, reason = self._line(snapshot, n, m, limit)
        memory = snapshot.memory
        if side is BASELINE and reason is not DWELL:
            since = memory.since if memory.side is BASELINE else snapshot.now
            memory = PolicyMemory(BASELINE, since, snapshot.now)
        elif side is not memory.side:
            memory = PolicyMemory(side, snapshot.now)
        prefix = snapshot.prefix if self.affinity and reason in _LINE else None
        if prefix and stays(prefix, info.prompt_bytes, n, limit, spec.cap, side is BASELINE):
            side, reason = side.other, Reason.PREFIX
        # A line that says never is not overruled by a mark.
        marks = None if self._never else self.marks
        backend, reason = overruled(snapshot, info, side, reason, marks, self._fences)
        cap = spec.cap
        in_force = limit if cap is None or cap > limit else float(cap)
        number = limit if self._number is None else self._number
        return Decision(backend, reason, n, m, in_force, memory, number)

    def _line(self, snapshot: LoadSnapshot, n: int, m: int, limit: float) -> tuple[Role, Reason]:
        if self._never:
            return BASELINE, Reason.NEVER
        cap = snapshot.speculative.cap
        if cap is not None and cap <= n < limit:
            return BASELINE, Reason.CAP
        if n >= limit:
            return BASELINE, Reason.AT_THRESHOLD
        if self._always:
            return SPECULATIVE, Reason.ALWAYS
        if snapshot.memory.side is BASELINE:
            low_cap = cap is None or below_band(n, cap, self.band)
            if not low_cap or not self.frontier.inside_band(n, m, self.band):
                return BASELINE, Reason.BAND
            # Requests that end in one step make a dip for an instant: only a load that has stayed
            # below the edge opens the way back.
            if snapshot.now - snapshot.memory.above_at < self.dwell:
                return BASELINE, DWELL
        return SPECULATIVE, BELOW_THRESHOLD


def overruled(
    snapshot: LoadSnapshot,
    info: RequestInfo,
    side: Role,
    reason: Reason,
    marks: Marks | None,
    fences: Fences | None,
) -> tuple[Role | None, Reason]:
    """Where a request goes that load alone would send to `side`; None overrules nothing."""
    # 1. pinned
    if info.pinned is not None:
        return _pinned(snapshot, info.pinned)
    # 2. availability
    if not (snapshot.speculative.available and snapshot.baseline.available):
        return _available(snapshot), Reason.UNAVAILABLE
    # 3. fences
    fence = fences.match(info) if fences is not None else None
    if fence is not None:
        return BASELINE, fence
    # 4. load decided `side`; 5. marks may overrule it
    over = marks.exceeded(snapshot.of(side)) if marks is not None else None
    if marks is None or over is None or marks.exceeded(snapshot.of(side.other)) is not None:
        return side, reason
    return side.other, over


class FixedPolicy:
    """Everything to one backend: what a benchmark of one server needs."""

    def __init__(self, role: Role) -> None:
        self.role = role

    def decide(self, snapshot: LoadSnapshot, info: RequestInfo) -> Decision:
        """Choose the fixed backend, or the other when that one takes no new work."""
        n, m = snapshot.speculative.concurrency, snapshot.baseline.concurrency
        return _plain(snapshot, info, self.role, Reason.FIXED, n, m)


class LeastInFlightPolicy:
    """The backend with the lower concurrency; a tie goes to the speculative one.

    Numbers are compared in one unit: when either backend lacks fresh telemetry, both are compared
    by own in-flight. The decision holds the numbers that were compared.
    """

    def decide(self, snapshot: LoadSnapshot, info: RequestInfo) -> Decision:
        """Choose the less loaded backend."""
        spec, base = snapshot.speculative, snapshot.baseline
        if spec.fresh and base.fresh:
            n, m = spec.concurrency, base.concurrency
        else:
            n, m = spec.in_flight, base.in_flight
        role = SPECULATIVE if n <= m else BASELINE
        return _plain(snapshot, info, role, Reason.LEAST_IN_FLIGHT, n, m)


class RoundRobinPolicy:
    """One and the other in turn; a pinned request takes no turn. `memory.side` had the last one."""

    def decide(self, snapshot: LoadSnapshot, info: RequestInfo) -> Decision:
        """Choose the backend that was not named last."""
        role = snapshot.memory.side.other
        turn = snapshot.memory if info.pinned is not None else PolicyMemory(role, snapshot.now)
        n, m = snapshot.speculative.concurrency, snapshot.baseline.concurrency
        return _plain(snapshot, info, role, Reason.ROUND_ROBIN, n, m, turn)


def _plain(
    snapshot: LoadSnapshot,
    info: RequestInfo,
    role: Role,
    reason: Reason,
    n: int,
    m: int,
    memory: PolicyMemory | None = None,
) -> Decision:
    """A decision of a policy without a line: pinning and availability come first."""
    backend: Role | None = role
    if info.pinned is not None:
        backend, reason = _pinned(snapshot, info.pinned)
    elif not snapshot.of(role).available:
        backend, reason = _available(snapshot), Reason.UNAVAILABLE
    elif reason is not Reason.FIXED and snapshot.of(role).contended:
        # One that refuses at once has the least in flight: it must not draw the load for that.
        other = snapshot.of(role.other)
        if other.available and not other.contended:
            backend, reason = role.other, Reason.CONTENDED
    return Decision(backend, reason, n, m, None, memory or snapshot.memory)


def _pinned(snapshot: LoadSnapshot, role: Role) -> tuple[Role | None, Reason]:
    return (role if snapshot.of(role).available else None), Reason.PINNED


def _available(snapshot: LoadSnapshot) -> Role | None:
    if snapshot.speculative.available:
        return SPECULATIVE
    return BASELINE if snapshot.baseline.available else None
