"""Laws of the engine under any order of requests, aborts, budget changes, full queues, poison and short memory, on a
device that works while the engine plans, and without one.

Every sequence ends exactly once; what it made is what it makes alone, cut where it was ended; a stop costs at most one
token; in the end nothing is held. The fake model reads its context through the block tables, so a wrong block changes a
token.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.engine.world import DEVICES, POISON, Action, World, actions

SCHEDULER_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"max_num_queued_seqs": 3},
    {"batching": "static"},
    {"policy": "priority"},
    {"long_prefill_token_threshold": 5, "max_long_partial_prefills": 1},
    {"scheduler_reserve_full_isl": False, "enable_prefix_caching": False},
)


@settings(max_examples=160)
@given(
    device=st.sampled_from(DEVICES),
    plan=actions(),
    oom_every=st.sampled_from([0, 0, 2, 3, 7]),
    late=st.booleans(),
    poisoned=st.booleans(),
    changes=st.sampled_from(SCHEDULER_SETTINGS),
)
def test_every_sequence_ends_once_with_the_tokens_it_makes_alone(
    device: str, plan: list[Action], oom_every: int, late: bool, poisoned: bool, changes: dict[str, Any]
) -> None:
    poison_token = POISON if poisoned else None
    faults = {"eos_ratio": 0.05, "oom_every": oom_every, "late": late, "poison_token": poison_token}
    world = World(device, faults, changes)
    world.play(plan)
    world.check()
