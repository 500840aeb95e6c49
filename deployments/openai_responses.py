"""OpenAI's answer objects, as plain dicts: chat completions, legacy completions, their chunks, usage, models, errors.

Pure shapes: ids and times are passed in. Beyond OpenAI's fields a choice has vLLM's `stop_reason`: the stop string or
token id that ended it, null for the model's own end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replica.request import FinishReason

StopReason = str | int | None

# Legal inside JSON, but clients that read event streams by Unicode's lines would break there.
_LINE_BREAKS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


@dataclass(frozen=True, slots=True)
class Answer:
    """What all parts of one answer share. `prompt_tokens`: the length of each prompt; each has `n` choices, choice k
    of prompt p is number p * n + k. `include_usage`: a stream ends with a usage chunk."""

    id: str
    created: int
    model: str
    n: int
    prompt_tokens: tuple[int, ...]
    include_usage: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompt_tokens) * self.n


@dataclass(slots=True)
class Choice:
    """One choice so far. `num_cached_tokens` belongs to its prompt."""

    text: str = ""
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None


def usage(answer: Answer, choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts: each prompt once whatever n is, generated tokens of all choices (those not shown included)."""
    completion = sum(choice.num_output_tokens for choice in choices)
    prompt = sum(answer.prompt_tokens)
    groups = [choices[first : first + answer.n] for first in range(0, len(choices), answer.n)]
    cached = sum(max(choice.num_cached_tokens for choice in group) for group in groups)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_completion(answer: Answer, choices: Sequence[Choice]) -> dict[str, Any]:
    listed = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None,
            **_end(choice.finish_reason, choice.stop_reason),
        }
        for index, choice in enumerate(choices)
    ]
    return {**_head(answer, "chat.completion"), "choices": listed, "usage": usage(answer, choices)}


def chat_chunk(
    answer: Answer, index: int, delta: dict[str, str], finish_reason: FinishReason | None, stop_reason: StopReason
) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, **_end(finish_reason, stop_reason)}
    return {**_head(answer, "chat.completion.chunk"), "choices": [choice], **_no_usage_yet(answer)}


def text_completion(answer: Answer, choices: Sequence[Choice]) -> dict[str, Any]:
    listed = [_text_choice(index, c.text, c.finish_reason, c.stop_reason) for index, c in enumerate(choices)]
    return {**_head(answer, "text_completion"), "choices": listed, "usage": usage(answer, choices)}


def text_chunk(
    answer: Answer, index: int, text: str, finish_reason: FinishReason | None, stop_reason: StopReason
) -> dict[str, Any]:
    choice = _text_choice(index, text, finish_reason, stop_reason)
    return {**_head(answer, "text_completion"), "choices": [choice], **_no_usage_yet(answer)}


def usage_chunk(answer: Answer, kind: str, choices: Sequence[Choice]) -> dict[str, Any]:
    """The extra chunk of `stream_options.include_usage`; `kind` is the other chunks' `object`."""
    return {**_head(answer, kind), "choices": [], "usage": usage(answer, choices)}


def model_card(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "brimful",
        "max_model_len": max_model_len,
    }


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(cards)}


def error(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def to_json(document: dict[str, Any]) -> bytes:
    """Compact UTF-8 on one line; always valid, whatever characters a string holds."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escape in _LINE_BREAKS:
        text = text.replace(character, escape)
    return text.encode("utf-8", "replace")


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _end(finish_reason: FinishReason | None, stop_reason: StopReason) -> dict[str, Any]:
    return {"finish_reason": finish_reason and str(finish_reason), "stop_reason": stop_reason}


def _text_choice(index: int, text: str, finish_reason: FinishReason | None, stop_reason: StopReason) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, **_end(finish_reason, stop_reason)}


def _no_usage_yet(answer: Answer) -> dict[str, None]:
    """OpenAI's chunks carry a null usage when the usage chunk was asked for."""
    return {"usage": None} if answer.include_usage else {}
