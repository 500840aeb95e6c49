"""From a checked request to sampling: the model's defaults, the context, the vocabulary."""

from __future__ import annotations

import pytest

from deployments.openai_schema import to_sampling
from replica.errors import InvalidRequest, PromptTooLong
from tests.tokenizer_families import card
from tests.unit.deployments.openai_bodies import CONTEXT, VOCAB, chat, completion, refused


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "expected"),
    [
        (CONTEXT - 2, None, 2),
        (CONTEXT - 2, 1, 1),
        (CONTEXT - 2, 2, 2),
        (CONTEXT - 2, CONTEXT, 2),
        (CONTEXT - 2, 10 * CONTEXT, 2),
        (CONTEXT - 1, None, 1),
        (CONTEXT - 1, 1, 1),
        (CONTEXT - 1, 2, 1),
        (CONTEXT - 1, CONTEXT, 1),
        (CONTEXT - 1, 10 * CONTEXT, 1),
        *((length, cap, None) for length in (CONTEXT, CONTEXT + 1) for cap in (None, 1, 2, CONTEXT, 10 * CONTEXT)),
    ],
)
def test_max_tokens_is_a_cap_cut_to_the_context(
    prompt_tokens: int, max_tokens: int | None, expected: int | None
) -> None:
    for request, field in ((chat(max_tokens=max_tokens), "messages"), (completion(max_tokens=max_tokens), "prompt")):
        if expected is not None:
            assert to_sampling(request, card(VOCAB), prompt_tokens, CONTEXT).max_tokens == expected
            continue
        with pytest.raises(PromptTooLong) as error:
            to_sampling(request, card(VOCAB), prompt_tokens, CONTEXT)
        assert error.value.param == field
        assert f" {CONTEXT} tokens" in error.value.message
        assert f" {prompt_tokens} tokens" in error.value.message


def test_the_models_defaults_fill_what_the_request_leaves_open() -> None:
    sampling = to_sampling(chat(), card(VOCAB), 10, CONTEXT)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 40, None)
    own = to_sampling(chat(temperature=0, top_p=1, top_k=-1, seed=7), card(VOCAB), 10, CONTEXT)
    assert (own.temperature, own.top_p, own.top_k, own.seed) == (0, 1, 0, 7)


@pytest.mark.parametrize(
    ("top_k", "expected"), [(-1, 0), (0, 0), (1, 1), (VOCAB - 1, VOCAB - 1), (VOCAB, 0), (VOCAB + 1, 0)]
)
def test_top_k_is_off_from_the_vocabulary_on(top_k: int, expected: int) -> None:
    assert to_sampling(chat(top_k=top_k), card(VOCAB), 1, CONTEXT).top_k == expected


@pytest.mark.parametrize("wrong", [VOCAB, VOCAB + 1, 2**31, 2**63, 10**400])
def test_stop_token_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    request = chat(stop_token_ids=[VOCAB - 1, wrong])
    with pytest.raises(InvalidRequest, match=f"from 0 to {VOCAB - 1}") as error:
        to_sampling(request, card(VOCAB), 1, CONTEXT)
    assert error.value.param == "stop_token_ids"


def test_stop_token_ids_are_bounded() -> None:
    assert to_sampling(chat(stop_token_ids=[1, 2, 1] * 42), card(VOCAB), 1, CONTEXT).stop_token_ids == (1, 2)
    assert refused("stop_token_ids[0]", stop_token_ids=[-1])
    assert refused("stop_token_ids[0]", stop_token_ids=["1"])
    for too_many in (129, 1024, 100_000):
        assert refused("stop_token_ids", stop_token_ids=[1] * too_many)


def test_everything_asked_for_reaches_the_sampling() -> None:
    request = chat(stop=["a", "b"], min_tokens=3, ignore_eos=True, skip_special_tokens=False, max_tokens=9)
    sampling = to_sampling(request, card(VOCAB), 10, CONTEXT)
    assert (sampling.stop, sampling.min_tokens, sampling.ignore_eos) == (("a", "b"), 3, True)
    assert (sampling.skip_special_tokens, sampling.max_tokens) == (False, 9)


def test_min_tokens_beyond_the_room_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="90 tokens") as error:
        to_sampling(chat(min_tokens=91), card(VOCAB), 10, CONTEXT)
    assert error.value.param == "min_tokens"


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        to_sampling(completion(prompt=""), card(VOCAB), 0, CONTEXT)
