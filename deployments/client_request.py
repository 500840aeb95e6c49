"""What a client asks of a model, from the body's bytes to requests for replicas: for every endpoint that takes prompts.

Nothing here sends anything. What takes long is done in threads, so that no stream of this process waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from deployments import openai_prompts
from deployments.openai_schema import ChatCompletionRequest, CompletionRequest
from deployments.served_model import ServedModel
from replica.errors import InvalidRequest, UnknownModel
from replica.request import GenerationRequest

Parsed = ChatCompletionRequest | CompletionRequest

MAX_PARSED_INLINE_BYTES = 2**16


async def parsed_body(parse: Callable[[bytes], Parsed], body: bytes, threads: Executor) -> Parsed:
    """What `parse`, one of `openai_schema`, makes of the body. A large one is parsed in a thread."""
    if len(body) <= MAX_PARSED_INLINE_BYTES:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(threads, parse, body)


def find_model(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    """Raises `UnknownModel`. What the client wrote is cut: it goes into the error message."""
    if name not in models:
        raise UnknownModel(f"the model {name[:200]!r} isn't served here; served: {', '.join(models)}", param="model")
    return models[name]


def asked_model(models: Mapping[str, ServedModel], parsed: Parsed) -> ServedModel:
    """The model that the request names. Raises `UnknownModel`, and `InvalidRequest` for a priority that would change
    nothing: nothing that a client asks for is silently ignored."""
    model = find_model(models, parsed.model)
    if parsed.priority and model.bounds.policy != "priority":
        raise InvalidRequest("this model serves in order of arrival and knows no priority", param="priority")
    return model


async def tokenized(
    model: ServedModel, parsed: Parsed, request_id: str, threads: Executor, lease: str | None = None
) -> list[GenerationRequest]:
    """One request a prompt. In a thread, because a long prompt takes long. Raises `Unavailable` while the model
    loads."""
    return await asyncio.get_running_loop().run_in_executor(threads, _requests, model, parsed, request_id, lease)


def _requests(model: ServedModel, parsed: Parsed, request_id: str, lease: str | None) -> list[GenerationRequest]:
    text = model.text()
    if isinstance(parsed, ChatCompletionRequest):
        return openai_prompts.chat_requests(
            parsed,
            request_id=request_id,
            encoder=text.chat,
            card=text.card,
            max_model_len=text.shape.max_model_len,
            lease=lease,
        )
    return openai_prompts.completion_requests(
        parsed,
        request_id=request_id,
        tokenizer=text.tokenizer,
        card=text.card,
        max_model_len=text.shape.max_model_len,
        lease=lease,
    )
