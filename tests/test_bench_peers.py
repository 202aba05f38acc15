"""The peers of `loadtest bench`: their files are valid, and one that fails is left out in words."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
import typer

from loadtest.bench import check_peers, failed, save
from loadtest.bench_cost import BARE, DIRECT, ROUTER, Cost, Machine, Result, Row
from loadtest.bench_peers import (
    NAMES,
    PEERS,
    Peer,
    Place,
    find,
    free_ports,
    missing,
    version,
)
from loadtest.bench_peers import failed as did_not_start
from loadtest.bench_stage import Stage
from loadtest.bench_table import lines, references
from loadtest.children import Children

MACHINE = Machine(
    cpu="a processor", cores=2, kernel="6.1", python="3.11.7", uvloop="0.21.0", pinned=True,
    load_average=0.1,
)  # fmt: skip
SMG = next(peer for peer in PEERS if peer.name == "smg")


def place(directory: Path) -> Place:
    port, spare, one, other = free_ports(4)
    return Place(port=port, servers=(one, other), directory=directory, spare=spare)


def row(name: str, microseconds: float, **errors: int) -> Row:
    cost = Cost(microseconds, 1.0) if microseconds else None
    return Row(name=name, version="1", machine=MACHINE, request=cost, errors=errors)


@pytest.mark.parametrize(("name", "check"), [("nginx", ["-t"]), ("haproxy", ["-c"])])
def test_configuration_is_accepted(name: str, check: list[str], tmp_path: Path) -> None:
    """The program itself finds no fault in the file that is written for it."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    peer = next(peer for peer in PEERS if peer.name == name)
    here = place(tmp_path)
    for file, text in peer.files(here).items():
        (tmp_path / file).write_text(text)
        assert str(here.port) in text
        assert all(str(port) in text for port in here.servers)
    command = [program, *peer.arguments(here), *check]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr + said.stdout
    assert version(peer, program).count(".") >= 1


def test_arguments_name_both_servers(tmp_path: Path) -> None:
    """A router without a file is told its port, and both servers by address."""
    here = place(tmp_path)
    for peer in PEERS[2:]:
        words = peer.arguments(here)
        assert words[words.index("--port") + 1] == str(here.port)
        assert words[words.index("--worker-urls") + 1 :][:2] == here.urls()


def test_found_by_variable_or_path(tmp_path: Path) -> None:
    """The environment's file comes before PATH; what cannot be run is not found, and both are said."""
    program = tmp_path / "smg"
    program.write_text("#!/bin/sh\necho smg 1.2.3\n")
    assert find(SMG, {"SMG": str(program), "PATH": ""}) is None
    assert f"SMG={program} is not a program" in missing(SMG, {"SMG": str(program)})
    program.chmod(0o755)
    assert find(SMG, {"SMG": str(program), "PATH": ""}) == str(program)
    assert find(SMG, {"PATH": str(tmp_path)}) == str(program)
    assert find(SMG, {"PATH": ""}) is None
    assert missing(SMG, {}) == "smg left out: not on PATH, and SMG does not name its file"
    assert version(SMG, str(program)) == "1.2.3"
    assert version(SMG, str(tmp_path / "absent")) == ""


def test_failed_in_words() -> None:
    """The line has the last that the program printed."""
    assert did_not_start(SMG, "/x/smg", "it ended", "one\nno port\n") == (
        "smg left out: /x/smg did not start: it ended (no port)"
    )
    assert did_not_start(SMG, "/x/smg", "it ended", "").endswith("(it printed nothing)")


async def _started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho cannot bind >&2\nexit 3\n")
    program.chmod(0o755)
    broken = Peer(
        name="broken", variable="BROKEN", arguments=lambda _: [], version=lambda file: [file]
    )
    absent = msgspec.structs.replace(broken, name="absent-peer", variable="ABSENT_PEER")
    unwanted = msgspec.structs.replace(broken, name="unwanted")
    monkeypatch.setattr("loadtest.bench_stage.PEERS", (broken, absent, unwanted))
    monkeypatch.setenv("BROKEN", str(program))
    monkeypatch.delenv("ABSENT_PEER", raising=False)
    from loadtest.bench_stage import own_cores, pin

    cores = own_cores()
    with Children(tmp_path) as children:
        stage = Stage(children, tmp_path)
        try:
            targets = await stage.start(["unwanted"])
        finally:
            pin(0, cores)
    return [target.row.name for target in targets], stage.left_out


@pytest.mark.slow
def test_broken_peer_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that ends at once or is missing costs a line, and the rest is measured."""
    import asyncio

    names, left_out = asyncio.run(_started(tmp_path, monkeypatch))
    assert names == [DIRECT, BARE, ROUTER]
    assert len(left_out) == 2
    assert left_out[0].startswith("broken left out: ")
    assert left_out[0].endswith("program did not start: it ended (cannot bind)")
    assert left_out[1].startswith("absent-peer left out: not on PATH")


def test_medians_ranges_and_ratios() -> None:
    """Of several rounds a figure is median and range, and a ratio is the median of ratios."""
    rounds = [
        [row(BARE, bare), row(ROUTER, router), row("smg", smg)]
        for bare, router, smg in ((10.0, 20.0, 100.0), (20.0, 60.0, 200.0), (10.0, 25.0, 100.0))
    ]
    cells = {name: found for name, *found in lines(rounds)}["CPU per request, 0 at once, µs"]
    assert cells[:3] == ["10.0 (10.0 to 20.0)", "25.0 (20.0 to 60.0)", "100 (100 to 200)"]
    assert cells[3:] == ["2.50", "0.25"]
    assert references(rounds[0]) == [BARE, "smg"]


def test_ratio_without_figures() -> None:
    """A round that lacks one of the two figures has no part in a ratio."""
    rounds = [[row(BARE, 0), row(ROUTER, 20.0)], [row(BARE, 10.0), row(ROUTER, 40.0)]]
    assert lines(rounds)[0][1:] == ["10.0 (10.0 to 10.0)", "30.0 (20.0 to 40.0)", "4.00"]
    assert lines(rounds[:1])[0][-1] == "–"  # noqa: RUF001


def test_errors_of_peers_are_shown() -> None:
    """Errors of all rounds are added in the table; only ours make the run a failed one."""
    result = Result(rounds=[[row(ROUTER, 1.0), row("smg", 1.0, stalled=2)]] * 2)
    assert lines(result.rounds)[-1][:3] == ["errors", "0", "4"]
    assert not failed(result)
    assert failed(Result(rounds=[[row(ROUTER, 1.0, stalled=1)]]))


def test_saved(tmp_path: Path) -> None:
    """One file holds every round and what was left out, the other a line for each column."""
    result = Result(rounds=[[row(BARE, 1.0)], [row(BARE, 2.0)]], left_out=["smg left out: why"])
    save(result, tmp_path / "lines", tmp_path / "json")
    assert msgspec.json.decode((tmp_path / "json").read_bytes(), type=Result) == result
    assert len((tmp_path / "lines").read_bytes().splitlines()) == 2


def test_unknown_peer() -> None:
    """A name that is no peer's is refused with those that are."""
    check_peers(NAMES)
    with pytest.raises(typer.BadParameter, match="nginx, haproxy, smg, vllm-router"):
        check_peers(["envoy"])
