"""Nobody writes into the log or grows the metrics: a line is one JSON object, a series is ours."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest

from router.access_log import line_of
from router.exposition import create_registry
from router.metrics import Finished, Outcome
from tests.process import router_process
from tests.scripted_backend import Call, response
from tests.stack import run
from tests.wire.stage import Client, Stage, recording_backend, staged, statuses

BODY = b'{"messages":[]}'
EVIL = (
    b"a\nb", b"a\r\nb", b"a\rb", b"a\x85b", b"\x1b[31mred\x1b[0m", b"\x9b31m", b"\0", b"\x07", b"\x7f",
    b'"}\n{"level":"error"}', b'","outcome":"ok","x":"', b"\\", b"\\n", b"%0a%0d", b"${jndi:ldap://x}",
    b"{}", b"{0}", b"%s%n", "\u2028\u2029".encode(), "\u202e".encode(), b"\xff\xfe", b"x" * 129,
    b"x" * 10_000, b"x" * 40_000, b"", b" ", b"\t", b"<script>",
)  # fmt: skip
HOSTILE = st.text() | st.sampled_from([evil.decode("latin-1") for evil in EVIL])
SAFE = re.compile(rb"[\x20-\x7e]*")  # what can do nothing in a terminal


@given(
    request_id=HOSTILE,
    error=st.none() | HOSTILE,
    replay=st.none() | HOSTILE,
    route=HOSTILE,
    numbers=st.tuples(st.integers(0, 2**63), st.floats(0, 1e9)),
)
def test_a_line_is_one_object_whatever_is_in_it(
    request_id: str, error: str | None, replay: str | None, route: str,
    numbers: tuple[int, float],
) -> None:  # fmt: skip
    """Every text of a record stays inside its own string, and an id inside ASCII."""
    count, seconds = numbers
    line = line_of(
        Finished(
            request_id, route, None, None, 0, 0, None, 200, Outcome.OK, False,
            0.0, None, None, None, seconds, 0.0, count, 0, 0, None, None, replay, error,
        ),
        "2026-01-01T00:00:00.000Z",
    )  # fmt: skip
    assert b"\n" not in line
    assert b"\r" not in line
    found = json.loads(line)
    assert (found["route"], found["error"], found["replay"]) == (route, error, replay)
    assert (found["level"], found["event"], found["outcome"]) == ("info", "request", "ok")
    assert found["request_id"].isascii()
    assert len(found["request_id"]) <= 128 * 10
    assert len(found) == 24


def lines_with(evil: bytes) -> list[bytes]:
    """Requests that carry one value wherever something of a request might be logged."""
    quoted = json.dumps(evil.decode("latin-1")).encode()
    bodies = (b'{"model":%b}' % quoted, b"{%b:1}" % quoted, evil)
    sent = []
    for name in (b"x-request-id", b"user-agent", b"x-crossover-backend", b"origin", b"host", b"expect",
                 b"content-type", b"traceparent", b"authorization", b"x-forwarded-for"):  # fmt: skip
        host = b"" if name == b"host" else b"host: x\r\n"
        head = b"POST /v1/chat/completions HTTP/1.1\r\n" + host + name + b": " + evil
        sent.append(head + b"\r\nconnection: close\r\ncontent-length: 15\r\n\r\n" + BODY)
    for body in bodies:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        sent.append(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    end = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    targets = (b"GET /%b", b"GET /v1/models/%b", b"GET /v1/loads?include=%b", b"%b /")
    return sent + [line % evil + end for line in targets]


async def echoing(call: Call) -> None:
    """A backend that hands a hostile status line, header and error of its own back."""
    evil = b"\x1b[31m" + b"x" * 50
    body = b'{"error":{"message":"\\u001b[31m\\n","code":"' + b"y" * 5000 + b'"}}'
    await call.send(response(body, "500 Oops", b"x-evil: " + b"z" * 100 + b"\r\n"))
    await call.send(evil)  # bytes that nobody asked for


@pytest.mark.slow
def test_nobody_writes_lines_of_their_own() -> None:
    """Newlines, escapes, NUL and huge values in everything that comes in: one object a line, ASCII."""
    seen: list[bytes] = []

    async def send(port: int, raw: bytes) -> int:
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        client.writer.write(raw)
        try:
            found = statuses(await asyncio.wait_for(client.rest(), 2))
        finally:
            client.writer.close()
        return found[0] if found else 0

    async def work() -> None:
        async with recording_backend() as spec, recording_backend() as base:
            spec.answer = base.answer = echoing
            flags = ("--log-level", "debug", "--allow-pinning", "--breaker-failures", "1000000")
            with router_process(spec.url, base.url, *flags) as router:
                asked = [raw for evil in EVIL for raw in lines_with(evil)]
                found = set()
                for raw in asked:
                    found.add(await send(router.port, raw))
                assert {200, 400, 404, 414, 417, 431, 500} <= found
            seen.append(router.log)

    run(work, 40)
    log = seen[0]
    lines = log.split(b"\n")
    assert lines.pop() == b""
    requests = 0
    for line in lines:
        assert SAFE.fullmatch(line)
        entry = json.loads(line)
        assert {"timestamp", "level", "event"} <= set(entry)
        if entry["event"] == "request":
            requests += 1
            assert re.fullmatch(r"[A-Za-z0-9._:\-]{1,128}", entry["request_id"])
            assert entry["route"] in {"chat_completions", "completions", "root", "other"}
            assert len(line) < 1000
    assert requests > 5 * len(EVIL)


# ---------------------------------------------------------------------- metrics


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A router as it comes."""
    with staged() as stage:
        yield stage


