"""A key tells apart whatever the next plan or commit may make something of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from replica.scheduler.decode_rows import DecodeRows
from replica.scheduler.state import SchedulerState
from tests.property.scheduler.snapshot import freeze, state_key, thaw
from tests.property.scheduler.test_exhaustive import AHEAD, TWINS, small_world
from tests.property.scheduler.world import World


def decoding() -> World:
    """Three decodes whose columns were carried on, and whose last step is committed."""
    small = small_world(TWINS, AHEAD, num_blocks=12, max_num_batched_tokens=12)
    world = small.begin()
    for request in TWINS:
        world.add(request)
    world.step()
    world.step()
    world.scheduler.check_invariants()
    return world


def rows_of(world: World) -> DecodeRows:
    rows = world.scheduler._state.decode_rows
    assert rows is not None and len(rows.seqs) == 3 and rows.sampled is not None
    return rows


def test_a_world_that_was_frozen_and_thawed_has_the_same_key() -> None:
    world = decoding()
    assert state_key(thaw(freeze(world))) == state_key(world)


@pytest.mark.parametrize("column", [name for name in DecodeRows.__slots__ if name not in ("seqs", "fresh")])
def test_every_column_of_the_decodes_is_in_the_key(column: str) -> None:
    world = decoding()
    key = state_key(world)
    getattr(rows_of(world), column)[:1] = [-7] if column != "catching_up" else rows_of(world).seqs[:1]
    assert state_key(world) != key


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.batch.departed.add(state.batch.running[0]),
        lambda state: state.prefilling.append(state.batch.running[0]),
        lambda state: setattr(state, "decode_rows", None),
        lambda state: state.in_flight[0].decodes.commit_due.__setitem__(0, -7),
    ],
)
def test_what_else_a_plan_or_commit_starts_from_is_in_the_key(change: Callable[[SchedulerState], Any]) -> None:
    world = decoding()
    world.plan()
    key = state_key(world)
    change(world.scheduler._state)
    assert state_key(world) != key
