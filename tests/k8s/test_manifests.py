"""The manifests fit together: Serve's configuration, resources, grace periods, probes, discovery."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from ray._private import ray_constants
from ray.serve.schema import ServeDeploySchema

from dashboards.alerts import rule_groups
from deployments.app import INGRESS_MARGIN_S, SHUTDOWN_MARGIN_S
from deployments.cli.cluster import SERVE_ENVIRONMENT
from deployments.config import ServeConfig
from deployments.serve_file import load_serve_config
from tests.k8s.overlays import OVERLAYS, ROOT, container, head, manifests, only, workers

NODE_DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def serve(overlay: str, tmp_path: Path) -> ServeConfig:
    """The Serve configuration inside the RayService, read by our own loader."""
    path = tmp_path / "serve.yaml"
    path.write_text(only(overlay, "RayService")["spec"]["serveConfigV2"], encoding="utf-8")
    return load_serve_config(path)


def test_serve_accepts_its_configuration(overlay: str) -> None:
    text = only(overlay, "RayService")["spec"]["serveConfigV2"]
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == "deployments.app:build"


def test_everything_lands_in_one_namespace_and_the_serve_file_is_not_applied(overlay: str) -> None:
    assert only(overlay, "Namespace")["metadata"]["name"] == "brimful"
    others = [manifest for manifest in manifests(overlay) if manifest["kind"] != "Namespace"]
    assert {manifest["metadata"]["namespace"] for manifest in others} == {"brimful"}
    assert only(overlay, "ConfigMap")["metadata"]["name"] == "brimful-dashboards"


def test_pods_listen_where_other_pods_reach_them(serve: ServeConfig) -> None:
    assert serve.http.host == serve.app.metrics_host == "0.0.0.0"


def test_pod_outlives_its_drain_and_serve_its_streams(overlay: str, serve: ServeConfig) -> None:
    """Pod grace > Ray's drain of the node > Serve's graceful_shutdown_timeout_s > drain limit, each with a margin. Of
    replicas and ingresses, which may be in one pod, the longer one counts."""
    ingress_margin_s = INGRESS_MARGIN_S + serve.app.ingress.continuation_wait_s
    graceful_shutdown_timeout_s = serve.app.drain_timeout_s + max(SHUTDOWN_MARGIN_S, ingress_margin_s)
    environment = {entry["name"]: entry.get("value") for entry in container(workers(overlay))["env"]}
    node_drain_s = int(environment[NODE_DRAIN])
    grace_s = workers(overlay)["template"]["spec"]["terminationGracePeriodSeconds"]
    assert node_drain_s >= graceful_shutdown_timeout_s + 30
    assert grace_s >= node_drain_s + 20
    assert only(overlay, "RayService")["spec"]["rayClusterDeletionDelaySeconds"] > graceful_shutdown_timeout_s


def test_ray_still_knows_the_setting_of_its_drain() -> None:
    assert getattr(ray_constants, NODE_DRAIN) == 30.0


def test_probes_bear_a_slow_start_and_a_pause(overlay: str) -> None:
    for group in (head(overlay), workers(overlay)):
        probes = {name: container(group)[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert all(probe["timeoutSeconds"] >= 2 for probe in probes.values())
        assert all(probe["failureThreshold"] >= 3 for probe in probes.values())
        assert probes["startupProbe"]["failureThreshold"] * probes["startupProbe"]["periodSeconds"] >= 600
        assert probes["livenessProbe"]["failureThreshold"] * probes["livenessProbe"]["periodSeconds"] >= 60
    worker = container(workers(overlay))
    assert worker["livenessProbe"]["httpGet"] != worker["readinessProbe"]["httpGet"]


def test_no_cpu_limit_throttles_a_probe(overlay: str) -> None:
    for group in (head(overlay), workers(overlay)):
        assert "cpu" not in container(group)["resources"]["limits"]


def test_replicas_never_land_on_the_head_and_fit_on_the_workers(overlay: str, serve: ServeConfig) -> None:
    assert head(overlay)["rayStartParams"]["num-cpus"] == "0"
    group = workers(overlay)
    offered = {name: int(group["rayStartParams"].get(name, "0")) for name in ("num-cpus", "num-gpus")}
    needed = {"num-cpus": 0.0, "num-gpus": 0.0}
    for model in serve.app.models:
        each = {"num-cpus": model.num_cpus or 0, "num-gpus": model.num_gpus or 0}
        assert all(each[name] <= offered[name] for name in offered)
        needed = {name: needed[name] + each[name] * model.replicas for name in needed}
        assert model.device in ("cpu", "cuda"), "a cluster that starts with few nodes can't tell"
    assert all(needed[name] <= offered[name] * group["maxReplicas"] for name in offered)


def test_gpus_are_asked_of_kubernetes_and_told_to_ray(overlay: str) -> None:
    resources = container(workers(overlay))["resources"]
    gpus = workers(overlay)["rayStartParams"].get("num-gpus")
    assert resources["limits"].get("nvidia.com/gpu") == resources["requests"].get("nvidia.com/gpu") == gpus
    assert gpus == {"cpu-small": None, "gpu": "1"}[overlay]
    assert resources["requests"]["cpu"] == workers(overlay)["rayStartParams"]["num-cpus"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_autoscaler_and_versions(overlay: str) -> None:
    cluster = only(overlay, "RayService")["spec"]["rayClusterConfig"]
    assert (cluster["enableInTreeAutoscaling"], cluster["autoscalerOptions"]["version"]) == (True, "v2")
    assert {group["template"]["spec"]["restartPolicy"] for group in (head(overlay), workers(overlay))} == {"Never"}
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert len({container(group)["image"] for group in (head(overlay), workers(overlay))}) == 1


def test_prometheus_asks_the_serve_service_for_its_targets(overlay: str, serve: ServeConfig) -> None:
    (discovery,) = only(overlay, "ScrapeConfig")["spec"]["httpSDConfigs"]
    service = only(overlay, "RayService")["metadata"]
    url = urlsplit(discovery["url"])
    assert url.hostname == f"{service['name']}-serve-svc.{service['namespace']}"
    assert (url.port, url.path) == (serve.http.port, "/metrics/targets")
    ports = {port["name"]: port["containerPort"] for port in container(workers(overlay))["ports"]}
    assert ports["serve"] == serve.http.port == container(workers(overlay))["readinessProbe"]["httpGet"]["port"]


def test_alerts_are_the_dashboards_own(overlay: str) -> None:
    assert only(overlay, "PrometheusRule")["spec"]["groups"] == rule_groups()


def test_disruptions_take_one_worker_at_a_time(overlay: str) -> None:
    spec = only(overlay, "PodDisruptionBudget")["spec"]
    labels = workers(overlay)["template"]["metadata"]["labels"]
    assert spec["maxUnavailable"] == 1
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert not spec["selector"]["matchLabels"].items() <= head(overlay)["template"]["metadata"]["labels"].items()


def test_pods_run_without_privileges(overlay: str) -> None:
    for group in (head(overlay), workers(overlay)):
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container(group)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_every_mount_has_its_volume(overlay: str) -> None:
    for group in (head(overlay), workers(overlay)):
        mounted = {mount["name"] for mount in container(group)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in group["template"]["spec"]["volumes"]}


def test_image_holds_every_package() -> None:
    dockerfile = (ROOT / "k8s" / "Dockerfile").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = re.findall(r'"(\w+)\*"', next(line for line in project.splitlines() if line.startswith("include = ")))
    assert re.findall(r"^COPY (\w+) \1$", dockerfile, re.MULTILINE) == packages


def test_image_sets_for_serve_what_the_command_sets() -> None:
    dockerfile = (ROOT / "k8s" / "Dockerfile").read_text(encoding="utf-8")
    found = dict(re.findall(r"^ENV (RAY_\w+)=(\S+)$", dockerfile, re.MULTILINE))
    assert found == SERVE_ENVIRONMENT
