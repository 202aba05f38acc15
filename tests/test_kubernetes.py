"""deploy/kubernetes: every overlay builds, fits the schemas, and keeps what its README promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from router.calibration import parse_calibration
from router.config import Settings, load_settings
from tests.kubernetes_build import (
    FOLDER,
    OVERLAYS,
    ROOT,
    built,
    containers,
    environment,
    one,
    pod,
)

SCHEMAS = {
    path.stem: json.loads(path.read_bytes())
    for path in (Path(__file__).parent / "data" / "kubernetes").glob("*.json")
}
# The oldest that has everything at its default, and the newest whose schemas are there.
VERSIONS = ("1.30", kubernetes_validate.latest_version())

overlays = pytest.mark.parametrize("overlay", OVERLAYS)


def schema_problem(document: dict[str, Any], version: str) -> str | None:
    """What a document's schema says against it."""
    schema = SCHEMAS.get(document["kind"])
    try:
        if schema is not None:
            jsonschema.validate(document, schema)
        else:
            kubernetes_validate.validate(document, version, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return f"{document['kind']}: {error.message}"
    return None


@overlays
@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_fits_its_schema(overlay: str, version: str) -> None:
    """Unknown fields, wrong types and missing ones are refused, as the API server would."""
    documents = built(overlay)
    assert [problem for each in documents if (problem := schema_problem(each, version))] == []
    assert {each["kind"] for each in documents} >= {
        "StatefulSet", "Service", "PodDisruptionBudget", "ServiceAccount", "ConfigMap",
    }  # fmt: skip


def test_the_schemas_can_say_no() -> None:
    """A misspelled field is noticed, in Kubernetes' own kinds and in each of the others."""
    documents = built("many-pairs")
    for kind, path in {
        "StatefulSet": ("template", "spec"),
        "NetworkPolicy": (),
        "PodMonitor": ("podMetricsEndpoints", 0),
        "InferencePool": ("endpointPickerRef",),
        "HTTPRoute": ("rules", 0),
    }.items():
        document = one(documents, kind)
        at: Any = document["spec"]
        for step in path:
            at = at[step]
        at["misspelled"] = 1
        assert "misspelled" in str(schema_problem(document, VERSIONS[-1])), kind
    pool = one(built("many-pairs"), "InferencePool")
    del pool["spec"]["endpointPickerRef"]["port"]
    assert "'port' is a required property" in str(schema_problem(pool, VERSIONS[-1]))


@overlays
def test_nothing_runs_as_root_or_writes_where_it_should_not(overlay: str) -> None:
    """Each container fits the restricted Pod Security Standard, with a read-only root besides."""
    spec = pod(built(overlay))
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] >= 10_000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    kinds = {key for volume in spec["volumes"] for key in volume if key != "name"}
    assert kinds <= {"configMap", "emptyDir"}
    assert "initContainers" not in spec


@overlays
def test_a_service_of_this_name_does_not_become_a_setting(overlay: str) -> None:
    """Kubernetes' variables for a Service `crossover` (CROSSOVER_PORT=tcp://...) are switched off."""
    documents = built(overlay)
    assert one(documents, "Service")["metadata"]["name"] == "crossover"
    assert pod(documents)["enableServiceLinks"] is False


def settings_of(overlay: str) -> Settings:
    """What the router makes of its environment in the Pod."""
    given = environment(containers(built(overlay))["router"])
    own = {name: value or "sk-key" for name, value in given.items() if "CROSSOVER_" in name}
    if "CROSSOVER_CALIBRATION" in own:
        own["CROSSOVER_CALIBRATION"] = str(FOLDER / "overlays" / "simulated" / "calibration.json")
    return load_settings({}, environ=own)


@overlays
def test_the_router_understands_its_environment(overlay: str) -> None:
    """Every variable is a setting of the router, and they are accepted together."""
    container = containers(built(overlay))["router"]
    settings = settings_of(overlay)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (settings.port, settings.admin_port) == (ports["http"], ports["admin"])
    assert settings.admin_key is not None
    assert settings.admin_host == "0.0.0.0"  # else neither Prometheus nor the kubelet gets there
    for mount in container["volumeMounts"]:
        assert "subPath" not in mount  # or a new calibration would never be seen


@overlays
def test_the_end_of_a_pod_leaves_time_to_drain(overlay: str) -> None:
    """The grace period is longer than the drain and what the servers take after it."""
    settings = settings_of(overlay)
    grace = pod(built(overlay))["terminationGracePeriodSeconds"]
    assert grace >= settings.drain_delay + settings.drain_timeout + 30
    # Two misses of /ready, with what endpoints and gateways take after that.
    ready = containers(built(overlay))["router"]["readinessProbe"]
    misses = ready["failureThreshold"] * ready["periodSeconds"] + ready["timeoutSeconds"]
    assert settings.drain_delay >= misses + 3


