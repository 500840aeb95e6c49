"""Of every setting two values matter: the same small world goes another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from replica.config import SchedulerConfig
from replica.errors import QueueFull
from replica.scheduler.budgets import CHANGEABLE
from tests.unit.scheduler.rig import World, chunks, joined, request, world


def world_of(live: dict[str, Any] | None = None, **settings: Any) -> World:
    """`live`: limits that are changed once the scheduler runs."""
    w = world(**settings)
    w.scheduler.set_budgets(**(live or {}))
    return w


def entered_at_once(num: int = 4, **settings: Any) -> list[int]:
    w = world_of(**settings)
    for _ in range(num):
        w.add(request([5], 3))
    return joined(w.step())


def first_chunks(*prompt_lengths: int, **settings: Any) -> dict[int, int]:
    w = world_of(**settings)
    for token, length in enumerate(prompt_lengths, start=5):
        w.add(request([token] * length, 1))
    return chunks(w.step())


def whole_or_cut(**settings: Any) -> dict[int, int]:
    w = world_of(max_model_len=20, max_num_batched_tokens=20, **settings)
    for _ in range(2):
        w.add(request([5], 9, ignore_eos=True))
    w.step()
    w.add(request([6] * 19, 1))
    return chunks(w.step())


def long_ones(**settings: Any) -> list[int]:
    w = world_of(**{"long_prefill_token_threshold": 8, **settings})
    for token, length in ((5, 60), (6, 60), (7, 3)):
        w.add(request([token] * length, 1))
    return joined(w.step())


def passed_for_6_seconds(**settings: Any) -> list[int]:
    w = world_of(max_num_batched_tokens=12, long_prefill_token_threshold=4, max_long_partial_prefills=1, **settings)
    w.add(request([5] * 90, 1))
    w.add(request([6] * 30, 1))
    entered = joined(w.step())
    for w.now_s in (0.0, 6.0):
        w.add(request([7], 1))
        entered += joined(w.step())
    return entered


def blocked_by_kv(**settings: Any) -> World:
    """Sequence 0 holds 5 of 10 blocks, the head 1 needs 6; 2 would need 2 in all and 3 would need 1."""
    w = world_of(num_blocks=10, **{"kv_bypass_blocks": 2, **settings})
    w.add(request([5] * 17, 30, ignore_eos=True))
    w.step()
    w.add(request([6] * 24, 1))
    w.step()
    w.add(request([7] * 4, 4))
    w.add(request([8] * 2, 2))
    return w


def entered_past_a_blocked_head(**settings: Any) -> list[int]:
    return joined(blocked_by_kv(**settings).step())


def entered_in_parts(**settings: Any) -> list[int]:
    """20 of 48 tokens of KV are held: the second prompt doesn't fit whole, its first chunk does."""
    w = world_of(num_blocks=12, max_num_batched_tokens=20, enable_prefix_caching=False, **settings)
    w.add(request([5] * 17, 3, ignore_eos=True))
    w.step()
    w.add(request([6] * 36, 1))
    return joined(w.step())


def entered_beside_a_reserve(**settings: Any) -> list[int]:
    w = world_of(num_blocks=10, **settings)
    w.add(request([5] * 4, 2, ignore_eos=True))
    w.step()
    w.add(request([6] * 15, 1))
    return joined(w.step())


def computed_of_a_repeated_prompt(block_size: int = 4, **settings: Any) -> dict[int, int]:
    w = world_of(block_size=block_size, **settings)
    w.add(request([5, 6, 7, 8, 9, 5, 6], 1))
    w.step()
    w.add(request([5, 6, 7, 8, 9, 5, 6], 1))
    return chunks(w.step())


def order_by_priority(**settings: Any) -> list[int]:
    w = world_of(max_num_seqs=1, **{"policy": "priority", **settings})
    w.add(request([5], 1, priority=1))
    w.now_s = 20.0
    w.add(request([5], 1, priority=0))
    return joined(w.step()) + joined(w.step())


def entries_of_each_step(**settings: Any) -> list[list[int]]:
    w = world_of(max_num_seqs=2, **settings)
    for max_tokens in (1, 2, 1):
        w.add(request([5], max_tokens, ignore_eos=True))
    return [joined(w.step()) for _ in range(2)]


