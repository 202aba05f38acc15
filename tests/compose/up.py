"""`make compose-test`: build, start, use, break, stop and restart the stack of compose.yaml.

Named so that `make test` does not collect it: it needs a Docker engine, and minutes. The tests run
in their order, on one stack. Without an engine all of them are skipped, with the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import yaml
from openai import OpenAI

from tests.compose.stack import ASK, ROOT, Stack, engine_or_skip

pytestmark = pytest.mark.timeout(900)
MODEL = "sim-llama-8b"
ENGINES = {
    "speculative": "http://speculative:31000/metrics",
    "baseline": "http://baseline:30000/metrics",
}
STREAMS = 8
LOOK_S = 0.25


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack, built and running; removed whatever happens."""
    found = Stack(engine_or_skip(), tmp_path_factory.mktemp("stack"))
    try:
        if grafana_problem(found) is None:
            found.services.append("grafana")
        say(f"built, up and healthy in {found.up():.0f} s ({', '.join(found.services)})")
        yield found
    finally:
        found.remove()
        assert found.left() == ""


def say(text: str) -> None:
    """A figure for the one who runs this (pytest -s)."""
    print(f"\n    {text}", end=" ")  # noqa: T201 - a test that is a program


def grafana_problem(stack: Stack) -> str | None:
    """Why there is no Grafana here; None if its image is here or can be had."""
    images = stack.run("config", "--images").split()
    image = next(one for one in images if "grafana" in one)
    said = ""
    for arguments in (["image", "inspect", image], ["pull", "-q", image]):
        done = subprocess.run(
            [stack.docker, *arguments], capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode == 0:
            return None
        said = done.stderr.strip()[:160]
    return f"{image} cannot be pulled: {said}"


def samples_on(page: str) -> dict[str, str]:
    """The series on a page of metrics, as they are written, and their values."""
    lines = (line for line in page.splitlines() if line and not line.startswith("#"))
    return dict(line.rsplit(" ", 1) for line in lines)


def written(metric: dict[str, str]) -> str:
    """A series of Prometheus as it is written on the page that it came from."""
    own = {k: v for k, v in metric.items() if k not in {"__name__", "instance", "job"}}
    labels = ",".join(f'{label}="{own[label]}"' for label in sorted(own))
    return metric["__name__"] + (f"{{{labels}}}" if labels else "")


def in_prometheus(stack: Stack, job: str, backend: str | None = None) -> set[str]:
    """Every series that Prometheus has of a job, or of one server, as its page writes it."""
    where = f'job="{job}"' + (f',backend="{backend}"' if backend else "")
    found = stack.prometheus(f"query?query={quote(f'{{{where}}}')}")["result"]
    return {written(one["metric"]) for one in found}


def names_on(page: str) -> tuple[set[str], set[str]]:
    """The families of a page of metrics, and the names of its series."""
    families = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    series = set(re.findall(r"^([a-zA-Z_:][\w:]*)[ {]", page, re.MULTILINE))
    return families, series


def test_everything_is_healthy(stack: Stack) -> None:
    """All services are healthy, `prepare` ended with 0, and nothing runs as root in our image."""
    assert stack.state("prepare")["State"]["ExitCode"] == 0
    for service in stack.services:
        assert stack.state(service)["State"]["Health"]["Status"] == "healthy", service
    assert stack.run("exec", "-T", "router", "id", "-u").strip() == "10001"
    done = stack.run("exec", "-T", "router", "sh", "-c", "touch /here 2>&1 || true")
    assert "Read-only" in done
    image = stack.image_facts()
    assert image["Config"]["Labels"]["org.opencontainers.image.title"] == "Crossover"
    assert image["Config"]["Entrypoint"] == ["crossover"]
    assert image["Config"]["User"] == "10001:10001"
    base = os.environ.get("PYTHON_IMAGE", "python:3.11-slim-bookworm")
    say(f"image {image['Size'] / 1e6:.0f} MB on {base}")


def test_the_admin_listener_wants_its_key(stack: Stack) -> None:
    """A key was made; without it nothing can be read on the admin port, with it everything."""
    key = stack.first_key = stack.key()
    assert len(key) >= 40
    assert stack.admin("/metrics", None).status_code == 401
    assert stack.admin("/status", "wrong").status_code == 401
    assert stack.admin("/status", key).status_code == 200


def test_the_official_client_is_served(stack: Stack) -> None:
    """OpenAI's own client gets an answer and a stream from the host, and is told which server."""
    client = OpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="none")
    assert [one.id for one in client.models.list()] == [MODEL]
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 16,
    }
    answer = client.chat.completions.with_raw_response.create(**asked)
    assert answer.parse().choices[0].message.content
    assert answer.headers["x-crossover-backend"] == "speculative"
    assert answer.headers["x-crossover-reason"] == "below_threshold"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[-1].choices[0].finish_reason is not None
    client.close()


