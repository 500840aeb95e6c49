"""The generation endpoints without Ray: what a client gets at every stage, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from deployments.admission import InFlight
from deployments.config import IngressSettings, ModelSettings
from deployments.edge_metrics import EdgeMetrics
from deployments.generation import Edge
from deployments.leases import Leases
from deployments.metrics import INGRESS_METRICS
from deployments.model_client_fake import FakeModelClient
from deployments.routes import ERROR_HANDLERS, model_routes
from deployments.served_model import ServedModel
from replica.config import SchedulerConfig
from replica.errors import EngineDead, ErrorInfo
from replica.metrics import Metrics
from replica.model.api import ModelShape
from replica.model_card import TextBundle
from replica.request import FinishReason, StreamMessage, TokenEvent
from tests.tokenizer_families import byte_level, card
from tests.unit.router.loads import report

TOKENIZER = byte_level()
SHAPE = ModelShape(64, 16, TOKENIZER.vocab_size, TOKENIZER.vocab_size, 256, (1,))
BUNDLE = TextBundle(card(TOKENIZER.vocab_size), TOKENIZER._tokenizer.to_str().encode())
TAKEN = StreamMessage("r0")


@dataclass
class Exchange:
    """One request on its way through the ASGI application, its client played by the test."""

    task: asyncio.Task[None]
    incoming: asyncio.Queue[Message]
    sent: list[Message] = field(default_factory=list)

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def end(self) -> None:
        await asyncio.wait_for(self.task, 5)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error

    @property
    def header(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}


class Site:
    """An ingress's routes with one model "m" behind a fake client."""

    def __init__(self, client: FakeModelClient, loaded: bool = True, **settings: Any) -> None:
        self.client = client
        self.metrics = Metrics(INGRESS_METRICS, {"ingress": "i"})
        self.edge = Edge(
            settings=IngressSettings(**settings),
            leases=Leases("lease", lambda: 0.0),
            in_flight=InFlight(settings.get("max_in_flight", 10)),
            metrics=EdgeMetrics(self.metrics),
            threads=ThreadPoolExecutor(1),
        )
        self.model = ServedModel(ModelSettings(served_model_name="m"), SchedulerConfig(), client, 0)
        self.num_sends_that_work = -1
        self._loaded = loaded
        self.app = Starlette(routes=model_routes("/", {"m": self.model}, self.edge), exception_handlers=ERROR_HANDLERS)

    async def send(self, body: dict[str, Any] | None, path: str = "/v1/completions", **headers: str) -> Exchange:
        """Start a request; `body` None: the client sends only a part of it."""
        if self._loaded:
            await self.model.load()
        incoming: asyncio.Queue[Message] = asyncio.Queue()
        part: Message = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": body is None}
        incoming.put_nowait(part)
        sent: list[Message] = []

        async def send(message: Message) -> None:
            if len(sent) == self.num_sends_that_work:
                raise OSError("the connection is gone")
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
        }
        return Exchange(asyncio.create_task(self.app(scope, incoming.get, send)), incoming, sent)

    async def called(self) -> str:
        """The id of the request that has reached the client."""
        while not self.client.requests:
            await asyncio.sleep(0)
        return self.client.requests[-1].request_id

    async def quiet(self) -> None:
        """Raises nothing, and returns only when nothing is left of any request."""
        while len(self.edge.leases) or self.edge.in_flight.count or self.edge.leases.num_background:
            await asyncio.sleep(0)

    def count(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(f"brimful_{name}", {"ingress": "i", **labels})
        return -1.0 if value is None else value


def site(*texts: str, **settings: Any) -> Site:
    return Site(FakeModelClient("r0", facts=(BUNDLE, SHAPE), texts=texts), **settings)


def token(text: str, reason: FinishReason | None = None) -> StreamMessage:
    return StreamMessage("r0", (TokenEvent(0, (7,), text, 1, reason),))


def failed(code: str) -> StreamMessage:
    return StreamMessage("r0", (TokenEvent(0, (), "", 0, FinishReason.ERROR, None, ErrorInfo(code, "it failed")),))


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hello", "max_tokens": 9, **more}


async def test_a_plain_answer() -> None:
    here = site("Par", "is")
    exchange = await here.send(asked())
    await exchange.end()
    assert exchange.status == 200
    assert json.loads(exchange.body)["choices"][0]["text"] == "Paris"
    assert exchange.header["content-length"] == str(len(exchange.body))
    await here.quiet()
    assert here.client.aborted == []
    assert here.count("http_requests_total", route="/v1/completions", status="200") == 1


async def test_a_streamed_chat() -> None:
    here = site("Par", "is")
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    exchange = await here.send(chat, "/v1/chat/completions")
    await exchange.end()
    assert exchange.status == 200
    assert exchange.header["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in exchange.body.decode().split("\n\n") if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Paris"
    assert lines[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"), [("context_length_exceeded", 400), ("queue_timeout", 503), ("step_failed", 500)]
)
async def test_a_failure_before_the_first_token_is_a_status(code: str, status: int, stream: bool) -> None:
    here = site()
    exchange = await here.send(asked(stream=stream))
    here.client.say(await here.called(), TAKEN, failed(code), None)
    await exchange.end()
    assert (exchange.status, exchange.error["code"]) == (status, code)
    assert here.count("http_requests_total", route="/v1/completions", status=str(status)) == 1
    await here.quiet()


async def test_a_failure_after_the_first_token_is_an_event_and_ends_the_stream() -> None:
    here = site()
    exchange = await here.send(asked(stream=True))
    here.client.say(await here.called(), TAKEN, token("Par"), EngineDead("gone"))
    await exchange.end()
    events = [line.removeprefix("data: ") for line in exchange.body.decode().split("\n\n") if line]
    assert exchange.status == 200
    assert json.loads(events[0])["choices"][0]["text"] == "Par"
    assert json.loads(events[-1])["error"]["code"] == "engine_dead"
    assert b"[DONE]" not in exchange.body
    assert exchange.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert here.count("http_stream_errors_total", route="/v1/completions") == 1
    await here.quiet()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [[], [TAKEN], [TAKEN, token("Par")]])
async def test_a_client_that_leaves_ends_the_work(said: list[StreamMessage], stream: bool) -> None:
    here = site()
    exchange = await here.send(asked(stream=stream))
    request_id = await here.called()
    here.client.say(request_id, *said)
    exchange.leave()
    await exchange.end()
    if not said:
        here.client.say(request_id, TAKEN)
    await here.quiet()
    assert here.client.aborted == [("r0", request_id)]
    assert here.count("http_client_disconnects_total", route="/v1/completions") == 1
    assert here.count("http_requests_in_flight") == 0


async def test_a_cancellation_from_outside_ends_the_work_too() -> None:
    here = site()
    exchange = await here.send(asked(stream=True))
    request_id = await here.called()
    here.client.say(request_id, TAKEN)
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.task
    await here.quiet()
    assert here.client.aborted == [("r0", request_id)]


async def test_a_client_that_leaves_within_its_body_reaches_no_replica() -> None:
    here = site()
    exchange = await here.send(None)
    exchange.leave()
    await exchange.end()
    await here.quiet()
    assert (exchange.sent, here.client.requests) == ([], [])


async def test_a_full_ingress_refuses_before_it_reads_the_body() -> None:
    here = site(max_in_flight=1)
    first = await here.send(asked())
    await here.called()
    second = await here.send(None)
    await second.end()
    assert (second.status, second.error["code"]) == (503, "queue_full")
    assert here.count("admission_rejections_total", reason="in_flight") == 1
    first.leave()
    await first.end()


async def test_a_priority_is_refused_where_it_would_change_nothing() -> None:
    here = site("Paris")
    exchange = await here.send(asked(priority=-1))
    await exchange.end()
    assert (exchange.status, exchange.error["param"]) == (400, "priority")
    here.model.bounds = SchedulerConfig(policy="priority")
    exchange = await here.send(asked(priority=-1))
    await exchange.end()
    assert exchange.status == 200
    assert here.client.requests[0].priority == -1


async def test_a_body_above_the_limit_is_a_413() -> None:
    here = site(max_body_bytes=1024)
    exchange = await here.send(asked(prompt="x" * 1024))
    await exchange.end()
    assert (exchange.status, exchange.error["code"]) == (413, "body_too_large")
    assert here.count("admission_rejections_total", reason="body_too_large") == 1


async def test_a_flood_is_refused_before_it_is_tokenized() -> None:
    here = site()
    here.client.reports = [report(num_waiting=SchedulerConfig().max_num_queued_seqs)]
    exchange = await here.send(asked())
    await exchange.end()
    assert (exchange.status, exchange.error["code"]) == (503, "queue_full")
    assert here.count("admission_rejections_total", reason="queue_full") == 1
    assert here.count("tokenize_seconds_count") == 0


async def test_a_connection_that_breaks_within_a_stream_gets_no_second_answer() -> None:
    here = site()
    here.num_sends_that_work = 1
    exchange = await here.send(asked(stream=True))
    request_id = await here.called()
    here.client.say(request_id, TAKEN, token("Par"))
    await exchange.end()
    assert [message["type"] for message in exchange.sent] == ["http.response.start"]
    await here.quiet()
    assert here.client.aborted == [("r0", request_id)]


async def test_a_model_that_is_still_loading_is_a_503_with_a_time_to_come_back() -> None:
    here = site(loaded=False)
    exchange = await here.send(asked())
    await exchange.end()
    assert (exchange.status, exchange.header["retry-after"]) == (503, "5")


async def test_without_a_running_replica_the_answer_comes_at_once() -> None:
    here = site()
    await here.model.load()
    here.client.replica_ids.clear()
    exchange = await here.send(asked())
    await exchange.end()
    assert (exchange.status, exchange.error["code"]) == (503, "unavailable")


async def test_our_own_bug_tells_a_client_nothing() -> None:
    here = site()
    exchange = await here.send(asked())
    request_id = await here.called()
    broken: Any = TAKEN, "no message"
    here.client.say(request_id, *broken)
    await exchange.end()
    assert exchange.status == 500
    assert "no message" not in exchange.body.decode() and "Traceback" not in exchange.body.decode()
    await here.quiet()
