"""Files of other tools become sweeps: told apart by what is in them, read as they are."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadtest.importers import EXPECTED, read_sweeps
from loadtest.points import Measured, Sweep, from_records, usable
from loadtest.record import RequestRecord
from loadtest.values import ResultsError
from router.load import Role

DATA = Path(__file__).parent / "data"


def read(name: str) -> list[Sweep]:
    return read_sweeps((DATA / "imports" / name).read_bytes(), name)


def test_sglang_serving() -> None:
    """Each line of bench_serving is a level; Infinity in it is read, and so is the server's cap."""
    (found,) = read("serving-speculative.jsonl")
    assert (found.kind, found.role, found.cap) == ("sglang.benchmark.serving", Role.SPECULATIVE, 48)
    assert [p.concurrency for p in found.points] == [1, 4, 16, 32, 48, 64]
    assert found.points[2] == Measured(
        concurrency=16, tokens_per_second=3300, ttft=0.030, ttft_tail=0.048, time_per_token=0.0046,
        time_per_token_tail=found.points[2].time_per_token_tail, accept_length=2.6, requests=400,
        seconds=found.points[2].seconds,
    )  # fmt: skip
    assert found.points[2].time_per_token_tail == pytest.approx(0.0046 * 1.3)
    assert found.facts == {
        "dataset": "random", "prompt_tokens": 128, "output_tokens": 128, "dtype": "auto",
        "model": "Qwen/Qwen2.5-3B-Instruct", "draft": "Qwen/draft", "engine": "sglang 0.5.5.post3",
        "attention": "fa3", "tp_size": 1, "page_size": 1, "kv_cache_dtype": "auto",
        "disable_overlap_schedule": False, "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
    }  # fmt: skip
    (base,) = read("serving-baseline.jsonl")
    assert (base.role, base.cap) == (Role.BASELINE, 4096)
    assert all(point.accept_length is None for point in base.points)


def test_the_cap_of_a_server_is_respected() -> None:
    """The level of 64 on a server that runs 48 is left out, by what the file itself says."""
    found = usable(read("serving-speculative.jsonl"))
    assert [point.concurrency for _, point in found.points] == [1, 4, 16, 32, 48]
    said = "above the server's max_running_requests of 48, so the rest queued"
    assert found.left_out == (f"serving-speculative.jsonl, 64 requests: {said}",)


def test_no_key_of_a_server_gets_into_a_sweep() -> None:
    """bench_serving stores the whole /server_info; the keys in it stay where they are."""
    data = (DATA / "imports" / "serving-speculative.jsonl").read_bytes()
    assert b"sk-not-for-the-file" in data
    assert b"sk-not" not in msgspec.json.encode(read_sweeps(data, "x"))


def serving(**more: Any) -> bytes:
    line = {"output_throughput": 100.0, "duration": 2.0, "max_concurrency": 8} | more
    return json.dumps(line).encode()


def test_older_lines_of_sglang_serving() -> None:
    """Without server_info, percentiles or acceptance a line is still a level."""
    (found,) = read_sweeps(serving(), "old.jsonl")
    assert found.points == (Measured(concurrency=8, tokens_per_second=100, seconds=2.0),)
    assert (found.role, found.cap, dict(found.facts), found.remarks) == (None, None, {}, ())


def test_an_open_load_of_sglang_serving() -> None:
    """Without a limit the mean concurrency is the level, and a level that was not held is said."""
    (opened,) = read_sweeps(serving(max_concurrency=None, concurrency=11.78), "x")
    assert opened.points[0].concurrency == 11.78
    assert opened.remarks == ("open load, mean concurrency 11.8",)
    (ramp,) = read_sweeps(serving(max_concurrency=32, concurrency=20.0), "x")
    assert "only 20.0 on average" in ramp.remarks[0]
    with pytest.raises(ResultsError, match="neither max_concurrency nor concurrency"):
        read_sweeps(serving(max_concurrency=None), "x")


