"""What the ingress asks of one model's replicas, as a Protocol.

`deployments/serve_model_client.py` implements it over Ray Serve, `deployments/model_client_fake.py` without any.
Callers see only `BrimfulError`s. A stream's messages are `StreamMessage`s; refusals and failures that the replica
itself knows travel inside them, as events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from replica.model.api import ModelShape
from replica.model_card import TextBundle
from replica.request import GenerationRequest, LoadReport, StreamMessage
from router.explain import Explanation
from router.types import RouteRequest


def route_request(request: GenerationRequest, block_hashes: tuple[bytes, ...]) -> RouteRequest:
    """What the router has to know of `request`: of one that is continued, what is left of it."""
    num_prior = len(request.prior_output_ids)
    return RouteRequest(
        request_id=request.request_id,
        num_prompt_tokens=len(request.prompt_ids) + num_prior,
        max_tokens=request.sampling.max_tokens - num_prior,
        n=request.n,
        block_hashes=block_hashes,
        session=request.session,
    )


class ModelClient(Protocol):
    """One model's replicas, seen from one ingress process."""

    def num_replicas(self) -> int:
        """How many replicas are running, as far as this process knows."""
        ...

    def num_ready(self) -> int:
        """Of those, how many aren't known to be dead or silent. One that was just started counts."""
        ...

    def loads(self) -> list[LoadReport]:
        """The newest report of every replica that has spoken."""
        ...

    def generate(self, request: GenerationRequest, exclude: tuple[str, ...] = ()) -> AsyncIterator[StreamMessage]:
        """Send `request` to a replica of the router's choice, not one of `exclude`. Raises `BrimfulError`s.

        The first message says which replica took it. Closing the iterator early stops listening; it doesn't abort.
        """
        ...

    async def explain(self, request: GenerationRequest) -> Explanation:
        """Where the router would send `request` now, and why; it isn't sent, and nothing remembers it. Raises
        `Unavailable` when no replica runs."""
        ...

    def replica_of(self, request_id: str) -> str | None:
        """The replica to which the request was sent, whether it has taken it or not. None: to nobody yet."""
        ...

    def last_replica_of(self, request_id: str) -> str | None:
        """The same, but also when its call is over and said nothing: then where it went, until `forget`."""
        ...

    def forget(self, request_id: str) -> None:
        """The stream has ended for good: take it out of this router's ledger. Idempotent."""
        ...

    async def abort(self, replica_id: str, request_id: str) -> None:
        """End the request at that replica and free what it holds. Unknown ids are fine. Raises `EngineDead`."""
        ...

    async def renew(self, replica_id: str, lease: str, request_ids: tuple[str, ...]) -> None:
        """Say that these streams still have a listener here. Raises `EngineDead` when the replica doesn't answer."""
        ...

    def distrust(self, replica_id: str) -> None:
        """The replica didn't answer, or its engine is dead: it isn't ready, and the router is to prefer others, until
        it reports again."""
        ...

    def failed(self, request_id: str, replica_id: str) -> None:
        """The replica ended the client's request `request_id`, of which no token had come, with a failure of its own
        that isn't its death. The router finds out which of the two is the cause (`router/health.py`)."""
        ...

    def succeeded(self, request_id: str, replica_id: str) -> None:
        """The replica gave the first token of an answer to the client's request, or ended it well."""
        ...

    async def facts(self) -> tuple[TextBundle, ModelShape]:
        """The model's card and tokenizer, and its limits. Raises `Unavailable` while no replica runs."""
        ...

    async def ask_all(self, method: str) -> list[dict[str, Any]]:
        """The answers of all running replicas to a parameterless question; those that don't answer are left out."""
        ...

    def metrics_addresses(self) -> list[str]:
        """host:port at which each running replica serves its metrics; also of one that hangs."""
        ...
