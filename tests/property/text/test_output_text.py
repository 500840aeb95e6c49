"""Stop strings taken from the very output, over any ids in any grouping."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.request import FinishReason, SamplingParams
from replica.text.output_text import OutputText
from tests.tokenizer_families import FAMILIES

pytestmark = pytest.mark.parametrize("family", FAMILIES)


@given(data=st.data())
def test_output_ends_before_the_stop_that_is_complete_first(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=25))
    whole = tokenizer.decode(ids, True)
    substrings = st.tuples(st.integers(0, len(whole)), st.integers(1, 6)).map(lambda at: whole[at[0] : at[0] + at[1]])
    stops = tuple(filter(None, data.draw(st.lists(substrings, max_size=3)))) + data.draw(st.sampled_from([(), ("@@",)]))
    output = OutputText(tokenizer, (), SamplingParams(max_tokens=99, stop=stops))
    text, num_tokens, stop = "", 0, None
    rest = list(ids)
    while rest and stop is None:
        group = [rest.pop(0) for _ in range(min(len(rest), data.draw(st.integers(1, 4))))]
        update = output.feed(group, None if rest else FinishReason.LENGTH)
        text, num_tokens, stop = text + update.text, num_tokens + update.num_tokens, update.stop
    ends = [(whole.find(word) + len(word), -len(word), word) for word in stops if word in whole]
    assert stop == (min(ends)[2] if ends else None)
    assert text == (whole[: min(ends)[0] + min(ends)[1]] if ends else whole)
    if stop is None:
        assert num_tokens == len(ids)
    else:
        assert stop in tokenizer.decode(ids[:num_tokens], True)
        # The token that completed the stop is the last that counts (a U+FFFD may be an unfinished character).
        assert "\ufffd" in stop or stop not in tokenizer.decode(ids[: num_tokens - 1], True)
