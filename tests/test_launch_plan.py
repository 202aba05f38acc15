"""What is started for which GPUs: tables of one to eight, memory, recipes, overrides."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.launch_checks import base_flags
from router.launch_flags import FlagError, Flags, from_args, value_of
from router.launch_gpu_facts import GIB, Gpu, Machine, fractions, recipe, tensor_parallel
from router.launch_model import ModelFacts, doubts, misfits, read
from router.launch_plan import (
    Address,
    Extra,
    NoGpuError,
    Plan,
    PlanError,
    Share,
    Wanted,
    needs_gpus,
    plan,
)
from router.launch_secrets import SECRET
from router.load import ROLES, Role

SPECULATIVE, BASELINE = Role.SPECULATIVE, Role.BASELINE
ADDRESSES = {SPECULATIVE: Address("127.0.0.1", 31000), BASELINE: Address("127.0.0.1", 30000)}
FILES = {SPECULATIVE: "/tmp/s/sglang.yaml", BASELINE: "/tmp/b/sglang.yaml"}
LLAMA = ModelFacts(architecture="LlamaForCausalLM", vocabulary=128256, hidden=4096, heads=32)


def gpus(count: int, capability: tuple[int, int] = (9, 0), **more: Any) -> tuple[Gpu, ...]:
    values: dict[str, Any] = {"name": "GPU", "total": 80 * GIB, "free": 79 * GIB} | more
    return tuple(Gpu(index=n, capability=capability, token=str(n), **values) for n in range(count))


def planned(
    machine: Machine | tuple[Gpu, ...], facts: ModelFacts | None = LLAMA, **wishes: Any
) -> Plan:
    if isinstance(machine, tuple):
        machine = Machine(gpus=machine, torch="2.11.0", sglang="0.5.17")
    values: dict[str, Any] = {"model": "M", "draft": "D", "addresses": ADDRESSES}
    return plan(
        Wanted(**values | {"base": base_flags(), "secret_files": FILES} | wishes), machine, facts
    )


def flags_of(command: tuple[str, ...]) -> Flags:
    assert command[:3] == ("python", "-m", "sglang.launch_server")
    return from_args(command[3:])


def placed(todo: Plan) -> list[tuple[str | None, str | None]]:
    """CUDA_VISIBLE_DEVICES and the tensor parallel size of each server."""
    return [
        (
            server.env.get("CUDA_VISIBLE_DEVICES"),
            value_of(flags_of(server.command), "tensor-parallel-size"),
        )
        for server in todo.servers
    ]


def test_one_gpu() -> None:
    """On one GPU the servers share it: one after the other, each with its share of what is free."""
    todo = planned(gpus(1))
    first, second = todo.servers
    assert (first.role, second.role) == (SPECULATIVE, BASELINE)
    assert todo.share is Share.SHARED
    assert not todo.at_once
    assert placed(todo) == [(None, None), (None, None)]
    alone, beside = (flags_of(command) for command in (first.command, second.beside))
    assert alone.pop("mem-fraction-static") == ("0.420",)
    assert beside.pop("mem-fraction-static") == ("0.840",)
    assert alone.items() - beside.items() == {
        ("port", ("31000",)),
        ("speculative-algorithm", ("EAGLE3",)),
        ("speculative-num-steps", ("3",)),
        ("speculative-eagle-topk", ("1",)),
        ("speculative-num-draft-tokens", ("4",)),
        ("speculative-draft-model-path", ("D",)),
    }
    assert beside == {
        "model-path": ("M",),
        "host": ("127.0.0.1",),
        "port": ("30000",),
        "max-running-requests": ("256",),
        "cuda-graph-max-bs-decode": ("256",),
        "enable-metrics": (),
        "enable-cache-report": (),
        "sleep-on-idle": (),
        "attention-backend": ("fa3",),
    }
    assert "one after the other" in todo.words[1]


def test_a_server_that_comes_back() -> None:
    """Whichever server is started beside the other takes the second's share, as its memory is free."""
    todo = planned(gpus(1))
    for server in todo.servers:
        assert value_of(flags_of(server.command), "mem-fraction-static") == "0.420"
        assert value_of(flags_of(server.beside), "mem-fraction-static") == "0.840"


