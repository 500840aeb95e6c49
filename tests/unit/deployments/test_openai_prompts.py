from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.openai_prompts import chat_requests, completion_requests
from deployments.openai_schema import parse_chat, parse_completion
from replica.errors import InvalidRequest, PromptTooLong
from replica.request import GenerationRequest
from replica.text.chat_encoding import ChatEncoder
from replica.text.chat_template import ChatTemplate
from tests.tokenizer_families import CHAT_TEMPLATE, byte_level, card

TOKENIZER = byte_level()
CARD = card(TOKENIZER.vocab_size)
CONTEXT = 200


def chat(content: object, source: str | None = CHAT_TEMPLATE, **fields: Any) -> list[GenerationRequest]:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    encoder = ChatEncoder(TOKENIZER, ChatTemplate(source, {})) if source is not None else None
    parsed = parse_chat(json.dumps(body).encode())
    return chat_requests(parsed, request_id="r", encoder=encoder, card=CARD, max_model_len=CONTEXT, lease="l")


def complete(prompt: object, **fields: Any) -> list[GenerationRequest]:
    parsed = parse_completion(json.dumps({"model": "m", "prompt": prompt, **fields}).encode())
    return completion_requests(parsed, request_id="r", tokenizer=TOKENIZER, card=CARD, max_model_len=CONTEXT)


def test_a_chat_becomes_one_request_with_all_that_was_asked() -> None:
    (request,) = chat("hello", n=2, priority=-1, cache_salt="s", max_tokens=5)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt_ids == TOKENIZER.encode(text, False)
    assert (request.request_id, request.n, request.priority, request.cache_salt) == ("r", 2, -1, "s")
    assert (request.lease, request.sampling.max_tokens, request.session) == ("l", 5, "")


def test_a_prompt_cache_key_names_the_session_of_every_prompt() -> None:
    assert [request.session for request in complete(["a", "b"], prompt_cache_key="talk")] == ["talk", "talk"]
    assert chat("hello", prompt_cache_key="talk")[0].session == "talk"


def test_every_request_leaves_with_a_seed_and_each_prompt_with_its_own() -> None:
    seeds = iter(range(100, 110))
    parsed = parse_completion(json.dumps({"model": "m", "prompt": ["a", "b"], "n": 2}).encode())
    made = completion_requests(
        parsed,
        request_id="r",
        tokenizer=TOKENIZER,
        card=CARD,
        max_model_len=CONTEXT,
        random_seed=lambda: next(seeds),
    )
    assert [request.sampling.seed for request in made] == [100, 101]
    drawn = [chat("hello")[0].sampling.seed for _ in range(2)]
    assert drawn[0] != drawn[1] and all(seed is not None and 0 <= seed < 2**63 for seed in drawn)


def test_the_client_s_seed_is_kept() -> None:
    assert [request.sampling.seed for request in complete(["a", "b"], seed=0)] == [0, 0]
    assert chat("hello", seed=-7)[0].sampling.seed == -7


def test_parts_and_string_give_the_same_tokens() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert chat(parts)[0].prompt_ids == chat("hello")[0].prompt_ids


def test_prompts_in_any_form_become_one_request_each() -> None:
    ids = list(TOKENIZER.encode("hello world", True))
    assert [request.prompt_ids for request in complete(["hello world", "a"])] == [
        tuple(ids),
        TOKENIZER.encode("a", True),
    ]
    assert [request.prompt_ids for request in complete(ids)] == [tuple(ids)]
    assert [request.request_id for request in complete([ids, [1]])] == ["r-0", "r-1"]
    assert [request.request_id for request in complete(ids)] == ["r"]


@pytest.mark.parametrize("wrong", [TOKENIZER.vocab_size, 2**31, 2**63])
def test_prompt_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    for prompt in ([1, wrong], [[1], [wrong]]):
        with pytest.raises(InvalidRequest) as error:
            complete(prompt)
        assert error.value.param == "prompt"


def test_a_model_without_template_refuses_chat() -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as error:
        chat("hello", None)
    assert error.value.param == "messages"


def test_prompts_that_do_not_fit_are_refused_with_limit_and_length() -> None:
    with pytest.raises(PromptTooLong, match=f"{CONTEXT} tokens .* has 201 tokens"):
        complete([1] * 201)
    assert complete([1] * (CONTEXT - 1))[0].sampling.max_tokens == 1


def test_absurd_lengths_are_refused_without_encoding() -> None:
    with pytest.raises(PromptTooLong, match="at least") as error:
        complete("hello " * 100_000)
    assert error.value.param == "prompt"
    for content in ("hello " * 100_000, "<|im_end|>hello " * 100_000):
        with pytest.raises(PromptTooLong, match="at least") as error:
            chat(content)
        assert error.value.param == "messages"


@pytest.mark.parametrize("prompt", ["", [[]], ["a", ""]])
def test_empty_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest, match="no tokens") as error:
        complete(prompt)
    assert error.value.param == "prompt"


def test_what_a_template_refuses_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequest, match="System role not supported") as error:
        chat("hello", "{{ raise_exception('System role not supported') }}")
    assert error.value.param == "messages"
