"""The detokenizer's promises on inputs chosen by hand; the properties are under tests/property/text."""

from __future__ import annotations

import pytest

from replica.text.detokenizer import Detokenizer
from replica.text.tokenizer import Tokenizer
from tests.tokenizer_families import FAMILIES, TURN_END, byte_fallback, byte_ids, byte_level

EMOJI = "🌶"


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return FAMILIES[request.param]()


def test_a_character_split_over_tokens_comes_whole_with_its_last_byte(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ())
    assert [detokenizer.feed([i]) for i in byte_ids(tokenizer, EMOJI.encode())] == ["", "", "", EMOJI]
    assert detokenizer.flush() == ""


def test_flush_shows_an_incomplete_end_once(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ())
    assert detokenizer.feed(byte_ids(tokenizer, b"a" + EMOJI.encode()[:3])) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_text_are_sent_as_they_come_and_the_window_stays_small(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ())
    ids = byte_ids(tokenizer, b"\xff" * 1000)
    pieces = [detokenizer.feed([i]) for i in ids]
    assert pieces == ["", *["\ufffd"] * 999]
    assert detokenizer.flush() == "\ufffd"
    assert len(detokenizer._window) <= 16


def test_a_valid_character_survives_the_stray_byte_after_it(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, EMOJI.encode() + b"\xf0")
    assert tokenizer.decode(ids, True) == EMOJI + "\ufffd"


def test_a_prompt_that_ends_within_a_character_is_not_replayed(tokenizer: Tokenizer) -> None:
    prompt = list(tokenizer.encode("hello ", False)) + byte_ids(tokenizer, EMOJI.encode()[:2])
    detokenizer = Detokenizer(tokenizer, prompt)
    rest = byte_ids(tokenizer, EMOJI.encode()[2:])
    assert [detokenizer.feed([i]) for i in rest] == ["", EMOJI]


def test_what_the_prompt_left_broken_stays_the_prompts(tokenizer: Tokenizer) -> None:
    prompt = byte_ids(tokenizer, b"a" + EMOJI.encode()[:2])
    detokenizer = Detokenizer(tokenizer, prompt)
    assert detokenizer.feed(byte_ids(tokenizer, b"bc")) == "bc"
    assert Detokenizer(tokenizer, prompt).flush() == ""


def test_the_first_word_keeps_its_space_after_a_prompt_and_has_none_without() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("hello world", False)
    assert Detokenizer(tokenizer, tokenizer.encode("hello", True)).feed(ids) == " hello world"
    assert Detokenizer(tokenizer, tokenizer.encode("", True)).feed(ids) == "hello world"


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(f"hello{TURN_END}", False)
    assert Detokenizer(tokenizer, (), True).feed(ids) == "hello"
    assert Detokenizer(tokenizer, (), False).feed(ids) == f"hello{TURN_END}"


def test_ids_outside_the_vocabulary_have_no_text_and_do_not_push_out_the_context() -> None:
    tokenizer = byte_fallback()
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("hello", True))
    assert detokenizer.feed([-1, 2**31, tokenizer.vocab_size] * 20) == ""
    assert detokenizer.feed(tokenizer.encode("world", False)) == " world"
