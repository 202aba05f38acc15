"""The two counters on a simulated server's page that live acceptance is read from."""

from __future__ import annotations

import asyncio

from loadtest.engine import EngineConfig, RunningEngine, running_engine
from router.acceptance import AcceptSample, parse_accept
from tests.engines import ask, exchange_bytes, looped, request
from tests.stack import until


async def page(engine: RunningEngine) -> AcceptSample:
    found = parse_accept((await ask(engine, "/metrics")).body)
    assert isinstance(found, AcceptSample)
    return found


@looped
async def test_tokens_and_verify_calls_are_of_the_same_requests() -> None:
    """Both grow when a request ends, as in SGLang: counted apart, a load that ramps would look like
    other acceptance.
    """
    async with running_engine(EngineConfig.quick("speculative")) as engine:
        body = {"prompt": [1] * 8, "max_tokens": 400, "ignore_eos": True, "stream": True}
        raw = request("/v1/completions", body)
        running = asyncio.ensure_future(exchange_bytes(engine, raw))
        await until(lambda: engine.core.batch.counters().verify_calls > 20, what="it decodes")
        during = await page(engine)
        assert (during.tokens, during.verify_calls) == (0.0, 0.0)
        await running
        after = await page(engine)
        assert after.tokens == 400.0
        assert after.verify_calls == 200.0  # two tokens a step, the first of them from the prefill