@overlays
def test_probes_ask_the_router_about_itself_and_the_pair(overlay: str) -> None:
    """Ready is `/ready`; alive is the admin listener, whatever the servers do; engines have none."""
    found = containers(built(overlay))
    router = found.pop("router")
    assert router["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    for probe in ("livenessProbe", "startupProbe"):
        assert router[probe]["httpGet"] == {"path": "/healthz", "port": "admin"}
    for engine in found.values():
        assert not {"livenessProbe", "readinessProbe", "startupProbe"} & engine.keys()
    start = router["startupProbe"]
    patience = start["periodSeconds"] * start["failureThreshold"]
    # `launch` starts the router after both servers, whose first start downloads a model.
    assert patience >= (3600 if overlay == "shared-gpu" else 30)


@overlays
def test_no_two_containers_want_the_same_gpu(overlay: str) -> None:
    """A GPU is one container's: a server each, or one container with both, or none at all."""
    limits = {
        name: container["resources"].get("limits", {}).get("nvidia.com/gpu")
        for name, container in containers(built(overlay)).items()
    }
    assert (
        limits
        == {
            "own-gpus": {"router": None, "speculative": 1, "baseline": 1},
            "many-pairs": {"router": None, "speculative": 1, "baseline": 1},
            "shared-gpu": {"router": 1},
            "simulated": {"router": None, "speculative": None, "baseline": None},
        }[overlay]
    )


def test_the_servers_have_the_flags_of_the_repository() -> None:
    """Both engines read deploy/sglang, and differ in nothing but their role."""
    documents = built("own-gpus")
    data = one(documents, "ConfigMap", "crossover-sglang")["data"]
    for role in ("speculative", "baseline"):
        assert data[f"{role}.yaml"] == (ROOT / "deploy" / "sglang" / f"{role}.yaml").read_text(
            encoding="utf-8"
        )
    found = containers(documents)
    speculative, baseline = found["speculative"], found["baseline"]
    told = set(speculative["command"]) ^ set(baseline["command"])
    assert told == {
        "--config=/etc/crossover/sglang/speculative.yaml",
        "--config=/etc/crossover/sglang/baseline.yaml",
        "--port=31000",
        "--port=30000",
        "--speculative-draft-model-path=$(DRAFT)",
    }
    assert speculative["env"] == baseline["env"]
    assert speculative["resources"] == baseline["resources"]
    # Prometheus comes from outside: the port is open to it, and a key guards what is not /metrics.
    assert "--host=0.0.0.0" in speculative["command"]
    assert "--api-key=$(BACKEND_KEY)" in speculative["command"]


def test_prometheus_reaches_what_it_is_told_to_scrape() -> None:
    """Each endpoint is a named port of a container, under the jobs and labels of deploy/prometheus."""
    documents = built("own-gpus")
    ports = {
        port["name"] for each in containers(documents).values() for port in each.get("ports", ())
    }
    monitor = one(documents, "PodMonitor")["spec"]
    labels = one(documents, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    told = {}
    for endpoint in monitor["podMetricsEndpoints"]:
        assert endpoint["port"] in ports
        told[endpoint["port"]] = {
            r["targetLabel"]: r["replacement"] for r in endpoint["relabelings"]
        }
    assert told == {
        "admin": {"job": "crossover"},
        "speculative": {"job": "sglang", "backend": "speculative"},
        "baseline": {"job": "sglang", "backend": "baseline"},
    }
    (admin,) = [e for e in monitor["podMetricsEndpoints"] if e["port"] == "admin"]
    (key,) = [
        e for e in containers(documents)["router"]["env"] if e["name"] == "CROSSOVER_ADMIN_KEY"
    ]
    wanted = key["valueFrom"]["secretKeyRef"]
    assert admin["authorization"] == {"type": "Bearer", "credentials": wanted}
    allowed = [
        port["port"] for rule in one(documents, "NetworkPolicy")["spec"]["ingress"]
        for port in rule["ports"]
    ]  # fmt: skip
    assert sorted(allowed) == ["admin", "baseline", "http", "speculative"]


def test_a_pool_of_pairs_picks_pods_by_the_router_s_port() -> None:
    """The InferencePool selects the pairs' Pods and their public port; the route leads there."""
    documents = built("many-pairs")
    pool = one(documents, "InferencePool")
    labels = one(documents, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    (rule,) = one(documents, "HTTPRoute")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend["name"] == pool["metadata"]["name"]
    assert f"{backend['group']}/v1" == pool["apiVersion"]
    assert "retry" not in rule
    assert one(documents, "StatefulSet")["spec"]["replicas"] == 3


def test_a_calibration_is_replaced_without_a_new_pod() -> None:
    """Its ConfigMap keeps its name when the file changes; those that need a restart do not."""
    documents = built("simulated")
    held = one(documents, "ConfigMap", "crossover-calibration")
    assert held["metadata"]["name"] == "crossover-calibration"
    assert parse_calibration(held["data"]["calibration.json"].encode()).frontier.threshold == 12
    assert one(documents, "ConfigMap", "crossover-keeper")["metadata"]["name"] != "crossover-keeper"
    assert "CROSSOVER_THRESHOLD" not in environment(containers(documents)["router"])


def test_no_secret_is_committed_but_the_simulated_ones() -> None:
    """Keys come from a Secret that is not here, except where there is nothing to guard."""
    for overlay in OVERLAYS:
        found = [each["kind"] for each in built(overlay)]
        assert ("Secret" in found) == (overlay == "simulated")
