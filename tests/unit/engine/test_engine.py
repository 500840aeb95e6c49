"""The engine with the fake model: plan, execute, commit, emit; every way in and every way out."""

from __future__ import annotations

import pytest

from replica.engine import sequence_seed
from replica.engine_api import AddRequest, EndRequest, EngineCommands
from replica.errors import EngineDead, SettingError
from replica.model.fake import FakeModel
from replica.request import FinishReason, GenerationRequest
from tests.fake_replica import EngineDriver, fake_shape, request_of, small_config


def expected(model: FakeModel, request: GenerationRequest, index: int = 0) -> list[int]:
    seed = 7 if request.sampling.seed is None else request.sampling.seed
    return FakeModel(model.shape).alone(request, sequence_seed(seed, index))[0]


def test_each_request_gets_the_tokens_it_would_get_alone() -> None:
    model = FakeModel(fake_shape())
    driver = EngineDriver(small_config(), model)
    requests = [request_of(f"r{i}", num_prompt=3 + 5 * i, max_tokens=4 + 3 * i, first=i) for i in range(7)]
    driver.submit(*requests)
    driver.run()
    for request in requests:
        assert driver.tokens[request.request_id, 0] == expected(model, request)
        assert driver.ends[request.request_id, 0] == [FinishReason.LENGTH]


def test_the_first_update_names_the_accepted_requests_and_carries_the_first_token() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.submit(request_of("a"), request_of("b"))
    update = driver.step()
    assert update.accepted == ["a", "b"]
    assert update.request_ids == ["a", "b"]
    assert update.stats.num_prefill_tokens == 10
    assert (update.load.num_running, update.load.num_waiting) == (2, 0)


def test_sampled_sequences_of_one_request_differ_and_repeat_with_the_same_seed() -> None:
    runs = []
    for _ in range(2):
        driver = EngineDriver(small_config(), FakeModel(fake_shape()))
        driver.submit(request_of("r", n=3, temperature=1.0, seed=42))
        driver.run()
        runs.append([driver.tokens["r", index] for index in range(3)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


def test_a_request_without_a_seed_takes_it_from_the_random_source() -> None:
    model = FakeModel(fake_shape())
    driver = EngineDriver(small_config(), model)
    request = request_of("r", temperature=1.0)
    driver.submit(request)
    driver.run()
    assert driver.tokens["r", 0] == expected(model, request)


def test_the_seed_of_a_sequence_is_fixed_for_all_processes_and_versions() -> None:
    assert sequence_seed(42, 0) == sequence_seed(42, 0)
    assert sequence_seed(42, 0) != sequence_seed(42, 1)
    assert 0 <= sequence_seed(-1, 0) < 2**63


def test_a_continued_request_makes_only_the_missing_tokens() -> None:
    model = FakeModel(fake_shape())
    whole = request_of("r", max_tokens=10, temperature=1.0, seed=3)
    tokens = expected(model, whole)
    rest = request_of("r", max_tokens=10, temperature=1.0, seed=3, prior_output_ids=tuple(tokens[:4]))
    driver = EngineDriver(small_config(), model)
    driver.submit(rest)
    driver.run()
    assert driver.tokens["r", 0] == tokens[4:]


def test_any_one_of_several_sequences_can_be_continued() -> None:
    model = FakeModel(fake_shape())
    whole = request_of("r", n=3, max_tokens=10, temperature=1.0, seed=3)
    tokens = expected(model, whole, index=2)
    rest = request_of("r", max_tokens=10, temperature=1.0, seed=3, prior_output_ids=tuple(tokens[:4]), first_index=2)
    driver = EngineDriver(small_config(), model)
    driver.submit(rest)
    driver.run()
    assert driver.tokens == {("r", 2): tokens[4:]}
    assert driver.ends == {("r", 2): [FinishReason.LENGTH]}


def test_a_repeated_prompt_reports_its_cached_tokens_with_the_first_token() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape(block_size=4)))
    driver.submit(request_of("a", num_prompt=10))
    driver.run()
    driver.submit(request_of("b", num_prompt=10))
    update = driver.step()
    assert update.num_cached_tokens == [8]


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (request_of(num_prompt=0), "invalid_value", "prompt"),
        (request_of(prompt_ids=(1, 95)), "invalid_value", "prompt"),
        (request_of(prompt_ids=(-1,)), "invalid_value", "prompt"),
        (request_of(n=0), "invalid_value", "n"),
        (request_of(n=129), "invalid_value", "n"),
        (request_of(n=2, prior_output_ids=(1,)), "invalid_value", "n"),
        (request_of(first_index=-1), "invalid_value", "first_index"),
        (request_of(first_index=127, n=2), "invalid_value", "first_index"),
        (request_of(prior_output_ids=(99,)), "invalid_value", "prior_output_ids"),
        (request_of(max_tokens=2, prior_output_ids=(1, 2)), "invalid_value", "max_tokens"),
        (request_of(max_tokens=0), "invalid_value", "max_tokens"),
        (request_of(min_tokens=9), "invalid_value", "min_tokens"),
        (request_of(temperature=float("nan")), "invalid_value", "temperature"),
        (request_of(temperature=float("inf")), "invalid_value", "temperature"),
        (request_of(temperature=-0.1), "invalid_value", "temperature"),
        (request_of(top_p=float("nan")), "invalid_value", "top_p"),
        (request_of(top_p=1.01), "invalid_value", "top_p"),
        (request_of(top_k=-1), "invalid_value", "top_k"),
        (request_of(seed=2**64), "invalid_value", "seed"),
        (request_of(stop=("",)), "invalid_value", "stop"),
        (request_of(stop_token_ids=(95,)), "invalid_value", "stop_token_ids"),
        (request_of(num_prompt=128), "context_length_exceeded", "prompt"),
    ],
)
def test_an_impossible_request_is_refused_with_its_field_and_the_engine_goes_on(
    request_: GenerationRequest, code: str, param: str
) -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.submit(request_, request_of("canary"))
    driver.run()
    error = driver.errors["r", 0]
    assert driver.ends["r", 0] == [FinishReason.REJECTED]
    assert error is not None
    assert (error.code, error.param) == (code, param)
    assert driver.ends["canary", 0] == [FinishReason.LENGTH]


