"""Small worlds, gone through whole: three requests, four to six blocks of two tokens, every interleaving of arrivals,
plans, commits, ends and aborts. `pytest -s` prints how many states each has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from replica.config import SchedulerConfig
from replica.request import GenerationRequest
from tests.property.scheduler.explorer import Exploration, SmallWorld, explore
from tests.property.scheduler.world import request

SHARED = [10, 11, 12, 13]


def requests(*lengths: tuple[list[int], int], priorities: tuple[int, ...] = (0, 0, 0)) -> tuple[GenerationRequest, ...]:
    """Prompts and max_tokens, named 0, 1, 2."""
    return tuple(
        replace(request(prompt, max_tokens, priority=priority), request_id=str(i))
        for i, ((prompt, max_tokens), priority) in enumerate(zip(lengths, priorities, strict=True))
    )


TWINS = requests((SHARED, 4), (SHARED, 4), ([30], 3))
"""Two share a whole prompt and outgrow the pool together; a short one besides."""
COUSINS = requests(([*SHARED, 14], 3), ([*SHARED, 20], 3), ([30, 31], 5))
LONG = requests(([10, 11, 12, 13, 14, 15], 2), ([20, 21, 22, 23, 24, 25], 2), ([30], 2))
"""Prompts of half the pool each."""
PROMISED = requests(([10, 11, 12, 13, 14, 15, 16, 17, 18], 2), ([20, 21, 22, 23], 2), ([30], 2))
"""A prompt of three steps, and one that fits beside it only if what the first still needs counted for nothing."""
UNEQUAL = requests((SHARED, 4), ([20, 21, 22], 3), ([30], 3), priorities=(1, 0, 0))


def small_world(whose: tuple[GenerationRequest, ...], of: dict[str, Any], **fields: Any) -> SmallWorld:
    """Three places, four tokens a step, no reserve; `fields` are those of the world or of the scheduler's settings."""
    ours = {name: fields.pop(name) for name in ("num_blocks", "max_model_len", "mishaps", "ticks") if name in fields}
    defaults: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 4, "watermark": 0.0, "kv_bypass_s": 0.0}
    return SmallWorld(whose, SchedulerConfig(**{**defaults, **fields}), **of, **ours)


AHEAD: dict[str, Any] = {"plans_ahead": 2}
ALONE: dict[str, Any] = {"plans_ahead": 1}
"""A plan is committed before the next is made."""

WORLDS: dict[str, tuple[int, str, SmallWorld]] = {
    "six blocks": (5_000, "preempted", small_world(COUSINS, ALONE)),
    "four blocks, plans ahead of commits": (
        4_000,
        "preempted",
        small_world(TWINS, AHEAD, num_blocks=4, max_num_seqs=2),
    ),
    "no prefix cache": (900, "preempted", small_world(TWINS, ALONE, num_blocks=5, enable_prefix_caching=False)),
    "watermark": (3_000, "preempted", small_world(COUSINS, ALONE, watermark=0.3)),
    "admission by chunk": (
        1_500,
        "preempted",
        small_world(LONG, ALONE, num_blocks=4, scheduler_reserve_full_isl=False),
    ),
    "whole input reserved": (2_000, "abort", small_world(PROMISED, ALONE)),
    "whole prompts only": (
        3_000,
        "preempted",
        small_world(
            TWINS, ALONE, max_model_len=8, enable_chunked_prefill=False, max_num_batched_tokens=8, max_num_seqs=2
        ),
    ),
    "priority": (3_000, "preempted", small_world(UNEQUAL, ALONE, num_blocks=5, policy="priority")),
    "static batches": (3_000, "preempted", small_world(TWINS, AHEAD, num_blocks=5, batching="static", max_num_seqs=2)),
    "small ones pass a head that waits for blocks": (
        3_000,
        "tick",
        small_world(UNEQUAL, ALONE, num_blocks=4, ticks=1, max_num_seqs=2, kv_bypass_blocks=2, kv_bypass_s=10.0),
    ),
    "one long prefill at a time": (
        3_000,
        "tick",
        small_world(LONG, ALONE, ticks=1, long_prefill_token_threshold=4, max_long_partial_prefills=1),
    ),
    "steps fail twice": (2_000, "roll_back", small_world(TWINS[:2], AHEAD, num_blocks=4, mishaps=2)),
    "one partial prefill at a time": (2_000, "abort", small_world(LONG, ALONE, max_num_partial_prefills=1)),
}

DEEPER: dict[str, tuple[int, str, SmallWorld]] = {
    "plans ahead of commits": (10_000, "preempted", small_world(TWINS, AHEAD, num_blocks=5)),
    "steps fail, memory runs out": (
        10_000,
        "roll_back",
        small_world(TWINS, AHEAD, num_blocks=5, max_num_seqs=2, mishaps=1),
    ),
    "promised blocks and failing steps": (10_000, "roll_back", small_world(PROMISED, ALONE, mishaps=2)),
    "six blocks, ahead": (10_000, "preempted", small_world(COUSINS, AHEAD)),
    "time passes twice": (
        10_000,
        "tick",
        small_world(TWINS, ALONE, num_blocks=5, ticks=2, kv_bypass_blocks=2, kv_bypass_s=10.0),
    ),
    "a long prompt is overtaken": (
        10_000,
        "tick",
        small_world(LONG, ALONE, ticks=2, long_prefill_token_threshold=2, max_long_partial_prefills=1),
    ),
    "priority ahead": (9_000, "preempted", small_world(UNEQUAL, AHEAD, num_blocks=5, policy="priority")),
}


def report(name: str, found: Exploration) -> None:
    silence = found.longest_silence
    print(
        f"{name}: {found.num_states:,} states, {found.num_transitions:,} transitions, {silence} plans without a token"
    )


def go_through(name: str, at_least: int, shows: str, world: SmallWorld) -> None:
    found = explore(world)
    report(name, found)
    assert found.num_states >= at_least, "the search went nowhere"
    assert all(found.seen[event] for event in (shows, "arrive", "plan", "commit", "abort")), found.seen


@pytest.mark.parametrize("name", WORLDS)
def test_every_law_holds_in_every_state_of_a_small_world(name: str) -> None:
    go_through(name, *WORLDS[name])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", DEEPER)
def test_every_law_holds_in_every_state_of_a_deeper_world(name: str) -> None:
    go_through(name, *DEEPER[name])
