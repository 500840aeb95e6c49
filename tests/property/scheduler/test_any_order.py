"""Every law of the scheduler under arrivals, steps, overlap, aborts, rollbacks, preemptions, expiry and budget changes
in any order, against the naive ledger and the fake model's oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from replica.config import SchedulerConfig
from replica.model.fake import FakeModel
from replica.request import FinishReason
from tests.property.scheduler.world import VOCAB, World, request, shape_of

SHARED_PREFIX = [random.Random(5).randrange(3, VOCAB) for _ in range(200)]


class SchedulerUnderAnyOrder(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 16),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        spare_tokens=st.integers(1, 20),
        max_model_len=st.integers(4, 80),
        eos_ratio=st.sampled_from([0.0, 0.1]),
        settings_of=st.fixed_dictionaries(
            {
                "scheduler_reserve_full_isl": st.booleans(),
                "watermark": st.sampled_from([0.0, 0.01, 0.3]),
                "enable_prefix_caching": st.booleans(),
                "kv_bypass_s": st.sampled_from([0.0, 2.0]),
                "policy": st.sampled_from(["fcfs", "priority"]),
                "batching": st.sampled_from(["continuous", "continuous", "static"]),
            }
        ),
        prefill=st.sampled_from(
            [
                {},
                {"enable_chunked_prefill": False},
                {"long_prefill_token_threshold": 5},
                {"long_prefill_token_threshold": 4, "max_long_partial_prefills": 1, "max_prefill_skip_s": 1.0},
                {"max_num_partial_prefills": 1},
                {"max_num_partial_prefills": 2, "max_long_partial_prefills": 1, "long_prefill_token_threshold": 3},
            ]
        ),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare_tokens: int,
        max_model_len: int,
        eos_ratio: float,
        settings_of: dict[str, Any],
        prefill: dict[str, Any],
    ) -> None:
        whole_only = not prefill.get("enable_chunked_prefill", True)
        self.smallest_budget = max_model_len if whole_only else 0
        self.world = World(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(self.smallest_budget, max_num_seqs + spare_tokens),
                queue_timeout_s=5.0,
                max_num_queued_seqs=8,
                **settings_of,
                **prefill,
            ),
            FakeModel(shape_of(num_blocks, block_size, max_model_len), eos_ratio=eos_ratio),
        )

    @rule(
        twentieths=st.integers(0, 20),
        shared=st.sampled_from([0.0, 0.6, 1.0]),
        max_tokens=st.integers(1, 30),
        min_tokens=st.sampled_from([0, 0, 4]),
        salt=st.sampled_from([None, None, "tenant"]),
        seed=st.integers(0, 2**16),
        priority=st.integers(-1, 1),
    )
    def arrive(
        self,
        twentieths: int,
        shared: float,
        max_tokens: int,
        min_tokens: int,
        salt: str | None,
        seed: int,
        priority: int,
    ) -> None:
        """A prompt of up to 20 twentieths of the longest that fits, and now and then one token more."""
        shape = self.world.model.shape
        length = 1 + min(shape.num_blocks * shape.block_size, shape.max_model_len) * twentieths // 20
        num_shared = int(length * shared)
        own = random.Random(seed)
        prompt = SHARED_PREFIX[:num_shared] + [own.randrange(3, VOCAB) for _ in range(length - num_shared)]
        new = request(prompt, max_tokens, min_tokens=min_tokens, cache_salt=salt, priority=priority)
        self.world.add(new, seed)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(count=st.integers(1, 6))
    def step_ahead(self, count: int) -> None:
        for _ in range(count):
            if len(self.world.in_flight) < 2:
                self.world.plan()
            if len(self.world.in_flight) == 2:
                self.world.commit()

    @precondition(lambda self: len(self.world.in_flight) < 2)
    @rule()
    def plan(self) -> None:
        self.world.plan()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def commit(self) -> None:
        self.world.commit()

    @precondition(lambda self: self.world.in_flight)
    @rule(newest=st.booleans())
    def rollback(self, newest: bool) -> None:
        self.world.rollback(len(self.world.in_flight) - 1 if newest else 0)

    @precondition(lambda self: self.world.ledger.books)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        self.world.abort(choice % len(self.world.ledger.books))

    @rule()
    def preempt_newest(self) -> None:
        self.world.scheduler.preempt_newest()

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds
        self.world.expire()

    @rule(seqs=st.floats(0.01, 1.0), tokens=st.floats(0.01, 1.0))
    def budgets_change(self, seqs: float, tokens: float) -> None:
        start = self.world.config
        max_num_seqs = max(1, int(start.max_num_seqs * seqs))
        max_num_batched_tokens = max(self.smallest_budget, max_num_seqs + 1, int(start.max_num_batched_tokens * tokens))
        self.world.scheduler.set_budgets(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, watermark=0.0
        )

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.drain()
        self.world.ledger.check_finished()
        self.world.check_outputs()


def try_orders(max_examples: int, **more: Any) -> None:
    run_state_machine_as_test(
        SchedulerUnderAnyOrder,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


def test_every_law_holds_under_any_order() -> None:
    try_orders(120)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_law_holds_under_many_orders() -> None:
    try_orders(3000)


def random_world(rng: random.Random, *, overlap: bool, **faults: object) -> World:
    """A crowded world: up to 20 requests at once, half of them sharing a prefix, in a pool that can't hold them."""
    shape = shape_of(rng.randint(2, 24), rng.choice([1, 2, 4, 8]), rng.randint(8, 120))
    max_num_seqs = rng.randint(1, 6)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs + 1, 30),
        scheduler_reserve_full_isl=rng.random() < 0.6,
        watermark=rng.choice([0.0, 0.01, 0.2]),
        enable_prefix_caching=rng.random() < 0.7,
    )
    world = World(config, FakeModel(shape, eos_ratio=rng.choice([0.0, 0.05]), **faults))  # type: ignore[arg-type]
    limit = min(shape.num_blocks * shape.block_size, shape.max_model_len) - 1
    for _ in range(rng.randint(1, 20)):
        length = rng.randint(1, limit)
        shared = rng.choice([0, length // 2, length])
        prompt = SHARED_PREFIX[:shared] + [rng.randrange(3, VOCAB) for _ in range(length - shared)]
        world.add(request(prompt, rng.randint(1, 30), min_tokens=rng.choice([0, 3])), rng.randrange(9))
    if overlap:
        while world.scheduler.has_work:
            if world.plan() is None or len(world.in_flight) == 2:
                world.commit()
    return world


@pytest.mark.parametrize("overlap", [False, True])
def test_a_crowd_gives_what_each_gives_alone(overlap: bool) -> None:
    num_preemptions = 0
    for seed in range(150):
        world = random_world(random.Random(seed), overlap=overlap)
        world.drain()
        world.ledger.check_finished()
        world.check_outputs()
        num_preemptions += world.scheduler.stats(None, 0.0, step_s=0, idle_s=0).num_preemptions
    assert num_preemptions > 100, "without preemptions this test proves nothing"


def test_faults_of_steps_and_rows_touch_only_who_caused_them() -> None:
    for seed in range(150):
        world = random_world(random.Random(seed), overlap=False, poison_token=3, nan_token=4, oom_every=5)
        world.drain_survivably()
        world.ledger.check_finished()
        world.check_outputs()
        for seq_id, book in world.ledger.books.items():
            alone, _ = world.model.alone(book.request, world.seeds[seq_id])
            guilty = {3, 4} & {*book.request.prompt_ids, *alone[:-1]}
            assert (book.end is FinishReason.ERROR) == bool(guilty), f"sequence {seq_id} of seed {seed}"
