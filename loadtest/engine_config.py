"""What a simulated server is told to be: values, and what of them does not go together.

Nothing is started here and no file is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from loadtest.curve_files import shipped_curve
from loadtest.service import ServiceCurve
from router.load import Role

# What SGLang chooses when --max-running-requests is not given: 48 as soon as it speculates
# (0.5.17 and later say so in a warning), up to 4096 without.
DEFAULT_CAP: Final = {Role.SPECULATIVE: 48, Role.BASELINE: 4096}
# The versions whose wire behaviour is imitated: the one that was captured, one with `/ready` (from
# 0.5.20) and without `/get_load` (gone by 0.5.22), and one in which a topk above 1 silently costs
# the overlapped scheduler. Only the first is captured; what the others do was read.
VERSIONS: Final = ("0.5.17", "0.5.23", "0.5.12")


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and says what would do."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of one simulated server. Times are seconds before `time_scale`."""

    role: Role = Role.BASELINE
    curve: ServiceCurve | None = None  # default: the planted pair's
    accept_length: float | None = None  # tokens per step; default: the curve's
    max_running_requests: int | None = None  # default: the curve's, else SGLang's for the role
    max_queued_requests: int | None = None  # default: no limit, as in SGLang
    max_total_tokens: int = 131_072  # of the KV cache
    time_scale: float = 1.0  # 2 makes everything take twice as long
    model: str = "sim-llama-8b"
    context_length: int = 8192
    topk: int = 1  # drafts per step of a speculative server; the curve says what it costs
    vocabulary: int = 128_256  # Llama 3's
    seed: int = 0
    natural_tokens: tuple[int, int] = (32, 256)  # without ignore_eos an answer ends in this range
    api_key: str | None = None
    version: str = VERSIONS[0]
    metrics: bool = True
    prefix_cache: bool = False  # keep prefixes, and report hits as with --enable-cache-report
    gpu_lock: Path | None = None  # file through which two servers share one GPU
    die_on_bad_token: bool = True  # a token id outside the vocabulary ends the server
    health_s: float = 1.0  # SGLang sleeps this long in the handler of /health
    disconnect_poll_s: float = 4.0  # how often a non-streaming request looks for its client
    shutdown_poll_s: float = 5.0  # how often a server that got SIGTERM looks whether it is idle
    crash_s: float = 5.0  # from a bad token to the closed connection
    keep_alive_s: float = 5.0  # idle connections close after this (not scaled)
    publish_steps: int = 15  # decode steps between two load snapshots
    metrics_steps: int = 40  # decode steps between two updates of the gauges

    def __post_init__(self) -> None:
        """Refuse what cannot work, with the name that the command line uses."""
        problems = [
            f"--{name} must be {wanted}, got {value}"
            for name, value, ok, wanted in (
                ("time-scale", self.time_scale, 0 < self.time_scale < 1e6, "above 0"),
                ("accept-length", self.accept_length, (self.accept_length or 1) >= 1, "1 or more"),
                ("topk", self.topk, self.topk >= 1, "1 or more"),
                ("context-length", self.context_length, self.context_length >= 2, "2 or more"),
                ("sglang-version", self.version, self.version in VERSIONS, " or ".join(VERSIONS)),
                (
                    "max-running-requests",
                    self.max_running_requests,
                    self.max_running_requests is None or self.max_running_requests >= 1,
                    "1 or more",
                ),
                (
                    "max-queued-requests",
                    self.max_queued_requests,
                    self.max_queued_requests is None or self.max_queued_requests >= 0,
                    "0 or more",
                ),
                (
                    "max-total-tokens",
                    self.max_total_tokens,
                    self.max_total_tokens >= self.context_length,
                    f"at least the context length ({self.context_length})",
                ),
            )
            if not ok
        ]
        if problems:
            raise ConfigError("; ".join(problems))

    @classmethod
    def quick(cls, role: Role | str = Role.BASELINE, **settings: Any) -> EngineConfig:
        """A server for tests: planted speed 20 times as fast, and no wait that only takes time."""
        fast = {
            "time_scale": 0.05,
            "health_s": 0.0,
            "crash_s": 0.0,
            "disconnect_poll_s": 2.0,
            "shutdown_poll_s": 1.0,
        }
        return cls(role=Role(role), **(fast | settings))

    @property
    def speculates(self) -> bool:
        """Whether this server runs with speculative decoding."""
        return self.role is Role.SPECULATIVE

    @property
    def has_ready(self) -> bool:
        """Whether this version answers `/ready`."""
        return self.version == "0.5.23"

    @property
    def has_get_load(self) -> bool:
        """Whether this version still answers `/get_load`."""
        return self.version != "0.5.23"

    @property
    def overlaps(self) -> bool:
        """Whether the scheduler overlaps with the GPU: up to 0.5.12 not with a topk above 1."""
        return not (self.speculates and self.topk > 1 and self.version == "0.5.12")

    @property
    def draft_tokens(self) -> int:
        """Draft tokens of a verify step, as the captured servers had them: 4, or 8 of a tree."""
        return 4 if self.topk == 1 else 8

    @property
    def cap(self) -> int:
        """The largest number of requests that run at once."""
        return self.max_running_requests or self.service.max_running or DEFAULT_CAP[self.role]

    @property
    def service(self) -> ServiceCurve:
        """The curve in use, with the accept length in use."""
        curve = self.curve or shipped_curve("planted-12", self.role)
        if not self.speculates and (self.accept_length or curve.tokens_per_step) != 1:
            raise ConfigError(
                "a baseline server emits one token per step: leave out --accept-length, or give it"
                f" a baseline's curve (got {curve.label!r})"
            )
        return curve if self.accept_length is None else curve.accepting(self.accept_length)
