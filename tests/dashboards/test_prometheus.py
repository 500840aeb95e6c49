"""Every panel and alert expression against a real Prometheus that scrapes two replicas through service discovery."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.alerts import alerts
from dashboards.catalog import CATALOG
from dashboards.generate import GENERATED, boards
from deployments.metrics import INGRESS_METRICS
from replica.metrics import REPLICA_METRICS
from router.metrics import ROUTER_METRICS
from tests.dashboards.exporters import Exporter, Prometheus, discovery, prometheus, serving

BINARY = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(BINARY is None, reason="prometheus (Debian package prometheus) isn't installed")

COMPOSE = Path(__file__).resolve().parents[2] / "dashboards" / "compose"
METRICS_TYPE = "text/plain; version=0.0.4"

TARGETS = [
    (panel["title"], target["expr"])
    for board in boards()
    for panel in board.json()["panels"]
    for target in panel.get("targets", [])
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """The shipped configuration of Prometheus, scraping once a second: two replicas and one ingress."""
    assert BINARY is not None
    with ExitStack() as stack:
        ports = []
        for replica, level in (("r1", 40.0), ("r2", 60.0)):
            exporter = Exporter(REPLICA_METRICS, {"model_name": "m", "replica": replica}, level)
            ports.append(stack.enter_context(serving({"/metrics": lambda e=exporter: (METRICS_TYPE, e.scrape())})))
        edge = Exporter((*INGRESS_METRICS, *ROUTER_METRICS), {"ingress": "i1"}, 7.0)
        ports.append(stack.enter_context(serving({"/metrics": lambda: (METRICS_TYPE, edge.scrape())})))
        ingress = stack.enter_context(serving({"/metrics/targets": lambda: discovery(ports)}))
        config = shipped_config(f"http://127.0.0.1:{ingress}/metrics/targets")
        server = stack.enter_context(prometheus(BINARY, config, tmp_path_factory.mktemp("prometheus")))
        server.wait_for("min(brimful_step_tokens_total)", 3.0)
        server.wait_for("count(brimful_max_num_seqs)", 2)
        server.wait_for("min(brimful_http_requests_total)", 3.0)
        yield server


def shipped_config(discovery_url: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config["rule_files"] = [str(GENERATED / "alerts.yaml")]
    (job,) = config["scrape_configs"]
    (job["http_sd_configs"][0]["url"], job["http_sd_configs"][0]["refresh_interval"]) = (discovery_url, "1s")
    return config


def chosen(expr: str, model_name: str = ".*", replica: str = ".*") -> str:
    """The expression as Grafana sends it."""
    return expr.replace("$model_name", model_name).replace("$replica", replica).replace("$__rate_interval", "10s")


@pytest.mark.parametrize(("panel", "expr"), TARGETS)
def test_panel_shows_finite_values(live: Prometheus, panel: str, expr: str) -> None:
    values = live.values(chosen(expr))
    assert values, f"{panel}: no data for {expr}"
    assert all(math.isfinite(value) for value in values)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_alert_expression_judges_the_exporters(live: Prometheus, alert: Any) -> None:
    """They count as many failures as answers, and nothing else that is wrong."""
    holds = live.query(alert.expr.replace("[5m]", "[10s]")) != []
    assert holds == (alert.name in ("BrimfulErrorRatio", "BrimfulHttpErrors"))


def test_every_metric_of_the_catalog_is_live(live: Prometheus) -> None:
    names = set()
    for spec in CATALOG.specs.values():
        stem = f"{spec.series}_count" if spec.kind == "histogram" else spec.series
        if live.query(stem):
            names.add(spec.name)
    assert names == set(CATALOG.specs)


def test_joint_panels_add_counts_and_average_ratios(live: Prometheus) -> None:
    by_panel: dict[str, list[str]] = {}
    for panel, expr in TARGETS:
        by_panel.setdefault(panel, []).append(expr)
    running, waiting, seats = (live.values(chosen(expr)) for expr in by_panel["Running and waiting"])
    assert (running, waiting, seats) == ([100.0], [100.0], [100.0])
    average, fullest = (live.values(chosen(expr)) for expr in by_panel["KV cache held"][:2])
    assert (average, fullest) == ([0.5], [0.6])
    assert live.values(chosen(by_panel["Replicas"][0])) == [2.0]


def test_variables_choose_one_replica(live: Prometheus) -> None:
    running = next(expr for panel, expr in TARGETS if panel == "Running and waiting")
    assert live.values(chosen(running, replica="r1")) == [40.0]
    assert live.values(chosen(running, model_name="other")) == []


def test_template_variables_have_values(live: Prometheus) -> None:
    for board in boards():
        for variable in board.variables:
            samples = live.query(chosen(variable.series))
            assert all(sample["metric"][variable.label] for sample in samples)
            assert re.fullmatch(r"brimful_\w+", samples[0]["metric"]["__name__"])
