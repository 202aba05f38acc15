"""What can be reached through the public listener, and what cannot: the admin's endpoints, an
engine's own, and addresses that a client or a backend names.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Iterator

import pytest

from router.load import ROLES
from tests.scripted_backend import Call, response
from tests.wire.stage import RecordingBackend, Stage, staged, statuses, talk

BODY = b'{"messages":[]}'
ADMIN = (b"metrics", b"status", b"decisions", b"events", b"policy", b"backends/baseline/drain", b"healthz",
         b"openapi.json", b"docs", b"redoc")  # fmt: skip
ENGINE = (b"flush_cache", b"abort_request", b"update_weights_from_disk", b"start_profile",
          b"release_memory_occupation", b"set_internal_state", b"open_session")  # fmt: skip
SPELLINGS = (
    b"/%b", b"/%b/", b"//%b", b"///%b", b"/./%b", b"/../%b", b"/v1/../%b", b"/v1/%%2e%%2e/%b",
    b"/v1/%%2E%%2E/%b", b"/v1/.%%2e/%b", b"/%%2f%b", b"/%%2F%b", b"/%b%%2f", b"/;/%b", b"/;x=y/%b",
    b"/%b;x", b"/%b%%3b", b"/%b?x=/v1/chat/completions", b"/%b%%3fx", b"/%b#x", b"/%b%%00",
    b"/%b%%20", b"/%b%%0a", b"/%b.json", b"\\%b", b"/\\%b", b"/v1\\..\\%b", b"/v1/%b", b"/admin/%b",
    b"/v1/models/../../%b", b"/v1/models/..%%2f..%%2f%b", b"/v1/chat/completions/../../../%b",
    b"/v1/chat/completions%%2f..%%2f..%%2f..%%2f%b", b"/v1/%%252e%%252e/%b", b"/%%c0%%af%b",
    b"/v1/\xc0\xae\xc0\xae/%b", b"/health/../%b", b"/api/tags/../../%b", b"*%b",
    b"http://127.0.0.1:ADMIN/%b", b"http://localhost:ADMIN/%b", b"HTTP://x/%b", b"http:///%b",
    b"https://user@127.0.0.1:ADMIN/%b", b"http://x/v1/../%b", b"http:/%b", b"ADMIN/%b",
)  # fmt: skip
HEADERS = (
    b"", b"x-original-url: /%b\r\n", b"x-rewrite-url: /%b\r\n", b"x-forwarded-prefix: /%b\r\n",
    b"x-http-method-override: GET\r\nx-forwarded-uri: /%b\r\n",
    b"forwarded: host=127.0.0.1:ADMIN\r\nx-forwarded-host: 127.0.0.1:ADMIN\r\n",
    b"x-forwarded-for: 127.0.0.1\r\nx-real-ip: 127.0.0.1\r\n",
)  # fmt: skip
HOSTS = (b"x", b"127.0.0.1:ADMIN", b"localhost:ADMIN", b"admin", b"[::1]:ADMIN", b"")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A router whose admin listener is open to read and whose key is known."""
    with staged(admin_key="sk-operator", telemetry_interval="50ms", ready_interval="50ms") as stage:
        yield stage


def pairs(names: tuple[bytes, ...]) -> Iterator[tuple[bytes, bytes]]:
    """Each name in each spelling."""
    for name, spelling in itertools.product(names, SPELLINGS):
        yield name, spelling % name
    for name in names:
        yield name, b"/" + name.upper()
        yield name, b"/" + b"".join(b"%%%02x" % byte for byte in name)
        yield name, b"/" + name.replace(b"a", b"%61").replace(b"e", b"%65")


def raw(method: bytes, target: bytes, more: bytes = b"", host: bytes = b"x") -> bytes:
    """One request with the operator's key, as if it had leaked."""
    line = b"%b %b HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n" % (method, target, host)
    body = BODY if method in {b"POST", b"PUT"} else b""
    key = b"authorization: Bearer sk-operator\r\n"
    return line + key + more + b"content-length: %d\r\n\r\n" % len(body) + body


async def ask_all(stage: Stage, asked: list[bytes]) -> list[bytes]:
    """The answers to all of these, a few at a time."""
    port = b"%d" % stage.stack.router.admin_port
    answers = []
    for at in range(0, len(asked), 16):
        some = (one.replace(b"ADMIN", port) for one in asked[at : at + 16])
        answers += await asyncio.gather(*(talk(stage, one) for one in some))
    return answers


def test_no_spelling_reaches_the_admin_listener(stage: Stage) -> None:
    """Dots, slashes, escapes, case, hosts, absolute targets and headers lead nowhere, key or not."""
    relay = stage.stack.relay
    policy = relay.policy
    asked = [raw(method, target) for method in (b"GET", b"POST") for _, target in pairs(ADMIN)]
    asked += [
        raw(b"GET", target, more % name if b"%b" in more else more, host)
        for name in (b"metrics", b"status")
        for target in (b"/" + name, b"/v1/nope", b"/v1/../" + name)
        for more in HEADERS
        for host in HOSTS
    ]

    async def work() -> None:
        for sent, got in zip(asked, await ask_all(stage, asked), strict=True):
            assert statuses(got) in ([404], [405], [400]), sent
            error = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
            assert error["type"] == "invalid_request_error"
            for word in (b"crossover_", b"in_flight", b"drained", b'"openapi"', b'"items"'):
                assert word not in got, sent
        assert relay.policy is policy
        assert not any(relay.health.status(role).drained for role in ROLES)
        assert len(relay.decisions) == 0  # an operator's change would stand there
        # An unknown model's name is looked up in the list, which is asked for by its own path.
        assert set(stage.reached) <= {(b"/v1/models", b"")}

    stage.run(work)


