"""`loadtest bench`: how its figures are read and shown, and that a small run measures them all."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
import uvloop

from loadtest.__main__ import main
from loadtest.bench import failed, run
from loadtest.bench_answers import ANSWER, CHUNK, STAMP, STAMP_SIZE, ending, stamped
from loadtest.bench_backend import Wanted, wanted
from loadtest.bench_cost import (
    BARE,
    DIRECT,
    ROUTER,
    Cost,
    Level,
    Machine,
    Row,
    Session,
    Usage,
    parse_cpu,
    parse_pss,
    parse_stat,
    parse_waited,
    percentile,
)
from loadtest.bench_load import Connection, Load, Streaming, request
from loadtest.bench_measure import Plan
from loadtest.bench_peers import NAMES
from loadtest.bench_process import check_platform
from loadtest.bench_stage import own_cores
from loadtest.bench_table import lines, notes, table

STAT = (
    "4711 (a) b (c)) S 1 4711 4700 0 -1 4194560 100 200 0 0 150 50 20 30 20 0 3 0 12345 99 1 2 3\n"
)
SMAPS = (
    "55d0-7ffd ---p 00000000 00:00 0  [rollup]\nRss:  90000 kB\nPss:   51200 kB\nPss_Anon: 7 kB\n"
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def machine(**more: Any) -> Machine:
    known: dict[str, Any] = {"cpu": "a processor", "cores": 2, "kernel": "6.1", "python": "3.11.7"}
    return Machine(**(known | {"uvloop": "0.21.0", "pinned": True, "load_average": 0.1} | more))


def level(**more: Any) -> Level:
    """250 streams with all the chunks that were due."""
    known = {"streams": 250, "interval_ms": 20, "chunk": None, "chunks_s": 12500.0, "answers": 9}
    return Level(**(known | {"waited": 0.01, "first_p50_us": 100.0, "first_p99_us": 900.0} | more))


def row(name: str, **more: Any) -> Row:
    return Row(name=name, version="1.0", machine=machine(), **more)


class FakeTransport(asyncio.Transport):
    """Remembers what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True


def connected(kind: Callable[[Load], Connection], load: Load) -> tuple[Connection, FakeTransport]:
    """A connection that has sent its first request."""
    connection, transport = kind(load), FakeTransport()
    connection.connection_made(transport)
    return connection, transport


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([7.0], 0.5, 7.0),
        ([7.0], 0.99, 7.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 101)), 1.0, 100),
    ],
)
def test_percentile(values: list[float], share: float, expected: float | None) -> None:
    """It is the smallest value that so large a share does not exceed."""
    assert percentile(values, share) == expected


def test_stat() -> None:
    """Session and times are found whatever the name holds, and ended children count."""
    assert parse_stat(STAT, 100) == (4700, Usage(1.7, 0.8))


def test_usage() -> None:
    """Times add up and are taken from each other by kind."""
    assert Usage(3.0, 2.0, 1.0) - Usage(1.0, 0.5) + Usage(0.5, 0.5, 0.5) == Usage(2.5, 2.0, 1.5)
    assert Usage(3.0, 2.0).total == 5.0


def test_waited() -> None:
    """The second number is the wait, in nanoseconds; a kernel without it says nothing."""
    assert parse_waited("900000 2500000000 77\n") == 2.5
    assert parse_waited("") == 0.0


def test_pss() -> None:
    """The line is the one called Pss, in bytes; a process that has ended holds nothing."""
    assert parse_pss(SMAPS) == 50 * 2**20
    assert parse_pss("") == 0


def test_cpu() -> None:
    """The name is in the first entry, or the architecture stands for it."""
    assert (
        parse_cpu("processor\t: 0\nmodel name\t: A Chip 9000\nmodel name\t: B\n") == "A Chip 9000"
    )
    assert parse_cpu("processor\t: 0\n") == os.uname().machine


@linux_only
def test_own_session() -> None:
    """Our own processes are found, and use time and memory."""
    session = Session(os.getsid(0))
    assert session.usage().total > 0.0
    assert session.memory_mb() > 1.0
    assert Session(-2).usage() == Usage()


