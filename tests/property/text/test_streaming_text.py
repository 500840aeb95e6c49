"""What streams is what a whole decode gives, for any text, any ids and any grouping, in both families."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.text.detokenizer import Detokenizer
from replica.text.stop_strings import StopStrings
from replica.text.tokenizer import Tokenizer
from tests.tokenizer_families import FAMILIES, SPECIALS

pytestmark = pytest.mark.parametrize("family", FAMILIES)

PIECES = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [" ", "  ", "\n", "\n\n", "🌶️", "👨‍👩‍👧", "你好", "ď", "\ufffd", "the", " hello", "▁", "é", *SPECIALS]
    ),
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> str:
    """Feed `ids` in groups that end at `cuts`, then flush."""
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    groups = [ids[a:b] for a, b in pairwise(bounds)]
    return "".join([*map(detokenizer.feed, groups), detokenizer.flush()])


def singly(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([*(detokenizer.feed([i]) for i in ids), detokenizer.flush()])


def raw_decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer._tokenizer.decode(ids, skip_special_tokens=True)
    return text


@given(prompt=TEXTS, output=TEXTS, skip=st.booleans())
def test_streamed_text_of_a_real_text_is_the_whole_decode(family: str, prompt: str, output: str, skip: bool) -> None:
    tokenizer = FAMILIES[family]()
    both = list(tokenizer.encode(prompt + output, True))  # a merge may cross the border: cut the ids, not the text
    num_prompt_ids = len(tokenizer.encode(prompt, True))
    prompt_ids, ids = both[:num_prompt_ids], both[num_prompt_ids:]
    whole = tokenizer._tokenizer.decode(prompt_ids + ids, skip_special_tokens=skip)
    before = tokenizer._tokenizer.decode(prompt_ids, skip_special_tokens=skip)
    if whole.startswith(before):  # else the prompt ends within a character: see the next tests
        assert before + singly(Detokenizer(tokenizer, prompt_ids, skip), ids) == whole


@given(data=st.data(), skip=st.booleans())
def test_any_ids_in_any_grouping_stream_like_their_decode(family: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = FAMILIES[family]()
    any_ids = st.lists(st.integers(-1, tokenizer.vocab_size + 3), max_size=40)
    byte_ids = st.lists(st.sampled_from(sorted(tokenizer._byte_values) or range(260)), max_size=40)
    ids = data.draw(any_ids | byte_ids)
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=6))
    one_by_one = singly(Detokenizer(tokenizer, (), skip), ids)
    assert one_by_one == tokenizer.decode(ids, skip)
    assert stream(Detokenizer(tokenizer, (), skip), ids, cuts) == one_by_one
    assert one_by_one.count("\ufffd") <= tokenizer._tokenizer.decode(
        tokenizer.visible(ids, skip), skip_special_tokens=False
    ).count("\ufffd")


@given(data=st.data())
def test_output_after_any_prompt_ids_is_the_difference_of_decodes(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)
    prompt_ids, output_ids = data.draw(ids), data.draw(ids)
    before, whole = tokenizer.decode(prompt_ids, True), tokenizer.decode(prompt_ids + output_ids, True)
    if not whole.startswith(before):
        before = before[:-1]  # the output completes the prompt's last character: it belongs to the output
        assert whole.startswith(before)
    assert singly(Detokenizer(tokenizer, prompt_ids), output_ids) == whole[len(before) :]


@given(data=st.data())
def test_a_stream_continued_elsewhere_reads_like_an_unbroken_one(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)
    prompt_ids, output_ids = data.draw(ids), data.draw(ids)
    cut = data.draw(st.integers(0, len(output_ids)))
    first = Detokenizer(tokenizer, prompt_ids)
    sent = first.feed(output_ids[:cut])
    second = Detokenizer(tokenizer, prompt_ids)
    assert second.feed(output_ids[:cut]) == sent
    unbroken = stream(Detokenizer(tokenizer, prompt_ids), output_ids, [])
    assert sent + second.feed(output_ids[cut:]) + second.flush() == unbroken


@given(
    text=TEXTS, stops=st.lists(st.text("abc🌶", min_size=1, max_size=4), max_size=3), cuts=st.lists(st.integers(0, 60))
)
def test_stop_strings_cut_at_the_match_that_ends_first(
    family: str, text: str, stops: list[str], cuts: list[int]
) -> None:
    text = text.replace("h", "abcab").replace("t", "cba")
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    expected = (text[: min(ends)[0] + min(ends)[1]], min(ends)[2]) if ends else (text, None)
    watcher = StopStrings(stops)
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    sent, matched = "", None
    for a, b in pairwise(bounds):
        piece, matched = watcher.feed(text[a:b])
        sent += piece
        longest = max((n for s in stops for n in range(len(s)) if text[:b].endswith(s[:n])), default=0)
        assert matched is not None or len(sent) == b - longest  # held back: only what may begin a stop
    assert (sent + watcher.flush(), matched) == expected


@given(text=TEXTS)
def test_the_quick_bound_never_exceeds_the_number_of_tokens(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]()
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, False))
