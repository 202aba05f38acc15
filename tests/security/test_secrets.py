"""Secrets that a client sends go nowhere: not to a backend, a log, a metric or an error.

A router process at its most talkative level, requests of every kind with a secret in each place
that has one, and then everything that came out of it is searched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator

import pytest
import structlog

from router.headers import CREDENTIALS
from router.logs import CHATTY, UVICORN, LineWriter, configure_logging
from tests.process import RouterProcess, router_process
from tests.scripted_backend import STREAM_HEAD, Call, event, response
from tests.stack import run
from tests.wire.stage import Client, Exploding, recording_backend, staged, statuses, talk

CLIENT_KEY, BACKEND_KEY, ADMIN_KEY = "sk-of-the-client", "sk-of-the-backend", "sk-of-the-operator"
SECRET = b"canary"  # in everything below that nobody but the router may see
PLAIN = b"ordinary-value"  # in a header that a backend may see, and a log may not
PROMPT = b"a-private-prompt"
QUERY = b"?api_key=canary&key=canary&access_token=canary#canary"
OTHERS = (
    b"x-goog-api-key", b"ocp-apim-subscription-key", b"x-auth-token", b"x-access-token",
    b"x-amz-security-token", b"x-forwarded-access-token", b"helicone-auth", b"x-client-secret",
    b"cookie2", b"x_api_key", b"api_key",
)  # fmt: skip
# What the proxies and libraries in front of a router are known to send credentials in.
AUTHORIZATION = b"authorization: Bearer canary\r\n"
SENT = [
    *(b"%b: canary-%b\r\n" % (name, name) for name in sorted(CREDENTIALS - {b"authorization"})),
    b"proxy-authorization: Basic canary\r\n",
    *(b"%b: canary-%b\r\n" % (name, name) for name in OTHERS),
]
EVERY = b"".join(SENT)
MODEL = b"a-private-model"
BODY = b'{"model":"' + MODEL + b'","messages":[{"role":"user","content":"' + PROMPT + b'"}]}'
STREAM = BODY[:-1] + b',"stream":true}'


def request(
    target: bytes = b"/v1/chat/completions",
    body: bytes = BODY,
    secret: bytes = b"",
    *,
    method: bytes = b"POST",
    key: str = CLIENT_KEY,
    version: bytes = b"HTTP/1.1",
) -> bytes:
    """One request with a secret in its query and in one more header, and its connection's last."""
    head = b"%b %b%b %b\r\nhost: x\r\nconnection: close\r\nx-plain: %b\r\n%b%b" % (
        method, target, QUERY, version, PLAIN, secret,
        b"" if secret.startswith(b"authorization") else b"authorization: Bearer %b\r\n" % key.encode(),
    )  # fmt: skip
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def all_kinds() -> list[bytes]:
    """Requests that are answered, refused, broken and cut, each with secrets."""
    every = EVERY
    kinds = [request(secret=secret) for secret in (*SENT, AUTHORIZATION)]
    kinds += [request(b"/v1/messages", secret=secret) for secret in (*SENT, AUTHORIZATION)]
    kinds += [request(target, secret=every) for target in (b"/v1/completions", b"/generate")]
    for target in (b"/v1/models", b"/v1/models/m", b"/v1/loads", b"/server_info", b"/health",
                   b"/nope", b"/metrics", b"/", b"/v1/responses/x"):  # fmt: skip
        kinds.append(request(target, b"", every, method=b"GET"))
    kinds += [
        request(body=STREAM, secret=every),
        request(body=b"canary" + BODY, secret=every),
        request(body=b'{"model":"fail"}', secret=every),
        request(body=b'{"model":"lost"}', secret=every),
        request(body=b'{"model":"bad"}', secret=every),
        request(b"/v1/responses", b'{"previous_response_id":"canary"}', every),
        request(secret=every, key="canary-wrong"),
        request(secret=every, method=b"PUT"),
        request(secret=every, method=b"TRACE"),
        request(secret=every, version=b"HTTP/2.0"),
        request(secret=every + b"host: canary\r\n"),
        request(secret=every + b"x-crossover-backend: canary\r\n"),
        request(secret=every + b"expect: canary\r\n"),
        request(secret=every + b"transfer-encoding: canary\r\n"),
        request(secret=every + b"content-length: canary\r\n"),
        request(secret=every + b"x-request-id: canary \x7f\r\n"),
        request(secret=every + b"x: " + b"canary" * 10_000 + b"\r\n"),
        request(b"/" + b"canary" * 2_000, secret=every),
        request(b"http://canary:canary@canary/v1/completions", secret=every),
        request(secret=every + b"no colon canary\r\n"),
        request(secret=every)[:-5],
        request(secret=every)[:200],
    ]
    return kinds


