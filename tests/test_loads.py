"""Two servers' facts and loads as one server's: the pure merging."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import server_info
from router.load import BackendCounts, LoadTracker, Role, Telemetry
from router.loads import (
    SECTIONS,
    BackendLoads,
    LoadsError,
    as_prometheus,
    entries_of,
    get_load,
    merge,
    read_include,
)

UNIX = 1_800_000_000.0


def entry(running: int = 0, waiting: int = 0, **more: Any) -> dict[str, Any]:
    """An entry of SGLang 0.5.17, as captured, with other counts."""
    return {
        "timestamp": UNIX - 1, "dp_rank": 0, "num_running_reqs": running,
        "num_waiting_reqs": waiting, "num_waiting_uncached_tokens": 7, "num_used_tokens": 1000,
        "num_total_tokens": 1200, "num_active_tokens": 1000, "max_total_num_tokens": 131072,
        "max_running_requests": 256, "token_usage": 0.2, "gen_throughput": 100.5,
        "cache_hit_rate": 0.5, "utilization": 0.0, "total_prefill_uncached_tokens": 10,
        "total_prefill_busy_us": 20, "decode_moments": [1.0, 2.0],
        "memory": {"weight_gb": 14.977, "kv_cache_gb": 16.0, "graph_gb": 0.979,
                   "token_capacity": 131072},
        "queues": {"waiting": waiting, "grammar": 1, "paused": 0, "retracted": 0,
                   "prealloc_ready": 0},
    } | more  # fmt: skip


def answer(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"timestamp": "…", "version": "0.5.17", "accelerator": "NVIDIA H200",
            "num_accelerators": 1, "loads": list(entries)}  # fmt: skip


def backend(
    found: dict[str, Any] | None = None, in_flight: int = 0, told: Telemetry | None = None
) -> BackendLoads:
    counts = BackendCounts(Role.BASELINE)
    counts.in_flight = in_flight
    counts.telemetry = told
    return BackendLoads(counts, told is not None, found)


def one(spec: BackendLoads, base: BackendLoads, **more: Any) -> dict[str, Any]:
    body = merge(spec, base, unix=UNIX, **({"waiting": 0} | more))
    (found,) = body["loads"]
    assert isinstance(found, dict)
    return found


def test_counts_add_up_and_shares_are_weighted() -> None:
    """Counts, capacities and speeds are sums; the token usage is weighted by capacity."""
    spec = entry(3, 1, token_usage=0.4, max_total_num_tokens=100, timestamp=UNIX - 5)
    base = entry(10, 2, token_usage=0.1, max_total_num_tokens=300)
    found = one(backend(answer(spec)), backend(answer(base)))
    assert found["num_running_reqs"] == 13
    assert found["num_waiting_reqs"] == 3
    assert found["num_total_tokens"] == 2400
    assert found["max_total_num_tokens"] == 400
    assert found["max_running_requests"] == 512
    assert found["gen_throughput"] == 201.0
    assert found["token_usage"] == pytest.approx(0.175)
    assert found["cache_hit_rate"] == 0.5
    assert found["timestamp"] == UNIX - 5
    assert found["dp_rank"] == 0
    assert found["decode_moments"] == [2.0, 4.0]
    assert found["memory"] == {
        "weight_gb": 29.954,
        "kv_cache_gb": 32.0,
        "graph_gb": 1.958,
        "token_capacity": 262144,
    }
    assert found["queues"]["waiting"] == 3


def test_the_body_is_shaped_like_sglangs() -> None:
    """The merged body has the keys of a captured one, and its version."""
    body = merge(backend(answer(entry())), backend(answer(entry())), waiting=0, unix=UNIX)
    assert list(body) == ["timestamp", "version", "accelerator", "num_accelerators", "loads"]
    assert body["timestamp"] == "2027-01-15T08:00:00+00:00"
    assert body["version"] == "0.5.17"
    assert set(body["loads"][0]) == set(entry())


def test_all_ranks_become_one() -> None:
    """Data-parallel ranks of one backend are summed too."""
    ranks = answer(entry(1), entry(2, dp_rank=1))
    assert one(backend(ranks), backend(answer(entry(4))))["num_running_reqs"] == 7


def test_our_own_count_can_only_add() -> None:
    """Requests that a backend does not know of yet are running; those in our queue wait."""
    found = one(backend(answer(entry(3, 1)), in_flight=6), backend(answer(entry(9)), in_flight=2))
    assert found["num_running_reqs"] == 5 + 9
    assert one(backend(), backend(), waiting=4)["num_waiting_reqs"] == 4


def test_a_silent_backend_is_known_by_its_telemetry() -> None:
    """Without an answer the last telemetry counts, with all of SGLang's fields there."""
    told = Telemetry(5, 2, 0.0, 0.0, "get_load", 0.25, 2.5, 48)
    found = one(backend(in_flight=1, told=told), backend(answer(entry(1))))
    assert found["num_running_reqs"] == 6
    assert found["num_waiting_reqs"] == 2
    assert found["max_running_requests"] == 48 + 256
    assert found["token_usage"] == pytest.approx((0.25 + 0.2) / 2)
    assert found["speculative"]["accept_length"] == 2.5
    assert found["decode_moments"] is None


