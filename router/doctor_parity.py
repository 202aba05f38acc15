"""Is it the same model, computed in the same way, on both servers? One rule for each setting.

The law of this file: facts in, spots out; nothing is fetched. What only shows that the servers
were not started alike, and cannot change a token's cost or worth, is a warning or a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from router.doctor_facts import NONE, Pair, ServerFacts
from router.doctor_findings import Check, Group, Rule, Severity, Spot

SPOILS, WARNING = Severity.SPOILS, Severity.WARNING
_FLAGS: Final = (
    *("schedule_policy", "stream_interval", "num_continuous_decode_steps", "enable_mixed_chunk"),
    *("enable_deterministic_inference", "sampling_backend", "grammar_backend"),
    *("reasoning_parser", "tool_call_parser"),
)


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def differ(pair: Pair, *names: str) -> str:
    """Which of these settings differ, with both values; empty when none does, or none is known."""
    found = []
    for name in names:
        ours, theirs = getattr(pair.speculative, name), getattr(pair.baseline, name)
        if None not in {ours, theirs} and ours != theirs:
            found.append(f"{name}: speculative {_said(ours)}, baseline {_said(theirs)}")
    return "; ".join(found)


def same(*names: str, severity: Severity = SPOILS) -> Check:
    """A check that these settings are the same on both servers."""

    def check(pair: Pair, _: ServerFacts) -> Iterator[Spot]:
        seen = differ(pair, *names)
        if seen:
            yield Spot(severity, seen)

    return check


def same_path(name: str) -> Check:
    """A check of a path or a model's name: the same name elsewhere may well be the same files."""

    def check(pair: Pair, _: ServerFacts) -> Iterator[Spot]:
        seen = differ(pair, name)
        if seen:
            ours, theirs = (
                getattr(facts, name).rstrip("/").rpartition("/")[2]
                for facts in (pair.speculative, pair.baseline)
            )
            yield Spot(WARNING if ours == theirs else SPOILS, seen)

    return check


def _load_format(pair: Pair, _: ServerFacts) -> Iterator[Spot]:
    formats = (pair.speculative.load_format, pair.baseline.load_format)
    if formats == ("dummy", "dummy"):
        yield Spot(WARNING, "load_format dummy on both")
    elif "dummy" in formats:
        yield Spot(SPOILS, differ(pair, "load_format"))


def _dtype(pair: Pair, _: ServerFacts) -> Iterator[Spot]:
    seen = differ(pair, "dtype")
    if seen:
        guessed = {"auto", NONE} & {pair.speculative.dtype, pair.baseline.dtype}
        yield Spot(WARNING if guessed else SPOILS, seen)


def _attention(pair: Pair, here: ServerFacts) -> Iterator[Spot]:
    seen = differ(pair, "attention")
    if not seen:
        return
    mend = ""
    if here.asked is not None and "speculative-eagle-topk" not in here.asked:
        mend = (
            "--speculative-eagle-topk 1 on the speculative server: on a B200 the backend is chosen "
            "before an unset topk is, and differently; or the same --attention-backend on both"
        )
    yield Spot(SPOILS, seen, mend)


def _prompt(pair: Pair, here: ServerFacts) -> Iterator[Spot]:
    if here.canary_prompt != pair.baseline.canary_prompt:
        seen = f"speculative {here.canary_prompt}, baseline {pair.baseline.canary_prompt} tokens"
        yield Spot(SPOILS, f"the canary's prompt: {seen}")


def _pair(
    name: str, looks: str, why: str, mend: str, check: Check, *needs: str,
    severities: tuple[Severity, ...] = (SPOILS,),
) -> Rule:  # fmt: skip
    return Rule(name, Group.PARITY, severities, looks, why, mend, check, needs)


