"""The doctor's rules: on captured servers, on written ones, and each one for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from router.__main__ import app
from router.doctor_facts import Pair, ServerFacts, threshold_in
from router.doctor_findings import Group, Severity
from router.doctor_reading import Bodies, grown, read_facts, read_sample
from router.doctor_rules import RULES, examine
from router.frontier import Frontier
from router.load import ROLES, Role
from router.readings import UnreadableError
from tests.doctor_cases import (
    CASES,
    VARIANTS,
    Case,
    canary,
    captured,
    changed,
    facts_of,
    info,
    sound,
)

ROOT = Path(__file__).resolve().parent.parent
EVERY_CASE = [
    pytest.param(name, case, id=f"{name}-{number}")
    for name, cases in CASES.items()
    for number, case in enumerate(cases)
]


def found(pair: Pair) -> set[tuple[str, str]]:
    """The rules that found something, with how bad it is."""
    return {(each.rule, each.severity.value) for each in examine(pair).findings}


def test_every_rule_has_a_failing_and_a_passing_case() -> None:
    """The cases are those of the table of rules, and each rule fails in one and passes in one."""
    assert set(CASES) == {rule.name for rule in RULES}
    assert len(RULES) == len({rule.name for rule in RULES})
    for name, cases in CASES.items():
        assert {case.severity is None for case in cases} == {True, False}, name


def test_every_severity_that_a_rule_declares_is_tried() -> None:
    """A rule's severities in the table, which the document shows, are those of its cases."""
    for rule in RULES:
        tried = {case.severity for case in CASES[rule.name]} - {None}
        assert tried == {each.value for each in rule.severities}, rule.name


def test_a_sound_pair_is_judged_by_every_rule() -> None:
    """On the sound pair no rule finds anything, and none is left out for want of a fact."""
    examination = examine(sound())
    assert examination.findings == ()
    assert examination.unjudged == ()
    assert examination.asked == sum(len(rule.of) or 1 for rule in RULES)
    assert examination.sound


