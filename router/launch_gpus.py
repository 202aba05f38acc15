"""Asks the Python that will run SGLang what it sees: GPUs, torch, SGLang.

In a process of its own, since importing torch takes seconds and memory, and touching a GPU leaves a
context on it: the router has none of that.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any, Final

from router.launch_gpu_facts import Gpu, Machine

SECONDS: Final = 180.0  # importing torch from a cold disk takes a minute and more
MARK: Final = "crossover-probe:"

PROBE: Final = """
import importlib.metadata, importlib.util, json
seen = {"gpus": [], "torch": None, "sglang": None, "error": ""}
if importlib.util.find_spec("sglang") is not None:
    try:
        seen["sglang"] = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        seen["sglang"] = "unknown"
try:
    import torch
    seen["torch"] = str(torch.__version__)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError:  # not even a context fits
            free, total = 0, properties.total_memory
        seen["gpus"].append({
            "index": index,
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "total": total,
            "free": free,
        })
except ImportError as error:
    seen["error"] = str(error)
except Exception as error:
    seen["error"] = type(error).__name__ + ": " + str(error)
print("crossover-probe:" + json.dumps(seen))
"""


class ProbeError(RuntimeError):
    """The Python that was named cannot be asked. The text says why."""


def look(python: str, environ: Mapping[str, str], *, seconds: float = SECONDS) -> Machine:
    """Return what `python` sees in this environment. Raises ProbeError."""
    try:
        done = subprocess.run(  # noqa: S603 (the interpreter that the user names)
            [python, "-c", PROBE],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except OSError as error:
        raise ProbeError(f"{python} cannot be run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{python} did not say within {seconds:g} s what GPUs it sees") from None
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith(MARK):
            return read(json.loads(line.removeprefix(MARK)), environ)
    tail = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no output"]
    raise ProbeError(f"{python} ended with {done.returncode} when asked for its GPUs: {tail[0]}")


def read(seen: dict[str, Any], environ: Mapping[str, str]) -> Machine:
    """Make values of what the probe printed.

    An outer CUDA_VISIBLE_DEVICES renumbers the GPUs: what a server is given must be its names.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    tokens = [token.strip() for token in visible.split(",") if token.strip()]
    gpus = tuple(
        Gpu(
            index=gpu["index"],
            name=gpu["name"],
            capability=(gpu["capability"][0], gpu["capability"][1]),
            total=gpu["total"],
            free=gpu["free"],
            token=tokens[gpu["index"]] if gpu["index"] < len(tokens) else str(gpu["index"]),
        )
        for gpu in seen["gpus"]
    )
    error = " ".join(seen["error"].split())[:300]
    return Machine(gpus=gpus, torch=seen["torch"], sglang=seen["sglang"], error=error)


def interpreter_environment() -> dict[str, str]:
    """Return our environment without the router's own settings: keys are among them."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CROSSOVER_")}
