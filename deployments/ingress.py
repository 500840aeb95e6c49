"""The ingress: the Serve deployment that speaks HTTP. It holds a client for every model, and no torch.

.../v1/...                                    routes.py, under each model's route prefix
GET  /health                                  this process can answer (also while models load)
GET  /ready                                   every model has a replica that has generated a token
GET  /status                                  models, replicas, load, budgets: for people and `brimful status`
GET  /limits, POST /limits                    limits_endpoint.py: shows and changes budgets, for `brimful limits`
POST <prefix>/route                           route_endpoint.py: where a request would go and why, for `brimful route`
GET  /metrics/targets                         Prometheus HTTP service discovery: every replica and ingress process
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deployments.admission import InFlight
from deployments.config import AppConfig
from deployments.edge_metrics import EdgeMetrics
from deployments.generation import Edge
from deployments.ingress_peers import IngressPeers
from deployments.leases import Leases
from deployments.limited_replicas import ServeLimitedReplicas
from deployments.limits_endpoint import LimitsOfModel, limits_routes
from deployments.live_limits import LiveLimits
from deployments.loopback import keep_serve_port_local
from deployments.machine import Machine
from deployments.metrics import INGRESS_METRICS
from deployments.process_address import metrics_address
from deployments.route_endpoint import explained_route
from deployments.routes import ERROR_HANDLERS, model_routes
from deployments.serve_logging import log_through_serve
from deployments.serve_model_client import ServeModelClient
from deployments.served_model import ServedModel
from deployments.shared_rounds import SharedRounds
from replica.metrics import Metrics
from replica.metrics_server import serve_metrics
from router.metrics import ROUTER_METRICS


class Ingress:
    """The user class of the `ingress` deployment; Serve asks it for the ASGI app once it is constructed."""

    def __init__(self, config: AppConfig, machine: Machine, *handles: DeploymentHandle[Any]) -> None:
        log_through_serve()
        keep_serve_port_local()
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._peers = IngressPeers(context.app_name, context.deployment)
        self._config = config
        self._metrics = Metrics((*INGRESS_METRICS, *ROUTER_METRICS), {"ingress": self._id})
        self._exporter, port = serve_metrics(self._metrics.registry, config.metrics_host, config.metrics_ports)
        self._metrics_address = metrics_address(config.metrics_host, port)
        self._tokenizer_threads = ThreadPoolExecutor(config.ingress.tokenizer_threads, "tokenize")
        self._models = [self._served(index, handle, machine) for index, handle in enumerate(handles)]
        limits = [LiveLimits(ServeLimitedReplicas(handle), self._id) for handle in handles]
        self._limits = [LimitsOfModel(*pair) for pair in zip(self._models, limits, strict=True)]
        self._status_rounds = SharedRounds(self._whole_status)
        self._target_rounds = SharedRounds(self._all_targets)
        self._edge = Edge(
            settings=config.ingress,
            leases=Leases(f"{self._id}-{secrets.token_hex(4)}", time.monotonic),
            in_flight=InFlight(config.ingress.max_in_flight),
            metrics=EdgeMetrics(self._metrics),
            threads=self._tokenizer_threads,
        )

    def _served(self, index: int, handle: DeploymentHandle[Any], machine: Machine) -> ServedModel:
        settings = self._config.models[index]
        client = ServeModelClient(handle, self._tokenizer_threads)
        client.state.attach(self._metrics, settings.name)
        bounds = settings.engine_config(machine, self._config.num_model_replicas).scheduler
        return ServedModel(settings, bounds, client, int(time.time()))

    def __serve_build_asgi_app__(self) -> Starlette:
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/status", self._status),
            Route("/metrics/targets", self._targets),
            *limits_routes(self._limits, self._config.ingress),
        ]
        for prefix in dict.fromkeys(model.settings.route for model in self._models):
            models = {model.name: model for model in self._models if model.settings.route == prefix}
            routes += [*model_routes(prefix, models, self._edge), explained_route(prefix, models, self._edge, self._id)]
        return Starlette(
            routes=routes,
            exception_handlers=ERROR_HANDLERS,
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._edge.leases.run())]
        tasks += [asyncio.create_task(model.load()) for model in self._models]
        tasks += [asyncio.create_task(entry.limits.keep_equal()) for entry in self._limits]
        try:
            yield
        finally:
            await self._edge.leases.shut_down()
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            self._tokenizer_threads.shutdown(wait=False)
            self._exporter.shutdown()

    async def describe(self) -> dict[str, Any]:
        """Who this process is and where its metrics are; other ingress replicas ask too."""
        return {
            "kind": "ingress",
            "replica_id": self._id,
            "model_name": "",
            "pid": os.getpid(),
            "metrics_address": self._metrics_address,
        }

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def drain(self) -> dict[str, Any]:
        """Refuse new generation requests from now on; open ones go on. Answers as `status`. Idempotent."""
        self._edge.in_flight.draining = True
        return await self.status()

    async def _ready(self, _: Request) -> Response:
        if self._edge.in_flight.draining:
            return JSONResponse({"status": "draining"}, 503, {"Retry-After": "5"})
        waiting = [model.name for model in self._models if not model.ready]
        if waiting:
            return JSONResponse({"status": "not ready", "models": waiting}, 503, {"Retry-After": "1"})
        return JSONResponse({"status": "ready"})

    async def status(self) -> dict[str, Any]:
        in_flight = self._edge.in_flight
        return {**await self.describe(), "in_flight": in_flight.count, "max_in_flight": in_flight.limit}

    async def _status(self, _: Request) -> Response:
        return JSONResponse(await self._status_rounds.answer())

    async def _whole_status(self) -> dict[str, Any]:
        asked = self._peers.ask("status"), *(model.client.ask_all("status") for model in self._models)
        ingress, *groups = await asyncio.gather(*asked)
        if self._id not in [process["replica_id"] for process in ingress]:
            ingress.append(await self.status())
        models = [_model_status(model, replicas) for model, replicas in zip(self._models, groups, strict=True)]
        return {"state": self._state(), "models": models, "ingress": ingress}

    def _state(self) -> str:
        if self._edge.in_flight.draining:
            return "draining"
        return "ready" if all(model.ready for model in self._models) else "starting"

    async def _targets(self, _: Request) -> Response:
        return JSONResponse(await self._target_rounds.answer())

    async def _all_targets(self) -> list[dict[str, Any]]:
        targets = [
            _target(address, "ingress") for address in await self._peers.metrics_addresses(self._metrics_address)
        ]
        for model in self._models:
            targets += [_target(address, "replica") for address in model.client.metrics_addresses()]
        return targets


def _model_status(model: ServedModel, replicas: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.settings.model,
        "route": model.settings.route,
        "max_model_len": model.max_model_len,
        "replicas": model.settings.replicas,
        "up": replicas,
    }


def _target(metrics_address: str, process: str) -> dict[str, Any]:
    """One entry of Prometheus' `http_sd_configs` format."""
    return {"targets": [metrics_address], "labels": {"process": process}}
