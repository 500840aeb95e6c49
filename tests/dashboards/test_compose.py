"""The files for Prometheus and Grafana on one machine fit together."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

COMPOSE = Path(__file__).resolve().parents[2] / "dashboards" / "compose"
PROMTOOL = shutil.which("promtool")


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((COMPOSE / name).read_text(encoding="utf-8"))
    return loaded


def test_grafana_derives_rate_windows_from_the_real_scrape_interval() -> None:
    (source,) = load("provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["jsonData"]["timeInterval"] == load("prometheus.yaml")["global"]["scrape_interval"] == "5s"
    assert (source["type"], source["isDefault"]) == ("prometheus", True)


def test_every_mounted_file_exists_and_lands_where_it_is_read() -> None:
    services = load("compose.yaml")["services"]
    mounts = {}
    for service in services.values():
        for volume in service["volumes"]:
            if volume.startswith("."):
                source, target, mode = volume.split(":")
                assert (COMPOSE / source).exists()
                assert mode == "ro"
                mounts[target] = (COMPOSE / source).resolve().name
    (provider,) = load("provisioning/dashboards/brimful.yaml")["providers"]
    assert mounts[provider["options"]["path"]] == "generated"
    assert mounts["/etc/prometheus/" + load("prometheus.yaml")["rule_files"][0]] == "alerts.yaml"


def test_both_listen_on_this_machine_only_and_no_password_is_shipped() -> None:
    services = load("compose.yaml")["services"]
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    environment = services["grafana"]["environment"]
    assert environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert re.fullmatch(r"\$\{GRAFANA_ADMIN_PASSWORD:\?.*\}", environment["GF_SECURITY_ADMIN_PASSWORD"])


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian package prometheus) isn't installed")
def test_prometheus_accepts_its_configuration_and_rules(tmp_path: Path) -> None:
    shutil.copy(COMPOSE / "prometheus.yaml", tmp_path)
    shutil.copy(COMPOSE.parent / "generated" / "alerts.yaml", tmp_path)
    command = [str(PROMTOOL), "check", "config", str(tmp_path / "prometheus.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
