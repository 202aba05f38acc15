"""Settings of the test run as a whole."""

import os

from hypothesis import HealthCheck, settings

# A busy machine is no fault of the code. In continuous integration the examples are the same each
# time, so that a red run is about the change; everywhere else they are new each time.
settings.register_profile(
    "crossover",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("crossover")
