"""What one SGLang server says of itself, read without trusting it: bodies to `ServerFacts`.

The law of this file: it reads and does not judge. Fields are found by their names, not by the
version, since forks and nightly builds exist: what a server of 0.5.9 to 0.5.23 does not say, or
says in a way that is not understood, is None. Fields are taken by name, so that no key, password
or command line gets any further: of a launch command only the names of its flags are kept, of an
environment only the variables of `ENV`.

`/server_info` has the resolved arguments at its top, and once more, with what was changed at run
time, in `internal_states`, one for each data-parallel rank: where both say something, the rank is
believed.
"""

from __future__ import annotations

import math
import re
import shlex
import zlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from router import readings
from router.acceptance import MIN_VERIFY, AcceptSample, parse_accept
from router.doctor_facts import NONE, OFF, ServerFacts
from router.readings import UnreadableError
from router.telemetry import MAX_ACCEPT, Unreadable

# The variables that a rule looks at. A server lists those that its version knows, and only when it
# was started with SGLANG_EXPOSE_OWN_ENV_VARS=1.
ENV: Final = ("SGLANG_ENABLE_SPEC_V2", "SGLANG_SIMULATE_ACC_LEN")
# Longest text that is kept of a value: enough for a path, too short for a whole chat template.
MAX_TEXT: Final = 200
# Names of models that are kept of /v1/models, where a server lists each of its adapters.
MAX_NAMES: Final = 16
_RELEASE: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})")

