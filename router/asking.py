"""One GET to a backend, bounded in time and size: what everyone who watches the pair asks with.

`Ask` is the seam between them and the wire: a path and seconds in, a `Reply` or a `NoReply` out, and
never an exception. The watchers of a serving router ask over `router.pool_client`; the doctor's and
the load test's commands, and the tests with a transport of their own, over httpx, which is here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Final

import httpx
import msgspec

Clock = Callable[[], float]

# Bytes of an answer that are read at most, by who asks once in a while.
BODY_LIMIT: Final = 4 * 1024 * 1024
# By who asks again and again: a page of SGLang's metrics has 80 KB.
WATCH_LIMIT: Final = 1024 * 1024
PROBE_LIMIT: Final = 64 * 1024  # of what is asked for its status
# Idle connections are kept for less than SGLang's own keep-alive, which is 5 s.
KEEP_ALIVE: Final = 4.0


class Reply(msgspec.Struct, frozen=True, gc=False):
    """A complete answer. Times are seconds on the asker's clock."""

    status: int
    body: bytes
    sent_at: float
    read_at: float


class NoReply(msgspec.Struct, frozen=True, gc=False):
    """No complete answer, and why. `connected` is False when there was nobody to ask.

    `size`: bytes of a body that were read for nothing because there were too many of them.
    """

    reason: str
    connected: bool = True
    size: int = 0


Ask = Callable[[str, float], Awaitable[Reply | NoReply]]
"""GET this path, relative to the backend's root, within so many seconds in all. Raises nothing."""

COMPRESSED: Final = NoReply("compressed though not asked for")


def too_slow(within: float) -> NoReply:
    """The bound in time was reached."""
    return NoReply(f"no complete answer within {within:g} s")


def too_long(limit: int = BODY_LIMIT) -> NoReply:
    """The bound in bytes was reached."""
    return NoReply(f"longer than {limit} bytes", size=limit)


def probe_client(
    base_url: str,
    *,
    key: str | None = None,
    timeout: float = 1.0,
    connect_timeout: float = 1.0,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """A client for one backend: no proxy from the environment, no redirects, bounds on everything.

    `base_url` is the root of the backend's routes (without `/v1`) and may have a path; `key` is the
    backend's own. `timeout` is for each read and `connect_timeout` for the connection, in seconds.
    """
    headers = {"accept-encoding": "identity"}  # a bound on bytes read must be one on bytes held
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    # A context without authorities costs nothing, and no certificate is ever shown over http.
    plain = not base_url.lower().startswith("https:")
    return httpx.AsyncClient(
        base_url=base_url,
        headers=headers,
        timeout=httpx.Timeout(timeout, connect=connect_timeout),
        limits=httpx.Limits(
            max_connections=2, max_keepalive_connections=1, keepalive_expiry=KEEP_ALIVE
        ),
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else True,
        trust_env=False,
        follow_redirects=False,
        transport=transport,
    )


async def fetch(
    client: httpx.AsyncClient, path: str, *, clock: Clock, within: float
) -> Reply | NoReply:
    """GET `path`, at most `BODY_LIMIT` bytes and `within` seconds in all. Raises nothing.

    `within` should exceed the client's connect timeout: httpx leaks a place in its pool when it is
    cancelled while connecting, and so the client's own timeout must come first there.
    """
    sent_at = clock()
    try:
        async with asyncio.timeout(within), client.stream("GET", path) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                return COMPRESSED
            body = bytearray()
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > BODY_LIMIT:
                    return too_long()
            return Reply(response.status_code, bytes(body), sent_at, clock())
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        return NoReply(type(error).__name__, connected=False)
    except TimeoutError:
        return too_slow(within)
    except Exception as error:  # noqa: BLE001 (the last frame that can: a poller must survive)
        return NoReply(type(error).__name__)


def asking(client: httpx.AsyncClient, clock: Clock) -> Ask:
    """`fetch` with this client, for those who only ask."""

    def ask(path: str, within: float) -> Awaitable[Reply | NoReply]:
        return fetch(client, path, clock=clock, within=within)

    return ask
