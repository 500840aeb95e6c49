"""One sequence's output as clients see it: detokenized, cut at stop strings, nothing of a stop shown.

Joins `Detokenizer` and `StopStrings` by the rules of `SamplingParams`. Tokens are taken one at a time where a stop
string may end the sequence, so that the count of used tokens is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replica.request import FinishReason, SamplingParams
from replica.text.detokenizer import Detokenizer
from replica.text.stop_strings import StopStrings
from replica.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """`text` may be sent now. `num_tokens` of the tokens fed count as output: all, or those up to the one that
    completed a stop string. `stop` is the stop string that ended the sequence, None otherwise."""

    text: str
    num_tokens: int
    stop: str | None = None


class OutputText:
    """Text of one sequence. After an update with `stop`, or a call with `finish_reason`, it is over.

    No stop string ends the sequence within its first `min_tokens` tokens, whose text is sent as it is: the token after
    them is the first that may complete one, as it is the first that may be a stop token. The text of a token of
    `stop_token_ids` that ended the sequence isn't shown. `prior_output_ids` (made elsewhere) move the state on; their
    certain text counts as sent.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        prior_output_ids: Sequence[int] = (),
    ) -> None:
        self._sampling = sampling
        self._stops = StopStrings(sampling.stop)
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, sampling.skip_special_tokens)
        self._num_tokens = 0
        self.feed(prior_output_ids)

    def feed(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None = None, stop_reason: int | None = None
    ) -> TextUpdate:
        """Take the next tokens; with `finish_reason` they are the last, and all text held back comes out.

        `stop_reason` is the stop token id that ended the sequence inside the engine, if one did.
        """
        if finish_reason is None and not self._sampling.stop:  # nearly all tokens: nothing to watch for
            return TextUpdate(self._detokenizer.feed(token_ids), len(token_ids))
        shown = list(token_ids)
        if stop_reason is not None and shown and shown[-1] == stop_reason:
            shown.pop()
        pieces: list[str] = []
        for num_fed, group in enumerate(self._groups(shown), start=1):
            self._num_tokens += len(group)
            if self._watch(self._detokenizer.feed(group), pieces):
                return TextUpdate("".join(pieces), num_fed, self._stops.matched)
        if finish_reason is not None:
            if self._watch(self._detokenizer.flush(), pieces):
                return TextUpdate("".join(pieces), len(token_ids), self._stops.matched)
            pieces.append(self._stops.flush())
        return TextUpdate("".join(pieces), len(token_ids))

    def _groups(self, token_ids: list[int]) -> list[list[int]]:
        """Single tokens if stop strings must be watched, else all together."""
        return [[i] for i in token_ids] if self._sampling.stop else [token_ids]

    def _watch(self, text: str, pieces: list[str]) -> bool:
        """Add what may be sent of `text` to `pieces`; whether a stop string was completed."""
        if self._num_tokens <= self._sampling.min_tokens:
            pieces.append(text)
            return False
        certain, stop = self._stops.feed(text)
        pieces.append(certain)
        return stop is not None
