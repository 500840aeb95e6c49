"""Requests as clients would send them, through the real parsers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.openai_schema import ChatCompletionRequest, CompletionRequest, parse_chat, parse_completion
from replica.errors import InvalidRequest

USER = {"role": "user", "content": "hello"}
CONTEXT = 100
VOCAB = 50


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "hello", **fields}).encode())


def refused(field: str | None, **fields: Any) -> str:
    """Both endpoints refuse these fields, naming `field`; the chat's message."""
    messages = []
    for parse in (chat, completion):
        with pytest.raises(InvalidRequest) as error:
            parse(**fields)
        assert error.value.param == field
        assert len(error.value.message) < 500
        messages.append(error.value.message)
    return messages[0]
