"""Ways to keep conversations on a shared GPU that were tried, and are worse: RULES.md says how much.

Pure. They are not in the router, which on a shared GPU keeps nobody. They show what the decision costs
there: a request that stays behind after a switch keeps both servers at work.
"""

from __future__ import annotations

import math

import msgspec

from router.load import LoadSnapshot
from router.policy import Decision, Policy, Reason
from router.request import RequestInfo

# What a request may not be kept against.
FIRM = frozenset((Reason.CAP, Reason.CONTENDED, Reason.QUEUED, Reason.KV_CACHE))


class KeepingPolicy:
    """Another policy's decision, but a conversation stays where it has most of its prefix."""

    def __init__(self, inner: Policy, *, seconds: float = math.inf) -> None:
        """`seconds`: how long after a switch, while both servers run; infinity: always."""
        self.inner = inner
        self.seconds = seconds

    def decide(self, snapshot: LoadSnapshot, info: RequestInfo) -> Decision:
        """Choose a backend for one request."""
        decision = self.inner.decide(snapshot, info)
        backend, prefix = decision.backend, snapshot.prefix
        if backend is None or prefix is None or decision.reason in FIRM:
            return decision
        here, there = snapshot.of(backend), snapshot.of(backend.other)
        lost = prefix.lost(info.prompt_bytes, speculative=here is snapshot.speculative)
        if lost <= 0 or (there.cap is not None and there.concurrency >= there.cap):
            return decision
        switched = snapshot.now - decision.memory.since < self.seconds
        both = here.concurrency > 0 and there.concurrency > 0
        if self.seconds < math.inf and not (switched and both):
            return decision
        return msgspec.structs.replace(decision, backend=backend.other, reason=Reason.PREFIX)
