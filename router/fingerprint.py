"""What a server is, as far as it moves a curve: the facts that a calibration holds for.

Pure. `fingerprint` makes them of one server's `/server_info`, a calibrator writes those of both
servers into its file, and `compare` says later which of them are no longer so. Facts that both
servers share have plain names (`model`, `engine`, `context`), those of one are prefixed with its
role (`speculative.page_size`). What a server does not say is not there; what it says is null is
None. Only keys that both sides have are compared: other keys of a file ("gpu", "prompt_tokens",
"server") are conditions for a reader, which no server can be asked for.

Only the resolved arguments at the top of `/server_info` are read, not the state of its ranks:
adaptive speculation changes the latter from minute to minute, and a sweep does not keep them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from router import readings
from router.doctor_reading import read_graph_ceiling
from router.load import ROLES, Role

Fact = str | int | float | bool | None
Facts = Mapping[str, Fact]

MAX_TEXT: Final = 200  # characters of a value that are kept: a path fits

# In /server_info -> in a fingerprint, after its server's role. Each of these moves a curve.
FLAGS: Final = {
    "speculative_algorithm": "speculative_algorithm",
    "speculative_draft_model_path": "draft",
    "speculative_num_steps": "speculative_num_steps",
    "speculative_eagle_topk": "speculative_eagle_topk",
    "speculative_num_draft_tokens": "speculative_num_draft_tokens",
    "speculative_adaptive": "speculative_adaptive",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "tp_size": "tp_size",
    "pp_size": "pp_size",
    "dp_size": "dp_size",
    "max_running_requests": "cap",
    "chunked_prefill_size": "chunked_prefill_size",
    "page_size": "page_size",
    "disable_radix_cache": "disable_radix_cache",
    "disable_overlap_schedule": "disable_overlap_schedule",
    "enable_mixed_chunk": "enable_mixed_chunk",
}
ALGORITHM: Final = "speculative_algorithm"
# Keys whose values are the names of a model: the same one may lie at another path.
_MODELS: Final = ("model", "draft")
_HUB: Final = re.compile(r"models--(?:[^/]+--)?([^/]+?)(?:/snapshots(?:/[^/]*)?)?/*$")
# How a file says that its sweeps did not agree on a fact.
_AND: Final = " and "


class Mismatch(msgspec.Struct, frozen=True):
    """One fact that is not what the curves were measured with."""

    key: str
    calibrated: Fact
    live: Fact

    def __str__(self) -> str:
        """In words, for a log and a page."""
        return f"{self.key}: calibrated {_shown(self.calibrated)}, live {_shown(self.live)}"


def fingerprint(role: Role, info: Mapping[str, Any]) -> dict[str, Fact]:
    """The facts of one server, of the body of its `/server_info` or of allow-listed flags of it."""
    found: dict[str, Fact] = {}
    if (model := _fact(info.get("model_path"))) is not None:
        found["model"] = model
    if (served := _fact(info.get("served_model_name"))) is not None:
        found["served"] = served
    if isinstance(version := info.get("version"), str) and version:
        found["engine"] = f"sglang {_fact(version)}"
    if (context := _fact(info.get("context_length"))) is not None:
        found["context"] = context
    own: dict[str, Fact] = {
        word: _fact(info[name])
        for name, word in FLAGS.items()
        if name in info and _is_fact(info[name])
    }
    if (attention := _attention(info)) is not None:
        own["attention"] = attention
    if (ceiling := read_graph_ceiling(dict(info))) is not None:
        own["cuda_graph_max_bs"] = ceiling
    return found | {f"{role.value}.{word}": value for word, value in own.items()}


def read_fingerprint(role: Role, server_info: bytes) -> dict[str, Fact]:
    """As `fingerprint`, of the bytes of an answer. Raises UnreadableError when it is not JSON."""
    body = readings.json(server_info)
    return fingerprint(role, body) if isinstance(body, dict) else {}


def together(speculative: Facts, baseline: Facts) -> dict[str, Fact]:
    """One fingerprint of both servers; a shared fact on which they differ has both values."""
    found = dict(speculative) | dict(baseline)
    for key in speculative.keys() & baseline.keys():
        if speculative[key] != baseline[key]:
            found[key] = f"{speculative[key]}{_AND}{baseline[key]}"
    return found


def compare(calibrated: Facts, live: Facts) -> tuple[Mismatch, ...]:
    """The facts that both have and that differ, by name.

    `live` are the facts of one server, or of both together.
    """
    return tuple(
        Mismatch(key, calibrated[key], live[key])
        for key in sorted(calibrated.keys() & live.keys() - {"served"})
        if not _same(key, calibrated[key], live)
    )


def another_model(calibrated: Facts, live: Facts) -> bool:
    """Whether the live server runs another model than the curves are of.

    A description in words is no name of a model, and says nothing.
    """
    said = calibrated.get("model")
    if not isinstance(said, str) or " " in said or "model" not in live:
        return False
    return not _same("model", said, live)


def swapped(live: Mapping[Role, Facts]) -> bool:
    """Whether the two servers are each in the other's place: only the baseline one speculates."""
    speculative, baseline = (
        live.get(role, {}).get(f"{role.value}.{ALGORITHM}", "unknown") for role in ROLES
    )
    return speculative is None and baseline not in {None, "unknown"}