def test_a_load_goes_over_the_line(stack: Stack) -> None:
    """More requests than the line allows are served by both servers, all of them whole."""
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: stack.chat(max_tokens=24, ignore_eos=True), range(96)))
    assert {one.status_code for one in answers} == {200}
    assert {one.json()["usage"]["completion_tokens"] for one in answers} == {24}
    backends = [one.headers["x-crossover-backend"] for one in answers]
    say(f"96 requests, 24 at once: {backends.count('baseline')} to the baseline")
    assert set(backends) == {"speculative", "baseline"}


def test_prometheus_has_every_series(stack: Stack) -> None:
    """All three targets are up, and every series of the router and of both servers is there."""
    end = time.monotonic() + 60
    while True:
        up = {
            (one["metric"]["job"], one["metric"].get("backend")): one["value"][1]
            for one in stack.prometheus("query?query=up")["result"]
        }
        if set(up.values()) == {"1"} or time.monotonic() > end:
            break
        time.sleep(LOOK_S)
    assert up == {
        ("crossover", None): "1",
        ("sglang", "speculative"): "1",
        ("sglang", "baseline"): "1",
    }
    end = time.monotonic() + 90
    while True:  # what the router learns from traffic needs some: streams of even company
        families, series = names_on(stack.admin("/metrics", stack.first_key).text)
        empty = {f for f in families if not any(name.startswith(f) for name in series)}
        if not empty or time.monotonic() > end:
            break
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: stack.chat(max_tokens=64, ignore_eos=True), range(16)))
    assert empty == set()
    router = samples_on(stack.admin("/metrics", stack.first_key).text)
    ours = {series for series in router if series.startswith("crossover_")}
    end = time.monotonic() + 30  # the last of them may have been born after the last scrape
    while ours - in_prometheus(stack, "crossover") and time.monotonic() < end:
        time.sleep(LOOK_S)
    assert ours - in_prometheus(stack, "crossover") == set()
    names: set[str] = set()
    for role, url in ENGINES.items():
        page = stack.run("exec", "-T", "router", "python", "-c", ASK, url)
        names = names_on(page)[1]
        assert "sglang:num_running_reqs" in names
        assert names <= {name.partition("{")[0] for name in in_prometheus(stack, "sglang", role)}
    assert router["crossover_calibration_matches"] == "1.0"
    assert router["crossover_speculation_active"] == "1.0"
    say(f"{len(ours)} series of the router, {len(names)} metrics of a server")


