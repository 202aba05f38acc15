"""Keeps an eye on the pair while it serves: that it still speculates and is still comparable.

The doctor's rules without its canary, at the start, every few minutes, and as soon as a backend has
come back, since that is when it may have come back as something else. Nothing here touches a
request or the policy. What is seen stands in `PairState`, which `/status` and `/metrics` read. The
log says once that speculation is lost and once that it is back, however many looks lie between;
that a backend could not be asked says neither.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from router.acceptance import AcceptSample
from router.doctor import CannotLookError, KeyRefusedError, Target, understand
from router.doctor_facts import Pair, ServerFacts
from router.doctor_findings import Examination, Finding, Group
from router.doctor_reading import Bodies, grown, read_sample
from router.doctor_rules import examine
from router.fingerprint import Fact, read_fingerprint
from router.load import Role

_log = logging.getLogger("crossover")

Ask = Callable[[Target], Awaitable[Bodies]]
"""The doctor's `ask` without a canary. Raises CannotLookError."""

RETRY: Final = 10.0  # seconds until the next look at a pair of which one could not be asked
TICK: Final = 1.0  # seconds between two looks at the clock and at the backends' health


class PairState:
    """What the last look made of the pair. None: not known."""

    def __init__(self) -> None:
        self.speculation: bool | None = None
        """Whether the speculative server really speculates."""
        self.parity: bool | None = None
        """Whether nothing makes the comparison of the two unfair."""
        self.findings: tuple[Finding, ...] = ()
        self.unknown: tuple[str, ...] = ()
        """Why a backend could not be asked, a line for each."""
        self.checked_at: float | None = None  # monotonic seconds
        self.alarm: str | None = None
        """What is wrong, from the look that saw speculation lost to the one that saw it back."""
        self.fingerprints: dict[Role, dict[str, Fact]] = {}
        """What each server was when it was last seen: a server that is away is still what it was."""


class PairWatch:
    """Looks at the pair again and again."""

    def __init__(
        self,
        targets: tuple[Target, Target],
        ask: Ask,
        *,
        threshold: Callable[[], float | None] = lambda: None,
        interval: float = 180.0,
        comebacks: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """The speculative server is the first of `targets`; `threshold` is in requests, `interval`
        in seconds; `comebacks` counts how often a backend was found to be up.
        """
        self.state = PairState()
        self._targets = targets
        self._ask = ask
        self._threshold = threshold
        self._interval = interval
        self._comebacks = comebacks
        self._clock = clock
        self._sleep = sleep
        self._samples: dict[Role, AcceptSample | None] = {}
        self._unfair = False  # as the log has it
        self._unasked = 0  # the level of what was said of a server that cannot be asked
        self._refused = False

    async def run(self) -> None:
        """Look until cancelled, the first time at once."""
        seen, due = -1, float("-inf")
        while True:
            comebacks = self._comebacks()
            if comebacks != seen or self._clock() >= due:
                seen = comebacks
                try:
                    await self.look()
                except Exception:  # noqa: BLE001 (whatever a backend said once, it is asked again)
                    _log.exception("looking at the pair")
                soon = min(RETRY, self._interval)
                due = self._clock() + (soon if self.state.unknown else self._interval)
            await self._sleep(min(TICK, self._interval))

    async def look(self) -> None:
        """Ask both servers and judge what they say."""
        self._refused = False
        found = await asyncio.gather(*(self._facts(target) for target in self._targets))
        state = self.state
        state.checked_at = self._clock()
        state.unknown = tuple(each for each in found if isinstance(each, str))
        ours, theirs = (ServerFacts() if isinstance(each, str) else each for each in found)
        examination = examine(Pair(ours, theirs, self._threshold()))
        state.findings = examination.findings
        state.speculation = self._speculation(examination, ours)
        state.parity = None if state.unknown else not examination.spoiled(Group.PARITY)
        self._tell(examination)

    async def _facts(self, target: Target) -> ServerFacts | str:
        """What one server says, with what it did since the last look; or why it is not known."""
        try:
            bodies = await self._ask(target)
            facts = understand(target, bodies)
        except KeyRefusedError as error:
            self._refused = True
            return str(error)
        except CannotLookError as error:
            return str(error)
        self.state.fingerprints[target.role] = read_fingerprint(target.role, bodies.server_info)
        before, now = self._samples.get(target.role), read_sample(bodies.metrics)
        self._samples[target.role] = now
        return facts if now is None else grown(facts, before, now)

    def _speculation(self, examination: Examination, ours: ServerFacts) -> bool | None:
        if ours.algorithm is None:
            return None
        return not examination.spoiled(Group.SPECULATION)

    def _tell(self, examination: Examination) -> None:
        """Say in the log what has changed."""
        state = self.state
        # A server that is away comes back; a key that is refused needs somebody.
        level = (logging.WARNING if self._refused else logging.INFO) if state.unknown else 0
        if level > self._unasked:
            text = "; ".join(state.unknown)
            _log.log(level, "the pair is not looked at: %s", text, extra={"pair": "unknown"})
        self._unasked = level
        if state.speculation is False:
            text = _said(examination.spoiled(Group.SPECULATION))
            if state.alarm is None:
                _log.warning("speculation is lost: %s", text, extra={"pair": "speculation_lost"})
            state.alarm = text
        elif state.speculation and state.alarm is not None:
            state.alarm = None
            _log.info("speculation is back", extra={"pair": "speculation_back"})
        if state.parity is False and not self._unfair:
            self._unfair = True
            text = _said(examination.spoiled(Group.PARITY))
            _log.warning("the pair is not comparable: %s", text, extra={"pair": "parity_lost"})
        elif state.parity and self._unfair:
            self._unfair = False
            _log.info("the pair is comparable again", extra={"pair": "parity_back"})


def _said(findings: list[Finding]) -> str:
    return "; ".join(f"{each.rule}: {each.seen} -> {each.mend}" for each in findings)