def to_the_admin() -> list[bytes]:
    """Requests to the admin listener, with its key and without."""
    key = b"authorization: Bearer %b\r\n" % ADMIN_KEY.encode()
    sent = []
    for auth in (key, b"authorization: Bearer canary\r\n", b""):
        for line, body in (
            (b"GET /decisions?limit=canary&api_key=canary", b""),
            (b"GET /status?api_key=canary", b""),
            (b"GET /canary", b""),
            (b"POST /policy?api_key=canary", b'{"policy":"canary"}'),
            (b"POST /policy", b'{"policy":"baseline","canary":"canary"}'),
            (b"POST /policy", b"canary"),
            (b"POST /backends/canary/drain", b""),
            (b"POST /v1/chat/completions", BODY),
        ):
            head = line + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + auth + EVERY
            sent.append(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    return sent


async def answer(call: Call) -> None:
    """A backend that does what the model's name says."""
    if b'"fail"' in call.body:
        await call.send(response(b'{"error":"internal"}', "500 Internal Server Error"))
    elif b'"lost"' in call.body:
        call.reset()
    elif b'"bad"' in call.body:
        await call.send(b"HTTP/1.1 canary\r\n\r\n")
    elif b'"stream"' in call.body:
        await call.send(STREAM_HEAD + event("a") + b"0\r\n\r\n")
    else:
        await call.send(response())


async def ask(port: int, raw: bytes) -> bytes:
    """What comes back; a request that is not whole is given up after a moment."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Client(reader, writer)
    writer.write(raw)
    try:
        return await asyncio.wait_for(client.rest(), 0.3)
    except TimeoutError:
        return b""
    finally:
        writer.close()


async def shown(router: RouterProcess) -> bytes:
    """All that an operator can see."""
    head = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer "
    pages = (b"/metrics", b"/status", b"/decisions?limit=1000", b"/openapi.json")
    asked = (b"GET " + page + head + ADMIN_KEY.encode() + b"\r\n\r\n" for page in pages)
    return b"".join([await ask(router.admin_port, raw) for raw in asked])


def test_what_a_client_keeps_secret_stays_secret() -> None:
    """In no header, query, key or body: not seen by a backend, in a log, a metric or an error."""
    everything: dict[str, bytes] = {}
    ports: list[bytes] = []

    async def work() -> None:
        async with recording_backend() as spec, recording_backend() as base:
            spec.answer = base.answer = answer
            keys = ("--api-keys", CLIENT_KEY, "--backend-api-key", BACKEND_KEY,
                    "--admin-key", ADMIN_KEY, "--allow-pinning", "--log-level", "debug")  # fmt: skip
            with router_process(spec.url, base.url, *keys) as router:
                answers = [await ask(router.port, raw) for raw in all_kinds()]
                admin = [await ask(router.admin_port, raw) for raw in to_the_admin()]
                everything["admin"] = await shown(router)
                everything["answers"] = b"".join(answers + admin)
                everything["backend"] = bytes(spec.seen + base.seen)
                found = {s for a in answers + admin for s in statuses(a)}
                assert found == {
                    200, 400, 401, 404, 405, 414, 417, 422, 431, 500, 502, 503, 505
                }  # fmt: skip
            everything["log"] = router.log
            ports.extend(b"%d" % backend.port for backend in (spec, base))

    run(work, 40)
    backend, log = everything["backend"], everything["log"]
    for place, text in everything.items():
        # A path and a bad value of an operator's own are said back to who sent them, nobody else.
        for word in (CLIENT_KEY.encode(), ADMIN_KEY.encode()):
            assert word not in text, place
    assert SECRET not in backend
    assert SECRET not in log
    assert SECRET not in everything["admin"]
    assert SECRET not in everything["answers"]
    # The search finds what is there: a plain header and the prompt reach a backend, with its key.
    assert PLAIN in backend
    assert PROMPT in backend
    assert b"authorization: Bearer " + BACKEND_KEY.encode() in backend
    for word in (PLAIN, PROMPT, MODEL, BACKEND_KEY.encode()):
        assert word not in log + everything["admin"] + everything["answers"]
    # Of addresses there are the backends', in lines on the start and the pair, and no client's.
    assert set(re.findall(rb"127\.0\.0\.1:(\d+)", log)) == set(ports)
    assert len(log.splitlines()) > len(all_kinds())
    assert all(isinstance(json.loads(line), dict) for line in log.splitlines())


# ---------------------------------------------------------------------- when the router itself fails


@pytest.fixture
def logging_kept() -> Iterator[None]:
    """Logging as it was, afterwards."""
    loggers = [logging.getLogger(name) for name in (None, *UVICORN, *CHATTY)]
    kept = [(one.handlers[:], one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, kept, strict=True):
        one.handlers, one.level, one.propagate = handlers, level, propagate
    logging.captureWarnings(False)
    structlog.reset_defaults()


@pytest.mark.usefixtures("logging_kept")
def test_a_traceback_tells_no_secret() -> None:
    """A fault of ours in the relay and in an ordinary route is logged whole, without a value."""
    lines: list[bytes] = []
    writer = LineWriter(lines.append)
    got: list[bytes] = []

    with staged(api_keys=CLIENT_KEY) as stage:
        configure_logging("debug", writer)
        sound = stage.stack.relay.policy
        health = stage.stack.relay.health

        async def work() -> None:
            stage.stack.relay.policy = Exploding()  # type: ignore[assignment]
            got.append(await talk(stage, request(secret=EVERY)))
            stage.stack.relay.health = Exploding()  # type: ignore[assignment]
            got.append(await talk(stage, request(b"/health", b"", EVERY, method=b"GET")))
            stage.stack.relay.policy, stage.stack.relay.health = sound, health

        stage.run(work)
    writer.close()
    log = b"".join(lines)
    assert [statuses(answer) for answer in got] == [[500], [500]]
    assert log.count(b"ZeroDivisionError: planted") >= 2
    for word in (SECRET, PLAIN, PROMPT, CLIENT_KEY.encode()):
        assert word not in log
        assert word not in b"".join(got)
    assert all(isinstance(json.loads(line), dict) for line in log.splitlines())