def test_with_nothing_known_our_count_is_the_load() -> None:
    """Neither answer nor telemetry: in-flight is what runs, and every core field is a number."""
    found = one(backend(in_flight=3), backend(in_flight=4))
    assert found["num_running_reqs"] == 7
    assert found["num_total_tokens"] == 0
    assert found["token_usage"] == 0.0


def test_acceptance_is_the_speculative_servers() -> None:
    """The baseline has no acceptance to average in."""
    spec = entry(speculative={"accept_length": 2.8, "accept_rate": 0.6})
    found = one(backend(answer(spec)), backend(answer(entry())))
    assert found["speculative"] == {"accept_length": 2.8, "accept_rate": 0.6}
    assert "speculative" not in one(backend(answer(entry())), backend(answer(spec)))


def test_sections_are_those_asked_for() -> None:
    """`include` leaves sections out, never the core."""
    bodies = (backend(answer(entry(1))), backend(answer(entry(2))))
    found = one(*bodies, include=read_include("core"))
    assert "memory" not in found
    assert "queues" not in found
    assert found["num_running_reqs"] == 3
    assert "queues" in one(*bodies, include=read_include("queues, spec"))
    assert "memory" not in one(*bodies, include=read_include("queues"))


@pytest.mark.parametrize("text", [None, "", "all", "core,all"])
def test_all_sections_by_default(text: str | None) -> None:
    """Nothing asked for means everything."""
    assert read_include(text) == set(SECTIONS)


def test_an_unknown_section_is_refused() -> None:
    """SGLang answers 400 to a section that does not exist, and so do we."""
    with pytest.raises(LoadsError, match="include"):
        read_include("core,nope")


def test_the_older_shape_counts_both_kinds() -> None:
    """In /get_load `num_reqs` is running plus waiting."""
    body = merge(backend(answer(entry(3, 1))), backend(answer(entry())), waiting=1, unix=UNIX)
    assert get_load(body) == [
        {
            "dp_rank": 0,
            "num_reqs": 5,
            "num_waiting_reqs": 2,
            "num_tokens": 2400,
            "num_pending_tokens": 14,
            "ts_tic": UNIX - 1,
        }
    ]


def test_the_prometheus_text_has_sglangs_names() -> None:
    """Every number is a gauge with the rank as its label, sections as prefixes."""
    text = as_prometheus(merge(backend(answer(entry(3))), backend(), waiting=0, unix=UNIX))
    assert '# TYPE sglang_num_running_reqs gauge\nsglang_num_running_reqs{dp_rank="0"} 3\n' in text
    assert 'sglang_memory_weight_gb{dp_rank="0"} 14.977\n' in text
    assert 'sglang_queues_grammar{dp_rank="0"} 1\n' in text
    assert "dp_rank{" not in text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)
wild_entries = st.dictionaries(st.sampled_from([*sorted(entry()), "speculative"]), json_values)


@given(st.lists(wild_entries | json_values, max_size=3) | json_values, st.integers(0, 50))
def test_no_answer_can_break_the_merge(wild: Any, in_flight: int) -> None:
    """Whatever a backend sends, the result is JSON, and never below what we count ourselves."""
    found = one(backend({"loads": wild}, in_flight=in_flight), backend(answer(entry(2))))
    json.dumps(found, allow_nan=False)
    assert found["num_running_reqs"] + found["num_waiting_reqs"] >= in_flight + 2


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_entries_are_raised_to_our_count(running: int, waiting: int, in_flight: int) -> None:
    """A backend's running and waiting are at least what we have open there, and no more is added."""
    (found,) = entries_of(backend(answer(entry(running, waiting)), in_flight=in_flight), UNIX)
    total = found["num_running_reqs"] + found["num_waiting_reqs"]
    assert total == max(running + waiting, in_flight)
    assert found["num_waiting_reqs"] == waiting


def test_the_tracker_is_not_touched() -> None:
    """Merging reads the tracker's record and changes nothing in it."""
    tracker = LoadTracker()
    tracker.lease(Role.BASELINE, 0.0)
    one(backend(), BackendLoads(tracker.baseline, False, None))
    assert tracker.baseline.in_flight == 1


# --------------------------------------------------------------------------- server info

