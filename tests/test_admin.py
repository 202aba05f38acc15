"""The admin listener: what it shows, and what it lets an operator change."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import httpx
import pytest

from router import __version__
from router.admin import create_admin_app
from router.admin_models import Status
from router.breaker import Verdict
from router.frontier import Frontier
from router.load import PolicyMemory, Role
from router.metrics import Outcome
from router.policies import NAMES, PolicyError, make_frontier, make_policy, policy_name
from router.policy import (
    Decision,
    Fences,
    FixedPolicy,
    FrontierPolicy,
    LeastInFlightPolicy,
    Marks,
    Policy,
    Reason,
    RoundRobinPolicy,
)
from tests.fake_relay import BASELINE, START, UNIX, FakeRelay, make_settings
from tests.test_pair import error_of

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
KEY = {"authorization": "Bearer sk-operator"}


class Admin:
    """The app with a fake relay behind it."""

    def __init__(self, **settings: object) -> None:
        self.relay = FakeRelay(make_settings(**settings))
        self.app = create_admin_app(self.relay)

    async def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:9400"
        ) as client:
            return await client.request(method, path, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return asyncio.run(self.send("GET", path, **more))

    def post(self, path: str, **more: Any) -> httpx.Response:
        return asyncio.run(self.send("POST", path, **({"headers": KEY} | more)))

    def events(self) -> list[tuple[str, str]]:
        items = self.get("/decisions", headers=KEY).json()["items"]
        return [(item["event"], item["detail"]) for item in items if item["kind"] == "event"]

    @property
    def policy(self) -> FrontierPolicy:
        assert isinstance(self.relay.policy, FrontierPolicy)
        return self.relay.policy


@pytest.fixture
def reader() -> Admin:
    """Without an admin key: everything can be read and nothing changed."""
    return Admin()


@pytest.fixture
def operator() -> Admin:
    """With an admin key."""
    return Admin(admin_key="sk-operator")


# --------------------------------------------------------------------------- reading


def test_metrics_are_prometheus_text(reader: Admin) -> None:
    """By default the text format comes back, with our metrics and the process's."""
    response = reader.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert 'crossover_in_flight{backend="speculative"} 0.0' in response.text
    assert "process_resident_memory_bytes" in response.text
    assert "# EOF" not in response.text


def test_metrics_are_openmetrics_if_asked(reader: Admin) -> None:
    """A scraper that accepts OpenMetrics gets it, with its end mark."""
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = reader.get("/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def add_decisions(relay: FakeRelay) -> None:
    chosen = Decision(SPEC, Reason.BELOW_THRESHOLD, 3, 1, 7.0, PolicyMemory(), 8.0)
    entry = relay.decisions.add(START - 2, "r-1", "chat_completions", chosen)
    entry.finish(Outcome.OK, 200, START - 1)
    always = Decision(SPEC, Reason.ALWAYS, 3, 1, math.inf, PolicyMemory(), math.inf)
    relay.decisions.add(START - 1, "r-2", "chat_completions", always, replay=True)
    other = Decision(BASE, Reason.BAND, 7, 0, 8.0, PolicyMemory(), 8.0)
    relay.decisions.add(START, "r-3", "generate", other)


def test_decisions_are_explained(reader: Admin) -> None:
    """Each decision shows its reason and its numbers, the newest first."""
    add_decisions(reader.relay)
    items = reader.get("/decisions").json()["items"]
    assert [item["request_id"] for item in items] == ["r-3", "r-2", "r-1"]
    assert items[1]["threshold"] == "infinity"
    assert items[2] == {
        "kind": "decision", "time": UNIX - 2, "request_id": "r-1", "route": "chat_completions",
        "backend": "speculative", "reason": "below_threshold", "n": 3, "m": 1, "frontier": 7.0, "threshold": 8.0,
        "replay": False, "outcome": "ok", "status": 200, "duration": 1.0, "offered": None, "gain": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("backend=speculative", ["r-2", "r-1"]),
        ("reason=band", ["r-3"]),
        ("reason=band&backend=speculative", []),
        ("limit=1", ["r-3"]),
    ],
)
def test_decisions_are_filtered(reader: Admin, query: str, ids: list[str]) -> None:
    """By reason, by backend, and by number."""
    add_decisions(reader.relay)
    items = reader.get(f"/decisions?{query}").json()["items"]
    assert [item["request_id"] for item in items] == ids