def test_fixed_pools() -> None:
    """With a fixed number of tokens on both, they start at once and no fraction is chosen."""
    todo = planned(gpus(1), both=Extra(args=("--max-total-tokens", "131072")))
    assert todo.at_once
    for server in todo.servers:
        assert server.command == server.beside
        assert "mem-fraction-static" not in flags_of(server.command)


def test_a_fixed_pool_on_one_server_only() -> None:
    """With it on one server only, the other still sizes its pool by what is free: one by one."""
    todo = planned(gpus(1), each={BASELINE: Extra(args=("--max-total-tokens", "8"))})
    assert not todo.at_once


def test_a_fraction_of_the_users() -> None:
    """A fraction that the user gives is kept, for the first start and for a later one."""
    todo = planned(gpus(1), each={SPECULATIVE: Extra(args=("--mem-fraction-static", "0.5"))})
    first, second = todo.servers
    assert value_of(flags_of(first.command), "mem-fraction-static") == "0.5"
    assert value_of(flags_of(first.beside), "mem-fraction-static") == "0.5"
    assert value_of(flags_of(second.beside), "mem-fraction-static") == "0.840"
    assert todo.words[2].startswith("the speculative server keeps its own --mem-fraction-static")
    assert len(todo.words) == 3


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (2, [("0", None), ("1", None)]),
        (3, [("0", None), ("1", None)]),
        (4, [("0,1", "2"), ("2,3", "2")]),
        (5, [("0,1", "2"), ("2,3", "2")]),
        (6, [("0,1", "2"), ("2,3", "2")]),
        (7, [("0,1", "2"), ("2,3", "2")]),
        (8, [("0,1,2,3", "4"), ("4,5,6,7", "4")]),
    ],
)
def test_a_half_each(count: int, expected: list[tuple[str | None, str | None]]) -> None:
    """On more than one GPU each server has its own, as many as divide the 32 heads, at once."""
    todo = planned(gpus(count))
    assert placed(todo) == expected
    assert todo.share is Share.SPLIT
    assert todo.at_once
    used = 2 * int(expected[0][1] or 1)
    said = [word for word in todo.words if "stay unused" in word]
    assert bool(said) is (used < count)
    for server in todo.servers:
        assert "mem-fraction-static" not in flags_of(server.command)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, (None, None)), (2, (None, "2")), (3, ("0,1", "2")), (4, (None, "4")), (8, (None, "8"))],
)
def test_shared_by_all(count: int, expected: tuple[str | None, str | None]) -> None:
    """With --gpus shared both servers are spread over all GPUs, or over what the heads allow."""
    todo = planned(gpus(count), share=Share.SHARED)
    assert placed(todo) == [expected, expected]
    assert not todo.at_once


@pytest.mark.parametrize(
    ("heads", "room", "size"),
    [
        (32, 8, 8),
        (32, 3, 2),
        (40, 8, 8),
        (40, 6, 5),
        (28, 8, 7),
        (24, 6, 6),
        (7, 3, 1),
        (None, 7, 4),
    ],
)
def test_tensor_parallel(heads: int | None, room: int, size: int) -> None:
    """The most GPUs that divide the heads; a power of two where the heads are not known."""
    assert tensor_parallel(room, ModelFacts(heads=heads)) == size


def test_a_size_of_the_users() -> None:
    """The user's tensor parallel size is taken, and too large a one refused."""
    assert placed(planned(gpus(8), tensor_parallel=1)) == [("0", None), ("1", None)]
    with pytest.raises(NoGpuError, match="5 wants more GPUs for a server than the 4 there are"):
        planned(gpus(8), tensor_parallel=5)


def test_gpus_by_their_own_names() -> None:
    """Under an outer CUDA_VISIBLE_DEVICES a server is given the GPUs by the names in there."""
    named = tuple(
        Gpu(index=n, name="GPU", capability=(9, 0), total=80 * GIB, free=80 * GIB, token=token)
        for n, token in enumerate(["GPU-5a", "GPU-77"])
    )
    assert placed(planned(named)) == [("GPU-5a", None), ("GPU-77", None)]


