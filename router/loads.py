"""One load for the pair, in SGLang's own shape: what a gateway in front of us reads.

A gateway that balances over several servers sees this router as one server with one data-parallel
rank, so the entries of both backends (and of each of their ranks) become one:

* counts, tokens, capacities and speeds are summed;
* shares are averaged by the capacity that they are a share of;
* the snapshot's time is the oldest one, so that nothing looks fresher than it is;
* what we count ourselves can only add: requests that we have open on a backend and that it does not
  know of yet are running ones, those in our own queue are waiting ones.

A backend that says nothing is represented by our own count. Every field of SGLang's core section is
always there, since gateways refuse an entry without the one they compare by. Only known fields are
passed on.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from router.load import BackendCounts

Entry = dict[str, Any]

SECTIONS: Final = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
_SUMS: Final = (
    "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_used_tokens",
    "num_total_tokens", "num_active_tokens", "max_total_num_tokens", "max_running_requests",
    "gen_throughput", "total_prefill_uncached_tokens", "total_prefill_busy_us",
)  # fmt: skip
_SHARES: Final = ("token_usage", "cache_hit_rate", "utilization")
_MEMORY: Final = ("weight_gb", "kv_cache_gb", "graph_gb", "token_capacity")
_QUEUES: Final = ("waiting", "grammar", "paused", "retracted", "prealloc_ready")


class LoadsError(ValueError):
    """The query asks for a section that does not exist."""


class BackendLoads(msgspec.Struct):
    """What is known of one backend: its answer to `/v1/loads`, if there is one, and our count."""

    counts: BackendCounts
    fresh: bool  # whether the telemetry in `counts` is recent
    answer: Mapping[str, Any] | None = None


def read_include(text: str | None) -> frozenset[str]:
    """The sections that a query's `include` names; all when it names none.

    Raises LoadsError for a name that SGLang does not know either.
    """
    names = {name.strip() for name in (text or "all").split(",")} - {""}
    unknown = sorted(names.difference(SECTIONS))
    if unknown:
        raise LoadsError(f"include: unknown section; it is one of {', '.join(SECTIONS)}")
    return frozenset(SECTIONS if "all" in names else names | {"core"})


def merge(
    speculative: BackendLoads,
    baseline: BackendLoads,
    *,
    waiting: int,
    include: Collection[str] = SECTIONS,
    unix: float,
) -> Entry:
    """The body of `/v1/loads` for the pair. `waiting`: our own queue; `unix`: now, in seconds."""
    spec, base = entries_of(speculative, unix), entries_of(baseline, unix)
    answers = [found.answer for found in (speculative, baseline) if found.answer]
    body: Entry = {
        "timestamp": dt.datetime.fromtimestamp(unix, dt.UTC).isoformat(),
        "version": next((a["version"] for a in answers if isinstance(a.get("version"), str)), ""),
    }
    for answer in answers:
        if isinstance(answer.get("accelerator"), str):
            body["accelerator"] = answer["accelerator"]
            body["num_accelerators"] = int(_number(answer.get("num_accelerators")))
            break
    body["loads"] = [_one(spec, base, waiting, include)]
    return body


def entries_of(backend: BackendLoads, unix: float) -> list[Entry]:
    """A backend's own entries, raised to our count, or one made of what we know ourselves."""
    answer = backend.answer or {}
    found = answer.get("loads")
    listed = found if isinstance(found, list) else []
    entries: list[Entry] = [dict(entry) for entry in listed if isinstance(entry, dict)]
    if not entries:
        entries = [_estimate(backend, unix)]
    known = sum(
        _number(e.get("num_running_reqs")) + _number(e.get("num_waiting_reqs")) for e in entries
    )
    unseen = max(0, backend.counts.in_flight - int(known))
    entries[0]["num_running_reqs"] = int(_number(entries[0].get("num_running_reqs"))) + unseen
    return entries


def get_load(body: Entry) -> list[Entry]:
    """The same load in the shape of the older `/get_load`, where `num_reqs` is both kinds."""
    entry = body["loads"][0]
    return [
        {
            "dp_rank": 0,
            "num_reqs": entry["num_running_reqs"] + entry["num_waiting_reqs"],
            "num_waiting_reqs": entry["num_waiting_reqs"],
            "num_tokens": entry["num_total_tokens"],
            "num_pending_tokens": entry["num_waiting_uncached_tokens"],
            "ts_tic": entry["timestamp"],
        }
    ]


