"""What one ingress process learns from all of them."""

from __future__ import annotations

import logging
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 2.0


class IngressPeers:
    """The processes of the ingress deployment, this one included.

    Limit: Serve's broadcast waits for all, so one process that hangs (until Serve replaces it) leaves `ask` without
    any answer. Metrics addresses of the last complete round stay known meanwhile.
    """

    def __init__(self, app_name: str, deployment: str) -> None:
        self._app_name = app_name
        self._deployment = deployment
        self._handle: DeploymentHandle[Any] | None = None
        self._metrics_addresses: list[str] = []

    async def ask(self, method: str) -> list[dict[str, Any]]:
        """Everybody's answer to a parameterless question; an empty list when somebody doesn't answer in time."""
        if self._handle is None:
            self._handle = serve.get_deployment_handle(self._deployment, self._app_name)
        try:
            response = self._handle.broadcast(method)
            answers = await response.results_async(timeout_s=ASK_TIMEOUT_S, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError, RayError) as error:
            logger.warning("ingress processes didn't answer %s: %s", method, error or "silent")
            return []
        return [answer for answer in answers if isinstance(answer, dict)]

    async def metrics_addresses(self, own: str) -> list[str]:
        """Where all processes serve their metrics; `own` is among them in any case."""
        answers = await self.ask("describe")
        if answers:
            self._metrics_addresses = [answer["metrics_address"] for answer in answers]
        return list(dict.fromkeys([*self._metrics_addresses, own]))