RULES: Final = (
    _pair("version", "the same SGLang on both",
          "releases differ in speed by more than speculation gains: two engines are compared",
          "the same SGLang version (image) for both servers",
          same("version"), "version"),
    _pair("model", "the same model (warning: the same name in another place)",
          "two models have two speeds and give two answers, whichever server takes the request",
          "the same --model-path on both",
          same_path("model_path"), "model_path", severities=(SPOILS, WARNING)),
    _pair("weights", "the same revision and version of the weights, and the same overrides",
          "the answers depend on which server takes the request, and so may their cost",
          "the same --revision, --weight-version and --json-model-override-args on both",
          same("revision", "weight_version", "json_model_override_args"), "revision"),
    _pair("random-weights", "real weights on both",
          "random weights have the speed of the model and none of its text: no draft can guess it, "
          "and a pair with one of each compares two different things",
          "leave out --load-format dummy",
          _load_format, "load_format", severities=(SPOILS, WARNING)),
    _pair("served-name", "the same names on /v1/models",
          "a client that asks which models there are gets another answer after a failover",
          "the same --served-model-name on both",
          same("served", severity=WARNING), "served", severities=(WARNING,)),
    _pair("tokenizer", "the same tokenizer (warning: the same name in another place)",
          "the same text has another number of tokens, so tokens per second are not comparable",
          "the same --tokenizer-path on both",
          same_path("tokenizer_path"), "tokenizer_path", severities=(SPOILS, WARNING)),
    _pair("prompt-tokens", "the same number of prompt tokens for the same canary",
          "the servers read the same text differently: their tokenizers are not the same",
          "the same --tokenizer-path, with the same files behind it, on both",
          _prompt, "canary_prompt"),
    _pair("chat-template", "the same chat template",
          "the same chat becomes two prompts, of two lengths and with two answers",
          "the same --chat-template on both",
          same("template"), "template"),
    _pair("context-length", "the same context length",
          "a request that one server takes is refused by the other, and a long prompt is served "
          "or not by chance",
          "the same --context-length on both",
          same("context"), "context"),
    _pair("quantization", "the same quantisation",
          "quantised weights are faster under load and slower alone, as speculation is the other "
          "way round: the crossover would be that of the weights",
          "the same --quantization on both",
          same("quantization"), "quantization"),
    _pair("dtype", "the same type of the weights (warning: one of them chosen by the server)",
          "the same model in two types has two speeds",
          "the same --dtype on both",
          _dtype, "dtype", severities=(SPOILS, WARNING)),
    _pair("kv-cache-dtype", "the same type of the KV cache",
          "a smaller type holds more requests and reads faster: the baseline's advantage, or its "
          "handicap, would be taken for the crossover",
          "the same --kv-cache-dtype on both",
          same("kv_cache_dtype"), "kv_cache_dtype"),
    _pair("page-size", "the same page size of the KV cache",
          "it decides how much of a prefix is found again, and comes with the attention backend",
          "the same --page-size (and --attention-backend) on both",
          same("page_size"), "page_size"),
    _pair("attention-backend", "the same attention backend, for prefill and for decode",
          "the kernels differ in speed by more than speculation gains: two kernels are compared",
          "the same --attention-backend on both",
          _attention, "attention"),
    _pair("overlap", "that both keep the overlapped scheduler, or neither",
          "without it a server waits for its CPU in each step",
          "leave out --disable-overlap-schedule on both",
          same("disable_overlap_schedule"), "disable_overlap_schedule"),
    _pair("parallelism", "the same number of GPUs, cut in the same way",
          "more GPUs for one server are more speed for it",
          "the same --tp-size, --pp-size and --dp-size on both",
          same("tp_size", "pp_size", "dp_size"), "tp_size"),
    _pair("accelerator", "the same kind of GPU",
          "two kinds of GPU are compared",
          "the same kind of GPU for both servers",
          same("accelerator"), "accelerator"),
    _pair("prefix-cache", "that both keep a prefix cache, or neither",
          "one server computes every prompt again that the other remembers",
          "--disable-radix-cache on both, or on neither",
          same("disable_radix_cache"), "disable_radix_cache"),
    _pair("chunked-prefill", "the same size of prefill chunks",
          "it decides how long a prompt holds up everybody's next token",
          "the same --chunked-prefill-size on both",
          same("chunked_prefill_size", severity=WARNING), "chunked_prefill_size",
          severities=(WARNING,)),
    _pair("other-flags", "the other flags that change speed or answers: " + ", ".join(_FLAGS),
          "the two servers were not started alike",
          "the same flags on both, but for those of speculation",
          same(*_FLAGS, severity=WARNING), severities=(WARNING,)),
)  # fmt: skip