def test_cost() -> None:
    """A cost is microseconds for each; of nothing there is none."""
    assert Cost.of(Usage(0.5, 1.5), 1_000_000) == Cost(2.0, 0.5)
    assert Cost.of(Usage(0.5, 1.5), 0) is None


def test_table_lines() -> None:
    """A line has each row's figure and last the router's over the bare relay's."""
    rows = [
        row(DIRECT, levels=[level()], connections=32, crowd=1000),
        row(
            BARE,
            request=Cost(20.0, 4.0),
            idle_mb=10.0,
            levels=[level(chunk=Cost(20.0, 4.0), added_p50_us=-3.0, added_p99_us=50.0)],
        ),
        row(
            ROUTER,
            request=Cost(50.0, 30.0),
            idle_mb=1234.0,
            levels=[level(chunk=Cost(30.0, 11.0), added_p50_us=9.0, added_p99_us=75.0)],
            errors={"stalled": 2, "connection lost": 1},
        ),
    ]
    shown = {name: cells for name, *cells in lines([rows])}
    assert shown["CPU per request, 32 at once, µs"] == [
        *("–", "20.0 (4.0 user)", "50.0 (30.0 user)", "2.50")  # noqa: RUF001
    ]
    chunk = shown["CPU per chunk, 250 x 20 ms, µs"]
    assert chunk[1:] == ["20.0 (4.0 user)", "30.0 (11.0 user)", "1.50"]
    assert shown["first chunk +p50, 250 x 20 ms, µs"][1:] == ["-3.0", "9.0", "–"]  # noqa: RUF001
    assert shown["first chunk +p99, 250 x 20 ms, µs"][1:] == ["50.0", "75.0", "1.50"]
    assert shown["memory when idle, MB"][1:] == ["10.0", "1,234", "123.40"]
    assert shown["errors"] == ["0", "0", "3", ""]
    assert table([rows]).row_count == len(shown)


def test_notes() -> None:
    """A load that fell behind, a core that was taken and every kind of error are said in words."""
    slow, hindered = level(chunks_s=9000.0), level(streams=64, waited=0.25)
    found = notes([[row(BARE, levels=[hindered, slow]), row(ROUTER, errors={"stalled": 2})]])
    assert "250 streams: only 9,000 chunks a second" in found[0]
    assert "64 streams: it waited 25% of the time" in found[1]
    assert found[2:] == [f"{ROUTER}: 2 x stalled"]


def test_rows_as_json() -> None:
    """A row can be read again as it was written."""
    written = row(ROUTER, request=Cost(50.0, 30.0), levels=[level()])
    assert msgspec.json.decode(msgspec.json.encode(written), type=Row) == written


def test_machine_in_words() -> None:
    """The machine's line says what the figures depend on."""
    assert "a core for the proxy" in str(machine())
    text = str(machine(pinned=False))
    assert "a processor, 2 cores (not pinned), Linux 6.1, Python 3.11.7, uvloop 0.21.0" in text


def test_sizes() -> None:
    """Requests, answers and chunks are about as large as real ones."""
    assert 1100 < len(request(64, 20)) < 1500
    assert 550 < len(ANSWER) < 650
    assert 240 < len(CHUNK) < 280


def test_request_as_the_servers_read_it() -> None:
    """What the load asks for is what the servers understand."""
    body = request(64, 20).partition(b"\r\n\r\n")[2]
    assert wanted(body) == Wanted(stream=True, max_tokens=64, user="20")
    assert wanted(request(1, stream=False).partition(b"\r\n\r\n")[2]).stream is False


def test_stream_in_pieces() -> None:
    """However an answer is cut, it is one answer with a chunk a token and one for the end."""
    answer = HEAD + CHUNK * 2 + ending(2)
    for size in (1, 7, len(CHUNK), len(answer)):
        load = Load(b"request", 2)
        connection, transport = connected(Streaming, load)
        for at in range(0, len(answer), size):
            connection.data_received(answer[at : at + size])
        assert (load.answers, load.chunks, len(load.first)) == (1, 3, 1), size
        assert not load.errors
        assert transport.written == [b"request"] * 2


