"""The engine with two steps in flight: the next plan is made and submitted while the device works; what is found late
costs a token, and a step that fails takes the one that was built on it back."""

from __future__ import annotations

import pytest

from replica.engine import sequence_seed
from replica.errors import EngineDead
from replica.model.api import InFlightStep, ModelShape, OutOfDeviceMemory
from replica.model.fake import FakeModel, FakeStep
from replica.model.late import LateRunner
from replica.request import FinishReason, GenerationRequest
from replica.scheduler.plan import PENDING_TOKEN, StepPlan
from tests.fake_replica import EngineDriver, fake_shape, request_of, small_config

SHAPE = fake_shape()


class Device:
    """A late device whose steps are watched, and fail when they are told to: `fails[i]` is raised by the i-th step that
    is submitted, at once or with its result."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.plans: list[StepPlan] = []
        self.fails: dict[int, Exception] = {}
        self.num_waited = 0
        self._at_once = at_once
        self._runner = LateRunner(FakeModel(SHAPE))

    @property
    def shape(self) -> ModelShape:
        return SHAPE

    @property
    def is_async(self) -> bool:
        return True

    def submit(self, plan: StepPlan) -> InFlightStep:
        self.plans.append(plan)
        error = self.fails.get(len(self.plans) - 1)
        if error is not None and self._at_once:
            raise error
        step = self._runner.submit(plan)
        return step if error is None else FakeStep(error)

    def close(self) -> None:
        self._runner.close()


def driver_on(device: Device) -> EngineDriver:
    return EngineDriver(small_config(), device)


def alone(request: GenerationRequest) -> list[int]:
    return FakeModel(SHAPE).alone(request, sequence_seed(0, 0))[0]


def stopping(request_id: str, num_tokens: int, *, first: int = 0) -> GenerationRequest:
    """A request that ends by a stop token, its `num_tokens`-th."""
    tokens = alone(request_of(request_id, max_tokens=20, first=first))
    assert tokens[num_tokens - 1] not in tokens[: num_tokens - 1]
    return request_of(request_id, max_tokens=20, first=first, stop_token_ids=(tokens[num_tokens - 1],))


def assert_quiet(driver: EngineDriver) -> None:
    load = driver.updates[-1].load
    assert (load.num_running, load.num_waiting, load.kv_usage_ratio) == (0, 0, 0.0)
    assert not driver.engine.has_work


def test_the_next_step_is_submitted_before_the_result_of_the_last_is_waited_for() -> None:
    device = Device()
    driver = driver_on(device)
    driver.submit(request_of("r", max_tokens=5))
    driver.step()
    assert [len(device.plans), len(driver.tokens["r", 0])] == [2, 1]
    assert device.plans[1].token_ids == [PENDING_TOKEN]
    driver.step()
    assert [len(device.plans), len(driver.tokens["r", 0])] == [3, 2]
    driver.run()
    assert driver.tokens["r", 0] == alone(request_of("r", max_tokens=5))
    assert len(device.plans) == 5, "the end by length is known beforehand"
    assert_quiet(driver)


def test_a_runner_that_is_not_asynchronous_has_one_step_in_flight() -> None:
    model = FakeModel(SHAPE)
    driver = EngineDriver(small_config(), model)
    driver.submit(request_of("r", max_tokens=5))
    for number in range(1, 6):
        driver.step()
        assert model.num_submitted == number == len(driver.tokens["r", 0])


def test_a_stop_found_late_costs_one_token_that_nobody_sees() -> None:
    device = Device()
    driver = driver_on(device)
    request = stopping("r", 4)
    driver.submit(request)
    driver.run()
    assert driver.tokens["r", 0] == alone(request)[:4]
    assert driver.ends["r", 0] == [FinishReason.STOP]
    assert [plan.output_index for plan in device.plans] == [[0], [1], [2], [3], [4]]
    assert [update.stats.num_tokens for update in driver.updates] == [5, 1, 1, 1, 1]
    assert driver.updates[-1].request_ids == []
    assert_quiet(driver)


def test_a_place_freed_by_a_late_stop_is_taken_one_step_later() -> None:
    device = Device()
    driver = driver_on(device)
    driver.submit(stopping("stops", 3), *(request_of(f"r{i}", first=i + 1) for i in range(4)))
    driver.run()
    of_the_last = [number for number, plan in enumerate(device.plans) if 4 in plan.seq_ids]
    (stopped_in,) = (
        i for i, plan in enumerate(device.plans) if (0, 2) in zip(plan.seq_ids, plan.output_index, strict=True)
    )
    assert of_the_last[0] == stopped_in + 2


def test_what_is_ended_while_its_step_is_in_flight_is_free_at_once_and_its_token_is_dropped() -> None:
    device = Device()
    driver = driver_on(device)
    driver.submit(request_of("a"), request_of("b", first=3))
    driver.step()
    driver.engine.end("a")
    driver.engine.end("a")
    update = driver.step()
    assert update.load.num_running == 1
    driver.engine.end("b")
    assert driver.engine.has_work, "a step is still in flight"
    driver.run()
    assert driver.ends == {("a", 0): [FinishReason.ABORT], ("b", 0): [FinishReason.ABORT]}
    assert [len(driver.tokens[name, 0]) for name in ("a", "b")] == [1, 2]
    assert_quiet(driver)


def test_the_seconds_of_overlapping_steps_are_counted_once() -> None:
    driver = driver_on(Device())
    driver.submit(request_of("r", max_tokens=9))
    begun_s = driver.clock.now_s
    driver.run()
    steps = [update.stats.step_s for update in driver.updates if update.stats.num_tokens]
    assert len(steps) == 9
    assert sum(steps) == pytest.approx(driver.updates[-1].made_at_s - begun_s, abs=0.0011)
    decode_s = sum(steps[1:])
    assert driver.updates[-1].load.decode_tokens_per_s == pytest.approx(8 / decode_s, rel=0.2)


def test_idle_time_begins_when_the_last_step_in_flight_is_over() -> None:
    driver = driver_on(Device())
    driver.submit(stopping("r", 2))
    driver.run()
    over_s = driver.updates[-1].made_at_s
    assert [update.stats.idle_s for update in driver.updates[1:]] == [0.0, 0.0]
    driver.clock.now_s += 3.0
    update = driver.engine.idle_update()
    assert update.stats.idle_s == pytest.approx(update.made_at_s - over_s, abs=0.0011)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("failed", [0, 1, 2, 3])
def test_a_step_that_fails_once_takes_the_one_built_on_it_back_and_nobody_notices(failed: int, at_once: bool) -> None:
    device = Device(at_once=at_once)
    device.fails = {failed: RuntimeError("once")}
    driver = driver_on(device)
    requests = [request_of(f"r{i}", first=i, max_tokens=6) for i in range(3)]
    driver.submit(*requests)
    driver.run()
    for request in requests:
        assert driver.tokens[request.request_id, 0] == alone(request)
    assert set(map(tuple, driver.ends.values())) == {(FinishReason.LENGTH,)}
    assert_quiet(driver)


def test_nothing_is_built_on_a_step_that_could_not_even_be_submitted() -> None:
    device = Device(at_once=True)
    device.fails = {1: RuntimeError("once")}
    driver = driver_on(device)
    driver.submit(request_of("r"))
    assert [driver.step().token_ids, len(device.plans)] == [alone(request_of("r"))[:1], 2]
    assert [driver.step().token_ids, len(device.plans)] == [alone(request_of("r"))[1:2], 3]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_step_out_of_memory_is_planned_anew_and_others_wait_until_memory_is_not_short(at_once: bool) -> None:
    device = Device(at_once=at_once)
    device.fails = {2: OutOfDeviceMemory("once")}
    driver = driver_on(device)
    requests = [request_of(f"r{i}", first=i, max_tokens=60) for i in range(3)]
    driver.submit(*requests)
    in_flight = []
    while driver.engine.has_work:
        driver.step()
        in_flight.append(len(driver.engine._pipeline))
    for request in requests:
        assert driver.tokens[request.request_id, 0] == alone(request)
    short = [update.load.max_num_batched_tokens < 16 for update in driver.updates]
    assert any(short) and not short[-1]
    assert {flying for flying, is_short in zip(in_flight, short, strict=True) if is_short} == {0}
    assert in_flight[0] == in_flight[-5] == 1
    assert_quiet(driver)


def test_two_failed_steps_in_a_row_are_one_mishap() -> None:
    device = Device()
    device.fails = {1: RuntimeError("both"), 2: OutOfDeviceMemory("both")}
    driver = driver_on(device)
    driver.submit(request_of("r"))
    driver.run()
    assert driver.tokens["r", 0] == alone(request_of("r"))
    assert min(update.load.max_num_batched_tokens for update in driver.updates) == 16


def test_a_model_that_runs_nothing_any_more_is_dead_with_steps_in_flight() -> None:
    device = Device()
    driver = driver_on(device)
    driver.submit(request_of("a"), request_of("b"))
    driver.step()
    device.fails = dict.fromkeys(range(2, 99), RuntimeError("gone"))
    driver.step()
    with pytest.raises(EngineDead):
        driver.step()
    driver.keep(driver.engine.fail_all(EngineDead("dead")))
    assert driver.ends == {("a", 0): [FinishReason.ERROR], ("b", 0): [FinishReason.ERROR]}


def test_a_dead_rank_is_death_and_no_failure_of_a_row() -> None:
    device = Device()
    device.fails = {1: EngineDead("a rank is gone")}
    driver = driver_on(device)
    driver.submit(request_of("a"))
    driver.step()
    with pytest.raises(EngineDead, match="a rank is gone"):
        driver.step()
    assert len(device.plans) == 3, "nothing was tried again"
