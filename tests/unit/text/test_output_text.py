from __future__ import annotations

from replica.request import FinishReason, SamplingParams
from replica.text.output_text import OutputText, TextUpdate
from tests.tokenizer_families import EOS, byte_level

TOKENIZER = byte_level()


def ids(text: str) -> list[int]:
    """One token for each (ASCII) character."""
    return [i for char in text for i in TOKENIZER.encode(char, False)]


def output(prompt: str = "", prior: str = "", **sampling: object) -> OutputText:
    params = SamplingParams(max_tokens=100, **sampling)  # type: ignore[arg-type]
    return OutputText(TOKENIZER, ids(prompt), params, ids(prior))


def test_a_stop_string_ends_the_sequence_at_the_token_that_completes_it() -> None:
    assert output(stop=("cd",)).feed(ids("abcdef")) == TextUpdate("ab", 4, "cd")


def test_a_stop_in_the_prompt_does_not_fire_nor_one_that_begins_there() -> None:
    assert output("xcd", stop=("cd", "da")).feed(ids("ab")) == TextUpdate("ab", 2)


def test_text_held_for_a_stop_comes_with_the_end() -> None:
    text = output(stop=("cd",))
    assert text.feed(ids("abc")) == TextUpdate("ab", 3)
    assert text.feed([], FinishReason.LENGTH) == TextUpdate("c", 0)


def test_a_stop_completed_on_the_last_allowed_token_counts_as_stop() -> None:
    assert output(stop=("bc",)).feed(ids("abc"), FinishReason.LENGTH) == TextUpdate("a", 3, "bc")


def test_a_stop_within_the_first_min_tokens_does_not_match() -> None:
    assert output(stop=("b",), min_tokens=3).feed(ids("abcabc")) == TextUpdate("abca", 5, "b")
    assert output(stop=("b",), min_tokens=2).feed(ids("abcabc")) == TextUpdate("abca", 5, "b")
    assert output(stop=("b",), min_tokens=1).feed(ids("abcabc")) == TextUpdate("a", 2, "b")


def test_the_stop_token_has_no_text_and_still_counts() -> None:
    stop = ids("!")[0]
    text = output(stop_token_ids=(stop,))
    assert text.feed(ids("ab!"), FinishReason.STOP, stop) == TextUpdate("ab", 3)


def test_eos_is_visible_only_without_skipping() -> None:
    end = list(TOKENIZER.encode(EOS, False))
    assert output().feed(ids("ab") + end, FinishReason.STOP) == TextUpdate("ab", 3)
    assert output(skip_special_tokens=False).feed(ids("ab") + end, FinishReason.STOP) == TextUpdate("ab" + EOS, 3)


def test_a_stop_that_began_in_prior_output_is_completed_and_counted_on() -> None:
    text = output(prior="abc", stop=("cd",))
    assert text.feed(ids("de")) == TextUpdate("", 1, "cd")


def test_an_unfinished_character_of_the_last_token_can_complete_a_stop() -> None:
    half = list(TOKENIZER.encode("😀", False))[:1]
    text = output(stop=("\ufffd",))
    assert text.feed(ids("a") + half, FinishReason.LENGTH) == TextUpdate("a", 2, "\ufffd")
