"""Kubernetes' structural schemas as JSON Schema, so that manifests can be checked without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

Json = dict[str, Any]

CRDS = Path(__file__).resolve().parents[3] / "shared" / "crds"
"""Definitions of other projects' resource kinds, which lie beside a checkout where somebody has put them."""


def schema_of(kind: str, api_version: str) -> Json:
    """JSON Schema of one resource kind. Raises `LookupError` when no definition has it. Where nobody has put any, the
    test that asks is skipped, and no other."""
    if not CRDS.is_dir():
        pytest.skip("no resource definitions beside this checkout")
    group, _, version = api_version.partition("/")
    for path in sorted(CRDS.glob(f"{group}_*.yaml")):
        definition = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)["spec"]
        for candidate in definition["versions"]:
            if (definition["names"]["kind"], candidate["name"]) == (kind, version):
                schema = strict(candidate["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}  # the API server's own, in no definition
                return schema
    raise LookupError(f"no definition of {kind} in {api_version}")


def strict(schema: Json) -> Json:
    """Without Kubernetes' extensions, and with unknown fields refused as `kubectl apply --validate=strict` does."""
    plain = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if schema.get("x-kubernetes-int-or-string"):
        plain.pop("anyOf", None)
        plain["type"] = ["integer", "string"]
    if "properties" in plain:
        plain["properties"] = {name: strict(part) for name, part in plain["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            plain.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(plain.get(key), dict):
            plain[key] = strict(plain[key])
    return plain