class Judgement(msgspec.Struct, frozen=True):
    """What the live servers are, against what the curves were measured with."""

    matches: bool | None = None  # None: nothing could be compared
    mismatches: tuple[Mismatch, ...] = ()
    refusal: str | None = None  # why the calibration cannot be theirs at all


def judge(calibrated: Facts, live: Mapping[Role, Facts]) -> Judgement:
    """Hold both servers, as far as they are known, against the fingerprint of a calibration."""
    found: dict[Mismatch, None] = {}
    compared = False
    refusal = None
    for role in ROLES:
        facts = live.get(role, {})
        compared = compared or bool(calibrated.keys() & facts.keys() - {"served"})
        found |= dict.fromkeys(compare(calibrated, facts))
        if refusal is None and another_model(calibrated, facts):
            refusal = (
                f"it is of the model {calibrated['model']}, "
                f"and the {role.value} server runs {facts['model']}"
            )
    if swapped(live):
        refusal = (
            "the servers are in each other's place: the one given as baseline speculates, the one "
            "given as speculative does not"
        )
    matches = not found and refusal is None if compared or refusal is not None else None
    return Judgement(matches, tuple(found), refusal)


def _is_fact(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _fact(value: object) -> Fact:
    """A value fit for a file and a line of log; None for what is no plain value."""
    if isinstance(value, str):
        text = "".join(c if c.isprintable() else " " for c in value[:MAX_TEXT])
        return None if text.lower() in {"", "none", "null"} else text
    # No NaN and no infinity: JSON has neither, and a NaN would not even match itself.
    return value if isinstance(value, int | float) and -math.inf < value < math.inf else None


def _attention(info: Mapping[str, Any]) -> Fact:
    """The attention backends in use, prefill and decode."""
    common = _fact(info.get("attention_backend"))
    if common is None:
        return None
    prefill, decode = (
        _fact(info.get(f"{phase}_attention_backend")) or common for phase in ("prefill", "decode")
    )
    return prefill if prefill == decode else f"{prefill} for prefill, {decode} for decode"


def _same(key: str, said: Fact, live: Facts) -> bool:
    """Whether the live value is the calibrated one, or one of several that are said."""
    value = live[key]
    if isinstance(said, bool) or isinstance(value, bool):
        return said is value
    if said == value:
        return True
    if not isinstance(said, str):
        return False
    options = said.split(_AND)
    if key.rpartition(".")[2] in _MODELS:
        names = {_model_name(value), *([_model_name(live.get("served"))] if key == "model" else [])}
        return any(_model_name(option) in names for option in options)
    return str(value) in options


def _model_name(value: Fact) -> str | None:
    """Of a path or of a name on a hub, the last part: where a model lies is not what it is."""
    if not isinstance(value, str):
        return None
    found = _HUB.search(value)
    return (found[1] if found else value.rstrip("/").rpartition("/")[2]).lower()


def _shown(value: Fact) -> str:
    return "none" if value is None else str(value)
