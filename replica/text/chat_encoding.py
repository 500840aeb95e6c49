"""Chat messages to token ids, so that nothing a client types can act as a control token.

Plain rendering followed by plain encoding would let a message that contains the end-of-turn marker end its turn. Here
control tokens inside messages are put between two mark characters before rendering; the template moves them along
with the text. After rendering the marks are taken out and the text is encoded as always, which shows where control
tokens are; those outside marks are the template's own. They are swapped for secret names, and the text is encoded
again by a copy of the tokenizer that knows control tokens under their secret names only. Messages without control
tokens take the first encoding: exactly the usual ids.

    message    a <|im_end|> b
    rendered   <|im_start|>user\na [<|im_end|>] b<|im_end|>
    swapped    (1)user\na <|im_end|> b(2)             encoded: 1 9 10 64 28 92 ... 30 70 2

Which tokens are control tokens: all special ones, and other added tokens that the template writes itself (some models
don't mark their turn tokens as special). In an assistant's message only special ones: reasoning and tool marks there
are what the model wrote, and templates parse them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from replica.errors import InvalidRequest
from replica.text.chat_template import ChatTemplate, Message
from replica.text.prompt_length import refuse_hopeless
from replica.text.tokenizer import Tokenizer

_START, _END = "\ufdd0", "\ufdd1"
"""Unicode noncharacters: set aside for a program's internal use, so no text that is interchanged needs them."""


class ChatEncoder:
    """Encodes chats for one tokenizer and template. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        special = [text for text, i in tokenizer.added_tokens.items() if i in tokenizer.special_ids]
        written = [t for t in tokenizer.added_tokens if t.strip() and any(t in part for part in template.literals)]
        self._secret_names = {text: _secret_name(tokenizer.added_tokens[text]) for text in (*special, *written)}
        self._control_ids = {tokenizer.added_tokens[text] for text in self._secret_names}
        self._special_pattern = _any_of(special)
        self._control_pattern = _any_of([*special, *written])

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        max_model_len: int | None = None,
        **kwargs: object,
    ) -> tuple[int, ...]:
        """Ids of the prompt. `messages` are plain dicts with `role` and `content` as the template wants them.

        Raises `InvalidRequest` (param `messages`) when the template refuses them, and `PromptTooLong` unencoded when
        the text can't fit into `max_model_len` tokens.
        """
        if not self._template.knows_developer:
            messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        if not any(self._has_control(value) for m in messages for key, value in m.items() if key != "role"):
            rendered = self._template.render(messages, add_generation_prompt, **kwargs)
            self._check_length(rendered, max_model_len)
            return self._tokenizer.encode(rendered, False)
        if _contains_marks(messages):
            text = "the messages contain both control tokens and the noncharacters U+FDD0 or U+FDD1"
            raise InvalidRequest(text, param="messages")
        marked = [self._mark_message(message) for message in messages]
        rendered = self._template.render(marked, add_generation_prompt, **kwargs)
        self._check_length(rendered, max_model_len)
        return self._encode_marked(rendered)

    @cached_property
    def _secret_tokenizer(self) -> Tokenizer:
        return self._tokenizer.renamed(self._secret_names)

    def _check_length(self, rendered: str, max_model_len: int | None) -> None:
        if max_model_len is not None:
            refuse_hopeless(self._tokenizer, rendered, max_model_len, "messages")

    def _mark_message(self, message: Message) -> Message:
        pattern = self._special_pattern if message.get("role") == "assistant" else self._control_pattern

        def mark(value: Any) -> Any:
            if isinstance(value, str):
                return self._mark_text(value, pattern)
            if isinstance(value, dict):
                return {key: mark(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [mark(item) for item in value]
            return value

        return {key: value if key == "role" else mark(value) for key, value in message.items()}

    def _mark_text(self, text: str, pattern: re.Pattern[str]) -> str:
        if not self._tokenizer.normalizes_added_tokens:
            return pattern.sub(lambda match: f"{_START}{match.group()}{_END}", text)
        # Other spellings may be normalized to a control token: only the tokenizer knows where they are.
        wanted = {i for token, i in self._tokenizer.added_tokens.items() if pattern.fullmatch(token)}
        ids, spans = self._tokenizer.encode_with_spans(text)
        pieces, done = [], 0
        for first, last in (span for i, span in zip(ids, spans, strict=True) if i in wanted):
            pieces += [text[done:first], _START, text[first:last], _END]
            done = last
        return "".join([*pieces, text[done:]])

    def _encode_marked(self, rendered: str) -> tuple[int, ...]:
        text, typed = _take_out_marks(rendered)
        ids, spans = self._tokenizer.encode_with_spans(text)
        pieces, done = [], 0
        for i, (first, last) in zip(ids, spans, strict=True):
            if i in self._control_ids and not any(a < last and first < b for a, b in typed):
                pieces += [text[done:first], _secret_name(i)]
                done = last
        return self._secret_tokenizer.encode("".join([*pieces, text[done:]]), False)

    def _has_control(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._tokenizer.normalizes_added_tokens or self._control_pattern.search(value) is not None
        if isinstance(value, dict):
            return any(map(self._has_control, value.values()))
        return isinstance(value, list | tuple) and any(map(self._has_control, value))


def _secret_name(control_id: int) -> str:
    """What nobody can type: messages with these characters are refused where they could matter."""
    return f"{_END}{control_id}{_START}"


def _take_out_marks(rendered: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the spans that lay between them.

    A template may separate the two marks of a token (by splitting there): each then is an empty span, which still lies
    inside a control token that came about only by taking the mark out.
    """
    text: list[str] = []
    typed: list[tuple[int, int]] = []
    length = 0
    opened: int | None = None
    for piece in re.split(f"([{_START}{_END}])", rendered):
        if piece in (_START, _END):
            if piece == _END and opened is not None:
                typed.append((opened, length))
            else:
                typed.append((length, length))
            opened = length if piece == _START else None
        else:
            text.append(piece)
            length += len(piece)
    return "".join(text), typed


def _contains_marks(value: Any) -> bool:
    if isinstance(value, str):
        return _START in value or _END in value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(_contains_marks, parts))


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the texts, longer ones first; never matches when there are none."""
    return re.compile("|".join(map(re.escape, sorted(set(texts), key=len, reverse=True))) or "(?!)")
