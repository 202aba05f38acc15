"""The documents against the code: what they name is there, and what is there they name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from prometheus_client.registry import Collector

from router import own_headers
from router.explained import Explained
from router.metrics import Outcome, Retry
from router.policy import Reason
from router.routes import TABLE
from tests import reference

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = reference.document()
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "router/*.md", "loadtest/*.md", "deploy/**/*.md")
    for path in ROOT.glob(pattern)
)
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
# Of other programs, in the same documents.
FOREIGN_FLAGS = {"--config", "--version", "--help"}


def section(text: str, title: str) -> str:
    """The text under a heading of the second level."""
    return text.split(f"\n## {title}\n")[1].split("\n## ", maxsplit=1)[0]


def test_the_reference_is_fresh() -> None:
    """REFERENCE.md is what the code says."""
    assert reference.FILE.read_text(encoding="utf-8") == REFERENCE, f"stale: {reference.MEND}"


# What an installation by the distribution's name looks like.
_BY_NAME = re.compile(r"\binstall\b.*\bcrossover[-_]router", re.IGNORECASE)


def test_nobody_is_told_to_install_by_name() -> None:
    """The name is on no package index: no message, file or document says to install by it."""
    patterns = ("*", "router/**/*", "loadtest/**/*", "deploy/**/*", "tests/*.py")
    files = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    kinds = {".py", ".md", ".toml", ".yaml", ".html", ".sh", ".env", ""}
    texts = {path: path.read_text("utf-8", "replace") for path in files if path.suffix in kinds}
    assert len(texts) > 300
    assert [path for path, text in texts.items() if _BY_NAME.search(text)] == []
    assert _BY_NAME.search("pip install -U 'crossover" + "-router[gpu]'")


def test_the_reference_has_every_collector() -> None:
    """Each collector of the router's is registered where the reference reads the metrics from."""
    registry, _ = reference.registry(reference.relay())
    registered = {type(found) for found in registry._collector_to_names}
    ours = {kind for kind in Collector.__subclasses__() if kind.__module__.startswith("router.")}
    assert ours <= registered


@pytest.mark.parametrize("names", [Reason, Outcome, Retry])
def test_every_name_is_explained(names: type[Explained]) -> None:
    """Each name of a closed set has a meaning of its own, and is still looked up by its text."""
    meanings = [name.meaning for name in names]
    assert all(re.fullmatch(r"\S.*[^.\s]", meaning) for meaning in meanings)
    assert len(set(meanings)) == len(meanings)
    assert [names(str(name)) for name in names] == list(names)


def test_every_command_has_its_exit_codes() -> None:
    """The table has each command, and the help of a command names codes of its own only."""
    for program, (app, meanings) in reference.COMMANDS.items():
        found = reference.of(app)
        assert set(found) == set(meanings), program
        for name, command in found.items():
            _, told, text = (command.help or "").partition("Exit code")
            codes = {int(code) for code in re.findall(r"\b\d+\b", text)}
            assert codes <= set(meanings[name]), name
            if told:  # what a shell makes of signals and bad flags goes without saying
                assert set(meanings[name]) - {2, 130, 143} <= codes, name


def test_our_headers_are_listed() -> None:
    """Each header of ours that the router's code names is in the list of them."""
    named = {
        name
        for path in (ROOT / "router").glob("*.py")
        for name in re.findall(r"x-crossover-[a-z]+", path.read_text(encoding="utf-8"))
    }
    listed = {*own_headers.REQUEST, *own_headers.RESPONSE}
    assert named == {name for name in listed if name.startswith("x-crossover-")}


# ------------------------------------------------------------------ architecture


@pytest.mark.parametrize("package", ["router", "loadtest"])
def test_the_map_has_every_module(package: str) -> None:
    """ARCHITECTURE.md names each module of a package once, and no other."""
    named = re.findall(r"`(\w+)`", section(ARCHITECTURE, f"All modules of `{package}/`"))
    there = [path.stem for path in (ROOT / package).glob("*.py") if path.stem != "__init__"]
    assert sorted(named) == sorted(there)