def test_a_stamped_chunk_says_when_it_was_sent() -> None:
    """It is as long as the others to a few bytes, and is left out where the network parts its time."""
    chunk = stamped(1234.5)
    assert abs(len(chunk) - len(CHUNK)) < 16
    answer = HEAD + CHUNK + chunk + ending(2)
    place = answer.index(STAMP) + len(STAMP)
    for at in range(0, len(answer), 3):
        load = Load(b"request", 2)
        connection, _ = connected(Streaming, load)
        connection.data_received(answer[:at])
        connection.data_received(answer[at:])
        assert (load.answers, load.chunks, load.errors) == (1, 3, {})
        if place - len(STAMP) < at < place + STAMP_SIZE:
            assert load.later == []
        else:
            ((came, took),) = load.later
            assert came - took == pytest.approx(1234.5)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (HEAD + CHUNK + ending(2), "answer incomplete"),
        (HEAD + CHUNK * 2 + b"5\r\n\n\n\n\n\n\r\n0\r\n\r\n", "answer incomplete"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "HTTP/1.1 503 Busy"),
    ],
)
def test_bad_streams(answer: bytes, error: str) -> None:
    """A stream that lacks something or was refused is an error."""
    load = Load(b"request", 2)
    connection, transport = connected(Streaming, load)
    connection.data_received(answer)
    assert load.errors == {error: 1}
    assert load.answers == 0
    assert transport.closed


def test_whole_answers() -> None:
    """An answer is complete with its last byte; then the request is sent again."""
    load = Load(b"request")
    connection, transport = connected(Connection, load)
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n")
    connection.data_received(b"\r\nab")
    assert load.answers == 0
    connection.data_received(b"cd")
    assert load.answers == 1
    assert transport.written == [b"request"] * 2
    connection.data_received(b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n")
    assert load.errors == {"HTTP/1.1 500 Oh": 1}


def test_lost_connection() -> None:
    """A connection that ends by itself is an error; one that the load has closed is none."""
    for stopped in (False, True):
        load = Load(b"request")
        connection, _ = connected(Connection, load)
        load.stopped = stopped
        connection.connection_lost(None)
        connection.connection_lost(None)
        assert load.errors == ({} if stopped else {"connection lost": 1})


def test_other_platforms() -> None:
    """Where there is no /proc, one line says so."""
    check_platform("linux")
    with pytest.raises(typer.BadParameter, match="runs on Linux only"):
        check_platform("darwin")


@linux_only
def test_output_is_tried_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be written is refused before anything is measured."""
    assert main(["bench", "--out", str(tmp_path / "missing" / "rows.jsonl")]) == 2
    assert "rows.jsonl: No such file or directory" in capsys.readouterr().err


@linux_only
@pytest.mark.slow
def test_small_run() -> None:
    """A run of a few seconds measures everything without an error and leaves nothing behind."""
    plan = Plan(
        rounds=2, seconds=0.3, warm_seconds=0.05, tokens=8, interval_ms=10, requests=2, levels=(2, 3),
        crowd=4, crowd_interval_ms=50, crowd_seconds=0.1, idle_seconds=0.1, hang_ups=2,
    )  # fmt: skip
    steps: list[tuple[int, int]] = []
    cores = own_cores()
    children = _children()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(run(plan, lambda step, of, _: steps.append((step, of)), NAMES))
    assert (len(result.rounds), result.left_out, failed(result)) == (2, [], False)
    for rows in result.rounds:
        assert [row.name for row in rows] == [DIRECT, BARE, ROUTER]
    rows = result.rounds[1]
    assert [row.errors for row in rows] == [{}] * len(rows)
    for each in rows[1:]:
        data = msgspec.to_builtins(each)
        levels = data.pop("levels")
        assert [name for name, value in data.items() if value is None] == []
        assert [level["streams"] for level in levels] == [2, 3]
        assert [None in level.values() for level in levels] == [False, False]
    assert steps == [(step, len(steps)) for step in range(len(steps))]
    assert own_cores() == cores
    assert _children() == children


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
