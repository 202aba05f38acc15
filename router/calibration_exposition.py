"""What Prometheus sees of the calibration in force; without a calibration there is nothing here.

What is unknown is absent, never zero: a fingerprint that cannot be compared, an accept length that
was never heard, a drift of which too little was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.calibration_state import CalibrationState
from router.exposition import PREFIX, threshold_of
from router.load import ROLES
from router.view import RelayView


class CalibrationCollector(Collector):
    """A counter and a few gauges, read at the moment of a scrape."""

    def __init__(self, relay: RelayView, state: CalibrationState) -> None:
        self._relay = relay
        self._state = state

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are told apart by their own prefix."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The file, the servers, the traffic."""
        state = self._state
        loads = CounterMetricFamily(
            PREFIX + "calibration_loads",
            "Contents of the calibration file that were taken, or refused.",
            labels=["result"],
        )
        for result, count in state.loads.items():
            loads.add_metric([result], count)
        yield loads
        snapshot = self._relay.tracker.snapshot(self._relay.clock())
        ratio = state.live.ratio if state.live is not None else None
        judgement = state.judgement
        for name, text, value in (
            (
                "threshold_calibrated",
                "K of the calibration in force; of a line without a K, F(m).",
                threshold_of(state.terms.frontier, snapshot),
            ),
            (
                "accept_length_ratio",
                "The live accept length over the calibrated one, smoothed and bounded.",
                ratio,
            ),
            (
                "accept_length_calibrated",
                "Tokens per verify step that the speculative curve was measured with.",
                state.live.calibrated if state.live is not None else None,
            ),
            (
                "calibration_matches",
                "1 if the live servers are those that the calibration is of, 0 if not.",
                judgement.matches,
            ),
            (
                "calibration_trusted",
                "0 if the calibration is of another model or the servers are swapped.",
                judgement.refusal is None,
            ),
            (
                "calibration_age_seconds",
                "Time since the calibration was made; absent when it does not say when.",
                state.age,
            ),
        ):
            family = GaugeMetricFamily(PREFIX + name, text)
            if value is not None:
                family.add_metric([], float(value))
            yield family
        drift = GaugeMetricFamily(
            PREFIX + "calibration_drift_ratio",
            "Measured speed of requests over the speed that the curve of the calibration says.",
            labels=["backend"],
        )
        for role in ROLES:
            seen = state.drift.ratio(role) if state.drift is not None else None
            if seen is not None:
                drift.add_metric([role], seen)
        yield drift
