"""A pair of servers behind the real policy, in virtual time: service curves in, records out.

The law of this file: pure and seeded; the same arguments give the same run, to the last digit. The
policy, the load tracker and the snapshot are the router's own objects, called as the relay calls
them: snapshot, decide and lease in one step, the lease released when the answer ends.

The run goes from event to event (`simulator_server` says why that is exact): an arrival, the end of
a prefill, the end of a request. What it costs is a few microseconds each, whatever the batch size.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator

import msgspec

from loadtest.arrivals import Closed
from loadtest.service import ServiceCurve
from loadtest.simulator_contention import Contention
from loadtest.simulator_load import Acceptance, Call, Size
from loadtest.simulator_server import NEVER, Job, VirtualServer
from router.affinity import BYTES_PER_TOKEN, Prefixes
from router.load import ROLES, Lease, LoadTracker, Role, Telemetry
from router.policy import Policy, Reason
from router.request import RequestInfo


class ServerModel(msgspec.Struct, frozen=True, kw_only=True):
    """One server of the simulation."""

    curve: ServiceCurve
    acceptance: Acceptance | None = None  # None: the curve's, without spread
    max_running: int | None = None  # None: no cap
    cache_tokens: float = 0.0  # of its prefix cache; 0: none


class PairModel(msgspec.Struct, frozen=True, kw_only=True):
    """Both servers, and what they take from each other."""

    speculative: ServerModel
    baseline: ServerModel
    contention: Contention = Contention()


class Run:
    """What came of a simulation, by request in order of arrival. Read it, never write it."""

    def __init__(self) -> None:
        self.backend: list[Role] = []
        self.reason: list[Reason] = []
        self.n: list[int] = []
        self.m: list[int] = []
        self.started: list[float] = []
        self.first: list[float] = []
        self.ended: list[float] = []
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.prefilled = 0  # prompt tokens that no cache held

    def __len__(self) -> int:
        return len(self.started)


class Simulation:
    """One run. Make a new one for the next."""

    def __init__(
        self,
        pair: PairModel,
        policy: Policy,
        *,
        seed: int = 0,
        telemetry_s: float | None = None,
        remembers: bool = False,
    ) -> None:
        """`telemetry_s`: seconds between two polls of the servers; None never polls them. `remembers`:
        whether the router keeps in mind where conversations are.
        """
        self.pair = pair
        self.policy = policy
        self.tracker = LoadTracker(prefixes=Prefixes() if remembers else None)
        self.run = Run()
        self.servers = [_server(pair.speculative), _server(pair.baseline)]
        self._accepts = [_acceptance(pair.speculative), _acceptance(pair.baseline)]
        self._chance = random.Random(seed)
        self._leases: dict[int, Lease] = {}
        self._open: dict[int, Call] = {}  # calls whose conversation goes on
        self._later: list[tuple[float, int, Call]] = []  # turns that were thought of
        self._shares: dict[tuple[int, int], tuple[float, float]] = {}
        self._poll_s = telemetry_s
        self._next_poll = NEVER if telemetry_s is None else 0.0

    def play(self, calls: Iterable[Call]) -> Run:
        """Serve an open load to its last answer. Calls come in order of time."""
        source: Iterator[Call] = iter(calls)
        one, other = self.servers
        call = next(source, None)
        now = 0.0
        while True:
            due = call.at if call is not None else NEVER
            later = self._later[0][0] if self._later else NEVER
            at = min(due, later, one.next_at, other.next_at)
            if at == NEVER:
                return self._over()
            if at > now:
                one.advance(at - now)
                other.advance(at - now)
                now = at
            if now >= self._next_poll:
                self._poll(now)
            if later == at:
                self._ask(now, heapq.heappop(self._later)[2])
            elif due == at and call is not None:
                self._ask(now, call)
                call = next(source, None)
            else:
                self._serve(0 if one.next_at == at else 1, now)
            self._plan(now)

    def keep(self, load: Closed, sizes: Iterator[Size]) -> Run:
        """Keep as many requests in flight as a closed load says, and serve the last of them."""
        one, other = self.servers
        now, wanted = 0.0, load.level_at(0.0)
        while True:
            while wanted is not None and self.tracker.in_flight < wanted.concurrency:
                size = next(sizes)
                self._ask(now, Call(now, size.prompt, size.output))
            self._plan(now)
            change = NEVER if wanted is None else wanted.end
            at = min(change, one.next_at, other.next_at)
            if at == NEVER:
                return self._over()
            one.advance(at - now)
            other.advance(at - now)
            now = at
            if now >= self._next_poll:
                self._poll(now)
            if at == change:
                wanted = load.level_at(now)
            else:
                self._serve(0 if one.next_at == at else 1, now)

    def _ask(self, now: float, call: Call) -> None:
        """Decide where a request goes, count it, and hand it over."""
        tracker, run = self.tracker, self.run
        key = len(run.started)
        talk, length = call.conversation or None, call.prompt * BYTES_PER_TOKEN
        snapshot = tracker.snapshot(now, talk)
        info = RequestInfo(True, False, False, 1, length, None, None, talk)
        decision = self.policy.decide(snapshot, info)
        backend = decision.backend
        if backend is None:
            raise ValueError(
                "a simulated pair is always available, but the policy found no backend"
            )
        self._leases[key] = tracker.lease(backend, now, decision.memory, talk, length)
        run.backend.append(backend)
        run.reason.append(decision.reason)
        run.n.append(decision.n)
        run.m.append(decision.m)
        run.started.append(now)
        run.first.append(math.nan)
        run.ended.append(math.nan)
        run.prompt.append(call.prompt)
        run.output.append(call.output)
        side = 0 if backend is Role.SPECULATIVE else 1
        per_step = self._accepts[side].of_request(now, self._chance)
        job = Job(
            key,
            call.prompt,
            (call.output - 1) / per_step,
            call.conversation,
            call.prompt + call.output,
        )
        self.servers[side].enter(now, job)
        if call.then:
            self._open[key] = call

    def _serve(self, side: int, now: float) -> None:
        """Let a server do what is due there."""
        job = self.servers[side].event(now, self.run.first)
        if job is None:
            return
        self.run.ended[job.key] = now
        self._leases.pop(job.key).release(now)
        call = self._open.pop(job.key, None)
        if call is not None:
            turn, rest = call.then[0], call.then[1:]
            prompt = call.prompt + call.output + turn.words
            at = now + turn.think_s
            following = Call(at, prompt, turn.output, call.conversation, rest)
            heapq.heappush(self._later, (at, job.key, following))

    def _plan(self, now: float) -> None:
        """Settle both speeds until the next event."""
        one, other = self.servers
        n, m = one.running, other.running
        if not (n and m):
            one.plan(now, 1.0)
            other.plan(now, 1.0)
            return
        found = self._shares.get((n, m))
        if found is None:
            found = self._shares[n, m] = self.pair.contention.shares(n, m)
        one.plan(now, found[0])
        other.plan(now, found[1])

    def _poll(self, now: float) -> None:
        """Read both servers' telemetry, as the router's poller does."""
        self._next_poll = now + (self._poll_s or NEVER)
        for role, server in zip(ROLES, self.servers, strict=True):
            cap = None if server.max_running == math.inf else int(server.max_running)
            told = Telemetry(server.running, server.queued, now, now, "simulated", max_running=cap)
            self.tracker.observe(role, told)

    def _over(self) -> Run:
        self.run.prefilled = sum(server.prompt_tokens for server in self.servers)
        return self.run


def _server(model: ServerModel) -> VirtualServer:
    cap = math.inf if model.max_running is None else model.max_running
    return VirtualServer(model.curve, max_running=cap, cache_tokens=model.cache_tokens)


def _acceptance(model: ServerModel) -> Acceptance:
    return model.acceptance or Acceptance(model.curve.tokens_per_step)
