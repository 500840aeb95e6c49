"""The one wording of "the prompt is too long"."""

from __future__ import annotations

from replica.errors import PromptTooLong
from replica.text.tokenizer import Tokenizer

_PROBED_CHARS_PER_TOKEN = 16


def prompt_too_long(num_tokens: int, max_model_len: int, param: str | None, at_least: bool = False) -> PromptTooLong:
    """`at_least`: the prompt was not encoded, `num_tokens` is a lower bound."""
    length = f"at least {num_tokens}" if at_least else str(num_tokens)
    text = f"this model's context is {max_model_len} tokens and must leave room for one answer token, "
    return PromptTooLong(f"{text}but the prompt has {length} tokens", param=param)


def refuse_hopeless(tokenizer: Tokenizer, text: str, max_model_len: int, param: str) -> None:
    """Raise `PromptTooLong` for a text that can't fit, without encoding it whole (a megabyte can take seconds).

    Where the sure bound of the tokenizer isn't enough, a beginning of the text is encoded. Its tokens may differ from
    the whole's near the cut, but not so much that twice the context turns into less than the context.
    """
    bound = tokenizer.min_num_tokens(text)
    if bound < max_model_len and len(text) > 2 * _PROBED_CHARS_PER_TOKEN * max_model_len:
        bound = len(tokenizer.encode(text[: _PROBED_CHARS_PER_TOKEN * max_model_len], False)) // 2
    if bound >= max_model_len:
        raise prompt_too_long(bound, max_model_len, param, at_least=True)
