"""The router on real Ray Serve: decisions follow the views, pins hold, the dead are forgotten, the ledger balances."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, cast

import pytest
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from deployments.serve_model_client import ServeModelClient
from replica.errors import EngineDead
from replica.request import LoadReport, StreamMessage
from router.serve_router import METRICS_ADDRESS, call_pinned, state_of
from router.state import RouterState
from tests.integration.private_ray import REPLICAS, ROUTER, private_ray
from tests.unit.router.loads import report, request

pytestmark = pytest.mark.timeout(300)  # the first test starts Ray

NUM_REPLICAS = 3
PATIENT_ROUTER: dict[str, Any] = {
    **ROUTER,
    "request_router_kwargs": {"stale_after_s": 1e6},
    "initial_backoff_s": 0.02,
    "max_backoff_s": 0.02,
}


class Echo:
    """A replica without an engine: streams say who served them; one can be held open until it is let go."""

    def __init__(self) -> None:
        self._id = serve.get_replica_context().replica_id.unique_id
        self._report = report(self._id, num_blocks_total=4000, num_blocks_free=4000)
        self._let_go = asyncio.Event()
        self._answers = True

    async def generate(self, hold: bool = False, route: Any = None, exclude: Any = ()) -> AsyncIterator[StreamMessage]:
        yield StreamMessage(self._id, load=self._next_report())
        if hold:
            await self._let_go.wait()
        yield StreamMessage(self._id, load=self._next_report())

    async def who(self, pin: str | None = None) -> tuple[str, int]:
        return self._id, os.getpid()

    async def let_go(self, pin: str | None = None) -> None:
        self._let_go.set()
        self._let_go = asyncio.Event()

    async def set_load(self, changes: dict[str, Any], pin: str | None = None) -> None:
        self._report = replace(self._report, **changes)

    async def fail(self, pin: str | None = None) -> None:
        raise KeyError("my own error")

    async def silent(self, pin: str | None = None) -> None:
        await asyncio.Event().wait()

    async def set_answers(self, answers: bool, pin: str | None = None) -> None:
        self._answers = answers

    async def status(self, pin: str | None = None) -> dict[str, Any]:
        if not self._answers:
            await asyncio.Event().wait()
        return {"replica_id": self._id}

    def record_replica_metadata(self) -> dict[str, Any]:
        return {METRICS_ADDRESS: self._id}

    def record_routing_stats(self) -> dict[str, Any]:
        return asdict(self._next_report())

    def _next_report(self) -> LoadReport:
        self._report = replace(self._report, number=self._report.number + 1)
        return self._report


class FanOut:
    """An ingress that makes many calls for one request, as a body with several prompts does."""

    def __init__(self, echo: DeploymentHandle[Any]) -> None:
        self._echo = echo

    async def __call__(self, num_calls: int) -> list[str]:
        async def one(i: int) -> str:
            stream = stream_of(self._echo, route=request(f"fan-{i}"))
            served_by = [message.replica_id async for message in stream]
            state_of(self._echo).ended(f"fan-{i}")
            return served_by[0]

        served_by = await asyncio.gather(*[one(i) for i in range(num_calls)])
        assert len(state_of(self._echo).ledger) == 0
        return list(served_by)


@pytest.fixture(scope="module")
def fan_out() -> Iterator[DeploymentHandle[Any]]:
    """A private Ray with `NUM_REPLICAS` echo replicas behind the router, and an ingress in front of them."""
    with private_ray():
        router = RequestRouterConfig(**PATIENT_ROUTER)
        echo = serve.deployment(num_replicas=NUM_REPLICAS, request_router_config=router, **REPLICAS)(Echo)
        ingress = serve.deployment(ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=1)(FanOut)
        yield serve.run(ingress.bind(echo.bind()), name="routing", route_prefix=None)


@pytest.fixture
def handle(fan_out: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    return serve.get_deployment_handle("Echo", "routing").options(stream=False)  # a handle makes its router when used


def stream_of(handle: DeploymentHandle[Any], **kwargs: Any) -> AsyncIterator[StreamMessage]:
    return cast(AsyncIterator[StreamMessage], handle.options(stream=True).generate.remote(**kwargs))


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, within_s: float = 30.0) -> None:
    """Poll a remote condition; a bound, not a measurement."""
    deadline = time.monotonic() + within_s
    while True:
        outcome = condition()
        if outcome if isinstance(outcome, bool) else await outcome:
            return
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.02)


async def ready(handle: DeploymentHandle[Any]) -> tuple[RouterState, list[str]]:
    """The router's state once it knows all replicas and has heard of each."""
    state = state_of(handle)
    await until(lambda: len(state.reports()) == NUM_REPLICAS, "all replicas reported")
    return state, state.replica_ids()