def test_runs_of_different_lengths_are_different_sweeps() -> None:
    """One file with two loads in it gives two sweeps, so that they are never mixed."""
    lines = b"\n".join(
        serving(dataset_name="random", random_input_len=n, random_output_len=64) for n in (128, 512)
    )
    assert [s.facts["prompt_tokens"] for s in read_sweeps(lines, "x")] == [128, 512]


def test_sglang_one_batch() -> None:
    """A batch's whole latency counts, acceptance of -1 is none, and lengths are facts."""
    (found,) = read("one-batch-speculative.jsonl")
    assert (found.kind, found.role) == ("bench_one_batch_server", Role.SPECULATIVE)
    assert found.facts == {"prompt_tokens": 1024, "output_tokens": 512}
    assert [p.concurrency for p in found.points] == [1, 8, 32, 64]
    assert found.points[1].tokens_per_second == pytest.approx(8 * 512 / 1.9)
    assert found.points[1].time_per_token == pytest.approx((1.9 - 0.21) / 511)
    assert (found.points[1].ttft, found.points[1].accept_length) == (0.21, 2.71)
    (base,) = read("one-batch-baseline.jsonl")
    assert base.role is Role.BASELINE
    assert {point.accept_length for point in base.points} == {None}


def test_one_batch_with_requests_that_stopped_early() -> None:
    """Newer files say how many tokens there were; a line without its sizes is refused."""
    line = {"batch_size": 4, "input_len": 8, "output_len": 100, "latency": 2.0,
            "output_throughput": 1.0, "total_output_tokens": 300}  # fmt: skip
    (found,) = read_sweeps(json.dumps(line).encode(), "x")
    assert found.points[0].tokens_per_second == 150
    with pytest.raises(ResultsError, match="no batch_size, output_len or latency"):
        read_sweeps(json.dumps(line | {"latency": -1}).encode(), "x")


def test_guidellm() -> None:
    """Concurrent and synchronous benchmarks are levels; one at a constant rate is passed over."""
    (found,) = read("guidellm-baseline.json")
    assert (found.kind, found.role) == ("GuideLLM", None)
    assert [p.concurrency for p in found.points] == [1, 8, 32, 64]
    point = found.points[1]
    assert (point.tokens_per_second, point.ttft) == (470.0, 0.055)
    assert point.time_per_token == pytest.approx(0.0168)
    assert point.ttft_tail == pytest.approx(0.0825)
    assert (point.requests, point.errors) == (400, 0)
    assert point.seconds == pytest.approx(30.0)
    assert found.remarks == ("a constant benchmark holds no concurrency and was passed over",)
    assert found.facts["model"] == "Qwen/Qwen3-4B-Thinking-2507"
    assert found.facts["output_tokens"] == 1024.0


def test_guidellm_without_a_level() -> None:
    """A sweep by rate has no concurrency: that is said, with what to run instead."""
    report = json.loads((DATA / "imports" / "guidellm-baseline.json").read_bytes())
    report["benchmarks"] = report["benchmarks"][-1:]
    with pytest.raises(ResultsError, match=r"there is constant\): run guidellm with --profile"):
        read_sweeps(json.dumps(report).encode(), "x")
    older = {"benchmarks": [{"args": {"strategy": {"type_": "concurrent", "streams": 4}},
                             "metrics": {}}]}  # fmt: skip
    with pytest.raises(ResultsError, match="no output_tokens_per_second"):
        read_sweeps(json.dumps(older).encode(), "x")


def test_aiperf() -> None:
    """One export is one level, that of the phase that counts, not of the warm-up."""
    (found,) = read("aiperf-speculative-c8.json")
    (point,) = found.points
    assert (found.kind, point.concurrency, point.tokens_per_second) == ("AIPerf", 8, 1100.0)
    assert (point.ttft, point.time_per_token) == (0.072, 0.0065)
    assert (point.requests, point.seconds) == (96, 28.5)
    assert found.facts == {"model": "qwen3.6-nvfp4", "prompt_tokens": 467.5, "output_tokens": 228.2}


