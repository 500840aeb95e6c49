"""`BrimfulRouter` called as Serve calls it, without a cluster. On one: tests/integration/test_serve_router.py."""

from __future__ import annotations

import uuid
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, cast

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest, RunningReplica

from replica.errors import EngineDead, SettingError
from replica.request import LoadReport
from router.config import POLICIES
from router.serve_router import MAX_LEAVING, BrimfulRouter, report_of
from router.states import state_for
from tests.unit.router.loads import CHAIN, report, request


class FakeReplica:
    """What the router looks at of a `RunningReplica`."""

    max_ongoing_requests = 100

    def __init__(self, name: str, deployment: DeploymentID, load: LoadReport | None = None) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=deployment)
        self.routing_stats = asdict(load) if load is not None else {}
        self.replica_metadata = {"metrics_address": f"{name}:9100"} if load is not None else {}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def replicas(router: BrimfulRouter, *names: str, **loads: LoadReport) -> list[RunningReplica]:
    return cast(list[RunningReplica], [FakeReplica(name, router._deployment_id, loads.get(name)) for name in names])


@pytest.fixture
async def router() -> BrimfulRouter:
    """A router of a deployment of its own: state is kept for each deployment of the process."""
    deployment = DeploymentID(name=uuid.uuid4().hex, app_name="unit")
    router = BrimfulRouter(deployment_id=deployment, handle_source=DeploymentHandleSource.REPLICA)
    router.initialize_state()
    return router


def call(**kwargs: Any) -> PendingRequest:
    return PendingRequest(
        args=[], kwargs=kwargs, metadata=RequestMetadata(request_id="q", internal_request_id="shared")
    )


async def ranked(router: BrimfulRouter, pending: PendingRequest) -> list[str]:
    ranks = await router.choose_replicas(list(router.curr_replicas.values()), pending)
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id.unique_id for rank in ranks]


async def test_requests_are_ranked_by_the_reported_load_one_replica_a_rank(router: BrimfulRouter) -> None:
    loads = {"a": report("a", num_running=20), "b": report("b"), "c": report("c", num_running=40)}
    router.update_replicas(replicas(router, "a", "b", "c", **loads))
    pending = call(route=request("r"))
    assert await ranked(router, pending) == ["b", "a", "c"]
    assert await ranked(router, call(route=request("s"), exclude=("b",))) == ["a", "c"]
    assert pending.routing_context.should_backoff


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_replicas", [3, 70])
async def test_an_explanation_names_the_replica_that_is_chosen_next_in_whatever_order_serve_lists_them(
    router: BrimfulRouter, policy: str, num_replicas: int
) -> None:
    router.initialize_state(policy=policy)
    names = [f"{(number * 37 + 5) % num_replicas:02}" for number in range(num_replicas)]
    assert names != sorted(names)
    router.update_replicas(replicas(router, *names, **{name: report(name) for name in names}))
    explained, chosen = [], []
    for number in range(20):
        wanted = request(f"q{number}", block_hashes=CHAIN[: number % 5], session=f"s{number}")
        explained.append([name for name, _ in router._state.explain(wanted).decision.ranking])
        chosen.append(await ranked(router, call(route=wanted)))
    assert explained == chosen


async def test_a_call_that_is_no_request_leaves_the_ledger_alone(router: BrimfulRouter) -> None:
    router.update_replicas(replicas(router, "a", "b"))
    assert sorted(await ranked(router, call())) == ["a", "b"]
    assert len(router._state.ledger) == 0


async def test_a_call_that_ends_late_leaves_the_next_try_at_the_same_replica_in_the_ledger(
    router: BrimfulRouter,
) -> None:
    router.update_replicas(replicas(router, "a"))
    at, calls, ends = ReplicaID(unique_id="a", deployment_id=router._deployment_id), [], []
    for _ in range(2):
        calls.append(call(route=request("r")))
        ends.append(Future[None]())
        await ranked(router, calls[-1])
        router.on_request_routed(calls[-1], at, ends[-1])
    ends[0].set_result(None)
    assert router._state.replica_of("r") == "a"
    ends[1].set_result(None)
    assert (router._state.replica_of("r"), router._state.last_replica_of("r")) == (None, "a")


async def pinned(router: BrimfulRouter, replica_id: str) -> str:
    return (await router._choose_replica_for_request(call(pin=replica_id))).replica_id.unique_id


async def test_a_pinned_call_goes_to_its_replica_or_fails(router: BrimfulRouter) -> None:
    router.update_replicas(replicas(router, "a", "b"))
    assert await pinned(router, "a") == "a"
    assert await pinned(router, "b") == "b"
    with pytest.raises(EngineDead, match="replica c is gone"):
        await pinned(router, "c")