async def serve_one(
    handle: DeploymentHandle[Any], state: RouterState, request_id: str, **kwargs: Any
) -> list[StreamMessage]:
    """One request as the ingress lives it."""
    messages = []
    try:
        async for message in stream_of(handle, route=request(request_id), **kwargs):
            state.received(request_id, message)
            messages.append(message)
    finally:
        state.ended(request_id)
    return messages


async def test_pinned_calls_reach_that_replica_and_no_other(handle: DeploymentHandle[Any]) -> None:
    _, replica_ids = await ready(handle)
    for replica_id in replica_ids * 2:
        assert (await call_pinned(handle, replica_id, "who"))[0] == replica_id


async def test_a_pinned_call_to_nobody_fails_at_once(handle: DeploymentHandle[Any]) -> None:
    await ready(handle)
    with pytest.raises(EngineDead, match="replica nobody is gone"):
        await call_pinned(handle, "nobody", "who", timeout_s=20.0)


async def test_what_the_method_raises_comes_through(handle: DeploymentHandle[Any]) -> None:
    _, replica_ids = await ready(handle)
    with pytest.raises(KeyError, match="my own error"):
        await call_pinned(handle, replica_ids[0], "fail", timeout_s=20.0)


async def test_a_silent_replica_is_not_waited_for(handle: DeploymentHandle[Any]) -> None:
    _, replica_ids = await ready(handle)
    with pytest.raises(EngineDead, match=r"did not answer within 0\.2 s"):
        await call_pinned(handle, replica_ids[0], "silent", timeout_s=0.2)


async def test_decisions_follow_the_routing_stats(handle: DeploymentHandle[Any]) -> None:
    state, replica_ids = await ready(handle)
    *busy, idle = replica_ids
    for replica_id in busy:
        await call_pinned(handle, replica_id, "set_load", {"num_running": 30}, timeout_s=20.0)
    await until(lambda: sum(r.num_running == 30 for r in state.reports()) == 2, "the load is known")
    for i in range(4):
        assert {m.replica_id for m in await serve_one(handle, state, f"follow-{i}")} == {idle}
    for replica_id in busy:
        await call_pinned(handle, replica_id, "set_load", {"num_running": 0}, timeout_s=20.0)
    await until(lambda: all(r.num_running == 0 for r in state.reports()), "the load is gone")


async def test_a_silent_replica_costs_only_its_own_answer(handle: DeploymentHandle[Any]) -> None:
    _, replica_ids = await ready(handle)
    client = ServeModelClient(handle, ThreadPoolExecutor(1))
    assert sorted(answer["replica_id"] for answer in await client.ask_all("status")) == replica_ids
    silent, *others = replica_ids
    await call_pinned(handle, silent, "set_answers", False, timeout_s=20.0)
    assert sorted(answer["replica_id"] for answer in await client.ask_all("status")) == others
    assert client.metrics_addresses() == replica_ids
    await call_pinned(handle, silent, "set_answers", True, timeout_s=20.0)


async def test_excluded_replicas_are_not_used(handle: DeploymentHandle[Any]) -> None:
    state, (first, second, third) = await ready(handle)
    for i in range(5):
        messages = await serve_one(handle, state, f"exclude-{i}", exclude=(first, third))
        assert {m.replica_id for m in messages} == {second}


