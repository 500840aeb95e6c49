"""Writes `generated/`: the boards as Grafana JSON and the alerts as a Prometheus rule file.

`python -m dashboards.generate`. The files are committed, so that Grafana and Prometheus can be provisioned from a
checkout without running anything; a test compares them with what this module makes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from dashboards.alerts import rule_groups
from dashboards.boards import overview
from dashboards.panels import Board


class _BlockDumper(yaml.SafeDumper):
    """YAML in which a text of several lines stays several lines."""


_BlockDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)

GENERATED = Path(__file__).parent / "generated"


def boards() -> tuple[Board, ...]:
    """Every board that is published."""
    return (overview.board(),)


def documents() -> dict[str, str]:
    """File name -> text, for every generated file."""
    texts = {
        f"{board.uid.removeprefix('brimful-')}.json": json.dumps(board.json(), indent=2) + "\n" for board in boards()
    }
    head = "# Made by `python -m dashboards.generate` from dashboards/alerts.py.\n"
    texts["alerts.yaml"] = head + yaml.dump({"groups": rule_groups()}, Dumper=_BlockDumper, sort_keys=False, width=200)
    return texts


def main() -> None:
    GENERATED.mkdir(exist_ok=True)
    for name, text in documents().items():
        (GENERATED / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {GENERATED / name}\n")


if __name__ == "__main__":
    main()