def taken_into_the_queue(**settings: Any) -> list[str]:
    """Three requests of 10 tokens while nothing is computed."""
    w = world_of(**settings)
    taken = []
    for seq_id in range(3):
        try:
            w.scheduler.add(seq_id, request([5] * 10, 1), 0, 0, 0.0)
            taken.append("taken")
        except QueueFull:
            taken.append("refused")
    return taken


def expired_after_5_seconds(**settings: Any) -> list[int]:
    w = world_of(max_num_seqs=1, **settings)
    for _ in range(2):
        w.add(request([5], 9, ignore_eos=True))
    w.step()
    w.now_s = 5.0
    return w.expire()


# setting -> (the world, its two values, what is seen with each)
TWO_VALUES: dict[str, tuple[Callable[..., Any], tuple[Any, Any], tuple[Any, Any]]] = {
    "max_num_seqs": (entered_at_once, (2, 3), ([0, 1], [0, 1, 2])),
    "max_num_batched_tokens": (lambda **s: first_chunks(30, **s), (9, 20), ({0: 9}, {0: 20})),
    "enable_chunked_prefill": (whole_or_cut, (True, False), ({0: 1, 1: 1, 2: 18}, {0: 1, 1: 1})),
    "long_prefill_token_threshold": (lambda **s: first_chunks(60, 60, 3, **s), (0, 8), ({0: 32}, {0: 21, 1: 8, 2: 3})),
    "max_num_partial_prefills": (long_ones, (1, 2), ([0], [0, 1, 2])),
    "max_long_partial_prefills": (long_ones, (1, 2), ([0, 2], [0, 1, 2])),
    "max_prefill_skip_s": (passed_for_6_seconds, (5.0, 7.0), ([0, 2], [0, 2, 3])),
    "kv_bypass_s": (entered_past_a_blocked_head, (0.0, 5.0), ([], [2, 3])),
    "kv_bypass_blocks": (entered_past_a_blocked_head, (1, 2), ([3], [2, 3])),
    "scheduler_reserve_full_isl": (entered_in_parts, (True, False), ([], [1])),
    "watermark": (entered_beside_a_reserve, (0.0, 0.5), ([1], [])),
    "enable_prefix_caching": (computed_of_a_repeated_prompt, (True, False), ({1: 3}, {1: 7})),
    "block_size": (computed_of_a_repeated_prompt, (4, 2), ({1: 3}, {1: 1})),
    "policy": (order_by_priority, ("fcfs", "priority"), ([0, 1], [1, 0])),
    "priority_ageing_s": (order_by_priority, (15.0, 30.0), ([0, 1], [1, 0])),
    "batching": (entries_of_each_step, ("continuous", "static"), ([[0, 1], [2]], [[0, 1], []])),
    "max_num_queued_seqs": (taken_into_the_queue, (2, 3), (["taken", "taken", "refused"], ["taken"] * 3)),
    "max_num_queued_tokens": (taken_into_the_queue, (29, 30), (["taken", "taken", "refused"], ["taken"] * 3)),
    "queue_timeout_s": (expired_after_5_seconds, (4.0, 6.0), ([1], [])),
}


def test_the_table_has_every_setting() -> None:
    assert sorted(TWO_VALUES) == sorted(["block_size", *(field.name for field in fields(SchedulerConfig))])


@pytest.mark.parametrize("name", TWO_VALUES)
def test_two_values_make_a_difference(name: str) -> None:
    scenario, values, seen = TWO_VALUES[name]
    assert tuple(scenario(**{name: value}) for value in values) == seen


CHANGES: dict[str, tuple[Any, Any]] = {
    "max_num_seqs": (3, 2),
    "max_num_batched_tokens": (20, 9),
    "long_prefill_token_threshold": (0, 8),
    "max_num_partial_prefills": (2, 1),
    "max_long_partial_prefills": (2, 1),
    "watermark": (0.5, 0.0),
}


@pytest.mark.parametrize("name", CHANGEABLE)
def test_a_limit_that_was_changed_live_works_as_one_of_the_start(name: str) -> None:
    scenario, values, seen = TWO_VALUES[name]
    start, now = CHANGES[name]
    assert scenario(**{name: start}, live={name: now}) == seen[values.index(now)] != seen[values.index(start)]
