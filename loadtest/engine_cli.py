"""The command `loadtest engine`: one simulated SGLang server as a process.

Which values go together is `engine_config`'s to say.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
import yaml

from loadtest.curve_files import PAIRS, read_curve, shipped_curve
from loadtest.engine_config import ConfigError, EngineConfig
from loadtest.service import CurveError, ServiceCurve
from router.launch_flags import from_yaml, value_of
from router.load import Role


class Version(StrEnum):
    """Which SGLang to be."""

    CAPTURED = "0.5.17"
    NEWER = "0.5.23"
    OLDER = "0.5.12"


Port = Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)]
RoleOption = Annotated[Role, typer.Option("--role", help="Which server of the pair to be.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
CurveName = Annotated[
    str | None,
    typer.Option(help=f"A curve or sweep file, or {' or '.join(PAIRS)}.", metavar="FILE|PAIR"),
]
AcceptLength = Annotated[
    float | None, typer.Option(help="Tokens per step when speculating (default: the curve's).")
]
TopK = Annotated[
    int, typer.Option(help="Drafts per step when speculating; the curve says what it costs.")
]
MaxRunning = Annotated[
    int | None,
    typer.Option(help="Requests that run at once (default: the curve's, else 48 or 4096)."),
]
MaxQueued = Annotated[
    int | None, typer.Option(help="Requests that may wait; more get a 503 (default: no limit).")
]
TimeScale = Annotated[float, typer.Option(help="Everything takes this many times as long.")]
GpuLock = Annotated[
    Path | None, typer.Option(help="A file through which servers share one simulated GPU.")
]
ApiKey = Annotated[str | None, typer.Option(help="Ask for this key, as SGLang does.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A file as SGLang's --config; its api-key alone is read.", metavar="FILE"
    ),
]
Model = Annotated[str, typer.Option(help="Name of the served model.")]
ContextLength = Annotated[int, typer.Option(help="Tokens of prompt and output together.")]
Seed = Annotated[int, typer.Option(help="What the answers depend on besides the prompts.")]
SglangVersion = Annotated[Version, typer.Option(help="Whose routes to have.")]
CacheReport = Annotated[
    bool,
    typer.Option(
        "--prefix-cache",
        help="Keep prefixes as a radix cache does, and report hits as with --enable-cache-report.",
    ),
]
Metrics = Annotated[bool, typer.Option(help="Serve /metrics.")]
Die = Annotated[bool, typer.Option(help="Die of a token id that the model does not have.")]
HealthSeconds = Annotated[float, typer.Option(help="How long /health takes.", min=0)]
ShutdownPoll = Annotated[
    float, typer.Option(help="After SIGTERM, seconds between looks for the end.", min=0.01)
]


def engine(
    port: Port,
    role: RoleOption,
    host: Host = "127.0.0.1",
    curve: CurveName = None,
    accept_length: AcceptLength = None,
    topk: TopK = 1,
    max_running_requests: MaxRunning = None,
    max_queued_requests: MaxQueued = None,
    time_scale: TimeScale = 1.0,
    gpu_lock: GpuLock = None,
    api_key: ApiKey = None,
    config_file: ConfigFile = None,
    model: Model = "sim-llama-8b",
    context_length: ContextLength = 8192,
    seed: Seed = 0,
    sglang_version: SglangVersion = Version.CAPTURED,
    metrics: Metrics = True,
    prefix_cache: CacheReport = False,
    die_on_bad_token: Die = True,
    health_seconds: HealthSeconds = 1.0,
    shutdown_poll: ShutdownPoll = 5.0,
) -> None:
    """Run a simulated SGLang server with the speed of a measured or planted one."""
    try:
        config = EngineConfig(
            role=role,
            curve=_curve(curve, role),
            accept_length=accept_length,
            topk=topk,
            max_running_requests=max_running_requests,
            max_queued_requests=max_queued_requests,
            max_total_tokens=max(131_072, context_length),
            time_scale=time_scale,
            gpu_lock=gpu_lock,
            api_key=_key(config_file) if api_key is None else api_key,
            model=model,
            context_length=context_length,
            seed=seed,
            version=sglang_version.value,
            metrics=metrics,
            prefix_cache=prefix_cache,
            die_on_bad_token=die_on_bad_token,
            health_s=health_seconds,
            shutdown_poll_s=shutdown_poll,
        )
        _run(config, host, port)
    except (ConfigError, CurveError) as error:
        raise typer.BadParameter(str(error)) from error


def _key(file: Path | None) -> str | None:
    """The key in a file of flags, which no list of processes shows. Raises ConfigError."""
    if file is None:
        return None
    try:
        flags = from_yaml(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file} cannot be used: {error}") from error
    return value_of(flags, "api-key")


def _run(config: EngineConfig, host: str, port: int) -> None:
    import uvloop

    from loadtest.engine import serve

    try:
        code = uvloop.run(serve(config, host, port))
    except OSError as error:
        raise typer.BadParameter(
            f"cannot listen on {host}:{port} or use the GPU file: {error}."
            " Choose another --port, --host or --gpu-lock"
        ) from error
    raise typer.Exit(code)


def _curve(name: str | None, role: Role) -> ServiceCurve | None:
    if name is None:
        return None
    return shipped_curve(name, role) if name in PAIRS else read_curve(Path(name), role)
