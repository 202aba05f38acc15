"""What a server tells about its load: `/v1/loads` in both formats, and the older `/get_load`.

It reads the server's counts and changes none.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qs

from loadtest.engine_http import Exchange
from loadtest.engine_server import SimulatedServer

# What `include` may name, and the section that it means.
SECTIONS: Final = {
    "memory": "memory",
    "spec": "speculative",
    "lora": "lora",
    "disagg": "disaggregation",
    "queues": "queues",
}
NAMES: Final = ("core", *SECTIONS, "all")
PROMETHEUS: Final = b"text/plain; version=0.0.4; charset=utf-8"
PREFIXES: Final = {"speculative": "spec", "disaggregation": "disagg"}


async def v1_loads(server: SimulatedServer, exchange: Exchange) -> None:
    """`/v1/loads?include=…&format=…`."""
    query = parse_qs(exchange.query.decode("latin-1"))
    include = [part.strip() for value in query.get("include", []) for part in value.split(",")]
    wrong = sorted(set(include) - set(NAMES))
    if wrong:
        detail = f"Invalid include sections: {', '.join(wrong)}. Valid: {', '.join(NAMES)}"
        await exchange.reply_json(400, {"detail": detail})
        return
    load = one_load(server, set(include) or {"all"})
    if query.get("format") == ["prometheus"]:
        await exchange.reply(200, prometheus(load), PROMETHEUS)
        return
    body: dict[str, Any] = {
        "timestamp": datetime.fromtimestamp(server.wall(), UTC).isoformat(),
        "version": server.config.version,
    }
    if server.config.version == "0.5.12":  # has an `aggregate` too, whose shape is not known to us
        body["dp_rank_count"] = 1
    else:
        body |= {"accelerator": "NVIDIA H200", "num_accelerators": 1}
    await exchange.reply_json(200, body | {"loads": [load]})


async def get_load(server: SimulatedServer, exchange: Exchange) -> None:
    """`/get_load`, which newer versions do not have."""
    report = server.core.load()
    await exchange.reply_json(
        200,
        [
            {
                "dp_rank": 0,
                "num_reqs": report.running + report.waiting,
                "num_waiting_reqs": report.waiting,
                "num_tokens": report.used_tokens + report.waiting_tokens,
                "num_pending_tokens": report.waiting_tokens,
                "ts_tic": report.at,
            }
        ],
    )


def one_load(server: SimulatedServer, include: set[str]) -> dict[str, Any]:
    """One entry of `loads`. Sections appear when asked for, `spec` only once it was used."""
    core, config = server.core, server.config
    report, total = core.load(), core.batch.counters()
    used, waiting = report.used_tokens, report.waiting_tokens
    load: dict[str, Any] = {
        "timestamp": server.wall(report.at),
        "dp_rank": 0,
        "num_running_reqs": report.running,
        "num_waiting_reqs": report.waiting,
        "num_waiting_uncached_tokens": waiting,
        "num_used_tokens": used,
        "num_total_tokens": used + waiting,
        "num_active_tokens": used + waiting,
    }
    if config.version == "0.5.23":
        load["num_prealloc_ready_tokens"] = 0
    load |= {
        "max_total_num_tokens": config.max_total_tokens,
        "max_running_requests": config.cap,
        "token_usage": round(used / config.max_total_tokens, 4),
        "gen_throughput": round(core.pace.tokens_s, 2) if config.metrics else 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "total_prefill_uncached_tokens": total.prompt_tokens,
        "total_prefill_busy_us": int(
            core.curve.prefill_s(total.prefill_steps, total.prompt_tokens) * 1e6
        ),
        # Its length and type are imitated; the meaning of the numbers is not known to us.
        "decode_moments": [float(total.decode_steps), float(total.verify_calls), *[0.0] * 4],
    }
    sections = _sections(server)
    wanted = {SECTIONS[name] for name in include if name in SECTIONS}
    return load | {
        name: section for name, section in sections.items() if "all" in include or name in wanted
    }


def _sections(server: SimulatedServer) -> dict[str, dict[str, Any]]:
    """The optional sections in their order; `speculative` appears once something was decoded."""
    core, config = server.core, server.config
    report, total = core.load(), core.batch.counters()
    sections: dict[str, dict[str, Any]] = {
        "memory": {
            "weight_gb": 14.977,
            "kv_cache_gb": 16.0,
            "graph_gb": 0.979 if config.speculates else 0.307,
            "token_capacity": config.max_total_tokens,
        }
    }
    if config.speculates and core.pace.verify_calls:
        sections["speculative"] = {
            "accept_length": total.decode_tokens / total.verify_calls,
            "accept_rate": (core.pace.accept_length - 1) / (config.draft_tokens - 1)
            if config.metrics
            else 0.0,
        }
    sections["disaggregation"] = {
        "mode": "null",
        "prefill_bootstrap_queue_reqs": 0,
        "prefill_inflight_queue_reqs": 0,
        "decode_prealloc_queue_reqs": 0,
        "decode_transfer_queue_reqs": 0,
        "decode_retracted_queue_reqs": 0,
        "kv_transfer_speed_gb_s": 0.0,
        "kv_transfer_latency_ms": 0.0,
    }
    waiting = report.waiting
    sections["queues"] = {"waiting": waiting} | dict.fromkeys(
        ("grammar", "paused", "retracted", "prealloc_ready"), 0
    )
    return sections


def prometheus(load: dict[str, Any]) -> bytes:
    """The numbers of one entry in the text format; what is no number is left out."""
    lines = []
    for key, value in load.items():
        if key == "dp_rank":
            continue
        section = value if isinstance(value, dict) else {"": value}
        prefix = f"sglang_{PREFIXES.get(key, key)}"
        for name, number in section.items():
            if isinstance(number, (int, float)):
                metric = f"{prefix}_{name}" if name else prefix
                lines += [f"# TYPE {metric} gauge", f'{metric}{{dp_rank="0"}} {number}']
    return ("\n".join(lines) + "\n").encode()
