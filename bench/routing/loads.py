"""The loads of the study: a shape, the replica that it meets, its rate and its objectives.

Coarse tokens: one token of the simulation stands for `COARSE` real ones. Everything takes as long as it would with
real tokens and costs a quarter of the work to simulate: a token of prefill costs four times as much, a step stands for
four real ones, what grows with the square of the length for 16. Steps are coarse too (some 60 ms), so is every TTFT.

The rate is a share of what one replica does that finds no prefix: W2 has none to find and gets 0.8 of it; the other two
get more than a replica could do that computes everything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bench.simulate.outcome import Objectives
from bench.simulate.settings import ClusterSettings
from bench.simulate.step_cost import StepCost
from bench.traces.generate import generate
from bench.traces.trace import Trace
from replica.config import SchedulerConfig
from replica.model.api import ModelShape
from router.config import RouterConfig

COARSE = 4
SLOWER = 3
"""Steps take so many times as long as the cost says: a model of some 24 billion parameters where the cost is that of 8.
A second then has fewer requests, so that the largest cluster can be simulated for some lifetimes of a request."""

VOCAB_SIZE = 49_152
STREAM_DELAY_S = 0.02
"""What streams say is never older, whatever reports are: tokens come while they are made."""


class Load(NamedTuple):
    """Lengths in real tokens. `share`: of a replica's capacity without a prefix cache. `requests_per_replica`: of a
    trace for 8, 64 and 1,000 replicas."""

    shape: str
    is_prefix_heavy: bool
    pool_tokens: int
    block_tokens: int
    max_num_seqs: int
    max_model_len: int
    share: float
    requests_per_replica: dict[int, int]
    objectives: Objectives


LOADS = {
    load.shape: load
    for load in (
        Load("W2", False, 131_072, 256, 48, 32_768, 0.8, {8: 300, 64: 120, 1000: 25}, Objectives(2.0, 0.15 * COARSE)),
        Load("W4", True, 1_048_576, 512, 48, 131_072, 1.5, {8: 100, 64: 50, 1000: 10}, Objectives(8.0, 0.3 * COARSE)),
        Load(
            "W8-shared-prefix",
            True,
            131_072,
            256,
            48,
            32_768,
            1.7,
            {8: 300, 64: 120, 1000: 25},
            Objectives(2.0, 0.15 * COARSE),
        ),
    )
}


class Cell(NamedTuple):
    """One cluster under one load."""

    shape: str
    num_replicas: int
    report_delay_s: float
    num_routers: int


def coarse_cost(cost: StepCost, coarse: int) -> StepCost:
    """What a step costs whose tokens stand for `coarse` real ones each, on a machine that is `SLOWER`."""
    stretched = cost.slowed(SLOWER * coarse, attention=coarse)
    granule = max(1, cost.kv_granule_tokens // coarse)
    return replace(stretched, kv_granule_tokens=granule, name=f"{cost.name}, {coarse} tokens in one")


def settings_of(cell: Cell, cost: StepCost, router: RouterConfig, seed: int) -> ClusterSettings:
    """The cluster of a cell. A delay of 0 is that of the streams."""
    load = LOADS[cell.shape]
    block_size = load.block_tokens // COARSE
    num_blocks = load.pool_tokens // load.block_tokens
    return ClusterSettings(
        scheduler=SchedulerConfig(max_num_seqs=load.max_num_seqs, max_num_batched_tokens=1024),
        shape=ModelShape(num_blocks, block_size, VOCAB_SIZE, load.max_model_len // COARSE, ()),
        cost=coarse_cost(cost, COARSE),
        router=router,
        num_replicas=cell.num_replicas,
        num_routers=cell.num_routers,
        report_delay_s=max(cell.report_delay_s, STREAM_DELAY_S),
        stream_delay_s=STREAM_DELAY_S,
        seed=seed,
    )


def trace_of(shape: str, num_requests: int, rate: float, seed: int) -> Trace:
    """`rate`: requests per second of the whole cluster."""
    return generate(shape, num_requests, seed, rate).scaled(COARSE)