def as_prometheus(body: Entry) -> str:
    """The text that SGLang gives for `format=prometheus`."""
    prefixes = {"memory": "memory_", "speculative": "spec_", "queues": "queues_"}
    lines: list[str] = []
    for entry in body["loads"]:
        flat = {name: value for name, value in entry.items() if isinstance(value, int | float)}
        for section, prefix in prefixes.items():
            flat |= {prefix + name: value for name, value in entry.get(section, {}).items()}
        rank = flat.pop("dp_rank")
        for name, value in flat.items():
            lines += (
                f"# TYPE sglang_{name} gauge",
                f'sglang_{name}{{dp_rank="{rank}"}} {value}',
            )
    return "\n".join(lines) + "\n"


def _estimate(backend: BackendLoads, unix: float) -> Entry:
    """An entry from telemetry, or from nothing but our own count."""
    told = backend.counts.telemetry if backend.fresh else None
    if told is None:
        return {"timestamp": unix}
    entry: Entry = {
        "timestamp": unix,
        "num_running_reqs": told.running,
        "num_waiting_reqs": told.queued,
        "max_running_requests": told.max_running,
        "token_usage": told.token_usage,
    }
    if told.accept_length is not None:
        entry["speculative"] = {"accept_length": told.accept_length}
    return entry


def _one(spec: list[Entry], base: list[Entry], waiting: int, include: Collection[str]) -> Entry:
    """All entries as one."""
    entries = spec + base
    merged: Entry = {
        "timestamp": min(_number(entry.get("timestamp")) for entry in entries),
        "dp_rank": 0,
    }
    for name in _SUMS:
        total = math.fsum(_number(entry.get(name)) for entry in entries)
        merged[name] = round(total, 2) if name == "gen_throughput" else int(total)
    merged["num_waiting_reqs"] += waiting
    for name in _SHARES:
        merged[name] = round(_share(entries, name), 4)
    merged["decode_moments"] = _moments(entries)
    if "memory" in include:
        merged["memory"] = _section(entries, "memory", _MEMORY, lambda total: round(total, 3))
    if "spec" in include:
        lengths = [s for entry in spec if (s := _accept(entry))]
        if lengths:
            merged["speculative"] = {
                name: math.fsum(s[name] for s in lengths) / len(lengths)
                for name in ("accept_length", "accept_rate")
            }
    if "queues" in include:
        merged["queues"] = _section(entries, "queues", _QUEUES, int)
        merged["queues"]["waiting"] += waiting
    return merged


def _section(
    entries: Iterable[Entry], section: str, names: Iterable[str], shape: Callable[[float], float]
) -> Entry:
    parts = [part for entry in entries if isinstance(part := entry.get(section), dict)]
    return {name: shape(math.fsum(_number(p.get(name)) for p in parts)) for name in names}


def _share(entries: list[Entry], name: str) -> float:
    """A mean weighted by capacity; unweighted when a capacity is not known."""
    shares = [(entry, _number(entry[name])) for entry in entries if entry.get(name) is not None]
    if not shares:
        return 0.0
    weights = [_number(entry.get("max_total_num_tokens")) for entry, _ in shares]
    if not all(weights):
        weights = [1.0] * len(shares)
    total = math.fsum(weights)
    return math.fsum(w * share for w, (_, share) in zip(weights, shares, strict=True)) / total


def _moments(entries: list[Entry]) -> list[float] | None:
    """Sums over decode steps add up; absent from one, they are absent from the whole."""
    rows = [entry.get("decode_moments") for entry in entries]
    lists = [row for row in rows if isinstance(row, list)]
    if len(lists) != len(rows) or len({len(row) for row in lists}) != 1:
        return None
    return [math.fsum(_number(value) for value in column) for column in zip(*lists, strict=True)]


def _accept(entry: Entry) -> dict[str, float] | None:
    part = entry.get("speculative")
    if not isinstance(part, dict) or _number(part.get("accept_length")) == 0.0:
        return None
    return {name: _number(part.get(name)) for name in ("accept_length", "accept_rate")}


def _number(value: object) -> float:
    """A finite number from zero up, or zero for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    # Above 2**53 a float is no longer exact, and no count of SGLang's gets there.
    return float(value) if 0 <= value < 2.0**53 else 0.0