async def test_a_burst_is_spread_while_no_report_shows_it(handle: DeploymentHandle[Any]) -> None:
    state, replica_ids = await ready(handle)
    burst = [asyncio.create_task(serve_one(handle, state, f"burst-{i}", hold=True)) for i in range(24)]
    await until(lambda: len(state.ledger) == 24, "all are sent")
    in_flight = {replica_id: counts.num_in_flight for replica_id, counts in state.ledger.counts().items()}
    assert max(in_flight.values()) <= 1.5 * 24 / NUM_REPLICAS

    async def let_go() -> bool:
        for replica_id in replica_ids:
            await call_pinned(handle, replica_id, "let_go", timeout_s=20.0)
        return all(task.done() for task in burst)

    await until(let_go, "all streams ended")
    served = [(await task)[0].replica_id for task in burst]
    assert {replica_id: served.count(replica_id) for replica_id in in_flight} == in_flight
    assert (len(state.ledger), state.ledger.counts()) == (0, {})


async def test_an_entry_leaves_without_the_ingress_when_the_call_is_over(handle: DeploymentHandle[Any]) -> None:
    state, replica_ids = await ready(handle)
    others = tuple(replica_ids[1:])
    async for message in stream_of(handle, route=request("orphan"), exclude=others, hold=True):
        if message.load is not None and len(state.ledger) == 1:
            await call_pinned(handle, replica_ids[0], "let_go", timeout_s=20.0)
    await until(lambda: len(state.ledger) == 0, "the orphan left")


async def test_many_calls_of_one_http_request_are_all_sent(fan_out: DeploymentHandle[Any]) -> None:
    served_by = await asyncio.wait_for(fan_out.remote(24), timeout=30.0)
    assert len(served_by) == 24
    assert len(set(served_by)) == NUM_REPLICAS


async def test_a_call_that_is_no_request_goes_to_any_replica(handle: DeploymentHandle[Any]) -> None:
    _, replica_ids = await ready(handle)
    seen = {(await handle.who.remote())[0] for _ in range(30)}
    assert seen == set(replica_ids)


async def test_a_broken_route_fails_the_call_and_not_the_router(handle: DeploymentHandle[Any]) -> None:
    state, _ = await ready(handle)
    with pytest.raises(AttributeError):
        async for _ in stream_of(handle, route="not a RouteRequest"):
            pass
    assert len(await serve_one(handle, state, "after")) == 2


async def test_a_killed_replica_is_forgotten_and_replaced(handle: DeploymentHandle[Any]) -> None:
    state, replica_ids = await ready(handle)
    victim = replica_ids[0]
    _, pid = await call_pinned(handle, victim, "who", timeout_s=20.0)
    others = tuple(replica_ids[1:])
    cut = asyncio.create_task(serve_one(handle, state, "cut", exclude=others, hold=True))
    await until(lambda: victim in state.ledger.counts(), "the stream runs on the victim")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        await cut
    started_s = time.monotonic()
    with pytest.raises(EngineDead, match="is gone"):
        await call_pinned(handle, victim, "who", timeout_s=20.0)
    assert time.monotonic() - started_s < 2.0
    assert victim not in state.replica_ids()
    for i in range(6):
        assert (await serve_one(handle, state, f"on-{i}", exclude=(victim,)))[0].replica_id != victim
    await until(lambda: len(state.reports()) == NUM_REPLICAS, "the replacement reported")
    assert victim not in state.replica_ids()
    assert (len(state.ledger), state.ledger.counts()) == (0, {})


async def test_a_draining_replica_is_still_reached_for_its_streams(handle: DeploymentHandle[Any]) -> None:
    """The last test: it deletes the application."""
    state, replica_ids = await ready(handle)
    victim, *others = replica_ids
    stream = asyncio.create_task(serve_one(handle, state, "long", exclude=tuple(others), hold=True))
    await until(lambda: victim in state.ledger.counts(), "the stream runs")
    serve.delete("routing", _blocking=False)
    await until(lambda: state.replica_ids() == [], "Serve lists no replica any more")
    assert (await call_pinned(handle, victim, "who", timeout_s=20.0))[0] == victim
    await call_pinned(handle, victim, "let_go", timeout_s=20.0)
    assert [message.replica_id for message in await stream] == [victim, victim]