SECRETS = {
    "api_key": "sk-secret", "admin_api_key": "sk-secret", "ssl_keyfile_password": "sk-secret",
    "launch_command": "sglang serve --api-key sk-secret", "env_vars": {"A": "sk-secret"},
    "a_field_of_next_year": "sk-secret", "host": "10.0.0.1", "_resolved_overrides": ["sk-secret"],
}  # fmt: skip


def info(**more: Any) -> dict[str, Any]:
    state = SECRETS | {
        "effective_max_running_requests_per_dp": 48, "last_gen_throughput": 100.0, "dp_size": 1,
        "memory_usage": {"weight": 15.0, "kvcache": 16.0, "token_capacity": 131072,
                         "graph": {"decode": 0.2}, "secret": "sk-secret"},
    }  # fmt: skip
    return SECRETS | {
        "model_path": "/m", "tokenizer_path": "/m", "served_model_name": "m", "version": "0.5.17",
        "speculative_algorithm": "EAGLE3", "max_running_requests": 48, "context_length": 8192,
        "max_total_num_tokens": 131072, "dp_size": 1, "tp_size": 2, "status": "ready",
        "internal_states": [state | more.pop("state", {})],
    } | more  # fmt: skip


SPEC_INFO = info(state={"avg_spec_accept_length": 2.8})
BASE_INFO = info(
    speculative_algorithm=None,
    max_running_requests=2048,
    context_length=4096,
    state={"effective_max_running_requests_per_dp": 2048, "last_gen_throughput": 50.0},
)


def test_no_secret_passes() -> None:
    """Keys, passwords, command lines, environments and unknown fields are not in the result."""
    assert "sk-secret" not in json.dumps(server_info.merge([SPEC_INFO, BASE_INFO]))
    assert "10.0.0.1" not in json.dumps(server_info.merge([BASE_INFO]))


@given(st.dictionaries(st.text(max_size=20), json_values, max_size=5))
def test_only_listed_names_pass(more: dict[str, Any]) -> None:
    """Whatever a server's answer holds, the names that come out are on the list."""
    merged = server_info.merge([more])
    assert set(merged) <= server_info.ALLOWED | {"internal_states"}


def test_the_pair_is_one_server() -> None:
    """Capacity is summed, the context is the smaller one, the rest is the speculative server's."""
    merged = server_info.merge([SPEC_INFO, BASE_INFO])
    assert merged["speculative_algorithm"] == "EAGLE3"
    assert merged["max_running_requests"] == 48 + 2048
    assert merged["max_total_num_tokens"] == 262144
    assert merged["context_length"] == 4096
    assert merged["tp_size"] == 2
    (state,) = merged["internal_states"]
    assert state["avg_spec_accept_length"] == 2.8
    assert state["effective_max_running_requests_per_dp"] == 2096
    assert state["last_gen_throughput"] == 150.0
    assert state["memory_usage"] == {
        "weight": 30.0,
        "kvcache": 32.0,
        "token_capacity": 262144,
        "graph": {"decode": 0.2},
    }


def test_a_benchmark_reads_what_it_needs() -> None:
    """SGLang's own benchmarks find tokenizer, acceptance and caps, and do not see a router."""
    merged = server_info.merge([SPEC_INFO, BASE_INFO])
    assert merged["tokenizer_path"] == "/m"
    state = merged["internal_states"][0]
    assert state["effective_max_running_requests_per_dp"] * (state.get("dp_size") or 1) == 2096
    assert not {"prefill", "decode", "encode", "router_manager"} & set(merged)


def test_one_server_alone_is_described_as_it_is() -> None:
    """With the speculative server away the baseline's facts are the pair's."""
    merged = server_info.merge([BASE_INFO])
    assert merged["speculative_algorithm"] is None
    assert merged["internal_states"][0]["effective_max_running_requests_per_dp"] == 2048


def test_ranks_add_up() -> None:
    """Several data-parallel ranks are one with their summed capacity, and a mean acceptance."""
    two = dict(SPEC_INFO)
    ranks = [dict(SPEC_INFO["internal_states"][0]) for _ in range(2)]
    ranks[1]["avg_spec_accept_length"] = 2.4
    two |= {"dp_size": 2, "internal_states": ranks}
    merged = server_info.merge([two])
    assert merged["dp_size"] == 1
    assert merged["internal_states"][0]["effective_max_running_requests_per_dp"] == 96
    assert merged["internal_states"][0]["avg_spec_accept_length"] == pytest.approx(2.6)


def test_the_worse_status_counts() -> None:
    """A pair of which one server is not ready does not say that it is."""
    assert server_info.merge([info(), info(status="starting")])["status"] == "starting"
    assert server_info.merge([info(), info()])["status"] == "ready"


def test_nobody_to_describe_is_an_error() -> None:
    """No answer at all is for the caller to handle."""
    with pytest.raises(ValueError, match="no server"):
        server_info.merge([])
