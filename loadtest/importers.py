"""Reading sweeps that were made before: which format a file is in, told by what is in it.

Pure: bytes in, sweeps out. A file that is none of the known formats is refused in one line.

| format | what it is told by |
| --- | --- |
| `sweep.json` of `loadtest sweep` | `schema` crossover.sweep/1 |
| sweep file (`loadtest/data/README.md`) | `points` with `C` and `out_tok_s` |
| our request records, JSON lines | `id`, `started`, `ended` |
| `sglang.benchmark.serving` (`bench_serving`), JSON lines | `output_throughput`, `duration` |
| `bench_one_batch_server`, JSON lines | `batch_size`, `latency`, `output_throughput` |
| GuideLLM, `benchmarks.json` | `benchmarks` with `metrics` |
| AIPerf, `profile_export_aiperf.json` | `output_token_throughput` with `avg` |

The formats of other tools are read as their files are, not as they might be: keys that are missing
in older versions may be missing, and `Infinity` and `NaN` (Python writes them, JSON has them not)
are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from loadtest.import_own import is_own, own
from loadtest.import_sglang import one_batch, serving
from loadtest.import_tools import aiperf, guidellm
from loadtest.points import Fact, Measured, Sweep, from_records
from loadtest.record import RequestRecord
from loadtest.values import ResultsError, at, count, number, positive
from router.load import Role

Document = Mapping[str, Any]

EXPECTED: Final = (
    "expected a sweep.json, a sweep file (points with C and out_tok_s), request records, the JSON lines of"
    " sglang.benchmark.serving or bench_one_batch_server, GuideLLM's benchmarks.json or AIPerf's"
    " profile_export_aiperf.json"
)


def read_sweeps(data: bytes, name: str) -> list[Sweep]:
    """The sweeps in this file. Raises ResultsError, in one line that names the file."""
    documents = _documents(data, name)
    for tells, read in _FORMATS:
        if all(tells(document) for document in documents):
            try:
                sweeps = read(documents, name)
            except (ResultsError, msgspec.MsgspecError) as error:
                raise ResultsError(f"{name}: {error}") from error
            if not any(sweep.points for sweep in sweeps):
                raise ResultsError(f"{name} has no level in it")
            return sweeps
    if any("frontier" in document and "schema" in document for document in documents):
        raise ResultsError(f"{name} is a calibration, which is what a fit makes: {EXPECTED}")
    raise ResultsError(f"{name} is in no known format: {EXPECTED}")


def _documents(data: bytes, name: str) -> list[Document]:
    """The JSON object of a file, or those of its lines."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ResultsError(f"{name} is not text: {EXPECTED}") from None
    try:
        found = [json.loads(text)]
    except ValueError:
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ResultsError(f"{name} is not JSON ({error}): {EXPECTED}") from None
    except RecursionError:
        raise ResultsError(f"{name} is nested too deeply: {EXPECTED}") from None
    if not found or not all(isinstance(document, dict) for document in found):
        raise ResultsError(f"{name} holds no JSON objects: {EXPECTED}")
    return found


def _is_sweep(document: Document) -> bool:
    points = document.get("points")
    return isinstance(points, list) and all(
        isinstance(point, dict) and "C" in point and "out_tok_s" in point for point in points
    )


def _sweep(documents: Sequence[Document], name: str) -> list[Sweep]:
    return [_one_sweep(document, name) for document in documents]


# Facts of a sweep file's `meta` under the names that a fingerprint has; the rest is remarks.
_META: Final = {
    "sglang": "engine",
    "gpu": "gpu",
    "model": "model",
    "attention": "attention",
    "prefill_cuda_graph": "prefill_cuda_graph",
    "server": "server",
    "draft": "draft",
    "simulated_acceptance_length": "simulated_accept_length",
}


def _one_sweep(document: Document, name: str) -> Sweep:
    found = document.get("meta")
    meta = found if isinstance(found, dict) else {}
    facts: dict[str, Fact] = {}
    for key, word in _META.items():
        if isinstance(meta.get(key), str | int | float | bool):
            facts[word] = f"sglang {meta[key]}" if key == "sglang" else meta[key]
    if (prompt := number(document, "input_tokens")) is not None:
        facts["prompt_tokens"] = prompt
    output = document.get("output_tokens")
    if isinstance(output, list) and output and all(isinstance(x, int | float) for x in output):
        facts["output_tokens"] = "-".join(f"{bound:g}" for bound in output)
    if isinstance(document.get("stream"), bool):
        facts["stream"] = document["stream"]
    points = tuple(_sweep_point(point, name) for point in document["points"])
    return Sweep(
        name=name,
        kind="sweep file",
        points=points,
        facts=facts,
        remarks=tuple(
            f"{key}: {meta[key]}" for key in ("note", "source", "left_out") if key in meta
        ),
        cap=count(document, "max_running_requests"),
        role=_role_of(points, str(meta.get("server", ""))),
    )


def _sweep_point(point: Document, name: str) -> Measured:
    def ms(*path: str) -> float | None:
        value = positive(point, *path)
        return None if value is None else value / 1e3

    speed, level = number(point, "out_tok_s"), number(point, "C")
    if speed is None or level is None:
        raise ResultsError(f"{name}: C and out_tok_s are numbers, got {point['C']!r:.40}")
    return Measured(
        concurrency=level,
        tokens_per_second=speed,
        ttft=ms("ttft_ms", "p50"),
        ttft_tail=ms("ttft_ms", "p99"),
        time_per_token=ms("tpot_ms", "p50"),
        time_per_token_tail=ms("tpot_ms", "p99"),
        accept_length=positive(point, "server", "spec", "accept_length"),
        tokens_per_chunk=positive(point, "tokens_per_chunk"),
        waiting=count(point, "server", "waiting"),
        requests=count(point, "requests"),
        errors=count(point, "errors") or 0,
        seconds=number(point, "window_s"),
    )


def _role_of(points: Sequence[Measured], server: str) -> Role | None:
    if server == "baseline":
        return Role.BASELINE
    chunks = [point.tokens_per_chunk for point in points if point.tokens_per_chunk is not None]
    told = any(point.accept_length is not None for point in points)
    if told or (chunks and max(chunks) > 1.05):
        return Role.SPECULATIVE
    return Role.BASELINE if chunks else None


def _is_records(document: Document) -> bool:
    return {"id", "started", "ended"} <= document.keys()


def _records(documents: Sequence[Document], name: str) -> list[Sweep]:
    return from_records(name, (msgspec.convert(d, RequestRecord) for d in documents))


def _is_one_batch(document: Document) -> bool:
    return {"batch_size", "latency", "output_throughput"} <= document.keys()


def _is_serving(document: Document) -> bool:
    return {"output_throughput", "duration"} <= document.keys()


def _is_guidellm(document: Document) -> bool:
    runs = document.get("benchmarks")
    return isinstance(runs, list) and all(at(run, "metrics") is not None for run in runs)


def _is_aiperf(document: Document) -> bool:
    return number(document, "output_token_throughput", "avg") is not None


_Read = Callable[[Sequence[Document], str], list[Sweep]]
_FORMATS: Final[tuple[tuple[Callable[[Document], bool], _Read], ...]] = (
    (is_own, own),
    (_is_sweep, _sweep),
    (_is_records, _records),
    (_is_one_batch, one_batch),
    (_is_serving, serving),
    (_is_guidellm, guidellm),
    (_is_aiperf, aiperf),
)
