"""The search itself: what it doesn't finish it doesn't call shown, and it leaves nothing behind."""

from __future__ import annotations

import gc

import pytest

from tests.property.scheduler.explorer import SmallWorld, explore
from tests.property.scheduler.test_exhaustive import ALONE, TWINS, small_world

LITTLE: SmallWorld = small_world(TWINS[:1], ALONE, num_blocks=4)


def test_a_world_that_is_larger_than_the_limit_is_not_called_gone_through() -> None:
    num_states = explore(LITTLE).num_states
    assert explore(LITTLE, max_states=num_states).num_states == num_states
    with pytest.raises(AssertionError, match="not gone through whole"):
        explore(LITTLE, max_states=num_states - 1)


def test_the_collector_has_its_own_threshold_again_also_when_a_law_was_broken() -> None:
    before = gc.get_threshold()
    with pytest.raises(AssertionError):
        explore(LITTLE, max_states=3)
    assert gc.get_threshold() == before
