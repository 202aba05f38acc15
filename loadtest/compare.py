"""Which arrangement of servers serves a load best: the same arrivals, played against each.

The law of this file: pure, and the same arguments give the same answer. Everything runs in the
simulator with the router's own policies. What is compared:

    single    one server alone: the baseline, the speculative one, or the engine's own adaptive
              speculation where its curve is given
    control   the same hardware used otherwise: with a GPU each, two equal servers behind least
              in-flight; with one GPU the single servers are the control
    plain     policies without a curve: round robin, least in-flight, a threshold as it is
    rule      what the router decides with: the threshold with band and dwell, and the rules; with
              conversations on a GPU each, also with affinity, which is how the router runs by default

Milliseconds per token are a request's whole time by its output tokens, first token included; a load
is judged on the requests that start after its first `judged_after` seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from loadtest.advice import Time, pair_or
from loadtest.arms import levels_of
from loadtest.service import ServiceCurve, crossover
from loadtest.simulator import PairModel, Run, ServerModel, Simulation
from loadtest.simulator_contention import Contention
from loadtest.simulator_load import Call, Row, trace_calls
from router.frontier import Frontier
from router.load import Role
from router.policies import make_policy
from router.policy import Policy

Kind = Literal["single", "control", "plain", "rule"]
Gpus = Literal[1, 2]
# Of the answers of a sweep, in the mean, where nothing says how long they were.
OUTPUT_TOKENS: Final = 128
TELEMETRY_S: Final = 0.2  # how often the router polls by default


class Playable(Protocol):
    """A way to play a trace, and what of it is judged."""

    @property
    def name(self) -> str:
        """Unique within a comparison."""
        ...

    @property
    def judged_after(self) -> float:
        """Seconds."""
        ...

    def calls(self, rows: Sequence[Row]) -> Iterator[Call]:
        """Its requests."""
        ...


class Load(NamedTuple):
    """A trace played faster; every request is on its own."""

    name: str
    scale: float | Callable[[float], float]  # times as many arrivals a second
    seconds: float
    judged_after: float = 60.0

    def calls(self, rows: Sequence[Row]) -> Iterator[Call]:
        """Its requests."""
        return trace_calls(rows, self.scale, self.seconds)


class Arrangement(NamedTuple):
    """Servers and what decides between them."""

    name: str
    kind: Kind
    pair: PairModel
    policy: Policy
    remembers: bool = False  # where conversations are


class Outcome(msgspec.Struct, frozen=True):
    """What came of one arrangement under one load."""

    name: str
    kind: Kind
    load: str
    ms_per_token: float
    p95_ms_per_token: float
    tok_s: float
    speculative_share: float  # of the requests
    switches: int  # times that a request went elsewhere than the one before it
    requests: int
    ttft_ms: float | None = None  # mean
    cached: float | None = None  # share of all prompt tokens that a prefix cache held


def judge(run: Run, arrangement: Arrangement, load: Playable) -> Outcome:
    """Sum a run up. Raises ValueError where no request starts in what is judged."""
    judged = [i for i, at in enumerate(run.started) if at >= load.judged_after]
    if not judged:
        raise ValueError(f"load {load.name}: no request starts after {load.judged_after:g} s")
    waits = sorted((run.ended[i] - run.started[i]) / run.output[i] * 1e3 for i in judged)
    backends = [run.backend[i] for i in judged]
    over = max(run.ended[i] for i in judged) - run.started[judged[0]]
    return Outcome(
        name=arrangement.name,
        kind=arrangement.kind,
        load=load.name,
        ms_per_token=math.fsum(waits) / len(waits),
        p95_ms_per_token=waits[math.ceil(0.95 * len(waits)) - 1],
        tok_s=sum(run.output[i] for i in judged) / over if over > 0 else 0.0,
        speculative_share=backends.count(Role.SPECULATIVE) / len(backends),
        switches=sum(a is not b for a, b in itertools.pairwise(backends)),
        requests=len(judged),
        ttft_ms=math.fsum(run.first[i] - run.started[i] for i in judged) / len(judged) * 1e3,
        cached=1.0 - run.prefilled / sum(run.prompt),
    )


def play(
    arrangement: Arrangement, load: Playable, rows: Sequence[Row], *, seed: int = 0
) -> Outcome:
    """Run one arrangement under one load."""
    simulation = Simulation(
        arrangement.pair,
        arrangement.policy,
        seed=seed,
        telemetry_s=TELEMETRY_S,
        remembers=arrangement.remembers,
    )
    return judge(simulation.play(load.calls(rows)), arrangement, load)


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two measured servers and where they run."""

    speculative: ServiceCurve
    baseline: ServiceCurve
    contention: Contention
    gpus: Gpus
    adaptive: ServiceCurve | None = None
    prompt_tokens: int = 256  # of the sweep that the rules know the servers by
    output_tokens: int = OUTPUT_TOKENS
    cache_tokens: float = 0.0  # of each server's prefix cache

    @property
    def model(self) -> PairModel:
        """What the simulator runs."""
        return _model(self.speculative, self.baseline, self.shared, self.cache_tokens)

    @property
    def shared(self) -> Contention:
        """What the servers take from each other."""
        return self.contention if self.gpus == 1 else Contention()

    @property
    def threshold(self) -> float:
        """K of a plain line: where the curves cross, 0 for never and infinity for always."""
        found = crossover(self.speculative, self.baseline)
        return math.inf if found is None else math.floor(found)

    @property
    def levels(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Tokens/s by concurrency of both, as a calibration has them."""
        sizes = self.prompt_tokens, self.output_tokens
        one, other = levels_of(self.speculative, *sizes), levels_of(self.baseline, *sizes)
        return [level[:2] for level in one], [level[:2] for level in other]

    @property
    def parameters(self) -> dict[str, float]:
        """What a rule is told of this pair."""
        known = {"output_tokens": float(self.output_tokens)}
        overlaps = self.shared.points
        if overlaps:
            known["speculative_share"] = sum(o.speculative_share for o in overlaps) / len(overlaps)
            known["baseline_share"] = sum(o.baseline_share for o in overlaps) / len(overlaps)
        elif self.gpus == 2:
            known["speculative_share"] = known["baseline_share"] = 1.0
        return known


def singles(pair: Pair) -> list[Arrangement]:
    """One server alone."""
    found = [
        Arrangement(f"{role.value} only", "single", pair.model, make_policy(role.value))
        for role in (Role.BASELINE, Role.SPECULATIVE)
    ]
    if pair.adaptive is not None:
        model = _model(pair.adaptive, pair.baseline, Contention(), pair.cache_tokens)
        policy = make_policy(Role.SPECULATIVE.value)
        found.append(Arrangement("adaptive only", "single", model, policy))
    return found


def controls(pair: Pair) -> list[Arrangement]:
    """The second GPU used for a server of the same kind."""
    if pair.gpus == 1:
        return []
    kinds = [("two baseline", pair.baseline), ("two speculative", pair.speculative)]
    if pair.adaptive is not None:
        kinds.append(("two adaptive", pair.adaptive))
    return [
        Arrangement(
            name,
            "control",
            _model(curve, curve, Contention(), pair.cache_tokens),
            make_policy("least-in-flight"),
        )
        for name, curve in kinds
    ]


def plain(pair: Pair) -> list[Arrangement]:
    """Policies that know no curve."""
    line = _line(pair)
    return [
        Arrangement("round robin", "plain", pair.model, make_policy("round-robin")),
        Arrangement("least in-flight", "plain", pair.model, make_policy("least-in-flight")),
        Arrangement(
            "plain threshold",
            "plain",
            pair.model,
            make_policy("frontier", frontier=line, band=0.0, dwell=0.0),
        ),
    ]


def rules(pair: Pair) -> list[Arrangement]:
    """What the router can be told to decide by."""
    line = _line(pair)
    found = [
        ("threshold", make_policy("frontier", frontier=line)),
        ("threshold, wide", make_policy("frontier", frontier=line, band=0.5, dwell=20.0)),
    ]
    found += [
        (name, make_policy(name, curves=pair.levels, parameters=given))
        for name, given in (("forecast", pair.parameters), ("join-speed", {}), ("join-delay", {}))
    ]
    return [Arrangement(name, "rule", pair.model, policy) for name, policy in found]


def staying(pair: Pair) -> list[Arrangement]:
    """The rules that keep conversations where their prefix is; none where nothing is cached."""
    if pair.gpus == 1 or not pair.cache_tokens:
        return []
    found = [("threshold", make_policy("frontier", frontier=_line(pair), affinity=True))]
    found += [
        (name, make_policy(name, curves=pair.levels, affinity=True))
        for name in ("join-speed", "join-delay")
    ]
    return [
        Arrangement(f"{name}, affinity", "rule", pair.model, policy, remembers=True)
        for name, policy in found
    ]


def arrangements(pair: Pair) -> list[Arrangement]:
    """Everything that is compared."""
    return [*singles(pair), *controls(pair), *plain(pair), *rules(pair), *staying(pair)]


def advice(outcomes: Sequence[Outcome], gpus: Gpus) -> str:
    """What to run under this load, in a sentence."""
    rule = min((o for o in outcomes if o.kind == "rule"), key=_speed)
    wanted = ("single",) if gpus == 1 else ("single", "control")
    other = min((o for o in outcomes if o.kind in wanted), key=_speed)
    what = "one server" if other.kind == "single" else "two equal servers"
    return pair_or(Time(rule.name, rule.ms_per_token), Time(other.name, other.ms_per_token), what)


def _speed(outcome: Outcome) -> float:
    return outcome.ms_per_token


def _line(pair: Pair) -> Frontier:
    if pair.gpus == 1:
        return Frontier.total(pair.threshold)
    return Frontier.speculative_only(pair.threshold)


def _model(
    speculative: ServiceCurve, baseline: ServiceCurve, shared: Contention, cache_tokens: float = 0.0
) -> PairModel:
    servers = [
        ServerModel(curve=curve, max_running=curve.max_running, cache_tokens=cache_tokens)
        for curve in (speculative, baseline)
    ]
    return PairModel(speculative=servers[0], baseline=servers[1], contention=shared)