def test_older_aiperf() -> None:
    """Before 0.9 the level and the model were elsewhere; without a level the file is refused."""
    older: dict[str, Any] = {
        "output_token_throughput": {"unit": "tokens/sec", "avg": 52.0},
        "input_config": {"loadgen": {"concurrency": 100}, "endpoint": {"model_names": ["gpt-oss"]}},
        "was_cancelled": True,
    }
    (found,) = read_sweeps(json.dumps(older).encode(), "x")
    assert (found.points[0].concurrency, found.facts["model"]) == (100, "gpt-oss")
    assert found.remarks == ("the run was cancelled",)
    older["input_config"] = {}
    with pytest.raises(ResultsError, match="x: the run held no concurrency"):
        read_sweeps(json.dumps(older).encode(), "x")


def test_our_own_sweep_files() -> None:
    """The measured sweeps of both roles are told apart without being told."""
    (k4,) = read_sweeps((DATA / "sweeps" / "k4.json").read_bytes(), "k4.json")
    (base,) = read_sweeps((DATA / "sweeps" / "base.json").read_bytes(), "base.json")
    (bare,) = read_sweeps((DATA / "sweeps" / "baseline.json").read_bytes(), "baseline.json")
    assert (k4.role, base.role, bare.role) == (Role.SPECULATIVE, Role.BASELINE, None)
    assert k4.points[0].tokens_per_chunk == 2.737
    assert k4.points[0].accept_length == pytest.approx(2.7917, abs=1e-4)
    assert k4.points[0].time_per_token == pytest.approx(0.00247)
    assert bare.points[1] == Measured(concurrency=70, tokens_per_second=773)
    assert k4.remarks == ("note: first lease; prefill CUDA graph off",)


@pytest.mark.parametrize(
    ("told", "seen", "taken"),
    [(2.8, 2.74, 2.8), (1.7, 1.07, 1.07), (None, 2.0, 2.0), (2.0, None, 2.0), (None, None, None)],
)
def test_the_better_source_of_acceptance(
    told: float | None, seen: float | None, taken: float | None
) -> None:
    """The server's lifetime mean counts unless the client saw something else altogether."""
    point = Measured(concurrency=1, tokens_per_second=1, accept_length=told, tokens_per_chunk=seen)
    assert point.acceptance == taken


def records() -> list[RequestRecord]:
    """Two requests at a time for ten seconds, one a second each: 10 tokens/s each."""
    return [
        RequestRecord(
            id=f"{slot}-{i}", run="a", level=2, backend=Role.BASELINE, started=i + slot * 0.5,
            first_chunk=i + slot * 0.5 + 0.1, ended=i + slot * 0.5 + 1.0, output_tokens=10,
        )
        for slot in (0, 1)
        for i in range(10)
    ]  # fmt: skip


def test_our_request_records() -> None:
    """Records become a level of the role that they ran on, measured while the load was held."""
    data = msgspec.json.Encoder().encode_lines(records())
    (found,) = read_sweeps(data, "run.jsonl")
    (point,) = found.points
    assert (found.role, found.kind, point.concurrency) == (Role.BASELINE, "request records", 2)
    assert point.tokens_per_second == pytest.approx(20.0, rel=0.02)
    assert point.ttft == pytest.approx(0.1)
    assert point.time_per_token == pytest.approx(0.1)
    assert (point.requests, point.errors, point.seconds) == (20, 0, 9.0)


