"""The end of a running application without cutting anybody off.

    every ingress process: refuse what is new (503, Retry-After), tell how many requests are in flight
    -> until none is, or the limit is over
    every replica: refuse too, and end what is still open with its error
    -> until the ingress processes have delivered those errors

Only then may Serve delete the application: with the first step of its own shutdown it takes away the route, and what
it kills at the end gets no last word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

logger = logging.getLogger(__name__)

INGRESS = "ingress"
POLL_S = 0.25
ASK_TIMEOUT_S = 3.0
# For the error events of streams that the limit cut off to reach their clients.
LAST_EVENTS_S = 5.0


class Drainable(Protocol):
    """A running application's processes."""

    def drain(self, deployment: str) -> list[dict[str, Any]] | None:
        """Tell all processes of a deployment to drain, again or for the first time; their answers. None: not all of
        them answered in time."""
        ...


class ServeApplication:
    """`Drainable` over Serve."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name

    def drain(self, deployment: str) -> list[dict[str, Any]] | None:
        try:
            handle = serve.get_deployment_handle(deployment, self._app_name)
            if not handle.is_initialized:
                # Whatever Serve's processes do: here is no event loop that its router could share.
                handle._init(_run_router_in_separate_loop=True)  # type: ignore[no-untyped-call]
            response = handle.broadcast("drain")
            answers = response.results(timeout_s=ASK_TIMEOUT_S, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException) as error:
            logger.warning("%s didn't answer the drain: %s", deployment, error)
            return None
        if any(isinstance(answer, TimeoutError) for answer in answers):
            return None
        # A process that died meanwhile is another exception among the answers: nothing is in flight there.
        return [answer for answer in answers if isinstance(answer, dict)]


def drain(
    application: Drainable,
    replica_deployments: Iterable[str],
    limit_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Returns when nothing is in flight, or when what the limit cut off had `LAST_EVENTS_S` to be told so. True: nobody
    was cut off. Ingress processes are told at each poll, because Serve may have replaced one."""
    finished = _until_idle(application, limit_s, clock, sleep)
    for deployment in replica_deployments:
        application.drain(deployment)
    if not finished:
        _until_idle(application, LAST_EVENTS_S, clock, sleep)
    return finished


def _until_idle(
    application: Drainable, limit_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
    deadline_s = clock() + limit_s
    while True:
        answers = application.drain(INGRESS)
        if answers is not None and sum(answer["in_flight"] for answer in answers) == 0:
            return True
        if clock() >= deadline_s:
            return False
        sleep(min(POLL_S, deadline_s - clock()))