@pytest.mark.parametrize(
    "query", ["reason=why", "backend=both", "limit=0", "limit=1001", "limit=x"]
)
def test_a_bad_filter_is_422_in_our_shape(reader: Admin, query: str) -> None:
    """A value that does not exist is refused, naming the parameter."""
    response = reader.get(f"/decisions?{query}")
    assert response.status_code == 422
    error = error_of(response)
    assert error["param"] == query.partition("=")[0]
    assert error["code"] == "invalid_value"


def test_status_tells_everything(operator: Admin) -> None:
    """Both backends, the line, the queue and the settings are in one body, without a secret."""
    relay = operator.relay
    relay.make_ready()
    relay.tracker.lease(SPEC, START)
    relay.report(SPEC, 3, 1, token_usage=0.25, accept_length=2.8, max_running=48)
    relay.now += 1.5
    relay.waiting = 4
    response = operator.get("/status", headers=KEY)
    assert "sk-operator" not in response.text
    status = Status.model_validate(response.json())
    assert (status.version, status.uptime, status.ready) == (__version__, 1.5, True)
    spec, base = status.backends
    assert (spec.in_flight, spec.foreign, spec.concurrency) == (1, 3, 4)
    assert (spec.health, spec.ready_probe, spec.breaker) == ("up", "unknown", "closed")
    assert spec.connections.busy == 2
    assert spec.telemetry is not None
    assert (spec.telemetry.age, spec.telemetry.fresh) == (1.5, True)
    assert (spec.telemetry.running, spec.telemetry.queued) == (3, 1)
    assert (spec.telemetry.accept_length, spec.telemetry.max_running) == (2.8, 48)
    assert (base.url, base.telemetry, base.connections.idle) == (BASELINE, None, 1)
    assert status.policy.name == "frontier"
    assert status.policy.frontier is not None
    assert status.policy.frontier.model_dump() == {
        "scope": "total", "threshold": 8.0, "table": [], "in_force": 8.0, "band": 0.2, "dwell": 5.0
    }  # fmt: skip
    assert (status.policy.side, status.policy.side_for) == (SPEC, None)
    assert (status.queue.waiting, status.queue.in_flight) == (4, 1)
    assert status.client_connections == 3
    assert status.settings["admin_key"] == "***"


def test_status_of_other_lines_and_policies(reader: Admin) -> None:
    """A table has values instead of K, infinity is a word, and a fixed policy has no line."""
    relay = reader.relay
    relay.policy = FrontierPolicy(Frontier.from_table((math.inf, 4.0)))
    relay.tracker.memory = PolicyMemory(BASE, START - 3)
    policy = Status.model_validate(reader.get("/status").json()).policy
    assert policy.frontier is not None
    assert policy.frontier.threshold is None
    assert policy.frontier.table == ["infinity", 4.0]
    assert policy.frontier.in_force == "infinity"
    assert (policy.side, policy.side_for) == (BASE, 3.0)
    relay.policy = RoundRobinPolicy()
    policy = Status.model_validate(reader.get("/status").json()).policy
    assert (policy.name, policy.frontier) == ("round-robin", None)


def test_status_shows_an_open_breaker(reader: Admin) -> None:
    """Five failures in a row are seen, and the backend is not usable."""
    for _ in range(5):
        reader.relay.health.record(SPEC, Verdict.FAILURE, START)
    spec = Status.model_validate(reader.get("/status").json()).backends[0]
    assert (spec.breaker, spec.failures, spec.usable) == ("open", 5, False)