@pytest.mark.parametrize(("name", "case"), EVERY_CASE)
def test_each_rule(name: str, case: Case) -> None:
    """The rule is judged, and says what the case expects or nothing."""
    examination = examine(changed(sound(), case.spec, case.base, case.threshold))
    mine = [each for each in examination.findings if each.rule == name]
    assert [each for each in examination.unjudged if each.rule == name] == []
    if case.severity is None:
        assert mine == []
        return
    (finding,) = mine
    assert finding.severity.value == case.severity
    assert case.seen in finding.seen
    assert case.mend in finding.mend
    assert finding.seen
    assert finding.why
    assert finding.mend
    of = next(rule for rule in RULES if rule.name == name).of
    if not of:
        assert finding.backend is None
    elif len(of) == 1:
        assert finding.backend is of[0]
    else:
        assert finding.backend is (Role.BASELINE if case.base else Role.SPECULATIVE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_without_its_facts_is_not_judged(rule: Any) -> None:
    """Where a server says nothing, a rule that needs it says so and finds nothing."""
    examination = examine(Pair(ServerFacts(), ServerFacts()))
    unjudged = [each for each in examination.unjudged if each.rule == rule.name]
    mine = [each for each in examination.findings if each.rule == rule.name]
    if not rule.needs:
        assert unjudged == []
        assert {each.severity for each in mine} <= {Severity.NOTE}
        return
    assert len(unjudged) == (len(rule.of) or 1)
    assert mine == []
    for each in unjudged:
        wanted = [each.backend] if each.backend else list(ROLES)
        assert each.missing == tuple(f"{r.value}.{n}" for r in wanted for n in rule.needs)


def test_the_worst_is_said_first() -> None:
    """Findings are in the order of their severity."""
    worst = changed(sound(), {"mem_fraction_static": 0.1, "load_format": "dummy"}, {"cap": 9})
    severities = [each.severity.value for each in examine(worst).findings]
    assert severities == ["spoils", "warning", "note"]


def test_very_many_names_are_not_kept() -> None:
    """Of thousands of names on /v1/models a few are kept, and two servers with other ones still differ."""

    def named(last: str) -> tuple[str, ...]:
        names = [f"adapter-{number:05}" for number in range(20_000)] + [last]
        models = msgspec.json.encode({"data": [{"id": name} for name in names]})
        served = read_facts(Bodies(server_info=b'{"model_path": "m"}', models=models)).served
        assert served is not None
        return served

    ours, theirs = named("z-1"), named("z-2")
    assert ours[:16] == tuple(f"adapter-{number:05}" for number in range(16))
    assert ours[16].startswith("19985 more (")
    assert ours != theirs
    examination = examine(changed(sound(), {"served": ours}, {"served": theirs}))
    (finding,) = examination.findings
    assert finding.rule == "served-name"
    assert len(finding.seen) < 1000


def test_the_captured_pair() -> None:
    """The real pair of 0.5.17 is sound; that it was a test with random weights is said."""
    examination = examine(captured())
    assert examination.sound
    assert {each.rule for each in examination.findings} == {"random-weights", "zombies"}
    assert {each.rule for each in examination.unjudged} == {"spec-v2-env", "simulated-acceptance"}
    spec, base = captured().speculative, captured().baseline
    assert (spec.algorithm, spec.speculative_eagle_topk, spec.cap) == ("EAGLE3", 1, 256)
    assert (spec.graph_ceiling, spec.context, spec.served) == (256, 8192, ("sim-llama-8b",))
    assert (spec.canary_verify, spec.canary_output, base.canary_verify) == (3, 8, 0)
    assert spec.accept_lifetime == pytest.approx(2.8226, abs=1e-4)
    assert (base.algorithm, base.accept_length, base.speculates) == ("off", None, False)
    assert spec.accelerator == "NVIDIA H200"


def test_the_captured_pair_the_wrong_way_round() -> None:
    """With the two addresses swapped both servers are in the wrong role, and that is the advice."""
    pair = captured()
    examination = examine(Pair(pair.baseline, pair.speculative))
    spoiled = {each.rule: each.mend for each in examination.spoiled()}
    assert set(spoiled) == {"speculation-off", "baseline-speculates"}
    assert all("swap them" in mend for mend in spoiled.values())
    assert [each.rule for each in examination.spoiled(Group.SPECULATION)] == ["speculation-off"]


SPOILED = {
    ("0.5.9-eagle3-topk1-no-env", "0.5.9-baseline"): {"overlap-off", "overlap"},
    ("0.5.9-eagle3-topk-unset-overlap-kept", "0.5.9-baseline"): {"topk-old"},
    ("0.5.12-eagle3-topk1", "0.5.12-baseline"): set(),
    ("0.5.12-eagle3-topk4", "0.5.12-baseline"): {"topk-old", "overlap-off", "overlap"},
    ("0.5.13-eagle3-topk4", "0.5.13-baseline"): set(),
    ("0.5.13-eagle3-spec-v2-off", "0.5.13-baseline"): {"spec-v2-env"},
    ("0.5.14-eagle3-spec-v2-dead", "0.5.14-baseline"): set(),
    ("0.5.20-adaptive-asked-static", "0.5.20-baseline"): {"adaptive-static"},
    ("0.5.23-eagle3", "0.5.23-baseline"): set(),
    ("0.5.23-eagle3-adaptive", "0.5.23-baseline"): set(),
    ("0.5.23-eagle3-lost", "0.5.23-baseline"): {"speculation-off"},
    ("0.5.23-eagle3-default-flags", "0.5.23-baseline-default-flags"): {"running-cap"},
    ("0.5.23-b200-eagle3-topk-unset", "0.5.23-b200-baseline"): {"attention-backend", "page-size"},
    ("0.5.23-eagle3", "0.5.12-baseline"): {"version"},
}
WARNED = {
    "0.5.13-eagle3-topk4": {"topk-tree"},
    "0.5.14-eagle3-spec-v2-dead": {"spec-v2-env"},
    "0.5.20-adaptive-asked-static": {"topk-tree"},
    "0.5.23-eagle3-adaptive": {"adaptive-on"},
    "0.5.23-b200-eagle3-topk-unset": {"topk-tree"},
}


@pytest.mark.parametrize(("spec", "base"), SPOILED)
def test_the_written_variants(spec: str, base: str) -> None:
    """Each written pair is spoiled by what was written into it, and by nothing else."""
    pair = Pair(facts_of(f"written-{spec}"), facts_of(f"written-{base}"))
    examination = examine(pair)
    assert {each.rule for each in examination.spoiled()} == SPOILED[spec, base]
    warned = {each.rule for each in examination.findings if each.severity is Severity.WARNING}
    assert warned == WARNED.get(spec, set())


def test_an_eagle3_head_under_eagle() -> None:
    """The pair whose draft is never accepted: 1.00 since the start, and by the canary."""
    spec = facts_of("written-0.5.20-eagle-with-eagle3-head", canary=canary(63))
    pair = Pair(spec, facts_of("written-0.5.20-baseline"))
    assert found(pair) == {("accept-length", "spoils"), ("eagle-head", "warning")}
    assert spec.accept_length == pytest.approx(64 / 63)


def test_every_variant_is_in_a_test() -> None:
    """No body lies in the data that no test reads."""
    used = {name for pair in SPOILED for name in pair} | {"0.5.20-eagle-with-eagle3-head"}
    names = {path.stem.removeprefix("written-") for path in VARIANTS.glob("written-*.json")}
    assert names == used


def test_secrets_go_no_further() -> None:
    """A key in the command line or among the arguments is not among the facts."""
    body = json.loads(info("written-0.5.23-eagle3"))
    body |= {
        "api_key": "sk-secret",
        "admin_api_key": "sk-secret",
        "ssl_keyfile_password": "sk-secret",
    }
    body["internal_states"][0] |= {"api_key": "sk-secret", "env_vars": {"HF_TOKEN": "sk-secret"}}
    facts = read_facts(Bodies(server_info=json.dumps(body).encode()))
    assert facts.api_key is True
    assert facts.asked is not None
    assert "api-key" in facts.asked
    text = msgspec.json.encode(facts).decode()
    assert "sk-" not in text
    assert "HF_TOKEN" not in text


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("sglang serve --tp 2 --speculative-adaptive", {"tp", "speculative-adaptive"}),
        (["sglang", "serve", "--max-running-requests=9", "-x"], {"max-running-requests"}),
        ("it's --cut off", {"cut"}),
        (7, None),
    ],
)
def test_a_command_line_in_any_shape(command: object, flags: set[str] | None) -> None:
    """The flags' names are found in a text, in a list and in a text with a lonely quote."""
    body = {"model_path": "m", "launch_command": command}
    assert read_facts(Bodies(server_info=json.dumps(body).encode())).asked == flags


