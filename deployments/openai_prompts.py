"""From a checked OpenAI request to requests for replicas: one for each prompt, tokenized and with all limits applied.

Encoding takes milliseconds to seconds: call these in a thread, not on the event loop.

Every request leaves here with a seed, drawn from `random_seed` where the client names none: whoever holds the request
can then have any of its answers continued by another replica.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from deployments.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    Prompt,
    check_token_ids,
    to_sampling,
)
from replica.errors import InvalidRequest
from replica.model_card import ModelCard
from replica.request import GenerationRequest
from replica.text.chat_encoding import ChatEncoder
from replica.text.prompt_length import refuse_hopeless
from replica.text.tokenizer import Tokenizer


def draw_seed() -> int:
    """63 random bits."""
    return secrets.randbits(63)


def chat_requests(
    request: ChatCompletionRequest,
    *,
    request_id: str,
    encoder: ChatEncoder | None,
    card: ModelCard,
    max_model_len: int,
    lease: str | None = None,
    random_seed: Callable[[], int] = draw_seed,
) -> list[GenerationRequest]:
    """A list of one. `encoder` None: the model has no chat template. Raises `InvalidRequest` and `PromptTooLong`."""
    if encoder is None:
        raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
    messages = [message.for_template() for message in request.messages]
    ids = encoder.encode_chat(messages, max_model_len=max_model_len)
    return [_generation(request, request_id, ids, card, max_model_len, lease, random_seed)]


def completion_requests(
    request: CompletionRequest,
    *,
    request_id: str,
    tokenizer: Tokenizer,
    card: ModelCard,
    max_model_len: int,
    lease: str | None = None,
    random_seed: Callable[[], int] = draw_seed,
) -> list[GenerationRequest]:
    """One a prompt, in their order. Raises `InvalidRequest` and `PromptTooLong`."""
    alone = len(request.prompt) == 1
    return [
        _generation(
            request,
            request_id if alone else f"{request_id}-{number}",
            _prompt_ids(prompt, tokenizer, card, max_model_len),
            card,
            max_model_len,
            lease,
            random_seed,
        )
        for number, prompt in enumerate(request.prompt)
    ]


def num_sequences(request: ChatCompletionRequest | CompletionRequest) -> int:
    """How many sequences the request asks for, all its prompts together."""
    return request.n * (len(request.prompt) if isinstance(request, CompletionRequest) else 1)


def _prompt_ids(prompt: Prompt, tokenizer: Tokenizer, card: ModelCard, max_model_len: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        refuse_hopeless(tokenizer, prompt, max_model_len, "prompt")
        return tokenizer.encode(prompt, add_special_tokens=True)
    check_token_ids(prompt, card, "prompt")
    return prompt


def _generation(
    request: GenerationFields,
    request_id: str,
    prompt_ids: tuple[int, ...],
    card: ModelCard,
    max_model_len: int,
    lease: str | None,
    random_seed: Callable[[], int],
) -> GenerationRequest:
    sampling = to_sampling(request, card, len(prompt_ids), max_model_len)
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=sampling if sampling.seed is not None else replace(sampling, seed=random_seed()),
        n=request.n,
        priority=request.priority,
        cache_salt=request.cache_salt,
        lease=lease,
        session=request.prompt_cache_key or "",
    )
