"""The flags of the two servers: as they are in deploy/sglang/, spelled, overruled, known."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from router.launch_checks import base_flags
from router.launch_flags import FlagError, Flags, from_args, from_yaml, merged, to_args, value_of
from router.load import Role

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "deploy" / "sglang"
# Made by tests/sglang_flags_extract.py from the wheels.
KNOWN: dict[str, list[str]] = json.loads(
    (ROOT / "tests" / "data" / "sglang_flags.json").read_text(encoding="utf-8")
)
names = st.from_regex(r"[a-z][a-z0-9]{0,5}(-[a-z0-9]{1,5}){0,2}", fullmatch=True)
words = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1).filter(
    lambda text: not text.startswith("--")
)
flags = st.dictionaries(names, st.lists(words, max_size=3).map(tuple), max_size=6)


@pytest.mark.parametrize("version", KNOWN)
@pytest.mark.parametrize("role", list(Role))
def test_every_flag_is_known(role: Role, version: str) -> None:
    """Each release that we know the flags of knows those of deploy/sglang/, as we would write them."""
    release = tuple(int(part) for part in version.split("."))
    assert len(release) == 3
    args = to_args(base_flags()[role], release)
    unknown = {arg for arg in args if arg.startswith("--")} - {
        f"--{name}" for name in KNOWN[version]
    }
    assert unknown == set()


@pytest.mark.parametrize("version", ["0.5.14", "0.5.17", "0.5.23"])
@pytest.mark.parametrize("role", list(Role))
def test_the_files_as_they_are(role: Role, version: str) -> None:
    """From 0.5.14 on the files are right as they are, for SGLang's own --config."""
    document = yaml.safe_load((FILES / f"{role}.yaml").read_text(encoding="utf-8"))
    assert set(document) <= set(KNOWN[version])


def test_an_invented_flag_is_unknown() -> None:
    """The data is a list of flags and not of everything: an invented name and an old one fail."""
    assert "speculative-eagle-topk" in KNOWN["0.5.23"]
    assert "speculative-disable-by-batch-size" not in KNOWN["0.5.23"]
    assert "cuda-graph-max-bs" not in KNOWN["0.5.23"]
    assert "cuda-graph-max-bs-decode" not in KNOWN["0.5.12"]


def test_the_files_differ_in_speculation_only() -> None:
    """What the speculative server has beyond the baseline's flags is about speculation."""
    both = base_flags()
    baseline = both[Role.BASELINE].items()
    more = both[Role.SPECULATIVE].items() - baseline
    assert baseline <= both[Role.SPECULATIVE].items()
    assert dict(more) == {
        "speculative-algorithm": ("EAGLE3",),
        "speculative-num-steps": ("3",),
        "speculative-eagle-topk": ("1",),
        "speculative-num-draft-tokens": ("4",),
    }


def test_every_difference_has_its_reason() -> None:
    """In speculative.yaml each flag that the baseline has not stands below a comment."""
    lines = (FILES / "speculative.yaml").read_text(encoding="utf-8").splitlines()
    at = [number for number, line in enumerate(lines) if line.startswith("speculative-")]
    assert len(at) == 4
    assert all(lines[number - 1].startswith("# ") for number in at)


def test_arguments_are_read() -> None:
    """A flag may have no value, one behind a space or an equals sign, or several."""
    args = ["--enable-metrics", "--tp=2", "--cuda-graph-bs", "1", "2", "--seed", "-1", "--x="]
    assert from_args(args) == {
        "enable-metrics": (),
        "tensor-parallel-size": ("2",),
        "cuda-graph-bs-decode": ("1", "2"),
        "seed": ("-1",),
        "x": ("",),
    }


def test_a_value_without_a_flag() -> None:
    """A text that no flag stands before is refused, and said."""
    with pytest.raises(FlagError, match="'8192' is not a flag"):
        from_args(["8192"])


@pytest.mark.parametrize("document", [["a"], "text", {"a": {"b": 1}}, {"a": None}])
def test_a_file_that_is_not_flags(document: object) -> None:
    """What SGLang's format cannot hold is refused."""
    with pytest.raises(FlagError):
        from_yaml(document)


def test_a_file_is_read() -> None:
    """True is a switch, false takes it out, a list is many values, an empty file is nothing."""
    document = {"a": True, "b": False, "c_d": [1, 2], "e": 0.5, "f": "x"}
    assert from_yaml(document) == {"a": (), "c-d": ("1", "2"), "e": ("0.5",), "f": ("x",)}
    assert from_yaml(None) == {}


def test_the_later_wins() -> None:
    """A flag of the user's replaces ours under whatever name, and can be taken out."""
    ours = from_args(["--cuda-graph-max-bs-decode", "256", "--sleep-on-idle", "--a", "1"])
    theirs = from_args(["--cuda-graph-max-bs", "64", "--b", "2"])
    assert merged(ours, theirs, without=["--sleep-on-idle", "never_there"]) == {
        "cuda-graph-max-bs-decode": ("64",),
        "a": ("1",),
        "b": ("2",),
    }


@given(flags, flags)
def test_merging_keeps_every_flag_once(one: Flags, other: Flags) -> None:
    """Nothing is lost and nothing is there twice, on the command line either."""
    result = merged(one, other)
    assert result == {**one, **other}
    written = [arg for arg in to_args(result) if arg.startswith("--")]
    assert len(written) == len(set(written)) == len(result)


@given(flags)
def test_written_flags_are_read_back(flag: Flags) -> None:
    """Writing and reading are each other's inverse."""
    canonical = merged(from_args(to_args(flag)))
    assert from_args(to_args(canonical)) == canonical


def test_old_names() -> None:
    """Before 0.5.14 two flags had other names."""
    flag = from_args(["--cuda-graph-max-bs-decode", "8"])
    assert to_args(flag, (0, 5, 13)) == ("--cuda-graph-max-bs", "8")
    assert to_args(flag, (0, 5, 14)) == ("--cuda-graph-max-bs-decode", "8")
    assert to_args(flag) == ("--cuda-graph-max-bs-decode", "8")
    assert value_of(flag, "cuda-graph-max-bs-decode") == "8"
    assert value_of(flag, "other") is None


@pytest.mark.slow
def test_an_installed_wheel_has_the_files(tmp_path: Path) -> None:
    """A wheel carries both files within the package, and the launcher finds them there."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "data")
    for name in ("router", "loadtest", "deploy"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert not (installed / "deploy").exists()
    look = "from router.launch_checks import base_flags; print(base_flags(), __import__('router'))"
    found = subprocess.run(
        [sys.executable, "-c", look],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(str(base_flags()))
    assert str(installed) in found.stdout
