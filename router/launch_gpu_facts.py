"""What is known of a host's GPUs, and what follows from it: recipe, memory, parallelism.

The law of this file: values only. A recipe is a few flags with their reason; a GPU that nobody has
a recipe for gets SGLang's own defaults, and the user is told so.
"""

from __future__ import annotations

import math
import re
from typing import Final

import msgspec

from router.launch_flags import Flags
from router.launch_model import ModelFacts

GIB: Final = 1024**3
# Beside weights and KV cache a server needs memory for activations, CUDA graphs and CUDA itself.
# Measured on an H200 with an 8B model: 2 GB for the baseline, 6 GB with EAGLE-3 (its draft's weights
# included). 8 % is 11 GB there and leaves larger models room; small GPUs keep at least 4 GiB.
RESERVE_SHARE: Final = 0.08
RESERVE_LEAST: Final = 4 * GIB
# A GPU with less of its memory free than this is in use by somebody else.
MOSTLY_FREE: Final = 0.9


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as torch sees it. Memory in bytes; `token` is its name in CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    capability: tuple[int, int]
    total: int
    free: int
    token: str = ""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the Python that will run SGLang sees."""

    gpus: tuple[Gpu, ...] = ()
    torch: str | None = None  # its version; None: not installed
    sglang: str | None = None  # its version, "unknown" where it says none; None: not installed
    error: str = ""  # why torch sees no GPU, where it says

    @property
    def release(self) -> tuple[int, int, int] | None:
        """SGLang's version as numbers."""
        found = re.match(r"(\d+)\.(\d+)\.(\d+)", self.sglang or "")
        return (int(found[1]), int(found[2]), int(found[3])) if found else None


# CUDA graphs for 256 requests take memory that a small GPU needs for its KV cache: below this SGLang
# itself captures no more than 8 to 80 (by release and size). 48 is also what it lets a speculative
# server run when nothing is said.
SMALL: Final = 60 * GIB
FEW: Final = "48"
# Compute capability -> name, and the attention backend of models with plain attention. Each is what
# SGLang (0.5.17, 0.5.23) chooses itself when it has topk 1 in its flags; said on both servers, a
# later change of that choice cannot make the two differ.
RECIPES: Final = {
    9: ("Hopper", "fa3"),
    10: ("Blackwell (SM100)", "trtllm_mha"),
    12: ("Blackwell (SM120)", "flashinfer"),
}


def recipe(gpus: tuple[Gpu, ...], facts: ModelFacts | None) -> tuple[Flags, tuple[str, ...]]:
    """Return the flags for these GPUs, the same for both servers, and words for the user."""
    words = [
        f"GPU {gpu.index} ({gpu.name}): only {gpu.free / gpu.total:.0%} of its memory is free"
        for gpu in gpus
        if gpu.free < MOSTLY_FREE * gpu.total
    ]
    flags: Flags = {}
    if min(gpu.total for gpu in gpus) < SMALL:
        flags = {"max-running-requests": (FEW,), "cuda-graph-max-bs-decode": (FEW,)}
        words.append(f"small GPUs: at most {FEW} requests at once, with CUDA graphs for as many")
    kinds = {gpu.capability[0] for gpu in gpus}
    known = RECIPES.get(next(iter(kinds))) if len(kinds) == 1 else None
    if known is None:
        names = ", ".join(sorted({f"{gpu.name} (SM{sm(gpu)})" for gpu in gpus}))
        words.append(f"no recipe for {names}: SGLang's own defaults are used")
        return flags, tuple(words)
    title, attention = known
    if facts is None:
        words.append(f"{title}: the attention backend is left to SGLang (the model is not here)")
    elif not facts.plain_attention:
        words.append(f"{title}: the attention backend of {facts.architecture} is left to SGLang")
    else:
        flags["attention-backend"] = (attention,)
    return flags, tuple(words)


def sm(gpu: Gpu) -> str:
    """Return the compute capability as NVIDIA writes it behind SM: 90, 100, 120."""
    return f"{gpu.capability[0]}{gpu.capability[1]}"


def fractions(gpu: Gpu) -> tuple[float, float]:
    """Return `--mem-fraction-static` of the first and the second server on one GPU.

    SGLang's fraction is a share of what is free before the server loads: (free - slack) / free. Both
    get the same number of bytes, s = (free - 2 r) / 2 with a reserve of r each, so the first has
    s / free, and the second, with free - s - r before it, s / (free - s - r). Rounded down.
    """
    free = max(gpu.free, 1)
    reserve = min(max(RESERVE_SHARE * free, RESERVE_LEAST), free / 3)
    share = (free - 2 * reserve) / 2
    return _down(share / free), _down(share / (free - share - reserve))


def _down(fraction: float) -> float:
    return math.floor(fraction * 1000) / 1000


def tensor_parallel(room: int, facts: ModelFacts | None) -> int:
    """Return over how many of `room` GPUs a model is spread.

    The most that divide its attention heads; a power of two where those are not known.
    """
    heads = facts.heads if facts is not None else None
    if not heads:
        return 1 << (room.bit_length() - 1)
    return max(size for size in range(1, room + 1) if heads % size == 0)
