"""What clients may ask, field by field: OpenAI's chat and legacy completions, and vLLM's names for the rest.

Every field is one of three: supported (below), accepted because ignoring it changes no answer (`_Harmless`), or
refused by its name while it asks for something (`openai_unsupported.py`). Types are strict: true is no number, 1.0 no
integer, "8" neither. Numbers must be finite. All errors are `InvalidRequest` with the field as `param`.

Policies, where servers differ:
- `max_tokens` (or `max_completion_tokens`; null is the same as absent) is a cap: absent it fills the context, and one
  beyond the context is cut to it. A prompt that leaves no room for one token is refused.
- `temperature` 0 is greedy; `top_p` 0 is refused; `top_k` -1, 0 or beyond the vocabulary is off.
- `prompt_cache_key` names requests that belong together, such as a conversation's, for the router: it changes where
  they are answered, as far as the policy goes by sessions, and no answer.
- `ignore_eos` ignores the model's own ends, not the stops that the request names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, from_json

from deployments.field_ranges import number_range
from deployments.openai_messages import ChatMessage
from deployments.openai_unsupported import CHAT, COMPLETION, without_unsupported
from replica.errors import InvalidRequest
from replica.model_card import ModelCard
from replica.request import SamplingParams
from replica.text.prompt_length import prompt_too_long

MAX_N = 16
MAX_CHOICES = 512
MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
_MAX_INT32 = 2**31 - 1
_MAX_NAME_CHARS = 100

Prompt = str | tuple[int, ...]
Tokens = Annotated[int, Field(ge=1, le=_MAX_INT32)]
ShortText = Annotated[str, Field(max_length=512)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Part):
    """`include_usage`: one more chunk with the usage before the end."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class _Harmless(_Part):
    """Accepted and without effect: who asks, notes to oneself, hints to OpenAI's own machines. We store nothing."""

    user: ShortText | None = None
    metadata: dict[ShortText, ShortText] | None = Field(None, max_length=16)
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_retention: ShortText | None = None


class GenerationFields(_Harmless):
    """What both endpoints share. None: the client said nothing (or null)."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKEN_IDS), FailFast()] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT32)] = 0
    skip_special_tokens: bool = True
    priority: Annotated[int, Field(ge=-(2**31), le=_MAX_INT32)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    prompt_cache_key: ShortText | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if value is not None}

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, stop: object) -> tuple[str, ...]:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
            raise ValueError("must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"has {len(stops)} strings, at most {MAX_STOPS} are possible")
        if not all(1 <= len(item) <= MAX_STOP_CHARS for item in stops):
            raise ValueError(f"every string must have 1 to {MAX_STOP_CHARS} characters")
        return tuple(stops)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only possible with stream: true", param="stream_options")
        if self.max_output_tokens is not None and self.min_tokens > self.max_output_tokens:
            text = f"min_tokens {self.min_tokens} is more than max_tokens {self.max_output_tokens}"
            raise InvalidRequest(text, param="min_tokens")
        return self

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatCompletionRequest(GenerationFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_completion_tokens: Tokens | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_one_maximum(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            text = "max_tokens and max_completion_tokens are two names of one limit and differ"
            raise InvalidRequest(text, param="max_completion_tokens")
        return self

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationFields):
    """`POST /v1/completions`. `prompt` becomes a tuple of texts or of token-id tuples, whichever form it came in."""

    prompt: tuple[Prompt, ...]
    best_of: int | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _check_prompt(cls, prompt: object) -> tuple[Prompt, ...]:
        if isinstance(prompt, str):
            return (prompt,)
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
        if all(isinstance(item, str) for item in prompt):
            return tuple(prompt)
        if _are_ids(prompt):
            return (tuple(prompt),)
        if all(isinstance(item, list) and _are_ids(item) for item in prompt):
            return tuple(tuple(item) for item in prompt)
        raise ValueError("a list must hold only strings, only token ids (integers from 0), or only lists of token ids")

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if self.best_of not in (None, self.n):
            raise InvalidRequest("best_of other than n is not supported yet", param="best_of")
        if len(self.prompt) * self.n > MAX_CHOICES:
            text = f"{len(self.prompt)} prompts with n = {self.n} make more than {MAX_CHOICES} choices"
            raise InvalidRequest(text, param="prompt")
        return self


def parse_chat(body: bytes) -> ChatCompletionRequest:
    """Raises `InvalidRequest`."""
    return _validate(ChatCompletionRequest, without_unsupported(_json_object(body), CHAT))


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises `InvalidRequest`."""
    return _validate(CompletionRequest, without_unsupported(_json_object(body), COMPLETION))


