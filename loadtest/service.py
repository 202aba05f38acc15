"""How fast one server is, as a function of how many requests it runs.

The law of this file: a `ServiceCurve` is a value. It has no clock, no state and no I/O; the
simulated server (`engine.py`) drives it with real time and a simulator with virtual time.

A server that decodes n requests takes one step of `step_s(n)` seconds for all of them and emits
`tokens_per_step` tokens for each (1 for a baseline; the accept length when it speculates). So

    decode tokens/s = n * tokens_per_step / step_s(n)

A prompt of P tokens costs `P * prefill_s_per_token` seconds in which nobody decodes, since SGLang
runs a prefill batch before the next decode step; `dispatch_s` is the part of the time to the first
token that blocks nobody (HTTP, tokenizer, scheduler, detokenizer).

Where the numbers come from. A sweep keeps C requests in flight, each of P prompt and L output
tokens, and measures R output tokens/s. By Little's law one request takes T = C * L / R, and that
time is made of its dispatch, of the prefills of all C requests (everybody's prefill delays
everybody), and of its decode steps:

    T = dispatch_s + C * P * prefill_s_per_token + (L - 1) / tokens_per_step * step_s(C)

`from_sweep` solves this for `step_s(C)`. For the sweeps shipped here the result agrees with the
median gap between SSE chunks, which was measured independently, to within a few percent up to
C = 64, where the client was not yet the limit.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from typing import Any, Final

import msgspec

from loadtest.smooth import rising

# Prefill rate of one H200 with an 8B model in bf16: every measured server, whatever its mode, met
# a ceiling of about 45,000 prompt tokens/s at 256 prompt tokens per request.
PREFILL_S_PER_TOKEN: Final = 1 / 45_000
# A curve from a machine that prefills faster must not come out with negative step times: prefill
# is taken to be at most this share of a request's time.
MOST_OF_A_CYCLE_IN_PREFILL: Final = 0.5
# Two loaded servers on one GPU kept 0.47 to 0.79 of their speed each; half is the plain time slice.
KEPT_SHARE: Final = 0.5


class CurveError(ValueError):
    """A curve or sweep that cannot be used; the message says which value and why."""


class ServiceCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server's speed. All times are in seconds, all rates per second."""

    label: str
    source: str  # where the numbers come from, or that they are planted
    points: tuple[tuple[float, float], ...]  # (running requests, seconds per step), both rising
    tokens_per_step: float = 1.0  # per request: 1 for a baseline, the accept length otherwise
    max_running: int | None = None  # the cap that the measured server ran with
    prefill_s_per_token: float = PREFILL_S_PER_TOKEN
    prefill_s_per_request: float = 0.0
    dispatch_s: float = 0.0
    kept_share: float = KEPT_SHARE  # of its speed, while the other server of the GPU is busy

    def __post_init__(self) -> None:
        """Refuse a curve that no server can have."""
        if not self.points:
            raise CurveError(f"curve {self.label!r} has no points")
        for n, step_s in self.points:
            if not (n >= 1 and 0 < step_s < float("inf")):
                raise CurveError(
                    f"curve {self.label!r}: a point needs running >= 1 and a step time above 0,"
                    f" got {(n, step_s)}"
                )
        for (n, step_s), (later_n, later_s) in itertools.pairwise(self.points):
            if later_n <= n or later_s < step_s:
                raise CurveError(
                    f"curve {self.label!r}: running must rise and the step time must not fall,"
                    f" got {(n, step_s)} and then {(later_n, later_s)}"
                )
        if not self.tokens_per_step >= 1:
            raise CurveError(
                f"curve {self.label!r}: tokens_per_step is at least 1, got {self.tokens_per_step}"
            )
        if not 0 < self.kept_share <= 1:
            raise CurveError(
                f"curve {self.label!r}: kept_share is above 0 and at most 1, got {self.kept_share}"
            )
        if self.max_running is not None and self.max_running < 1:
            raise CurveError(f"curve {self.label!r}: max_running is at least 1")
        if min(self.prefill_s_per_token, self.prefill_s_per_request, self.dispatch_s) < 0:
            raise CurveError(f"curve {self.label!r}: a cost in seconds is negative")

    def step_s(self, running: float) -> float:
        """Seconds of one decode step with this many running requests.

        Linear between the points. Below the first the first holds (a step has a floor). Above the
        last the step grows in proportion to `running`, so that total throughput stays where it was
        last measured: nothing there says that it would be more.
        """
        points = self.points
        last_n, last_s = points[-1]
        if running >= last_n:
            return last_s * running / last_n
        at = bisect.bisect_right(points, running, key=_running)
        if at == 0:
            return points[0][1]
        (n, step_s), (later_n, later_s) = points[at - 1], points[at]
        return step_s + (later_s - step_s) * (running - n) / (later_n - n)

    def prefill_s(self, requests: int, prompt_tokens: int) -> float:
        """Seconds of one prefill batch of this many requests and prompt tokens in all."""
        return requests * self.prefill_s_per_request + prompt_tokens * self.prefill_s_per_token

    def tok_s(self, running: float) -> float:
        """Decode tokens per second of all running requests together, prefill left out."""
        return running * self.tokens_per_step / self.step_s(running)

    def chunks_s(self, running: float) -> float:
        """SSE chunks per second of all running requests together: one each per step."""
        return running / self.step_s(running)

    def closed_loop_tok_s(self, concurrency: int, prompt_tokens: int, output_tokens: int) -> float:
        """Output tokens/s that a sweep with these requests would measure (see the module's head).

        Above the cap the rest waits and throughput stays that of a full server.
        """
        n = concurrency if self.max_running is None else min(concurrency, self.max_running)
        request_s = (
            self.dispatch_s
            + n * self.prefill_s(1, prompt_tokens)
            + (output_tokens - 1) / self.tokens_per_step * self.step_s(n)
        )
        return n * output_tokens / request_s

    def slowdown(self, other_running: int) -> float:
        """How much longer a step takes while the GPU's other server runs this many requests.

        Measured overlaps (8:8 to 128:128 on one H200) show no clear dependence on the counts: a
        server loses about half as soon as the other has any work. So one number serves.
        """
        return 1.0 if other_running <= 0 else 1 / self.kept_share

    def accepting(self, tokens_per_step: float) -> ServiceCurve:
        """The same server with another accept length: step times stay, tokens per step change."""
        return msgspec.structs.replace(self, tokens_per_step=tokens_per_step)


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in milliseconds; a sweep file has more than the one read here."""

    p50: float


class SweepPoint(msgspec.Struct, frozen=True):
    """One level of a sweep file: what was measured with C requests in flight."""

    C: int
    out_tok_s: float
    tokens_per_chunk: float
    ttft_ms: Percentiles


class Sweep(msgspec.Struct, frozen=True):
    """A sweep file: `points`, and the workload that they were measured with."""

    label: str
    input_tokens: int
    output_tokens: tuple[int, int]  # bounds of a uniform distribution
    points: tuple[SweepPoint, ...]
    meta: dict[str, Any] = {}
    max_running_requests: int | None = None
    kept_share: float = KEPT_SHARE


def from_sweep(sweep: Sweep) -> ServiceCurve:
    """The curve of the server that this sweep measured; see the module's head for the formula.

    Levels measured more than once count with their mean. Noise that would make a step with more
    requests shorter is pooled away (isotonic regression), since the batch can only have grown.
    """
    if not sweep.points:
        raise CurveError(f"sweep {sweep.label!r} has no points")
    for point in sweep.points:
        if point.C < 1 or point.out_tok_s <= 0 or point.tokens_per_chunk < 1:
            raise CurveError(
                f"sweep {sweep.label!r}: C and tokens_per_chunk are at least 1 and out_tok_s is"
                f" above 0, got {point}"
            )
    prompt, output = sweep.input_tokens, statistics.fmean(sweep.output_tokens)
    if output <= 1:
        raise CurveError(f"sweep {sweep.label!r}: one output token has no decode step to measure")
    tokens_per_step = statistics.fmean(point.tokens_per_chunk for point in sweep.points)
    prefill_s_per_token = min(
        PREFILL_S_PER_TOKEN,
        MOST_OF_A_CYCLE_IN_PREFILL
        * min(output / (point.out_tok_s * max(prompt, 1)) for point in sweep.points),
    )
    first = min(sweep.points, key=lambda point: point.C)
    dispatch_s = max(0.0, first.ttft_ms.p50 / 1e3 - first.C * prompt * prefill_s_per_token)
    steps: dict[int, list[float]] = {}
    for point in sweep.points:
        decode_s = point.C * (output / point.out_tok_s - prompt * prefill_s_per_token) - dispatch_s
        step_s = decode_s * tokens_per_step / (output - 1)
        if step_s <= 0:
            raise CurveError(
                f"sweep {sweep.label!r}: at C={point.C} the time to the first token is longer than"
                " the whole request"
            )
        steps.setdefault(point.C, []).append(step_s)
    levels = sorted(steps)
    return ServiceCurve(
        label=sweep.label,
        source=str(sweep.meta.get("source") or sweep.meta or "a sweep file"),
        points=tuple(
            zip(levels, rising([statistics.fmean(steps[c]) for c in levels]), strict=True)
        ),
        tokens_per_step=max(1.0, tokens_per_step),
        max_running=sweep.max_running_requests,
        prefill_s_per_token=prefill_s_per_token,
        dispatch_s=dispatch_s,
        kept_share=sweep.kept_share,
    )


def decode_curve(data: bytes, name: str) -> ServiceCurve:
    """A curve from the JSON of a curve or of a sweep file; `name` is for the error message."""
    try:
        shape = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        is_curve = "tokens_per_step" in shape or "source" in shape
        if is_curve:
            return msgspec.json.decode(data, type=ServiceCurve)
        return from_sweep(msgspec.json.decode(data, type=Sweep))
    except (msgspec.MsgspecError, CurveError) as error:
        raise CurveError(f"{name} is neither a curve nor a sweep: {error}") from error


def crossover(speculative: ServiceCurve, baseline: ServiceCurve) -> float | None:
    """The concurrency from which the baseline first decodes faster than the speculative server.

    None if it never does, and 0 if it always does. Exact: both step times are linear between the
    points of either curve, so the sign of `lead` can change only once in each piece.
    """

    def lead(n: float) -> float:
        return speculative.tokens_per_step * baseline.step_s(
            n
        ) - baseline.tokens_per_step * speculative.step_s(n)

    levels = sorted({1.0, *(n for n, _ in speculative.points + baseline.points)})
    if lead(levels[0]) < 0:
        return 0.0
    for n, later in itertools.pairwise(levels):
        if lead(later) < 0:
            return n + (later - n) * lead(n) / (lead(n) - lead(later))
    return None


def _running(point: tuple[float, float]) -> float:
    return point[0]
