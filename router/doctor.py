"""The doctor's I/O: asks both servers what they are, sends each one canary, and has it judged.

What is asked of a server: `/server_info`, `/v1/models`, `/v1/loads`, `/metrics` (before and after
the canary) and one request of `CANARY_TOKENS` tokens. Only `/server_info` must answer, and the
canary where one is sent: everything else may be missing, and is then not judged. Answers are bounded
in time and size, and nothing of them but `ServerFacts` is kept.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import httpx
import msgspec

from router.asking import BODY_LIMIT, Ask, Clock, NoReply, asking, probe_client
from router.doctor_facts import Pair, ServerFacts
from router.doctor_findings import Examination
from router.doctor_reading import Bodies, read_facts
from router.doctor_rules import examine
from router.load import ROLES, Role
from router.readings import UnreadableError

INFO_PATHS: Final = ("server_info", "get_server_info")
LOADS_PATH: Final = "v1/loads"
CANARY_TOKENS: Final = 64
# Counting is what any draft guesses right: an accept length near 1 is then the draft's fault.
CANARY_PROMPT: Final = "Count to one hundred: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"
TIMEOUT: Final = 30.0  # seconds for one answer; a canary may have to wait for its turn
CONNECT_TIMEOUT: Final = 3.0  # seconds


class CannotLookError(Exception):
    """There is nothing to judge. The text is one line that says what, and how to mend it."""


class KeyRefusedError(CannotLookError):
    """The server is there and does not take our key: it takes no request of a client's either."""


class Target(msgspec.Struct, frozen=True):
    """One server to look at."""

    role: Role
    url: str  # the root of its routes
    key: str | None = None
    key_setting: str = ""  # where its key is given; empty: the setting of `crossover serve`


class Looked(msgspec.Struct, frozen=True):
    """What the doctor saw, and what it makes of it."""

    pair: Pair
    examination: Examination


async def diagnose(
    targets: tuple[Target, Target],
    *,
    threshold: float | None = None,
    canary: bool = True,
    timeout: float = TIMEOUT,
    clock: Clock = time.monotonic,
) -> Looked:
    """Look at both servers at once: the speculative one first in `targets`.

    `threshold` is the configured one, in requests; `timeout` bounds each answer, in seconds.
    Raises CannotLookError.
    """
    found = await asyncio.gather(
        *(_one(target, canary=canary, timeout=timeout, clock=clock) for target in targets),
        return_exceptions=True,
    )
    facts: list[ServerFacts] = []
    for each in found:
        if isinstance(each, BaseException):
            raise each
        facts.append(each)
    pair = Pair(facts[0], facts[1], threshold)
    return Looked(pair, examine(pair))


async def _one(target: Target, *, canary: bool, timeout: float, clock: Clock) -> ServerFacts:
    async with probe_client(
        target.url,
        key=target.key,
        timeout=timeout,
        connect_timeout=min(CONNECT_TIMEOUT, timeout / 2),
    ) as client:
        sender = client if canary else None
        bodies = await examined(asking(client, clock), target, canary=sender, timeout=timeout)
    return understand(target, bodies)


async def examined(
    ask: Ask,
    target: Target,
    *,
    canary: httpx.AsyncClient | None = None,
    timeout: float = TIMEOUT,
) -> Bodies:
    """Everything that one server says of itself, as bytes. Raises CannotLookError.

    `canary` is the client that sends it; without one none is sent.
    """
    info = await _server_info(ask, target, timeout)

    async def page(path: str) -> bytes | None:
        reply = await ask(path, timeout)
        return reply.body if not isinstance(reply, NoReply) and reply.status == 200 else None

    models, loads = await page("v1/models"), await page(LOADS_PATH)
    # An empty page stands for none: that the metrics are off is a finding, not a gap.
    metrics = await page("metrics") or b""
    answer, native, after = None, True, None
    if canary is not None:
        answer, native = await _canary(canary, target, timeout)
        after = await page("metrics")
    return Bodies(
        server_info=info,
        models=models,
        loads=loads,
        metrics=metrics,
        metrics_after=after,
        canary=answer,
        canary_native=native,
    )