def test_the_alerts_are_loaded_and_silent(stack: Stack) -> None:
    """Prometheus has every alert and recording rule, evaluates them, and none fires."""
    wanted = {
        rule.get("alert") or rule["record"]
        for path in (ROOT / "deploy" / "prometheus" / "rules").glob("*.yml")
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    }
    end = time.monotonic() + 60
    while True:
        groups = stack.prometheus("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        if {rule["health"] for rule in rules} == {"ok"} or time.monotonic() > end:
            break
        time.sleep(LOOK_S)
    assert {rule["name"] for rule in rules} == wanted
    assert {rule["health"] for rule in rules} == {"ok"}
    firing = [rule["name"] for rule in rules if rule.get("state") == "firing"]
    assert firing == []
    say(f"{len(rules)} rules loaded, none firing")


def test_grafana_has_the_dashboard(stack: Stack) -> None:
    """Grafana serves the provisioned dashboard; skipped where its image cannot be pulled."""
    problem = grafana_problem(stack)
    if problem is not None:
        pytest.skip(problem)
    port = stack.environ["GRAFANA_PORT"]
    found = httpx.get(f"http://127.0.0.1:{port}/api/search", trust_env=False, timeout=20).json()
    assert any("rossover" in one["title"] for one in found)


def test_one_server_may_die(stack: Stack) -> None:
    """With the speculative server killed every request is still answered, and it is used again."""
    stack.run("kill", "-s", "KILL", "speculative-sim")
    answers = [stack.chat(max_tokens=8) for _ in range(20)]
    assert {one.status_code for one in answers} == {200}
    assert {one.headers["x-crossover-backend"] for one in answers} == {"baseline"}
    stack.up()
    end = time.monotonic() + 60
    while stack.chat(max_tokens=4).headers["x-crossover-backend"] != "speculative":
        assert time.monotonic() < end, "the server that came back was not used within 60 s"
        time.sleep(LOOK_S)
    say("20 of 20 answered while the speculative server was dead; used again after its start")


def test_the_pair_is_calibrated_in_place(stack: Stack) -> None:
    """`docker compose run calibrate` measures the pair, and the router that is made anew follows."""
    path = "/calibration/sim.json"
    assert stack.admin("/status", stack.first_key).json()["calibration"]["path"] != path
    quick = "--levels 1,4,16 --passes 1 --seconds 1 --warm-up 0.5 --input-tokens 64"
    quick += " --output-tokens 16 --no-overlap --gpus shared"
    said = stack.run("run", "--rm", "-T", "calibrate", *quick.split(), seconds=300)
    assert f"written: {path}" in said
    stack.run("up", "-d", "--wait", "--force-recreate", "prepare", "router", seconds=300)
    found = stack.admin("/status", stack.first_key).json()["calibration"]
    assert (found["path"], found["matches"]) == (path, True)
    say(f"calibrated in place: {said.splitlines()[-1]}, K = {found['threshold']:g}")


def stream(stack: Stack, started: Event) -> tuple[bool, int]:
    """Read one long stream: whether it ended as it should, and its tokens."""
    body = {
        "model": "m", "messages": [{"role": "user", "content": "tell me"}], "max_tokens": 384,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    lines = []
    with stack.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            started.set()
            if line:
                lines.append(line)
    usage = re.search(r'"completion_tokens": ?(\d+)', lines[-2])
    return lines[-1] == "data: [DONE]", int(usage[1]) if usage else 0


def test_streams_end_when_the_stack_stops(stack: Stack) -> None:
    """`docker compose stop` lets the streams that run finish, and every program ends with 0."""
    events = [Event() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(stream, stack, event) for event in events]
        assert all(event.wait(30) for event in events)
        assert not any(one.done() for one in running)
        begun = time.monotonic()
        stack.run("stop", seconds=200)
        took = time.monotonic() - begun
        assert [one.result(1) for one in running] == [(True, 384)] * STREAMS
    for service in ("router", "speculative-sim", "baseline-sim", "prometheus"):
        assert stack.state(service)["State"]["ExitCode"] == 0, service
    say(f"{STREAMS} streams whole, stopped in {took:.1f} s, all exit codes 0")


def test_it_starts_again_with_the_same_key(stack: Stack) -> None:
    """After a stop the stack comes up again, with its key and what Prometheus had stored."""
    took = stack.up()
    assert stack.key() == stack.first_key
    assert stack.admin("/status", stack.first_key).status_code == 200
    assert stack.chat(max_tokens=4).status_code == 200
    # Of the process that was started a moment ago there can be two values at most.
    query = quote('count_over_time(up{job="crossover"}[1h])')
    kept = stack.prometheus(f"query?query={query}")
    assert float(kept["result"][0]["value"][1]) >= 4
    say(f"up again in {took:.0f} s, with what was stored before")
