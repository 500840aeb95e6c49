"""A call of `ReplicaDeployment.submit`: what its end does to other calls with the same request id."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deployments.replica_deployment import ReplicaDeployment
from replica.request import FinishReason, GenerationRequest, StreamMessage
from replica.service import ReplicaService
from tests.fake_replica import FakeFactory, answer, assert_quiet, request_of, running, settled, small_config


@pytest.fixture
def factory(tmp_path: Path) -> FakeFactory:
    return FakeFactory(tmp_path)


def call(service: ReplicaService, request: GenerationRequest) -> AsyncGenerator[StreamMessage, None]:
    """Without the constructor, which only runs inside Serve."""
    stand_in = SimpleNamespace(_service=service, _num_streams=0)
    return ReplicaDeployment.submit(cast(Any, stand_in), request)


async def first_ends(calling: AsyncGenerator[StreamMessage, None]) -> list[FinishReason | None]:
    return [event.finish_reason for event in (await anext(calling)).events]


async def test_a_second_call_with_the_id_of_a_live_stream_is_refused_and_the_stream_goes_on(
    factory: FakeFactory,
) -> None:
    async with running(small_config(), factory) as service:
        first = call(service, request_of("r", max_tokens=100))
        assert await first_ends(first) == []
        second = call(service, request_of("r"))
        assert await first_ends(second) == [FinishReason.REJECTED]
        assert await anext(second, None) is None
        await settled(service)
        assert await first_ends(first) == [FinishReason.LENGTH]
        assert await anext(first, None) is None


async def test_a_refused_request_may_come_again(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        assert await first_ends(call(service, request_of("r", n=0))) == [FinishReason.REJECTED]
        async with aclosing(call(service, request_of("r"))) as again:
            assert await first_ends(again) == []


async def test_a_call_that_is_closed_gives_everything_back_at_once(factory: FakeFactory) -> None:
    async with running(small_config(), factory) as service:
        calling = call(service, request_of("r", max_tokens=100))
        await anext(calling)
        await calling.aclose()
        await settled(service)
        assert_quiet(service)
        assert (await answer(service, request_of("r"))).end().finish_reason is FinishReason.LENGTH
