"""The routes that tell about a simulated server: health, models, `/server_info`, metrics.

Nothing is generated here.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec

from loadtest.engine_http import TEXT, Exchange
from loadtest.engine_metrics import page
from loadtest.engine_server import SimulatedServer

PROMETHEUS: Final = b"text/plain; version=0.0.4; charset=utf-8"
CACHE_FLUSHED: Final = (
    b"Cache flushed.\nPlease check backend logs for more details. (When there are running or"
    b" waiting requests, the operation will not be performed.)\n"
)
PREFLIGHT_VARY: Final = (
    b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers,"
    b" Access-Control-Request-Private-Network"
)
# What EAGLE-3 resolves to, but for topk and what follows from it; all null on a baseline.
SPECULATIVE: Final = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "/models/draft",
    "speculative_draft_model_revision": "main",
    "speculative_draft_load_format": "dummy",
    "speculative_num_steps": 3,
}


async def health(server: SimulatedServer, exchange: Exchange) -> None:
    """`/health` and `/health_generate`: slow by design, and 503 as soon as the server drains."""
    if not server.draining:
        await exchange.pause(server.scaled(server.config.health_s))
    await exchange.reply(503 if server.draining else 200, content_type=None)


async def ready(server: SimulatedServer, exchange: Exchange) -> None:
    """`/ready` and `/ping`: a flag."""
    await exchange.reply(503 if server.draining else 200, content_type=None)


async def root(_: SimulatedServer, exchange: Exchange) -> None:
    """`/`, which Ollama's clients ask for."""
    await exchange.reply_json(200, "SGLang is running")


async def models(server: SimulatedServer, exchange: Exchange) -> None:
    """`/v1/models`; `created` is the time of the call."""
    await exchange.reply_json(200, {"object": "list", "data": [_card(server)]})


async def one_model(server: SimulatedServer, exchange: Exchange) -> None:
    """`/v1/models/{id}`, the one place with OpenAI's error shape."""
    name = exchange.path.removeprefix("/v1/models/")
    if name == server.config.model:
        await exchange.reply_json(200, _card(server))
        return
    error = {
        "message": f"The model '{name}' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    await exchange.reply_json(404, {"error": error})


async def model_info(_: SimulatedServer, exchange: Exchange) -> None:
    """`/model_info`."""
    await exchange.reply_json(200, _shipped("model_info"))


async def server_info(server: SimulatedServer, exchange: Exchange) -> None:
    """`/server_info`: everything that the real one tells, its secrets in clear included."""
    await exchange.reply_json(200, info(server))


async def metrics(server: SimulatedServer, exchange: Exchange) -> None:
    """`/metrics`."""
    await exchange.reply(200, page(server), PROMETHEUS)


async def flush_cache(server: SimulatedServer, exchange: Exchange) -> None:
    """`/flush_cache`: refused while there is work."""
    if server.core.batch.idle:
        server.prefixes.flush()
        await exchange.reply(200, CACHE_FLUSHED, None)
    else:
        await exchange.reply(400, CACHE_FLUSHED.replace(b"Cache flushed.", b"Flush failed."), None)


async def abort_request(server: SimulatedServer, exchange: Exchange) -> None:
    """`/abort_request`: always 200, whatever it found."""
    try:
        body = msgspec.json.decode(exchange.body, type=dict[str, Any])
    except msgspec.MsgspecError:
        body = {}
    if body.get("abort_all"):
        server.abort("")
    elif isinstance(body.get("rid"), str) and body["rid"]:
        server.abort(body["rid"])
    await exchange.reply(200, content_type=None)


async def preflight(_: SimulatedServer, exchange: Exchange) -> None:
    """A browser's question before a request to another origin."""
    headers: tuple[tuple[bytes, bytes], ...] = (
        (b"vary", PREFLIGHT_VARY),
        (b"access-control-allow-methods", b"DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY"),
        (b"access-control-max-age", b"600"),
        (b"access-control-allow-credentials", b"true"),
        (b"access-control-allow-origin", exchange.headers[b"origin"]),
    )
    wanted = exchange.headers.get(b"access-control-request-headers")
    if wanted is not None:
        headers += ((b"access-control-allow-headers", wanted),)
    await exchange.reply(200, b"OK", TEXT, headers)


def info(server: SimulatedServer) -> dict[str, Any]:
    """The body of `/server_info`: the captured one with this server's settings put in."""
    config, core = server.config, server.core
    shipped = _shipped("server_info")
    mine: dict[str, Any] = {
        "model_path": "/models/target",
        "served_model_name": config.model,
        "context_length": config.context_length,
        "max_running_requests": config.cap,
        "max_queued_requests": config.max_queued_requests,
        "max_total_tokens": config.max_total_tokens,
        "api_key": config.api_key,
        "enable_metrics": config.metrics,
        "enable_cache_report": config.prefix_cache,
        "load_snapshot_publish_interval": config.publish_steps,
        "decode_log_interval": config.metrics_steps,
        "random_seed": config.seed,
        "port": server.port,
        "disable_overlap_schedule": not config.overlaps,
    }
    if config.speculates:
        mine |= SPECULATIVE | {
            "speculative_eagle_topk": config.topk,
            "speculative_num_draft_tokens": config.draft_tokens,
        }
    total = core.batch.counters()
    state = shipped["server_info"] | shipped["internal_state"] | mine
    for name in ("custom_sigquit_handler", "status", "max_total_num_tokens", "max_req_input_len"):
        state.pop(name, None)
    for name in ("version", "kv_events"):
        state.pop(name, None)
    state |= {
        "max_speculative_num_draft_tokens": config.draft_tokens if config.speculates else None,
        "last_gen_throughput": core.pace.tokens_s,
        "effective_max_running_requests_per_dp": config.cap,
        "pp_max_micro_batch_size": config.cap,
    }
    if config.speculates and core.pace.verify_calls:
        state["avg_spec_accept_length"] = total.decode_tokens / total.verify_calls
    body: dict[str, Any] = shipped["server_info"] | mine
    body |= {
        "max_total_num_tokens": config.max_total_tokens,
        "max_req_input_len": config.context_length - 6,
        "version": config.version,
    }
    if config.version == "0.5.23":
        body |= {"launch_command": f"sglang serve --port {server.port}", "frontend": "python"}
    if config.version == "0.5.12":
        for told in (body, state):
            _older(told)
    return body | {"internal_states": [state]}


def _older(told: dict[str, Any]) -> None:
    """Say it as 0.5.12 did: CUDA graphs by their old flags, and no batch size for each phase."""
    decode = told.pop("cuda_graph_config")["decode"]
    for name in [name for name in told if name.startswith("cuda_graph_")]:
        del told[name]
    told |= {"cuda_graph_max_bs": decode["max_bs"], "cuda_graph_bs": decode["bs"]}


def _card(server: SimulatedServer) -> dict[str, Any]:
    name = server.config.model
    return {
        "id": name,
        "object": "model",
        "created": int(server.wall()),
        "owned_by": "sglang",
        "root": name,
        "parent": None,
        "max_model_len": server.config.context_length,
    }


@cache
def _shipped(name: str) -> dict[str, Any]:
    """A captured answer from `data/`."""
    path = resources.files("loadtest").joinpath(f"data/sglang-0.5.17/{name}.json")
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
