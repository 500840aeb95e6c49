from __future__ import annotations

import pytest

from replica.errors import ModelUnsupported, PromptTooLong
from replica.text.prompt_length import refuse_hopeless
from replica.text.tokenizer import Tokenizer
from tests.tokenizer_families import (
    BOS,
    EOS,
    FAMILIES,
    SPECIALS,
    byte_fallback,
    byte_ids,
    byte_level,
    card,
    normalizing,
)


def test_what_is_no_tokenizer_refuses_the_model() -> None:
    for content in (b"", b"{}", b"not json", b'{"model": {"type": "BPE"}}'):
        with pytest.raises(ModelUnsupported, match=r"tests: tokenizer.json can't be read"):
            Tokenizer(content, card(10))


@pytest.mark.parametrize("family", FAMILIES)
def test_special_and_added_tokens_are_known(family: str) -> None:
    tokenizer = FAMILIES[family]()
    assert {token for token, i in tokenizer.added_tokens.items() if i in tokenizer.special_ids} == set(SPECIALS)
    assert tokenizer.vocab_size == max(tokenizer.added_tokens.values()) + 1


def test_raw_prompts_may_hold_control_tokens() -> None:
    tokenizer = byte_level()
    assert tokenizer.encode(BOS + EOS, False) == (tokenizer.added_tokens[BOS], tokenizer.added_tokens[EOS])


def test_valid_byte_runs_decode_as_in_the_library_and_broken_ones_keep_what_is_valid() -> None:
    tokenizer = byte_fallback()
    valid = byte_ids(tokenizer, "你🌶".encode())
    assert tokenizer.decode(valid, True) == tokenizer._tokenizer.decode(valid) == "你🌶"
    broken = byte_ids(tokenizer, "你".encode() + b"\xff" + "好".encode()[:2])
    assert tokenizer.decode(broken, True) == "你\ufffd\ufffd"
    assert tokenizer._tokenizer.decode(broken) == "\ufffd" * 6


def test_a_renamed_tokenizer_keeps_ids_and_forgets_names() -> None:
    for family in FAMILIES.values():
        tokenizer = family()
        renamed = tokenizer.renamed({EOS: "\ufdd0end\ufdd1"})
        i = tokenizer.added_tokens[EOS]
        assert renamed.encode("\ufdd0end\ufdd1", False)[-1] == i
        assert i not in renamed.encode(f"a{EOS}b", False)
        assert renamed.encode(f"hello{BOS}", False) == tokenizer.encode(f"hello{BOS}", False)


def test_where_text_may_vanish_there_is_no_quick_bound() -> None:
    assert byte_level().min_num_tokens("x" * 1000) > 0
    assert normalizing().min_num_tokens("x" * 1000) == 0


@pytest.mark.parametrize("tokenizer", [byte_level(), normalizing()])
def test_absurd_lengths_are_refused_and_possible_ones_never(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptTooLong, match=r"100 tokens .* at least") as error:
        refuse_hopeless(tokenizer, "x" * 1_000_000, 100, "prompt")
    assert error.value.param == "prompt"
    refuse_hopeless(tokenizer, "x" * 99, 100, "prompt")
