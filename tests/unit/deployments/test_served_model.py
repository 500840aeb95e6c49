"""When a model counts as ready."""

from __future__ import annotations

from deployments.config import ModelSettings
from deployments.model_client_fake import FakeModelClient
from deployments.served_model import ServedModel
from replica.config import SchedulerConfig
from tests.unit.deployments.generation_site import BUNDLE, SHAPE


async def test_a_model_is_ready_while_a_replica_runs_that_is_neither_dead_nor_silent() -> None:
    client = FakeModelClient("r0", "r1", facts=(BUNDLE, SHAPE))
    model = ServedModel(ModelSettings(), SchedulerConfig(), client, 0)
    states = [model.ready]
    await model.load()
    states.append(model.ready)
    client.distrust("r0")
    states.append(model.ready)
    client.distrust("r1")
    states.append(model.ready)
    client.distrusted.clear()
    states.append(model.ready)
    client.replica_ids.clear()
    states.append(model.ready)
    assert states == [False, True, True, False, True, False]
