"""The whole story on one kind of engine: its sizes, and the parts in order.

Sizes differ because a simulated step costs microseconds and a real one, on a CPU, a tenth of a second. The two are told
by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from bench.fit.engine import MeasuredEngine
from bench.fit.virtual_engine import VirtualEngine
from bench.simulate.step_cost import StepCost
from bench.story.door import Door, play_door
from bench.story.knobs import MixSize, PressureSize, chunked_study, pressure_studies
from bench.story.lengths import LengthDistribution, spreads
from bench.story.measures import Summary
from bench.story.readings import Reading, read_chunked_prefill, read_max_num_seqs, read_watermark
from bench.story.replay import OpenEngine
from bench.story.spread import SpreadRow, SpreadSize, play_spreads
from bench.story.study import KnobRow, KnobStudy, unbounded_queue
from replica.config import EngineConfig, ModelConfig
from replica.model.api import ModelShape

Progress = Callable[[str], None]

_VIRTUAL_VOCAB = 32_000
_VIRTUAL_BLOCK_SIZE = 16
_REAL_KV_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class StorySize:
    """`spreads`: which of `lengths.spreads` are played; `num_door_batches` of the widest come one by one.
    `first_again`: each knob's first row is played twice."""

    spread: SpreadSize
    spreads: tuple[str, ...]
    num_door_batches: int
    pressure: PressureSize
    mix: MixSize
    first_again: bool


def simulated_size(seed: int) -> StorySize:
    """For a GPU's step cost: about 80,000 virtual steps."""
    return StorySize(
        spread=SpreadSize(32, num_batches=100, num_parts=1, num_prompt_tokens=16, mean_output_tokens=26, seed=seed),
        spreads=("equal", "+-25%", "+-50%", "+-100%", "W2", "W7"),
        num_door_batches=50,
        pressure=PressureSize(
            num_requests=500,
            num_prompt_tokens=64,
            mean_output_tokens=104,
            num_blocks=320,
            block_size=16,
            max_num_seqs=(8, 16, 32, 64, 128),
            max_num_batched_tokens=1024,
            seed=seed,
        ),
        mix=MixSize(
            num_requests=500,
            num_short_tokens=64,
            num_long_tokens=1500,
            long_share=0.2,
            mean_output_tokens=52,
            load=0.6,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
            small_num_batched_tokens=256,
            seed=seed,
        ),
        first_again=False,
    )


def real_size(seed: int) -> StorySize:
    """For the embedded model on two CPU cores: a few minutes."""
    return StorySize(
        spread=SpreadSize(8, num_batches=10, num_parts=2, num_prompt_tokens=8, mean_output_tokens=16, seed=seed),
        spreads=("equal", "+-50%", "W2", "W7"),
        num_door_batches=5,
        pressure=PressureSize(
            num_requests=48,
            num_prompt_tokens=8,
            mean_output_tokens=16,
            num_blocks=32,
            block_size=8,
            max_num_seqs=(8, 16, 32),
            max_num_batched_tokens=64,
            seed=seed,
        ),
        mix=MixSize(
            num_requests=24,
            num_short_tokens=8,
            num_long_tokens=160,
            long_share=0.2,
            mean_output_tokens=16,
            load=0.6,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            small_num_batched_tokens=32,
            seed=seed,
        ),
        first_again=True,
    )


def virtual_engines(cost: StepCost) -> OpenEngine:
    """Engines in virtual time. A pool whose size isn't set holds every sequence at its longest."""

    @contextmanager
    def open_engine(config: EngineConfig) -> Iterator[MeasuredEngine]:
        block_size = config.model.block_size or _VIRTUAL_BLOCK_SIZE
        longest = config.model.max_model_len or 1
        num_blocks = config.model.num_blocks or config.scheduler.max_num_seqs * -(-longest // block_size)
        yield VirtualEngine(config, ModelShape(num_blocks, block_size, _VIRTUAL_VOCAB, longest, (0,)), cost.of_plan)

    return open_engine


def play_batching(
    open_engine: OpenEngine, size: StorySize, cost: StepCost, progress: Progress
) -> tuple[list[SpreadRow], Door]:
    """Fixed batches against continuous ones. Both engines are open at the same time and play in turn."""
    chosen = [one for one in spreads(size.spread.mean_output_tokens) if one.name in size.spreads]
    config = spread_config(size.spread, chosen)
    static = replace(config, scheduler=replace(config.scheduler, batching="static"))
    at_the_door = replace(size.spread, num_batches=size.num_door_batches)
    with open_engine(static) as fixed, open_engine(config) as continuous:
        rows = list(play_spreads(fixed, continuous, chosen, size.spread, cost, progress))
        return rows, play_door(fixed, continuous, chosen[-1], at_the_door, cost, progress)


def spread_config(size: SpreadSize, distributions: list[LengthDistribution]) -> EngineConfig:
    """Only `max_num_seqs` limits: the step budget holds the prompts of a whole batch, the pool all contexts."""
    longest = size.num_prompt_tokens + max(one.longest for one in distributions)
    scheduler = unbounded_queue(
        max_num_seqs=size.batch_size,
        max_num_batched_tokens=size.batch_size * size.num_prompt_tokens,
        watermark=0.0,
    )
    return EngineConfig(
        model=ModelConfig(max_model_len=longest, kv_cache_memory_bytes=_REAL_KV_BYTES), scheduler=scheduler
    )


Read = Callable[[Sequence[KnobRow], Summary | None], Reading]


def studies(size: StorySize, cost: StepCost) -> list[tuple[KnobStudy, Read]]:
    """The knobs in the order of repair, each with who reads its rows."""
    seqs, watermark = pressure_studies(size.pressure)
    return [
        (seqs, read_max_num_seqs),
        (chunked_study(size.mix, cost), read_chunked_prefill),
        (watermark, read_watermark),
    ]
