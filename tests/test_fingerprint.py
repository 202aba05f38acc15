"""What a server is, as a calibration keeps it, and what is no longer so."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fingerprint import (
    Fact,
    Judgement,
    another_model,
    compare,
    fingerprint,
    judge,
    swapped,
    together,
)
from router.load import Role
from router.server_info import ALLOWED

DATA = Path(__file__).parent / "data" / "server_info"
SPECULATIVE, BASELINE = Role.SPECULATIVE, Role.BASELINE


def info(name: str) -> dict[str, Any]:
    """A server's own words."""
    document: dict[str, Any] = json.loads((DATA / f"{name}.json").read_bytes())
    found: dict[str, Any] = document.get("server_info", document)
    return found


def test_a_captured_server_is_known_by_its_flags() -> None:
    """Model, engine and context are shared facts, the flags that move a curve are its own."""
    assert fingerprint(SPECULATIVE, info("captured-0.5.17-eagle3-topk1")) == {
        "model": "/models/target",
        "served": "sim-llama-8b",
        "engine": "sglang 0.5.17",
        "context": 8192,
        "speculative.speculative_algorithm": "EAGLE3",
        "speculative.draft": "/models/draft",
        "speculative.speculative_num_steps": 3,
        "speculative.speculative_eagle_topk": 1,
        "speculative.speculative_num_draft_tokens": 4,
        "speculative.speculative_adaptive": False,
        "speculative.dtype": "auto",
        "speculative.quantization": None,
        "speculative.kv_cache_dtype": "auto",
        "speculative.tp_size": 1,
        "speculative.pp_size": 1,
        "speculative.dp_size": 1,
        "speculative.cap": 256,
        "speculative.chunked_prefill_size": 8192,
        "speculative.page_size": 1,
        "speculative.disable_radix_cache": False,
        "speculative.disable_overlap_schedule": False,
        "speculative.enable_mixed_chunk": False,
        "speculative.attention": "fa3",
        "speculative.cuda_graph_max_bs": 256,
    }


@pytest.mark.parametrize("name", ["captured-0.5.17-baseline", "captured-0.5.17-eagle3-topk1"])
def test_what_a_sweep_keeps_of_a_server_matches_the_server(name: str) -> None:
    """The flags in a sweep (allow-listed, without nulls and version) agree with the live body."""
    body = info(name)
    kept = {
        key: body[key]
        for key in ALLOWED - {"version", "status", "startup_time", "random_seed", "frontend"}
        if body.get(key) is not None
    }
    made = fingerprint(SPECULATIVE, kept)
    live = fingerprint(SPECULATIVE, body)
    assert "engine" not in made
    assert made.items() <= live.items()
    assert len(made) >= 15
    assert compare(made, live) == ()


def test_no_secret_gets_into_a_fingerprint() -> None:
    """Keys, passwords and the command line are not among the facts."""
    body = info("captured-0.5.17-baseline") | {
        "api_key": "sk-1", "admin_api_key": "sk-1", "launch_command": "--api-key sk-1",
        "ssl_keyfile_password": "sk-1",
    }  # fmt: skip
    assert "sk-1" not in str(fingerprint(BASELINE, body))


def test_another_flag_is_named_with_both_values() -> None:
    """A mismatch says what was calibrated and what is live, and only that."""
    was = fingerprint(SPECULATIVE, info("captured-0.5.17-eagle3-topk1"))
    now = fingerprint(
        SPECULATIVE,
        info("captured-0.5.17-eagle3-topk1") | {"speculative_eagle_topk": 4, "version": "0.5.18"},
    )
    assert [str(each) for each in compare(was, now)] == [
        "engine: calibrated sglang 0.5.17, live sglang 0.5.18",
        "speculative.speculative_eagle_topk: calibrated 1, live 4",
    ]


def test_only_what_both_say_is_compared() -> None:
    """Conditions of an older file and flags that it did not keep are no mismatch."""
    old: dict[str, Fact] = {
        "gpu": "1x NVIDIA H200", "prompt_tokens": 256, "speculative.server": "EAGLE-3 steps=3",
        "engine": "sglang 0.5.17", "speculative.attention": "fa3",
    }  # fmt: skip
    live = fingerprint(SPECULATIVE, info("captured-0.5.17-eagle3-topk1"))
    assert compare(old, live) == ()
    assert [m.key for m in compare(old | {"speculative.attention": "triton"}, live)] == [
        "speculative.attention"
    ]