_WORDS: Final = (
    *("model_path", "tokenizer_path", "tokenizer_mode", "revision", "weight_version"),
    *("load_format", "dtype", "quantization", "kv_cache_dtype", "chat_template"),
    *("hf_chat_template_name", "json_model_override_args", "schedule_policy"),
    *("sampling_backend", "grammar_backend", "reasoning_parser", "tool_call_parser"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("speculative_draft_model_path", "speculative_adaptive_config"),
)
_SWITCHES: Final = (
    *("disable_overlap_schedule", "speculative_adaptive", "disable_radix_cache"),
    *("enable_metrics", "enable_mixed_chunk", "enable_deterministic_inference"),
)
_COUNTS: Final = (
    *("page_size", "chunked_prefill_size", "tp_size", "pp_size", "dp_size", "stream_interval"),
    *("num_continuous_decode_steps", "speculative_num_steps", "speculative_eagle_topk"),
    *("speculative_num_draft_tokens", "max_total_num_tokens"),
)


class Bodies(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of status 200, as they came. None: there was none."""

    server_info: bytes
    models: bytes | None = None  # /v1/models
    loads: bytes | None = None  # /v1/loads
    metrics: bytes | None = None  # /metrics, before the canary
    metrics_after: bytes | None = None
    canary: bytes | None = None
    canary_native: bool = True  # whether it went to /generate, which says more


def read_facts(bodies: Bodies) -> ServerFacts:
    """Understand a server. Raises UnreadableError when `/server_info` is not a server's."""
    top = readings.json(bodies.server_info)
    if not isinstance(top, dict):
        raise UnreadableError("its /server_info is no JSON object")
    if "crossover" in top:
        raise UnreadableError("it is a Crossover router, not a server")
    if "model_path" not in top:
        raise UnreadableError("its /server_info is not SGLang's")
    states = [state for state in _list(top.get("internal_states")) if isinstance(state, dict)]
    live: dict[str, Any] = top | (states[0] if states else {})
    loads = _object(bodies.loads)
    version = _text(top.get("version")) or _text(loads.get("version"))
    found = re.match(_RELEASE, version or "")
    fields: dict[str, Any] = {name: _word(live, name) for name in _WORDS}
    fields |= {name: _switch(live.get(name)) for name in _SWITCHES}
    fields |= {name: _whole(live.get(name)) for name in _COUNTS}
    if any(_switch(state.get("disable_overlap_schedule")) for state in states):
        fields["disable_overlap_schedule"] = True
    fields |= _at_work(bodies)
    models = _models(bodies.models)
    lengths = [n for model in models if (n := _whole(model.get("max_model_len")))]
    names = _names(models)
    return ServerFacts(
        version=version,
        release=(int(found[1]), int(found[2]), int(found[3])) if found else None,
        asked=_flags(top.get("launch_command")),
        env=_env(live.get("env_vars")),
        api_key=top["api_key"] is not None if "api_key" in top else None,
        served=names or None,
        context=min(lengths) if lengths else _whole(live.get("context_length")),
        accelerator=_text(loads.get("accelerator")),
        cap=_cap(live, states, loads),
        graph_ceiling=read_graph_ceiling(live),
        mem_fraction_static=readings.number(live.get("mem_fraction_static"), 0.0, 1.0),
        algorithm=_algorithm(live),
        accept_lifetime=_lifetime(states, loads),
        **fields,
    )


def grown(facts: ServerFacts, before: AcceptSample | None, now: AcceptSample) -> ServerFacts:
    """The facts with what happened between two pages of `/metrics`; a restart says nothing."""
    if before is None or before.tokens is None or before.verify_calls is None:
        return facts
    if now.tokens is None or now.verify_calls is None:
        return facts
    tokens, verify = now.tokens - before.tokens, now.verify_calls - before.verify_calls
    if tokens < 0 or verify < 0:
        return facts
    recent = readings.number(tokens / verify, 1.0, MAX_ACCEPT) if verify >= MIN_VERIFY else None
    return msgspec.structs.replace(
        facts, grown_tokens=tokens, grown_verify=verify, accept_recent=recent
    )


def read_sample(page: bytes | None) -> AcceptSample | None:
    """The counters of a page of `/metrics`; None when there is no page that can be read."""
    sample = parse_accept(page) if page is not None else None
    return None if isinstance(sample, Unreadable) else sample


def _at_work(bodies: Bodies) -> dict[str, Any]:
    """What the canary and the pages of metrics around it show."""
    fields: dict[str, Any] = {}
    if bodies.metrics is not None:
        fields["metrics_page"] = b"sglang:" in bodies.metrics
    fields |= _canary(bodies)
    before, after = read_sample(bodies.metrics), read_sample(bodies.metrics_after)
    if after is not None:
        seen = grown(ServerFacts(), before, after)
        names = ("grown_tokens", "grown_verify", "accept_recent")
        fields |= {name: getattr(seen, name) for name in names}
    return fields


def _canary(bodies: Bodies) -> dict[str, Any]:
    """What the canary's own answer says of it."""
    answer = _object(bodies.canary)
    if bodies.canary_native:
        counts = details = _inner(answer, "meta_info")
    else:
        counts = _inner(answer, "usage")
        details = _inner(_inner(answer, "sglext"), "spec_tokens_details")
    if not counts:
        return {}
    # /generate leaves the key out when speculation did not run; the other route leaves it out in
    # old versions too, and then says nothing.
    verify = details.get("spec_verify_ct", 0 if bodies.canary_native else None)
    return {
        "canary_prompt": _whole(counts.get("prompt_tokens")),
        "canary_output": _whole(counts.get("completion_tokens")),
        "canary_verify": _whole(verify),
    }


def _algorithm(live: dict[str, Any]) -> str | None:
    if "speculative_algorithm" not in live:
        return None
    value = live["speculative_algorithm"]
    name = OFF if value is None else _text(value)
    return OFF if name is not None and name.lower() in {"", "none", OFF} else name


def _cap(live: dict[str, Any], states: list[Any], loads: dict[str, Any]) -> int | None:
    """The effective one; without it the scheduler's, and last the argument."""
    ranks = [_whole(state.get("effective_max_running_requests_per_dp")) for state in states]
    known = [cap for cap in ranks if cap]
    if known and len(known) == len(ranks):
        return sum(known)
    entries = [entry for entry in _list(loads.get("loads")) if isinstance(entry, dict)]
    caps = [cap for entry in entries if (cap := _whole(entry.get("max_running_requests")))]
    return sum(caps) if caps else _whole(live.get("max_running_requests"))


def read_graph_ceiling(live: dict[str, Any]) -> int | None:
    """From `cuda_graph_config` (new), or the flags that it replaced."""
    decode = _inner(_inner(live, "cuda_graph_config"), "decode")
    if decode.get("backend") == "disabled" or any(
        live.get(name) is True for name in ("disable_cuda_graph", "disable_decode_cuda_graph")
    ):
        return 0
    for told in (decode, live):
        for name in ("max_bs", "cuda_graph_max_bs_decode", "cuda_graph_max_bs"):
            if (size := _whole(told.get(name))) is not None:
                return size
    for name in ("decode_cuda_graph_bs", "cuda_graph_bs_decode", "cuda_graph_bs"):
        if sizes := [n for size in _list(live.get(name)) if (n := _whole(size)) is not None]:
            return max(sizes)
    return None


def _lifetime(states: list[Any], loads: dict[str, Any]) -> float | None:
    """The mean since the start, over the ranks that have one."""
    told = [state.get("avg_spec_accept_length") for state in states]
    for entry in _list(loads.get("loads")) if not any(told) else ():
        section = entry.get("speculative") if isinstance(entry, dict) else None
        told.append(section.get("accept_length") if isinstance(section, dict) else None)
    known = [v for v in (readings.number(value, 1.0, MAX_ACCEPT) for value in told) if v]
    return sum(known) / len(known) if known else None


def _flags(command: object) -> frozenset[str] | None:
    """The names of the flags on a command line; their values may be secrets and are dropped."""
    if isinstance(command, str):
        try:
            words: Iterable[object] = shlex.split(command)
        except ValueError:  # a quote without its end
            words = command.split()
    elif isinstance(command, list):
        words = command
    else:
        return None
    found = re.compile(r"--([a-z0-9-]{1,60})(?:=|$)")
    return frozenset(m[1] for word in words if isinstance(word, str) and (m := found.match(word)))


def _env(value: object) -> dict[str, str] | None:
    if not isinstance(value, dict):
        return None
    return {name: text for name in ENV if (text := _text(value.get(name))) is not None}


def _models(body: bytes | None) -> list[dict[str, Any]]:
    return [model for model in _list(_object(body).get("data")) if isinstance(model, dict)]


def _names(models: list[dict[str, Any]]) -> tuple[str, ...]:
    """The names in order; of very many the first, and a checksum of them all."""
    names = sorted(name for model in models if (name := _text(model.get("id"))))
    if len(names) <= MAX_NAMES:
        return tuple(names)
    rest = f"{len(names) - MAX_NAMES} more ({zlib.crc32(chr(0).join(names).encode()):08x})"
    return (*names[:MAX_NAMES], rest)


def _object(body: bytes | None) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    try:
        value = readings.json(body) if body is not None else None
    except UnreadableError:
        value = None
    return value if isinstance(value, dict) else {}


def _inner(holder: dict[str, Any], name: str) -> dict[str, Any]:
    value = holder.get(name)
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str | None:
    """A printable text of one line, cut where it is long, and then with a checksum of the whole."""
    if not isinstance(value, str):
        return None
    plain = "".join(c if c.isprintable() else " " for c in value[:MAX_TEXT])
    # What is cut off must still tell two values apart: two templates may begin alike.
    return (
        plain
        if len(value) <= MAX_TEXT
        else f"{plain}... ({zlib.crc32(value.encode('utf-8', 'replace')):08x})"
    )


def _word(live: dict[str, Any], name: str) -> str | None:
    """A setting with a name; null is NONE, and what is not there is None."""
    return _text(NONE if live.get(name, 0) is None else live.get(name))


def _switch(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    number = readings.number(value, -1.0, 1e12)  # -1: SGLang's word for "no chunked prefill"
    return int(number) if number is not None and math.floor(number) == number else None
