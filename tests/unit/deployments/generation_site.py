"""The generation endpoints of one model without Ray, and a client whose every move a test decides."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

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
from replica.errors import ErrorInfo
from replica.metrics import Metrics
from replica.model.api import ModelShape
from replica.model_card import TextBundle
from replica.request import FinishReason, StreamMessage, TokenEvent
from tests.tokenizer_families import byte_level, card

TOKENIZER = byte_level()
SHAPE = ModelShape(64, 16, TOKENIZER.vocab_size, 256, (1,))
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


class CountingThreads(ThreadPoolExecutor):
    """Notes the names of what it is given to do."""

    def __init__(self, max_workers: int) -> None:
        super().__init__(max_workers)
        self.done: list[str] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.done.append(fn.__name__)
        return super().submit(fn, *args, **kwargs)


class Site:
    """An ingress's routes with one model "m" behind a fake client."""

    def __init__(self, client: FakeModelClient, loaded: bool = True, **settings: Any) -> None:
        self.client = client
        self.threads = CountingThreads(1)
        self.metrics = Metrics(INGRESS_METRICS, {"ingress": "i"})
        self.edge = Edge(
            settings=IngressSettings(**settings),
            leases=Leases("lease", lambda: 0.0),
            in_flight=InFlight(settings.get("max_in_flight", 10)),
            metrics=EdgeMetrics(self.metrics),
            threads=self.threads,
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
            "client": ("127.0.0.1", 1),
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