@pytest.mark.parametrize(
    ("said", "live", "other"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", False),
        ("meta-llama/Llama-3.1-8B", "/models/Llama-3.1-8B/", False),
        (
            "meta-llama/Llama-3.1-8B",
            "/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a16976",
            False,
        ),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", True),
        ("Llama-3.1-8B shape, bf16, dummy weights", "/models/target", False),
    ],
)
def test_a_model_is_known_by_its_name_and_not_by_its_path(
    said: str, live: str, *, other: bool
) -> None:
    """The same model elsewhere is the same; a description in words says nothing."""
    assert another_model({"model": said}, fingerprint(BASELINE, {"model_path": live})) is other


def test_the_served_name_is_as_good_as_the_path() -> None:
    """A client measured a model under the name that it is served by."""
    live = fingerprint(BASELINE, {"model_path": "/models/target", "served_model_name": "llama-8b"})
    assert not another_model({"model": "llama-8b"}, live)
    assert compare({"model": "llama-8b"}, live) == ()
    assert another_model({"model": "qwen-8b"}, live)
    assert not another_model({}, live)
    assert not another_model({"model": "llama-8b"}, {})


def test_sweeps_that_disagreed_match_either() -> None:
    """A file that says "16 and 64" was measured with both."""
    said: dict[str, Fact] = {"baseline.page_size": "16 and 64"}
    assert compare(said, {"baseline.page_size": 64}) == ()
    assert len(compare(said, {"baseline.page_size": 1})) == 1


def test_servers_that_differ_in_a_shared_fact_both_match() -> None:
    """Two context lengths are both kept, and each server matches its own."""
    spec = fingerprint(SPECULATIVE, {"model_path": "m", "context_length": 8192})
    base = fingerprint(BASELINE, {"model_path": "m", "context_length": 4096})
    both = together(spec, base)
    assert both == {"model": "m", "context": "8192 and 4096"}
    assert judge(both, {SPECULATIVE: spec, BASELINE: base}) == Judgement(matches=True)


def test_a_mismatch_of_both_servers_is_said_once() -> None:
    """A shared fact that changed on both is one fact; nothing known is no judgement."""
    now = {role: fingerprint(role, {"version": "0.5.18"}) for role in (SPECULATIVE, BASELINE)}
    found = judge({"engine": "sglang 0.5.17"}, now)
    assert (found.matches, found.refusal) == (False, None)
    assert [each.key for each in found.mismatches] == ["engine"]
    assert judge({"gpu": "H200"}, now) == Judgement()
    assert judge({"engine": "sglang 0.5.17"}, {}) == Judgement()


def test_a_switch_is_not_a_number() -> None:
    """False is not 0 and None is not False."""
    assert len(compare({"a": False}, {"a": 0})) == 1
    assert len(compare({"a": None}, {"a": False})) == 1
    assert compare({"a": 1.0}, {"a": 1}) == ()


def test_roles_are_swapped_when_only_the_baseline_speculates() -> None:
    """Each server in the other's place is seen; one that does not say is not accused."""
    on = {"speculative_algorithm": "EAGLE3"}
    off = {"speculative_algorithm": None}

    def pair(spec: dict[str, Any], base: dict[str, Any]) -> bool:
        return swapped(
            {SPECULATIVE: fingerprint(SPECULATIVE, spec), BASELINE: fingerprint(BASELINE, base)}
        )

    assert pair(off, on)
    assert not pair(on, off)
    assert not pair(off, off)
    assert not pair(on, on)
    assert not pair({}, on)
    assert not pair(off, {})
    assert not swapped({})


@pytest.mark.parametrize("word", ["None", "", "none"])
def test_a_word_for_nothing_is_nothing(word: str) -> None:
    """Some versions write null as a word."""
    assert fingerprint(BASELINE, {"quantization": word}) == {"baseline.quantization": None}


def test_prefill_and_decode_may_attend_differently() -> None:
    """Both backends are named when they differ."""
    found = fingerprint(
        BASELINE, {"attention_backend": "fa3", "decode_attention_backend": "flashinfer"}
    )
    assert found == {"baseline.attention": "fa3 for prefill, flashinfer for decode"}


@given(
    st.dictionaries(
        st.sampled_from(sorted(ALLOWED)),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
    )
)
def test_any_answer_gives_plain_facts_that_equal_themselves(body: dict[str, Any]) -> None:
    """Whatever a server says, its fingerprint is flat, and it matches itself."""
    found = fingerprint(BASELINE, body)
    assert all(value is None or isinstance(value, str | int | float) for value in found.values())
    assert compare(found, found) == ()
