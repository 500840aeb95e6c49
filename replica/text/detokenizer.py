"""Token ids to text, as they come: what can be shown is shown at once, what may still change is held back.

A window of the last ids is decoded with each new one. Text before it can't change any more (see `Tokenizer.decode`);
within it only the last character can, and only while it is incomplete, which decoding shows as one U+FFFD at the end.
So everything but such an end is sent, and `flush` sends the end as it is.

    window   [ seed: last prompt ids | output ids ... ]
    text       already sent            new       \ufffd
               ^0                      ^_sent     ^held back

The library's own stream decoder isn't used: it has no flush, replays the prompt when the prompt ends within a
character, keeps ever more ids when invalid bytes follow each other, and can raise.
"""

from __future__ import annotations

from collections.abc import Sequence

from replica.text.tokenizer import REPLACEMENT, Tokenizer

_KEPT_IDS = 4
"""Ids kept when the window shrinks: no character has more bytes, so the end of the shorter window decodes alike."""
_MAX_IDS = 8
_MAX_SEED_SCAN = 64


class Detokenizer:
    """Incremental text of one sequence, in the context of its prompt (a first word keeps its leading space).

    The pieces returned by `feed` and `flush` add up to decode(prompt + output) minus decode(prompt), however the ids
    are grouped. A character that the prompt began and the output completes belongs to the output. Never raises, never
    holds more than one character; the cost of an id is bounded.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = tokenizer.visible(prompt_ids[-_MAX_SEED_SCAN:], skip_special_tokens)[-_KEPT_IDS:]
        self._text = tokenizer.decode_visible(self._window)
        self._sent = len(self._text)
        # The prompt ends in a replacement character: its own, or a character that the output may complete.
        self._seed_is_open = self._text.endswith(REPLACEMENT)

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` make certain; may be empty."""
        new = self._tokenizer.visible(ids, self._skip)
        if not new:
            return ""
        self._window += new
        self._text = text = self._tokenizer.decode_visible(self._window)
        if self._seed_is_open:
            self._settle_seed(text)
        certain = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if len(self._window) > _MAX_IDS:
            self._shrink()
        return piece

    def flush(self) -> str:
        """The rest at the end of the sequence: U+FFFD if its last character is incomplete."""
        rest = self._text[self._sent :]
        self._sent += len(rest)
        return rest

    def _settle_seed(self, text: str) -> None:
        """Decide who owns the last character of a prompt that ended in U+FFFD, once something follows it."""
        last = self._sent - 1
        if text[last : last + 1] != REPLACEMENT:
            self._sent = last  # the output completed it
            self._seed_is_open = False
        elif len(text) > self._sent:
            self._seed_is_open = False

    def _shrink(self) -> None:
        unsent = len(self._text) - self._sent
        self._window = self._window[-_KEPT_IDS:]
        self._text = self._tokenizer.decode_visible(self._window)
        self._sent = len(self._text) - unsent
