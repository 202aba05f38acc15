"""Asks a backend how it is: `/ready` often where it exists, `/health` slowly, each on its own.

`/ready` (SGLang 0.5.20 and up) reads a flag: it says within a second that a server drains. But only
`/health`, which runs the engine, notices that the scheduler is dead, and only then does `/ready`
know. So both are asked. `/health` takes a second by design and up to 20 s under a long prefill;
its time-out must be above that, and it has a connection of its own.

Pace of `/health`: every `health_interval` while `/ready` answers and all is well; otherwise the
next begins `ready_interval` after the last ended, so that a drain is noticed within about two
seconds without `/ready` too, and a backend that was down is not left out for longer than it must.
What follows from an answer is `health`'s to say.
"""

from __future__ import annotations

import asyncio
import logging
import time

from router.asking import Ask, Clock, NoReply
from router.health import Answer, Health, PairHealth, Probe
from router.load import Role
from router.poller import Jitter, Sleep, pause, spread

_log = logging.getLogger("crossover")


class HealthProber:
    """The two probes of one backend. All times are seconds."""

    def __init__(
        self,
        role: Role,
        pair: PairHealth,
        *,
        ready: Ask,
        health: Ask,
        ready_interval: float = 1.0,
        ready_timeout: float = 2.0,
        health_interval: float = 15.0,
        health_timeout: float = 25.0,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        jitter: Jitter = spread,
    ) -> None:
        """`ready` and `health` ask for the path of the same name, each over its own connection."""
        self.role = role
        self._pair = pair
        self._ask = {Probe.READY: ready, Probe.HEALTH: health}
        self._timeouts = {Probe.READY: ready_timeout, Probe.HEALTH: health_timeout}
        self._ready_interval = ready_interval
        self._health_interval = health_interval
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._absent = {Probe.READY: False, Probe.HEALTH: False}

    async def run(self) -> None:
        """Probe until cancelled, the first time at once."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ready_loop())
            group.create_task(self._health_loop())

    async def probe(self, probe: Probe) -> Answer:
        """Ask once and pass on what was heard."""
        reply = await self._ask[probe](probe.value, self._timeouts[probe])
        if isinstance(reply, NoReply):
            answer = Answer.MISS if reply.connected else Answer.UNREACHABLE
            reason = reply.reason
        else:
            answer, reason = Answer.of_status(reply.status), f"status {reply.status}"
        self._pair.probed(self.role, probe, answer, self._clock(), reason)
        self._note_absent(probe, answer, reason)
        return answer

    async def _ready_loop(self) -> None:
        while True:
            started = self._clock()
            answer = await self.probe(Probe.READY)
            # Not there: another version may be started in its place one day.
            absent = answer is Answer.ABSENT
            interval = self._health_interval if absent else self._ready_interval
            await self._sleep(self._jitter(pause(interval, self._clock() - started)))

    async def _health_loop(self) -> None:
        while True:
            started = self._clock()
            await self.probe(Probe.HEALTH)
            # In steps: when /ready goes down or away meanwhile, the long wait is over.
            while True:
                await self._sleep(self._jitter(self._ready_interval))
                if not self._at_leisure() or self._clock() - started >= self._health_interval:
                    break

    def _at_leisure(self) -> bool:
        """Whether `/health` may wait: it is not there, or both probes say that all is well."""
        if self._absent[Probe.HEALTH]:
            return True
        probes = (Probe.READY, Probe.HEALTH)
        return all(self._pair.verdict(self.role, probe) is Health.UP for probe in probes)

    def _note_absent(self, probe: Probe, answer: Answer, reason: str) -> None:
        """Say it once when a backend has no `/health`; without `/ready` it is merely older."""
        absent = answer is Answer.ABSENT
        if absent and not self._absent[probe] and probe is Probe.HEALTH:
            fields = {"backend": self.role.value, "reason": reason}
            _log.warning(
                "%s has no /health (%s): only its traffic tells",
                self.role.value,
                reason,
                extra=fields,
            )
        self._absent[probe] = absent
