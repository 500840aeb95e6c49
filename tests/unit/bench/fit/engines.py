"""A virtual engine over the fake model, and step costs that are known."""

from __future__ import annotations

from bench.fit.virtual_engine import SecondsOf, VirtualEngine
from bench.simulate.step_cost import StepCost
from replica.config import EngineConfig, SchedulerConfig
from replica.model.api import ModelShape
from replica.model.fake import FakeModel

LINEAR = StepCost(0.05, 1e-3, 3e-3, 2e-6, 1e-7, chunk_s=2e-3, kv_granule_tokens=16)
CURVED = StepCost(
    fixed_s=0.05,
    prefill_token_s=0.0,
    decode_seq_s=1e-3,
    kv_token_s=2e-6,
    prefill_pair_s=1e-7,
    chunk_s=2e-3,
    kv_granule_tokens=16,
    token_curve=((1, 0.0), (2, 0.05), (3, 0.03), (4, 0.03), (8, 0.05), (16, 0.06), (32, 0.08), (64, 0.11)),
)


def engine(seconds_of: SecondsOf, *, max_num_seqs: int = 8, max_num_batched_tokens: int = 64) -> VirtualEngine:
    """Small limits, so that the fake model, which reads whole contexts, stays quick."""
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, queue_timeout_s=1e6
    )
    shape = ModelShape(num_blocks=400, block_size=16, vocab_size=1000, max_model_len=600, eos_token_ids=())
    return VirtualEngine(EngineConfig(scheduler=limits), shape, seconds_of, FakeModel(shape))
