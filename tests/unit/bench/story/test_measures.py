import pytest

from bench.story.measures import over_time, quantile, sparkline, summary, waiting_at, without_drain
from bench.story.replay import replay
from tests.unit.bench.story.engines import engine, silent, trace


def test_drain_begins_when_nobody_waits() -> None:
    found = replay(engine(), trace((0, 4, 3), (0, 4, 1), (0, 4, 4)), silent, "three")
    assert list(found.steps.width) == [2, 2, 2, 1, 1]
    loaded = without_drain(found, static=False)
    assert loaded == (1, 2, 1.0, 1.0)


def test_all_steps_of_fixed_batches_count() -> None:
    found = replay(engine(batching="static"), trace((0, 4, 3), (0, 4, 1), (0, 4, 1), (0, 4, 2)), silent, "four")
    assert list(found.steps.width) == [2, 1, 1, 2, 1]
    counted = without_drain(found, static=True)
    assert (counted.num_steps, counted.num_output_tokens) == (5, 7)


def test_a_disturbed_step_counts_as_its_like() -> None:
    found = replay(engine(max_num_seqs=1), trace((0, 4, 6), (0, 4, 1)), silent, "two")
    found.steps.seconds[3] = 50.0
    counted = without_drain(found, static=False)
    assert (counted.num_steps, counted.seconds, counted.undisturbed_s) == (6, 55.0, 6.0)


def test_a_column_is_averaged_over_time_and_idle_counts_as_nothing() -> None:
    found = replay(engine(), trace((0, 4, 2), (0, 4, 1), (4, 4, 2)), silent, "apart")
    assert list(found.steps.width) == [2, 1, 1, 1]
    assert list(found.steps.ended_s) == [1, 2, 5, 6]
    assert over_time(found, found.steps.width, 3, 6.0) == pytest.approx([1.5, 0.0, 1.0])
    assert over_time(found, found.steps.width, 4, 2.0) == pytest.approx([2, 2, 1, 1])
    assert over_time(found, found.steps.width, 1, 1.5) == pytest.approx([2.5 / 1.5])


def test_a_summary_has_the_whole_play() -> None:
    found = summary(replay(engine(), trace((0, 4, 2), (0, 4, 1), (0, 4, 1)), silent, "three"))
    assert (found.num_steps, found.seconds, found.width) == (2, 2.0, 2.0)
    assert list(found.width_by_quarter) == [2, 2, 2, 2]
    assert found.tokens_per_step == 6.5
    assert found.waiting == 0.5
    assert found.output_tokens_per_s == 2.0
    assert (found.ttft_p50_s, found.ttft_p99_s, found.itl_p50_s) == (1.0, 2.0, 1.0)
    assert (found.num_preemptions, found.num_recomputed_tokens) == (0, 0)


def test_a_summary_counts_what_preemption_costs() -> None:
    load = trace((0, 8, 12), (0, 8, 12))
    found = summary(replay(engine(num_blocks=6, max_num_batched_tokens=16), load, silent, "tight"))
    assert found.num_preemptions == 1
    assert found.num_recomputed_tokens > 8
    assert found.kv_peak == 1.0


def test_who_waits_when() -> None:
    found = replay(engine(max_num_seqs=1), trace((0, 4, 2), (0, 4, 1), (0, 4, 1)), silent, "three")
    assert [waiting_at(found, at_s) for at_s in (1.0, 2.0, 3.0, 4.0, 9.0)] == [2, 2, 1, 0, 0]


def test_quantiles_are_values_that_happened() -> None:
    assert [quantile([1, 2, 3, 4], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 3, 4, 4]
    assert quantile([], 0.5) == 0.0


def test_a_picture_is_scaled_to_the_full_batch() -> None:
    assert sparkline([0, 4, 8, 9], full=8) == "▁▅██"
