"""The two generation endpoints, from the bytes of a request to the bytes of its answer.

    enter (in flight) -> read body -> parse -> find model -> check queues -> tokenize (in a thread) -> open at a replica
    -> wait for the first token -> 200, then either one JSON body or server-sent events -> close, leave

Each step refuses before the next one costs anything. What is known before the first token is an HTTP status; what
goes wrong later is one error event, and then the stream ends. A replica that is lost is no such thing: others continue
its answers, and the client doesn't notice (`continued_stream.py`). A client that leaves at any point ends the work: the
endpoint listens for that itself, because the cancellation that Serve sends may come late or not at all.

It is an ASGI application, not a function that returns a response, so that one `with` block spans the answer's whole
life, its sending included.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from starlette.types import Receive, Scope, Send

from deployments import openai_prompts, openai_schema, sse
from deployments.admission import InFlight, check_queues
from deployments.client_request import Parsed, asked_model, parsed_body, tokenized
from deployments.config import IngressSettings
from deployments.continued_stream import Continuing
from deployments.edge_metrics import CLIENT_LEFT, EdgeMetrics
from deployments.error_map import http_error
from deployments.http_body import ClientLeft, client_left, read_body
from deployments.leases import Leases
from deployments.open_call import OpenCall
from deployments.openai_responses import Answer
from deployments.served_model import ServedModel
from replica.errors import BodyTooLarge, BrimfulError, QueueFull
from replica.request import GenerationRequest

logger = logging.getLogger(__name__)

Kind = Literal["chat", "completions"]

ROUTES: dict[Kind, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
ID_PREFIXES: dict[Kind, str] = {"chat": "chatcmpl-", "completions": "cmpl-"}
PARSERS: dict[Kind, Callable[[bytes], Parsed]] = {
    "chat": openai_schema.parse_chat,
    "completions": openai_schema.parse_completion,
}
JSON_HEADERS = {"content-type": "application/json"}
SSE_HEADERS = {"content-type": sse.MEDIA_TYPE, "cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Edge:
    """What all endpoints of one ingress process share."""

    settings: IngressSettings
    leases: Leases
    in_flight: InFlight
    metrics: EdgeMetrics
    threads: Executor


@dataclass(slots=True)
class Reply:
    """Sends one HTTP answer and remembers what was sent. `status` is 0 until something was."""

    send: Send
    status: int = 0

    async def start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})

    async def part(self, body: bytes, more: bool) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
        await self.start(status, {**JSON_HEADERS, **headers, "content-length": str(len(body))})
        await self.part(body, more=False)


class GenerationEndpoint:
    """ASGI application of `POST .../chat/completions` or `.../completions` for the models under one route prefix."""

    def __init__(self, kind: Kind, models: dict[str, ServedModel], edge: Edge) -> None:
        self._kind = kind
        self._route = ROUTES[kind]
        self._models = models
        self._edge = edge
        self._continuing = Continuing(
            edge.settings.max_continuations,
            edge.settings.continuation_wait_s,
            partial(edge.metrics.continued, self._route),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.monotonic()
        reply = Reply(send)
        status = CLIENT_LEFT
        try:
            await self._in_flight(scope, receive, reply)
            status = str(reply.status)
        except ClientLeft:
            pass
        except Exception as error:  # noqa: BLE001 - the edge: whatever happens inside becomes an answer
            answer = http_error(_known(error))
            status = str(answer.status)
            if not reply.status:
                await reply.whole(answer.status, answer.headers, answer.body)
        finally:
            self._edge.metrics.answered(self._route, status, time.monotonic() - started_s)

    async def _in_flight(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        edge = self._edge
        try:
            edge.in_flight.enter()
        except QueueFull:
            edge.metrics.rejected("in_flight")
            raise
        try:
            edge.metrics.in_flight(edge.in_flight.count)
            body = await read_body(scope, receive, edge.settings.max_body_bytes, edge.settings.body_timeout_s)
            await _while_client_stays(receive, self._answer(body, reply))
        except BodyTooLarge:
            edge.metrics.rejected("body_too_large")
            raise
        finally:
            edge.in_flight.leave()
            edge.metrics.in_flight(edge.in_flight.count)

    async def _answer(self, body: bytes, reply: Reply) -> None:
        parsed = await parsed_body(PARSERS[self._kind], body, self._edge.threads)
        model = asked_model(self._models, parsed)
        self._check_queues(model, parsed)
        request_id = ID_PREFIXES[self._kind] + secrets.token_hex(16)
        requests = await self._tokenized(model, parsed, request_id)
        answer = Answer(
            id=request_id,
            created=int(time.time()),
            model=model.name,
            n=parsed.n,
            prompt_tokens=tuple(len(request.prompt_ids) for request in requests),
            include_usage=parsed.include_usage,
        )
        with OpenCall(self._edge.leases, model.client, requests, self._continuing) as call:
            await (self._stream(call, answer, reply) if parsed.stream else self._whole(call, answer, reply))

    async def _whole(self, call: OpenCall, answer: Answer, reply: Reply) -> None:
        collector = sse.ChatCollector(answer) if self._kind == "chat" else sse.CompletionCollector(answer)
        while came := await call.read():
            for number, message in came:
                collector.feed(number, message)
        await reply.whole(200, {}, collector.body())

    async def _stream(self, call: OpenCall, answer: Answer, reply: Reply) -> None:
        """The first read decides between an HTTP error and a 200; from then on errors are events."""
        stream = sse.ChatStream(answer) if self._kind == "chat" else sse.CompletionStream(answer)
        came = await call.read()
        await reply.start(200, SSE_HEADERS)
        try:
            while came:
                part = b"".join(stream.feed(number, message) for number, message in came)
                await reply.part(part, more=True)
                came = await call.read()
            if not stream.ended:
                raise sse.broken_off()
        except Exception as error:  # noqa: BLE001 - after a 200 every error is an event
            self._edge.metrics.stream_failed(self._route)
            await reply.part(stream.fail(_known(error)), more=True)
        await reply.part(b"", more=False)

    def _check_queues(self, model: ServedModel, parsed: Parsed) -> None:
        client = model.client
        try:
            check_queues(client.loads(), model.bounds, client.num_replicas(), openai_prompts.num_sequences(parsed))
        except QueueFull:
            self._edge.metrics.rejected("queue_full")
            raise

    async def _tokenized(self, model: ServedModel, parsed: Parsed, request_id: str) -> list[GenerationRequest]:
        started_s = time.monotonic()
        requests = await tokenized(model, parsed, request_id, self._edge.threads, self._edge.leases.lease)
        self._edge.metrics.tokenized(time.monotonic() - started_s)
        return requests


async def _while_client_stays(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until its end, or until the client leaves: then it is cancelled, and `ClientLeft` raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(client_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _known(error: Exception) -> Exception:
    """What nobody expected is logged whole here; the client learns no details of it (see error_map)."""
    if not isinstance(error, BrimfulError):
        logger.error("unexpected error in a request", exc_info=error)
    return error
