"""`sweep.json`, as `loadtest sweep` leaves it, in the form that the fit reads.

Pure. Each pass of each role is a sweep of its own, so that passes are told from levels. Levels of an
open loop are left out: a fit is over requests in flight, which an open loop does not hold.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from loadtest import sweep_schema
from loadtest.points import Fact, Measured, Sweep
from loadtest.sweep_schema import SCHEMA, Point, Server, Spread
from router.fingerprint import fingerprint
from router.load import Role


def is_own(document: Mapping[str, Any]) -> bool:
    """Whether this is a `sweep.json`."""
    return document.get("schema") == SCHEMA


def own(documents: Sequence[Mapping[str, Any]], name: str) -> list[Sweep]:
    """The sweeps in such files. Raises msgspec.ValidationError for one that is not whole."""
    found = [msgspec.convert(dict(document), sweep_schema.Sweep) for document in documents]
    return [sweep for one in found for sweep in sweeps_of(one, name)]


def sweeps_of(found: sweep_schema.Sweep, name: str) -> list[Sweep]:
    """One for each role and pass."""
    sweeps = []
    for server in found.servers:
        points = [p for p in found.points if p.role is server.role and p.level is not None]
        facts = _facts(server, found.workload, points)
        remarks = tuple(
            f"{notice.code}: {notice.text}" for notice in found.notices if notice.role is None
        )
        for number in sorted({point.number for point in points}):
            measured = tuple(_measured(point) for point in points if point.number == number)
            sweeps.append(
                Sweep(
                    name=f"{name}, {server.role} pass {number}",
                    kind="loadtest sweep",
                    points=measured,
                    facts=facts,
                    remarks=remarks,
                    cap=server.cap,
                    role=server.role,
                )
            )
    return sweeps


def _measured(point: Point) -> Measured:
    return Measured(
        concurrency=point.level or 0,
        tokens_per_second=point.output_tok_s.value,
        ttft=_median(point.ttft_s),
        ttft_tail=_tail(point.ttft_s),
        time_per_token=_median(point.tpot_s),
        time_per_token_tail=_tail(point.tpot_s),
        accept_length=point.accept_length,
        waiting=None if point.queued is None else round(point.queued),
        requests=point.requests,
        errors=point.errors,
        seconds=point.window_s,
    )


def _median(spread: Spread) -> float | None:
    return None if spread.p50 is None else spread.p50.value


def _tail(spread: Spread) -> float | None:
    return None if spread.p99 is None else spread.p99.value


def _facts(
    server: Server, workload: sweep_schema.Workload, points: Sequence[Point]
) -> dict[str, Fact]:
    """What must be equal where the calibration is used, and what was asked."""
    version = server.engine_version
    told: dict[str, Fact | None] = {
        "model": server.model_path or server.model,
        "engine": f"sglang {version}" if version else None,
        "gpu": server.gpu,
        "dataset": workload.prompts,
        "prompt_tokens": _mean(p.input_tokens for p in points),
        "output_tokens": workload.output_tokens or _mean(p.output_tokens for p in points),
        "stream": True,
        **_flags(server),
    }
    return {name: value for name, value in told.items() if value is not None}


def _flags(server: Server) -> dict[str, Fact | None]:
    """The flags that move a curve, under the names that the router compares them by."""
    prefix = f"{Role(server.role).value}."
    found = fingerprint(server.role, server.flags)
    return {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}


def _mean(values: Iterable[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return round(statistics.fmean(told), 1) if told else None
