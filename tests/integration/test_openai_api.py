"""The shipped HTTP path with the official client: same text streamed and whole, errors as OpenAI's, nothing hangs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.conftest import MAX_BODY_BYTES, MAX_MODEL_LEN
from tests.integration.service import QUIET, Service

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def client_of(service: Service, route: str = "") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{service.url}{route}/v1", api_key="none", max_retries=0, timeout=30)


async def post(service: Service, body: dict[str, Any] | bytes, path: str = "/v1/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(base_url=service.url, timeout=30, trust_env=False) as client:
        return await client.post(path, content=content, headers={"content-type": "application/json"})


async def test_a_chat_streams_the_text_that_it_answers_whole(service: Service) -> None:
    async with client_of(service) as client:
        chat: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 40}
        whole = await client.chat.completions.create(**chat)
        stream = await client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    choice = whole.choices[0]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert "".join(texts) == choice.message.content != ""
    assert [reason for reason in reasons if reason] == [choice.finish_reason]
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


async def test_every_prompt_and_every_choice_gets_its_own_answer(service: Service) -> None:
    async with client_of(service) as client:
        greedy: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 5}
        alone = [await client.completions.create(prompt=prompt, **greedy) for prompt in ("hello", "world")]
        both = await client.completions.create(prompt=["hello", "world"], n=2, **greedy)
    texts = [answer.choices[0].text for answer in alone]
    assert texts[0] != texts[1]
    assert [(choice.index, choice.text) for choice in both.choices] == [
        (0, texts[0]),
        (1, texts[0]),
        (2, texts[1]),
        (3, texts[1]),
    ]
    assert both.usage is not None and both.usage.completion_tokens == 20


async def test_a_model_lives_under_its_own_route_only(service: Service) -> None:
    async with client_of(service) as client, client_of(service, "/cramped") as cramped:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert [model.id async for model in cramped.models.list()] == ["cramped"]
        assert (await cramped.models.retrieve("cramped")).id == "cramped"
        answer = await cramped.completions.create(model="cramped", prompt="hello", max_tokens=1)
        assert answer.usage is not None and answer.usage.completion_tokens == 1
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="cramped", prompt="hello", max_tokens=1)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("cramped")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"model": "absent"}, 404, "model"),
        ({"model": 7}, 400, "model"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"temperature": 3}, 400, "temperature"),
        ({"top_p": 2}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": [5, 10**6]}, 400, "prompt"),
        ({"stop": [1]}, 400, "stop"),
    ],
)
async def test_what_the_client_got_wrong_is_named(
    service: Service, changes: dict[str, Any], status: int, param: str, stream: bool
) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1, "stream": stream, **changes}
    answer = await post(service, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert str(error["param"]).split("[")[0].split(".")[0] == param


async def test_a_prompt_that_is_too_long_is_told_the_real_limit_and_its_real_length(service: Service) -> None:
    ids = [5] * (MAX_MODEL_LEN + 7)
    answer = await post(service, {"model": "tiny", "prompt": ids, "stream": True})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in error["message"] and str(MAX_MODEL_LEN + 7) in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model": "tiny", "prompt": NaN}', b"\xff\xfe"])
async def test_a_body_that_is_no_request_is_refused(service: Service, body: bytes) -> None:
    answer = await post(service, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_above_the_limit_is_refused(service: Service) -> None:
    answer = await post(service, b'{"prompt": "' + b"x" * MAX_BODY_BYTES)
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]


async def test_unknown_routes_and_methods_are_errors_in_the_same_shape(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url, trust_env=False) as client:
        answers = [await client.get("/v1/nothing"), await client.get("/v1/completions"), await client.post("/health")]
    assert [answer.status_code for answer in answers] == [404, 405, 405]
    assert all(set(answer.json()["error"]) == {"message", "type", "param", "code"} for answer in answers)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(service: Service) -> None:
    body = {"model": "cramped", "prompt": "hello", "max_tokens": 100, "ignore_eos": True}
    answers = await asyncio.gather(*(post(service, body, "/cramped/v1/completions") for _ in range(12)))
    codes = sorted(answer.status_code for answer in answers)
    served = codes.count(200)
    assert served >= 3  # one runs, two wait
    assert codes == [200] * served + [503] * (12 - served)
    assert served < 12
    for answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
    assert await service.until_quiet(2.0) == QUIET


async def test_both_replicas_serve(service: Service) -> None:
    async def tokens() -> list[float]:
        async with httpx.AsyncClient(trust_env=False) as client:
            pages = [await client.get(f"http://{r['metrics_address']}/metrics") for r in await service.replicas("tiny")]
        lines = [
            line for page in pages for line in page.text.splitlines() if "brimful_generation_tokens_total{" in line
        ]
        return [float(line.rpartition(" ")[2]) for line in lines]

    before = await tokens()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "ignore_eos": True}
    answers = await asyncio.gather(*(post(service, body) for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    grown = [after - was for was, after in zip(before, await tokens(), strict=True)]
    assert sum(grown) == 160
    assert min(grown) > 0


async def test_no_ingress_process_has_torch(service: Service) -> None:
    for ingress in (await service.status())["ingress"]:
        assert "torch" not in Path(f"/proc/{ingress['pid']}/maps").read_text()
    replica = (await service.replicas("tiny"))[0]
    assert "torch" not in Path(f"/proc/{replica['pid']}/maps").read_text()
    assert "torch" in Path(f"/proc/{replica['engine_pid']}/maps").read_text()


async def test_every_process_is_a_target_for_prometheus(service: Service) -> None:
    status = await service.status()
    processes = [*status["ingress"], *(replica for model in status["models"] for replica in model["up"])]
    async with httpx.AsyncClient(trust_env=False) as client:
        groups = (await client.get(f"{service.url}/metrics/targets")).json()
        targets = [target for group in groups for target in group["targets"]]
        pages = {target: (await client.get(f"http://{target}/metrics")).text for target in targets}
    assert sorted(targets) == sorted(process["metrics_address"] for process in processes)
    assert [kind for group in groups for kind in group["labels"].values()].count("replica") == 3
    for process in processes:
        assert f'"{process["replica_id"]}"' in pages[process["metrics_address"]]


async def test_health_and_readiness(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url, trust_env=False) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).json() == {"status": "ready"}


async def test_a_routing_decision_is_explained_without_being_made(service: Service) -> None:
    replicas = {replica["replica_id"] for replica in await service.replicas("tiny")}
    ingresses = {ingress["replica_id"] for ingress in (await service.status())["ingress"]}
    answer = await post(service, {"model": "tiny", "messages": QUESTION, "max_tokens": 40}, "/route")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert {candidate["replica_id"] for candidate in told["candidates"]} == replicas
    assert told["replica"] == told["candidates"][0]["replica_id"]
    assert told["ingress"] in ingresses
    assert (told["num_replicas"], told["output_tokens"]) == (2, 40)
    assert await service.router_in_flight() == 0
    (alone,) = (await post(service, {"model": "cramped", "prompt": "hello"}, "/cramped/route")).json()["candidates"]
    assert alone["replica_id"] not in replicas