def test_the_path_of_a_request_can_be_searched_for() -> None:
    """Each method that ARCHITECTURE.md names is one, in the class that it names."""
    there = {
        f"{node.name}.{each.name}"
        for path in (ROOT / "router").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.FunctionDef)
    }
    named = re.findall(r"`([A-Z]\w+\.\w+)`", ARCHITECTURE)
    assert len(named) > 15
    assert [name for name in named if name not in there] == []


def test_the_picture_names_modules() -> None:
    """Each file name in the picture is a module."""
    picture = (ROOT / "deploy/pictures/architecture.svg").read_text(encoding="utf-8")
    words = " ".join(re.findall(r'<text class="file"[^>]*>([^<]*)<', picture)).split()
    assert len(words) > 40
    modules = {path.stem for name in ("router", "loadtest") for path in (ROOT / name).glob("*.py")}
    assert {word for word in words if word not in modules} == {"engine_*"}


# ------------------------------------------------------------------ all documents


@documents
def test_what_is_linked_is_there(path: Path) -> None:
    """Each file that a document links to, or names with its folder, exists."""
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    named = re.findall(r"`((?:router|loadtest|tests|deploy)/[\w./-]+\.(?:py|md|html|svg))`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


@documents
def test_metrics_are_real(path: Path) -> None:
    """Each metric of ours that a document names is in the reference."""
    real = set(re.findall(r"`(crossover_\w+)` \|", section(REFERENCE, "Metrics")))
    named = re.findall(
        r"(?<![:\w])crossover_[a-z_]*[a-z]\b(?![*{.:])", path.read_text(encoding="utf-8")
    )
    series = re.compile(r"_(?:bucket|count|sum)$")
    assert {name for name in named if series.sub("", name) not in real} == set()


@documents
def test_make_targets_are_real(path: Path) -> None:
    """Each `make` target that a document names is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = re.findall(r"(?:`|\$ )make ([a-z-]+)", path.read_text(encoding="utf-8"))
    assert set(named) <= targets


# ------------------------------------------------------------------ the README's own lists


def test_readme_reasons() -> None:
    """Each reason in the README's table is one."""
    (row,) = re.findall(r"^\| `x-crossover-reason` \| (.*) \|$", README, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", row.replace("`fence_…`", "")))
    assert named
    assert named <= set(Reason)


def test_readme_headers() -> None:
    """Each header in the README's tables and text that is ours is in the list of them."""
    named = re.findall(r"`(x-(?:crossover|request)-[a-z]+)`", README)
    assert named
    assert set(named) <= {*own_headers.REQUEST, *own_headers.RESPONSE}


def test_readme_endpoints() -> None:
    """Each endpoint in the README is relayed or answered by one of the listeners."""
    text = section(README, "Endpoints").partition("```")[0]
    named = re.findall(r"`(?:POST |GET )?(/[\w/{}]*)(?:\?[^`]*)?`", text)
    served = set(re.findall(r"`(?:\w+ )?(/[^`]*)`", section(REFERENCE, "Endpoints")))
    relayed = {path.decode() for path in TABLE}
    assert len(named) > 20
    # `/v1` and an example of a base URL are spoken of, `/enable` is the end of a path.
    assert set(named) - served - relayed <= {"/v1", "/api/v3/v1/chat/completions", "/enable"}


def test_readme_flags() -> None:
    """Each flag in the README is one of a command or of a setting."""
    settings = re.findall(r"^\| `(\w+)` \|", section(REFERENCE, "Settings"), re.MULTILINE)
    flags = {f"--{name.replace('_', '-')}" for name in settings}
    flags |= set(re.findall(r"`(--[\w-]+)`", section(REFERENCE, "Commands")))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z]", README))
    assert len(named) > 20
    assert named - flags <= {"--fence", "--max-running-requests"} | FOREIGN_FLAGS


def test_readme_exit_codes() -> None:
    """The README's exit codes of the router are those of `crossover serve`."""
    (line,) = re.findall(r"^Exit codes: (.*)$", README, re.MULTILINE)
    codes = {int(code) for code in re.findall(r"\b\d+\b", line)}
    _, meanings = reference.COMMANDS["crossover"]
    assert codes == set(meanings["serve"])
