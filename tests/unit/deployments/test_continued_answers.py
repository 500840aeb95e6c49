"""Answers of whole replicas (scheduler, engine, text) around the fake model, of which one dies at some step: what the
reader gets is what one replica says alone, and no replica keeps anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from deployments.continued_stream import ContinuedStream, Continuing
from deployments.leases import Leases
from deployments.model_client_fake import FakeModelClient
from replica.config import EngineConfig
from replica.errors import EngineDead
from replica.model.api import InFlightStep, ModelRunner
from replica.model.fake import FakeModel
from replica.model_card import ModelCard
from replica.request import FinishReason, GenerationRequest, StreamMessage
from replica.scheduler.plan import StepPlan
from replica.service import ReplicaService
from tests.fake_replica import (
    FakeFactory,
    answer,
    assert_quiet,
    oracle,
    request_of,
    running,
    settled,
    small_config,
    text_of,
)
from tests.replica_reader import read
from tests.unit.deployments.lease_parts import all_events

LEASE = "lease"
REQUEST = request_of("r", num_prompt=20, max_tokens=12, n=3, temperature=1.0, seed=5, lease=LEASE)
"""16 tokens fit in a step: the first token comes in the third, the last in the fifteenth at the latest."""


class MortalModel(FakeModel):
    """Dies in its `num_steps`-th step."""

    num_steps = 0

    def submit(self, plan: StepPlan) -> InFlightStep:
        if self.num_submitted + 1 >= self.num_steps:
            raise EngineDead("it had so many steps to live")
        return super().submit(plan)


@dataclass(frozen=True)
class MortalFactory(FakeFactory):
    num_steps: int = 0

    def __call__(self, config: EngineConfig, progress: Callable[[str], None]) -> tuple[ModelRunner, ModelCard]:
        _, card = super().__call__(config, progress)
        model = MortalModel(self.shape, **self.faults)
        model.num_steps = self.num_steps
        return model, card


class Replicas(FakeModelClient):
    """Services in this process."""

    def __init__(self, services: dict[str, ReplicaService]) -> None:
        super().__init__(*services)
        self.services = services

    async def generate(self, request: GenerationRequest, exclude: tuple[str, ...] = ()) -> AsyncIterator[StreamMessage]:
        self.requests.append(request)
        name = next(name for name in self.replica_ids if name not in exclude)
        async with aclosing(read(self.services[name], request)) as messages:
            async for message in messages:
                yield replace(message, replica_id=name)

    async def abort(self, replica_id: str, request_id: str) -> None:
        self.services[replica_id].abort(request_id)


Got = tuple[str, list[int], int, FinishReason | None, Any]


async def read_all(client: Replicas, request: GenerationRequest) -> list[Got]:
    """Text, ids, their number, and the end of each answer."""
    leases, news = Leases(LEASE, lambda: 0.0), asyncio.Event()
    stream = ContinuedStream(leases, client, request, news, Continuing(limit=1, wait_s=10))
    events = await all_events(stream, news, 20)
    while leases.num_background:
        await asyncio.sleep(0)
    got = []
    for index in range(request.n):
        mine = [event for event in events if event.index == index]
        text, ids = "".join(event.text for event in mine), [token for event in mine for token in event.token_ids]
        got.append((text, ids, mine[-1].num_output_tokens, mine[-1].finish_reason, mine[-1].stop_reason))
    return got


@pytest.mark.parametrize("num_steps", range(1, 18, 2))
@pytest.mark.parametrize("has_stop", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_what_two_replicas_say_together_is_what_one_says_alone(
    tmp_path: Path, num_steps: int, has_stop: bool, is_async: bool
) -> None:
    stop = text_of(oracle(REQUEST, 1))[6:9]
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, stop=(stop,))) if has_stop else REQUEST
    faults = {"is_async": is_async}
    async with AsyncExitStack() as stack:
        mortal = await stack.enter_async_context(
            running(small_config(), MortalFactory(tmp_path, faults=faults, num_steps=num_steps))
        )
        other = await stack.enter_async_context(running(small_config(), FakeFactory(tmp_path, faults=faults)))
        client = Replicas({"mortal": mortal, "other": other})
        got = await read_all(client, request)
        assert (mortal.status()["num_streams"], other.status()["num_streams"]) == (0, 0)
        await settled(other)
        assert_quiet(other)
        alone = await answer(other, replace(request, request_id="alone"))
        num_lost = len(client.requests) - 1
    ends = [alone.end(index) for index in range(3)]
    assert got == [
        (alone.text(i), alone.token_ids(i), end.num_output_tokens, end.finish_reason, end.stop_reason)
        for i, end in enumerate(ends)
    ]
    assert num_lost in ({3} if num_steps < 9 else {0, 1, 2, 3})
    assert client.distrusted == ["mortal"] * num_lost
