"""One replica in virtual time: exact times on trivial worlds, every request ends once."""

from __future__ import annotations

from array import array

import pytest

from bench.simulate.outcome import Objectives, Outcome, columns_of
from bench.simulate.replica import Ended, SimulatedReplica
from bench.simulate.step_cost import StepCost, StepWork
from bench.simulate.step_totals import StepTotals
from replica.config import SchedulerConfig
from replica.model.api import ModelShape
from replica.request import FinishReason, GenerationRequest, SamplingParams

SHAPE = ModelShape(num_blocks=64, block_size=16, vocab_size=1000, max_model_len=512, eos_token_ids=())
COST = StepCost(fixed_s=1.0, prefill_token_s=0.25, decode_seq_s=0.125, kv_token_s=0.0625, prefill_pair_s=0.0)


def request(number: int, num_prompt: int, num_output: int) -> GenerationRequest:
    prompt = tuple((number * 7 + i) % 1000 for i in range(num_prompt))
    return GenerationRequest(str(number), prompt, SamplingParams(max_tokens=num_output, ignore_eos=True))


def replica(
    shape: ModelShape = SHAPE, cost: StepCost = COST, **settings: object
) -> tuple[SimulatedReplica, StepTotals]:
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **settings})  # type: ignore[arg-type]
    totals = StepTotals(keep_steps=True)
    return SimulatedReplica(config, shape, cost, totals, check_invariants=True), totals


def test_one_request_takes_exactly_the_cost_of_its_steps() -> None:
    one, totals = replica()
    one.submit(0, request(0, 100, 3), at_s=2.0)
    one.advance(float("inf"))
    # 64 + 36 prompt tokens, then two decode steps that read 101 and 102 tokens
    first_s = 2.0 + (1.0 + 64 * 0.25) + (1.0 + 36 * 0.25)
    end_s = first_s + (1.0 + 0.125 + 101 * 0.0625) + (1.0 + 0.125 + 102 * 0.0625)
    assert one.ended == [Ended(0, FinishReason.LENGTH, first_s, end_s, 3, 0)]
    assert (totals.num_steps, totals.num_prefill_tokens, totals.num_decode_tokens) == (4, 100, 2)
    assert one.is_idle and one.accepted == [0]


def test_a_request_that_comes_during_a_step_enters_the_next() -> None:
    one, _ = replica()
    one.submit(0, request(0, 4, 2), at_s=0.0)
    one.submit(1, request(1, 4, 1), at_s=1.5)
    one.advance(float("inf"))
    step_1 = 1.0 + 4 * 0.25
    step_2 = step_1 + 1.0 + 4 * 0.25 + 0.125 + 5 * 0.0625
    assert [(ended.number, ended.first_token_s, ended.end_s) for ended in one.ended] == [
        (0, step_1, step_2),
        (1, step_2, step_2),
    ]


def test_advance_runs_the_steps_that_begin_before_the_limit() -> None:
    one, totals = replica()
    one.submit(0, request(0, 4, 3), at_s=0.0)
    one.advance(2.0)
    assert (totals.num_steps, one.now_s) == (1, 2.0)
    one.advance(2.0)
    assert totals.num_steps == 1
    one.advance(2.0000001)
    assert totals.num_steps == 2


def test_gaps_between_tokens_are_one_less_than_tokens_for_each_request_even_with_preemptions() -> None:
    one, totals = replica(ModelShape(12, 16, 1000, 512, ()), watermark=0.0, queue_timeout_s=1e9)
    for number in range(12):
        one.submit(number, request(number, 20 + number, 40), at_s=0.1 * number)
    one.advance(float("inf"))
    assert sum(ended.num_preemptions for ended in one.ended) > 0
    assert sorted(ended.number for ended in one.ended) == list(range(12))
    assert totals.num_output_tokens == 12 * 40 == sum(ended.num_output_tokens for ended in one.ended)
    assert totals.itl.total == 12 * 39
    useful = sum(20 + number + 39 for number in range(12))
    assert totals.num_tokens - totals.num_recomputed_tokens == useful


def test_refused_and_expired_requests_end_too() -> None:
    one, _ = replica(max_num_seqs=1, max_num_queued_seqs=1, queue_timeout_s=5.0)
    one.submit(0, request(0, 8, 20), at_s=0.0)
    one.submit(1, request(1, 8, 1), at_s=0.5)
    one.submit(2, request(2, 8, 1), at_s=0.6)
    one.submit(3, request(3, 1000, 1), at_s=0.7)
    one.advance(float("inf"))
    assert {ended.number: ended.reason for ended in one.ended} == {
        0: FinishReason.LENGTH,
        1: FinishReason.TIMEOUT,
        2: FinishReason.REJECTED,
        3: FinishReason.REJECTED,
    }
    columns = columns_of(array("d", [0.0, 0.5, 0.6, 0.7]), one.ended)
    assert (columns.num_rejected(), columns.num_timed_out(), columns.finished().tolist()) == (
        2,
        1,
        [True] + 3 * [False],
    )


def test_a_context_that_reaches_the_model_limit_ends_with_what_fits() -> None:
    one, totals = replica(ModelShape(64, 16, 1000, 40, ()))
    one.submit(0, request(0, 30, 100), at_s=0.0)
    one.advance(float("inf"))
    assert one.ended[0].num_output_tokens == 10 == totals.num_output_tokens


def test_the_summary_of_one_request_is_its_own_numbers() -> None:
    one, totals = replica()
    one.submit(0, request(0, 4, 3), at_s=0.0)
    one.advance(float("inf"))
    outcome = Outcome(columns_of(array("d", [0.0]), one.ended), totals, 1, SHAPE.num_blocks)
    found = outcome.summary(Objectives(ttft_s=2.0, itl_s=2.0))
    end_s = 2.0 + 2 * 1.125 + (5 + 6) * 0.0625
    assert found["ttft_s"] == {"mean": 2.0, "p50": 2.0, "p90": 2.0, "p95": 2.0, "p99": 2.0}
    assert found["e2e_s"]["p99"] == found["duration_s"] == end_s
    assert found["itl_s"]["p50"] == pytest.approx(1.125 + 5 * 0.0625, rel=0.01)
    assert (found["num_finished"], found["good_share"], found["computed_per_useful"]) == (1, 1.0, 1.0)
    assert found["busy_share"] == pytest.approx(1.0)
    assert found["kv_usage_mean"] == pytest.approx(1 / 64, rel=1e-6)
    assert outcome.summary(Objectives(ttft_s=1.9, itl_s=2.0))["good_share"] == 0.0
    assert outcome.summary(Objectives(ttft_s=2.0, itl_s=1.0))["good_share"] == 0.0


def test_work_counts_decode_rows_by_what_they_read() -> None:
    assert COST.seconds(StepWork(0, 2, 30, 0.0)) == 1.0 + 2 * 0.125 + 30 * 0.0625
