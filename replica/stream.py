"""One request's answers on their way from the engine to the consumer: ids become text, news wait until they are taken.

    engine update -> Answer.push (detokenize, stop strings) -> pending news -> Stream.take -> one message or StreamNews

The engine never waits for a consumer. What a slow one leaves here is coalesced into ever larger events, and bounded:
past its backlog limit the stream is given up by its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from replica.errors import ErrorInfo
from replica.request import FinishReason, GenerationRequest, TokenEvent
from replica.scheduler.plan import PENDING_TOKEN
from replica.text.output_text import OutputText
from replica.text.tokenizer import Tokenizer


class Answer:
    """One of the request's n sequences: its text so far and the news that nobody has taken yet.

    `num_output_tokens` includes those made elsewhere (`prior_output_ids`). The text of an EOS is shown only when
    special tokens are asked for, whether or not the tokenizer knows that it is one; its id always is.
    """

    def __init__(self, index: int, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.num_output_tokens = len(request.prior_output_ids)
        self.finish_reason: FinishReason | None = None
        self.last_token_at_s: float | None = None
        self.has_news = False
        self._hides_eos = request.sampling.skip_special_tokens
        self._output = OutputText(tokenizer, request.prompt_ids, request.sampling, request.prior_output_ids)
        self._stop_reason: str | int | None = None
        self._error: ErrorInfo | None = None
        self._token_ids: list[int] = []
        self._text = ""

    @property
    def backlog(self) -> int:
        """Tokens that nobody has taken yet."""
        return len(self._token_ids)

    def push(
        self,
        token_id: int,
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: ErrorInfo | None = None,
    ) -> FinishReason | None:
        """News of the engine; returns how the answer ended, if it did. A stop string that the token completes ends it
        whatever the engine says. After the end nothing changes."""
        if self.finish_reason is not None:
            return self.finish_reason
        shown: tuple[int, ...] = ()
        if token_id != PENDING_TOKEN:
            self.num_output_tokens += 1
            self._token_ids.append(token_id)
            is_eos = finish_reason is FinishReason.STOP and stop_reason is None
            shown = () if is_eos and self._hides_eos else (token_id,)
        # An answer cut short may be continued elsewhere: what is held back now will be made certain there.
        complete = finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        update = self._output.feed(shown, finish_reason if complete else None, stop_reason)
        self._text += update.text
        self._stop_reason, self._error = stop_reason, error
        if update.stop is not None:
            finish_reason, self._stop_reason = FinishReason.STOP, update.stop
        self.finish_reason = finish_reason
        self.has_news = True
        return finish_reason

    def take(self) -> TokenEvent:
        """All news as one event."""
        event = TokenEvent(
            self.index,
            tuple(self._token_ids),
            self._text,
            self.num_output_tokens,
            self.finish_reason,
            self._stop_reason,
            self._error,
        )
        self._token_ids, self._text, self.has_news = [], "", False
        return event


class Stream:
    """One open request. `engine_id` names it towards the engine: unlike the client's id it is never used again.

    `accepted` is set when the engine has taken it. `lease_age_s` is how long its lease wasn't renewed. `on_news` is
    told of news once somebody wants them.
    """

    def __init__(self, request: GenerationRequest, engine_id: str, tokenizer: Tokenizer, now_s: float) -> None:
        self.request = request
        self.engine_id = engine_id
        self.arrived_at_s = now_s
        self.lease_age_s = 0.0
        self.accepted = False
        self.num_cached_tokens = 0
        self.has_first_token = False
        self.answers = [Answer(request.first_index + i, request, tokenizer) for i in range(request.n)]
        self.on_news: Callable[[Stream], None] | None = None
        self._known = asyncio.Event()
        self._has_begun = asyncio.Event()

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def backlog(self) -> int:
        return sum(answer.backlog for answer in self.answers)

    @property
    def has_news(self) -> bool:
        return any(answer.has_news for answer in self.answers)

    def wake(self) -> None:
        """There is something for the consumer: acceptance or news."""
        self._known.set()
        if not self.has_news:
            return
        self._has_begun.set()
        if self.on_news is not None:
            self.on_news(self)

    async def known(self) -> None:
        """Returns when the engine has taken the request or it has ended."""
        await self._known.wait()

    async def first_news(self) -> None:
        """Returns when there are news, or have been."""
        await self._has_begun.wait()

    def take(self) -> tuple[TokenEvent, ...]:
        """All news since the last call."""
        return tuple(answer.take() for answer in self.answers if answer.has_news)
