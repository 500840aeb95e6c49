"""Serve's request router for replicas: turns a handle call into a ranking of replicas. The only file here with Ray.

Two kinds of call, told apart by a keyword argument of the call itself (the replica's methods accept and ignore it):

    route=RouteRequest(...), exclude=(...)   a request: `RouterState.choose` ranks the replicas
    pin="<replica id>"                       a control call: that replica, draining or not, or nobody (`call_pinned`)

Any other call goes to a replica at random. What this knows lies in `router/state.py`, not here: Serve pickles this
module by value, so a module-level object here would be another one than the ingress imports. Replica ids are the
`unique_id` of Serve's `ReplicaID`.

Facts of Ray 2.60 that shape it: within a rank Serve takes the shortest queue, so every rank is one replica; a pass in
which no replica took the request is repeated at once unless `should_backoff` is set; a routing task ends only when the
future of its request is done.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from replica.errors import BrimfulError, EngineDead
from replica.request import LoadReport
from router.config import RouterConfig
from router.state import RouterState
from router.states import state_for

logger = logging.getLogger(__name__)

PINNED_TIMEOUT_S = 2.0
METRICS_ADDRESS = "metrics_address"
"""Key of what a replica's `record_replica_metadata` returns: host:port of its metrics."""
MAX_LEAVING = 64
"""Replicas that Serve lists no more and that may still drain: kept for pinned calls until one finds them dead."""