def test_the_listener_says_that_it_lives(reader: Admin) -> None:
    """/healthz answers whatever the state of the pair."""
    assert reader.get("/healthz").json() == {"status": "ok"}


# --------------------------------------------------------------------------- the key


def test_with_a_key_reading_needs_it(operator: Admin) -> None:
    """Everything but /healthz is 401 without the key, unknown paths too."""
    for path in ("/metrics", "/decisions", "/status", "/openapi.json", "/nope"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "sk-operator"}):
            response = operator.get(path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"
    assert operator.get("/status", headers=KEY).status_code == 200
    assert operator.get("/healthz").status_code == 200


CHANGES = ["/policy", "/backends/speculative/drain", "/backends/baseline/enable"]


@pytest.mark.parametrize("path", CHANGES)
def test_without_a_configured_key_nothing_changes(reader: Admin, path: str) -> None:
    """A change is refused with the way to get a key, even with some key sent."""
    before = reader.relay.policy
    response = reader.post(path, json={"policy": "baseline"})
    assert response.status_code == 403
    assert "--admin-key" in error_of(response)["message"]
    assert reader.relay.policy is before
    assert reader.events() == []


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_needs_the_right_key(operator: Admin, path: str) -> None:
    """No key and a wrong key are 401."""
    for headers in ({}, {"authorization": "Bearer sk-operator2"}):
        response = operator.post(path, json={"policy": "baseline"}, headers=headers)
        assert response.status_code == 401
    assert not operator.relay.health.status(SPEC).drained


# --------------------------------------------------------------------------- changing


def test_a_new_threshold_is_in_force_at_once(
    operator: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    """The next request is decided along the new line; the change is logged and an event."""
    operator.relay.tracker.memory = PolicyMemory(BASE, START)
    with caplog.at_level(logging.INFO, "crossover"):
        response = operator.post("/policy", json={"policy": "frontier", "threshold": 20})
    assert response.status_code == 200
    assert response.json()["frontier"]["threshold"] == 20
    assert operator.policy.frontier == Frontier.total(20)
    assert operator.relay.tracker.memory.side is BASE
    assert operator.events() == [("policy", "policy=frontier, threshold=20.0")]
    assert "policy=frontier, threshold=20.0" in caplog.text


def test_all_parts_of_the_line_can_be_given(operator: Admin) -> None:
    """Scope, band and dwell change with it; what is left out is as configured."""
    change = {"policy": "frontier", "threshold": 6, "scope": "speculative", "band": 0.5, "dwell": 0}
    assert operator.post("/policy", json=change).status_code == 200
    assert operator.policy.frontier == Frontier.speculative_only(6)
    assert (operator.policy.band, operator.policy.dwell) == (0.5, 0)
    operator.post("/policy", json={"policy": "frontier"})
    assert operator.policy.frontier == Frontier.total(8)
    assert (operator.policy.band, operator.policy.dwell) == (0.2, 5.0)


def test_marks_and_fences_stay_as_configured() -> None:
    """A new line does not lose what the configuration says of queues, caches and fences."""
    admin = Admin(admin_key="sk-operator", queue_mark=3, kv_mark=0.5, fence_logprobs=True)
    admin.post("/policy", json={"policy": "frontier", "threshold": 1})
    assert admin.policy.marks == Marks(3, 0.5)
    assert admin.policy.fences == Fences(logprobs=True)


def test_a_calibrations_band_and_dwell_are_kept() -> None:
    """What the first policy was made with is what a change leaves alone."""
    relay = FakeRelay(make_settings(admin_key="sk-operator"))
    relay.policy = relay.configured = FrontierPolicy(Frontier.total(8), band=0.4, dwell=9.0)
    operator = Admin(admin_key="sk-operator")
    operator.relay, operator.app = relay, create_admin_app(relay)
    operator.post("/policy", json={"policy": "frontier", "threshold": 3, "band": 0.1})
    assert (operator.policy.band, operator.policy.dwell) == (0.1, 9.0)


@pytest.mark.parametrize(("word", "value"), [("always", math.inf), ("never", 0.0)])
def test_always_and_never_are_thresholds(operator: Admin, word: str, value: float) -> None:
    """The words of the configuration work here too."""
    operator.post("/policy", json={"policy": "frontier", "threshold": word})
    assert operator.policy.frontier.threshold == value


def test_another_kind_of_policy_starts_without_memory(operator: Admin) -> None:
    """What one kind of policy remembered is not handed to another."""
    operator.relay.tracker.memory = PolicyMemory(BASE, START)
    response = operator.post("/policy", json={"policy": "baseline"})
    assert response.json() == {
        "name": "baseline",
        "configured": False,
        "frontier": None,
        "side": None,
        "side_for": None,
    }
    assert operator.relay.tracker.memory == PolicyMemory()


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"policy": "frontier", "threshold": -1}, 422, "threshold"),
        ({"policy": "frontier", "threshold": "sometimes"}, 422, "threshold"),
        ({"policy": "frontier", "band": 1}, 422, "band"),
        ({"policy": "frontier", "dwell": -1}, 422, "dwell"),
        ({"policy": "fastest"}, 422, "policy"),
        ({"policy": "frontier", "treshold": 3}, 422, "treshold"),
        ({}, 422, "policy"),
        ({"policy": "baseline", "threshold": 3}, 400, None),
        ({"policy": "frontier", "scope": "total"}, 400, None),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(
    operator: Admin, change: dict[str, object], status: int, param: str | None
) -> None:
    """Unknown names, values out of range and settings without use are errors, and change nothing."""
    before = operator.relay.policy
    response = operator.post("/policy", json=change)
    assert response.status_code == status
    found = error_of(response)["param"]
    assert found is None if param is None else found.startswith(param)
    assert operator.relay.policy is before
    assert operator.events() == []


