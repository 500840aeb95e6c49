"""Writes `generated/`: boards as Grafana JSON, alerts as a Prometheus rule file, and both as a kustomize base.

`python -m dashboards.generate`. The files are committed, so that Grafana and Prometheus can be provisioned from a
checkout without running anything; a test compares them with what this module makes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from dashboards.alerts import rule_groups
from dashboards.boards import overview
from dashboards.panels import Board


class _BlockDumper(yaml.SafeDumper):
    """YAML in which a text of several lines stays several lines, and nothing is abbreviated by an alias."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


_BlockDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)

GENERATED = Path(__file__).parent / "generated"
LABELS = {"app.kubernetes.io/name": "brimful"}


def boards() -> tuple[Board, ...]:
    """Every board that is published."""
    return (overview.board(),)


def documents() -> dict[str, str]:
    """File name -> text, for every generated file."""
    named = {f"{board.uid.removeprefix('brimful-')}.json": board.json() for board in boards()}
    return {
        **{name: json.dumps(board, indent=2) + "\n" for name, board in named.items()},
        "alerts.yaml": _yaml({"groups": rule_groups()}),
        "prometheus-rule.yaml": _yaml(_prometheus_rule()),
        "kustomization.yaml": _yaml(_kustomization(list(named))),
    }


def _prometheus_rule() -> dict[str, Any]:
    """The same alerts for the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "brimful", "labels": LABELS},
        "spec": {"groups": rule_groups()},
    }


def _kustomization(board_files: list[str]) -> dict[str, Any]:
    """Rules and boards as a kustomize base; Grafana's sidecar finds boards by the label `grafana_dashboard`."""
    boards_map = {
        "name": "brimful-dashboards",
        "files": board_files,
        "options": {"disableNameSuffixHash": True, "labels": {**LABELS, "grafana_dashboard": "1"}},
    }
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["prometheus-rule.yaml"],
        "configMapGenerator": [boards_map],
    }


def _yaml(document: dict[str, Any]) -> str:
    head = "# Made by `python -m dashboards.generate`; edit dashboards/*.py instead.\n"
    return head + yaml.dump(document, Dumper=_BlockDumper, sort_keys=False, width=200)


def main() -> None:
    GENERATED.mkdir(exist_ok=True)
    for name, text in documents().items():
        (GENERATED / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {GENERATED / name}\n")


if __name__ == "__main__":
    main()
