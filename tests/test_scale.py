"""`loadtest scale`: that what it counts is right, and that a small run measures every part."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path

import msgspec
import pytest

from loadtest.__main__ import main
from loadtest.bench_cost import Machine
from loadtest.bench_load import LENGTH
from loadtest.scale import QUICK
from loadtest.scale_backend import Sent, Server, event, flood
from loadtest.scale_load import Whole, flood_digest, flood_request, large_request
from loadtest.scale_table import Bodies, Crowd, Decided, Gaps, Scale, lines, notes

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
GAPS = Gaps(50.0, 60.0, 70.0)


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.paused = self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def crowd(**more: float) -> Crowd:
    known = {"streams": 5000, "interval_ms": 50, "asked_s": 1e5, "sent_s": 1e5, "delivered_s": 3e4}
    known |= {
        "core": 0.99,
        "load_core": 0.9,
        "waited": 0.0,
        "memory_mb": 200,
        "broken": 0,
        "stalled": 0,
    }
    return msgspec.convert(known | {"per_stream_kb": 30.0, "gaps": GAPS} | more, Crowd)


def whole(answer: bytes) -> tuple[int, str]:
    """What a slow reader says of an answer that comes in pieces and then ends."""

    async def read() -> tuple[int, str]:
        client, wire = Whole(b"request", slow=True), Wire()
        client.connection_made(wire)
        for at in range(0, len(answer), 5000):
            client.data_received(answer[at : at + 5000])
        client.connection_lost(None)
        return await client.done

    return asyncio.run(read())


def test_flood_is_checked_by_its_bytes() -> None:
    """A flood is read as whole; one that lacks an event, has two exchanged or is cut is not."""
    chunks = list(flood(20))
    good = (200, flood_digest(20))
    assert whole(HEAD + b"".join(chunks)) == good
    assert whole(HEAD + b"".join(chunks[:7] + chunks[8:])) != good
    assert whole(HEAD + b"".join([chunks[1], chunks[0], *chunks[2:]])) != good
    assert whole(HEAD + b"".join(chunks)[:-5])[0] == 0
    assert len(f"data: {event(3)}\n\n") == 1024


def test_slow_reader_pauses() -> None:
    """A slow reader stops to read after so many bytes, and goes on by itself."""

    async def read() -> None:
        client, wire = Whole(b"request", slow=True), Wire()
        client.connection_made(wire)
        client.data_received((HEAD + b"".join(flood(100)))[:70_000])
        assert wire.paused
        while wire.paused:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(read(), 5))


def test_server_pours_as_it_is_taken_and_counts_large_bodies() -> None:
    """The server stops when the other side is full, sends the same bytes then, and keeps no body."""

    async def serve() -> None:
        server, wire = Server(Sent()), Wire()
        server.connection_made(wire)
        server.pause_writing()
        server.data_received(flood_request(150))
        assert b"data:" not in wire.written
        server.resume_writing()
        body = wire.written.partition(b"\r\n\r\n")[2]
        assert hashlib.sha256(body).digest() == hashlib.sha256(b"".join(flood(150))).digest()
        wire.written = b""
        data = large_request(2**21)
        for at in range(0, len(data) - 1, 99_999):
            server.data_received(data[at : min(at + 99_999, len(data) - 1)])
        assert wire.written == b""
        server.data_received(data[-1:])
        assert wire.written.startswith(b"HTTP/1.1 200 OK")

    asyncio.run(serve())


def test_large_request_says_its_length() -> None:
    """A large request has the size that was asked for, and its head says it."""
    head, _, body = large_request(10_000).partition(b"\r\n\r\n")
    found = LENGTH.search(head)
    assert found is not None
    assert int(found[1]) == len(body)
    assert 9_900 < len(body) < 10_200


def test_notes_say_who_was_full() -> None:
    """A full router, servers that could not keep up and another program's load are told apart."""
    machine = Machine(
        cpu="a", cores=2, kernel="6", python="3", uvloop="0", pinned=True, load_average=0.1
    )
    scale = Scale(machine=machine, version="1", start_ms=[900.0], ready_ms=[950.0])
    scale.crowds = [crowd(), crowd(core=0.5, sent_s=5e4), crowd(core=0.5, waited=0.3)]
    scale.bodies = Bodies(
        bodies=2, total_mb=20, seconds=1, answered=1, above_rest_mb=10, ratio=0.5,
        beside=Gaps(20, 30, 42), direct=Gaps(20, 25, 30),
    )  # fmt: skip
    scale.decided = Decided(few=10, few_us=1.0, many=5000, many_us=1.5)
    scale.errors = {"stalled": 2}
    said = notes(scale)
    assert [("router's core is full" in note, "servers' core" in note) for note in said[:2]] == [
        (True, False),
        (False, True),
    ]
    assert "waited 30% of the time" in said[2]
    assert said[3:] == ["2 x stalled"]
    table = {line[0].strip(): line[1:] for line in lines(scale)}
    assert table["longest pause, above the longest without"] == ("12", "<= 15")
    assert table["ratio of the two"] == ("1.50", "")
    assert table["errors"] == ("2", "0")


@linux_only
def test_output_is_tried_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be written is refused before anything is measured."""
    assert main(["scale", "--json", str(tmp_path / "missing" / "scale.json")]) == 2
    assert "scale.json: No such file or directory" in capsys.readouterr().err


@linux_only
@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    """A quick run ends with 0: every part is measured, no stream broke, no byte was lost."""
    file = tmp_path / "scale.json"
    assert main(["scale", "--quick", "--json", str(file)]) == 0
    found = msgspec.json.decode(file.read_bytes(), type=Scale)
    assert found.errors == {}
    assert [(each.streams, each.interval_ms) for each in found.crowds] == list(QUICK.levels)
    assert [(each.broken, each.stalled) for each in found.crowds] == [(0, 0), (0, 0)]
    assert all(each.delivered_s > 0 and each.memory_mb > 0 for each in found.crowds)
    assert found.slow is not None
    assert (found.slow.readers, found.slow.lost) == (QUICK.readers, 0)
    assert found.bodies is not None
    assert found.bodies.answered == QUICK.bodies
    assert found.admin is not None
    assert None not in msgspec.to_builtins(found.admin).values()
    assert found.admin.scraped.p99 is not None
    assert found.decided is not None
    assert len(found.start_ms) == len(found.ready_ms) == 4
