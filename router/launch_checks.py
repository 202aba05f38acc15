"""What can be seen to be wrong before anything is started: ports, models, what is installed.

Each check reads and starts nothing. It returns words for the user, or raises LaunchError with one
line that says what is wrong and how to mend it, and the exit code that goes with it.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Iterable
from errno import EADDRINUSE
from pathlib import Path
from typing import Final

import yaml

from router.app import BindError, bind
from router.config_types import at_home
from router.exit_codes import EXIT_CANNOT_BIND, EXIT_NO_GPU, EXIT_NO_MODEL, EXIT_NO_SGLANG
from router.launch_flags import Flags, from_yaml
from router.launch_gpu_facts import Machine
from router.launch_model import ModelFacts, doubts, misfits, read, short_draft
from router.load import ROLES, Role

# A name on the hub: one name, or an owner and a name. Anything else is a path.
_HUB_NAME: Final = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
# The distribution's name is claimed by nobody on PyPI: what is installed by it may be a stranger's.
EXTRA: Final = 'pip install ".[gpu]" in a clone of Crossover'


class LaunchError(Exception):
    """It cannot be started. The text is one line that says why, and how to mend it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def base_flags() -> dict[Role, Flags]:
    """Return the flags of deploy/sglang/: beside us in a checkout, within the package in a wheel."""
    checkout = Path(__file__).resolve().parent.parent / "deploy" / "sglang"
    installed = importlib.resources.files("router") / "sglang"
    folder = installed if installed.is_dir() else checkout
    return {
        role: from_yaml(yaml.safe_load((folder / f"{role}.yaml").read_text(encoding="utf-8")))
        for role in ROLES
    }


def check_ports(wanted: Iterable[tuple[str, str, int]]) -> None:
    """Each of (setting, host, port) can be listened on. Raises LaunchError."""
    for setting, host, port in wanted:
        try:
            bind(host, port).close()
        except BindError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == EADDRINUSE
            mend = f"end what listens there, or give another port with {setting}"
            text = f"{error}: {mend if taken else f'see {setting}'}"
            raise LaunchError(EXIT_CANNOT_BIND, text) from None


def free_port(host: str) -> int:
    """Return a port that is free now. Raises LaunchError."""
    try:
        sock = bind(host, 0)
    except BindError as error:
        raise LaunchError(EXIT_CANNOT_BIND, str(error)) from None
    port: int = sock.getsockname()[1]
    sock.close()
    return port


def check_machine(machine: Machine, python: str, *, sglang: bool) -> None:
    """SGLang and torch are there and a GPU is seen. Raises LaunchError."""
    if sglang and machine.sglang is None:
        text = f"SGLang is not installed in {python}: {EXTRA}, or name the Python that has it with --python"
        raise LaunchError(EXIT_NO_SGLANG, text)
    if machine.torch is None:
        why = f" ({machine.error})" if machine.error else ""
        text = f"torch cannot be imported in {python}{why}: {EXTRA}"
        raise LaunchError(EXIT_NO_GPU, text)
    if not machine.gpus:
        why = machine.error or "torch sees none"
        text = (
            f"no GPU on this host ({why}): check nvidia-smi and CUDA_VISIBLE_DEVICES; to try "
            "Crossover without one: loadtest demo"
        )
        raise LaunchError(EXIT_NO_GPU, text)


def model_facts(name: str, setting: str) -> ModelFacts | None:
    """Return what a model's folder says; None for a name on the hub. Raises LaunchError."""
    path = at_home(name)
    if not path.exists():
        if _HUB_NAME.fullmatch(name):
            return None
        text = f"{setting} {name}: no such folder: check the path"
        raise LaunchError(EXIT_NO_MODEL, text)
    config = path / "config.json"
    if path.is_file():  # a single file, as GGUF is
        return None
    try:
        document = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        text = f"{setting} {name}: no config.json in it: it is not a model's folder"
        raise LaunchError(EXIT_NO_MODEL, text) from None
    except (OSError, ValueError) as error:
        text = f"{setting} {name}: its config.json cannot be read: {error}"
        raise LaunchError(EXIT_NO_MODEL, text) from None
    return read(document if isinstance(document, dict) else {})


def check_fit(
    model: str, draft: str | None, algorithm: str, context: int | None
) -> tuple[ModelFacts | None, list[str]]:
    """Model and draft are there and fit each other, as far as that can be seen from here.

    `context` is how many tokens of it are served, where that is said; 0: the draft's own length is
    no limit. Returns the model's facts and words for the user. Raises LaunchError.
    """
    facts = model_facts(model, "--model")
    if draft is None:
        return facts, []
    own = model_facts(draft, "--draft")
    if facts is None or own is None:
        return facts, ["model and draft are not compared: their config.json is not on this host"]
    if at_home(model).resolve() == at_home(draft).resolve():
        text = "--model and --draft are the same folder: the draft is a small head of its own"
        raise LaunchError(EXIT_NO_MODEL, text)
    wrong = list(misfits(facts, own, algorithm))
    if wrong:
        text = (
            f"{draft} is not a draft for {model}: {'; '.join(wrong)}: use one made for this model"
        )
        raise LaunchError(EXIT_NO_MODEL, text)
    served = facts.context if context is None else context
    return facts, [*doubts(own, algorithm), *short_draft(served, own)]