def understand(target: Target, bodies: Bodies) -> ServerFacts:
    """The facts in these answers. Raises CannotLookError when they are not a server's."""
    try:
        return read_facts(bodies)
    except UnreadableError as error:
        text = f"cannot look at the {target.role} server {target.url}: {error}"
        raise CannotLookError(f"{text}. Give the address of the SGLang server itself") from None


async def _server_info(ask: Ask, target: Target, timeout: float) -> bytes:
    where = f"the {target.role} server {target.url}"
    status = 0
    for path in INFO_PATHS:
        reply = await ask(path, timeout)
        if isinstance(reply, NoReply):
            hint = (
                "it has not answered: is it busy? A longer --timeout may help"
                if reply.connected
                else "is it up, and is the address right?"
            )
            raise CannotLookError(f"cannot reach {where} ({reply.reason}): {hint}")
        status = reply.status
        if status == 200:
            return reply.body
        if status in {401, 403}:
            raise KeyRefusedError(_refused(target, status))
        if status not in {404, 405}:
            break
    raise CannotLookError(
        f"{where} has no /server_info (status {status}): is it SGLang, and is the address its root?"
    )


def _refused(target: Target, status: int) -> str:
    had = "this key" if target.key is not None else "a request without a key"
    setting = target.key_setting or f"CROSSOVER_{target.role.upper()}_API_KEY"
    return (
        f"the {target.role} server {target.url} refuses {had} (status {status}): "
        f"give its own with {setting}"
    )


async def _canary(
    client: httpx.AsyncClient, target: Target, timeout: float
) -> tuple[bytes | None, bool]:
    """The canary's answer, and whether it went to `/generate`, which says most in all versions."""
    sampling = {"temperature": 0, "max_new_tokens": CANARY_TOKENS, "ignore_eos": True}
    native = {"text": CANARY_PROMPT, "sampling_params": sampling}
    status, body = await _post(client, target, "generate", native, timeout)
    if status == 200:
        return body, True
    if status in {404, 405}:  # a proxy that lets only /v1 through
        openai = {
            "model": "default",
            "prompt": CANARY_PROMPT,
            "max_tokens": CANARY_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_spec_tokens_details": True,
        }
        status, body = await _post(client, target, "v1/completions", openai, timeout)
        if status == 200:
            return body, False
    raise CannotLookError(
        f"the {target.role} server {target.url} answered the canary with status {status}: look in "
        "its log, or leave the canary out with --no-canary"
    )


async def _post(
    client: httpx.AsyncClient, target: Target, path: str, body: object, timeout: float
) -> tuple[int, bytes]:
    """Status and body of one answer. Raises CannotLookError when there is none in time."""
    headers = {"content-type": "application/json"}
    data = msgspec.json.encode(body)
    try:
        async with (
            asyncio.timeout(timeout),
            client.stream("POST", path, content=data, headers=headers) as response,
        ):
            received = bytearray()
            async for piece in response.aiter_bytes():
                received += piece
                if len(received) > BODY_LIMIT:
                    raise CannotLookError(f"the {target.role} server's answer has no end")
            return response.status_code, bytes(received)
    except (httpx.HTTPError, TimeoutError) as error:
        raise CannotLookError(
            f"the {target.role} server {target.url} did not answer the canary within {timeout:g} s "
            f"({type(error).__name__}): give it longer with --timeout, or leave it out with "
            "--no-canary"
        ) from None


def targets_of(
    urls: dict[Role, str], keys: dict[Role, str | None], *, key_setting: str = ""
) -> tuple[Target, Target]:
    """Both servers in the order that `diagnose` wants; `key_setting` as in `Target`."""
    speculative, baseline = (Target(role, urls[role], keys[role], key_setting) for role in ROLES)
    return speculative, baseline