def series(stage: Stage) -> set[bytes]:
    """The names and labels of everything that is exported, without the values."""
    relay = stage.stack.relay
    text = generate_latest(create_registry(relay.metrics, relay))
    return {line.rpartition(b" ")[0] for line in text.splitlines() if not line.startswith(b"#")}


def batch(dice: random.Random, size: int) -> bytes:
    """Pipelined requests with names that nobody saw before: models, paths, ids, headers."""
    sent = []
    for _ in range(size):
        name = b"%x" % dice.getrandbits(64)
        body = b'{"model":"%b","messages":[]}' % name
        line = b"host: x\r\nx-request-id: %b\r\nx-%b: 1\r\nuser-agent: %b\r\n" % (name, name, name)
        sent += [
            b"POST /v1/chat/completions HTTP/1.1\r\n" + line
            + b"content-length: %d\r\n\r\n" % len(body) + body,
            b"%b /%b?%b HTTP/1.1\r\n" % (dice.choice([b"GET", b"POST", b"PUT"]), name, name)
            + line + b"\r\n",
        ]  # fmt: skip
    return b"".join(sent)


@pytest.mark.slow
def test_ten_thousand_names_make_no_series(stage: Stage) -> None:
    """Random models, paths, ids and headers leave the series as they were after the first of each."""
    dice = random.Random(11)
    size, rounds = 50, 100  # 2 * 50 * 100 requests
    relay = stage.stack.relay

    async def answer(call: Call) -> None:
        await call.send(response(b'{"model":"%b"}' % call.headers[b"x-request-id"]))

    async def ask(client: Client) -> None:
        client.writer.write(batch(dice, size))
        for _ in range(2 * size):
            await client.answer()

    async def work() -> None:
        client = await Client.of(stage)
        await ask(client)
        before = series(stage)
        for _ in range(rounds - 1):
            await ask(client)
        assert series(stage) == before
        assert len(before) < 1000
        total = sum(relay.metrics.requests.values())
        assert total == size * rounds  # what the router only answers 404 is no request for tokens
        assert len(stage.spec.calls) == size * rounds
        assert len(relay.decisions) == 1000
        client.writer.close()

    stage.run(work, answer)
