"""Every setting: its name, kind, default and what it does, in groups.

The name is the key in the file, the flag (with dashes) and, in capitals after `CROSSOVER_`, the
environment variable. The text under a setting is its help and its documentation, and the example
at its end is tried by a test. A kind carries its unit: `Seconds` takes 5, "5s" or "250ms", `Size`
bytes, takes 65536 or "64KiB".

What only makes sense together is in `config_checks`.
"""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from router.config_types import (
    GIB,
    KIB,
    MIB,
    Backend,
    Count,
    CountOrZero,
    ExistingFile,
    Factor,
    Key,
    Keys,
    ListenHost,
    Origins,
    Port,
    Seconds,
    SecondsOrZero,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    Size,
    Threshold,
)

PolicyName = Literal["frontier", "speculative", "baseline", "least-in-flight", "round-robin"]
RuleName = Literal["threshold", "forecast", "join-speed", "join-delay"]
Scope = Literal["total", "speculative"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


class Group(BaseModel):
    """Settings that are shown together under `title`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        # A rejected value may be a secret.
        hide_input_in_errors=True,
    )

    title: ClassVar[str]


class Backends(Group):
    """The pair."""

    title = "Backends"

    speculative: Backend
    """Base URL of the server with speculative decoding. With or without a trailing slash or /v1: \
both are dropped, and what is left is put before every path. Example: http://127.0.0.1:31000"""
    baseline: Backend
    """Base URL of the server without speculative decoding; same rule. \
Example: http://127.0.0.1:30000/v1"""
    backend_api_key: Key | None = None
    """The key that both backends want, sent instead of the client's. Example: sk-backend"""
    speculative_api_key: Key | None = None
    """As backend_api_key, for the speculative server only. Example: sk-speculative"""
    baseline_api_key: Key | None = None
    """As backend_api_key, for the baseline server only. Example: sk-baseline"""


class Routing(Group):
    """Which of the two serves a request."""

    title = "Decision"

    policy: PolicyName = "frontier"
    """How to decide. frontier compares the concurrency with the threshold; the others are for \
comparison. Example: least-in-flight"""
    threshold: Threshold | None = None
    """The most requests that run while the speculative server is used: a crossover measured at a \
concurrency of 32 is 32. Or always, or never. This or calibration, not both. Example: 32"""
    calibration: ExistingFile | None = None
    """A measured frontier instead of a number, as a file (router/calibration.py has its schema). \
Example: calibration.json"""
    calibration_interval: Seconds = 2.0
    """How often that file is looked at: one that was replaced is in force without a restart. Example: 10s"""
    rule: RuleName | None = None
    """How frontier follows a calibration: by its threshold, or by its curves (forecast for servers \
that share GPUs, join-speed and join-delay for a GPU each). Without it the calibration says; if it \
does not, threshold. Example: threshold"""
    acceptance_aware: Literal["auto", "off"] = "auto"
    """Move the line with the live accept length; auto does wherever the calibration has accept lengths. Example: off"""
    acceptance_smoothing: Seconds = 30.0
    """The time constant with which the live accept length is smoothed for it. Example: 1m"""
    acceptance_bound: Factor = 2.0
    """The accept length is followed between the calibrated one divided and multiplied by this. Example: 1.5"""
    scope: Scope = "total"
    """What a threshold is compared with: total counts both servers (they share GPUs), speculative \
fills that server and lets the rest overflow (they do not). Example: speculative"""
    band: ShareBelowOne = 0.2
    """How far below the threshold the concurrency must fall before the speculative server is used \
again, as a share of it: 0.2 of 32 is 25.6. 0 is no band. Example: 0.1"""
    dwell: SecondsOrZero = 5.0
    """How long it must have been below that. Leaving the speculative server never waits. \
Example: 20s"""
    queue_mark: CountOrZero | None = None
    """More than this many requests queued inside one backend send new ones to the other. Without it \
0, and no number for the threshold of servers that share GPUs (scope total): there a few that wait \
for a prefill are no reason to make both work at once. Example: 4"""
    kv_mark: ShareAboveZero = 0.95
    """A larger share of the KV cache in use on one backend sends new requests to the other. \
Example: 0.9"""
    affinity: Literal["auto", "off"] = "auto"
    """Keep a conversation on the server that has its prefix in its cache, where moving it would cost \
more than it gains. auto does if each server has its own GPU (scope speculative, join-speed, \
join-delay); on shared GPUs nothing stays. Example: off"""
    fence_structured_output: bool = False
    """Keep requests for JSON, a grammar or a required tool on the baseline server."""
    fence_logprobs: bool = False
    """Keep requests for log probabilities on the baseline server."""
    fence_n: bool = False
    """Keep requests for more than one choice on the baseline server."""
    fence_prompt_bytes: Size | None = None
    """Keep requests whose body is longer than this on the baseline server (prompts beyond the draft \
model's window). Example: 16KiB"""
    allow_pinning: bool = False
    """Obey a client's x-crossover-backend header."""


class Listeners(Group):
    """Where clients and operators connect."""

    title = "Listeners"

    host: ListenHost = "127.0.0.1"
    """Address of the public listener. Example: 0.0.0.0"""
    port: Port = 8000
    """Port of the public listener; 0 takes any free one. Example: 8080"""
    admin_host: ListenHost = "127.0.0.1"
    """Address of the admin listener (metrics, status, decisions, drain). Off loopback it wants \
admin_key or admin_open. Example: 0.0.0.0"""
    admin_port: Port = 9400
    """Port of the admin listener; 0 takes any free one. Example: 9401"""
    admin_key: Key | None = None
    """The key of the admin listener; without it nothing can be changed there. \
Example: sk-operator"""
    admin_open: bool = False
    """Let anyone who reaches the admin listener read it, also from other machines."""
    ssl_certfile: ExistingFile | None = None
    """Serve the public listener over TLS with this certificate chain. Example: cert.pem"""
    ssl_keyfile: ExistingFile | None = None
    """The private key of ssl_certfile. Example: key.pem"""
    cors_origin: Origins = ()
    """Answer browsers of these origins (comma separated, or *); without keys, pages of others may \
only read. Example: https://chat.example"""
    workers: Count = 1
    """Always 1, because one process owns the counts; there for those who look for it. \
Example: 1"""
    api_keys: Keys = ()
    """The keys that clients may use (comma separated); none lets everyone in. Better in the \
environment or in api_keys_file: flags are seen by every user of the machine. \
Example: sk-one,sk-two"""
    api_keys_file: ExistingFile | None = None
    """More such keys, one on a line; a line that starts with # is a comment. Example: keys.txt"""


class Limits(Group):
    """What one process takes on, in number and in bytes."""

    title = "Limits"

    max_in_flight: Count = 2048
    """Requests open on the backends; the next ones wait in the queue. Example: 512"""
    queue_size: CountOrZero = 1024
    """Requests that may wait; beyond it the answer is 429. Example: 256"""
    queue_timeout: SecondsOrZero = 10.0
    """The longest wait in the queue before a 429. Example: 2s"""
    max_body: Size = 64 * MIB
    """The largest request body; beyond it the answer is 413. Example: 16MiB"""
    max_buffered: Size = 1 * GIB
    """Bytes of request bodies held in memory at once, over all clients. Example: 4GiB"""
    max_header_bytes: Size = 32 * KIB
    """The largest request head; beyond it the answer is 431. Example: 64KiB"""
    max_headers: Count = 100
    """The most header fields in a request; beyond it the answer is 431. Example: 200"""
    max_url_bytes: Size = 8 * KIB
    """The longest request target; a longer one is refused. Example: 4KiB"""
    max_connections: Count = 8192
    """Client connections, idle ones included; more are turned away, and so are those that the \
system's limit on open files leaves no room for. Example: 20000"""


class Timeouts(Group):
    """How long each phase of a request may take."""

    title = "Timeouts and retries"

    header_timeout: Seconds = 10.0
    """From connecting to the end of the request's head. Example: 5s"""
    body_timeout: Seconds = 30.0
    """The longest pause while a request's body arrives. Example: 1m"""
    keep_alive: Seconds = 75.0
    """How long an idle client connection is kept. Longer than that of the proxy in front. \
Example: 2m"""
    connect_timeout: Seconds = 3.0
    """To connect to a backend; then the other one is tried. Example: 500ms"""
    first_byte_timeout: Seconds = 900.0
    """From sending a request to the first byte of its answer; queueing and prefill are in it. \
Example: 5m"""
    idle_timeout: Seconds = 300.0
    """The longest silence within an answer. Example: 1m"""
    write_timeout: Seconds = 60.0
    """How long a client may take nothing of its answer. Example: 30s"""
    backend_keep_alive: Seconds = 4.0
    """How long an idle backend connection is reused. Shorter than the backend's own keep-alive, \
which is 5 s for SGLang. Example: 2s"""
    replay_window: SecondsOrZero = 0.25
    """A reused connection that breaks within this time and without an answer is tried once more, \
on a fresh one to the same backend; 0 never does. Example: 100ms"""
    peek_timeout: SecondsOrZero = 0.05
    """How long a stream's first event is waited for, to see whether it is a refusal; 0 does not \
look. Example: 20ms"""
    peek_bytes: Size = 8 * KIB
    """How much of a stream is held back for it. Example: 4KiB"""
    retry_budget: Share = 0.2
    """The share of requests that may be tried on the other backend after a refusal. \
Example: 0.1"""
    drain_delay: SecondsOrZero = 2.0
    """After SIGTERM: how long to go on accepting while /ready already says no. Example: 10s"""
    drain_timeout: SecondsOrZero = 60.0
    """Then: how long running requests may take to finish. Example: 5m"""


class Watching(Group):
    """How the backends are watched, and when one is left alone."""

    title = "Telemetry and health"

    telemetry_interval: Seconds = 0.2
    """How often a backend is asked for its load. Example: 500ms"""
    telemetry_stale: Seconds = 2.0
    """Telemetry older than this counts as absent. Example: 5s"""
    ready_interval: Seconds = 1.0
    """How often a backend is asked whether it is ready. Example: 2s"""
    health_interval: Seconds = 15.0
    """How often a silent backend's own health check, which runs the model, is called. \
Example: 30s"""
    health_timeout: Seconds = 25.0
    """How long it may take; SGLang's answers within 20 s by design. Example: 40s"""
    health_down_after: Count = 3
    """Failed checks in a row that take a backend out. Example: 2"""
    health_up_after: Count = 2
    """Passed checks in a row that bring it back. Example: 1"""
    pair_interval: Seconds = 180.0
    """How often the pair is asked whether it still speculates and is still comparable; also as soon \
as a backend has come back. Example: 10m"""
    breaker_failures: Count = 5
    """Failed requests in a row that open a backend's breaker. Example: 3"""
    breaker_open: Seconds = 5.0
    """How long it stays open the first time; twice as long each time after. Example: 2s"""
    breaker_open_max: Seconds = 60.0
    """The longest it stays open. Example: 5m"""
    cool_down: SecondsOrZero = 1.0
    """How long a backend that answered 429 or 503 gets no new request. Example: 250ms"""


class Logging(Group):
    """What is written to standard error."""

    title = "Log"

    log_level: LogLevel = "info"
    """The least severe line that is written. Example: debug"""
    access_log: bool = True
    """One line of JSON per request, without its prompt."""


GROUPS: tuple[type[Group], ...] = (
    Backends,
    Routing,
    Listeners,
    Limits,
    Timeouts,
    Watching,
    Logging,
)
