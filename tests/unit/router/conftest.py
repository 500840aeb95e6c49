"""What tests of the router's state share."""

from __future__ import annotations

import random

import pytest

from router.state import RouterState
from tests.unit.router.loads import Clock, report


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> RouterState:
    state = RouterState(clock=clock, rng=random.Random(3))
    for replica_id in "abc":
        state.observe(report(replica_id))
    return state
