"""What `kubectl kustomize` makes of each overlay, as Python values."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("cpu-small", "gpu")
KUBECTL = shutil.which("kubectl")

Manifest = dict[str, Any]


@cache
def manifests(overlay: str) -> tuple[Manifest, ...]:
    """All resources of the overlay. Works offline. Without kubectl the test that asks is skipped, and no other."""
    if KUBECTL is None:
        pytest.skip("kubectl isn't installed")
    folder = ROOT / "k8s" / "overlays" / overlay
    done = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def only(overlay: str, kind: str) -> Manifest:
    """The overlay's one resource of this kind."""
    (found,) = (manifest for manifest in manifests(overlay) if manifest["kind"] == kind)
    return found


def head(overlay: str) -> Manifest:
    group: Manifest = only(overlay, "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]
    return group


def workers(overlay: str) -> Manifest:
    """The one group of workers."""
    (group,) = only(overlay, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return dict(group)


def container(group: Manifest) -> Manifest:
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)
