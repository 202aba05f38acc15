"""What the tests of deploy/kubernetes share: kustomize, and the documents that it makes."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "deploy" / "kubernetes"
OVERLAYS: Final = sorted(path.name for path in (FOLDER / "overlays").iterdir())


@functools.cache
def builder() -> list[str] | None:
    """The command that builds a folder; None where there is no kustomize with components (3.7)."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        program = shutil.which(command[0])
        if program is None:
            continue
        asked = [program, command[1], str(FOLDER / "base")]
        found = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
        if found.returncode == 0:
            return [program, command[1]]
    return None


@functools.cache
def _text(overlay: str) -> str:
    command = builder()
    if command is None:
        pytest.skip("kustomize is not installed here, nor a kubectl that has it")
    folder = FOLDER / "overlays" / overlay
    found = subprocess.run(
        [*command, str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def built(overlay: str) -> list[dict[str, Any]]:
    """All documents of an overlay, fresh ones at each call."""
    return [document for document in yaml.safe_load_all(_text(overlay)) if document]


def one(documents: list[dict[str, Any]], kind: str, name: str = "crossover") -> dict[str, Any]:
    """The only document of this kind and name, with or without the hash of what it holds."""
    wanted = re.compile(rf"{name}(-[a-z0-9]{{10}})?")
    (found,) = [
        each
        for each in documents
        if each["kind"] == kind and wanted.fullmatch(each["metadata"]["name"])
    ]
    return found


def pod(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The specification of the pair's Pod."""
    spec: dict[str, Any] = one(documents, "StatefulSet")["spec"]["template"]["spec"]
    return spec


def containers(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Its containers by name."""
    return {each["name"]: each for each in pod(documents)["containers"]}


def environment(container: dict[str, Any]) -> dict[str, str | None]:
    """The variables of a container; None for one that comes from elsewhere."""
    return {each["name"]: each.get("value") for each in container.get("env", ())}