@pytest.mark.parametrize("share", [None, Share.SPLIT])
def test_no_gpu(share: Share | None) -> None:
    """Without a GPU there is no plan, and no split of a single one."""
    with pytest.raises(NoGpuError, match="no GPU is seen"):
        planned((), share=share)
    if share is Share.SPLIT:
        with pytest.raises(NoGpuError, match="use --gpus shared"):
            planned(gpus(1), share=share)


@pytest.mark.parametrize(
    ("capability", "attention"),
    [((9, 0), "fa3"), ((10, 0), "trtllm_mha"), ((10, 3), "trtllm_mha"), ((12, 0), "flashinfer")],
)
def test_recipes(capability: tuple[int, int], attention: str) -> None:
    """Hopper and both Blackwells have an attention backend, the same on both servers."""
    todo = planned(gpus(2, capability))
    for server in todo.servers:
        assert value_of(flags_of(server.command), "attention-backend") == attention
    assert len(todo.words) == 1  # nothing but what was seen


def test_what_was_seen() -> None:
    """The first word says which GPUs and which SGLang were seen, and how they are shared."""
    two = gpus(2, (9, 0), name="H200", total=141 * GIB)
    assert planned(two).words[0] == (
        "2 x H200 (SM90, 141 GiB), SGLang 0.5.17: each server on its own 1 GPU"
    )
    assert planned(two, share=Share.SHARED).words[0].endswith("both servers on the same 2 GPUs")
    mixed = Machine(gpus=(*gpus(1, name="A"), *gpus(1, (12, 1), name="B")), torch="2")
    assert planned(mixed).words[0].startswith("1 x A (SM90, 80 GiB) and 1 x B (SM121, 80 GiB): ")


def test_visible_devices_of_the_users() -> None:
    """One list for both servers is divided between them; one for a server is its own affair."""
    both = Extra(env={"CUDA_VISIBLE_DEVICES": "4,6"})
    named = tuple(
        msgspec.structs.replace(gpu, token=token)
        for gpu, token in zip(gpus(2), ("4", "6"), strict=True)
    )
    assert [visible for visible, _ in placed(planned(named, both=both))] == ["4", "6"]
    own = {BASELINE: Extra(env={"CUDA_VISIBLE_DEVICES": "7"})}
    assert [visible for visible, _ in placed(planned(named, both=both, each=own))] == ["4", "7"]


def test_a_small_gpu() -> None:
    """Below 60 GiB both servers run fewer requests at once, with graphs for as many, and that is said."""
    todo = planned(gpus(2, (12, 0), total=32 * GIB, free=32 * GIB))
    for server in todo.servers:
        found = flags_of(server.command)
        assert found["max-running-requests"] == found["cuda-graph-max-bs-decode"] == ("48",)
        assert found["attention-backend"] == ("flashinfer",)
    assert todo.words[1:] == (
        "small GPUs: at most 48 requests at once, with CUDA graphs for as many",
    )
    own = Extra(args=("--max-running-requests", "96"))
    found = flags_of(planned(gpus(1, total=24 * GIB, free=24 * GIB), both=own).servers[0].command)
    assert found["max-running-requests"] == ("96",)


def test_an_unknown_gpu() -> None:
    """A GPU without a recipe gets SGLang's defaults and a word; so do two kinds at once."""
    flags, words = recipe(gpus(1, (8, 9), name="L4"), LLAMA)
    assert flags == {}
    assert words == ("no recipe for L4 (SM89): SGLang's own defaults are used",)
    mixed = (*gpus(1, (9, 0), name="H200"), *gpus(1, (10, 0), name="B200"))
    flags, words = recipe(mixed, LLAMA)
    assert flags == {}
    assert words == ("no recipe for B200 (SM100), H200 (SM90): SGLang's own defaults are used",)


