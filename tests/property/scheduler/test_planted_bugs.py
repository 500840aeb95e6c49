"""Each planted bug is caught: by the state machine or the small worlds, and by streams of requests into a small and a
large pool. The scheduler as it is passes the same runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase

from replica.config import SchedulerConfig
from replica.model.fake import FakeModel
from tests.property.scheduler.explorer import SmallWorld, explore
from tests.property.scheduler.planted import BUGS, Edit, MovedText, planted
from tests.property.scheduler.test_any_order import try_orders
from tests.property.scheduler.test_exhaustive import WORLDS
from tests.property.scheduler.world import VOCAB, World, request, shape_of

OVERTAKEN = SmallWorld(
    tuple(replace(request([10 + 10 * i] * length, 1), request_id=str(i)) for i, length in enumerate((12, 6, 1, 1))),
    SchedulerConfig(3, 4, long_prefill_token_threshold=2, max_long_partial_prefills=1, kv_bypass_s=0.0, watermark=0.0),
    num_blocks=10,
    plans_ahead=1,
    aborts=False,
    ticks=1,
)
"""Two long prompts, of which one at a time may be mid-prefill, and two short ones that may pass the other."""

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"watermark": 0.2, "enable_prefix_caching": False},
    {"long_prefill_token_threshold": 4, "max_long_partial_prefills": 1, "max_prefill_skip_s": 1.0},
)


def stream(seed: int, num_blocks: int, block_size: int) -> None:
    """Forty requests come one by one, a second apart: a third of them long, half with a shared prefix; some leave."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {"max_num_seqs": rng.randint(2, 8), "kv_bypass_s": 0.0, "watermark": 0.0}
    settings |= SETTINGS[seed % len(SETTINGS)]
    budget = settings["max_num_seqs"] + rng.choice([1, 4, 16])
    world = World(
        SchedulerConfig(max_num_batched_tokens=budget, **settings), FakeModel(shape_of(num_blocks, block_size))
    )
    pool = num_blocks * block_size
    shared = [rng.randrange(3, VOCAB) for _ in range(pool)]
    for _ in range(40):
        length = rng.randint(pool // 3, 2 * pool // 3) if rng.random() < 0.3 else rng.randint(1, 3 * block_size)
        num_shared = rng.choice([0, length])
        own = [rng.randrange(3, VOCAB) for _ in range(length - num_shared)]
        seq_id = world.add(request(shared[:num_shared] + own, rng.randint(1, pool // 6), ignore_eos=True))
        world.now_s += 1.0
        for _ in range(rng.randint(0, 4)):
            world.plan() if rng.random() < 0.3 and len(world.in_flight) < 2 else world.step()
        if seq_id is not None and rng.random() < 0.05:
            world.abort(seq_id)
    world.drain()
    world.ledger.check_finished()
    world.check_outputs()


def small_pool() -> None:
    for seed in range(36):
        stream(seed, 10, 4)


def large_pool() -> None:
    for seed in range(9):
        stream(seed, 96, 8)


def any_order() -> None:
    try_orders(150, derandomize=True, database=None, phases=[Phase.generate], report_multiple_bugs=False)


CAUGHT: dict[str, tuple[str, SmallWorld]] = {
    "no owed": ("rule 3: free blocks don't cover what mid-prefills are owed", WORLDS["whole input reserved"][2]),
    "victim to the back": ("law 7: somebody was passed(?! )", WORLDS["no prefix cache"][2]),
    "hash of a half block": ("law 4: a (cached )?block", WORLDS["priority"][2]),
    "hit of the last token": (
        "rule 3: a hit of the last token|law 6: deadlock",
        WORLDS["four blocks, plans ahead of commits"][2],
    ),
    "free twice": ("a block is free twice|a block is free and cached-free", WORLDS["no prefix cache"][2]),
    "budget off by one": ("law 1: more tokens than the budget", WORLDS["watermark"][2]),
    "skip without bound": ("law 7: somebody was passed for too long", OVERTAKEN),
    "watermark on running": ("rule 2: preempted though blocks were free", WORLDS["watermark"][2]),
}
"""Which law or rule each bug breaks, and the small world (all are gone through whole without it) that shows it."""


@pytest.mark.parametrize("pool", [small_pool, large_pool])
@pytest.mark.parametrize("bug", BUGS)
def test_streams_of_requests_catch_it(bug: str, pool: Callable[[], None]) -> None:
    with planted(BUGS[bug]), pytest.raises(AssertionError, match=CAUGHT[bug][0]):
        pool()


@pytest.mark.parametrize("bug", BUGS)
def test_a_small_world_gone_through_catches_it(bug: str) -> None:
    law, world = CAUGHT[bug]
    with planted(BUGS[bug]), pytest.raises(AssertionError, match=law):
        explore(world)


@pytest.mark.parametrize("bug", ["victim to the back", "hit of the last token", "free twice", "budget off by one"])
def test_the_state_machine_catches_it(bug: str) -> None:
    """Those that a few of its examples show, whichever they are; which law notices first depends on them."""
    with planted(BUGS[bug]), pytest.raises(AssertionError):
        any_order()


@pytest.mark.parametrize("run", [small_pool, large_pool, any_order, lambda: explore(OVERTAKEN)])
def test_the_scheduler_as_it_is_passes_the_same_runs(run: Callable[[], None]) -> None:
    run()


def test_a_bug_whose_words_are_gone_fails_loudly() -> None:
    edit = Edit(explore, "words that nobody wrote", "")
    with pytest.raises(MovedText, match="explore doesn't say 'words that nobody wrote'"), planted((edit,)):
        pass


def test_what_was_planted_is_gone_afterwards() -> None:
    code = {edit.function: edit.function.__code__ for edits in BUGS.values() for edit in edits}
    for edits in BUGS.values():
        with planted(edits):
            assert all(edit.function.__code__ is not code[edit.function] for edit in edits)
    assert all(function.__code__ is before for function, before in code.items())
