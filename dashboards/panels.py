"""Grafana's JSON from a few typed parts: queries, panels, rows, variables. Knows nothing about brimful's metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""A variable, not an input of the import dialogue: it resolves when the board is provisioned from a file, too."""

GRID_WIDTH = 24
PANEL_HEIGHT = 8


@dataclass(frozen=True, slots=True)
class Query:
    """One line (or one family of lines) of a panel. `legend` may use labels as `{{label}}`."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. `description` tells what to conclude from it; `unit` is Grafana's unit id; `width` of 24 columns."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    maximum: float | None = None
    stacked: bool = False

    def json(self, panel_id: int, x: int, y: int) -> Json:
        defaults: Json = {"unit": self.unit, "min": 0}
        if self.maximum is not None:
            defaults["max"] = self.maximum
        if self.kind == "timeseries":
            stacking = {"mode": "normal" if self.stacked else "none"}
            defaults["custom"] = {"fillOpacity": 20 if self.stacked else 5, "showPoints": "never", "stacking": stacking}
        return {
            "id": panel_id,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"h": PANEL_HEIGHT, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": _OPTIONS[self.kind],
            "targets": [
                {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": q.expr, "legendFormat": q.legend}
                for i, q in enumerate(self.queries)
            ],
        }


_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """A headline and the panels under it, laid out left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A drop-down of the values of `label` on `series`, several at once; "All" matches everything."""

    name: str
    series: str
    label: str

    def json(self) -> Json:
        query = f"label_values({self.series}, {self.label})"
        return {
            "type": "query",
            "name": self.name,
            "label": self.name.replace("_", " "),
            "datasource": DATASOURCE,
            "definition": query,
            "query": {"query": query, "refId": self.name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. `uid` is its address and never changes, so publishing again replaces it."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    def json(self) -> Json:
        datasource: Json = {"type": "datasource", "name": "datasource", "label": "data source", "query": "prometheus"}
        datasource |= {"refresh": 1, "current": {}, "hide": 0}
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["brimful"],
            "editable": True,
            "schemaVersion": 39,
            "timezone": "browser",
            "time": {"from": "now-1h", "to": "now"},
            "refresh": "10s",
            "graphTooltip": 1,
            "templating": {"list": [datasource, *(variable.json() for variable in self.variables)]},
            "panels": _laid_out(self.rows),
        }


def _laid_out(rows: Iterable[Row]) -> list[Json]:
    panels: list[Json] = []
    y = 0
    for row in rows:
        place = {"h": 1, "w": GRID_WIDTH, "x": 0, "y": y}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        y += 1
        x = 0
        for panel in row.panels:
            if x + panel.width > GRID_WIDTH:
                x, y = 0, y + PANEL_HEIGHT
            panels.append(panel.json(len(panels) + 1, x, y))
            x += panel.width
        y += PANEL_HEIGHT
    return panels