class BrimfulRouter(RequestRouter):
    """One object a deployment handle; all of a process share the deployment's `RouterState`.

    `request_router_kwargs` are the fields of `RouterConfig`. Runs on Serve's router loop: nothing here blocks.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Raises `SettingError` for a setting out of range, `TypeError` for one that doesn't exist."""
        self._state = state_for(self._deployment_id.app_name, self._deployment_id.name)
        self._state.configure(RouterConfig(**kwargs))
        self._rng = random.Random()
        self._died: set[str] = set()
        self._reachable: OrderedDict[str, RunningReplica] = OrderedDict()
        self._candidates: list[RunningReplica] = []
        self._living: dict[str, RunningReplica] = {}
        self._living_ids: list[str] = []
        self._routed_by: WeakKeyDictionary[asyncio.Task[Any], PendingRequest] = WeakKeyDictionary()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, best first. For every call that isn't pinned."""
        if pending_request is None:
            return self._any_order(candidate_replicas)
        task = asyncio.current_task()
        if task is not None:
            self._routed_by[task] = pending_request
        pending_request.routing_context.should_backoff = True
        try:
            return self._rank(candidate_replicas, pending_request)
        except Exception as error:
            # Serve would log it and leave the caller waiting. The routing loop looks at the future only when it is
            # offered a replica, so it is offered all.
            if not isinstance(error, BrimfulError):
                logger.exception("no decision")
            self._fail(pending_request, error)
            return [candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """A pinned call goes straight to its replica, past Serve's queue and its probes of queue lengths.

        Also to one that Serve doesn't list any more: a draining replica still finishes streams, which have to be
        renewed and can be aborted. Raises `EngineDead` when it is known to be dead or was never listed.
        """
        pin = pending_request.kwargs.get("pin")
        if pin is None:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if is_retry:  # it refused, or couldn't be reached: the caller's time limit ends this
            await self._backoff(0)
        replica = self._reachable.get(pin)
        if replica is None:
            raise EngineDead(f"replica {pin} is gone")
        return replica

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The replica took the call: note where it is, and have the entry leave the ledger when the call is over."""
        route = pending_request.kwargs.get("route")
        if route is None:
            return
        state = self._state
        state.routed(route, replica_id.unique_id)
        result.add_done_callback(lambda _: state.released(route))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call found the actor dead. Serve's next update may still list it: it is remembered until one doesn't."""
        super().on_replica_actor_died(replica_id)
        self._died.add(replica_id.unique_id)
        self._reachable.pop(replica_id.unique_id, None)
        self._state.died(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list of running replicas, with their routing stats: the way in which idle replicas report."""
        by_id = {replica.replica_id.unique_id: replica for replica in replicas}
        self._died &= by_id.keys()
        told = {replica_id: replica.replica_metadata for replica_id, replica in by_id.items()}
        addresses = {
            replica_id: facts[METRICS_ADDRESS] for replica_id, facts in told.items() if METRICS_ADDRESS in facts
        }
        self._state.retain(by_id.keys() - self._died, addresses)
        for replica_id in by_id.keys() - self._died:
            self._reachable[replica_id] = by_id[replica_id]
            self._reachable.move_to_end(replica_id)
        while len(self._reachable) > len(by_id) + MAX_LEAVING:
            self._reachable.popitem(last=False)
        for replica in replicas:
            report = report_of(replica.routing_stats)
            if report is not None:
                self._state.observe(report)
        super().update_replicas(replicas)

    def _rank(self, candidates: list[RunningReplica], pending_request: PendingRequest) -> list[list[RunningReplica]]:
        route = pending_request.kwargs.get("route")
        living = self._living_among(candidates)
        if route is None:
            return self._any_order(list(living.values()))
        decision = self._state.choose(route, self._living_ids, pending_request.kwargs.get("exclude") or ())
        return [[living[replica_id]] for replica_id, _ in decision.ranking]

    def _living_among(self, candidates: list[RunningReplica]) -> dict[str, RunningReplica]:
        """By id, those that aren't known to be dead, or all when all are. Serve makes a new list at every change.

        In the order of `RouterState.replica_ids`, because a choice may go by places: an explanation has the same ones.
        """
        if candidates is not self._candidates:
            by_id = {replica.replica_id.unique_id: replica for replica in candidates}
            living = {replica_id: replica for replica_id, replica in by_id.items() if replica_id not in self._died}
            self._candidates, self._living = candidates, living or by_id
            self._living_ids = sorted(self._living)
        return self._living

    def _any_order(self, replicas: list[RunningReplica]) -> list[list[RunningReplica]]:
        return [[replica] for replica in self._rng.sample(replicas, len(replicas))]

    def _fail(self, pending_request: PendingRequest, error: Exception) -> None:
        if not pending_request.future.done():
            pending_request.future.set_exception(error)
        self._remove_pending_request_from_indices(pending_request)

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> PendingRequest | None:
        """The request that the current routing task chose for.

        Serve's own look-up goes by an id that all calls made for one HTTP request share: of several prompts in one body
        all but one would never be sent.
        """
        task = asyncio.current_task()
        pending_request = self._routed_by.get(task) if task is not None else None
        if pending_request is None or pending_request.future.done():
            return None
        return pending_request if pending_request.metadata is request_metadata else None


def report_of(routing_stats: Mapping[str, Any]) -> LoadReport | None:
    """The load report that a replica's `record_routing_stats` returned as a plain dict, None when it returned none.

    Names that this version doesn't know are passed over (a newer replica during a rolling update); a report in which a
    needed one is missing is none, with a warning.
    """
    if not routing_stats:
        return None
    known = {field.name for field in fields(LoadReport)}
    try:
        return LoadReport(**{name: value for name, value in routing_stats.items() if name in known})
    except TypeError as error:
        logger.warning("routing stats are no load report: %s", error)
        return None


def state_of(handle: DeploymentHandle[Any]) -> RouterState:
    """The state that the router behind `handle` uses in this process."""
    return state_for(handle.app_name, handle.deployment_name)


async def call_pinned(
    handle: DeploymentHandle[Any],
    replica_id: str,
    method: str,
    *args: Any,
    timeout_s: float = PINNED_TIMEOUT_S,
    **kwargs: Any,
) -> Any:
    """Call a unary method on this very replica. The method must accept `pin`.

    Raises `EngineDead` when the replica is gone or hasn't answered in `timeout_s`; what the method itself raises comes
    through. Never retried elsewhere.
    """
    response = handle.options(method_name=method, stream=False).remote(*args, pin=replica_id, **kwargs)
    try:
        async with asyncio.timeout(timeout_s):
            return await response
    except TimeoutError as error:
        response.cancel()  # type: ignore[no-untyped-call]
        raise EngineDead(f"replica {replica_id} did not answer within {timeout_s:g} s") from error
    except (ActorDiedError, ActorUnavailableError) as error:
        raise EngineDead(f"replica {replica_id} is gone") from error
