"""A replica's share of the cores is one that Ray can place."""

from __future__ import annotations

import pytest

from deployments.machine import Machine


@pytest.mark.parametrize(
    ("node_cpus", "num_replicas", "share"),
    [
        ((8.0,), 1, 8.0),
        ((8.0,), 3, 2.0),
        ((8.0,), 8, 1.0),
        ((8.0,), 16, 0.5),
        ((2.0,), 3, 0.66),
        ((4.0, 4.0), 1, 4.0),  # not 8: no node has them
        ((4.0, 4.0), 3, 2.0),
        ((6.0, 2.0), 2, 3.0),  # not 4: the second one would find 2 here and 2 there
        ((6.0, 2.0), 3, 2.0),
        ((4.0, 0.0), 1, 4.0),  # a head node without cores for replicas
        ((0.5,), 1, 0.5),
        ((1.0,), 1024, 0.01),
    ],
)
def test_shares(node_cpus: tuple[float, ...], num_replicas: int, share: float) -> None:
    assert Machine(node_cpus=node_cpus).cpu_share(num_replicas) == share
