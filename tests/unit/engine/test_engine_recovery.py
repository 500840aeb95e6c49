"""Steps that fail: poison rows fail alone, too little memory costs work but no result, a broken model is dead."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest

from replica.engine import sequence_seed
from replica.engine_rates import MemoryBrake, TokenRate
from replica.engine_recovery import run_step
from replica.errors import EngineDead
from replica.model.api import InFlightStep, OutOfDeviceMemory
from replica.model.fake import FakeModel
from replica.request import FinishReason, GenerationRequest
from replica.scheduler.plan import StepPlan
from tests.fake_replica import EngineDriver, fake_shape, request_of, small_config

POISON = 94


@dataclass(slots=True)
class PickyModel(FakeModel):
    """Raises while a sequence of `suspects` is in the plan; runs out of memory above `max_tokens` tokens a step."""

    suspects: frozenset[int] = frozenset()
    bad_joins: frozenset[int] = frozenset()
    max_tokens: int = 10_000
    broken: bool = False

    def submit(self, plan: StepPlan) -> InFlightStep:
        if self.broken or (self.suspects & set(plan.seq_ids) and plan.num_logits != [0]):
            raise RuntimeError("the picky model raises")
        if any(joined.seq_id in self.bad_joins and joined.seed for joined in plan.joined):
            raise RuntimeError("the picky model raises when this one joins")
        if len(plan.token_ids) > self.max_tokens:
            raise OutOfDeviceMemory("too many tokens in one step")
        return FakeModel.submit(self, plan)


def expected(request: GenerationRequest) -> list[int]:
    return FakeModel(fake_shape()).alone(request, sequence_seed(0, 0))[0]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("culprits", [{0}, {2}, {3}, {1, 2}])
def test_poison_rows_fail_alone_and_their_neighbours_get_their_tokens(culprits: set[int], late: bool) -> None:
    model = PickyModel(fake_shape(), suspects=frozenset(culprits), late=late)
    driver = EngineDriver(small_config(), model)
    requests = [request_of(f"r{i}", first=i) for i in range(4)]
    driver.submit(*requests)
    driver.run()
    for i, request in enumerate(requests):
        if i in culprits:
            error = driver.errors[request.request_id, 0]
            assert error is not None
            assert (error.code, "picky" in error.message) == ("step_failed", False)
            assert driver.ends[request.request_id, 0] == [FinishReason.ERROR]
        else:
            assert driver.tokens[request.request_id, 0] == expected(request)
    load = driver.updates[-1].load
    assert (load.num_running, load.num_waiting, load.kv_usage_ratio) == (0, 0, 0.0)


def test_a_sequence_that_can_not_even_join_fails_alone() -> None:
    driver = EngineDriver(small_config(), PickyModel(fake_shape(), bad_joins=frozenset({1})))
    requests = [request_of(f"r{i}", first=i) for i in range(6)]
    driver.submit(*requests)
    driver.run()
    assert driver.ends.pop(("r1", 0)) == [FinishReason.ERROR]
    assert {reason for ends in driver.ends.values() for reason in ends} == {FinishReason.LENGTH}
    for request in (requests[0], *requests[2:]):
        assert driver.tokens[request.request_id, 0] == expected(request)


def test_a_poison_request_alone_fails_and_the_engine_goes_on() -> None:
    driver = EngineDriver(small_config(), PickyModel(fake_shape(), suspects=frozenset({0})))
    driver.submit(request_of("poison"))
    driver.run()
    driver.submit(request_of("next"))
    driver.run()
    assert driver.ends == {("poison", 0): [FinishReason.ERROR], ("next", 0): [FinishReason.LENGTH]}


def test_rows_with_non_finite_logits_fail_alone() -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape(), nan_token=3))
    driver.submit(request_of("sick", num_prompt=5), request_of("well", num_prompt=1, max_tokens=1, first=9))
    driver.run()
    error = driver.errors["sick", 0]
    assert error is not None
    assert error.code == "non_finite_logits"
    assert driver.ends["well", 0] == [FinishReason.LENGTH]


def test_rows_with_non_finite_logits_are_still_found_when_another_row_raises() -> None:
    model = PickyModel(fake_shape(), suspects=frozenset({0}), nan_token=50)
    driver = EngineDriver(small_config(), model)
    driver.submit(request_of("raises"), request_of("sick", first=50), request_of("well", max_tokens=1, first=20))
    driver.step()
    codes = {request_id: error.code for (request_id, _), error in driver.errors.items() if error}
    assert codes == {"raises": "step_failed", "sick": "non_finite_logits"}


def test_a_lane_retaken_beside_a_poison_row_stays_its_new_owner_s() -> None:
    """Three places change hands in one step, and the first newcomer can't join."""
    config = small_config(max_num_seqs=3)
    driver = EngineDriver(config, PickyModel(fake_shape(), bad_joins=frozenset({3})))
    requests = [request_of(f"r{i}", num_prompt=4, max_tokens=3 if i < 3 else 8, first=i) for i in range(6)]
    driver.submit(*requests)
    driver.run()
    for request in (*requests[:3], *requests[4:]):
        assert driver.tokens[request.request_id, 0] == expected(request)
    assert driver.ends["r3", 0] == [FinishReason.ERROR]


