"""The routing study: the same numbers again, what coarse tokens keep, how fast decisions are told."""

from __future__ import annotations

import itertools

import pytest

from bench.routing.decision_speed import time_decisions
from bench.routing.loads import COARSE, LOADS, SLOWER, Cell, coarse_cost, settings_of
from bench.routing.study import BURST, READ_NO_REPORTS, Job, burst_spread, capacity_of, measure, run_for
from bench.simulate.step_cost import H100_8B, StepWork, load_cost
from router.config import RouterConfig

CELL = Cell("W8-shared-prefix", 8, 0.0, 1)


def test_coarse_tokens_take_as_long_as_those_they_stand_for() -> None:
    """A prefill of 4,000 tokens, and 100 steps of 8 sequences with 2,000 tokens each."""
    cost = coarse_cost(H100_8B, COARSE)
    whole = H100_8B.seconds(StepWork(4000, 0, 0, 8e6)) - H100_8B.fixed_s
    coarse = cost.seconds(StepWork(4000 // COARSE, 0, 0, 8e6 / COARSE**2)) - cost.fixed_s
    assert coarse == pytest.approx(SLOWER * whole)
    steps = 100 * H100_8B.seconds(StepWork(0, 8, 16_000, 0.0))
    coarse_steps = 100 / COARSE * cost.seconds(StepWork(0, 8, 16_000 // COARSE, 0.0))
    assert coarse_steps == pytest.approx(SLOWER * steps)


def test_a_measured_cost_keeps_its_curve_and_chunks_when_tokens_are_coarse() -> None:
    """A step of 8 tokens stands for `COARSE` steps of 8."""
    cost = load_cost("cpu-smollm2")
    work = StepWork(8, 0, 0, 0.0, 1)
    assert cost.token_curve
    assert coarse_cost(cost, COARSE).seconds(work) == pytest.approx(SLOWER * COARSE * cost.seconds(work))
    assert coarse_cost(cost, COARSE).kv_granule_tokens == max(1, cost.kv_granule_tokens // COARSE)


def test_a_job_gives_the_same_numbers_again() -> None:
    job = Job(CELL, "cost_s", (0,), 5.0, 0.05)
    first, second = measure(job), measure(job)
    assert first._replace(cpu_s=0.0) == second._replace(cpu_s=0.0)
    assert 0.0 < first.hit_share < 1.0
    assert first.ttft_p50_s <= first.ttft_p95_s


@pytest.mark.parametrize("shape", LOADS)
def test_every_load_fits_its_replica(shape: str) -> None:
    load = LOADS[shape]
    settings = settings_of(Cell(shape, 1, 0.0, 1), H100_8B, RouterConfig(), 0)
    assert settings.shape.num_blocks * settings.shape.block_size * COARSE == load.pool_tokens
    assert settings.shape.max_seq_len * COARSE <= load.pool_tokens


def test_capacity_is_that_of_a_replica_without_prefixes() -> None:
    assert capacity_of(LOADS["W8-shared-prefix"], H100_8B) == pytest.approx(2.6, rel=0.3)


@pytest.mark.parametrize("delay_s", [0.0, 5.0])
def test_a_burst_spreads_whatever_the_age_of_reports(delay_s: float) -> None:
    assert burst_spread(Cell("W2", 8, delay_s, 1), "cost_s", (0,)) == 1.0
    assert burst_spread(Cell("W2", BURST, delay_s, 1), "cost_s", (0,)) == 1.0


def test_decisions_are_timed_without_the_news_between_them() -> None:
    ticks = itertools.count()
    speed = time_decisions(64, 50, RouterConfig(), lambda: next(ticks) * 1e-6)
    assert (speed.num_replicas, round(speed.mean_us, 6), round(speed.p99_us, 6)) == (64, 1.0, 1.0)


@pytest.mark.parametrize("policy", READ_NO_REPORTS)
def test_one_run_stands_for_all_delays_of_a_policy_that_reads_no_reports(policy: str) -> None:
    late = Cell("W8-shared-prefix", 8, 5.0, 16)
    job = Job(run_for(late, policy), policy, (0,), 5.0, 0.05)
    assert job.cell != late
    assert measure(job)._replace(cpu_s=0.0) == measure(job._replace(cell=late))._replace(cpu_s=0.0)