def test_a_null_is_left_out(operator: Admin) -> None:
    """What a client sends as null stays as configured, as if it were not there."""
    nulls = {"threshold": None, "scope": None, "band": None, "dwell": None}
    for policy in ("round-robin", "frontier"):
        response = operator.post("/policy", json={"policy": policy, **nulls})
        assert (response.status_code, response.json()["name"]) == (200, policy)
    assert operator.policy.band == operator.relay.settings.band


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"[]", b'{"policy":"frontier","threshold":NaN}']
)
def test_a_body_that_is_no_change_is_refused(operator: Admin, body: bytes) -> None:
    """Anything that is not a JSON object of ours is a 4xx in our shape."""
    headers = KEY | {"content-type": "application/json"}
    response = operator.post("/policy", content=body, headers=headers)
    assert response.status_code in {400, 422}
    error_of(response)


def test_without_any_line_frontier_cannot_be_chosen(operator: Admin) -> None:
    """A router that was started without a line needs a threshold to get one."""
    operator.relay.frontier = operator.relay.configured = None
    response = operator.post("/policy", json={"policy": "frontier"})
    assert response.status_code == 400
    assert "threshold" in error_of(response)["message"]
    assert operator.post("/policy", json={"policy": "frontier", "threshold": 2}).status_code == 200


def test_a_backend_is_drained_and_enabled(operator: Admin) -> None:
    """A drained backend gets no new work, keeps what runs, and comes back when enabled."""
    relay = operator.relay
    lease = relay.tracker.lease(BASE, START)
    response = operator.post("/backends/baseline/drain")
    assert response.json() == {"role": "baseline", "drained": True, "usable": False}
    assert not relay.tracker.snapshot(START).baseline.available
    assert lease.held
    response = operator.post("/backends/baseline/enable")
    assert response.json() == {"role": "baseline", "drained": False, "usable": True}
    assert relay.tracker.snapshot(START).baseline.available
    assert operator.events() == [("enable", "baseline"), ("drain", "baseline")]


