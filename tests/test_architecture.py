"""What the shape of the code promises: pure modules, small modules, nothing on import."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("router/**/*.py"), *ROOT.glob("loadtest/**/*.py")])
TESTS = sorted(ROOT.glob("tests/**/*.py"))

# Modules that compute: no socket, no clock, no file.
PURE = {
    "router": (
        "acceptance",
        "actions",
        "affinity",
        "agreement",
        "answer",
        "auth",
        "breaker",
        "calibrated",
        "calibration",
        "calibration_state",
        "curves",
        "doctor_capacity",
        "doctor_facts",
        "doctor_findings",
        "doctor_parity",
        "doctor_reading",
        "doctor_rules",
        "doctor_speculation",
        "drift",
        "errors",
        "exchange",
        "exchange_core",
        "exit_codes",
        "explained",
        "fingerprint",
        "flow",
        "framing",
        "frontier",
        "guard",
        "headers",
        "incoming",
        "known_heads",
        "launch_backoff",
        "launch_codes",
        "launch_flags",
        "launch_gpu_facts",
        "launch_hints",
        "launch_model",
        "launch_plan",
        "launch_secrets",
        "live_line",
        "load",
        "loads",
        "metrics",
        "offered",
        "own_headers",
        "pages",
        "policies",
        "policy",
        "readings",
        "report",
        "request",
        "routes",
        "rules",
        "server_info",
        "speeds",
        "sse",
        "status_advice",
        "status_calibration",
        "status_path",
        "telemetry",
        "vitals",
    ),
    "loadtest": (
        "advice",
        "affinity_tried",
        "arrivals",
        "batching",
        "bench_answers",
        "choose",
        "clairvoyant",
        "compare",
        "conditions",
        "contention",
        "crossing",
        "curve",
        "engine_errors",
        "engine_messages",
        "engine_prefix",
        "engine_request",
        "engine_text",
        "engine_validation",
        "exit_codes",
        "fit",
        "fit_words",
        "import_own",
        "import_sglang",
        "import_tools",
        "importers",
        "intervals",
        "live_schema",
        "live_summary",
        "notices",
        "objectives",
        "overhead",
        "points",
        "policy_table_text",
        "report",
        "report_svg",
        "robust",
        "ruled",
        "rules_tried",
        "service",
        "simulator",
        "simulator_contention",
        "simulator_load",
        "simulator_server",
        "smooth",
        "summary",
        "sweep_phases",
        "sweep_schema",
        "sweep_seen",
        "sweep_turns",
        "values",
        "verdict",
    ),
}
IO_MODULES = {
    *{"asyncio", "concurrent", "ctypes", "logging", "mmap", "multiprocessing", "os"},
    *{"pathlib", "select", "selectors", "shutil", "signal", "socket", "socketserver"},
    *{"ssl", "subprocess", "tempfile", "threading", "time", "http.client", "http.server"},
    *{"urllib.request", "anyio", "fastapi", "httpcore", "httptools", "httpx", "openai"},
    *{"prometheus_client", "rich", "starlette", "structlog", "typer", "uvicorn"},
    *{"uvloop"},
}
MAX_MODULE = 300
MAX_FUNCTION = 60
# Put together here, so that this file does not find itself.
OPEN_ENDS = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]))
MACHINE_PATH = re.compile(
    r"(?:^|[^\w.])/(?:" + "|".join(["wo" + "rk", "fa" + "rm", "ro" + "ot"]) + ")/"
)

PROBE = """
import importlib, json, os, signal, sys, threading
found = []
def hook(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        found.append(["writes", str(args[0])])
    elif event in ("socket.bind", "socket.connect", "subprocess.Popen", "os.putenv"):
        found.append([event, repr(args)])
sys.addaudithook(hook)
handler = signal.getsignal(signal.SIGTERM)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
found += [["starts a thread", thread.name] for thread in threading.enumerate()[1:]]
found += [["imports", name] for name in ("sglang", "torch") if name in sys.modules]
if signal.getsignal(signal.SIGTERM) is not handler:
    found.append(["handles", "SIGTERM"])
print(json.dumps(found))
"""


def named(path: Path) -> str:
    """Return the dotted name of the module in `path`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def head_of(path: Path) -> str:
    return ast.get_docstring(parse(path)) or ""


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of everything that is imported, wherever in the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages: set[str]) -> bool:
    """Whether `name` is one of `packages` or something in it."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def first_party(name: str) -> set[str]:
    """Return the modules of ours that importing `name` runs, itself included."""
    paths = {named(path): path for path in SOURCES}
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in paths and current not in seen:
            seen.add(current)
            waiting.extend(imports(parse(paths[current])))
    return seen


PURE_MODULES = [
    ROOT / package / f"{module}.py"
    for package, modules in PURE.items()
    for module in modules
    if (ROOT / package / f"{module}.py").exists()
]


@pytest.mark.parametrize("path", PURE_MODULES, ids=named)
def test_pure(path: Path) -> None:
    """A pure module imports nothing that does I/O or reads a clock."""
    assert [name for name in imports(parse(path)) if within(name, IO_MODULES)] == []


@pytest.mark.parametrize("path", PURE_MODULES, ids=named)
def test_pure_to_the_ground(path: Path) -> None:
    """Nor does any module of ours that it imports bring an event loop or a socket with it."""
    heavy = {"asyncio", "socket", "httpx", "uvicorn", "fastapi", "starlette", "subprocess"}
    reached = {name: ROOT / (name.replace(".", "/") + ".py") for name in first_party(named(path))}
    impure = {
        name
        for name, source in reached.items()
        if source.exists() and any(within(imported, heavy) for imported in imports(parse(source)))
    }
    assert impure == set()


def test_who_says_pure_is_held_to_it() -> None:
    """A module whose head begins a sentence with "Pure" is one of those that are checked."""
    said = {path for path in SOURCES if re.search(r"^Pure\b", head_of(path), re.MULTILINE)}
    assert said - set(PURE_MODULES) == set()


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_imports_go_one_way(path: Path) -> None:
    """The router imports neither the load test nor the tests, and nobody an engine."""
    forbidden = {"sglang", "torch", "tests"}
    if named(path).startswith("router"):
        forbidden.add("loadtest")
    assert [name for name in imports(parse(path)) if within(name, forbidden)] == []


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_small(path: Path) -> None:
    """No module is longer than 300 lines, no function longer than 60."""
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_MODULE
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno
        and node.end_lineno - node.lineno >= MAX_FUNCTION
    }
    assert long == {}


def test_importing_does_nothing(tmp_path: Path) -> None:
    """Importing every module starts no thread, writes no file, opens no socket, needs no engine."""
    modules = [named(path) for path in SOURCES]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-B", "-c", PROBE, json.dumps(modules)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", TESTS, ids=named)
def test_every_test_states_its_fact(path: Path) -> None:
    """Each test has a docstring that ends like a sentence."""
    silent = [
        node.name
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not (ast.get_docstring(node) or "").endswith(".")
    ]
    assert silent == []


def texts() -> list[Path]:
    """Return the files that people write, in the order of their names."""
    patterns = ("*.md", "*.toml", "Makefile", ".ci/*", "requirements/*", "docs/**/*.md")
    return sorted([*SOURCES, *TESTS, *(path for name in patterns for path in ROOT.glob(name))])


@pytest.mark.parametrize("path", texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_left_behind(path: Path) -> None:
    """No open end and no path of somebody's machine is in the tree."""
    text = path.read_text(encoding="utf-8")
    assert OPEN_ENDS.findall(text) == []
    assert [line for line in text.splitlines() if MACHINE_PATH.search(line)] == []


@pytest.mark.parametrize("name", ["run", "dev"])
def test_requirements(name: str) -> None:
    """Requirements are exact, name no registry, and hold every direct dependency."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    pinned = {line.partition("==")[0] for line in lines}
    assert "://" not in text
    assert [line for line in lines if not re.match(r"[a-z0-9.-]+==[^ ;]+( ; .+)?$", line)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    direct = project["dependencies"] + project["optional-dependencies"]["test"] * (name == "dev")
    assert {re.split(r"[<>=~! ]", dependency)[0] for dependency in direct} <= pinned
