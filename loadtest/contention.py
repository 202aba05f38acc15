"""What two servers on one host do to each other: the share of its own speed that each kept.

Pure. A run with both servers under load is a pair of sweep files whose labels end in `@N:M`, N
requests on the speculative server and M on the baseline. What each reached there, over what the
fitted curve says of it alone at the same concurrency, is the share that it kept. Of a server that
speculates the verify steps count, not the tokens, so that another acceptance during the run is not
taken for contention. Servers that share GPUs kept 0.47 to 0.79 of their speed on an H200; with a GPU
each they would keep all of it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from loadtest.importers import read_sweeps
from loadtest.points import Fact, Sweep
from loadtest.values import ResultsError
from router.calibration import Contention, Overlap
from router.curves import Curve, Curves
from router.load import Role

_LABEL: Final = re.compile(r"@(\d+):(\d+)$")
# Two servers that both keep more than this do not disturb each other beyond noise.
UNDISTURBED: Final = 0.9


class Both(msgspec.Struct, frozen=True):
    """Both servers under load at once."""

    n: int
    m: int
    speculative: Sweep
    baseline: Sweep


def pair_up(files: Iterable[tuple[str, bytes]]) -> list[Both]:
    """Pairs of files that belong together. Raises ResultsError for one that has no partner."""
    runs: dict[tuple[int, int], dict[Role, Sweep]] = {}
    for name, data in files:
        n, m = _levels(data, name)
        for sweep in read_sweeps(data, name):
            if sweep.role is None:
                raise ResultsError(f"{name} does not tell which server it measured")
            if sweep.role in runs.setdefault((n, m), {}):
                raise ResultsError(f"{name}: the {sweep.role} server at {n}:{m} is there twice")
            runs[n, m][sweep.role] = sweep
    for (n, m), found in runs.items():
        if len(found) < 2:
            raise ResultsError(
                f"both servers at {n}:{m}: only the {next(iter(found))} one is there"
            )
    return [
        Both(n, m, found[Role.SPECULATIVE], found[Role.BASELINE])
        for (n, m), found in sorted(runs.items())
    ]


def _levels(data: bytes, name: str) -> tuple[int, int]:
    try:
        document: Mapping[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError:
        document = {}
    found = _LABEL.search(str(document.get("label", "")))
    if found is None:
        raise ResultsError(
            f"{name} is no run of both servers: expected a sweep file with a label like k1@16:48"
        )
    return int(found[1]), int(found[2])


def contention(
    runs: Sequence[Both], alone: Curves, servers: Mapping[Role, Fact | None]
) -> tuple[Contention | None, tuple[str, ...]]:
    """The shares, and what is to be said of them. None without runs.

    `alone` are the curves of each server by itself, `servers` what the sweeps say the servers are.
    A run with another kind of server says nothing of how much this one keeps.
    """
    if not runs:
        return None, ()
    other = {
        role
        for both in runs
        for role, sweep in ((Role.SPECULATIVE, both.speculative), (Role.BASELINE, both.baseline))
        if None not in (servers.get(role), sweep.facts.get("server"))
        and servers[role] != sweep.facts["server"]
    }
    overlaps = tuple(
        Overlap(
            n=both.n,
            m=both.m,
            speculative=None
            if Role.SPECULATIVE in other
            else _kept(both.speculative, alone.speculative),
            baseline=None if Role.BASELINE in other else _kept(both.baseline, alone.baseline),
        )
        for both in runs
    )
    spec = [o.speculative for o in overlaps if o.speculative is not None]
    base = [o.baseline for o in overlaps if o.baseline is not None]
    known = [*spec, *base]
    notes = tuple(
        f"both at once was measured with another {role} server"
        f" ({next(_server(both, role) for both in runs)}): its share is not known"
        for role in sorted(other)
    )
    if not known:
        return None, notes
    return Contention(
        gpus="split" if statistics.fmean(known) > UNDISTURBED else "shared",
        overlaps=overlaps,
        speculative=round(statistics.fmean(spec), 3) if spec else None,
        baseline=round(statistics.fmean(base), 3) if base else None,
    ), notes


def _server(both: Both, role: Role) -> Fact:
    sweep = both.speculative if role is Role.SPECULATIVE else both.baseline
    return sweep.facts["server"]


def _kept(sweep: Sweep, alone: Curve) -> float:
    shares = []
    for point in sweep.points:
        share = point.tokens_per_second / alone.tokens_per_second(point.concurrency)
        nearest = min(alone.points, key=lambda p: abs(p.concurrency - point.concurrency))
        if point.acceptance is not None and nearest.accept_length is not None:
            share *= nearest.accept_length / point.acceptance
        shares.append(share)
    return round(statistics.fmean(shares), 3)
