"""Laws of the engine under any order of requests, aborts, budget changes, full queues, poison and short memory.

Every sequence ends exactly once; what it made is what it makes alone, cut where it was ended; in the end nothing is
held. The fake model reads its context through the block tables, so a wrong block changes a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from replica.engine import sequence_seed
from replica.model.fake import FakeModel
from replica.request import FinishReason, GenerationRequest
from tests.fake_replica import EngineDriver, fake_shape, request_of, small_config

SHAPE = fake_shape(num_blocks=24, block_size=4, max_model_len=64)
POISON = 93

Action = tuple[str, int]


@dataclass
class World:
    """A driver and what was asked of it."""

    driver: EngineDriver
    requests: list[GenerationRequest] = field(default_factory=list)

    def act(self, name: str, size: int) -> None:
        if name == "submit":
            self.submit(size)
        elif name == "abort" and self.requests:
            request = self.requests[size % len(self.requests)]
            self.driver.engine.end(request.request_id, None if size % 3 else size % request.n)
        elif name == "budget":
            num_seqs = 1 + size % 4
            num_tokens = num_seqs + 1 + size % (16 - num_seqs)
            self.driver.engine.set_budgets({"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens})
        elif name == "step":
            for _ in range(size % 4):
                self.driver.step()
        elif name == "wait":
            self.driver.clock.now_s += size

    def submit(self, size: int) -> None:
        request = request_of(
            f"r{len(self.requests)}",
            num_prompt=1 + size % 40,
            max_tokens=1 + size % 13,
            first=size % 7,
            n=1 + size % 3 % 2,
            temperature=float(size % 2),
            seed=size,
            ignore_eos=bool(size % 5),
            priority=size % 3,
        )
        self.requests.append(request)
        self.driver.submit(request)


@st.composite
def actions(draw: st.DrawFn) -> list[Action]:
    names = st.sampled_from(["submit", "submit", "submit", "step", "step", "abort", "budget", "wait"])
    return draw(st.lists(st.tuples(names, st.integers(0, 400)), min_size=1, max_size=40))


SCHEDULER_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"max_num_queued_seqs": 3},
    {"batching": "static"},
    {"policy": "priority"},
    {"long_prefill_token_threshold": 5, "max_long_partial_prefills": 1},
    {"scheduler_reserve_full_isl": False, "enable_prefix_caching": False},
)


@settings(max_examples=80)
@given(
    plan=actions(),
    oom_every=st.sampled_from([0, 0, 2, 3, 7]),
    late=st.booleans(),
    poisoned=st.booleans(),
    changes=st.sampled_from(SCHEDULER_SETTINGS),
)
def test_every_sequence_ends_once_with_the_tokens_it_makes_alone(
    plan: list[Action], oom_every: int, late: bool, poisoned: bool, changes: dict[str, Any]
) -> None:
    healthy = FakeModel(SHAPE, eos_ratio=0.05)
    model = FakeModel(SHAPE, eos_ratio=0.05, oom_every=oom_every, late=late, poison_token=POISON if poisoned else None)
    config = small_config(**{"queue_timeout_s": 300.0, **changes})
    world = World(EngineDriver(config, model))
    world.driver.engine._scheduler.block_pool.on_poison = model.poison
    for name, size in plan:
        world.act(name, size)
    world.driver.run(5000)
    for request in world.requests:
        check_ends(world.driver, healthy, request)
    load = world.driver.engine.idle_update().load
    assert (load.num_running, load.num_waiting, load.kv_usage_ratio) == (0, 0, 0.0)


def check_ends(driver: EngineDriver, healthy: FakeModel, request: GenerationRequest) -> None:
    if driver.ends.get((request.request_id, 0)) == [FinishReason.REJECTED]:
        assert all((request.request_id, index) not in driver.tokens for index in range(request.n))
        return
    for index in range(request.n):
        key = (request.request_id, index)
        made = driver.tokens.get(key, [])
        alone, reason = healthy.alone(request, sequence_seed(request.sampling.seed or 0, index))
        (ended,) = driver.ends[key]
        if ended in (FinishReason.STOP, FinishReason.LENGTH):
            assert (made, ended) == (alone, reason)
        else:
            assert made == alone[: len(made)]
        if ended is FinishReason.ERROR:
            assert POISON in (*request.prompt_ids, *alone[: len(made) + 1])
