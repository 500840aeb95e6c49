"""The generation endpoints without Ray: what a client gets at every stage, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from replica.config import SchedulerConfig
from replica.errors import EngineDead
from replica.request import FinishReason, StreamMessage, TokenEvent
from tests.unit.deployments.generation_site import TAKEN, asked, failed, site, token
from tests.unit.deployments.lease_parts import refusal
from tests.unit.router.loads import report


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_a_replica_that_is_lost_costs_the_client_nothing(chat: bool, stream: bool) -> None:
    here = site()
    body = asked(stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    if chat:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    exchange = await here.send(body, "/v1/chat/completions" if chat else "/v1/completions")
    request_id = await here.called()
    here.client.say(request_id, TAKEN, token("Par"), EngineDead("gone"))
    while len(here.client.requests) < 2:
        await asyncio.sleep(0)
    rest = here.client.requests[1]
    assert (rest.request_id, rest.prior_output_ids) == (f"{request_id}~0.1", (7,))
    assert rest.sampling.seed is not None
    assert rest.sampling == here.client.requests[0].sampling
    here.client.say(rest.request_id, StreamMessage("r0", (TokenEvent(0, (8,), "is", 2, FinishReason.STOP),)), None)
    await exchange.end()
    parts = [json.loads(line.removeprefix("data: ")) for line in exchange.body.decode().split("\n") if "{" in line]
    choices = [choice for part in parts for choice in part["choices"]]
    said = [choice.get("text") or choice.get("delta") or choice.get("message") or "" for choice in choices]
    texts = [part if isinstance(part, str) else part.get("content", "") for part in said]
    assert ("".join(texts), exchange.status) == ("Paris", 200)
    assert parts[-1]["usage"]["completion_tokens"] == 2
    route = "/v1/chat/completions" if chat else "/v1/completions"
    assert here.count("http_continuations_total", route=route) == 1
    assert here.count("http_stream_errors_total", route=route) == 0
    await here.quiet()


@pytest.mark.parametrize(("wait_s", "asks_again"), [(0.0, False), (15.0, True)])
async def test_an_answer_that_nobody_continues_at_once_waits_as_long_as_it_may(wait_s: float, asks_again: bool) -> None:
    here = site(continuation_wait_s=wait_s)
    exchange = await here.send(asked(stream=True))
    request_id = await here.called()
    here.client.say(request_id, TAKEN, token("Par"), EngineDead("gone"))
    while len(here.client.requests) < 2:
        await asyncio.sleep(0)
    here.client.say(f"{request_id}~0.1", refusal("r0", "queue_full"))
    if asks_again:
        while len(here.client.requests) < 3:
            await asyncio.sleep(0.01)
        here.client.say(f"{request_id}~0.1", TAKEN, token("is", FinishReason.STOP), None)
    await exchange.end()
    assert (b"engine_dead" in exchange.body, b"[DONE]" in exchange.body) == (not asks_again, asks_again)
    await here.quiet()


async def test_a_failure_after_the_first_token_is_an_event_and_ends_the_stream() -> None:
    here = site(max_continuations=0)
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


@pytest.mark.parametrize(
    ("num_bytes", "done"), [(2**16 - 100, ["_requests"]), (2**16 + 100, ["parse_completion", "_requests"])]
)
async def test_a_large_body_is_parsed_beside_the_event_loop(num_bytes: int, done: list[str]) -> None:
    here = site()
    exchange = await here.send(asked(prompt="x" * num_bytes))
    await exchange.end()
    assert (exchange.status, here.threads.done) == (400, done)


async def test_while_draining_open_streams_go_on_and_new_requests_are_told_to_come_back() -> None:
    here = site()
    first = await here.send(asked(stream=True))
    request_id = await here.called()
    here.edge.in_flight.draining = True
    second = await here.send(asked())
    await second.end()
    assert (second.status, second.error["code"], second.header["retry-after"]) == (503, "unavailable", "5")
    end = TokenEvent(0, (1,), "x", 1, FinishReason.STOP)
    here.client.say(request_id, TAKEN, StreamMessage("r0", (end,)), None)
    await first.end()
    assert first.status == 200
    assert first.body.endswith(b"data: [DONE]\n\n")
    assert here.edge.in_flight.count == 0


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
