"""A small scheduler with the fake model, and plans shown as {sequence id: tokens in this step}."""

from __future__ import annotations

from replica.config import SchedulerConfig
from replica.model.fake import FakeModel
from replica.scheduler.plan import StepPlan
from tests.property.scheduler.world import World, request, shape_of

__all__ = ["World", "chunks", "request", "shape_of", "world"]


def world(num_blocks: int = 100, block_size: int = 4, *, max_model_len: int = 10_000, **settings: object) -> World:
    """Ample by default: 8 places, 32 tokens a step, no watermark. `settings` are those of the scheduler."""
    defaults: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "watermark": 0.0}
    config = SchedulerConfig(**{**defaults, **settings})  # type: ignore[arg-type]
    return World(config, FakeModel(shape_of(num_blocks, block_size, max_model_len)))


def chunks(plan: StepPlan | None) -> dict[int, int]:
    assert plan is not None
    return dict(zip(plan.seq_ids, plan.num_tokens, strict=True))


def joined(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [j.seq_id for j in plan.joined]
