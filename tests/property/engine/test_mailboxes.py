"""Any mix of tokens, ends, lost answers, superseded and repeated polls: each stream's news arrive once and in order.

A stream's first news go another way than the polls, and polls may be faster.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import aclosing
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.mailboxes import TOKEN_BYTES, Mailboxes
from replica.model_card import TextBundle
from replica.request import FinishReason, LoadReport, NewsBatch, TokenEvent
from replica.stream import Stream
from replica.text.tokenizer import Tokenizer
from tests.fake_replica import request_of, write_model

REPORT = LoadReport("r", "e", 1, 0.0, 0, 0, 0, 0, 8, 8, 0, 4, 4, 16)


def _tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        card = write_model(Path(folder))
        return Tokenizer(TextBundle.load(Path(card.folder)).tokenizer_json, card)


TOKENIZER = _tokenizer()


class MailboxMachine(RuleBasedStateMachine):
    """The naive model: of each stream a list of what was said and of what arrived, the second a beginning of the
    first. `waiting` streams have not begun. Polls may wait, be lost on their way back in part or as a whole, or be
    answered after a newer one was sent. `unread`: what the newest poll has brought so far and nobody has read."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.boxes = Mailboxes("r", lambda lease: REPORT, wait_s=3600.0, max_batch_bytes=2 * TOKEN_BYTES)
        self.open: dict[str, Stream] = {}
        self.waiting: dict[str, Stream] = {}
        self.said: dict[str, list[int]] = {}
        self.arrived: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.told_ended: set[str] = set()
        self.fetched: dict[str, asyncio.Event] = {}
        self.polls: list[asyncio.Task[None]] = []
        self.unread: list[NewsBatch] = []
        self.acknowledged = 0
        self.num_opened = 0
        self.next_token = 0

    def turn(self) -> None:
        """Lets the loop run until nothing can go on."""
        for _ in range(8):
            self.loop.run_until_complete(asyncio.sleep(0))

    @rule()
    def opens(self) -> None:
        name = f"s{self.num_opened}"
        self.num_opened += 1
        stream = Stream(request_of(name, lease="me"), f"1:{name}", TOKENIZER, 0.0)
        self.open[name] = self.waiting[name] = stream
        self.said[name], self.arrived[name] = [], []
        self.fetched[name] = self.boxes.add(stream)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), more=st.booleans(), end=st.booleans())
    def begins(self, data: st.DataObject, more: bool, end: bool) -> None:
        """Its first news are said, and maybe the next ones already made, when polls may have the rest."""
        self._begin(data.draw(st.sampled_from(sorted(self.waiting))), more, end)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), end=st.booleans())
    def says(self, data: st.DataObject, end: bool) -> None:
        self._say(data.draw(st.sampled_from(sorted(self.open))), end)

    @rule(num_batches=st.integers(1, 4))
    def polls_again(self, num_batches: int) -> None:
        """Whether or not an older one is under way. A reader listens only to the poll that it sent last."""
        self.unread = []
        self.polls.append(self.loop.create_task(self._poll(num_batches, self.unread)))

    @rule()
    def waits(self) -> None:
        self.turn()

    @rule()
    def loses_all_answers(self) -> None:
        self.turn()
        for poll in self.polls:
            poll.cancel()
        self.turn()
        self.polls, self.unread = [], []

    @rule(num=st.integers(1, 4))
    def reads(self, num: int) -> None:
        self.turn()
        for batch in self.unread[:num]:
            if batch.number:
                self.acknowledged = batch.number
            for news in batch.news:
                assert news.request_id not in self.waiting, "news before the first"
                self._arrive(news.request_id, news.events)
        del self.unread[:num]

    @invariant()
    def what_arrived_is_the_beginning_of_what_was_said(self) -> None:
        for name, arrived in self.arrived.items():
            assert arrived == self.said[name][: len(arrived)]

    def teardown(self) -> None:
        """Once polls get through again everything arrives, and nothing is kept."""
        for name in list(self.open):
            self._say(name, end=True)
        for name in list(self.waiting):
            self._begin(name)
        for _ in range(len(self.said) + 2):
            self.polls_again(2)
            self.reads(4)
        self.loses_all_answers()
        try:
            assert self.arrived == self.said
            assert self.told_ended == self.ended == set(self.said)
            assert all(event.is_set() for event in self.fetched.values())
            self.boxes.age(1.0, 1.0)
            assert len(self.boxes) == 0
        finally:
            self.loop.close()

    async def _poll(self, num_batches: int, brought: list[NewsBatch]) -> None:
        async with aclosing(self.boxes.poll("me", self.acknowledged, num_batches)) as batches:
            async for batch in batches:
                brought.append(batch)  # noqa: PERF401 - each at once

    def _say(self, name: str, end: bool = False) -> None:
        self.next_token = (self.next_token + 1) % 90
        self.said[name].append(self.next_token)
        self.open[name].answers[0].push(self.next_token, FinishReason.LENGTH if end else None)
        self.open[name].wake()
        if end:
            del self.open[name]
            self.ended.add(name)

    def _begin(self, name: str, more: bool = False, end: bool = False) -> None:
        stream = self.waiting.pop(name)
        if not stream.has_news:
            self._say(name)
        self._arrive(name, stream.take())
        if more and name in self.open:
            self._say(name, end)
        self.boxes.begin(stream)

    def _arrive(self, name: str, events: tuple[TokenEvent, ...]) -> None:
        assert name not in self.told_ended, "news after the end"
        self.arrived[name] += [token for event in events for token in event.token_ids]
        if any(event.finish_reason for event in events):
            self.told_ended.add(name)


TestMailbox = MailboxMachine.TestCase
TestMailbox.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
