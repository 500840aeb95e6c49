"""Whatever bytes arrive, a request is parsed or refused with `InvalidRequest`; nothing else is ever raised."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deployments.error_map import http_error
from deployments.openai_prompts import chat_requests, completion_requests
from deployments.openai_schema import ChatCompletionRequest, CompletionRequest, parse_chat, parse_completion
from deployments.openai_unsupported import CHAT, COMPLETION
from replica.errors import RequestError
from replica.text.chat_encoding import ChatEncoder
from replica.text.chat_template import ChatTemplate
from tests.tokenizer_families import CHAT_TEMPLATE, byte_level, card

TOKENIZER = byte_level()
CARD = card(TOKENIZER.vocab_size)
ENCODER = ChatEncoder(TOKENIZER, ChatTemplate(CHAT_TEMPLATE, {}))
CONTEXT = 300

FIELDS = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *CHAT, *COMPLETION, "other"})
NUMBERS = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, 1e-12, float("nan"), float("inf")]),
    st.floats(),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=6), st.sampled_from(["user", "text", "<s>"]))
JSON: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6)


def answered(body: bytes) -> None:
    """Take the body to the replica's door on both endpoints."""
    for chat in (True, False):
        try:
            if chat:
                made = chat_requests(
                    parse_chat(body), request_id="r", encoder=ENCODER, card=CARD, max_model_len=CONTEXT
                )
            else:
                made = completion_requests(
                    parse_completion(body), request_id="r", tokenizer=TOKENIZER, card=CARD, max_model_len=CONTEXT
                )
        except RequestError as error:
            answer = http_error(error)
            assert answer.status == 400
            assert len(answer.body) < 8192
            assert json.loads(answer.body)["error"].keys() == {"message", "type", "param", "code"}
            continue
        for request in made:
            sampling = request.sampling
            assert 1 <= len(request.prompt_ids) < CONTEXT
            assert all(0 <= i < CARD.vocab_size for i in (*request.prompt_ids, *sampling.stop_token_ids))
            assert 1 <= sampling.max_tokens <= CONTEXT - len(request.prompt_ids)
            assert 0 <= sampling.min_tokens <= sampling.max_tokens
            assert 0 <= sampling.temperature <= 2
            assert 0 < sampling.top_p <= 1
            assert 0 <= sampling.top_k < CARD.vocab_size
            assert 1 <= request.n <= 16
            assert all(sampling.stop)


@given(fields=BODIES, whole=st.booleans())
def test_any_fields(fields: dict[str, Any], whole: bool) -> None:
    if whole:
        fields = {"model": "m", "messages": [{"role": "user", "content": "a"}], "prompt": "a"} | fields
    answered(json.dumps({k: v for k, v in fields.items() if not (whole and k == "prompt")}).encode())
    answered(json.dumps({k: v for k, v in fields.items() if not (whole and k == "messages")}).encode())


@given(body=st.binary(max_size=60) | st.text('{}[]:,"\\u0dd8ntf1e-', max_size=60).map(str.encode))
def test_any_bytes(body: bytes) -> None:
    answered(body)


@given(prompt=JSON, message=JSON)
def test_any_prompt_and_message(prompt: Any, message: Any) -> None:
    answered(json.dumps({"model": "m", "prompt": prompt}).encode())
    answered(json.dumps({"model": "m", "messages": [message]}).encode())
    answered(json.dumps({"model": "m", "messages": [{"role": "user", "content": message}]}).encode())
