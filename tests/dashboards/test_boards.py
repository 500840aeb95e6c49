"""The committed files are what the code generates, and the boards are sound Grafana JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.alerts import alerts
from dashboards.catalog import CATALOG
from dashboards.generate import GENERATED, boards, documents

DASHBOARDS = Path(__file__).resolve().parents[2] / "dashboards"
BOARDS = [board.json() for board in boards()]


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for board in BOARDS for panel in panels(board) for target in panel["targets"]]


def test_committed_files_are_what_is_generated() -> None:
    """Run `python -m dashboards.generate` when this fails."""
    committed = {path.name: path.read_text(encoding="utf-8") for path in GENERATED.iterdir()}
    assert committed == documents()


def test_generated_files_parse() -> None:
    for name, text in documents().items():
        assert json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


@pytest.mark.parametrize("expr", [*expressions(), *(alert.expr for alert in alerts())])
def test_expression_uses_known_series_by_their_kind(expr: str) -> None:
    by_series = {spec.series: spec for spec in CATALOG.specs.values()}
    for series in re.findall(r"brimful_\w+", expr):
        stem = re.sub(r"_(bucket|sum|count)$", "", series)
        spec = by_series.get(series) or by_series[stem]
        assert (series != spec.series) == (spec.kind == "histogram")
        rated = f"rate({series}" in expr
        assert rated == (spec.kind != "gauge")


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
def test_board_resolves_its_data_source_without_an_import_dialogue(board: dict[str, Any]) -> None:
    first = board["templating"]["list"][0]
    assert (first["type"], first["name"], first["query"]) == ("datasource", "datasource", "prometheus")
    assert "__inputs" not in board
    assert "DS_PROMETHEUS" not in json.dumps(board)
    named = {panel["datasource"]["uid"] for panel in panels(board)}
    named |= {target["datasource"]["uid"] for panel in panels(board) for target in panel["targets"]}
    assert named == {"${datasource}"}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
def test_board_variables_come_from_our_own_series(board: dict[str, Any]) -> None:
    queries = {variable["name"]: variable["definition"] for variable in board["templating"]["list"][1:]}
    assert queries == {
        "model_name": "label_values(brimful_max_num_seqs, model_name)",
        "replica": 'label_values(brimful_max_num_seqs{model_name=~"$model_name"}, replica)',
    }


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
def test_board_panels_have_unique_ids_a_conclusion_and_a_place_of_their_own(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert all(panel["description"] and panel["title"] for panel in panels(board))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken
        taken |= cells


def test_joint_signals_are_all_on_the_overview() -> None:
    text = " ".join(expressions())
    joint = (
        *("num_requests_running", "num_requests_waiting", "iteration_tokens_total", "max_num_batched_tokens"),
        *("request_queue_time_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("kv_cache_usage_perc", "num_preemptions", "step_tokens", "prefix_cache_hits", "request_success"),
        *("http_requests", "admission_rejections", "router_decisions", "router_report_age_seconds"),
    )
    assert [name for name in joint if CATALOG[name].series not in text] == []


def test_every_alert_has_a_runbook_entry_and_none_is_left_over() -> None:
    runbook = (DASHBOARDS / "runbook.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", runbook, re.MULTILINE) == [alert.name for alert in alerts()]
    assert [a.json()["annotations"]["runbook"] for a in alerts()] == [
        f"dashboards/runbook.md#{a.name.lower()}" for a in alerts()
    ]