def test_the_rank_is_believed_and_ranks_add_up() -> None:
    """Run-time state wins over arguments, caps are summed, one rank without overlap is enough."""
    state = {"speculative_num_steps": 1, "effective_max_running_requests_per_dp": 24}
    other = {"disable_overlap_schedule": True, "effective_max_running_requests_per_dp": 24}
    body = {"model_path": "m", "speculative_num_steps": 3, "max_running_requests": 48,
            "disable_overlap_schedule": False, "internal_states": [state, other]}  # fmt: skip
    facts = read_facts(Bodies(server_info=json.dumps(body).encode()))
    assert (facts.speculative_num_steps, facts.cap) == (1, 48)
    assert facts.disable_overlap_schedule is True


def test_the_cap_without_an_effective_one() -> None:
    """An old server's cap is the scheduler's on /v1/loads, and the argument only without that."""
    info_body = json.dumps({"model_path": "m", "max_running_requests": 9}).encode()
    loads = json.dumps({"version": "0.5.9", "loads": [{"max_running_requests": 7}] * 2}).encode()
    assert read_facts(Bodies(server_info=info_body, loads=loads)).cap == 14
    facts = read_facts(Bodies(server_info=info_body, loads=loads[:9]))
    assert (facts.cap, facts.release) == (9, None)