def test_one_poison_row_costs_a_logarithm_of_extra_forwards() -> None:
    model = PickyModel(fake_shape(), suspects=frozenset({5}))
    driver = EngineDriver(small_config(max_num_seqs=8, max_num_batched_tokens=64), model)
    driver.submit(*(request_of(f"r{i}", num_prompt=4, max_tokens=1, first=i) for i in range(8)))
    driver.step()
    # Halves 0-3; 4-7 fails; 4, 5 fails; 4; 5 fails; 6, 7: only those that ran are counted.
    assert model.num_submitted == 3


def test_a_transient_failure_fails_nobody() -> None:
    class Once(FakeModel):
        failed = False

        def submit(self, plan: StepPlan) -> InFlightStep:
            if not self.failed:
                self.failed = True
                raise RuntimeError("once")
            return FakeModel.submit(self, plan)

    driver = EngineDriver(small_config(), Once(fake_shape()))
    driver.submit(*(request_of(f"r{i}", first=i) for i in range(3)))
    driver.run()
    assert set(map(tuple, driver.ends.values())) == {(FinishReason.LENGTH,)}


def test_a_model_that_runs_nothing_any_more_is_dead() -> None:
    model = PickyModel(fake_shape())
    driver = EngineDriver(small_config(), model)
    driver.submit(request_of("a"), request_of("b"))
    driver.step()
    model.broken = True
    with pytest.raises(EngineDead):
        driver.step()
    driver.keep(driver.engine.fail_all(EngineDead("dead")))
    assert driver.ends == {("a", 0): [FinishReason.ERROR], ("b", 0): [FinishReason.ERROR]}


def test_memory_that_runs_out_while_probing_is_no_death() -> None:
    class ShortOnce(PickyModel):
        num_probes = 0

        def submit(self, plan: StepPlan) -> InFlightStep:
            if plan.num_logits == [0]:
                self.num_probes += 1
                if self.num_probes == 1:
                    raise OutOfDeviceMemory("just now")
            return PickyModel.submit(self, plan)

    model = ShortOnce(fake_shape(), suspects=frozenset({0}))
    driver = EngineDriver(small_config(), model)
    driver.submit(request_of("poison"))
    driver.run()
    assert driver.ends == {("poison", 0): [FinishReason.ERROR]}
    assert model.num_probes > 1


@pytest.mark.parametrize("every", [2, 3, 5, 7])
@pytest.mark.parametrize("late", [False, True])
def test_running_out_of_memory_now_and_then_changes_no_output(every: int, late: bool) -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape(), oom_every=every, late=late))
    requests = [request_of(f"r{i}", num_prompt=3 + 7 * i, max_tokens=10, first=i) for i in range(6)]
    driver.submit(*requests)
    driver.run(2000)
    for request in requests:
        assert driver.tokens[request.request_id, 0] == expected(request)
    assert sum(update.stats.num_preemptions for update in driver.updates) > 0
    load = driver.updates[-1].load
    assert (load.num_running, load.num_waiting, load.kv_usage_ratio) == (0, 0, 0.0)


