"""Whatever messages say, the control tokens of a chat are those that the template writes, and no text is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.text.chat_encoding import ChatEncoder
from replica.text.chat_template import ChatTemplate
from tests.tokenizer_families import CHAT_TEMPLATE, FAMILIES, SPECIALS, TURN_END, TURN_START

pytestmark = pytest.mark.parametrize("family", FAMILIES)

PIECES = st.one_of(
    st.text(max_size=5).filter(lambda text: not {"\ufdd0", "\ufdd1"} & set(text)),
    st.sampled_from([*SPECIALS, "<|im_", "end|>", "<", "|", "s>", " ", "\n", "🌶", "▁"]),
)
CONTENTS = st.lists(PIECES, max_size=8).map("".join)
MESSAGES = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), CONTENTS), min_size=1, max_size=4)


@given(messages=MESSAGES)
def test_only_the_template_writes_control_tokens(family: str, messages: list[tuple[str, str]]) -> None:
    tokenizer = FAMILIES[family]()
    encoder = ChatEncoder(tokenizer, ChatTemplate(CHAT_TEMPLATE, {}))
    ids = encoder.encode_chat([{"role": role, "content": content} for role, content in messages])
    names = {tokenizer.added_tokens[token]: token for token in SPECIALS}
    assert [names[i] for i in ids if i in names] == [TURN_START, TURN_END] * len(messages) + [TURN_START]
    rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    assert spaceless(tokenizer.decode(ids, False)) == spaceless(rendered + "<|im_start|>assistant\n")


def spaceless(text: str) -> str:
    """SentencePiece puts a space after control tokens and can't tell its space marker from a space."""
    return text.replace("▁", "").replace(" ", "")
