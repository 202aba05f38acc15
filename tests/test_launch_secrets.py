"""The keys of launched servers: in files of their own, in no command line, and gone at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from loadtest.__main__ import app as loadtest_app
from router.launch_flags import Flags
from router.launch_keeper import REMOVE
from router.launch_kept import KEEPER
from router.launch_secret_file import SecretFile, places, secret_file
from router.load import Role
from tests.launching import (
    Launcher,
    Lines,
    job,
    launched,
    launcher,
    processes,
    server,
    wait_for,
)
from tests.ports import free_ports

KEYS = {"speculative": "sk-spec-7c1f", "baseline": "sk-base-9e2d"}
CONFIG = """
threshold = 8
[launch.speculative]
args = ["--api-key", "sk-spec-7c1f"]
[launch.baseline]
args = ["--api-key=sk-base-9e2d", "--admin-api-key", "sk-admin-5b"]
"""
ENGINE = (
    f"{sys.executable} -m loadtest engine --role {{role}} --port {{port}} --health-seconds 0 "
    "--time-scale 0.05 --max-running-requests 256 --shutdown-poll 1 --config {config}"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of the launch, with nothing else in it."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    return temporary


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """The flags of a launch with a key for each server."""
    config = tmp_path / "c.toml"
    config.write_text(CONFIG)
    return ["--config", str(config), "--server-command", ENGINE]


def files(folder: Path) -> dict[str, str]:
    """The files with keys: their roles and what is in them."""
    found = {}
    for file in folder.glob("crossover-*/*"):
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        found[file.parent.name.rpartition("-")[2]] = file.read_text(encoding="utf-8")
    return found


def seen_by_all(mark: str) -> bytes:
    """The command lines of all processes of a launch, as `ps` shows them to every user."""
    return b"\n".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes(mark))


def status(up: Launcher, role: str, key: str | None) -> int:
    """What a server says to this key, asked past the router."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    url = f"http://127.0.0.1:{up.ports[role]}/v1/models"
    return httpx.get(url, headers=headers, timeout=20, trust_env=False).status_code


def ask(up: Launcher) -> str:
    """The backend that answered a small request through the router."""
    body = {"model": "m", "prompt": "hello", "max_tokens": 2}
    answer = httpx.post(f"{up.url}/v1/completions", json=body, timeout=20, trust_env=False)
    assert answer.status_code == 200
    return answer.headers["x-crossover-backend"]


@pytest.mark.slow
def test_keys_of_running_servers(folder: Path, flags: list[str]) -> None:
    """Both servers ask for their keys and the router has them; no command line holds one; at the end nothing does."""
    mark = f"launch-{uuid.uuid4()}"
    with launcher(*flags, marker=mark) as up:
        up.wait("| ready after")
        for role, key in KEYS.items():
            assert [status(up, role, each) for each in (key, "wrong", None)] == [200, 401, 401]
        assert ask(up) == "speculative"
        seen = seen_by_all(mark)
        assert seen.count(b"--config") >= 5  # of keepers, servers and the launcher
        assert b"sk-" not in seen
        assert {role: yaml.safe_load(text) for role, text in files(folder).items()} == {
            "speculative": {"api-key": KEYS["speculative"]},
            "baseline": {"api-key": KEYS["baseline"], "admin-api-key": "sk-admin-5b"},
        }
        assert not any("sk-" in line for line in up.lines)

        (server,) = [
            pid
            for pid in processes(mark)
            if b"\0loadtest\0engine\0--role\0speculative" in
            (line := Path(f"/proc/{pid}/cmdline").read_bytes())
            and b"launch_keeper" not in line
        ]  # fmt: skip
        os.kill(server, signal.SIGKILL)
        up.wait("the speculative server is ready again")
        assert sorted(files(folder)) == ["baseline", "speculative"]
        assert status(up, "speculative", KEYS["speculative"]) == 200
        wait_for(lambda: ask(up) == "speculative")
        assert b"sk-" not in seen_by_all(mark)

        up.process.terminate()
        assert up.process.wait(20) == 0
        assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_keys_after_a_kill(folder: Path, flags: list[str]) -> None:
    """After SIGKILL of the launcher the keepers end the servers and take the files away."""
    mark = f"launch-{uuid.uuid4()}"
    with launcher(*flags, marker=mark) as up:
        up.wait("| ready after")
        assert sorted(files(folder)) == ["baseline", "speculative"]
        up.process.kill()
        up.process.wait()
        wait_for(lambda: not processes(mark))
        assert list(folder.iterdir()) == []


