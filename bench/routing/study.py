"""One policy on one cluster under one load: what its clients see, and how evenly it spread them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

import numpy as np

from bench.routing.loads import COARSE, LOADS, Cell, Load, settings_of, trace_of
from bench.simulate.capacity import capacity, num_probes
from bench.simulate.cluster import simulate_cluster
from bench.simulate.outcome import Outcome
from bench.simulate.step_cost import StepCost, load_cost
from bench.traces.generate import fixed_lengths, generate
from bench.traces.trace import Trace
from router.config import RouterConfig

SHIPPED = "cost_s"
LOAD_ONLY = ("round_robin", "power_of_two", "least_in_flight")
BASELINES = (*LOAD_ONLY, "session_affinity")

READ_NO_REPORTS = ("round_robin", "least_in_flight", "session_affinity")
"""The age of reports changes next to nothing for these, since they choose without them: one run stands for all delays.
(Their filters read reports, of who drains and whose queue is full, which hardly anybody is in these cells.)"""

POLICIES: Mapping[str, RouterConfig] = {
    SHIPPED: RouterConfig(),
    **{name: RouterConfig(policy=name) for name in BASELINES},
    "three_weights": RouterConfig(
        weights={"cost_s": 0.0, "kv_headroom": 1.0, "queue_depth": 1.0, "prefix_affinity": 1.0}
    ),
}
"""The last one, three scorers of equal weight, is measured on demand and isn't judged."""

MAX_PREFIX_BLOCKS = 500_000
"""Of each simulated router: more than the longest trace has."""

SEVERAL_SEEDS_UP_TO = 8
"""Replicas: in larger clusters one trace has requests enough."""

BURST = 64


class Measured(NamedTuple):
    """Means over the seeds. `goodput`: requests within the objectives, for each second in which requests came;
    `good_share`: of all; `max_over_mean`: requests at the busiest replica; `hit_share`: prompt tokens that nobody had
    to compute. `cpu_s`: what simulating it took."""

    policy: str
    ttft_p50_s: float
    ttft_p95_s: float
    goodput: float
    good_share: float
    max_over_mean: float
    hit_share: float
    cpu_s: float


class Job(NamedTuple):
    """One policy in one cell. `per_replica`: requests per second that one replica can do without prefixes;
    `requests_share`: length of the trace, 1 is as in `loads.py`."""

    cell: Cell
    policy: str
    seeds: tuple[int, ...]
    per_replica: float
    requests_share: float = 1.0
    cost: str = "h100-8b"


def run_for(cell: Cell, policy: str) -> Cell:
    """The cell that is simulated for this one."""
    return cell._replace(report_delay_s=0.0) if policy in READ_NO_REPORTS else cell


def capacity_of(load: Load, cost: StepCost) -> float:
    """Requests per second of one replica that finds no prefix."""
    settings = settings_of(Cell(load.shape, 1, 0.0, 1), cost, RouterConfig(), 0)
    settings = replace(settings, scheduler=replace(settings.scheduler, enable_prefix_caching=False))
    return capacity(settings, generate(load.shape, num_probes(settings), 0).scaled(COARSE), lambda _, __: None)


def measure(job: Job) -> Measured:
    """All seeds of one job, one after the other."""
    began_s = time.process_time()
    columns = zip(*(_play(job, seed) for seed in job.seeds), strict=True)
    means = [fmean(column) for column in columns]
    return Measured._make([job.policy, *means, time.process_time() - began_s])


def _play(job: Job, seed: int) -> tuple[float, ...]:
    load = LOADS[job.cell.shape]
    router = replace(POLICIES[job.policy], max_prefix_blocks=MAX_PREFIX_BLOCKS)
    trace = _trace(job.cell.shape, job.cell.num_replicas, job.per_replica, job.requests_share, seed)
    outcome = simulate_cluster(settings_of(job.cell, load_cost(job.cost), router, seed), trace, lambda _: None)
    return _numbers(outcome, trace, load)


@lru_cache(maxsize=3)
def _trace(shape: str, num_replicas: int, per_replica: float, requests_share: float, seed: int) -> Trace:
    load = LOADS[shape]
    num_each = load.requests_per_replica.get(num_replicas, min(load.requests_per_replica.values()))
    num_requests = max(num_replicas, round(num_each * num_replicas * requests_share))
    return trace_of(shape, num_requests, load.share * per_replica * num_replicas, seed)


def _numbers(outcome: Outcome, trace: Trace, load: Load) -> tuple[float, ...]:
    found = outcome.summary(load.objectives)
    num_prompt = int(np.frombuffer(trace.prompt_tokens, np.intc)[outcome.requests.finished()].sum())
    return (
        found["ttft_s"]["p50"],
        found["ttft_s"]["p95"],
        found["good_share"] * len(trace) / trace.arrival_s[-1],
        found["good_share"],
        found["routing"]["requests_max_over_mean"],
        1.0 - outcome.steps.num_prefill_tokens / num_prompt,
    )


def burst_spread(cell: Cell, policy: str, seeds: tuple[int, ...], cost: str = "h100-8b") -> float:
    """`BURST` requests at once on an idle cluster: those at the busiest replica over the mean, mean of the seeds."""
    spreads = []
    for seed in seeds:
        trace = fixed_lengths(BURST, seed, prompt_tokens=128, output_tokens=16)
        settings = settings_of(cell, load_cost(cost), POLICIES[policy], seed)
        outcome = simulate_cluster(settings, trace, lambda _: None)
        spreads.append(outcome.summary(LOADS[cell.shape].objectives)["routing"]["requests_max_over_mean"])
    return fmean(spreads)
