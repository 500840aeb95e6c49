"""What `live_limits.py` asks of one model's replicas, as a Protocol, and over Ray Serve."""

from __future__ import annotations

from typing import Any, Protocol, cast

from ray.serve.handle import DeploymentHandle

from deployments.serve_model_client import CONTROL_TIMEOUT_S, translated
from replica.errors import ErrorInfo
from router.serve_router import call_pinned, state_of

Limits = dict[str, Any]
"""What `ReplicaDeployment.limits` answers: replica_id, revision, start, now, allowed, in_force."""
Revision = tuple[int, str]


class LimitedReplicas(Protocol):
    """Every call raises a `BrimfulError` when the replica doesn't answer in time."""

    def ids(self) -> list[str]:
        """The running replicas, as far as this process knows."""
        ...

    async def limits(self, replica_id: str) -> Limits: ...

    async def check_budgets(self, replica_id: str, budgets: Limits) -> ErrorInfo | None:
        """Would this replica take these limits? The error if not."""
        ...

    async def set_budgets(self, replica_id: str, budgets: Limits, revision: Revision) -> ErrorInfo | None:
        """Change this replica's limits, unless what it has is of this revision or a newer one. The error if it
        refuses."""
        ...


class ServeLimitedReplicas:
    """`LimitedReplicas` over the handle of a replica deployment: a pinned call to each replica."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._state = state_of(handle)

    def ids(self) -> list[str]:
        return self._state.replica_ids()

    async def limits(self, replica_id: str) -> Limits:
        return cast(Limits, await self._call(replica_id, "limits"))

    async def check_budgets(self, replica_id: str, budgets: Limits) -> ErrorInfo | None:
        return cast(ErrorInfo | None, await self._call(replica_id, "check_budgets", budgets))

    async def set_budgets(self, replica_id: str, budgets: Limits, revision: Revision) -> ErrorInfo | None:
        return cast(ErrorInfo | None, await self._call(replica_id, "set_budgets", budgets, revision))

    async def _call(self, replica_id: str, method: str, *args: object) -> Any:
        try:
            return await call_pinned(self._handle, replica_id, method, *args, timeout_s=CONTROL_TIMEOUT_S)
        except Exception as error:
            raise translated(error) from error
