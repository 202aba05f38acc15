"""What a reader of a sweep must know before believing a figure: rules over points, in words.

Pure. Each rule looks at one point (or at the sweep as a whole) and gives a code of a closed set and
a sentence. The same notices are printed, kept in `summary.txt` and in `sweep.json`, and a point
carries their codes, so that whoever fits a curve can leave such a point out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from loadtest.prompts import TEMPLATE_TOKENS
from loadtest.sweep_phases import OPEN_ANSWERS
from loadtest.sweep_schema import Notice, Pace, Point, Server, Sweep
from router.load import Role

CODES: Final = {
    "above-cap": "the level is above what the server runs at once",
    "queued": "requests waited in the server although the level is below its cap",
    "errors": "requests failed",
    "gave-up": "so many failed, or were open at once, that the level was given up",
    "short-window": "fewer answers for each slot than a mean can rest on",
    "short-warm-up": "the window began before each slot had had an answer",
    "client-bound": "this client may have been the limit, and not the server",
    "cache-hits": "prompts came from the server's prefix cache",
    "repeated-prompts": "prompts were sent more than once",
    "no-usage": "answers whose tokens the server did not count",
    "short-answers": "answers had fewer tokens than asked for",
    "other-load": "the server had more requests than this client sent",
    "behind-rate": "the server did not keep up with the offered rate",
    "no-telemetry": "the server said nothing of its load",
    "no-accept-length": "the server said nothing of its accept length",
    "wrong-role": "the server is not what its role says",
    "few-passes": "too few passes to tell how far they differ",
    "estimated-tokens": "prompt lengths are an estimate",
}

# Of one core: above it a process that shares its core with others waits for it.
BUSY_CPU: Final = 0.8
# Seconds: an event loop that is late by this much adds it to times to the first token of some ten.
LATE_S: Final = 0.02
CACHED: Final = 0.1
# Mean requests in the queue that are more than a snapshot of a moment.
QUEUED: Final = 0.5
SHORT: Final = 0.95
# Finished requests stay in the server's count for a moment, so a little more than the level is ours.
SLACK: Final = 1.1
PASSES: Final = 3


def point_notices(point: Point, pace: Pace) -> Iterator[Notice]:
    """What is to be said of one point."""
    rules = (*_load(point, pace), *_answers(point), *_client(point), *_telemetry(point))
    for code, text in rules:
        yield Notice(code, text, point.role, point.level, point.rate, (point.number,))


def sweep_notices(sweep: Sweep) -> tuple[Notice, ...]:
    """All notices: of the whole first, then by role and level, the passes of one together."""
    found: dict[tuple[object, ...], Notice] = {}
    for point in sweep.points:
        for notice in point_notices(point, sweep.pace):
            key = (notice.role, notice.level, notice.rate, notice.code)
            passes = (*found[key].passes, *notice.passes) if key in found else notice.passes
            found[key] = msgspec.structs.replace(notice, passes=tuple(sorted(passes)))
    ordered = sorted(
        found.values(), key=lambda n: (n.role or "", n.level or 0, n.rate or 0, n.code)
    )
    return (*_whole(sweep), *ordered)


def _whole(sweep: Sweep) -> Iterator[Notice]:
    for server in sweep.servers:
        if server.speculates is not None and server.speculates is not _wants(server):
            yield Notice("wrong-role", _contradiction(server), server.role)
    if sweep.workload.input_tokens is not None or sweep.workload.trace is not None:
        guessed = [s.role.value for s in sweep.servers if s.tokens_per_word is None]
        if guessed and sweep.workload.prompts == "corpus":
            yield Notice(
                "estimated-tokens",
                f"{' and '.join(guessed)}: no /tokenize, so prompts have 4 tokens for 3 words;"
                " input_tokens says how many they were",
            )
    if sweep.plan.passes < PASSES:
        yield Notice(
            "few-passes",
            f"with {sweep.plan.passes} of at least {PASSES} passes the intervals of output tok/s"
            " are of batches within a pass, and narrower than the truth",
        )


def _wants(server: Server) -> bool:
    return server.role is Role.SPECULATIVE


def _contradiction(server: Server) -> str:
    does = "speculates" if server.speculates else "does not speculate"
    return f"the server at {server.url} says that it {does}, but its role is {server.role.value}"


class Found(NamedTuple):
    """A code and what is to be said."""

    code: str
    text: str


def _load(point: Point, pace: Pace) -> Iterator[Found]:
    level, cap = point.level, point.cap
    if level is not None and cap is not None and level > cap:
        yield Found(
            "above-cap",
            f"the server runs {cap} requests at once (max_running_requests): the other"
            f" {level - cap} waited, and the time to the first token is that of its queue",
        )
    elif (point.queued or 0.0) >= QUEUED:
        yield Found(
            "queued",
            f"{point.queued:.1f} requests waited in the server on average (its KV cache may be"
            " full)",
        )
    wanted = OPEN_ANSWERS if level is None else math.ceil(pace.per_slot * level)
    if point.requests < wanted:
        yield Found(
            "short-window",
            f"{point.requests} answers in {point.window_s:.1f} s, wanted {wanted}"
            f"{'' if level is None else f' ({pace.per_slot:g} for each slot)'}:"
            " give --most-seconds more or --output-tokens less",
        )
    if point.unwarmed:
        yield Found(
            "short-warm-up",
            f"{point.unwarmed} slots had had no answer when the window began:"
            " give --most-warm-up more",
        )
    if point.rate is not None:
        due = point.rate * point.window_s
        if point.requests < due - 3 * math.sqrt(due):
            yield Found(
                "behind-rate",
                f"{point.requests_s:.2f} answers a second at {point.rate:g} offered: what is open"
                " grows as long as it lasts, and so do all times",
            )


def _answers(point: Point) -> Iterator[Found]:
    if point.errors:
        yield Found("errors", f"{point.errors} of {point.records} failed, the first: {point.error}")
    if point.gave_up:
        yield Found("gave-up", "no more requests were sent, so the figures are of what came before")
    if point.uncounted:
        yield Found(
            "no-usage",
            f"{point.uncounted} answers had no usage: their tokens are unknown (chunks are not"
            " tokens) and count as none",
        )
    if point.asked_tokens and (point.output_tokens or 0) < SHORT * point.asked_tokens:
        yield Found(
            "short-answers",
            f"{point.output_tokens or 0:.0f} output tokens on average, asked for"
            f" {point.asked_tokens:.0f}: the server ends them earlier",
        )
    if point.repeated:
        yield Found(
            "repeated-prompts", f"{point.repeated} prompts had been sent before in this sweep"
        )
    share = point.cached_share or 0.0
    # The template that every prompt begins with is in the cache of real users too.
    tokens = math.inf if point.input_tokens is None else share * point.input_tokens
    if share >= CACHED and tokens > TEMPLATE_TOKENS:
        yield Found(
            "cache-hits",
            f"{share:.0%} of the prompt tokens came from the prefix cache and cost no prefill:"
            " real users' prompts may not",
        )


def _client(point: Point) -> Iterator[Found]:
    busy = point.client_cpu is not None and point.client_cpu >= BUSY_CPU
    late = point.client_lag_s is not None and point.client_lag_s >= LATE_S
    if busy or late:
        share = f"{point.client_cpu:.0%}" if point.client_cpu is not None else "an unknown share"
        lag = f"{(point.client_lag_s or 0.0) * 1e3:.0f} ms"
        yield Found(
            "client-bound",
            f"this process used {share} of a core and its event loop was late by up to {lag}"
            " (19 of 20 times): run it on a machine or core of its own",
        )


def _telemetry(point: Point) -> Iterator[Found]:
    if not point.polls:
        yield Found("no-telemetry", "neither /v1/loads, /get_load nor /metrics told its load")
    most = (point.most_running or 0) + (point.most_queued or 0)
    if point.level is not None and most > SLACK * point.level + 1:
        yield Found(
            "other-load",
            f"the server had up to {most} requests, this client sent {point.level} at once:"
            " somebody else uses it",
        )
    if point.role is Role.SPECULATIVE and point.accept_length is None:
        yield Found(
            "no-accept-length",
            "/metrics did not tell it: it needs --enable-metrics, and 40 verify steps in a window",
        )


def codes(notices: Iterable[Notice]) -> tuple[str, ...]:
    """Their codes, each once, in order."""
    return tuple(sorted({notice.code for notice in notices}))
