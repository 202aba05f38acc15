"""What only makes sense together: the checks that look at more than one setting.

Each takes the groups that it looks at, which `Settings` is all of, and yields its problems. A
problem names the settings it is about; the report adds their values and where they came from.
"""

from collections.abc import Iterator

from router.config_fields import Backends, Limits, Listeners, Routing, Timeouts, Watching
from router.config_sources import Problem
from router.config_types import BackendUrl, is_loopback, read_keys

NO_LINE = (
    "frontier needs one of them: --calibration FILE, which loadtest calibrate measures and writes; "
    "or --threshold K, the largest concurrency at which a benchmark of both servers "
    "(python -m sglang.bench_serving --max-concurrency 1, 2, 4, 8, ...) saw the speculative one "
    "ahead in output tokens per second, or always, or never"
)
ONE_PROCESS = (
    "one process owns the counts: each of N workers would see 1/N of the load, which moves the "
    "threshold N-fold. Run one worker"
)
_WILDCARDS = {"0.0.0.0", "::"}  # noqa: S104 (compared with, not bound)


def check_backends(pair: Backends, listeners: Listeners) -> Iterator[Problem]:
    """The pair is two servers, and neither is this router."""
    one, other = pair.speculative, pair.baseline
    if _same_host(one.host, other.host) and (one.port, one.prefix) == (other.port, other.prefix):
        yield Problem(("speculative", "baseline"), "they are the same server")
    own = (
        ("port", listeners.port, "host", listeners.host),
        ("admin_port", listeners.admin_port, "admin_host", listeners.admin_host),
    )
    for role, url in (("speculative", one), ("baseline", other)):
        for port_name, port, host_name, host in own:
            if port and url.port == port and _reaches(url, host):
                text = "the backend would be this router itself"
                yield Problem((role, host_name, port_name), text)


def check_line(routing: Routing) -> Iterator[Problem]:
    """The frontier has exactly one origin."""
    keys = ("threshold", "calibration")
    given = [value for value in (routing.threshold, routing.calibration) if value is not None]
    if routing.calibration is not None and "scope" in routing.model_fields_set:
        yield Problem(("calibration", "scope"), "the calibration says what its line compares")
    if routing.rule not in {None, "threshold"} and routing.calibration is None:
        text = "it decides by the curves of a calibration: give one, or the rule threshold"
        yield Problem(("rule", "calibration"), text)
    if len(given) > 1:
        yield Problem(keys, "give one of them, not both")
    elif not given and routing.policy == "frontier":
        yield Problem(keys, NO_LINE)


def check_listeners(listeners: Listeners) -> Iterator[Problem]:
    """Both can be bound, and nothing is open by accident."""
    if listeners.port and listeners.port == listeners.admin_port:
        hosts = (listeners.host, listeners.admin_host)
        if _same_host(*hosts) or _WILDCARDS.intersection(hosts):
            yield Problem(("port", "admin_port"), "the two listeners need two ports")
    if not (is_loopback(listeners.admin_host) or listeners.admin_key or listeners.admin_open):
        text = (
            "other machines could reach the admin listener: set admin_key, or admin_open to "
            "let anyone read it"
        )
        yield Problem(("admin_host", "admin_key"), text)
    if (listeners.ssl_certfile is None) != (listeners.ssl_keyfile is None):
        yield Problem(("ssl_certfile", "ssl_keyfile"), "TLS needs both of them")
    if listeners.workers > 1:
        yield Problem(("workers",), ONE_PROCESS)
    if listeners.api_keys_file:
        try:
            read_keys(listeners.api_keys_file)
        except ValueError as error:
            yield Problem(("api_keys_file",), str(error))


def check_amounts(limits: Limits, timeouts: Timeouts, watching: Watching) -> Iterator[Problem]:
    """No amount makes another one meaningless."""
    if limits.max_buffered < limits.max_body:
        text = "a body of the largest size could never be taken in"
        yield Problem(("max_buffered", "max_body"), text)
    if watching.telemetry_stale <= watching.telemetry_interval:
        text = "telemetry would be stale before the next poll"
        yield Problem(("telemetry_stale", "telemetry_interval"), text)
    if watching.breaker_open_max < watching.breaker_open:
        text = "the longest time is shorter than the first one"
        yield Problem(("breaker_open_max", "breaker_open"), text)
    if timeouts.first_byte_timeout <= timeouts.replay_window:
        text = "the window for a replay must end before the wait for an answer does"
        yield Problem(("replay_window", "first_byte_timeout"), text)


def _same_host(one: str, other: str) -> bool:
    return one == other or (_is_this_machine(one) and _is_this_machine(other))


def _reaches(url: BackendUrl, host: str) -> bool:
    return _same_host(url.host, host) or (host in _WILDCARDS and is_loopback(url.host))


def _is_this_machine(host: str) -> bool:
    """Spellings of one address, as opposed to the other 16 million of 127.0.0.0/8."""
    return host.lower() in {"localhost", "127.0.0.1", "::1"}
