"""Measuring: the steps of a play get the plans that ran, and their times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.fit.engine import Order, Played, fixed_request
from bench.fit.micro import Benchmark, MicroBenchmarks, chunks, decode, micro_benchmarks
from bench.fit.mirror import measured_steps
from bench.simulate.step_cost import StepWork
from replica.config import SchedulerConfig
from replica.request import FinishReason
from tests.unit.bench.fit.engines import CURVED, LINEAR, engine

LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)


def test_a_decode_benchmark_measures_steps_of_that_width_and_context() -> None:
    measured = engine(LINEAR.of_plan)
    points = MicroBenchmarks(measured).measure([decode(2, 20, LIMITS, 4)], range(1), lambda *_: None)
    # Both prompts enter in the first step, after an idle engine, which isn't counted; then three decodes each.
    assert [(p.work, p.num_samples) for p in points] == [(StepWork(0, 2, 64, 0.0, 0), 3)]
    assert points[0].seconds == pytest.approx(0.05 + 2 * 3e-3 + 64 * 2e-6)


def test_a_chunk_benchmark_measures_steps_of_one_whole_prompt() -> None:
    points = MicroBenchmarks(engine(LINEAR.of_plan)).measure([chunks(16, LIMITS)], range(1), lambda *_: None)
    assert [(p.work, p.num_samples) for p in points] == [(StepWork(16, 0, 0, 128.0, 1), 3)]


def test_rounds_of_the_same_benchmark_make_the_same_points_with_more_samples() -> None:
    benchmark = Benchmark("mixed", ((16, 8),) * 4 + ((60, 1),), 5, 24)
    once = MicroBenchmarks(engine(CURVED.of_plan)).measure([benchmark], range(1), lambda *_: None)
    thrice = MicroBenchmarks(engine(CURVED.of_plan)).measure([benchmark], range(3), lambda *_: None)
    assert [(p.work, 3 * p.num_samples) for p in once] == [(p.work, p.num_samples) for p in thrice]


def test_a_point_has_the_median_of_its_steps() -> None:
    slow = iter([1.0, 1.0, 9.0, 1.5])
    points = MicroBenchmarks(engine(lambda plan: next(slow))).measure(
        [decode(1, 16, LIMITS, 4)], range(1), lambda *_: None
    )
    assert [p.num_samples for p in points] == [3]
    assert points[0].seconds == pytest.approx(1.5)
    assert points[0].noise == pytest.approx(0.5 / 1.5)


def test_every_step_of_every_benchmark_is_explained_by_its_plan() -> None:
    measured = engine(CURVED.of_plan)
    benchmarks = micro_benchmarks(measured.config.scheduler, measured.shape.max_model_len)
    points = MicroBenchmarks(measured).measure(benchmarks, range(1), lambda *_: None)
    assert {point.benchmark for point in points} == {benchmark.name for benchmark in benchmarks}
    for point in points:
        assert point.seconds == pytest.approx(CURVED.seconds(point.work))


def test_benchmarks_stay_within_the_limits_and_the_context() -> None:
    for seqs, tokens, longest in ((1, 2, 32), (8, 64, 600), (64, 512, 8192), (256, 8192, 8192)):
        limits = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
        for benchmark in micro_benchmarks(limits, longest):
            assert 1 <= benchmark.max_num_seqs <= seqs
            assert benchmark.max_num_seqs < benchmark.max_num_batched_tokens <= tokens
            assert max(map(sum, benchmark.requests)) <= longest


def test_a_play_that_isnt_the_schedulers_is_refused() -> None:
    measured = engine(LINEAR.of_plan)
    orders = [Order(0.0, (fixed_request("a", (1, 2, 3), 3),))]
    played = measured.play(orders, lambda _: None)
    wrong = replace(played.updates[0], stats=replace(played.updates[0].stats, num_prefill_tokens=2))
    with pytest.raises(ValueError, match=r"a step of the engine had \(2, 0, 0\) tokens"):
        list(measured_steps(measured, orders, Played(played.started_s, [wrong, *played.updates[1:]])))


def test_a_request_that_didnt_end_by_length_is_refused() -> None:
    measured = engine(LINEAR.of_plan)
    orders = [Order(0.0, (fixed_request("a", (1, 2, 3), 1),))]
    played = measured.play(orders, lambda _: None)
    wrong = replace(played.updates[-1], finish_reasons=[FinishReason.TIMEOUT])
    with pytest.raises(ValueError, match="ended by timeout"):
        list(measured_steps(measured, orders, Played(played.started_s, [*played.updates[:-1], wrong])))
