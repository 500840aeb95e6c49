"""Starts of the engine's process that fail or are given up: one clear error, nothing left behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import psutil
import pytest

from replica.errors import ModelNotFound, ResourceError, StartupError
from replica.model.api import ModelRunner
from replica.model_card import ModelCard
from replica.service import ReplicaService
from tests.fake_replica import small_config
from tests.faults.engine.factories import FailingFactory, dying_factory, stuck_factory


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        (FailingFactory(ModelNotFound("no such model: x")), ModelNotFound, "no such model: x"),
        (FailingFactory(ValueError("odd")), StartupError, "loading the model failed: ValueError: odd"),
        (dying_factory, ResourceError, "ended while it was loading"),
    ],
)
async def test_a_failed_start_is_one_clear_error_and_leaves_no_process(
    factory: Callable[..., tuple[ModelRunner, ModelCard]], kind: type[Exception], message: str
) -> None:
    children = set(psutil.Process().children())
    with pytest.raises(kind, match=message):
        await ReplicaService.start(small_config(), replica_id="r", model_name="m", runner_factory=factory)
    assert set(psutil.Process().children()) <= children


async def test_a_process_that_can_not_be_started_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ResourceError, match="can't be started"):
        await ReplicaService.start(small_config(), replica_id="r", model_name="m", runner_factory=dying_factory)


async def test_a_cancelled_start_leaves_no_process() -> None:
    children = set(psutil.Process().children())
    said: asyncio.Queue[str] = asyncio.Queue()
    start = asyncio.ensure_future(
        ReplicaService.start(
            small_config(), replica_id="r", model_name="m", runner_factory=stuck_factory, progress=said.put_nowait
        )
    )
    assert await said.get() == "stuck"
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert set(psutil.Process().children()) <= children
