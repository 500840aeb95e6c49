"""The one wording of "the prompt is too long"."""

from __future__ import annotations

from replica.errors import PromptTooLong
from replica.text.tokenizer import Tokenizer


def prompt_too_long(num_tokens: int, max_model_len: int, param: str | None, at_least: bool = False) -> PromptTooLong:
    """`at_least`: the prompt was not encoded, `num_tokens` is a lower bound."""
    length = f"at least {num_tokens}" if at_least else str(num_tokens)
    text = f"this model's context is {max_model_len} tokens and must leave room for one answer token, "
    return PromptTooLong(f"{text}but the prompt has {length} tokens", param=param)


def refuse_hopeless(tokenizer: Tokenizer, text: str, max_model_len: int, param: str) -> None:
    """Raise `PromptTooLong` for a text that can't fit, without encoding it."""
    bound = tokenizer.min_num_tokens(text)
    if bound >= max_model_len:
        raise prompt_too_long(bound, max_model_len, param, at_least=True)