def parse_either(body: bytes) -> ChatCompletionRequest | CompletionRequest:
    """A chat or a completion, as `messages` or `prompt` tells. Raises `InvalidRequest`."""
    fields = _json_object(body)
    is_chat, is_completion = fields.get("messages") is not None, fields.get("prompt") is not None
    if is_chat and is_completion:
        raise InvalidRequest("messages and prompt can't be given both", param="prompt")
    if is_chat:
        return _validate(ChatCompletionRequest, without_unsupported(fields, CHAT))
    if is_completion:
        return _validate(CompletionRequest, without_unsupported(fields, COMPLETION))
    raise InvalidRequest("messages or prompt is required", param="messages")


def to_sampling(
    request: GenerationFields, card: ModelCard, num_prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """Sampling for one prompt of `request`: the model's own defaults where it says nothing, cut to the context.

    Raises `PromptTooLong` when the prompt leaves no room, `InvalidRequest` for ids outside the vocabulary and for a
    `min_tokens` that the room can't hold.
    """
    prompt_field = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    if num_prompt_tokens < 1:
        raise InvalidRequest("the prompt has no tokens", param=prompt_field)
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise prompt_too_long(num_prompt_tokens, max_model_len, prompt_field)
    if request.min_tokens > room:
        text = f"min_tokens {request.min_tokens} is more than the {room} tokens that the prompt leaves of the context"
        raise InvalidRequest(text, param="min_tokens")
    check_token_ids(request.stop_token_ids, card, "stop_token_ids")
    top_k = card.default_top_k if request.top_k is None else request.top_k
    return SamplingParams(
        max_tokens=min(request.max_output_tokens or room, room),
        temperature=card.default_temperature if request.temperature is None else request.temperature,
        top_k=top_k if 0 < top_k < card.vocab_size else 0,
        top_p=card.default_top_p if request.top_p is None else request.top_p,
        seed=request.seed,
        min_tokens=request.min_tokens,
        stop=request.stop,
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids)),
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
    )


def check_token_ids(ids: list[int] | tuple[int, ...], card: ModelCard, param: str) -> None:
    """Raises `InvalidRequest` naming the first id that the model doesn't have."""
    if ids and not (min(ids) >= 0 and max(ids) < card.vocab_size):
        wrong = next(i for i in ids if not 0 <= i < card.vocab_size)
        text = f"{param} contains {_shown(wrong)}, but token ids of this model go from 0 to {card.vocab_size - 1}"
        raise InvalidRequest(text, param=param)


_Request = TypeVar("_Request", bound=GenerationFields)


def _validate(kind: type[_Request], fields: Mapping[str, Any]) -> _Request:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False, include_input=False)[0]) from None


def _refusal(model: type[BaseModel], first: ErrorDetails) -> InvalidRequest:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    param = _shown(path)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{param} is not a known field", param=param)
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param=param)
    message = "must be an object" if first["type"] == "model_type" else first["msg"].removeprefix("Value error, ")
    message = number_range(model, path, first["type"]) or message
    if first["type"] == "too_short":
        message = "must not be empty"
    return InvalidRequest(f"{param}: {message}", param=param or None)


def _json_object(body: bytes) -> dict[str, Any]:
    """Strict JSON: no lone surrogates, bounded nesting and numbers. Of equal keys the last counts. NaN and Infinity
    pass here, because their field's own check can name the field."""
    try:
        fields = from_json(body, allow_inf_nan=True)
    except ValueError as error:
        raise InvalidRequest(f"the request body isn't valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return fields


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in items)


def _shown(value: object) -> str:
    """A client's own name or number, short enough for an error message."""
    text = str(value) if not isinstance(value, int) or abs(value) < 2**64 else "a huge number"
    return text if len(text) <= _MAX_NAME_CHARS else text[:_MAX_NAME_CHARS] + "..."