def test_records_with_errors_and_without_levels() -> None:
    """A failed request counts as failed, and one that belongs to no level is passed over."""
    broken = msgspec.structs.replace(records()[0], error="cut", output_tokens=None)
    stray = msgspec.structs.replace(records()[1], level=None)
    (found,) = from_records("x", [broken, stray, *records()[2:]])
    assert (found.points[0].requests, found.points[0].errors) == (18, 1)
    (wave,) = from_records("x", records()[:1])
    assert wave.points[0].tokens_per_second == pytest.approx(10.0)
    assert from_records("x", [stray]) == []


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "holds no JSON objects"),
        (b"\xff\xfe", "is not text"),
        (b"[1, 2]", "holds no JSON objects"),
        (b"Concurrency,tok/s\n1,92.7\n", "is not JSON"),
        (b'{"points": [[1, 0.02]]}', "is in no known format"),
        (b'{"a": 1}', "is in no known format"),
        (b'{"schema": "crossover.calibration/1", "frontier": {}}', "is a calibration"),
        (b'{"points": []}', "has no level in it"),
        (b'{"points": [{"C": "x", "out_tok_s": 3}]}', "C and out_tok_s are numbers"),
        (b'{"id": 5, "started": 0, "ended": 1}', "Expected `str`, got `int`"),
        (b'{"benchmarks": []}', r"holds a concurrency \(there is none\)"),
        (b'{"batch_size": 1, "latency": 1, "output_throughput": 1}\n{"id": "x"}', "no known"),
    ],
)  # fmt: skip
def test_an_unknown_file_is_refused_in_one_line(data: bytes, why: str) -> None:
    """What is no sweep is refused with the file's name, and what was expected in its place."""
    with pytest.raises(ResultsError, match=why) as caught:
        read_sweeps(data, "file.x")
    assert "file.x" in str(caught.value)
    assert "\n" not in str(caught.value)
    if "known" in str(caught.value) or "JSON" in str(caught.value):
        assert str(caught.value).endswith(EXPECTED)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["points", "C", "out_tok_s", "benchmarks", "metrics", "config", "strategy", "type_",
             "output_throughput", "duration", "batch_size", "latency", "output_token_throughput",
             "avg", "input_config", "phases", "server_info", "internal_states", "max_concurrency",
             "id", "started", "ended", "meta", "output_tokens"]
        ),
        inner, max_size=6,
    ),
    max_leaves=16,
)  # fmt: skip


@given(json_values)
@example({"points": [], "meta": True})
@example({"points": [], "meta": ["note"]})
@example({"points": [], "output_tokens": ["many"]})
@settings(deadline=None, max_examples=200)
def test_no_document_breaks_the_reader(document: Any) -> None:
    """Whatever JSON a file holds, it is sweeps or refused: nothing between."""
    try:
        found = read_sweeps(json.dumps(document).encode(), "x")
    except ResultsError:
        return
    assert all(point.concurrency is not None for sweep in found for point in sweep.points)


def _short(name: str) -> list[Any]:
    """A file's JSON objects, with lists cut to two, so that a place in them is soon found."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(inner) for key, inner in value.items()}
        return [cut(inner) for inner in value[:2]] if isinstance(value, list) else value

    text = (DATA / name).read_text()
    try:
        return [cut(json.loads(text))]
    except ValueError:
        return [cut(json.loads(line)) for line in text.splitlines()[:2]]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    return [path, *(place for key, under in inner for place in _places(under, (*path, key)))]


DOCUMENTS = {
    file.name: _short(f"{folder}/{file.name}")
    for folder in ("imports", "sweeps")
    for file in sorted((DATA / folder).iterdir())
    if file.suffix in {".json", ".jsonl"}
}


@pytest.mark.parametrize("name", DOCUMENTS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_value_of_another_kind_breaks_no_reader(name: str, data: st.DataObject) -> None:
    """A file that is right but for one value is read or refused, whatever that value is."""
    documents = copy.deepcopy(DOCUMENTS[name])
    *path, last = data.draw(st.sampled_from([p for p in _places(documents) if p]))
    holder: Any = documents
    for key in path:
        holder = holder[key]
    holder[last] = data.draw(json_values)
    raw = "\n".join(json.dumps(document) for document in documents).encode()
    with contextlib.suppress(ResultsError):
        read_sweeps(raw, name)
