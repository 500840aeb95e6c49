"""OpenAI's routes of one group of models, and errors in OpenAI's shape for everything else.

Plain ASGI, which needs no running Ray: of it only `http_body.py` knows two errors.

POST <prefix>/v1/chat/completions, <prefix>/v1/completions    generation.py
GET  <prefix>/v1/models, <prefix>/v1/models/{id}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

from deployments.client_request import find_model
from deployments.error_map import error_body, http_error
from deployments.generation import Edge, GenerationEndpoint
from deployments.openai_responses import model_card, model_list
from deployments.served_model import ServedModel


def model_routes(prefix: str, models: dict[str, ServedModel], edge: Edge) -> list[Route]:
    """The OpenAI routes of the models that live under `prefix`."""
    root = prefix.rstrip("/") + "/v1"

    async def list_models(_: Request) -> Response:
        return JSONResponse(model_list([_card(model) for model in models.values()]))

    async def one_model(request: Request) -> Response:
        return JSONResponse(_card(find_model(models, request.path_params["name"])))

    return [
        Route(f"{root}/chat/completions", GenerationEndpoint("chat", models, edge), methods=["POST"]),
        Route(f"{root}/completions", GenerationEndpoint("completions", models, edge), methods=["POST"]),
        Route(f"{root}/models", list_models),
        Route(f"{root}/models/{{name:path}}", one_model),
    ]


async def _http_exception(request: Request, error: Exception) -> Response:
    """No such route, or not with this method: in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    body = error_body(message, "invalid_request_error", code="not_found" if error.status_code == 404 else None)
    return Response(body, error.status_code, error.headers, "application/json")


async def _own_error(_: Request, error: Exception) -> Response:
    answer = http_error(error)
    return Response(answer.body, answer.status, answer.headers, "application/json")


def _card(model: ServedModel) -> dict[str, Any]:
    return model_card(model.name, model.created_s, model.max_model_len)


ERROR_HANDLERS: Mapping[Any, ExceptionHandler] = {HTTPException: _http_exception, Exception: _own_error}
