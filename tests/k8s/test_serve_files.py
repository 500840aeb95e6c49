"""Every Serve configuration of an overlay, as a file: what `brimful serve --config` and `serve deploy` would read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.serve_file import load_serve_config

FILES = sorted((Path(__file__).resolve().parents[2] / "k8s" / "overlays").glob("*/serve.yaml"))


def test_each_overlay_has_one() -> None:
    assert [path.parent.name for path in FILES] == ["cpu-small", "gpu"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_both_loaders_read_it(path: Path) -> None:
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))).applications
    assert application.import_path == "deployments.app:build"
    config = load_serve_config(path)
    assert (config.http.host, config.app.metrics_host, config.app.drain_timeout_s) == ("0.0.0.0", "0.0.0.0", 60.0)
    assert [model.device for model in config.app.models] == [{"cpu-small": "cpu", "gpu": "cuda"}[path.parent.name]]