def test_an_id_that_is_being_served_is_refused() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.submit(request_of("r"), request_of("r"))
    update = driver.step()
    assert update.finish_reasons[0] is FinishReason.REJECTED
    driver.run()
    assert len(driver.tokens["r", 0]) == 8


def test_all_sequences_of_a_request_are_taken_or_none() -> None:
    driver = EngineDriver(small_config(max_num_queued_seqs=5), FakeModel(fake_shape()))
    driver.submit(request_of("a", n=2), request_of("b", n=4))
    update = driver.step()
    assert update.accepted == ["a"]
    assert driver.ends["b", 0] == [FinishReason.REJECTED]
    error = driver.errors["b", 0]
    assert error is not None
    assert error.code == "queue_full"
    assert update.load.num_running + update.load.num_waiting == 2


def test_nothing_is_kept_of_ended_sequences() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.submit(request_of("a"), request_of("b"))
    driver.engine.end("b")
    driver.run()
    for seq_id in range(2):
        with pytest.raises(KeyError):
            driver.engine._scheduler.timings(seq_id)


def test_a_request_that_waited_too_long_times_out() -> None:
    driver = EngineDriver(small_config(queue_timeout_s=5.0), FakeModel(fake_shape()))
    driver.submit(*(request_of(f"r{i}", max_tokens=20) for i in range(5)))
    driver.step()
    driver.clock.now_s += 6.0
    driver.run()
    assert driver.ends["r4", 0] == [FinishReason.TIMEOUT]
    error = driver.errors["r4", 0]
    assert error is not None
    assert error.code == "queue_timeout"
    assert [driver.ends[f"r{i}", 0] for i in range(4)] == [[FinishReason.LENGTH]] * 4