def test_no_spelling_reaches_an_engines_own_endpoints(stage: Stage) -> None:
    """What flushes, aborts, profiles or loads weights is not relayed, however it is written."""
    asked = [raw(method, target) for method in (b"POST", b"GET") for _, target in pairs(ENGINE)]

    async def work() -> None:
        for sent, got in zip(asked, await ask_all(stage, asked), strict=True):
            assert statuses(got) in ([404], [405], [400]), sent
        assert set(stage.reached) <= {(b"/v1/models", b"")}
        for backend in (stage.spec, stage.base):
            assert not [name for name in ENGINE if name in backend.seen]

    stage.run(work)


def test_the_admin_listener_relays_nothing(stage: Stage) -> None:
    """A request for tokens is not served there: it would be neither guarded by keys nor counted."""

    async def work() -> None:
        for target in (b"/v1/chat/completions", b"/", b"/api/tags", b"/generate", b"//v1/models",
                       b"http://x/v1/chat/completions", b"/v1/models", b"/flush_cache"):  # fmt: skip
            for method in (b"GET", b"POST"):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", stage.stack.router.admin_port
                )
                writer.write(raw(method, target))
                got = await asyncio.wait_for(reader.read(), 5)
                writer.close()
                # At / it has a page of its own, which an Ollama client's GET / is not for.
                own = {b"GET": 200, b"POST": 405} if target == b"/" else {}
                assert statuses(got) == [own.get(method, 404)], (method, target)
        assert stage.reached == []

    stage.run(work)


# ---------------------------------------------------------------------- addresses of others


@pytest.fixture
def victim() -> Iterator[socket.socket]:
    """A third party that listens. Who connects stands in its backlog."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def nobody_called(victim: socket.socket) -> None:
    """No connection was ever made to it."""
    with pytest.raises(BlockingIOError):
        victim.accept()


def test_no_address_of_a_clients_is_called(stage: Stage, victim: socket.socket) -> None:
    """Targets, hosts, headers and bodies that name a third party make the router connect nowhere."""
    where = b"127.0.0.1:%d" % victim.getsockname()[1]
    url, chat = b"http://" + where, b"/v1/chat/completions"
    names = (b"x-forwarded-host", b"x-crossover-backend", b"x-backend-url", b"origin", b"referer",
             b"location", b"x-original-url", b"via", b"from", b"forwarded")  # fmt: skip
    body = b'{"messages":[{"image_url":{"url":"%b/i.png"}}],"base_url":"%b"}' % (url, url)
    asked = [
        raw(b"POST", url + chat), raw(b"GET", url + b"/v1/models"), raw(b"CONNECT", where),
        raw(b"POST", b"//" + where + chat), raw(b"GET", b"/v1/models/" + url),
        raw(b"POST", chat + b"?url=" + url), raw(b"POST", chat, host=where),
        raw(b"GET", b"/v1/models", host=where),
        *(raw(b"POST", chat, b"%b: %b/\r\n" % (name, url)) for name in names),
        raw(b"POST", chat).replace(b"length: 15", b"length: %d" % len(body)).replace(BODY, body),
    ]  # fmt: skip

    async def work() -> None:
        for one in asked:
            await talk(stage, one)
        await asyncio.sleep(0.1)  # two polls and probes
        nobody_called(victim)
        # A body is the backend's to judge: it got it as it was.
        assert stage.reached[-1] == (chat, body)

    stage.run(work)


def test_no_redirect_of_a_backends_is_followed(victim: socket.socket) -> None:
    """A 307 goes back to the client as it is; probes, polls and lists do not follow one either."""
    where = f"127.0.0.1:{victim.getsockname()[1]}"

    class Redirecting(RecordingBackend):
        """Sends everyone, probes too, to the third party."""

        def _probe(self, path: bytes) -> bytes:
            return response(b"{}", "307 Temporary Redirect", self.line(path))

        def line(self, path: bytes) -> bytes:
            """Where to."""
            return f"location: http://{where}".encode() + path + b"\r\n"

    with staged(Redirecting, telemetry_interval="50ms", ready_interval="50ms") as stage:

        async def answer(call: Call) -> None:
            line = f"location: http://{where}/x\r\n".encode()
            await call.send(response(b"{}", "307 Temporary Redirect", line))

        async def work() -> None:
            got = await talk(stage, raw(b"POST", b"/v1/chat/completions"))
            assert statuses(got) == [307]
            assert f"location: http://{where}/x".encode() in got
            for path in (b"/v1/models", b"/server_info", b"/model_info", b"/v1/loads"):
                await talk(stage, raw(b"GET", path))
            await asyncio.sleep(0.1)
            nobody_called(victim)

        stage.run(work, answer)
        asked = stage.started + bytes(stage.spec.seen)
        for path in (b"/ready", b"/health", b"/v1/loads", b"/v1/models", b"/server_info"):
            assert b"GET " + path in asked
