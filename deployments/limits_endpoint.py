"""`/limits`: what may change on running replicas, shown to anybody who reaches the service, changed by few.

GET                                                 all models
POST {"model", "route", "limits": {...}, "reset"}   one model: sets these limits (null: no limit) on all its replicas

Every field of a POST may be left out: `model` and `route` where only one model fits what is given. `reset` gives the
limits that aren't named their start values. The answer is that of GET, for this model. A refused value changes
nothing anywhere; a replica that fell silent between the two rounds is in `silent` and gets it later. A change that lost
against one through another ingress process at the same time is answered with 503.

Who may POST is `ingress.limits_from`: see `sender_check.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deployments.config import IngressSettings
from deployments.error_map import http_error
from deployments.http_body import ClientLeft, read_body
from deployments.limited_replicas import Limits
from deployments.live_limits import LiveLimits
from deployments.sender_check import check_sender
from deployments.served_model import ServedModel
from deployments.shared_rounds import SharedRounds
from replica.errors import BrimfulError, InvalidRequest, SettingError, UnknownModel

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4096


class LimitsOfModel(NamedTuple):
    model: ServedModel
    limits: LiveLimits


class LimitsChange(BaseModel):
    """The body of a POST."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str | None = None
    route: str | None = None
    limits: dict[str, Any] = {}
    reset: bool = False


def limits_routes(models: Sequence[LimitsOfModel], settings: IngressSettings) -> list[Route]:
    async def all_limits() -> dict[str, Any]:
        return {"models": [_shown(entry, *await entry.limits.ask()) for entry in models]}

    rounds = SharedRounds(all_limits)

    async def show(_: Request) -> Response:
        return JSONResponse(await rounds.answer())

    async def change(request: Request) -> Response:
        try:
            check_sender(request, settings.limits_from, "limits", "changed")
            body = await read_body(request.scope, request.receive, MAX_BODY_BYTES, settings.body_timeout_s)
            return JSONResponse(await _changed(models, parse_change(body)))
        except SettingError as error:
            return _refused(InvalidRequest(error.message, param=error.param))
        except BrimfulError as error:
            return _refused(error)
        except ClientLeft:
            return Response(status_code=499)

    return [Route("/limits", show, methods=["GET"]), Route("/limits", change, methods=["POST"])]


def parse_change(body: bytes) -> LimitsChange:
    """Raises `InvalidRequest`. NaN and Infinity pass here, because the check of their setting can name it."""
    try:
        change = LimitsChange.model_validate(from_json(body, allow_inf_nan=True))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])[:100]
        if not field:
            raise InvalidRequest("the body must be a JSON object") from None
        known = first["type"] != "extra_forbidden"
        raise InvalidRequest(
            f"{field}: {first['msg']}" if known else f"{field} is not a known field", param=field
        ) from None
    except ValueError as error:
        raise InvalidRequest(f"the request body isn't valid JSON: {error}") from None
    if not change.limits and not change.reset:
        raise InvalidRequest("nothing to change: give limits, or reset: true")
    return change


async def _changed(models: Sequence[LimitsOfModel], change: LimitsChange) -> dict[str, Any]:
    entry = find_one(models, change)
    return {"models": [_shown(entry, *await entry.limits.change(change.limits, reset=change.reset))]}


def find_one(models: Sequence[LimitsOfModel], change: LimitsChange) -> LimitsOfModel:
    """The one model that `model` and `route` fit, as far as they are given. Raises `UnknownModel`, `InvalidRequest`."""
    fitting = [
        entry
        for entry in models
        if change.model in (None, entry.model.name) and change.route in (None, entry.model.settings.route)
    ]
    served = ", ".join(f"{entry.model.name} on {entry.model.settings.route}" for entry in fitting or models)
    if not fitting:
        raise UnknownModel(f"no such model is served here; served: {served}", param="model")
    if len(fitting) > 1:
        raise InvalidRequest(f"several models are served: {served}; name one", param="model")
    return fitting[0]


def _shown(entry: LimitsOfModel, found: list[Limits], silent: list[str]) -> dict[str, Any]:
    return {"name": entry.model.name, "route": entry.model.settings.route, "replicas": found, "silent": silent}


def _refused(error: BrimfulError) -> Response:
    logger.info("limits not changed: %s", error.message)
    answer = http_error(error)
    return Response(answer.body, answer.status, answer.headers, "application/json")