@pytest.mark.parametrize("facts", [None, ModelFacts(architecture="DeepseekV3ForCausalLM")])
def test_attention_of_another_kind(facts: ModelFacts | None) -> None:
    """A model that is not here, or whose attention is not plain, gets the backend that SGLang chooses."""
    flags, (word,) = recipe(gpus(1, (10, 0)), facts)
    assert flags == {}
    assert "left to SGLang" in word


def test_a_gpu_in_use() -> None:
    """A GPU that somebody else uses is mentioned."""
    _, (word,) = recipe(gpus(1, free=40 * GIB), LLAMA)
    assert word == "GPU 0 (GPU): only 50% of its memory is free"


@given(st.integers(1, 2048 * GIB))
def test_fractions(free: int) -> None:
    """The two shares never exceed the memory, are equal in bytes, and leave both a reserve."""
    first, second = fractions(Gpu(index=0, name="", capability=(9, 0), total=free, free=free))
    assert 0 <= first <= second < 1
    held = first * free
    if free >= GIB:
        reserve = min(max(0.08 * free, 4 * GIB), free / 3)
        left = free - held - reserve
        assert second * left <= free - held - 2 * reserve + 0.002 * free
        assert abs(second * left - held) <= 0.003 * free


@given(
    st.integers(1, 16),
    st.sampled_from([None, Share.SHARED, Share.SPLIT]),
    st.one_of(st.none(), st.integers(1, 128)),
)
def test_any_number_of_gpus(count: int, share: Share | None, heads: int | None) -> None:
    """Whatever the number, both servers get as many GPUs, which exist; of a split none is in both."""
    if share is Share.SPLIT and count < 2:
        return
    todo = planned(gpus(count), ModelFacts(heads=heads), share=share)
    seen = []
    for visible, size in placed(todo):
        tokens = visible.split(",") if visible else [str(n) for n in range(count)]
        assert len(tokens) == len(set(tokens)) == int(size or 1)
        assert set(tokens) <= {str(n) for n in range(count)}
        assert heads is None or heads % len(tokens) == 0
        seen.append(set(tokens))
    assert len(seen[0]) == len(seen[1])
    if todo.share is Share.SPLIT:
        assert not seen[0] & seen[1]


def test_the_users_arguments_win() -> None:
    """What a user adds replaces deploy/sglang/ and the recipe; for one server after that for both."""
    todo = planned(
        gpus(2),
        both=Extra(
            args=("--attention-backend", "triton", "--page-size", "16"),
            env={"A": "both", "B": "both"},
            without=("sleep-on-idle",),
        ),
        each={SPECULATIVE: Extra(args=("--page-size", "1"), env={"A": "own"}, without=("--host",))},
    )
    first, second = (flags_of(server.command) for server in todo.servers)
    assert first["attention-backend"] == second["attention-backend"] == ("triton",)
    assert (first["page-size"], second["page-size"]) == (("1",), ("16",))
    assert "sleep-on-idle" not in {**first, **second}
    assert "host" not in first
    assert "host" in second
    assert todo.servers[0].env == {"CUDA_VISIBLE_DEVICES": "0", "A": "own", "B": "both"}
    assert todo.servers[1].env == {"CUDA_VISIBLE_DEVICES": "1", "A": "both", "B": "both"}


@pytest.mark.parametrize("role", ROLES)
def test_an_address_among_the_arguments(role: Role) -> None:
    """A port among the arguments is refused: the router would look at another one."""
    with pytest.raises(PlanError, match=f"give the {role} server's address as --{role} http"):
        planned(gpus(1), each={role: Extra(args=("--port", "1"))})


def test_no_draft() -> None:
    """EAGLE-3 wants a draft; a way to speculate that has none does not, nor one among the arguments."""
    with pytest.raises(PlanError, match="EAGLE3 wants a draft model: give --draft"):
        planned(gpus(1), draft=None)
    ngram = Extra(args=("--speculative-algorithm", "NGRAM"))
    first = planned(gpus(1), draft=None, each={SPECULATIVE: ngram}).servers[0]
    assert "speculative-draft-model-path" not in flags_of(first.command)
    own = Extra(args=("--speculative-draft-model", "X"))
    first = planned(gpus(1), draft=None, each={SPECULATIVE: own}).servers[0]
    assert flags_of(first.command)["speculative-draft-model-path"] == ("X",)