def test_a_step_too_large_for_memory_is_cut_until_it_fits_and_the_limit_comes_back() -> None:
    model = PickyModel(fake_shape(), max_tokens=5)
    driver = EngineDriver(small_config(), model)
    requests = [request_of(f"r{i}", num_prompt=20, max_tokens=6, first=i) for i in range(4)]
    driver.submit(*requests)
    driver.run(2000)
    for request in requests:
        assert driver.tokens[request.request_id, 0] == expected(request)
    assert min(update.load.max_num_batched_tokens for update in driver.updates) <= 5
    model.max_tokens = 10_000
    driver.submit(request_of("long", num_prompt=4, max_tokens=100))
    driver.run(2000)
    assert driver.updates[-1].load.max_num_batched_tokens == 16
    assert driver.updates[-1].load.max_num_seqs == 4


def test_a_step_is_reported_with_the_limit_that_it_was_planned_under() -> None:
    model = PickyModel(fake_shape(), max_tokens=5)
    driver = EngineDriver(small_config(), model)
    driver.submit(request_of("long", num_prompt=20, max_tokens=60))
    driver.run(2000)
    changes = [
        (before.load.max_num_batched_tokens, after.load.max_num_batched_tokens, after.stats.token_budget)
        for before, after in pairwise(driver.updates)
        if before.load.max_num_batched_tokens != after.load.max_num_batched_tokens and after.stats.num_tokens
    ]
    assert changes == [(4, 8, 4), (8, 16, 8)]


def test_a_sequence_that_does_not_fit_alone_fails_and_the_engine_goes_on() -> None:
    model = PickyModel(fake_shape(), max_tokens=0)
    driver = EngineDriver(small_config(), model)
    driver.submit(request_of("a"), request_of("b"))
    driver.run()
    assert driver.ends == {("a", 0): [FinishReason.ERROR], ("b", 0): [FinishReason.ERROR]}
    model.max_tokens = 10_000
    driver.submit(request_of("c"))
    driver.run()
    assert driver.ends["c", 0] == [FinishReason.LENGTH]


def test_a_probe_never_runs_while_some_row_succeeds() -> None:
    model = PickyModel(fake_shape(), suspects=frozenset({0}))
    driver = EngineDriver(small_config(), model)
    driver.submit(request_of("a"), request_of("b"))
    plan = driver.engine._scheduler.plan(driver.clock())
    assert plan is not None
    result = run_step(model, plan)
    assert result.failed_rows == {0: "step_failed"}
    assert model.num_submitted == 1


def test_a_rate_is_tokens_over_seconds_and_forgets() -> None:
    rate = TokenRate()
    assert rate.per_s == 0.0
    rate.add(10, 2.0)
    assert rate.per_s == 5.0
    rate.add(0, 9.0)
    assert rate.per_s == 5.0
    for _ in range(200):
        rate.add(3, 0.1)
    assert rate.per_s == pytest.approx(30.0)


def test_the_brake_halves_at_each_failure_and_opens_slowly() -> None:
    brake = MemoryBrake(2)
    assert not brake.fitted(64)
    brake.failed(64, 4)
    brake.failed(32, 4)
    assert brake.limit == 16
    changes = [brake.fitted(64) for _ in range(32)]
    assert [i for i, changed in enumerate(changes) if changed] == [15, 31]
    assert brake.limit is None


def test_the_brake_gives_up_on_one_sequence_after_three_failures_in_a_row_at_its_floor() -> None:
    brake = MemoryBrake(2)
    for tokens, rows in ((4, 1), (2, 2), (2, 1), (1, 1)):
        brake.failed(tokens, rows)
        assert not brake.gives_up()
    brake.failed(1, 1)
    assert brake.limit == 2
    assert brake.gives_up()
    assert not brake.gives_up()
    brake.failed(1, 1)
    brake.failed(1, 1)
    brake.fitted(64)
    brake.failed(1, 1)
    assert not brake.gives_up()


def test_a_whole_prompt_that_never_fits_fails_alone_where_prompts_can_not_be_cut() -> None:
    model = PickyModel(fake_shape(max_model_len=16), max_tokens=9)
    driver = EngineDriver(small_config(enable_chunked_prefill=False), model)
    driver.submit(request_of("long", num_prompt=12, max_tokens=2), request_of("short", num_prompt=4, max_tokens=2))
    driver.run()
    assert driver.ends == {("long", 0): [FinishReason.ERROR], ("short", 0): [FinishReason.LENGTH]}
