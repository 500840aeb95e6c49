"""What the tests of open streams are made of."""

from __future__ import annotations

import asyncio

from deployments.continued_stream import ContinuedStream
from deployments.leases import Leases
from deployments.model_client_fake import FakeModelClient
from deployments.open_stream import OpenStream
from replica.errors import ErrorInfo
from replica.request import FinishReason, GenerationRequest, SamplingParams, StreamMessage, TokenEvent

TAKEN = StreamMessage("r0")


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request(request_id: str = "a", n: int = 1) -> GenerationRequest:
    return GenerationRequest(request_id, (1, 2, 3), SamplingParams(max_tokens=4), n=n)


def token(text: str, reason: FinishReason | None = None, index: int = 0, replica: str = "r0") -> StreamMessage:
    return StreamMessage(replica, (TokenEvent(index, (7,), text, 1, reason),))


def refusal(replica: str, code: str) -> StreamMessage:
    event = TokenEvent(0, (), "", 0, FinishReason.REJECTED, error=ErrorInfo(code, "no", retry_after_s=1.0))
    return StreamMessage(replica, (event,))


async def opened(leases: Leases, client: FakeModelClient, request_id: str = "a", n: int = 1) -> OpenStream:
    stream = leases.open(client, request(request_id, n))
    await settled()
    return stream


async def heard(stream: OpenStream) -> list[StreamMessage]:
    """All that came since the last call, at least one message; an empty list after the last one. Raises what ended the
    stream early."""
    while not (messages := stream.take_all()) and not stream.finished:
        stream.news.clear()
        await stream.news.wait()
    return messages


async def all_events(stream: ContinuedStream, news: asyncio.Event, limit_s: float) -> list[TokenEvent]:
    """Everything that the stream says until it is finished; then it is closed. `news`: what the stream wakes with."""
    events: list[TokenEvent] = []
    async with asyncio.timeout(limit_s):
        while not stream.finished:
            news.clear()
            events += [event for message in stream.take_all() for event in message.events]
            if not stream.finished:
                await news.wait()
    stream.close()
    return events


async def settled() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)
