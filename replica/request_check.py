"""The last check of a request before it becomes state: nothing past this line may trip over a client's value.

The ingress checks the same with OpenAI's names and wording; this one holds for every caller of a replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from replica.errors import InvalidRequest
from replica.model.api import ModelShape
from replica.request import GenerationRequest, SamplingParams

MAX_N = 128
_SEED_BITS = 64


def check_request(request: GenerationRequest, shape: ModelShape) -> None:
    """Raises `InvalidRequest` naming the first field with an impossible value. Lengths against the pool and the context
    are the scheduler's to judge."""
    if not 1 <= request.n <= MAX_N:
        raise InvalidRequest(f"n must be from 1 to {MAX_N}, not {request.n}", param="n")
    if not 0 <= request.first_index <= MAX_N - request.n:
        raise InvalidRequest(f"first_index must be from 0 to {MAX_N - request.n}", param="first_index")
    if not request.prompt_ids:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    _check_ids("prompt", request.prompt_ids, shape.vocab_size)
    _check_ids("prior_output_ids", request.prior_output_ids, shape.vocab_size)
    if request.prior_output_ids and request.n != 1:
        raise InvalidRequest("a continued request can't have n > 1", param="n")
    _check_sampling(request.sampling, shape)
    if len(request.prior_output_ids) >= request.sampling.max_tokens:
        raise InvalidRequest("the continued output has max_tokens already", param="max_tokens")


def _check_sampling(sampling: SamplingParams, shape: ModelShape) -> None:
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {sampling.max_tokens}", param="max_tokens")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidRequest(f"min_tokens must be from 0 to max_tokens, not {sampling.min_tokens}", param="min_tokens")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequest("temperature must be a finite number from 0 up", param="temperature")
    if not 0 <= sampling.top_p <= 1:
        raise InvalidRequest("top_p must be from 0 to 1", param="top_p")
    if sampling.top_k < 0:
        raise InvalidRequest("top_k must be 0 (off) or more", param="top_k")
    if sampling.seed is not None and not -(2 ** (_SEED_BITS - 1)) <= sampling.seed < 2**_SEED_BITS:
        raise InvalidRequest(f"seed must fit in {_SEED_BITS} bits", param="seed")
    if "" in sampling.stop:
        raise InvalidRequest("a stop string can't be empty", param="stop")
    _check_ids("stop_token_ids", sampling.stop_token_ids, shape.vocab_size)


def _check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InvalidRequest(f"{param} has a token id outside 0 to {vocab_size - 1}", param=param)
