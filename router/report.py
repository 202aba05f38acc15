"""What is known of a request when it is over, as one value for metrics and the log.

Pure, and one-way: it may only read an exchange that has ended. No prompt, no header's value and no
address gets into a record, but for a request id that the client chose.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from router.load import SPECULATIVE
from router.metrics import OTHER_ROUTE, Finished, Outcome, Retry

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.drift import DriftMeter
    from router.errors import ErrorAnswer
    from router.exchange import Exchange
    from router.incoming import Incoming
    from router.load import LoadTracker

OK = Outcome.OK  # an enum's members are slow to look up


def id_maker(run: str) -> Callable[[], str]:
    """Makes request ids: those of one run are in order, and `run`, drawn by lot, tells runs apart."""
    numbers = itertools.count(1)
    return lambda: f"{run}-{next(numbers):08x}"


def record_of(exchange: Exchange, *, queued: bool) -> Finished:
    """The record of a finished exchange; `queued` says that it waited in our own queue."""
    outcome = exchange.outcome
    if outcome is None:
        msg = "an exchange ended without an outcome"
        raise RuntimeError(msg)
    decision, request, answer = exchange.decision, exchange.request, exchange.answer
    prompt, output = exchange.usage
    received = request.received_at
    waited = (exchange.decided_at or exchange.ended_at) - received if queued else 0.0
    return Finished(
        request.id, request.route.name,
        decision.backend if decision else None, decision.reason if decision else None,
        decision.n if decision else 0, decision.m if decision else 0,
        decision.threshold if decision else None,
        answer.status, outcome, exchange.scanner is not None,
        received, exchange.decided_at, exchange.sent_at, exchange.first_byte_at,
        exchange.ended_at, waited,
        request.info.prompt_bytes, answer.bytes_out, exchange.chunks, prompt, output,
        _last_replay(exchange.retries) if exchange.retries else None, exchange.error,
    )  # fmt: skip


def measure(drift: DriftMeter, exchange: Exchange, done: Finished, tracker: LoadTracker) -> None:
    """Hold a whole answer against the curve of its backend; its lease is given back already.

    Left out is what was sent twice, since the first attempt is in its time and not in its level, and
    what has several choices, since it counts as one request and has the tokens of many.
    """
    role, sent_at = done.backend, done.sent_at
    if role is None or sent_at is None or done.outcome is not OK or done.replay is not None:
        return
    if exchange.request.info.choices != 1:
        return
    counts = tracker.of(role)
    before = done.n if role is SPECULATIVE else done.m
    after = counts.in_flight + counts.foreign
    drift.observe(role, before, after, done.output_tokens, done.ended_at - sent_at)


def refusal(
    request_id: str, error: ErrorAnswer, incoming: Incoming | None, since: float, now: float
) -> Finished:
    """The record of a request that we answered ourselves before it became an exchange."""
    route = incoming.route if incoming is not None else None
    name = route.name if route is not None else OTHER_ROUTE
    size = incoming.size if incoming is not None else 0
    return Finished(
        request_id, name, None, None, 0, 0, None, error.status, Outcome.REJECTED, False,
        since, None, None, None, now, 0.0, size, len(error.body), 0, None, None, None, error.code,
    )  # fmt: skip


def _last_replay(retries: tuple[Retry, ...]) -> str | None:
    """The last replay that was made."""
    made = [retry for retry in retries if retry is not Retry.BUDGET_EXHAUSTED]
    return made[-1].value if made else None
