"""Engines in virtual time with costs that can be read off a step."""

from __future__ import annotations

from array import array

from bench.fit.virtual_engine import VirtualEngine
from bench.simulate.step_cost import StepCost
from bench.story.study import unbounded_queue
from bench.traces.trace import Trace
from replica.config import EngineConfig
from replica.model.api import ModelShape

SECOND_A_STEP = StepCost(1.0, 0.0, 0.0, 0.0, 0.0, name="second a step")


def engine(cost: StepCost = SECOND_A_STEP, *, num_blocks: int = 100, **settings: object) -> VirtualEngine:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "watermark": 0.0} | settings
    config = EngineConfig(scheduler=unbounded_queue(**limits))
    return VirtualEngine(config, ModelShape(num_blocks, 4, 100, 64, (0,)), cost.of_plan)


def trace(*requests: tuple[float, int, int]) -> Trace:
    """Requests as (arrival, prompt tokens, output tokens)."""
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Trace("by hand", 0, array("d", arrivals), array("i", prompts), array("i", outputs))


def silent(_: str) -> None:
    """Progress that nobody reads."""
