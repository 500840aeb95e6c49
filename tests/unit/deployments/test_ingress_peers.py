"""Metrics addresses of all ingress processes stay known while one of them hangs."""

from __future__ import annotations

from typing import Any

from deployments.ingress_peers import IngressPeers


class Answering(IngressPeers):
    """Broadcasts are answered by `answers`; empty as when one process stays silent."""

    def __init__(self) -> None:
        super().__init__("app", "ingress")
        self.answers: list[str] = []

    async def ask(self, method: str) -> list[dict[str, Any]]:
        assert method == "describe"
        return [{"metrics_address": address} for address in self.answers]


async def test_the_last_complete_round_counts_while_somebody_is_silent() -> None:
    peers = Answering()
    assert await peers.metrics_addresses("own:1") == ["own:1"]
    peers.answers = ["own:1", "two:1", "three:1"]
    assert await peers.metrics_addresses("own:1") == ["own:1", "two:1", "three:1"]
    peers.answers = []
    assert await peers.metrics_addresses("own:1") == ["own:1", "two:1", "three:1"]
    peers.answers = ["two:1"]
    assert await peers.metrics_addresses("own:1") == ["two:1", "own:1"]
