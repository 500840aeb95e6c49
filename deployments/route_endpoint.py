"""`POST <prefix>/route`: which replica a request would be sent to now, and why. For `brimful route`.

The body is that of a chat or of a completion with one prompt, told apart by `messages` and `prompt`. Nothing is
generated and nothing is remembered: the decisions that come next are those that would come without it. It answers
while the service drains, and 503 while a model loads.

Who may ask is `ingress.limits_from` (`sender_check.py`), not anybody who reaches the service: which blocks of a guessed
prompt are cached tells what others have asked, and the costs and scores tell it as well as the numbers of blocks.

An ingress process decides with what it knows itself: reports that reached it, and of what was sent since only its own
requests. So the answer names the ingress that gave it; the next question may reach another, which may answer otherwise.

    model, ingress                 who was asked, and who answered
    policy, replica, reason        the decision; reasons: see `router/policy.py`
    cost_s, report_age_s           what it is expected to cost there, by `cost_s`; the age of what is known of it
    prompt_tokens, output_tokens   of the request: to be computed, and expected
    prompt_blocks, cached_blocks   full blocks of the prompt; replica -> how many leading ones lie in its prefix cache,
                                   for at most `MAX_LISTED` replicas, and `num_caching` says how many hold any
    session_by                     under `session_affinity` what the place goes by: the `session` that the request names
                                   (`prompt_cache_key`), its `prompt`, or the `request`: one that names none and whose
                                   prompt is shorter than a block may go anywhere, also elsewhere than told here
    num_replicas, num_looked_at    that run, and of these the candidates of this decision
    settings, routers              what the scores depend on; what is known of other routers, as `router/peers.py` says
    candidates                     best first, at most `MAX_LISTED`; last those that a filter kept out (`kept_out_by`)

What isn't known, such as the age of a report that never came, is null.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deployments.admission import InFlight
from deployments.client_request import asked_model, parsed_body, tokenized
from deployments.error_map import http_error
from deployments.generation import Edge
from deployments.http_body import ClientLeft, read_body
from deployments.openai_schema import CompletionRequest, parse_either
from deployments.sender_check import check_sender
from deployments.served_model import ServedModel
from replica.errors import BrimfulError, InvalidRequest
from router.explain import Candidate, Explanation

MAX_LISTED = 64
MAX_AT_ONCE = 4
"""Questions that one ingress works on at the same time: each costs the reading and tokenizing of a prompt."""


def explained_route(prefix: str, models: Mapping[str, ServedModel], edge: Edge, ingress_id: str) -> Route:
    """The route of the models that live under `prefix`."""
    in_flight = InFlight(MAX_AT_ONCE)

    async def answer(request: Request) -> Response:
        try:
            check_sender(request, edge.settings.limits_from, "decisions", "explained")
            in_flight.enter()
            try:
                return JSONResponse({"ingress": ingress_id, **await _explained(models, edge, request)})
            finally:
                in_flight.leave()
        except BrimfulError as error:
            refusal = http_error(error)
            return Response(refusal.body, refusal.status, refusal.headers, "application/json")
        except ClientLeft:
            return Response(status_code=499)

    return Route(f"{prefix.rstrip('/')}/route", answer, methods=["POST"])


async def _explained(models: Mapping[str, ServedModel], edge: Edge, request: Request) -> dict[str, Any]:
    settings = edge.settings
    body = await read_body(request.scope, request.receive, settings.max_body_bytes, settings.body_timeout_s)
    parsed = await parsed_body(parse_either, body, edge.threads)
    if isinstance(parsed, CompletionRequest) and len(parsed.prompt) != 1:
        raise InvalidRequest("each prompt is a request of its own: ask for one at a time", param="prompt")
    model = asked_model(models, parsed)
    (wanted,) = await tokenized(model, parsed, f"route-{secrets.token_hex(16)}", edge.threads)
    return {"model": model.name, **as_json(await model.client.explain(wanted))}


def as_json(explanation: Explanation) -> dict[str, Any]:
    decision, request, config = explanation.decision, explanation.request, explanation.config
    most = islice(explanation.matched.items(), MAX_LISTED)
    listed = [
        _candidate(candidate, explanation.weights, explanation.now_s)
        for candidate in explanation.candidates[:MAX_LISTED]
    ]
    return {
        "policy": decision.policy,
        "replica": decision.replica_id,
        "reason": decision.reason,
        "cost_s": decision.cost_s,
        "report_age_s": _finite(decision.report_age_s),
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": explanation.num_output_tokens,
        "prompt_blocks": len(request.block_hashes),
        "cached_blocks": dict(most),
        "num_caching": len(explanation.matched),
        "session_by": explanation.session_by,
        "num_replicas": explanation.num_replicas,
        "num_looked_at": len(explanation.candidates),
        "settings": {
            "tau_s": config.tau_s,
            "stale_after_s": config.stale_after_s,
            "ramp_s": config.ramp_s,
            "expected_output_tokens": config.expected_output_tokens,
            "max_num_queued_seqs": config.max_num_queued_seqs,
        },
        "routers": {
            "number": explanation.num_routers,
            "report_lag_s": explanation.report_lag_s,
            "unseen_requests": explanation.num_unseen,
        },
        "candidates": listed,
    }


def _candidate(candidate: Candidate, weights: Mapping[str, float], now_s: float) -> dict[str, Any]:
    view, load, report = candidate.view, candidate.view.load, candidate.view.load.report
    cost = candidate.cost
    return {
        "replica_id": load.replica_id,
        "total": candidate.total,
        "kept_out_by": candidate.kept_out_by or None,
        "scores": {name: {"score": score, "weight": weights[name]} for name, score in candidate.scores.items()},
        "cost": None if cost is None else {**asdict(cost), "total_s": cost.total_s},
        "report_age_s": _finite(now_s - load.arrived_at_s),
        "stale": view.is_stale,
        "draining": report.draining if report is not None else None,
        "ramp": view.ramp,
        "home": view.is_home,
        "running": report.num_running if report is not None else None,
        "waiting": report.num_waiting if report is not None else None,
        "own_in_flight": load.num_in_flight,
        "own_pending": load.num_pending,
        "kv_usage_ratio": load.kv_usage_ratio if report is not None else None,
        "blocks_available": load.num_blocks_available if report is not None else None,
        "blocks_total": load.num_blocks_total if report is not None else None,
        "matched_blocks": view.matched_blocks,
        "cached_tokens": view.matched_blocks * load.block_size,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
