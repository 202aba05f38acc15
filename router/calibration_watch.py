"""Keeps the calibration in force: the file, the servers it is of, the traffic it is of.

Every `calibration_interval` seconds, and never on a request's path:

1. The file. One that was replaced is in force without a restart: the line, the policy, the meter of
   drift. One that cannot be used (gone, half written, broken, against the settings, of another
   model) is refused, logged once, and the old one stays. Requests in flight notice nothing.
2. The servers. Their fingerprints, as the watch over the pair has last seen them, against the one
   in the file. Another flag is a warning. Another model, or servers in each other's place, means
   that the line says nothing about this pair: everything then goes to the server that does not
   speculate, loudly, until the servers or the file have changed. It is the safe one of the two: a
   baseline server is slower by tens of percent where speculation would have paid, and a speculative
   one loses half its throughput where it does not. Serving never stops for it.
3. The traffic. Measured speeds against the curves (`drift`): a warning. The live accept length moves
   the line (`live_line`).

Only the configured policy is replaced. One that an operator has put in its place stays; what the
name `frontier` brings back is then the newest. Tables that take a tenth of a second are made in a
thread, at most every half minute.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Protocol

from router.calibrated import Terms, policy_of, read_terms
from router.calibration import CalibrationError
from router.explain import shown_threshold
from router.fingerprint import Facts, Judgement, judge, swapped
from router.load import PolicyMemory, Role
from router.policies import policy_name
from router.policy import FixedPolicy, FrontierPolicy, Policy
from router.view import RelayView

if TYPE_CHECKING:
    from router.calibration_state import CalibrationState
    from router.frontier import Frontier
    from router.pair_watch import PairState

_log = logging.getLogger("crossover")

REBUILD: Final = 30.0  # seconds from one moving of a rule's tables to the next
LIMIT: Final = 16 * 1024 * 1024  # bytes of a file that are read


class LineRelay(RelayView, Protocol):
    """The relay, as far as the line in force is written here."""

    frontier: Frontier | None
    configured: Policy | None


class CalibrationWatch:
    """Looks again and again."""

    def __init__(
        self,
        relay: LineRelay,
        state: CalibrationState,
        pair: PairState,
        read: Callable[[], bytes],
        *,
        accept: Callable[[float], float | None] = lambda _now: None,
        interval: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`read` gives the file's bytes or raises OSError, and is called in a thread; `accept` is
        the live accept length of the speculative server at a moment of `clock`; `interval` seconds.
        """
        self.state = state
        self._relay = relay
        self._pair = pair
        self._read = read
        self._accept = accept
        self._interval = interval
        self._clock = clock
        self._sleep = sleep
        self._seen: bytes | str = state.content  # or why it could not be read
        self._judged_by: dict[Role, Facts] | None = None
        self._built_at = -math.inf

    async def run(self) -> None:
        """Look until cancelled, the first time at once."""
        while True:
            try:
                await self.look()
            except Exception:  # noqa: BLE001 (whatever a file held once, it is looked at again)
                _log.exception("looking at the calibration")
            await self._sleep(self._interval)

    async def look(self) -> None:
        """Look once at everything."""
        await self._look_at_file()
        await self._look_at_servers()
        await self._look_at_traffic()

    def vet(self) -> None:
        """Before anything is served. Raises CalibrationError for a calibration of another pair."""
        found = judge(self.state.terms.calibration.fingerprint, self._pair.fingerprints)
        if found.refusal is not None:
            mend = "give the calibration of this pair, or the servers that it is of"
            raise CalibrationError(f"calibration {self.state.path}: {found.refusal}: {mend}")

    # ------------------------------------------------------------------ the file

    async def _look_at_file(self) -> None:
        content: bytes | str
        if self._judged_by is not None and self._judged_by != self._pair.fingerprints:
            self._judged_by = None  # refused for the servers, and they are others now
            self._seen = ""
        try:
            content = await asyncio.to_thread(self._read)
        except OSError as error:
            content = f"it cannot be read: {error.strerror or error}"
        if content == self._seen:
            return
        self._seen = content
        if content == self.state.content:  # what is in force is there again
            self.state.problem = None
            self._note("is as it was", logging.INFO)
            return
        if isinstance(content, str):
            self._refuse(content)
            return
        try:
            terms = read_terms(content, self._relay.settings)
            # Also checks what only the making of the policy can tell.
            await self._build(terms, 1.0)
        except CalibrationError as error:
            self._refuse(str(error))
            return
        found = judge(terms.calibration.fingerprint, self._pair.fingerprints)
        if found.refusal is not None:
            self._judged_by = dict(self._pair.fingerprints)
            self._refuse(found.refusal)
            return
        await self._take(content, terms)

    def _refuse(self, why: str) -> None:
        self.state.refuse(why)
        self._note(f"is refused, the one before stays in force: {why}", logging.WARNING)

    async def _take(self, content: bytes, terms: Terms) -> None:
        self.state.take(content, terms)
        calibration = terms.calibration
        if self.state.live is not None and (ratio := self.state.live.wanted) is not None:
            self.state.live.in_force = ratio
        self._relay.frontier = terms.frontier
        self.state.judgement = Judgement()  # of the file before; the next step judges this one
        await self._put_in_force()
        line = terms.frontier
        shown = "a table" if line.scope == "table" else shown_threshold(line.threshold)
        rule = terms.rule.name if terms.rule is not None else "threshold"
        verdict = calibration.verdict or "not said"
        self._note(
            f"is in force: scope {line.scope}, threshold {shown}, rule {rule}, verdict {verdict}",
            logging.WARNING if calibration.verdict == "unsure" else logging.INFO,
        )

    # ------------------------------------------------------------------ the servers

    async def _look_at_servers(self) -> None:
        state = self.state
        found = judge(state.terms.calibration.fingerprint, self._pair.fingerprints)
        before, state.judgement = state.judgement, found
        if found.refusal != before.refusal:
            await self._put_in_force()
            if found.refusal is not None:
                self._note(
                    f"is not trusted: {found.refusal}. Everything goes to the server that does "
                    "not speculate",
                    logging.ERROR,
                )
            else:
                self._note("is trusted again", logging.INFO)
        if found.mismatches != before.mismatches and found.refusal is None:
            if found.mismatches:
                said = "; ".join(map(str, found.mismatches))
                self._note(f"was measured on another pair: {said}", logging.WARNING)
            else:
                self._note("is of these servers", logging.INFO)

    # ------------------------------------------------------------------ the traffic

    async def _look_at_traffic(self) -> None:
        state = self.state
        drifted = state.drift.drifted if state.drift is not None else ()
        if set(drifted) - set(state.drifted):
            self._note(f"is out of date: {state.advice}", logging.WARNING)
        state.drifted = drifted
        live = state.live
        if live is None:
            return
        now = self._clock()
        live.observe(now, self._accept(now))
        wanted = live.wanted
        if wanted is None:
            return
        if state.terms.rule is not None and now - self._built_at < REBUILD:
            return
        live.in_force = wanted
        self._built_at = now
        await self._put_in_force()
        said = f"the line follows the accept length, {wanted:.2f} times the calibrated one"
        configured = self._relay.configured
        if isinstance(configured, FrontierPolicy) and configured.frontier.scope != "table":
            said += f": threshold {shown_threshold(configured.frontier.threshold)}"
        self._note(said, logging.INFO, event="acceptance")

    # ------------------------------------------------------------------ what is in force

    async def _build(self, terms: Terms, ratio: float) -> Policy:
        settings = self._relay.settings
        if terms.rule is None:
            return policy_of(terms, settings, ratio)
        return await asyncio.to_thread(policy_of, terms, settings, ratio)

    async def _put_in_force(self) -> None:
        """Make the configured policy anew; it takes its own place, and nobody else's."""
        state, relay = self.state, self._relay
        policy = _instead(state.judgement, self._pair) or await self._build(
            state.terms, state.ratio
        )
        before, relay.configured = relay.configured, policy
        # Read after the build: an operator may have come in between.
        if before is None or relay.policy is not before:
            return
        relay.policy = policy
        if policy_name(before) != policy_name(policy):
            # The server in use stays in use; what else one kind remembers means nothing to another.
            memory = relay.tracker.memory
            relay.tracker.memory = PolicyMemory(memory.side, memory.since, memory.above_at)

    def _note(self, said: str, level: int, event: str = "calibration") -> None:
        """Once in the log, and among the decisions, where it explains those after it."""
        text = said if event != "calibration" else f"{self.state.path} {said}"
        self._relay.decisions.event(self._relay.clock(), event, text)
        name = "" if event != "calibration" else "the calibration "
        _log.log(level, "%s%s", name, text, extra={"calibration": event})


def _instead(found: Judgement, pair: PairState) -> Policy | None:
    """What decides while the line is not trusted: the server that does not speculate."""
    if found.refusal is None:
        return None
    return FixedPolicy(Role.SPECULATIVE if swapped(pair.fingerprints) else Role.BASELINE)


__all__ = ["LIMIT", "CalibrationWatch", "LineRelay"]