@pytest.mark.parametrize(
    ("version", "set_to"), [("0.5.9", "1"), ("0.5.11", "1"), ("0.5.12", None), ("0.5.17", None)]
)
def test_overlap_of_old_releases(version: str, set_to: str | None) -> None:
    """Where Spec V2 is off by default it is switched on, for the speculative server; a user's word wins."""
    machine = Machine(gpus=gpus(1), torch="2", sglang=version)
    first, second = planned(machine).servers
    assert first.env.get("SGLANG_ENABLE_SPEC_V2") == set_to
    assert second.env == {}
    own = {SPECULATIVE: Extra(env={"SGLANG_ENABLE_SPEC_V2": "0"})}
    assert planned(machine, each=own).servers[0].env["SGLANG_ENABLE_SPEC_V2"] == "0"


def test_old_releases_have_old_names() -> None:
    """An old SGLang is given the flag by its old name, an unknown version by the new one."""
    for version, name in (
        ("0.5.12", "--cuda-graph-max-bs"),
        ("unknown", "--cuda-graph-max-bs-decode"),
    ):
        first = planned(Machine(gpus=gpus(1), torch="2", sglang=version)).servers[0]
        assert name in first.command


def test_a_command_in_sglangs_place() -> None:
    """A command of the user's has its placeholders filled in, and needs no GPU unless it says so."""
    command = ("serve", "{role}", "--at={host}:{port}", "{model}", "{draft}")
    assert not needs_gpus(command)
    todo = planned((), server_command=command, both=Extra(env={"A": "1"}))
    assert todo.at_once
    assert [server.command for server in todo.servers] == [
        ("serve", "speculative", "--at=127.0.0.1:31000", "M", "D"),
        ("serve", "baseline", "--at=127.0.0.1:30000", "M", "D"),
    ]
    assert todo.servers[0].env == {"A": "1"}


def test_a_wrapper_of_sglang() -> None:
    """A wrapper gets SGLang's flags as words of their own or within one, and its GPUs."""
    command = ("docker", "--gpus={gpus}", "-n{tp}", "{args}")
    assert needs_gpus(command)
    first, second = planned(gpus(4), server_command=command).servers
    assert first.command[:3] == ("docker", "--gpus=0,1", "-n2")
    assert from_args(first.command[3:])["speculative-algorithm"] == ("EAGLE3",)
    assert second.command[:3] == ("docker", "--gpus=2,3", "-n2")
    inner = planned(gpus(1), server_command=("sh", "-c", "exec sglang serve {args}")).servers[1]
    assert inner.command[:2] == ("sh", "-c")
    assert re.match(r"exec sglang serve --model-path M --host 127\.0\.0\.1 ", inner.command[2])


@pytest.mark.parametrize("flag", sorted(SECRET))
def test_secrets_are_in_no_command(flag: str) -> None:
    """A secret among the arguments is in the server's file and in neither of its commands."""
    first, second = planned(
        gpus(1), each={BASELINE: Extra((f"--{flag.replace('-', '_')}", "K7"))}
    ).servers
    assert (first.secret, second.secret) == (None, {flag: ("K7",)})
    assert "config" not in flags_of(first.command)
    for command in (second.command, second.beside):
        assert value_of(flags_of(command), "config") == FILES[BASELINE]
        assert flag not in flags_of(command)
        assert not any("K7" in word for word in command)


def test_secrets_and_a_file_of_the_users() -> None:
    """The user's own --config is handed on to be part of ours where there is a secret, else left."""
    args = ("--config", "mine.yaml", "--api-key", "K7")
    (first, second) = planned(gpus(1), both=Extra(args)).servers
    assert first.secret == second.secret == {"api-key": ("K7",), "config": ("mine.yaml",)}
    assert value_of(flags_of(first.command), "config") == FILES[SPECULATIVE]
    todo = planned(gpus(1), both=Extra(args, without=("api-key",))).servers[0]
    assert todo.secret is None
    assert value_of(flags_of(todo.command), "config") == "mine.yaml"


