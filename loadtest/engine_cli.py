"""`loadtest engine`: one simulated SGLang server as a process."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from loadtest.curve_files import PAIRS, read_curve, shipped_curve
from loadtest.engine_config import ConfigError, EngineConfig
from loadtest.service import CurveError, ServiceCurve
from router.load import Role


class Version(StrEnum):
    """Which SGLang to be."""

    CAPTURED = "0.5.17"
    NEWER = "0.5.23"


def engine(
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ],
    role: Annotated[Role, typer.Option(help="Which server of the pair to be.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    curve: Annotated[
        str | None,
        typer.Option(
            help=f"A curve or sweep file, or a shipped pair ({', '.join(PAIRS)}).",
            metavar="FILE|PAIR",
        ),
    ] = None,
    accept_length: Annotated[
        float | None, typer.Option(help="Tokens per step when speculating (default: the curve's).")
    ] = None,
    max_running_requests: Annotated[
        int | None,
        typer.Option(
            help="Requests that run at once; more wait (default: the curve's, else 48 or 4096)."
        ),
    ] = None,
    max_queued_requests: Annotated[
        int | None, typer.Option(help="Requests that may wait; more get a 503 (default: no limit).")
    ] = None,
    time_scale: Annotated[
        float, typer.Option(help="Makes everything take this many times as long.")
    ] = 1.0,
    gpu_lock: Annotated[
        Path | None, typer.Option(help="A file through which servers share one simulated GPU.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Ask for this key, as SGLang does.")] = None,
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "sim-llama-8b",
    context_length: Annotated[
        int, typer.Option(help="Tokens of prompt and output together.")
    ] = 8192,
    seed: Annotated[int, typer.Option(help="What the answers depend on besides the prompts.")] = 0,
    sglang_version: Annotated[
        Version, typer.Option(help="Whose routes to have.")
    ] = Version.CAPTURED,
    metrics: Annotated[bool, typer.Option(help="Serve /metrics.")] = True,
    die_on_bad_token: Annotated[
        bool, typer.Option(help="Die of a token id outside the vocabulary, as SGLang does.")
    ] = True,
    health_seconds: Annotated[float, typer.Option(help="How long /health takes.", min=0)] = 1.0,
    shutdown_poll: Annotated[
        float, typer.Option(help="Seconds between looks for the end after SIGTERM.", min=0.01)
    ] = 5.0,
) -> None:
    """Run a simulated SGLang server with the speed of a measured or planted one."""
    import uvloop

    from loadtest.engine import serve

    try:
        config = EngineConfig(
            role=role,
            curve=_curve(curve, role),
            accept_length=accept_length,
            max_running_requests=max_running_requests,
            max_queued_requests=max_queued_requests,
            max_total_tokens=max(131_072, context_length),
            time_scale=time_scale,
            gpu_lock=gpu_lock,
            api_key=api_key,
            model=model,
            context_length=context_length,
            seed=seed,
            version=sglang_version.value,
            metrics=metrics,
            die_on_bad_token=die_on_bad_token,
            health_s=health_seconds,
            shutdown_poll_s=shutdown_poll,
        )
        code = uvloop.run(serve(config, host, port))
    except (ConfigError, CurveError) as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        raise typer.BadParameter(
            f"cannot listen on {host}:{port} or use the GPU file: {error.strerror or error};"
            " choose another --port, --host or --gpu-lock"
        ) from error
    raise typer.Exit(code)


def _curve(name: str | None, role: Role) -> ServiceCurve | None:
    if name is None:
        return None
    return shipped_curve(name, role) if name in PAIRS else read_curve(Path(name))
