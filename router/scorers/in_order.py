"""Scorer `in_order`: for policies that have chosen when they drew up their shortlist. The first is best."""

from __future__ import annotations

from dataclasses import dataclass

from router.types import ReplicaView, RouteRequest


@dataclass(frozen=True, slots=True)
class InOrder:
    name: str = "in_order"

    def __call__(self, _request: RouteRequest, views: list[ReplicaView]) -> list[float]:
        return [1.0 - i / len(views) for i in range(len(views))]