@pytest.mark.parametrize("args", [("--api-key",), ("--api-key", "a", "b")])
def test_a_secret_that_is_no_value(args: tuple[str, ...]) -> None:
    """A key without a value, or with two, is refused and not passed on to be seen."""
    with pytest.raises(FlagError, match=r"^--api-key: one value is wanted, and there are [02]$"):
        planned(gpus(1), both=Extra(args))


def test_secrets_of_a_command_in_sglangs_place() -> None:
    """Such a command gets the name of the file, with {args} or by {config}, key or not."""
    keyed = Extra(("--api-key", "K7"))
    for command in (("sh", "{args}"), ("sh", "-c", "exec sglang serve {args}")):
        inner = planned(gpus(1), server_command=command, both=keyed).servers[0]
        assert "K7" not in " ".join(inner.command)
        assert f"--config {FILES[SPECULATIVE]}" in " ".join(inner.command)
    command = ("serve", "--config={config}")
    for extra, secret in ((keyed, {"api-key": ("K7",)}), (Extra(), {})):
        bare = planned((), server_command=command, both=extra).servers[1]
        assert bare.command == ("serve", f"--config={FILES[BASELINE]}")
        assert bare.secret == secret


def test_a_config_json() -> None:
    """The facts come from the text part of a config.json, and what is odd there is not known."""
    facts = read(
        {
            "architectures": ["X"],
            "hidden_size": 1,
            "text_config": {"hidden_size": 4096, "vocab_size": 9, "num_attention_heads": True},
        }
    )
    assert facts == ModelFacts(architecture="X", hidden=4096, vocabulary=9)
    assert read({"architectures": [], "vocab_size": "9"}) == ModelFacts()


@pytest.mark.parametrize(
    ("draft", "algorithm", "expected"),
    [
        (ModelFacts(vocabulary=128256, hidden=4096, draft_vocabulary=32000), "EAGLE3", []),
        (ModelFacts(vocabulary=128256, hidden=2048, target_hidden=4096), "EAGLE3", []),
        (ModelFacts(), "EAGLE3", []),
        (
            ModelFacts(vocabulary=151936, hidden=4096),
            "EAGLE3",
            ["the model has 128256 tokens and the draft 151936"],
        ),
        (
            ModelFacts(vocabulary=128256, hidden=5120),
            "EAGLE3",
            ["the model's hidden size is 4096, the draft takes 5120"],
        ),
        (ModelFacts(vocabulary=128256, hidden=2048), "STANDALONE", []),
        (
            ModelFacts(draft_vocabulary=200000),
            "EAGLE3",
            ["the draft proposes 200000 tokens of 128256"],
        ),
    ],
)
def test_misfits(draft: ModelFacts, algorithm: str, expected: list[str]) -> None:
    """A draft for another vocabulary or another hidden size does not fit; what is not said does."""
    assert list(misfits(LLAMA, draft, algorithm)) == expected


@pytest.mark.parametrize(
    ("name", "draft_vocabulary", "algorithm", "count"),
    [
        ("LlamaForCausalLMEagle3", 32000, "EAGLE3", 0),
        ("LlamaForCausalLM", 32000, "EAGLE3", 0),
        ("LlamaForCausalLMEagle", None, "EAGLE3", 1),
        ("LlamaForCausalLMEagle", None, "EAGLE", 0),
        ("LlamaForCausalLMEagle3", 32000, "EAGLE", 1),
        ("LlamaForCausalLM", None, "STANDALONE", 0),
    ],
)
def test_doubts(name: str, draft_vocabulary: int | None, algorithm: str, count: int) -> None:
    """An EAGLE-3 head under EAGLE, and another head under EAGLE3, are worth a word."""
    draft = ModelFacts(architecture=name, draft_vocabulary=draft_vocabulary)
    assert len(list(doubts(draft, algorithm))) == count
