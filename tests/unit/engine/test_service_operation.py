"""What whoever runs a replica does and sees: draining, changed limits, the status, an engine that has died."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from replica.errors import EngineDead, SettingError
from replica.model.fake import FakeModel
from replica.request import FinishReason, GenerationRequest
from replica.service import ReplicaService
from tests.fake_replica import Answered, FakeFactory, answer, fake_shape, request_of, running, sample, small_config


async def opened(service: ReplicaService, request: GenerationRequest) -> asyncio.Task[Answered]:
    """A request's answer on its way, once its stream is open."""
    answering = asyncio.create_task(answer(service, request))
    while not service.status()["num_streams"]:
        await asyncio.sleep(0)
    return answering


async def test_draining_refuses_the_new_finishes_the_old_and_shows_in_reports(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        old = await opened(service, request_of("old", max_tokens=30))
        drained = asyncio.ensure_future(service.drain(10.0))
        await asyncio.sleep(0)
        new = await answer(service, request_of("new"))
        error = new.end().error
        assert error is not None
        assert (error.code, service.load().draining) == ("unavailable", True)
        assert await drained
        assert (await old).end().finish_reason is FinishReason.LENGTH
        service.check()


async def test_what_a_drain_cannot_finish_ends_in_an_error(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        old = await opened(service, request_of("old", max_tokens=100))
        assert not await service.drain(0.0)
        end = (await old).end()
        assert end.finish_reason is FinishReason.ERROR
        assert end.error is not None
        assert end.error.code == "unavailable"


async def test_budgets_can_be_lowered_live_and_a_bad_value_changes_nothing(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        service.set_budgets(max_num_seqs=2)
        with pytest.raises(SettingError, match="max_num_batched_tokens"):
            service.set_budgets(max_num_batched_tokens=17)
        await answer(service, request_of("r"))
        assert service.load().max_num_seqs == 2
        assert service.status()["limits"]["max_num_seqs"] == 2
        assert service.status()["kv_bytes_per_token"] == service.shape.kv_bytes_per_token
        assert sample(service, "max_num_seqs") == 2


async def test_a_check_of_budgets_says_what_a_change_would_and_changes_nothing(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        before = service.limits()
        service.check_budgets(max_num_seqs=2)
        for name, value in {"max_num_batched_tokens": 17, "self": 1, "changes": 1}.items():
            with pytest.raises(SettingError, match=f"^{name} = {value} is not allowed"):
                service.check_budgets(**{name: value})
        assert service.limits() == before
        assert before["now"] == before["start"]
        assert before["in_force"] == {"max_num_seqs": 4, "max_num_batched_tokens": 16}
        assert before["allowed"]["max_num_seqs"]["max"] == 4


async def test_the_status_tells_what_stops_the_waiting_and_how_full_the_last_step_was(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        await answer(service, request_of("r"))
        step = service.status()["last_step"]
        assert step["token_budget"] == small_config().scheduler.max_num_batched_tokens
        assert sum(step["num_waiting_by_reason"].values()) == step["num_running"] == 0
        assert list(step["num_waiting_by_reason"]) == ["budget", "seqs", "blocks", "long_prefill"]


async def test_a_dead_engine_ends_streams_refuses_new_ones_and_fails_the_check(tmp_path: Path) -> None:
    class Broken(FakeModel):
        def submit(self, plan: object) -> object:  # type: ignore[override]
            raise RuntimeError("the device is gone")

    factory = FakeFactory(tmp_path)

    def broken(config: object, progress: object) -> object:
        _, card = factory(config, lambda line: None)  # type: ignore[arg-type]
        return Broken(fake_shape()), card

    async with running(small_config(), broken) as service:  # type: ignore[arg-type]
        service.check()
        answers = await asyncio.gather(*(answer(service, request_of(f"r{i}")) for i in range(6)))
        errors = [answered.end().error for answered in answers]
        assert {error.code for error in errors if error} == {"engine_dead"}
        assert len(errors) == 6
        with pytest.raises(EngineDead):
            service.check()
        late = await answer(service, request_of("late"))
        assert late.end().finish_reason is FinishReason.REJECTED
        assert service.status()["state"] == "dead"