def test_keys_where_nothing_can_be_written(tmp_path: Path) -> None:
    """A file that cannot be written ends the launch with its reason, not with a server without a key."""
    (tmp_path / "file").touch()
    ports = dict(zip(Role, free_ports(2), strict=True))
    mark = f"9{uuid.uuid4().int % 10**8}"
    work = job({role: server(port, mark) for role, port in ports.items()}, ports)
    file = SecretFile(f"{tmp_path}/file/x/sglang.yaml", "a: b\n")
    lines = Lines()
    code = asyncio.run(launched(work._replace(secret_files={Role.BASELINE: file}), lines))
    assert code == 2
    (said,) = lines.having("baseline    | cannot run it: ")
    assert said.endswith(
        f"the file for its key cannot be written in {tmp_path}/file/x: Not a directory"
    )
    assert lines.having("to mend it: set TMPDIR to a directory of this host that can be written")
    assert processes(mark) == []


def test_a_file_is_private(tmp_path: Path) -> None:
    """It is written anew over what is there, needs its folder to be ours alone, and goes with it."""
    file = SecretFile(f"{tmp_path}/x/sglang.yaml", "a: b\n")
    umask = os.umask(0)
    try:
        file.write()
    finally:
        os.umask(umask)
    path = Path(file.path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    file.write()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("a: b\n", 0o600)
    path.parent.chmod(0o755)
    with pytest.raises(FileExistsError, match="the file for its key cannot be written in"):
        file.write()
    path.parent.chmod(0o700)
    file.remove()
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A link in the place of the folder or of the file leads nowhere."""
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "x").symlink_to(tmp_path / "theirs")
    with pytest.raises(FileExistsError):
        SecretFile(f"{tmp_path}/x/sglang.yaml", "a: b\n").write()
    (tmp_path / "theirs" / "sglang.yaml").symlink_to(tmp_path / "elsewhere")
    SecretFile(f"{tmp_path}/theirs/sglang.yaml", "a: b\n").write()
    assert not (tmp_path / "elsewhere").exists()


def test_what_the_file_says(tmp_path: Path) -> None:
    """Keys are texts whatever they look like, and what is said twice is said by the arguments."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("api_key: old\nenable-metrics: true\ncuda-graph-bs: [1, 2]\n")
    flags: Flags = {"api-key": ("0x12\U0001f511: '",), "config": (str(mine),)}
    document = yaml.safe_load(secret_file("f", flags).text)
    assert document == {
        "enable-metrics": True,
        "cuda-graph-bs": [1, 2],
        "api-key": "0x12\U0001f511: '",
    }
    assert yaml.safe_load(secret_file("f", {"api-key": ("123",)}).text) == {"api-key": "123"}
    assert yaml.safe_load(secret_file("f", {}).text) == {}


def test_places() -> None:
    """Each launch has names of its own, one folder for each server."""
    one, other = places(), places()
    assert set(one) == set(Role)
    assert len({Path(name).parent for name in (*one.values(), *other.values())}) == 4


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_a_keeper_takes_the_file_away(tmp_path: Path, program: str) -> None:
    """A keeper removes the file and its folder when its command ends, and none of somebody else's."""
    file = SecretFile(f"{tmp_path}/x/sglang.yaml", "a: b\n")
    file.write()
    command = [sys.executable, "-I", "-S", str(KEEPER), REMOVE, file.path]
    with subprocess.Popen(
        [*command, sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE
    ) as keeper:
        assert keeper.wait(20) in {3, 137}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [None, "- 1\n", "a: {\n"])
def test_an_engine_with_a_file_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    """A simulated server does not start without its key when the file cannot be used."""
    file = tmp_path / "sglang.yaml"
    if text is not None:
        file.write_text(text)
    flags = ["engine", "--port", "0", "--role", "baseline", "--config", str(file)]
    result = CliRunner().invoke(loadtest_app, flags, env={"COLUMNS": "500", "TERM": "dumb"})
    assert result.exit_code == 2
    assert f"--config {file} cannot be used" in result.output
