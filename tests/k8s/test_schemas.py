"""Every custom resource against the definition that its operator ships, unknown fields included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.k8s.overlays import OVERLAYS, manifests, only
from tests.k8s.schemas import schema_of, strict

CUSTOM = {
    "RayService": "ray.io/v1",
    "ScrapeConfig": "monitoring.coreos.com/v1alpha1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}
BUILT_IN = {"Namespace", "ConfigMap", "PodDisruptionBudget"}


@pytest.fixture(scope="module", params=CUSTOM)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(schema_of(kind, CUSTOM[kind]))


def complaints(validator: Draft202012Validator, manifest: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(manifest)]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_resource_is_valid(kind: str, validator: Draft202012Validator, overlay: str) -> None:
    manifest = only(overlay, kind)
    assert manifest["apiVersion"] == CUSTOM[kind]
    assert complaints(validator, manifest) == []


def test_no_kind_goes_unchecked() -> None:
    kinds = {manifest["kind"] for overlay in OVERLAYS for manifest in manifests(overlay)}
    assert kinds == set(CUSTOM) | BUILT_IN


def test_misspelt_field_wrong_type_and_missing_field_are_seen() -> None:
    validator = Draft202012Validator(schema_of("RayService", "ray.io/v1"))
    manifest = copy.deepcopy(only("gpu", "RayService"))
    cluster = manifest["spec"]["rayClusterConfig"]
    cluster["autoscalerOptions"]["idleTimeoutSecond"] = 5
    cluster["workerGroupSpecs"][0]["maxReplicas"] = "4"
    cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["startupProbe"]["period"] = 1
    del cluster["workerGroupSpecs"][0]["groupName"]
    group = "$.spec.rayClusterConfig.workerGroupSpecs[0]"
    assert sorted(complaints(validator, manifest)) == [
        "$.spec.rayClusterConfig.autoscalerOptions: Additional properties are not allowed "
        "('idleTimeoutSecond' was unexpected)",
        f"{group}.maxReplicas: '4' is not of type 'integer'",
        f"{group}.template.spec.containers[0].startupProbe: Additional properties are not allowed "
        "('period' was unexpected)",
        f"{group}: 'groupName' is a required property",
    ]


def test_kubernetes_extensions_become_plain_json_schema() -> None:
    structural = {
        "type": "object",
        "properties": {
            "size": {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True},
            "free": {"type": "object", "properties": {}, "x-kubernetes-preserve-unknown-fields": True},
        },
    }
    assert strict(structural) == {
        "type": "object",
        "properties": {"size": {"type": ["integer", "string"]}, "free": {"type": "object", "properties": {}}},
        "additionalProperties": False,
    }