async def test_a_draining_replica_is_reached_by_pinned_calls_only(router: BrimfulRouter) -> None:
    router.update_replicas(replicas(router, "a", "b"))
    router.update_replicas(replicas(router, "b"))
    assert await pinned(router, "a") == "a"
    assert await ranked(router, call(route=request("r"))) == ["b"]
    router.update_replicas([])
    assert await pinned(router, "a") == "a"
    router.on_replica_actor_died(ReplicaID(unique_id="a", deployment_id=router._deployment_id))
    with pytest.raises(EngineDead):
        await pinned(router, "a")


async def test_replicas_that_left_long_ago_are_not_kept(router: BrimfulRouter) -> None:
    for life in range(200):
        router.update_replicas(replicas(router, f"life-{life}"))
    assert len(router._reachable) == 1 + MAX_LEAVING
    assert await pinned(router, "life-199") == "life-199"


async def test_a_dead_replica_that_is_still_listed_is_not_used(router: BrimfulRouter) -> None:
    router.update_replicas(replicas(router, "a", "b"))
    router.on_replica_actor_died(ReplicaID(unique_id="a", deployment_id=router._deployment_id))
    router.update_replicas(replicas(router, "a", "b", a=report("a"), b=report("b", num_running=60)))
    assert router._state.replica_ids() == ["b"]
    assert await ranked(router, call(route=request("r"))) == ["b"]
    with pytest.raises(EngineDead):
        await pinned(router, "a")


async def test_metrics_addresses_of_running_replicas_are_known_without_asking(router: BrimfulRouter) -> None:
    loads = {name: report(name) for name in "abd"}
    router.update_replicas(replicas(router, "a", "b", "c", "d", **loads))
    assert router._state.metrics_addresses() == ["a:9100", "b:9100", "d:9100"]  # c didn't tell
    router.on_replica_actor_died(ReplicaID(unique_id="a", deployment_id=router._deployment_id))
    assert router._state.metrics_addresses() == ["b:9100", "d:9100"]
    router.update_replicas(replicas(router, "d", **loads))
    assert router._state.metrics_addresses() == ["d:9100"]


async def test_when_all_that_are_listed_are_dead_one_is_still_tried(router: BrimfulRouter) -> None:
    router.update_replicas(replicas(router, "a"))
    router.on_replica_actor_died(ReplicaID(unique_id="a", deployment_id=router._deployment_id))
    router.update_replicas(replicas(router, "a"))
    assert await ranked(router, call(route=request("r"))) == ["a"]


async def test_two_calls_that_share_an_id_are_matched_each_to_its_own(router: BrimfulRouter) -> None:
    router.update_replicas(replicas(router, "a", "b"))
    first, second = call(), call()
    await router.choose_replicas(list(router.curr_replicas.values()), first)
    assert router._get_pending_request_matching_internal_request_id(first.metadata) is first
    await router.choose_replicas(list(router.curr_replicas.values()), second)
    assert router._get_pending_request_matching_internal_request_id(second.metadata) is second
    assert router._get_pending_request_matching_internal_request_id(first.metadata) is None


async def test_a_broken_route_fails_the_call_and_not_the_routing_task(router: BrimfulRouter) -> None:
    router.update_replicas(replicas(router, "a"))
    pending = call(route="no RouteRequest")
    offered = await router.choose_replicas(list(router.curr_replicas.values()), pending)
    assert offered != []  # else Serve's loop would never look at the future
    with pytest.raises(AttributeError):
        await pending.future


async def test_settings_reach_the_shared_state_and_bad_ones_are_named(router: BrimfulRouter) -> None:
    router.initialize_state(weights={"queue_depth": 2.0}, imbalance_cap=7)
    state = state_for("unit", router._deployment_id.name)
    assert (state.config.imbalance_cap, state.config.all_weights["queue_depth"]) == (7, 2.0)
    with pytest.raises(SettingError):
        router.initialize_state(imbalance_cap=0)
    with pytest.raises(TypeError):
        router.initialize_state(imbalance=1)


def test_a_report_crosses_as_a_plain_dict() -> None:
    made = report("a", number=7, block_hashes_added=(b"x",))
    assert report_of(asdict(made)) == made
    assert report_of({**asdict(made), "from_a_newer_version": 1}) == made


def test_what_is_no_report_is_none() -> None:
    assert report_of({}) is None
    assert report_of({"number": 7}) is None
