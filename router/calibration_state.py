"""What is known of the calibration in force: what `/status` and `/metrics` say of it.

No I/O and no clock of its own. `calibration_watch` is the only writer, but for the drift meter, to
which the relay hands every request that is over.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from router.calibrated import Terms
from router.drift import BOUND, DriftMeter, drift_points
from router.fingerprint import Judgement
from router.live_line import LiveRatio, calibrated_accept_length
from router.load import ROLES, Role

Result = Literal["ok", "refused"]


class CalibrationState:
    """One file and what came of it. None: not known, or nothing to say."""

    def __init__(
        self,
        path: str,
        content: bytes,
        terms: Terms,
        *,
        wall: Callable[[], float],
        acceptance: tuple[float, float] | None = None,
    ) -> None:
        """`wall` gives unix seconds. `acceptance`: how the live accept length is followed, as
        smoothing in seconds and the bound of the ratio; None: it is not.
        """
        self.path = path
        self.loads: dict[Result, int] = {"ok": 0, "refused": 0}
        self.problem: str | None = None
        """Why what the file holds now is not in force."""
        self.judgement = Judgement()
        self.drifted: tuple[Role, ...] = ()
        """As the log has it."""
        self.drift: DriftMeter | None = None
        self.live: LiveRatio | None = None
        self._wall = wall
        self._acceptance = acceptance
        self.take(content, terms)

    def take(self, content: bytes, terms: Terms) -> None:
        """These are in force from now on."""
        self.content = content
        self.terms = terms
        self.loaded_at = self._wall()  # unix seconds
        self.loads["ok"] += 1
        self.problem = None
        curves = terms.calibration.curves
        self.drifted = ()
        self.drift = None
        before, self.live = self.live, None
        if curves is None:
            return
        try:
            self.drift = DriftMeter(drift_points(curves))
            curves.crossover()
        except ValueError:  # curves that no speed can be read from: for a reader only
            self.drift = None
            return
        length = calibrated_accept_length(curves)
        if length is not None and self._acceptance is not None:
            smoothing, bound = self._acceptance
            self.live = LiveRatio(length, smoothing=smoothing, bound=bound)
            if before is not None:
                self.live.carry(before)

    def refuse(self, problem: str) -> None:
        """What the file holds now is not taken."""
        self.problem = problem
        self.loads["refused"] += 1

    @property
    def ratio(self) -> float:
        """By how much the speculative curve is moved in force."""
        return self.live.in_force if self.live is not None else 1.0

    @property
    def age(self) -> float | None:
        """Seconds since the calibration was made; None when it does not say when."""
        try:
            made = datetime.fromisoformat(self.terms.calibration.created or "")
        except ValueError:
            return None
        if made.tzinfo is None:
            made = made.replace(tzinfo=UTC)
        return max(0.0, self._wall() - made.timestamp())

    @property
    def advice(self) -> str | None:
        """`recalibrate` and why; None when nothing speaks against the calibration."""
        reasons = []
        if self.judgement.refusal is not None:
            reasons.append(self.judgement.refusal)
        elif self.judgement.mismatches:
            reasons.append("; ".join(map(str, self.judgement.mismatches)))
        for role in ROLES:
            ratio = self.drift.ratio(role) if self.drift is not None else None
            if ratio is not None and not 1 / BOUND <= ratio <= BOUND:
                reasons.append(
                    f"requests on the {role.value} server run at {ratio:.2f} times the speed that "
                    "its curve says"
                )
        if self.live is not None and self.live.bounded:
            reasons.append("the accept length is further from the calibrated one than is followed")
        return f"recalibrate: {'; '.join(reasons)}" if reasons else None
