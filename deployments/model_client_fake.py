"""`ModelClient` without Ray: what a test decides happens, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from deployments.model_client import route_request
from replica.errors import BrimfulError, EngineDead, Unavailable
from replica.model.api import ModelShape
from replica.model_card import TextBundle
from replica.request import FinishReason, GenerationRequest, LoadReport, StreamMessage, TokenEvent
from replica.scheduler.block_hash import block_hashes
from router.explain import Explanation
from router.state import RouterState

Answer = StreamMessage | BrimfulError | None


class FakeModelClient:
    """Every request waits for `say(request_id, ...)`: a message, an error to raise, or None for the end of the call.

    `replica_ids` are running, in the order in which they are chosen. `silent` replicas answer no control call.
    `sent_to`: where requests went that nobody has taken yet. A
    replica in `answers` answers a renewal only when its event is set. An
    abort ends an open call with `abort` events, as a replica does. `with_text` makes calls answer by themselves: they
    are taken, then every text of `texts` is one token, the last one with `stop`. `router` explains, from `reports` and
    what a test tells it; calls don't ask it.
    """

    def __init__(
        self, *replica_ids: str, facts: tuple[TextBundle, ModelShape] | None = None, texts: tuple[str, ...] = ()
    ) -> None:
        self.replica_ids = list(replica_ids)
        self.silent: set[str] = set()
        self.sent_to: dict[str, str] = {}
        self.answers: dict[str, asyncio.Event] = {}
        self.reports: list[LoadReport] = []
        self.router = RouterState()
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.requests: list[GenerationRequest] = []
        self.aborted: list[tuple[str, str]] = []
        self.renewed: list[tuple[str, str, tuple[str, ...]]] = []
        self.forgotten: list[str] = []
        self.distrusted: list[str] = []
        self.failures: list[tuple[str, str]] = []
        self.successes: list[tuple[str, str]] = []
        self._facts = facts
        self._texts = texts
        self._open: dict[str, asyncio.Queue[Answer]] = {}
        self._n: dict[str, int] = {}

    def say(self, request_id: str, *answers: Answer) -> None:
        for answer in answers:
            self._open[request_id].put_nowait(answer)

    def num_replicas(self) -> int:
        return len(self.replica_ids)

    def num_ready(self) -> int:
        return len(set(self.replica_ids) - set(self.distrusted))

    def loads(self) -> list[LoadReport]:
        return self.reports

    async def generate(self, request: GenerationRequest, exclude: tuple[str, ...] = ()) -> AsyncIterator[StreamMessage]:
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._open[request.request_id] = answers
        self._n[request.request_id] = request.n
        self.calls.append((request.request_id, exclude))
        self.requests.append(request)
        if self._texts:
            self.say(request.request_id, *self._whole_answer(request))
        while (answer := await answers.get()) is not None:
            if isinstance(answer, BrimfulError):
                raise answer
            yield answer

    async def explain(self, request: GenerationRequest) -> Explanation:
        self.router.retain(self.replica_ids)
        block_size = self.reports[0].block_size if self.reports else 1
        hashes = block_hashes(request.prompt_ids, block_size, request.cache_salt)
        for report in self.reports:
            self.router.observe(report)
        return self.router.explain(route_request(request, hashes))

    def replica_of(self, request_id: str) -> str | None:
        return self.sent_to.get(request_id)

    def last_replica_of(self, request_id: str) -> str | None:
        return self.replica_of(request_id)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    async def abort(self, replica_id: str, request_id: str) -> None:
        self._answer_control(replica_id)
        self.aborted.append((replica_id, request_id))
        for index in range(self._n[request_id]):
            end = TokenEvent(index, (), "", 0, FinishReason.ABORT)
            self.say(request_id, StreamMessage(replica_id, (end,)))
        self.say(request_id, None)

    async def renew(self, replica_id: str, lease: str, request_ids: tuple[str, ...]) -> None:
        if replica_id in self.answers:
            await self.answers[replica_id].wait()
        self._answer_control(replica_id)
        self.renewed.append((replica_id, lease, request_ids))

    def distrust(self, replica_id: str) -> None:
        self.distrusted.append(replica_id)

    def failed(self, request_id: str, replica_id: str) -> None:
        self.failures.append((request_id, replica_id))

    def succeeded(self, request_id: str, replica_id: str) -> None:
        self.successes.append((request_id, replica_id))

    async def facts(self) -> tuple[TextBundle, ModelShape]:
        if self._facts is None or not self.replica_ids:
            raise Unavailable("no replica of this model is running")
        return self._facts

    async def ask_all(self, method: str) -> list[dict[str, Any]]:
        answering = [name for name in self.replica_ids if name not in self.silent]
        return [{"kind": "replica", "replica_id": name, "asked": method} for name in answering]

    def metrics_addresses(self) -> list[str]:
        return [f"{name}:9100" for name in self.replica_ids]

    def _answer_control(self, replica_id: str) -> None:
        if replica_id in self.silent or replica_id not in self.replica_ids:
            raise EngineDead("the replica didn't answer")

    def _whole_answer(self, request: GenerationRequest) -> list[Answer]:
        replica_id = self.replica_ids[0]
        messages: list[Answer] = [StreamMessage(replica_id)]
        for index in range(request.n):
            for count, text in enumerate(self._texts, start=1):
                reason = FinishReason.STOP if count == len(self._texts) else None
                messages.append(StreamMessage(replica_id, (TokenEvent(index, (count,), text, count, reason),)))
        return [*messages, None]
