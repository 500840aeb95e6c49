"""One load, one replica in virtual time, one victim rule at a time: what each rule costs.

Under the settings as shipped KV pressure is rare: admission reserves whole inputs, a watermark and the decodes' coming
growth, so that hardly anybody is ever preempted (`shipped`). To tell rules apart all three are off or small
(`pressed`): inputs enter chunk by chunk, nothing is kept free, the pool holds a few dozen requests at most.

Capacity is what the replica finishes per second when all requests are there from the start, by the `newest` rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from bench.simulate.outcome import Objectives, Outcome, columns_of
from bench.simulate.replica import SimulatedReplica
from bench.simulate.requests import QUEUE_WITHOUT_BOUNDS, exactly
from bench.simulate.step_cost import StepCost
from bench.simulate.step_totals import StepTotals
from bench.traces.generate import generate
from bench.traces.trace import Trace
from bench.victims.rules import RULES
from replica.config import SchedulerConfig
from replica.model.api import ModelShape
from replica.request import GenerationRequest

VOCAB_SIZE = 32_000
MAX_MODEL_LEN = 1 << 18


class Regime(NamedTuple):
    """How much admission keeps free for what runs already."""

    name: str
    reserve_full_isl: bool
    watermark: float


SHIPPED = Regime("shipped", True, 0.01)
PRESSED = Regime("pressed", False, 0.0)
REGIMES = {regime.name: regime for regime in (SHIPPED, PRESSED)}


class Load(NamedTuple):
    """Requests of a shape on a replica whose pool holds `pool_tokens`, with `step_tokens` to a step."""

    shape: str
    num_requests: int
    pool_tokens: int
    step_tokens: int
    block_size: int


LOADS = {
    load.shape: load
    for load in (
        Load("W1", 1000, 40_000, 1024, 16),
        Load("W2", 1000, 60_000, 1024, 16),
        Load("W4", 250, 130_000, 2048, 64),
    )
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What stays the same while rules change. `rate`: share of capacity that arrives."""

    load: Load
    regime: Regime
    prefix_caching: bool
    cost: StepCost
    rate: float


class Measured(NamedTuple):
    """One rule's means over the seeds (`max_preemptions`: the worst). Tokens, seconds, requests per second."""

    rule: str
    num_requests: int
    recomputed_tokens: float
    computed_per_useful: float
    mean_preemptions: float
    max_preemptions: int
    num_over_3: float
    throughput: float
    ttft_p99_s: float
    e2e_p99_s: float
    itl_p99_s: float
    longest_wait_s: float
    longest_stall_s: float


def compare(setup: Setup, rules: tuple[str, ...], seeds: tuple[int, ...]) -> Iterator[Measured]:
    """Each rule on the same traces, one trace a seed."""
    traces = [_at_share(setup, seed) for seed in seeds]
    for rule in rules:
        yield _mean_of(rule, [play(setup, trace, rule) for trace in traces])


def _at_share(setup: Setup, seed: int) -> Trace:
    trace = generate(setup.load.shape, setup.load.num_requests, seed)
    capacity = play(setup, trace.all_present(), "newest")["throughput_requests_per_s"]
    return trace.at_rate(setup.rate * capacity)


def play(setup: Setup, trace: Trace, rule: str) -> dict[str, Any]:
    """The whole trace on one replica: `Outcome.summary`, the longest wait for a first token, the longest stall between
    two tokens of a request, and how many requests were preempted more than 3 times."""
    load, totals = setup.load, StepTotals()
    shape = ModelShape(load.pool_tokens // load.block_size, load.block_size, VOCAB_SIZE, MAX_MODEL_LEN, ())
    replica = SimulatedReplica(_config(setup), shape, setup.cost, totals, victim_rule=RULES[rule])
    for i, at_s in enumerate(trace.arrival_s):
        request = GenerationRequest(str(i), trace.prompt_ids(i, VOCAB_SIZE), exactly(trace.output_tokens[i]))
        replica.submit(i, request, at_s)
    replica.advance(inf)
    columns = columns_of(trace.arrival_s, replica.ended)
    result = Outcome(columns, totals, 1, shape.num_blocks).summary(Objectives(ttft_s=5.0, itl_s=0.1))
    waits = [first - at for first, at in zip(columns.first_token_s, trace.arrival_s, strict=True)]
    return result | {
        "longest_wait_s": max(waits),
        "longest_stall_s": totals.itl.percentiles((100,))[0] or 0.0,
        "num_over_3": sum(count > 3 for count in columns.num_preemptions),
        "mean_preemptions": fmean(columns.num_preemptions),
    }


def _config(setup: Setup) -> SchedulerConfig:
    num_tokens = setup.load.step_tokens
    return SchedulerConfig(
        max_num_seqs=256,
        max_num_batched_tokens=num_tokens,
        scheduler_reserve_full_isl=setup.regime.reserve_full_isl,
        watermark=setup.regime.watermark,
        enable_prefix_caching=setup.prefix_caching,
        **QUEUE_WITHOUT_BOUNDS,
    )


def _mean_of(rule: str, runs: list[dict[str, Any]]) -> Measured:
    return Measured(
        rule,
        runs[0]["num_requests"],
        fmean(run["recomputed_tokens"] for run in runs),
        fmean(run["computed_per_useful"] for run in runs),
        fmean(run["mean_preemptions"] for run in runs),
        max(run["max_preemptions"] for run in runs),
        fmean(run["num_over_3"] for run in runs),
        fmean(run["throughput_requests_per_s"] for run in runs),
        fmean(run["ttft_s"]["p99"] for run in runs),
        fmean(run["e2e_s"]["p99"] for run in runs),
        fmean(run["itl_s"]["p99"] for run in runs),
        fmean(run["longest_wait_s"] for run in runs),
        fmean(run["longest_stall_s"] for run in runs),
    )
