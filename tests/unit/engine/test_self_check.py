"""`check_invariants`: a scheduler that contradicts itself stops its engine, and the log says what broke."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from replica.request import FinishReason
from tests.fake_replica import FakeFactory, answer, oracle, request_of, running, small_config
from tests.property.scheduler.planted import BUGS, planted


async def test_what_broke_is_in_the_log_and_clients_get_an_engine_error(
    factory: FakeFactory, caplog: pytest.LogCaptureFixture
) -> None:
    with planted(BUGS["free twice"]), caplog.at_level(logging.ERROR):
        async with running(small_config(), factory) as service:
            answered = await answer(service, request_of("r", max_tokens=3))
            assert answered.end().finish_reason is FinishReason.ERROR
            assert [event.error.code for event in answered.events if event.error] == ["engine_dead"]
            assert service.status()["state"] == "dead"
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("the engine is dead")]
    assert line == "the engine is dead: a block is free twice, after committing step 3"


async def test_without_the_setting_nothing_is_checked(factory: FakeFactory) -> None:
    with planted(BUGS["free twice"]):
        async with running(small_config(check_invariants=False), factory) as service:
            request = request_of("r", max_tokens=3)
            assert (await answer(service, request)).token_ids() == oracle(request)


def test_checks_that_python_leaves_out_are_refused_at_start() -> None:
    code = """if True:
        from replica.config import SchedulerConfig
        from replica.errors import SettingError
        from replica.model.api import ModelShape
        from replica.scheduler.scheduler import Scheduler
        try:
            Scheduler(SchedulerConfig(), ModelShape(4, 4, 9, 9, ()), check_invariants=True)
        except SettingError as error:
            print(error.message)
    """
    run = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, env={**os.environ})
    assert run.stdout.startswith("check_invariants = True is not allowed: only False under python -O"), run.stderr