def test_abort_frees_everything_at_once_in_every_state_and_twice() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.submit(*(request_of(f"r{i}", num_prompt=20) for i in range(6)))
    driver.step()
    for i in range(6):
        driver.engine.end(f"r{i}")
        driver.engine.end(f"r{i}")
    driver.engine.end("unknown")
    update = driver.step()
    assert update.load.num_running == update.load.num_waiting == 0
    assert update.load.kv_usage_ratio == 0.0
    assert [driver.ends[f"r{i}", 0] for i in range(6)] == [[FinishReason.ABORT]] * 6
    assert not driver.engine.has_work


def test_one_of_several_answers_can_end_alone_with_a_stop() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.submit(request_of("r", n=2))
    driver.step()
    driver.engine.apply(EngineCommands(end=(EndRequest("r", 1, FinishReason.STOP),)))
    driver.run()
    assert driver.ends == {("r", 1): [FinishReason.STOP], ("r", 0): [FinishReason.LENGTH]}


def test_the_last_row_carries_the_clock_readings() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.engine.apply(EngineCommands(add=(AddRequest(request_of("r", max_tokens=2), 90.0),)))
    driver.run()
    timings = driver.updates[-1].timings[0]
    assert timings is not None
    assert timings.scheduled_at_s is not None
    assert timings.first_token_at_s is not None
    assert timings.finished_at_s is not None
    assert timings.queued_at_s == 90.0
    assert 90.0 < timings.scheduled_at_s < timings.first_token_at_s < timings.finished_at_s


def test_load_reports_are_numbered_and_carry_measured_rates() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.submit(request_of("r", num_prompt=10))
    driver.run()
    loads = [update.load for update in driver.updates]
    assert [load.number for load in loads] == list(range(1, len(loads) + 1))
    assert {(load.replica_id, load.epoch) for load in loads} == {("replica-1", "epoch-1")}
    assert loads[-1].prefill_tokens_per_s == pytest.approx(10 / driver.updates[0].stats.step_s)
    assert loads[-1].decode_tokens_per_s > 0


def test_idle_time_is_counted_between_the_last_end_and_the_next_step() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.submit(request_of("a", max_tokens=2))
    driver.run()
    driver.clock.now_s += 3.0
    driver.keep(driver.engine.idle_update())
    assert driver.updates[-1].stats.idle_s == pytest.approx(3.0, abs=0.01)
    driver.clock.now_s += 2.0
    driver.submit(request_of("b", max_tokens=2))
    driver.run()
    idle = [update.stats.idle_s for update in driver.updates]
    assert idle[-2] == pytest.approx(2.0, abs=0.01)
    assert idle[-1] == 0.0


def test_budgets_change_between_two_steps_and_never_above_their_start() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.engine.set_budgets({"max_num_seqs": 1, "max_num_batched_tokens": 6})
    driver.submit(request_of("a", num_prompt=12), request_of("b"))
    update = driver.step()
    assert (update.load.max_num_seqs, update.load.max_num_batched_tokens) == (1, 6)
    assert update.stats.num_tokens == 6
    assert update.load.num_running == 1
    for impossible in (
        {"max_num_seqs": 5},
        {"max_num_batched_tokens": 17},
        {"max_num_seqs": 0},
        {"policy": "priority"},
    ):
        with pytest.raises(SettingError):
            driver.engine.set_budgets(impossible)
    with pytest.raises(SettingError, match="max_num_seqs"):
        driver.engine.set_budgets({"max_num_batched_tokens": 1})
    driver.run()
    assert driver.updates[-1].load.max_num_batched_tokens == 6


def test_a_dead_engine_ends_everything_with_one_error() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.submit(*(request_of(f"r{i}") for i in range(6)))
    driver.step()
    driver.keep(driver.engine.fail_all(EngineDead("dead")))
    assert [driver.ends[f"r{i}", 0] for i in range(6)] == [[FinishReason.ERROR]] * 6
    assert {error.code for error in driver.errors.values() if error} == {"engine_dead"}
