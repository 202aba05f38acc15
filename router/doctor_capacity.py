"""How much may each server take on, and can it be watched? One rule for each limit.

The law of this file: facts in, spots out; nothing is fetched. A limit matters where the router's
threshold, or the sweep that finds it, would meet it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from router.doctor_facts import Pair, ServerFacts
from router.doctor_findings import Group, Rule, Severity, Spot
from router.doctor_parity import differ
from router.load import ROLES

SPOILS, WARNING, NOTE = Severity.SPOILS, Severity.WARNING, Severity.NOTE
# What SGLang sets --max-running-requests to when a server speculates and none is given.
SPECULATIVE_DEFAULT_CAP: Final = 48
# A KV cache smaller than this share of the other one fills up at another concurrency.
LIKE_CAPACITY: Final = 0.8
# Releases in which a streamed request whose client is gone is reported to decode on to its end.
FIRST_ZOMBIE: Final = (0, 5, 16)
LAST_ZOMBIE: Final = (0, 5, 18)


def _needed(pair: Pair) -> int | None:
    """The largest batch that the line lets run: the threshold, where it is a number."""
    threshold = pair.threshold
    return None if threshold is None or math.isinf(threshold) else math.floor(threshold)


def _cap(pair: Pair, here: ServerFacts) -> Iterator[Spot]:
    ours, theirs = here.cap or 0, pair.baseline.cap or 0
    if ours == theirs:
        return
    seen = f"speculative {ours}, baseline {theirs}"
    given = here.asked is not None and "max-running-requests" in here.asked
    if ours == SPECULATIVE_DEFAULT_CAP and not given:
        yield Spot(SPOILS, f"{seen}; {ours} is SGLang's own choice when a server speculates")
    else:
        yield Spot(WARNING, seen)


def _cap_threshold(pair: Pair, here: ServerFacts) -> Iterator[Spot]:
    need, cap = _needed(pair), here.cap or 0
    if need is not None and need > cap:
        mend = f"--max-running-requests {need} or more on both, or a threshold of {cap}"
        yield Spot(WARNING, f"threshold {need}, speculative cap {cap}", mend)


def _no_graphs(pair: Pair, _: ServerFacts) -> Iterator[Spot]:
    without = [role for role in ROLES if pair.of(role).graph_ceiling == 0]
    if without:
        severity = SPOILS if len(without) == 1 else WARNING
        yield Spot(severity, f"no CUDA graphs on the {' and the '.join(without)} server")


def _graphs(pair: Pair, _: ServerFacts) -> Iterator[Spot]:
    caps = [pair.of(role).cap or 0 for role in ROLES]
    need = _needed(pair)
    wanted = min(caps) if need is None else min(need, *caps)
    for role in ROLES:
        ceiling = pair.of(role).graph_ceiling or 0
        if 0 < ceiling < wanted:
            measured = "cap" if need is None else "threshold"
            mend = f"--cuda-graph-max-bs-decode {wanted} on both (--cuda-graph-max-bs to 0.5.18)"
            yield Spot(
                WARNING if need is None else SPOILS,
                f"{role} server: graphs to {ceiling} requests, {measured} {wanted}",
                mend,
            )


def _kv(pair: Pair, here: ServerFacts) -> Iterator[Spot]:
    ours, theirs = here.max_total_num_tokens or 0, pair.baseline.max_total_num_tokens or 0
    if min(ours, theirs) < LIKE_CAPACITY * max(ours, theirs):
        yield Spot(WARNING, f"speculative {ours} tokens, baseline {theirs}")


def _fraction(pair: Pair, _: ServerFacts) -> Iterator[Spot]:
    seen = differ(pair, "mem_fraction_static")
    if seen:
        yield Spot(NOTE, seen)


def _metrics(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    if here.metrics_on is False:
        page = "enable_metrics is false" if here.enable_metrics is False else "/metrics is missing"
        yield Spot(WARNING, page)


def _keys(pair: Pair, here: ServerFacts) -> Iterator[Spot]:
    if here.api_key is not pair.baseline.api_key:
        which = ("speculative", "baseline") if here.api_key else ("baseline", "speculative")
        yield Spot(WARNING, f"the {which[0]} server wants a key, the {which[1]} server does not")


def _zombies(pair: Pair, _: ServerFacts) -> Iterator[Spot]:
    found = {
        role: pair.of(role).version
        for role in ROLES
        if FIRST_ZOMBIE <= (pair.of(role).release or (0, 0, 0)) <= LAST_ZOMBIE
    }
    if found:
        yield Spot(WARNING, ", ".join(f"{role} {version}" for role, version in found.items()))


def _version(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    if here.release is None:
        yield Spot(NOTE, f"version {here.version}" if here.version else "no version")


RULES: Final = (
    Rule(
        "running-cap", Group.PARITY, (SPOILS, WARNING),
        "how many requests run at once: the same on both, and not SGLang's own "
        f"{SPECULATIVE_DEFAULT_CAP} (otherwise a warning)",
        "above its cap a server queues: a sweep would find a crossover where the cap is, and not "
        "where the curves meet",
        "the same --max-running-requests on both (256, say)",
        _cap, ("cap",),
    ),
    Rule(
        "cap-threshold", Group.PARITY, (WARNING,),
        "that the speculative server runs as many requests as the threshold allows",
        "the threshold cannot be reached: the router stops at the cap",
        "--max-running-requests of the threshold or more on both, or a lower threshold",
        _cap_threshold, ("cap",),
    ),
    Rule(
        "graphs-off", Group.PARITY, (SPOILS, WARNING),
        "CUDA graphs for decoding on both (warning: on neither)",
        "without graphs every step waits for the CPU to launch its kernels; with them on one server "
        "only, graphs are compared and not speculation",
        "leave out --disable-cuda-graph and its newer forms",
        _no_graphs, ("graph_ceiling",),
    ),
    Rule(
        "graph-ceiling", Group.PARITY, (SPOILS, WARNING),
        "CUDA graphs up to the threshold (warning, without one: up to the smaller cap)",
        "beyond the largest batch with a graph the curve has a step that is not speculation's",
        "--cuda-graph-max-bs-decode of the threshold or more on both (--cuda-graph-max-bs to 0.5.18)",
        _graphs, ("graph_ceiling", "cap"),
    ),
    Rule(
        "kv-capacity", Group.PARITY, (WARNING,),
        f"room for tokens: the smaller KV cache has {LIKE_CAPACITY:.0%} of the larger one",
        "the smaller one fills up and holds requests back at a concurrency where the other runs them",
        "the same --max-total-tokens on both; on a shared GPU start them one after the other, the "
        "second with a larger --mem-fraction-static",
        _kv, ("max_total_num_tokens",),
    ),
    Rule(
        "memory-fraction", Group.PARITY, (NOTE,),
        "the same share of the GPU's memory",
        "it is a share of what is free when a server starts: right on a shared GPU, and worth a "
        "look on two",
        "the same --mem-fraction-static where each server has a GPU of its own",
        _fraction, ("mem_fraction_static",),
    ),
    Rule(
        "metrics-off", Group.PARITY, (WARNING,),
        "metrics on both servers",
        "the accept length of late is read from them, and with it the line is moved; without them "
        "/v1/loads says 0 for speed and cache use, and a lost speculation is noticed later",
        "--enable-metrics",
        _metrics, ("metrics_on",), ROLES,
    ),
    Rule(
        "api-key", Group.PARITY, (WARNING,),
        "that both servers want a key, or neither",
        "whoever reaches the open one can use it past the router, as load that the router did not "
        "send",
        "the same --api-key on both",
        _keys, ("api_key",),
    ),
    Rule(
        "zombies", Group.PARITY, (WARNING,),
        "an SGLang outside 0.5.16 to 0.5.18",
        "users report that a streamed request whose client has gone is decoded to its end there, "
        "unseen and uncounted: load that belongs to nobody (mended in 0.5.20)",
        "SGLang 0.5.20 or later",
        _zombies, ("release",),
    ),
    Rule(
        "version-unknown", Group.PARITY, (NOTE,),
        "a version that can be read",
        "what depends on the version is not judged",
        "an SGLang that says its version on /server_info",
        _version, (), ROLES,
    ),
)  # fmt: skip