def test_an_unknown_backend_is_422(operator: Admin) -> None:
    """There are two roles and no third."""
    assert error_of(operator.post("/backends/third/drain"))["param"] == "role"


def test_unknown_paths_and_methods_have_our_shape(operator: Admin) -> None:
    """404 and 405 are in OpenAI's shape here too, and 405 says what is allowed."""
    assert error_of(operator.get("/nope", headers=KEY))["code"] == "not_found"
    response = operator.post("/status")
    assert response.status_code == 405
    assert response.headers["allow"] == "GET"
    assert error_of(response)["code"] == "method_not_allowed"


def test_a_fault_of_ours_is_500_without_detail(operator: Admin) -> None:
    """An exception inside becomes an internal error that tells nothing."""

    def broken() -> float:
        raise RuntimeError("at http://10.0.0.1")

    operator.relay.clock = broken  # type: ignore[method-assign]

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(operator.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:9400"
        ) as client:
            return await client.get("/status", headers=KEY)

    response = asyncio.run(send())
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "10.0.0.1" not in response.text


def test_the_openapi_document_is_complete(reader: Admin) -> None:
    """Every operation declares its errors in our shape, changes their 403, and the key's scheme."""
    document = reader.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/metrics", "/decisions", "/status", "/healthz", "/policy",
        "/backends/{role}/drain", "/backends/{role}/enable",
    }  # fmt: skip
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path == "/healthz":
                continue
            declared = set(operation["responses"])
            assert {"200", "401"} <= declared
            assert ({"400", "403", "422"} <= declared) is (method == "post")
            assert operation["security"] == [{"HTTPBearer": []}]
            assert operation["summary"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


# --------------------------------------------------------------------------- names of policies


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("frontier", FrontierPolicy),
        ("speculative", FixedPolicy),
        ("baseline", FixedPolicy),
        ("least-in-flight", LeastInFlightPolicy),
        ("round-robin", RoundRobinPolicy),
    ],
)
def test_each_name_makes_its_policy(name: str, kind: type[Policy]) -> None:
    """A name makes a policy of its kind, and the policy tells its name."""
    policy = make_policy(name, frontier=Frontier.total(4))
    assert isinstance(policy, kind)
    assert policy_name(policy) == name
    assert name in NAMES


def test_a_policy_without_a_name_tells_its_class() -> None:
    """A policy of somebody else's is named by its class."""

    class Other(LeastInFlightPolicy):
        """Not the one we know."""

    class Mine:
        """A policy from elsewhere."""

        def decide(self, snapshot: object, info: object) -> Decision:
            raise NotImplementedError

    assert policy_name(Other()) == "least-in-flight"
    assert policy_name(Mine()) == "Mine"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "fastest"}, "none of"),
        ({"name": "frontier"}, "needs a threshold"),
        ({"name": "frontier", "frontier": Frontier.total(1), "band": 1.0}, "band"),
        ({"name": "frontier", "frontier": Frontier.total(1), "dwell": math.inf}, "dwell"),
    ],
)
def test_what_makes_no_policy_is_refused(given: dict[str, Any], message: str) -> None:
    """An unknown name and a value out of range raise PolicyError that says which."""
    with pytest.raises(PolicyError, match=message):
        make_policy(**given)


def test_a_frontier_is_made_of_a_number() -> None:
    """The scope says which shape; a number below zero is none."""
    assert make_frontier(3) == Frontier.total(3)
    assert make_frontier(3, "speculative") == Frontier.speculative_only(3)
    for bad in (-1.0, math.nan):
        with pytest.raises(PolicyError, match="threshold"):
            make_frontier(bad)