@pytest.mark.parametrize(
    ("fields", "ceiling"),
    [
        ({"cuda_graph_max_bs": 160}, 160),
        ({"cuda_graph_max_bs": None, "cuda_graph_bs": [1, 2, 48]}, 48),
        ({"decode_cuda_graph_bs": [1, 24]}, 24),
        ({"cuda_graph_max_bs": 160, "disable_cuda_graph": True}, 0),
        ({"cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 8}}}, 0),
        ({"cuda_graph_config": {"decode": {"backend": "full", "max_bs": 8}}}, 8),
        ({"cuda_graph_config": []}, None),
    ],
)
def test_the_ceiling_of_graphs(fields: dict[str, Any], ceiling: int | None) -> None:
    """The largest batch with a CUDA graph is found under its old and its new names."""
    body = json.dumps({"model_path": "m"} | fields).encode()
    assert read_facts(Bodies(server_info=body)).graph_ceiling == ceiling


def test_the_other_canary() -> None:
    """Through /v1/completions the verify steps are in sglext, and absent ones say nothing."""
    usage = {"prompt_tokens": 40, "completion_tokens": 64}
    told = {"usage": usage, "sglext": {"spec_tokens_details": {"spec_verify_ct": 24}}}
    wanted: list[tuple[dict[str, Any], int | None, int | None]] = [
        (told, 40, 24), ({"usage": usage}, 40, None), ({"usage": 3}, None, None)
    ]  # fmt: skip
    for answer, prompt, verify in wanted:
        more = {"canary": json.dumps(answer).encode(), "canary_native": False}
        facts = facts_of("written-0.5.23-eagle3", **more)
        assert (facts.canary_prompt, facts.canary_verify) == (prompt, verify)


def page(tokens: float, verify: float) -> bytes:
    """The two counters of a page of metrics."""
    rows = f"sglang:generation_tokens_total {tokens}\nsglang:spec_verify_calls_total {verify}\n"
    return rows.encode()


def test_growth_between_two_pages() -> None:
    """What was served between two pages is evidence; a restart and too little are none."""
    start = ServerFacts()
    before = read_sample(page(1000, 400))
    now = read_sample(page(1280, 500))
    assert now is not None
    seen = grown(start, before, now)
    assert (seen.grown_tokens, seen.grown_verify, seen.accept_recent) == (280, 100, 2.8)
    assert seen.verified is True
    few = read_sample(page(1020, 400))
    assert few is not None
    assert grown(start, before, few).verified is None
    none = read_sample(page(1100, 400))
    assert none is not None
    assert grown(start, before, none).verified is False
    again = read_sample(page(50, 20))
    assert again is not None
    assert grown(start, before, again) == start
    assert grown(start, None, now) == start
    assert read_sample(None) is None


def test_growth_around_the_canary_is_evidence_too() -> None:
    """Where the canary's own answer says nothing, the counters around it do."""
    more = {"canary": b'{"usage":{"completion_tokens":64}}', "canary_native": False}
    facts = facts_of(
        "written-0.5.13-eagle3-topk4", metrics=page(0, 0), metrics_after=page(64, 0), **more
    )
    pair = Pair(facts, facts_of("written-0.5.13-baseline"))
    assert ("verify-count", "spoils") in found(pair)


def test_long_texts_are_cut_and_still_told_apart() -> None:
    """Two inline templates that begin alike differ, and no control character gets through."""
    body = json.loads(info("written-0.5.23-baseline"))
    facts = []
    for end in ("a", "b"):
        body["internal_states"][0]["chat_template"] = "{%\x1b[31m\n" + "x" * 5000 + end
        facts.append(read_facts(Bodies(server_info=json.dumps(body).encode())))
    template, other = (each.template for each in facts)
    assert template is not None
    assert template != other
    assert len(template) < 250
    assert template.isprintable()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[]", "no JSON object"),
        (b"<html>", "not JSON"),
        (b'{"version": "1"}', "not SGLang's"),
        (b'{"model_path": "m", "crossover": {}}', "a Crossover router"),
    ],
)
def test_what_is_no_server(body: bytes, reason: str) -> None:
    """Something else than an SGLang server is told from one, a router of ours by its name."""
    with pytest.raises(UnreadableError, match=reason):
        read_facts(Bodies(server_info=body))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(sorted(json.loads(info("captured-0.5.17-eagle3-topk1"))))


@given(
    st.dictionaries(KEYS, VALUES, max_size=6),
    st.lists(st.dictionaries(KEYS, VALUES, max_size=4) | VALUES, max_size=3),
    st.binary(max_size=40),
)
def test_no_answer_breaks_it(fields: Any, states: Any, other: bytes) -> None:
    """Whatever a server puts into its fields, the facts can be read and judged."""
    body = json.loads(info("written-0.5.12-eagle3-topk4")) | fields
    body |= {"model_path": fields.get("model_path", "m"), "internal_states": states}
    bodies = Bodies(
        server_info=json.dumps(body).encode(),
        models=other,
        loads=other,
        metrics=other,
        canary=other,
    )
    pair = Pair(read_facts(bodies), facts_of("written-0.5.12-baseline"))
    assert examine(pair).asked == examine(sound()).asked
    msgspec.json.encode(pair)


def test_the_threshold_of_a_line() -> None:
    """K of a numeric line, and the most that a table lets run."""
    assert threshold_in(None) is None
    assert threshold_in(Frontier.total(12)) == 12
    assert threshold_in(Frontier.from_table((30.0, 20.0, 5.0))) == 30


def test_the_document_is_the_table() -> None:
    """DOCTOR.md is what `crossover doctor --rules` prints, and names every rule."""
    result = CliRunner().invoke(app, ["doctor", "--rules"])
    assert result.exit_code == 0
    assert result.stdout == (ROOT / "router" / "DOCTOR.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert f"| `{rule.name}` |" in result.stdout
