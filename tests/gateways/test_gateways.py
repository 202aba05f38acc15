"""Short runs of the real gateways that are installed, with the configurations in deploy/gateways."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateways import failing, passing
from tests.gateways.__main__ import table
from tests.gateways.findings import Finding, events, text_of
from tests.gateways.fronts import Gateway, fitted, front, smg_flags
from tests.gateways.play import watched
from tests.gateways.site import chat, site
from tests.gateways.tap import tap
from tests.scripted_backend import event, scripted_backend
from tests.stack import run


def installed(name: str) -> Gateway:
    """The gateway, or a skip that says what is missing."""
    gateway = Gateway(name)
    if gateway.program is None:
        pytest.skip(f"{name} is not installed here (or named by {name.upper()} in the environment)")
    return gateway


def hold(found: list[Finding]) -> None:
    """Every finding that can be wrong is right."""
    assert [each for each in found if each.ok is False] == []


GATEWAYS = ["haproxy", "nginx", "smg"]
# The command on a machine on which nothing is installed.
NOWHERE = """
import typer
from tests.gateways import __main__ as command
from tests.gateways.fronts import Gateway
class Missing(Gateway):
    def __init__(self, name):
        super().__init__(name)
        self.program = None
command.Gateway = Missing
typer.run(command.main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", GATEWAYS)
def test_a_gateway_passes_everything_on_and_divides_the_work(name: str, tmp_path: Path) -> None:
    """What each side says comes through, both pairs get their share, who leaves ends its work."""
    gateway = installed(name)

    async def work() -> None:
        async with site(tmp_path) as pairs:
            found = await watched(gateway, pairs, tmp_path, listen_s=0.5)
            hold(found)
            if name != "smg":  # which writes an answer's head anew, and a body if it reads it
                said = {each.name: each.figure for each in found}
                assert said["request body"] == "the same bytes"
                assert said["answers"].startswith("the same bytes")
            async with front(gateway, pairs.urls, tmp_path) as made:
                hold([await passing.streams_whole(made, pairs, 8)])
                hold([await failing.shares(made, pairs, 48)])
                hold(await failing.client_leaves(made, pairs))

    run(work, 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", GATEWAYS)
def test_a_killed_pair_costs_what_ran_there_and_nothing_is_sent_twice(
    name: str, tmp_path: Path
) -> None:
    """Requests go to the other pair, none is sent to both, and the pair is used when it is back."""
    gateway = installed(name)

    async def work() -> None:
        async with site(tmp_path) as pairs, front(gateway, pairs.urls, tmp_path) as made:
            hold(await failing.pair_killed(made, pairs, 0.7))

    run(work, 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", GATEWAYS)
def test_nobody_notices_a_drained_pair(name: str, tmp_path: Path) -> None:
    """SIGTERM to a router under load breaks no stream and refuses no request."""
    gateway = installed(name)

    async def work() -> None:
        async with site(tmp_path) as pairs, front(gateway, pairs.urls, tmp_path) as made:
            hold([await failing.pair_drained(made, pairs, 0.5)])

    run(work, 50)


def test_the_addresses_in_the_committed_files_are_the_ones_that_are_replaced() -> None:
    """A run that left an address of the file as it was would try something else."""
    for name in ("haproxy.cfg", "nginx.conf"):
        text = fitted(name, 1234, ["http://127.0.0.1:1", "http://127.0.0.1:2"])
        lines = [line.strip() for line in text.splitlines() if not line.strip().startswith("#")]
        assert [line for line in lines if "pair1:" in line or ":8080" in line] == []
        assert sum("127.0.0.1:1 " in f"{line} " for line in lines) == 1
        assert sum("127.0.0.1:1234" in line for line in lines) == 1


def test_no_configuration_sends_a_request_again_that_a_pair_has_seen() -> None:
    """Retries are for connections that could not be made, in all three."""
    assert "--disable-retries" in smg_flags()
    haproxy = fitted("haproxy.cfg", 1, ["http://a:1", "http://b:1"])
    assert [line.split() for line in haproxy.splitlines() if "retry-on" in line] == [
        ["retry-on", "conn-failure"]
    ]
    nginx = fitted("nginx.conf", 1, ["http://a:1", "http://b:1"])
    told = [line.split() for line in nginx.splitlines() if "proxy_next_upstream " in line]
    assert told == [["proxy_next_upstream", "error", "timeout;"]]


def test_a_tap_changes_nothing_and_writes_down_what_passed() -> None:
    """A request and its chunked answer come through a tap, and stand in it without their framing."""

    async def work() -> None:
        async def answer(call: object) -> None:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            head += b"transfer-encoding: chunked\r\nx-own: 1\r\n\r\n"
            await call.send(head + event("a") + event("b") + b"0\r\n\r\n")  # type: ignore[attr-defined]

        async with scripted_backend(answer) as backend, tap(backend.port) as between:
            reader, writer = await asyncio.open_connection("127.0.0.1", between.port)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n"
            writer.write(head + b"{}")
            got = await reader.readuntil(b"0\r\n\r\n")
            writer.close()
            (post,) = between.posts()
            (told,) = between.answers
            assert (post.method, post.target, post.body) == ("POST", "/v1/chat/completions", b"{}")
            assert (told.status, told.header("x-own"), told.whole) == (200, "1", True)
            assert text_of(events(told.body)) == "ab"
            assert b"x-own: 1" in got

    run(work, 10)


def test_a_body_that_is_written_anew_is_told_from_one_that_is_changed() -> None:
    """Added defaults are said and accepted; a field that is gone or changed is wrong."""
    sent = b'{"a": 1, "b": [2]}'
    assert passing.body_finding(sent, sent).figure == "the same bytes"
    anew = passing.body_finding(sent, b'{"b":[2],"a":1,"logprobs":false}')
    assert anew.ok is True
    assert "adds logprobs=false" in anew.figure
    assert passing.body_finding(sent, b'{"a":1}').ok is False
    assert passing.body_finding(sent, b'{"a":2,"b":[2]}').ok is False


def test_the_table_marks_what_is_wrong() -> None:
    """A finding that does not hold stands out; one gateway's column is one gateway's."""
    columns = {"x 1": [Finding("a", "1", ok=True)], "y 2": [Finding("a", "2|3", ok=False)]}
    assert table(columns).splitlines()[-1] == "| a | 1 | **no**: 2/3 |"
    assert chat("p", 3, stream=True)["max_tokens"] == 3


@pytest.mark.parametrize(
    ("only", "code", "line"),
    [
        ("haproxy,traefik", 2, "gateways: not known: traefik; there are smg, haproxy, nginx"),
        ("nginx", 3, "gateways: nginx is not installed and left out"),
    ],
)
def test_what_cannot_be_run_is_one_line_with_its_exit_code(only: str, code: int, line: str) -> None:
    """A name that is not known and a gateway that is not there are told apart."""
    found = subprocess.run(
        [sys.executable, "-c", NOWHERE, "--only", only],
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert (found.returncode, found.stderr.splitlines()[-1]) == (code, line)
